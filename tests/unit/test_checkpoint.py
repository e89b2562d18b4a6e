"""Checkpoints: damage, hostile content, retention and background writing."""

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
import tracemalloc
import zipfile
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from lines import run_lines, write_lines

from mlperf_rn50.errors import CheckpointError, DamagedCheckpoint, StorageError
from mlperf_rn50.runfolder.names import RunFolder, list_checkpoints, new_run
from mlperf_rn50.train.checkpoint import checkpoint
from mlperf_rn50.train.checkpoint.best_weights import BackgroundWriter
from mlperf_rn50.train.checkpoint.checkpoint import load, load_newest, save
from mlperf_rn50.train.checkpoint.progress import Progress, TrainerState, dump_state, parse_state
from mlperf_rn50.train.resume import find_resumes

ARRAYS = {
    'model/a': np.arange(6, dtype=np.float32).reshape(2, 3),
    'optimizer/a': np.ones(3, np.float16),
}
STATE = TrainerState(ARRAYS, 0.3, 512.0, 7)


def progress(step=5, **keys):
    return Progress(
        **{
            **dict(
                step=step,
                seed=1,
                world_size=2,
                best_top1=0.5,
                clock_s=1.5,
                global_batch_size=8,
                lr_batch_size=8,
                num_train=100,
                result_index=0,
                nodes=[0, 0],
                num_resumes=0,
                config={'schedule': {'base_lr': 0.3}},
            ),
            **keys,
        }
    )


def test_round_trip_of_numeric_arrays(tmp_path):
    given = {
        **ARRAYS,
        'a/b': np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        'c': np.float32(3),
        'd': np.zeros((0, 3)),
        'e': np.arange(3) > 1,
        'f': np.arange(5, dtype='>i2'),
    }
    got, trainer = load(save(tmp_path, progress(), replace(STATE, arrays=given), keep=2))
    assert (got, replace(trainer, arrays=ARRAYS)) == (progress(), STATE) and set(
        trainer.arrays
    ) == set(given)
    for name, array in trainer.arrays.items():
        assert (array.dtype, array.shape) == (given[name].dtype, given[name].shape) and (
            array == given[name]
        ).all()


def test_state_of_an_earlier_version_has_no_digest_of_the_images():
    tree = dump_state(progress(), STATE)
    assert parse_state({k: v for k, v in tree.items() if k != 'data_sha256'})[0] == progress(
        data_sha256=''
    )
    with pytest.raises(ValueError, match='the state lacks keys'):
        parse_state({k: v for k, v in tree.items() if k != 'seed'})


def test_checkpoint_of_version_0_5_is_read(tmp_path):
    path = save(tmp_path, progress(40), STATE, keep=2)
    (path / 'state.json').write_text(
        checkpoint._seal(
            {
                'format': 4,
                'state': {
                    'step': 40,
                    'seed': 3,
                    'world_size': 2,
                    'best_top1': 0.25,
                    'clock_s': 12.5,
                    'global_batch_size': 64,
                    'lr_batch_size': 128,
                    'num_train': 1437,
                    'result_index': 1,
                    'nodes': [0, 1],
                    'num_resumes': 2,
                    'last_lr': 0.02,
                    'loss_scale': 1024.0,
                    'num_finite_steps': 17,
                    'images': 640,
                    'train_s': 6.25,
                    'config': {
                        'run': {'seed': 3},
                        'schedule': {'base_lr': 0.02, 'step_epochs': [30.0]},
                    },
                    'data_sha256': 'ab',
                },
                'arrays_sha256': hashlib.sha256((path / 'arrays.npz').read_bytes()).hexdigest(),
            }
        )
    )
    read, trainer = load(path)
    assert read == Progress(
        step=40,
        seed=3,
        world_size=2,
        best_top1=0.25,
        clock_s=12.5,
        global_batch_size=64,
        lr_batch_size=128,
        num_train=1437,
        result_index=1,
        nodes=[0, 1],
        num_resumes=2,
        images=640,
        train_s=6.25,
        config={'run': {'seed': 3}, 'schedule': {'base_lr': 0.02, 'step_epochs': [30.0]}},
        data_sha256='ab',
    )
    assert replace(trainer, arrays={}) == TrainerState(
        {}, last_lr=0.02, loss_scale=1024.0, num_finite_steps=17
    )


