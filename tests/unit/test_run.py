"""Start of a run: nodes, plan, data, lock and leftovers of killed writers."""

import fcntl
import os
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from helpers import write_files
from tiny import tiny_config

from mlperf_rn50.errors import UserError
from mlperf_rn50.files import temporary_of
from mlperf_rn50.runfolder.names import RunFolder, new_run
from mlperf_rn50.train import run as runs
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.loop import RankPlace
from mlperf_rn50.train.run import hold_run, nodes_of, plan_new
from mlperf_rn50.train.watchdog.heartbeat import Heartbeat


def config_in(folder, **data):
    config = tiny_config(640, data)
    return replace(config, run=replace(config.run, dir=str(folder)))


def test_nodes_are_counted_in_the_order_of_their_first_rank():
    hosts = [RankPlace(name, 0, 1, '0') for name in ('b', 'a', 'b', 'c')]
    assert nodes_of(hosts) == [0, 1, 0, 2]


def test_new_run_draws_a_seed_and_has_its_nodes(tmp_path):
    comm = Comm()
    comm.world_size = 4
    (plan, progress), (_, other) = (
        plan_new(config_in(tmp_path), comm, [0, 0, 1, 1], '') for _ in range(2)
    )
    assert plan.nodes == (0, 0, 1, 1) and plan.config.run.seed == progress.seed != other.seed
    assert (progress.step, progress.global_batch_size, progress.lr_batch_size) == (0, 32, 32)


def test_new_run_on_fewer_ranks_has_the_learning_rate_of_the_configured_number(tmp_path):
    config, comm = config_in(tmp_path), Comm()  # 8 images per rank
    config = replace(config, run=replace(config.run, num_nodes=2, ranks_per_node=2))
    comm.world_size = 3
    plan, progress = plan_new(config, comm, [0, 1, 1], '', is_elastic=True)
    assert (plan.global_batch_size, plan.lr_scale) == (24, 24 / 32)
    assert (progress.global_batch_size, progress.lr_batch_size) == (24, 32)
    with pytest.raises(UserError, match='= 4 ranks, expected 3 as started'):
        plan_new(config, comm, [0, 1, 1], '')


def test_refused_data_leaves_no_file(tmp_path):
    config = config_in(tmp_path / 'run', synthetic=False, dir=str(tmp_path))
    arguments = runs.RunArguments(config, Comm(), Heartbeat())
    with pytest.raises(UserError, match='manifest.json: no such file'), runs.open_run(arguments):
        pass
    assert list(tmp_path.iterdir()) == []


def test_all_ranks_of_a_new_run_have_the_layout_of_rank_0(tmp_path, monkeypatch):
    monkeypatch.setattr(Comm, 'from_rank_0', lambda self, make: [5, 'NHWC', make()[-1]])
    plan, progress = plan_new(config_in(tmp_path), Comm(), [0], '')
    assert plan.config.model.layout == progress.config['model']['layout'] == 'NHWC'


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, 'LOCK_PERIOD_S', 0.01)
    return new_run(tmp_path)


def hold(run, on_wait=lambda: None):
    return hold_run(Comm(), run, SimpleNamespace(beat=on_wait))


def lock(run):
    """Lock a run as another program does; return the open file."""
    file = open(run.lock, 'a')
    fcntl.flock(file, fcntl.LOCK_EX)
    file.write('process 7 on h9')
    file.flush()
    return file


def leave_checkpoint(run, end='.tmp'):
    """Create the folder of an unfinished checkpoint, as of a killed writer."""
    path = run.checkpoints / f'.step_00000009.1{end}'
    write_files(path, {'arrays.npz': 'half'})
    return path


def test_writer_locks_a_run_and_removes_leftovers_of_a_killed_one(run, capsys, monkeypatch):
    weights = run.weights / 'best.npz', run.weights / 'last.json'
    files = [temporary_of(path) for path in (*weights, run.config, run.env, run.trace(3))]
    other_run = temporary_of(RunFolder(run.dir, 1).config)
    others = [other_run, run.dir / '.config.yaml', run.checkpoints / 'step_x']
    write_files(run.dir, dict.fromkeys([*files, *others], 'half'))
    leftovers = [*files, *(leave_checkpoint(run, end) for end in ('.tmp', '.old.tmp'))]
    monkeypatch.setattr(runs, 'LOCK_LIMIT_S', 0.0)
    with lock(run):
        with pytest.raises(UserError, match='process 7 on h9 writes this run'), hold(run):
            pass
        assert capsys.readouterr().err.count('waiting for it') == 1
        assert all(path.exists() for path in leftovers)  # the writer is alive
    with hold(run):
        assert [path.exists() for path in (*leftovers, *others)] == [False] * 7 + [True] * 3
        with pytest.raises(UserError, match=f'process {os.getpid()} on'), hold(run):
            pass
    with hold(run):  # the lock was released
        pass


def test_new_run_removes_leftovers_of_a_killed_one(run, tmp_path):
    left, alive = leave_checkpoint(run), new_run(tmp_path)
    written = leave_checkpoint(alive)
    with open(alive.lock, 'a'), hold(new_run(tmp_path)):
        assert not left.exists() and not written.exists()
    written = leave_checkpoint(alive)
    with lock(alive), hold(new_run(tmp_path)):
        assert written.exists()


def test_lock_is_awaited_until_the_other_writer_ends(run):
    other, beats = lock(run), []

    def beat():
        beats.append(1)
        if len(beats) == 3:
            other.close()

    with hold(run, beat):
        assert len(beats) == 3


def test_file_system_without_locks_is_a_warning(run, monkeypatch, capsys):
    monkeypatch.setattr(fcntl, 'flock', Mock(side_effect=OSError(95, 'Operation not supported')))
    left = leave_checkpoint(run)
    with hold(run):
        assert 'this file system has no locks (Operation not supported)' in capsys.readouterr().err
        assert left.exists()  # the owner is unknown
