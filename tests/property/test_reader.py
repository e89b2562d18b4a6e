"""Damaged, shuffled and made-up logs: no crash, no success that is not there."""
import json
import sys

import pytest
from helpers import HANG_LIMIT_S, ROOT, run
from hypothesis import given
from hypothesis import strategies as st
from invariants import check_report, check_run
from lines import mllog, run_lines, v05, v06, write_lines

from mlperf_rn50.mlperf import events, keys

KEYS = [value for module in (keys, events) for name, value in vars(module).items()
        if name.isupper() and isinstance(value, str)] + ['opt_x']
V05_KEYS = ['run_clear_caches', 'run_set_random_seed', 'input_batch_size', 'eval_size', 'eval_target', 'train_epoch',
            'eval_start', 'eval_accuracy', 'eval_stop', 'opt_learning_rate', 'run_start', 'run_stop', 'run_final']
VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
                      | st.sampled_from(['resnet', 'lars', 0.76, 64, 1281167, 50000, '4xbox']),
                      lambda inner: st.lists(inner, max_size=2) | st.dictionaries(
                          st.sampled_from(['epoch', 'value', 'throughput', 'learning_rate', 'success', 'x']), inner,
                          max_size=3), max_leaves=4)
METADATA = st.dictionaries(st.sampled_from(['epoch_num', 'first_epoch_num', 'epoch_count', 'status', 'reason',
                                            'is_imagenet', 'clock_s', 'number_of_nodes', 'number_of_ranks',
                                            'global_batch_size']),
                           VALUES | st.sampled_from([1, 2, 3, 'success', True]), max_size=3)
TIMES = st.floats(-1e5, 1e5)
LINES = (st.builds(lambda k, t, v, m: mllog(k, t, v, **m), st.sampled_from(KEYS), TIMES, VALUES, METADATA)
         | st.builds(lambda k, t, v, m: v06(k, t, v, **m), st.sampled_from(KEYS), TIMES, VALUES, METADATA)
         | st.builds(v05, st.sampled_from(V05_KEYS), TIMES, VALUES) | st.text(max_size=20))


@pytest.fixture(scope='module')
def path(tmp_path_factory):
    return tmp_path_factory.mktemp('log') / 'result_0.txt'


def write(path, lines):
    path.write_text('\n'.join(lines), errors='replace')
    return path


@given(lines=st.lists(LINES, max_size=30))
def test_made_up_lines(path, lines):
    if check_run(write(path, lines)):
        check_report(path)


@given(data=st.data())
def test_a_damaged_log_never_becomes_another_success(path, data):
    """Whatever lines are lost, doubled, moved or cut: epochs and target can be missed, never invented."""
    lines = run_lines((0.5, 0.6, 0.7), status='success')  # says success, and never reached 75.9 %
    for _ in range(data.draw(st.integers(1, 6))):
        i, j = (data.draw(st.integers(0, len(lines) - 1)) for _ in (1, 2))
        match data.draw(st.sampled_from(['lose', 'double', 'move', 'cut', 'join'])):
            case 'lose':
                lines.pop(i)
            case 'double':
                lines.insert(j, lines[i])
            case 'move':
                lines.insert(j, lines.pop(i))
            case 'cut':
                lines[i] = lines[i][:data.draw(st.integers(0, len(lines[i])))]
            case 'join':
                lines[i] += lines[j]
    found = check_run(write(path, lines))
    assert found is None or found.status != 'converged' or found.division != 'closed'


@pytest.mark.parametrize('num_runs', [1000, pytest.param(15000, marks=pytest.mark.slow)])
def test_a_coverage_guided_fuzzer_finds_nothing(tmp_path, num_runs):
    """tests/fuzz_reader.py runs as long as one likes; here for a number of inputs."""
    corpus = tmp_path / 'corpus'
    for i, lines in enumerate([run_lines((0.76,)), [v05(k, n, 1) for n, k in enumerate(V05_KEYS)],
                               [v06(k, n, 1, epoch_num=1) for n, k in enumerate(KEYS)]]):
        write_lines(corpus / f'{i}.txt', lines)
    words = tmp_path / 'words'
    words.write_text('\n'.join(json.dumps(w) for w in [*KEYS, *V05_KEYS, ':::MLLOG ', ':::MLL ', ':::MLPv0.5.0 resnet ',
                                                       'epoch_num', 'metadata', 'success']) + '\n')
    # Started by another process: the fuzzer takes the peak memory of the one it was forked from for its own.
    done = run(['timeout', HANG_LIMIT_S, sys.executable, ROOT / 'tests/fuzz_reader.py', f'-runs={num_runs}', '-seed=1',
                '-max_len=6000', f'-dict={words}', f'-artifact_prefix={tmp_path}/', corpus])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert f'Done {num_runs} runs' in done.stderr
