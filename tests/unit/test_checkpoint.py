"""Checkpoints: damage, hostile content and retention."""

import errno
import hashlib
import json
import os
import subprocess
import sys
import tracemalloc
import zipfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from helpers import deny, json_table

from mlperf_rn50 import files
from mlperf_rn50.errors import (
    EXIT_FAILED,
    CheckpointError,
    DamagedCheckpoint,
    StorageError,
    UserError,
)
from mlperf_rn50.runfolder.names import list_checkpoints, new_run, step_of
from mlperf_rn50.train.checkpoint import checkpoint
from mlperf_rn50.train.checkpoint.checkpoint import load, load_newest, save, seal
from mlperf_rn50.train.checkpoint.progress import Progress, TrainerState
from mlperf_rn50.train.comm.horovod import Comm

ARRAYS = {
    'model/a': np.arange(6, dtype=np.float32).reshape(2, 3),
    'optimizer/a': np.ones(3, np.float16),
}
STATE = TrainerState(ARRAYS, 0.3, 512.0, 7)


def progress(step=5, **keys):
    """Return the progress of two ranks."""
    counts = {'best_top1': 0.5, 'clock_s': 1.5, 'result_index': 0, 'nodes': [0, 0]}
    sizes = {'global_batch_size': 8, 'lr_batch_size': 8, 'num_train': 100}
    config = {'schedule': {'base_lr': 0.3}}
    return Progress(step, 1, 2, **{**counts, **sizes, 'config': config, **keys})


def save_all(folder, *steps, keep=9) -> list[Path]:
    return [save(folder, progress(step), STATE, keep) for step in steps]


def refuse(path, message='', error=DamagedCheckpoint) -> str:
    """Assert that a checkpoint is refused in one line; return it."""
    with pytest.raises(error) as e:
        load(path)
    assert message in str(e.value) and '\n' not in str(e.value)
    return str(e.value)


def rewrite(path, **state):
    """Change the state of a checkpoint, without keys that become None, and compute both
    checksums."""
    content = json.loads((path / 'state.json').read_text())
    del content['sha256']
    changed = {**content['state'], **state}
    content['state'] = {key: value for key, value in changed.items() if value is not None}
    content['arrays_sha256'] = hashlib.sha256((path / 'arrays.npz').read_bytes()).hexdigest()
    (path / 'state.json').write_text(seal(content))


def steps_in(folder) -> list[int]:
    """Return the steps of the intact checkpoints of a folder without others."""
    return [load(path)[0].step for path in list_checkpoints(folder)]


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
    assert (got, replace(trainer, arrays=ARRAYS)) == (progress(), STATE)
    assert trainer.arrays.keys() == given.keys()
    for name, array in trainer.arrays.items():
        assert array.dtype == given[name].dtype and np.array_equal(array, given[name]), name


def test_run_that_started_before_the_host_booted_keeps_its_checkpoints(tmp_path):
    save(tmp_path, progress(start_s=-9900.0), STATE, keep=1)
    loaded = load_newest(tmp_path)
    assert loaded.progress.start_s == -9900.0 and not loaded.damaged


def test_entries_of_new_folders_are_synced_by_the_first_checkpoint(tmp_path, monkeypatch):
    synced, sync = [], os.fsync

    def recording(fd):
        synced.append(Path(os.readlink(f'/proc/self/fd/{fd}')))
        sync(fd)

    monkeypatch.setattr(os, 'fsync', recording)
    run = new_run(tmp_path / 'logs/run')
    save_all(run.checkpoints, 1)
    assert {tmp_path, tmp_path / 'logs', run.dir, run.checkpoints} < set(synced)
    synced.clear()
    save_all(run.checkpoints, 2)
    assert run.checkpoints in synced and run.dir not in synced