def test_entries_of_new_folders_are_synced_by_the_first_checkpoint(tmp_path, monkeypatch):
    synced, sync = [], os.fsync

    def recording(fd):
        synced.append(Path(os.readlink(f'/proc/self/fd/{fd}')))
        sync(fd)

    monkeypatch.setattr(os, 'fsync', recording)
    run = new_run(tmp_path / 'logs/run')
    save(run.checkpoints, progress(1), STATE, keep=2)
    assert {tmp_path, tmp_path / 'logs', run.dir, run.checkpoints} < set(synced)
    synced.clear()
    save(run.checkpoints, progress(2), STATE, keep=2)
    assert run.checkpoints in synced and run.dir not in synced


def test_newest_checkpoints_by_step_are_kept(tmp_path):
    for step in (9, 10, 100_000_000, 11):
        save(tmp_path, progress(step), STATE, keep=3)
    assert [load(p)[0].step for p in list_checkpoints(tmp_path)] == [10, 11, 100_000_000]


def test_unfinished_checkpoints_and_other_names_are_ignored(tmp_path):
    (tmp_path / '.step_00000009.123.tmp').mkdir()
    (tmp_path / 'step_x').mkdir()
    assert list_checkpoints(tmp_path) == []
    checkpoint.clear_unfinished(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ['step_x']
    names = (
        'step_x',
        'step_',
        'step_²',
        'step_٣',
        f'step_{"9" * 5000}',
        'damaged_step_5',
        'step_5',
    )
    assert [n for n in names if checkpoint.is_checkpoint_name(n)] == ['step_5']


@pytest.mark.parametrize('name', ['state.json', 'arrays.npz'])
def test_named_pipe_in_a_checkpoint_does_not_block(tmp_path, name):
    path = save(tmp_path, progress(), STATE, keep=2)
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(CheckpointError, match='got a named pipe, expected a file'):
        load(path)


@pytest.mark.parametrize(
    'name, damage, message',
    [
        ('arrays.npz', lambda b: b[:-1], 'arrays.npz is damaged'),
        ('state.json', lambda b: b[:50], 'not a checkpoint of this program'),
        ('state.json', lambda b: b'[' * 100_000, 'nested too deeply'),
        ('state.json', lambda b: b' ' * (1 << 25), 'is larger than'),
    ],
)
def test_damaged_checkpoint_is_refused_and_the_previous_one_suggested(
    tmp_path, name, damage, message
):
    first = save(tmp_path, progress(5), STATE, keep=2)
    second = save(tmp_path, progress(6), STATE, keep=2)
    (second / name).write_bytes(damage((second / name).read_bytes()))
    with pytest.raises(CheckpointError, match=message) as e:
        load(second)
    assert f'--resume {first}' in str(e.value) and '\n' not in str(e.value)


def test_any_changed_bit_is_detected(tmp_path):
    """Flip bits at strides that reach every bit of a byte and every part of both files."""
    path = save(tmp_path, progress(), TrainerState({'a': np.arange(4, dtype=np.float32)}), keep=2)
    for name, stride in (('state.json', 13), ('arrays.npz', 29)):
        whole = (path / name).read_bytes()
        for bit in range(0, 8 * len(whole), stride):
            content = bytearray(whole)
            content[bit // 8] ^= 1 << bit % 8
            (path / name).write_bytes(content)
            with pytest.raises(DamagedCheckpoint):
                load(path)
        (path / name).write_bytes(whole)
    assert load(path)[0] == progress()


def seal(path, **state):
    """Change values in the state of a checkpoint and recompute both checksums."""
    content = json.loads((path / 'state.json').read_text())
    content.pop('sha256')
    content['state'].update(state)
    content['arrays_sha256'] = hashlib.sha256((path / 'arrays.npz').read_bytes()).hexdigest()
    (path / 'state.json').write_text(checkpoint._seal(content))


@pytest.mark.parametrize(
    'state, message',
    [
        ({'seed': '1'}, 'got `str` - at `$.seed`'),
        ({'step': True}, 'got `bool`'),
        ({'step': -1}, '>= 0 - at `$.step`'),
        ({'step': 10**30}, '$.step'),
        ({'clock_s': float('nan')}, 'got NaN'),
        ({'last_lr': float('inf')}, 'got Infinity'),
        ({'global_batch_size': 0}, '>= 1'),
        ({'nodes': [0]}, 'nodes: got 1, expected one for each of 2 ranks'),
        ({'config': {'a': 1}}, 'at `$.config[...]`'),
        ({'sead': 1}, 'keys other than'),
    ],
)
def test_invalid_state_with_a_valid_checksum_is_refused(tmp_path, state, message):
    path = save(tmp_path, progress(), STATE, keep=2)
    seal(path, **state)
    with pytest.raises(DamagedCheckpoint) as e:
        load(path)
    assert message in str(e.value) and '\n' not in str(e.value)


def test_checkpoint_of_different_format_is_refused_and_not_skipped(tmp_path):
    save(tmp_path, progress(5), STATE, keep=3)
    for number, content in (
        (6, {'format': 3, 'state': {}, 'sha256': 'x'}),
        (7, json.loads(checkpoint._seal({'format': 5}))),
    ):
        path = save(tmp_path, progress(number), STATE, keep=3)
        (path / 'state.json').write_text(json.dumps(content, indent=1))
        for read in (lambda: load(path), lambda: load_newest(tmp_path)):  # noqa: B023
            with pytest.raises(
                CheckpointError, match=f'{path.name}: got format {content["format"]}, expected 4'
            ) as e:
                read()
            assert not isinstance(e.value, DamagedCheckpoint)


def test_newest_intact_checkpoint_is_loaded(tmp_path):
    paths = [save(tmp_path, progress(step), STATE, keep=4) for step in (5, 6, 7, 8)]
    (paths[1] / 'state.json').write_bytes(b'x')
    (paths[2] / 'arrays.npz').unlink()
    (paths[3] / 'state.json').unlink()
    loaded = load_newest(tmp_path)
    assert (loaded.path, loaded.progress.step, set(loaded.trainer.arrays)) == (
        paths[0],
        5,
        set(ARRAYS),
    )
    assert [p for p, _ in loaded.damaged] == paths[:0:-1]
    reasons = [reason for _, reason in loaded.damaged]
    assert 'state.json is missing' in reasons[0] and 'arrays.npz is missing' in reasons[1]
    (paths[0] / 'arrays.npz').write_bytes(b'x')
    with pytest.raises(
        CheckpointError, match=f'none of its 4 checkpoints is intact; the newest: {paths[3]}'
    ):
        load_newest(tmp_path)
    with pytest.raises(CheckpointError, match='contains no checkpoint'):
        load_newest(tmp_path / 'none')


def test_checkpoint_without_read_permission_is_not_skipped(tmp_path, monkeypatch):
    for step in (5, 6):
        save(tmp_path, progress(step), STATE, keep=2)
    monkeypatch.setattr(
        checkpoint, 'read_text', Mock(side_effect=PermissionError(13, 'Permission denied'))
    )
    with pytest.raises(
        CheckpointError, match='step_00000006: cannot read the checkpoint: Permission denied'
    ):
        load_newest(tmp_path)


def test_damaged_checkpoints_put_aside_do_not_displace_intact_ones(tmp_path):
    whole, *damaged = [save(tmp_path, progress(step), STATE, keep=3) for step in (5, 6, 7)]
    for _ in range(2):  # the second round replaces the first
        checkpoint.put_aside(damaged)
        assert list_checkpoints(tmp_path) == [whole]
        for path in damaged:
            path.mkdir()
            (path / 'state.json').write_text('again')
    checkpoint.put_aside(damaged)
    assert (tmp_path / 'damaged_step_00000007/state.json').read_text() == 'again'
    save(tmp_path, progress(6), STATE, keep=2)
    assert [checkpoint.step_of(p) for p in list_checkpoints(tmp_path)] == [5, 6]


class _Trap:
    def __reduce__(self):
        return (open, ('/nonexistent/must-not-run', 'w'))


def zip_of(path, content):
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr('a.npy', content)


def npy(header, data=b'', version=b'\x01\x00'):
    """Return an array file with the given header."""
    text = header.encode() + b'\n'
    return (
        b'\x93NUMPY'
        + version
        + len(text).to_bytes(2 if version[0] == 1 else 4, 'little')
        + text
        + data
    )


HUGE = "{'descr': '<f4', 'fortran_order': False, 'shape': (%s,), }"


@pytest.mark.parametrize(
    'write, message',
    [
        (
            lambda p: np.savez(p, a=np.array([_Trap()], dtype=object)),
            'a.npy: got object, expected numbers',
        ),
        (lambda p: np.savez(p, a=np.array(['text'])), 'a.npy: got <U4, expected numbers'),
        (lambda p: np.savez_compressed(p, a=np.zeros(10**6)), 'compressed'),
        (
            lambda p: zip_of(p, npy(HUGE % 10**12)),
            'got 0 bytes, expected 4000000000000 from its header',
        ),
        (lambda p: zip_of(p, npy(HUGE % '-1, -1', b'\0' * 4)), 'from its header'),
        (lambda p: zip_of(p, npy('[' * 60_000, version=b'\x02\x00')), 'not an .npz|header|Header'),
        (lambda p: zip_of(p, b'no array'), 'magic'),
        (lambda p: np.savez(p, b=np.array([1, np.nan, np.inf])), 'b: got 2 non-finite of 3 values'),
    ],
)
def test_hostile_arrays_are_refused_in_one_line_with_little_memory(tmp_path, write, message):
    path = save(tmp_path, progress(), STATE, keep=2)
    write(path / 'arrays.npz')
    seal(path)
    tracemalloc.start()
    try:
        with pytest.raises(DamagedCheckpoint, match=message) as e:
            load(path)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert '\n' not in str(e.value)


def test_archive_with_overlapping_members_is_refused(tmp_path):
    path = save(tmp_path, progress(), STATE, keep=2)
    zip_of(path / 'arrays.npz', npy(HUGE % 1000, bytes(4000)))
    content = (path / 'arrays.npz').read_bytes()
    start = content.index(b'PK\x01\x02')
    end = content.index(b'PK\x05\x06')
    entry, tail = content[start:end], content[end:]
    tail = (
        tail[:8]
        + (1000).to_bytes(2, 'little') * 2
        + (1000 * len(entry)).to_bytes(4, 'little')
        + tail[16:]
    )
    (path / 'arrays.npz').write_bytes(content[:start] + 1000 * entry + tail)
    seal(path)
    with pytest.raises(DamagedCheckpoint, match='larger than the|not an .npz'):
        load(path)


def test_arrays_of_different_model_are_refused(tmp_path):
    shapes = {'model/a': (2, 3), 'optimizer/a': (3,)}
    checkpoint.check_arrays(tmp_path, ARRAYS, shapes)
    with pytest.raises(CheckpointError, match='model/b is missing'):
        checkpoint.check_arrays(tmp_path, ARRAYS, {**shapes, 'model/b': (1,)})
    with pytest.raises(CheckpointError, match='optimizer/a is unexpected'):
        checkpoint.check_arrays(tmp_path, ARRAYS, {'model/a': (2, 3)})
    with pytest.raises(CheckpointError, match=r'got shape \(3,\), expected \(4,\)'):
        checkpoint.check_arrays(tmp_path, ARRAYS, {**shapes, 'optimizer/a': (4,)})


def test_failed_write_keeps_the_existing_checkpoint(tmp_path):
    first = save(tmp_path, progress(5), STATE, keep=2)
    with pytest.raises(CheckpointError, match='cannot write the checkpoint'):
        # a file in the way
        save(tmp_path / 'step_00000005' / 'state.json', progress(6), STATE, keep=2)
    assert load(first)[0].step == 5


def test_full_disk_at_the_removal_of_an_old_checkpoint_is_one_line(tmp_path, monkeypatch):
    save(tmp_path, progress(5), STATE, keep=1)
    rename = Path.rename

    def fail_aside(self, target):
        if target.name.endswith('.old.tmp'):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, 'rename', fail_aside)
    for step in (6, 5):  # the next checkpoint, and the same one again
        with pytest.raises(
            StorageError,
            match='step_00000005: cannot write: No space left on device; the disk at .* '
            'bytes free; free space or repair the disk, and resume',
        ):
            save(tmp_path, progress(step), STATE, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ['step_00000005', 'step_00000006']
    assert (
        load_newest(tmp_path).progress.step == 6 and load(tmp_path / 'step_00000005')[0].step == 5
    )


WRITER = """
import sys
from pathlib import Path
from functools import partial
import numpy as np
from mlperf_rn50.train.checkpoint.checkpoint import save
from mlperf_rn50.train.checkpoint.progress import Progress, TrainerState
from mlperf_rn50.train.checkpoint.best_weights import BackgroundWriter
saver, folder = BackgroundWriter(), Path(sys.argv[1])
for step in range(1, 10**6):
    progress = Progress(step, 1, 1, 0.5, 1.0, 8, 8, 100, 0, [0])
    saver.submit(partial(save, folder, progress, TrainerState({'a': np.full(500_000, step, np.float32)}), 2))
    if step == 3:
        print('started', flush=True)
"""


def test_kill_during_a_write_leaves_an_intact_checkpoint(tmp_path):
    process = subprocess.Popen(
        [sys.executable, '-c', WRITER, tmp_path], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == 'started\n'
    process.kill()
    process.wait()
    kept = list_checkpoints(tmp_path)
    assert kept
    for path in kept:
        state, trainer = load(path)
        assert (trainer.arrays['a'] == state.step).all() and path.name == f'step_{state.step:08d}'
    checkpoint.clear_unfinished(tmp_path)
    assert sorted(tmp_path.iterdir()) == kept


# --- background writing
# --------------------------------------------------------------------------------


def test_write_does_not_block_training_and_a_second_write_waits():
    gate, written, waits = threading.Event(), [], []

    def open_gate():  # called while the second write waits
        waits.append(1)
        gate.set()

    saver = BackgroundWriter(open_gate)

    def write(k):
        gate.wait()
        written.append(k)

    saver.submit(lambda: write(1))
    saver.check()
    assert written == []
    saver.submit(lambda: write(2))
    assert written[0] == 1 and waits
    saver.finish()
    assert written == [1, 2]


fail = Mock(side_effect=CheckpointError('the disk is full'))


def test_write_error_is_raised_once_by_the_next_call():
    saver = BackgroundWriter()
    for after in (saver.check, saver.finish, lambda: saver.submit(lambda: None)):
        saver.submit(fail)
        wait([saver._pending])
        with pytest.raises(CheckpointError, match='the disk is full'):
            after()
        saver.check()
        saver.finish()


@pytest.mark.parametrize(
    'changes, key',
    [
        ({'step': 2**63 - 1}, 'step'),
        ({'step': 5}, 'step'),
        ({'clock_s': 1e18}, 'clock_s'),
        ({'best_top1': 5.0}, 'best_top1'),
        ({'lr_batch_size': 10**12}, 'lr_batch_size'),
        ({'num_resumes': 10**15}, 'num_resumes'),
    ],
)
def test_impossible_numbers_are_damage(tmp_path, changes, key):
    path = save(tmp_path, progress(4), STATE, keep=1)
    content = json.loads((path / 'state.json').read_text())
    content.pop('sha256')
    content['state'] |= changes
    (path / 'state.json').write_text(checkpoint._seal(content))
    with pytest.raises(DamagedCheckpoint, match=key):
        load(path)


def test_clock_of_a_checkpoint_is_at_most_the_time_since_run_start(tmp_path):
    write_lines(tmp_path / 'result_0.txt', run_lines())
    run, state = RunFolder(tmp_path, 0), progress(4, boot='b', start_s=100.0, clock_s=30.0)
    assert find_resumes(run, state, ('b', 130.0), 0.0)[0].resumed_s == 30.0
    for start_s, clock_s in ((1e9, 30.0), (100.0, 40.0)):
        with pytest.raises(CheckpointError, match='s of training, expected at most'):
            find_resumes(run, replace(state, start_s=start_s, clock_s=clock_s), ('b', 130.0), 0.0)
