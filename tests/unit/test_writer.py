"""Run log: keys, order of events, resume, and write errors."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mlperf_logging.mllog import constants
from sample_log import SGD, write_run

from mlperf_rn50.analysis.sets.load import load_run_sets
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.errors import StorageError
from mlperf_rn50.mllog import keys
from mlperf_rn50.mllog.findings import make_finding
from mlperf_rn50.mllog.read.reader import read_events, read_run
from mlperf_rn50.mllog.writer import RunLog
from mlperf_rn50.train.options import ScheduleConfig


def events(path, line_format='MLLOG', key=None):
    found = [e for _, e in read_events(path)]
    return [e for e in found if e.line_format == line_format and key in (None, e.key)]


def values(path, key, line_format='MLLOG'):
    return [e.value for e in events(path, line_format, key)]


def test_keys_match_mllog_constants():
    own_keys = {name: value for name, value in vars(keys).items() if name.isupper()}
    assert own_keys and own_keys == {name: getattr(constants, name, None) for name in own_keys}


ORDER = (
    'submission_benchmark cache_clear init_start seed global_batch_size init_stop run_start '
    'train_samples block_start epoch_start epoch_stop eval_start eval_accuracy eval_stop '
    'block_stop run_stop'
).split()


def test_events_follow_the_rules_with_epochs_from_one_and_in_v05_from_zero(tmp_path):
    path = write_run(tmp_path / 'result_0.txt')
    logged, tags = ([e.key for e in events(path, f)] for f in ('MLLOG', 'MLPv0.5.0'))
    places = [logged.index(key) for key in ORDER]
    assert places == sorted(places)
    assert tags[:2] == ['run_clear_caches', 'run_start'] and tags[-2:] == ['run_stop', 'run_final']
    for key, epochs in {
        **dict.fromkeys(('epoch_start', 'epoch_stop', 'tracked_stats'), [1, 2, 3, 4]),
        **dict.fromkeys(('eval_start', 'eval_accuracy', 'eval_stop'), [2, 4]),
    }.items():
        assert [e.metadata['epoch_num'] for e in events(path, key=key)] == epochs
    assert values(path, 'train_epoch', 'MLPv0.5.0') == [0, 1, 2, 3]
    curve = {1: 0.1, 3: 0.7595}
    assert values(path, 'eval_accuracy') == [*curve.values()]
    of_v05 = [(v['epoch'], v['value']) for v in values(path, 'eval_accuracy', 'MLPv0.5.0')]
    assert dict(of_v05) == curve
    blocks = [e.metadata for e in events(path, key='block_start')]
    assert [(b['first_epoch_num'], b['epoch_count']) for b in blocks] == [(1, 2), (3, 2)]
    (cleared,) = events(path, key='cache_clear')
    assert (cleared.value, cleared.metadata['reason']) == (True, 'a reason')
    assert values(path, 'run_clear_caches', 'MLPv0.5.0') == [True]
    for line_format in ('MLLOG', 'MLPv0.5.0'):
        assert {e.metadata['file'] for e in events(path, line_format)} == {'tests/sample_log.py'}
    # the official checker sorts the lines
    last = sorted(line for line in path.read_text().splitlines() if 'MLPv0.5.0' in line)[-2:]
    assert 'run_stop' in last[0] and 'run_final' in last[1]


@pytest.mark.parametrize('num_ranks, expected', [(1, 1), (3, 2), (8, 4)])
def test_partly_used_accelerator_counts(tmp_path, num_ranks, expected):
    config = replace(
        SGD,
        run=replace(SGD.run, ranks_per_device=2),
        train=replace(SGD.train, device='gpu'),
    )
    log = RunLog(tmp_path / 'log', None)
    log.data(config, num_ranks, 1)
    log.close()
    assert values(tmp_path / 'log', 'accelerators_per_node') == [expected]


def test_late_line_on_a_clock_does_not_move_the_end_of_a_run(tmp_path, monkeypatch):
    """Checks after the last evaluation take 2 s, in which a step of the wall clock is noticed."""
    now_s = [0.0]
    monkeypatch.setattr('time.monotonic', lambda: now_s[0])
    log = RunLog(tmp_path / 'log', None)
    log.run_start()
    now_s[0] = 10.0
    log.eval_stop(0, 0.8)
    now_s[0] = 12.0
    log.clock_step('h1', 3.0)
    log.run_stop('converged')
    log.close()
    start, stop = (events(tmp_path / 'log', key=k)[0] for k in ('run_start', 'run_stop'))
    assert stop.time_s - start.time_s == pytest.approx(10.0, abs=0.01)


def test_times_follow_the_monotonic_clock_when_the_wall_clock_jumps(tmp_path, monkeypatch):
    path, wall_s = tmp_path / 'result_0.txt', 1.6e9
    monkeypatch.setattr('time.time', lambda: wall_s)
    log = RunLog(path, tmp_path / 'v06.txt')
    log.init_start()
    wall_s += 600
    log.run_start()
    log.clock_step('h1', 600.0)
    log.run_stop('converged')
    log.close()
    for name, line_format, num in (
        ('result_0.txt', 'MLLOG', 4),
        ('result_0.txt', 'MLPv0.5.0', 3),
        ('v06.txt', 'MLL', 4),
    ):
        found = events(tmp_path / name, line_format)
        assert [round(e.time_s - 1.6e9) for e in found] == [0] * num
    assert values(path, 'clock_step') == [600.0]
    stated = make_finding('clock_jumped', None, 'h1', 600.0).text
    assert stated in [f.text for f in read_run(path).findings]


def test_log_contains_shuffle_mode(tmp_path):
    log = RunLog(tmp_path / 'log', None)
    for shuffle in ('global', 'node'):
        log.data(replace(SGD, data=DataConfig(shuffle=shuffle, node_rotation_epochs=3)), 8, 2)
    log.eval_stop(0, np.float32(0.5))
    log.close()
    logged = [e.metadata for e in events(tmp_path / 'log', key='dataset')]
    found = [(m['shuffle'], m.get('node_rotation_epochs')) for m in logged]
    assert found == [('global', None), ('node', 3)]
    first, second = values(tmp_path / 'log', 'input_order', 'MLPv0.5.0')
    assert 'new global permutation' in first and 'a new part every 3 epochs' in second
    assert values(tmp_path / 'log', 'eval_accuracy') == [0.5]  # a plain float


def test_lines_are_only_in_the_file_and_once(tmp_path, capfd):
    path = tmp_path / 'result_0.txt'
    log = RunLog(path, None)
    log.run_start()
    log.epoch_start(0)
    log.close()
    assert capfd.readouterr() == ('', '')
    text = path.read_text()
    # an epoch in both vocabularies
    assert len(text.splitlines()) == len(set(text.splitlines())) == 3
    with pytest.raises(FileExistsError):
        RunLog(path, None)
    assert path.read_text() == text


def test_torn_last_line_is_removed(tmp_path):
    path = tmp_path / 'result_0.txt'
    path.write_text('whole\n:::MLLOG {"namespace": "", "ti')
    log = RunLog(path, None, is_resumed=True)
    log.run_resumed(10, 2, 33.0)
    log.close()
    first, _ = path.read_text().splitlines()
    (resumed,) = events(path, key='run_resumed')
    assert first == 'whole' and resumed.metadata['epoch_num'] == 3


def test_full_disk_is_an_error(tmp_path):
    log = RunLog(Path('/dev/full'), None, is_resumed=True)
    with pytest.raises(StorageError, match='/dev/full: cannot write: No space left on device; the'):
        log.seed(1)


def test_constant_rate_is_read_back(tmp_path):
    config = replace(SGD, schedule=ScheduleConfig(decay='step', step_epochs=()))
    write_run(tmp_path / 'result_0.txt', config)
    recipe = load_run_sets([tmp_path])[0].recipe
    assert (recipe.decay, recipe.step_epochs) == ('step', ())


@pytest.mark.parametrize('opt_name', ['lars', 'sgd'])
@pytest.mark.parametrize('decay', ['poly', 'cosine', 'step'])
def test_shape_of_the_decay_is_read_back(tmp_path, opt_name, decay):
    schedule = ScheduleConfig(decay=decay, step_epochs=(1.0, 2.0))
    optimizer = replace(SGD.optimizer, name=opt_name)
    config = replace(SGD, schedule=schedule, optimizer=optimizer)
    path = write_run(tmp_path / 'result_0.txt', config)
    [run_set] = load_run_sets([tmp_path])
    assert run_set.recipe.decay == decay
    assert values(path, 'model_exclude_bn_from_l2', 'MLPv0.5.0') == [True]
    keys = ' '.join(e.key for e in events(path))
    assert ('lars' in keys) == (opt_name == 'lars') and ('poly' in keys) == (decay == 'poly')
    boundaries = values(path, 'opt_learning_rate_decay_boundary_epochs')
    assert boundaries == ([[1.0, 2.0]] if decay == 'step' else [])
    assert values(path, 'opt_learning_rate_decay_factor') == ([0.1] if decay == 'step' else [])
