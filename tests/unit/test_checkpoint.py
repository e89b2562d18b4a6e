"""Checkpoints: whole or refused, and never a trap."""
import hashlib
import json
import pickle
import subprocess
import sys
import time

import numpy as np
import pytest

from mlperf_rn50.errors import CheckpointError
from mlperf_rn50.train.checkpoint import check_arrays, clear_unfinished, list_checkpoints, load, save
from mlperf_rn50.train.progress import Progress

ARRAYS = {'model/a': np.arange(6, dtype=np.float32).reshape(2, 3), 'optimizer/a': np.ones(3, np.float16)}


def progress(step=5, **keys):
    return Progress(**{**dict(step=step, seed=1, world_size=2, best_top1=0.5, clock_s=1.5, global_batch_size=8,
                           lr_batch_size=8, num_train=100, result_index=0, nodes=[0, 0],
                              num_resumes=0, last_lr=0.3), **keys})


def test_round_trip(tmp_path):
    path = save(tmp_path, progress(), ARRAYS, keep=2)
    got, arrays = load(path)
    assert got == progress() and set(arrays) == set(ARRAYS)
    for name, array in arrays.items():
        assert array.dtype == ARRAYS[name].dtype
        np.testing.assert_array_equal(array, ARRAYS[name])


def test_the_last_ones_are_kept_in_the_order_of_their_steps(tmp_path):
    for step in (9, 10, 100_000_000, 11):
        save(tmp_path, progress(step), ARRAYS, keep=3)
    assert [load(p)[0].step for p in list_checkpoints(tmp_path)] == [10, 11, 100_000_000]


def test_unfinished_ones_are_not_seen(tmp_path):
    (tmp_path / '.step_00000009.123.tmp').mkdir()
    (tmp_path / 'step_x').mkdir()
    assert list_checkpoints(tmp_path) == []
    clear_unfinished(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ['step_x']


@pytest.mark.parametrize('name, damage, message', [
    ('arrays.npz', lambda b: b[:-1], 'arrays.npz is damaged'),
    ('arrays.npz', lambda b: b[:100] + bytes([b[100] ^ 1]) + b[101:], 'arrays.npz is damaged'),
    ('state.json', lambda b: b[:50], 'not a checkpoint of this program'),
    ('state.json', lambda b: b'[]', 'not a checkpoint of this program'),
    ('state.json', lambda b: b'{"format": 99}', 'got format 99'),
    ('state.json', lambda b: b.replace(b'"seed"', b'"sead"'), 'not a checkpoint of this program'),
    ('state.json', lambda b: b.replace(b'"seed": 1', b'"seed": "1"'), "seed: got '1', expected a number"),
    ('state.json', lambda b: b.replace(b'"step": 6', b'"step": true'), 'step: got True, expected a number'),
    ('state.json', lambda b: b'\xff\xfe', 'not a checkpoint of this program'),
])
def test_damage_is_refused_and_the_one_before_offered(tmp_path, name, damage, message):
    first = save(tmp_path, progress(5), ARRAYS, keep=2)
    second = save(tmp_path, progress(6), ARRAYS, keep=2)
    (second / name).write_bytes(damage((second / name).read_bytes()))
    with pytest.raises(CheckpointError, match=message) as e:
        load(second)
    assert f'--resume {first}' in str(e.value) and '\n' not in str(e.value)


def test_a_missing_part_is_named(tmp_path):
    path = save(tmp_path, progress(), ARRAYS, keep=2)
    (path / 'arrays.npz').unlink()
    with pytest.raises(CheckpointError, match='arrays.npz is missing; there is none before it'):
        load(path)


class _Trap:
    def __reduce__(self):
        return (open, ('/nonexistent/must-not-run', 'w'))


def forge(path):
    """Makes the checksum of a checkpoint fit what is in it."""
    state = json.loads((path / 'state.json').read_text())
    state['sha256'] = hashlib.sha256((path / 'arrays.npz').read_bytes()).hexdigest()
    (path / 'state.json').write_text(json.dumps(state))


def test_pickles_are_not_loaded(tmp_path):
    path = save(tmp_path, progress(), ARRAYS, keep=2)
    np.savez(path / 'arrays.npz', **{'model/a': np.array([_Trap()], dtype=object)})
    forge(path)
    with pytest.raises(CheckpointError, match='allow_pickle=False'):
        load(path)
    (path / 'arrays.npz').write_bytes(pickle.dumps(_Trap()))
    forge(path)
    with pytest.raises(CheckpointError, match='pickle'):
        load(path)


def test_arrays_of_another_model_are_named(tmp_path):
    wanted = {'model/a': (2, 3), 'optimizer/a': (3,)}
    check_arrays(tmp_path, ARRAYS, wanted)
    with pytest.raises(CheckpointError, match='model/b is missing'):
        check_arrays(tmp_path, ARRAYS, {**wanted, 'model/b': (1,)})
    with pytest.raises(CheckpointError, match='optimizer/a is not of this run'):
        check_arrays(tmp_path, ARRAYS, {'model/a': (2, 3)})
    with pytest.raises(CheckpointError, match=r'got shape \(3,\), expected \(4,\)'):
        check_arrays(tmp_path, ARRAYS, {**wanted, 'optimizer/a': (4,)})


def test_a_folder_that_cannot_be_written_loses_nothing(tmp_path):
    first = save(tmp_path, progress(5), ARRAYS, keep=2)
    with pytest.raises(CheckpointError, match='cannot write the checkpoint'):
        save(tmp_path / 'step_00000005' / 'state.json', progress(6), ARRAYS, keep=2)  # a file in the way
    assert load(first)[0].step == 5
    assert json.loads((first / 'state.json').read_text())


WRITER = '''
import sys
from pathlib import Path
from functools import partial
import numpy as np
from mlperf_rn50.train.checkpoint import save
from mlperf_rn50.train.progress import Progress
from mlperf_rn50.train.saver import Saver
saver, folder = Saver(), Path(sys.argv[1])
for step in range(1, 10**6):
    progress = Progress(step, 1, 1, 0.5, 1.0, 8, 8, 100, 0, [0])
    saver.submit(partial(save, folder, progress, {'a': np.full(500_000, step, np.float32)}, 2))
    if step == 3:
        print('started', flush=True)
'''


@pytest.mark.parametrize('after_s', [0.0, 0.003, 0.007, 0.011, 0.016, 0.022, 0.03])
def test_killed_at_any_moment_the_last_whole_one_is_there(tmp_path, after_s):
    process = subprocess.Popen([sys.executable, '-c', WRITER, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == 'started\n'
    time.sleep(after_s)
    process.kill()
    process.wait()
    kept = list_checkpoints(tmp_path)
    assert kept
    for path in kept:
        found, arrays = load(path)
        assert (arrays['a'] == found.step).all() and path.name == f'step_{found.step:08d}'
    clear_unfinished(tmp_path)
    assert sorted(tmp_path.iterdir()) == kept
