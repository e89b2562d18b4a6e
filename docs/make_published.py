"""Create the table of published run sets from the logs of all rounds.

python docs/make_published.py FOLDER [FILE]

FOLDER contains round/organisation/results/system/resnet/result_<k>.txt. FILE (default: the packaged
table) is replaced. Facts that the logs lack are kept from the previous FILE, as are sets that
FOLDER lacks.
"""

import json
import sys
from collections import Counter
from pathlib import Path

from mlperf_rn50.analysis.sets.load import load_run_sets
from mlperf_rn50.analysis.sets.published import is_mxnet
from mlperf_rn50.files import write_atomically
from mlperf_rn50.mllog.read.description import round_of
from mlperf_rn50.runfolder.jsonl import number

FILE = Path(__file__).parent.parent / 'mlperf_rn50/analysis/sets/published.json'
SOURCE = (
    'MLPerf Training v0.5 to v4.0, github.com/mlcommons/training_results_v0.5 and later: all '
    'ResNet-50 sets'
)
# Values of MXNet sets from the submitted settings, which are not logged (cited in launch/configs/).
V05_WARMUP_EPOCHS = {1664: 5, 4096: 8, 16384: 15, 16640: 15}
V05_STEP_EPOCHS = [30, 60, 80]
V06_MOMENTUM = 0.9
LABEL_SMOOTHING = 0.1  # since v0.6
POLY_POWER = 2
FACTS = (
    'division',
    'framework',
    'accelerator',
    'node_gbit_s',
    'num_nodes',
    'num_accelerators',
    'num_ranks',
    'global_batch_size',
    'target_accuracy',
)
OPTIMIZER_KEYS = ('opt_name', 'lars_epsilon', 'model_l2_regularization')
MAX_NUMBER = 1e12


def place_of(run_set):
    """Return round, organisation and system from the folder names; several v0.5 systems are all
    named tpu."""
    parts = run_set.folder.absolute().parts
    last = max(i for i, name in enumerate(parts) if round_of(name))
    name = parts[-4] if run_set.name == 'tpu' else run_set.name
    return round_of(parts[last]), parts[last + 1], name


def make_run(run):
    """Return name, status, epochs, seconds and curve (epoch, Top-1) of a run."""
    seconds = None if run.time_to_train_s is None else round(run.time_to_train_s, 3)
    return [
        run.path.name,
        run.status,
        run.last_epoch,
        seconds,
        [[e, round(top1, 5)] for e, top1 in run.curve],
    ]


def make_optimizer(run_set):
    """Return the logged optimizer keys with plain values; of runs that differ, those of the first
    converged run."""
    logged = {
        k: v
        for r in reversed(run_set.converged or run_set.readable)
        for k, v in r.optimizer.items()
    }
    kept = {k: v for k, v in logged.items() if 'opt_' in k or k in OPTIMIZER_KEYS}
    return {
        k: v
        for k, v in kept.items()
        if isinstance(v, (list, bool)) or k == 'opt_name' or number(v, 0, MAX_NUMBER) is not None
    }


def make_unlogged(round_, batch):
    """Return the recipe fields of an MXNet set that were submitted but not logged."""
    if round_ == 'v0.5':
        return {
            'warmup_epochs': V05_WARMUP_EPOCHS[batch],
            'decay': 'step',
            'step_epochs': V05_STEP_EPOCHS,
            'label_smoothing': 0,
        }
    later = {'decay': 'poly', 'poly_power': POLY_POWER, 'label_smoothing': LABEL_SMOOTHING}
    return {**later, 'momentum': V06_MOMENTUM} if round_ == 'v0.6' else later


def make_entry(run_set, previous):
    """Return the entry of a set; previous: its entry in the previous table, or {}."""
    round_, org, name = place_of(run_set)
    # others may differ, because they do not count
    first = (run_set.converged or run_set.readable)[0]
    facts = {
        n: next(
            (v for v in (first.fact(n), getattr(run_set, n), previous.get(n)) if v is not None),
            None,
        )
        for n in FACTS
    }
    if round_ in ('v0.5', 'v0.6') and facts['division'] is None:
        facts['division'] = 'closed'
    times = run_set.times
    entry = {
        'round': round_,
        'org': org,
        'name': name,
        **facts,
        'optimizer': make_optimizer(run_set),
        'times': times
        and [round(t, 4) for t in (times.epoch_s, times.evaluation_s, times.outside_s)],
        'runs': [make_run(r) for r in run_set.counted],
    }
    if is_mxnet(name, facts['framework']):
        entry['unlogged'] = make_unlogged(round_, facts['global_batch_size'])
    if any(r.is_from_0 for r in run_set.counted):
        entry['is_from_0'] = True
    if later := {*map(tuple, previous.get('later', ())), *map(place_of, run_set.later)}:
        entry['later'] = sorted(later)
    if run_set.is_duplicate:
        entry['is_duplicate'] = True
    if run_set.refusal:
        entry['refusal'] = run_set.refusal.partition(', expected')[0]
    return entry


def make_table(run_sets, previous):
    """Return the entries of all readable sets by round, organisation and name, with those of the
    previous table.

    Logs that were submitted again in later rounds are one entry.
    """
    table = {(e['round'], e['org'], e['name']): e for e in previous}
    readable = [s for s in run_sets if s.readable]
    counts = Counter(map(place_of, readable))
    assert max(counts.values()) == 1, [place for place, count in counts.items() if count > 1]
    table.update((place_of(s), make_entry(s, table.get(place_of(s), {}))) for s in readable)
    again = {tuple(place) for e in table.values() for place in e.get('later', ())}
    return [table[place] for place in sorted(table.keys() - again)]


def main():
    path = Path(sys.argv[2]) if len(sys.argv) > 2 else FILE
    run_sets = load_run_sets([Path(sys.argv[1])])
    entries = make_table(run_sets, json.loads(FILE.read_text(encoding='utf-8'))['sets'])
    lines = ',\n'.join(json.dumps(e, separators=(',', ':')) for e in entries)
    write_atomically(path, f'{{"source": "{SOURCE}",\n"sets": [\n{lines}\n]}}\n')
    unread = [s.name for s in run_sets if not s.readable]
    print(
        f'{len(entries)} sets, {path.stat().st_size:,} bytes; no readable log: '
        f'{", ".join(unread) or "none"}'
    )


if __name__ == '__main__':
    main()
