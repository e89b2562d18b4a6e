"""Create the table of published systems, from a CSV file of values read from their logs and descriptions.

python docs/make_published.py published_runs.csv > mlperf_rn50/analysis/sets/published.json
"""
import csv
import json
import statistics
import sys
from itertools import groupby

from mlperf_rn50.analysis.sets.time_parts import make_times
from mlperf_rn50.mllog.run import TARGET, V05_TARGET

SOURCE = ('MLPerf Training results, github.com/mlcommons/training_results_v0.5, v0.6, v0.7 and v1.0: the systems that '
          'ran ResNet-50 on MXNet')
# Values from the submitted settings, which are not logged (cited in launch/configs/).
V05_WARMUP_EPOCHS = {1664: 5, 4096: 8, 16384: 15}
V05_STEP_EPOCHS = [30, 60, 80]
V06_MOMENTUM = 0.9
LABEL_SMOOTHING = 0.1  # since v0.6
POLY_POWER = 2


def number(text):
    """Return a number; None for any other text."""
    try:
        value = float(text)
    except ValueError:
        return None
    return int(value) if value.is_integer() else value


def make_run(row, target):
    """Return name, status, epochs, seconds and curve (epoch, Top-1) of a run."""
    curve = [[int(epoch), float(accuracy)] for epoch, accuracy in (x.split(':') for x in row['acc_curve'].split())]
    is_converged = row['status'] in ('', 'success') and curve[-1][1] >= target
    return [row['file'], 'converged' if is_converged else 'aborted', int(row['epochs']),
            round(float(row['seconds']), 3), curve]


def make_optimizer(row):
    """Return the logged optimizer keys."""
    keys = [k for k in row if k == 'opt_name' or 'opt_' in k or k in ('lars_epsilon', 'model_l2_regularization')]
    return {k: value for k in keys if (value := row[k] if k == 'opt_name' else number(row[k])) is not None}


def make_unlogged(row):
    """Return the recipe fields that were submitted but not logged."""
    if row['round'] == 'v0.5':
        return {'warmup_epochs': V05_WARMUP_EPOCHS[int(row['global_batch_size'])], 'decay': 'step',
                'step_epochs': V05_STEP_EPOCHS, 'label_smoothing': 0}
    later = {'decay': 'poly', 'poly_power': POLY_POWER, 'label_smoothing': LABEL_SMOOTHING}
    return {**later, 'momentum': V06_MOMENTUM} if row['round'] == 'v0.6' else later


def make_set(rows):
    row, target = rows[0], V05_TARGET if rows[0]['round'] == 'v0.5' else TARGET
    runs = [make_run(r, target) for r in rows]
    converged = [(run, r) for run, r in zip(runs, rows) if run[1] == 'converged']
    times = make_times(statistics.fmean(float(r['train_epoch_mean_s']) for _, r in converged),
                       [(run[3], run[2], len(run[4]), float(r['eval_s'])) for run, r in converged])
    return {'round': row['round'], 'org': row['org'], 'name': row['system'], 'num_nodes': int(row['nodes']),
            'num_accelerators': int(row['gpus']), 'num_ranks': number(row['ranks_in_log']),
            'accelerator': None if row['accelerator'] == 'N/A' else row['accelerator'],
            'global_batch_size': int(row['global_batch_size']), 'target_accuracy': target,
            'optimizer': make_optimizer(row), 'unlogged': make_unlogged(row),
            'times': [round(t, 4) for t in (times.epoch_s, times.evaluation_s, times.outside_s)], 'runs': runs}


def main():
    with open(sys.argv[1], newline='', encoding='utf-8') as f:
        groups = groupby(csv.DictReader(f), lambda r: (r['round'], r['org'], r['system']))
        sets = [json.dumps(make_set(list(rows))) for _, rows in groups]
    print('{"source": ' + json.dumps(SOURCE) + ',\n"sets": [\n' + ',\n'.join(sets) + '\n]}')


if __name__ == '__main__':
    main()
