"""A report as text: what is shown, to the letter, and that a log cannot steer it."""
import csv
import io
import json

import pytest
from helpers import CLI, call, run
from lines import write_set

from mlperf_rn50.study.report_data import render_csv, render_json
from mlperf_rn50.study.report_text import render_markdown, render_table
from mlperf_rn50.study.scaling import make_studies
from mlperf_rn50.study.systems import load_systems

HOSTILE = '<script>alert(1)</script>|`=1+1\x1b[31m"'


@pytest.fixture
def studies(tmp_path):
    write_set(tmp_path / 'sweep/1x4', 2, epoch_s=lambda k: 60.0 + 6 * k, eval_s=0.0)
    write_set(tmp_path / 'sweep/2x4', 2, nodes=2, ranks=8, batch=128, epoch_s=40.0, eval_s=0.0,
              status=lambda k: 'success' if k else 'aborted')
    return make_studies(load_systems([tmp_path]))


def test_the_answer_to_the_letter(studies):
    assert render_table(studies).startswith('''\
sweep: Top-1 75.90 % on ImageNet
================================

Epochs to converge and time to train
system      nodes    accelerators    batch    converged    epochs to converge    mean epochs    time, min  which is      images/s    s/epoch    speed-up    efficiency
--------  -------  --------------  -------  -----------  --------------------  -------------  -----------  ----------  ----------  ---------  ----------  ------------
1x4             1               4       64        2 / 2                  2, 2            2.0  2.10 ± 0.14  mean of 2       20,336      63.00         1.0         100 %
2x4             2               8      128        1 / 2                     2            2.0         1.33  mean of 1       32,029      40.00         1.6          79 %
''')  # noqa: E501


def test_json_has_the_documented_keys(studies):
    found = json.loads(render_json(studies))
    assert list(found) == ['format', 'version', 'systems']
    first, second = found['systems']
    assert set(first) == {
        'round', 'benchmark', 'org', 'system', 'study', 'platform', 'num_nodes', 'num_accelerators', 'accelerator',
        'framework', 'num_ranks', 'global_batch_size', 'target_accuracy',
        'optimizer', 'dataset', 'is_imagenet', 'num_runs', 'num_converged', 'runs',
        'refusal', 'epochs_to_converge_mean', 'score_minutes', 'official_score_minutes', 'time_to_train_mean_s',
        'time_to_train_spread_s', 'images_per_s', 'seconds_per_epoch', 'time_parts_s',
        'node_hours', 'price_per_node_hour', 'cost', 'cpu_kwh', 'gpu_kwh', 'images_per_joule',
        'energy_not_measured',
        'baseline', 'speedup', 'efficiency', 'throughput_gain', 'epoch_ratio',
        'share_ratio', 'rcp', 'warnings'}
    assert set(first['runs'][0]) == {'file', 'status', 'epochs_to_converge', 'time_to_train_s', 'final_accuracy',
                                     'seed', 'last_epoch', 'age_s', 'warnings', 'evaluations', 'lines',
                                     'sources', 'energy_s', 'cpu_joules', 'gpu_joules', 'energy_of_nodes',
                                     'energy_not_measured'}
    assert (second['num_runs'], second['num_converged'], second['score_minutes']) == (2, 1, None)
    assert second['runs'][0]['epochs_to_converge'] is None and second['runs'][0]['status'] == 'aborted'
    assert first['time_parts_s'] == {'init': 4.0, 'first_epoch': 63.0, 'later_epochs': 63.0, 'evaluation': 0.0,
                                     'other': 0.0}


@pytest.fixture
def hostile(tmp_path):
    write_set(tmp_path / '=cmd|x', 1, submission_org=HOSTILE, dataset=HOSTILE, nodes=HOSTILE, opt_name2=HOSTILE)
    return make_studies(load_systems([tmp_path]))


def test_a_log_steers_neither_terminal_nor_markdown_nor_spreadsheet(hostile):
    assert '\x1b' not in render_table(hostile) + render_markdown(hostile) + render_csv(hostile)
    markdown = render_markdown(hostile)
    assert '<script' not in markdown and '\\|' in markdown
    row = next(csv.DictReader(io.StringIO(render_csv(hostile))))
    assert row['system'] == "'=cmd|x"


def test_the_command_prints_text_and_nothing_else(tmp_path):
    write_set(tmp_path / 'box', 5)
    for form, start in [('table', 'test_the'), ('markdown', '## '), ('csv', 'round,benchmark'), ('json', '{'),
                        ('html', '<!DOCTYPE html>')]:
        done = call('report', tmp_path, '--format', form)
        assert (done.returncode, done.stderr) == (0, '') and done.stdout.startswith(start)
    done = call('report', tmp_path, '--baseline', 'nobody')
    assert (done.returncode, done.stdout) == (2, '') and 'expected one of: box' in done.stderr


@pytest.mark.parametrize('name', ['prepare', 'report'])
def test_help_does_not_wait_for_heavy_imports(name):
    code = (f"import sys; sys.argv = ['mlperf-rn50', {name!r}, '--help']\n"
            'from mlperf_rn50.cli import main\n'
            'try: main()\nexcept SystemExit: pass\n'
            "print([m for m in ('mxnet', 'nvidia', 'horovod', 'pandas', 'scipy', 'matplotlib', 'jinja2', 'numpy', "
            "'jsonargparse', 'yaml', 'mlperf_logging') "
            'if m in sys.modules])')
    done = run([CLI[0], '-c', code])
    assert done.stdout.splitlines()[-1] == '[]' and 'examples:' in done.stdout