def test_newest_checkpoints_by_step_are_kept_and_other_names_ignored(tmp_path):
    (tmp_path / '.step_00000009.123.tmp').mkdir()
    for name in ('step_x', 'step_', 'step_²', 'step_٣', 'damaged_step_5'):
        (tmp_path / name).mkdir()
    assert not list_checkpoints(tmp_path)
    assert not checkpoint.is_checkpoint_name(f'step_{"9" * 5000}')
    checkpoint.clear_unfinished(tmp_path)
    assert len(list(tmp_path.iterdir())) == 5
    save_all(tmp_path, 9, 10, 100_000_000, 11, keep=3)
    assert steps_in(tmp_path) == [10, 11, 100_000_000]


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
    first, second = save_all(tmp_path, 5, 6)
    (second / name).write_bytes(damage((second / name).read_bytes()))
    assert f'--resume {first}' in refuse(second, message)
    (second / name).unlink()
    os.mkfifo(second / name)
    refuse(second, 'got a named pipe, expected a file', CheckpointError)


def test_any_changed_bit_is_detected(tmp_path):
    """Flip bits at strides that reach every bit of a byte and every part of both files."""
    path = save(tmp_path, progress(), TrainerState({'a': np.arange(4, dtype=np.float32)}), keep=2)
    for name, stride in (('state.json', 13), ('arrays.npz', 29)):
        whole = (path / name).read_bytes()
        for bit in range(0, 8 * len(whole), stride):
            content = bytearray(whole)
            content[bit // 8] ^= 1 << bit % 8
            (path / name).write_bytes(content)
            refuse(path)
        (path / name).write_bytes(whole)
    assert load(path)[0] == progress()


@pytest.mark.parametrize(
    'state, message',
    json_table("""
{"seed": "1"}               | "got `str` - at `$.seed`"
{"step": true}              | "got `bool`"
{"step": -1}                | ">= 0 - at `$.step`"
{"step": 9223372036854775807} | "$.step"
{"step": 6}                 | "step: got 6, expected 5"
{"clock_s": NaN}            | "got NaN"
{"clock_s": 1e18}           | "clock_s"
{"last_lr": Infinity}       | "got Infinity"
{"global_batch_size": 0}    | ">= 1"
{"lr_batch_size": 1000000000000} | "lr_batch_size"
{"best_top1": 5.0}          | "best_top1"
{"num_resumes": 1000000000000000} | "num_resumes"
{"nodes": [0]}              | "nodes: got 1, expected one for each of 2 ranks"
{"config": {"a": 1}}        | "at `$.config[...]`"
{"sead": 1}                 | "keys other than"
"""),
    ids=str,
)
def test_invalid_state_with_a_valid_checksum_is_refused(tmp_path, state, message):
    (path,) = save_all(tmp_path, 5)
    rewrite(path, **state)
    refuse(path, message)


def test_checkpoint_of_different_format_is_refused_and_not_skipped(tmp_path):
    save_all(tmp_path, 5)
    unsealed = json.dumps({'format': 3, 'state': {}, 'sha256': 'x'}, indent=1)
    for number, version, text in ((6, 3, unsealed), (7, 5, seal({'format': 5}))):
        (path,) = save_all(tmp_path, number)
        (path / 'state.json').write_text(text)
        with pytest.raises(CheckpointError, match=f'got format {version}, expected 4') as e:
            load_newest(tmp_path)
        assert not isinstance(e.value, DamagedCheckpoint) and path.name in str(e.value)


def test_newest_intact_checkpoint_is_loaded(tmp_path, monkeypatch):
    paths = whole, *damaged = save_all(tmp_path, 5, 6, 7, 8)
    (paths[1] / 'state.json').write_bytes(b'x')
    (paths[2] / 'arrays.npz').unlink()
    (paths[3] / 'state.json').unlink()
    loaded = load_newest(tmp_path)
    assert (loaded.path, loaded.progress) == (whole, progress(5))
    assert loaded.trainer.arrays.keys() == ARRAYS.keys()
    assert [p for p, _ in loaded.damaged] == damaged[::-1]
    reasons = [reason for _, reason in loaded.damaged]
    assert 'state.json is missing' in reasons[0] and 'arrays.npz is missing' in reasons[1]
    (whole / 'arrays.npz').write_bytes(b'x')
    for folder, message in (
        (tmp_path, f'none of its 4 .* newest: {paths[3]}'),
        (whole, 'contains no checkpoint'),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_newest(folder)
    deny(monkeypatch, '.json', 'open')  # not skipped, because it may be intact
    with pytest.raises(CheckpointError, match=f'{paths[3]}: cannot read .* Permission denied'):
        load_newest(tmp_path)


def test_damaged_checkpoints_put_aside_do_not_displace_intact_ones(tmp_path):
    for text in ('first', 'second'):
        whole, damaged = save_all(tmp_path, 5, 6)
        (damaged / 'state.json').write_text(text)
        checkpoint.put_aside([damaged])
        assert list_checkpoints(tmp_path) == [whole]
        assert (tmp_path / 'damaged_step_00000006/state.json').read_text() == text
    save_all(tmp_path, 6, keep=2)
    assert steps_in(tmp_path) == [5, 6]


class _Trap:
    def __reduce__(self):
        return (open, ('/nonexistent/must-not-run', 'w'))


def zip_of(path, content, num_entries=1):
    """Write an archive with one array, which its directory may list several times."""
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr('a.npy', content)
        archive.filelist *= num_entries


def npy(header, data=b'', version=b'\x01\x00'):
    """Return an array file with the given header."""
    text = header.encode() + b'\n'
    size = len(text).to_bytes(2 if version[0] == 1 else 4, 'little')
    return b'\x93NUMPY' + version + size + text + data


HUGE = "{'descr': '<f4', 'fortran_order': False, 'shape': (%s,), }"
TRAP = np.array([_Trap()], dtype=object)


@pytest.mark.parametrize(
    'write, message',
    [
        (lambda p: np.savez(p, a=TRAP), 'a.npy: got object, expected numbers'),
        (lambda p: np.savez(p, a=np.array(['text'])), 'a.npy: got <U4, expected numbers'),
        (lambda p: np.savez_compressed(p, a=np.zeros(10**6)), 'compressed'),
        (lambda p: zip_of(p, npy(HUGE % 10**12)), 'got 0 bytes, expected 4000000000000 from its'),
        (lambda p: zip_of(p, npy(HUGE % '-1, -1', b'\0' * 4)), 'from its header'),
        (lambda p: zip_of(p, npy('[' * 60_000, version=b'\x02\x00')), 'ader'),
        (lambda p: zip_of(p, b'no array'), 'magic'),
        (lambda p: zip_of(p, npy(HUGE % 1000, bytes(4000)), 1000), 'arrays larger than the'),
        (lambda p: np.savez(p, b=np.array([1, np.nan, np.inf])), 'b: got 2 non-finite of 3 values'),
    ],
)
def test_hostile_arrays_are_refused_in_one_line_with_little_memory(tmp_path, write, message):
    (path,) = save_all(tmp_path, 5)
    write(path / 'arrays.npz')
    rewrite(path)
    tracemalloc.start()
    try:
        refuse(path, message)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    'shapes, message',
    [
        ({'model/b': (1,)}, 'model/b is missing'),
        ({'optimizer/a': None}, 'optimizer/a is unexpected'),
        ({'optimizer/a': (4,)}, r'got shape \(3,\), expected \(4,\)'),
    ],
)
def test_arrays_of_different_model_are_refused(tmp_path, shapes, message):
    right = {name: array.shape for name, array in ARRAYS.items()}
    checkpoint.check_arrays(tmp_path, ARRAYS, right)
    expected = {name: shape for name, shape in {**right, **shapes}.items() if shape}
    with pytest.raises(CheckpointError, match=message):
        checkpoint.check_arrays(tmp_path, ARRAYS, expected)


def test_values_that_are_not_finite_do_not_displace_a_checkpoint(tmp_path):
    save_all(tmp_path, 5)
    bad = replace(STATE, arrays={**STATE.arrays, 'w': np.array([1, np.nan], np.float32)})
    with pytest.raises(CheckpointError, match='w has values that are not finite') as e:
        save(tmp_path, progress(6), bad, keep=1)
    assert e.value.exit_code == EXIT_FAILED  # as at an evaluation; no error of the user
    assert [step_of(p) for p in list_checkpoints(tmp_path)] == [5]


@pytest.mark.parametrize('fault, code', [('ENOSPC', 2), ('EACCES', 2), ('EIO', 1), ('ESTALE', 1)])
def test_fault_that_may_pass_permits_a_restart(tmp_path, monkeypatch, fault, code):
    number = getattr(errno, fault)
    monkeypatch.setattr(Path, 'mkdir', Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(UserError, match='cannot write the checkpoint') as e:
        save_all(tmp_path, 5)
    assert e.value.exit_code == code
    with pytest.raises(UserError) as again:
        Comm().on_rank_0(Mock(side_effect=e.value))
    assert again.value.exit_code == code


@pytest.mark.parametrize('fault, code', [('EACCES', 2), ('ESTALE', 1), ('ETIMEDOUT', 1)])
def test_failed_read_that_may_pass_permits_a_restart(tmp_path, monkeypatch, fault, code):
    save_all(tmp_path, 5)
    number = getattr(errno, fault)
    monkeypatch.setattr(checkpoint, 'read_bytes', Mock(side_effect=OSError(number, fault)))
    with pytest.raises(UserError, match=f'step_00000005: cannot read the checkpoint: {fault}') as e:
        load_newest(tmp_path)
    assert e.value.exit_code == code


def test_error_of_storage_that_passes_is_no_damage(tmp_path, monkeypatch):
    save_all(tmp_path, 5)
    read, error = checkpoint.read_bytes, OSError(errno.EIO, 'x')
    monkeypatch.setattr(checkpoint, '_STORAGE_PAUSE_S', 0.0)
    again = Mock(side_effect=[error, *[read(tmp_path / 'step_00000005/arrays.npz')] * 2])
    monkeypatch.setattr(checkpoint, 'read_bytes', again)
    assert load_newest(tmp_path).path.name == 'step_00000005'
    monkeypatch.setattr(checkpoint, 'read_bytes', Mock(side_effect=error))
    with pytest.raises(CheckpointError, match='none of its 1 checkpoints is intact'):
        load_newest(tmp_path)


def test_file_of_a_killed_writer_with_the_same_process_number_is_no_obstacle(tmp_path):
    (path,) = save_all(tmp_path, 5)
    path.rename(files.temporary_of(path))
    assert save_all(tmp_path, 5) == [path]
    assert steps_in(tmp_path) == [5]


def test_failed_write_keeps_the_existing_checkpoints(tmp_path, monkeypatch):
    (first,) = save_all(tmp_path, 5)
    with pytest.raises(CheckpointError, match='cannot write the checkpoint'):
        save_all(first / 'state.json', 6)  # a file in the way
    rename = Path.rename

    def fail_aside(self, target):
        if target.name.endswith('.old.tmp'):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, 'rename', fail_aside)
    for step in (6, 5):  # the next checkpoint, and the same one again
        with pytest.raises(
            StorageError, match=f'{first.name}: cannot write: No space left .* free'
        ):
            save_all(tmp_path, step, keep=1)
    assert sorted(tmp_path.iterdir()) == list_checkpoints(tmp_path)
    assert steps_in(tmp_path) == [5, 6]


@pytest.mark.parametrize(
    'step, kept',
    json_table("""
100 | [40, 100]
400 | [40, 200]
200 | [40, 200]
40  | [40]
"""),
)
def test_checkpoints_of_a_resumed_run_are_the_newest(tmp_path, step, kept):
    first, second, _ = save_all(tmp_path, 40, 200, 300)
    checkpoint.rewind(tmp_path, first if step == 40 else second, progress(step), STATE)
    assert steps_in(tmp_path) == kept


def test_copy_of_a_checkpoint_becomes_the_newest_of_its_run(tmp_path):
    folder, copies = tmp_path / 'checkpoints', tmp_path / 'saved'
    first, _ = save_all(copies, 40, 300)
    save_all(folder, 200, 250)
    checkpoint.rewind(folder, first, progress(40), STATE)
    assert (steps_in(folder), steps_in(copies)) == ([40], [40, 300])


WRITER = """
import sys
from pathlib import Path
import numpy as np
from mlperf_rn50.train.checkpoint.checkpoint import save
from mlperf_rn50.train.checkpoint.progress import Progress, TrainerState
from mlperf_rn50.train.comm.horovod import Comm
for step in range(1, 10**6):
    progress = Progress(step, 1, 1, 0.5, 1.0, 8, 8, 100, 0, [0])
    state = TrainerState({'a': np.full(500_000, step, np.float32)})
    save(Path(sys.argv[1]), progress, state, 2)
    if step == 3:
        print('started', flush=True)
"""


def test_kill_during_a_write_leaves_an_intact_checkpoint(tmp_path):
    command = [sys.executable, '-c', WRITER, tmp_path]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
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
