"""The inputs of a run (Session) and its state while the clock runs (TrainingRun)."""
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from mlperf_rn50.config import Config, to_tree
from mlperf_rn50.data.batches import Batch
from mlperf_rn50.data.records import data_digest
from mlperf_rn50.errors import CheckpointError, ConfigError, UserError
from mlperf_rn50.files import writing
from mlperf_rn50.mllog.read.clock import STEP_S
from mlperf_rn50.model.fused import with_layout
from mlperf_rn50.runfolder.locks import FileLock
from mlperf_rn50.runfolder.names import RunFolder, new_run
from mlperf_rn50.system.cgroup import render_cpu_list
from mlperf_rn50.system.launcher_env import print_stderr
from mlperf_rn50.train import events
from mlperf_rn50.train.checkpoint import checkpoint
from mlperf_rn50.train.checkpoint.best_weights import BackgroundWriter, BestWeights
from mlperf_rn50.train.checkpoint.changes import check_changes, find_changes
from mlperf_rn50.train.checkpoint.progress import Progress, parse_progress
from mlperf_rn50.train.checkpoint.resumable import check_unfinished, clear_abandoned, clear_run, is_checkpoint
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.comm.rank_checks import WallClock
from mlperf_rn50.train.plan import Plan, make_elastic_plan, make_plan, resumed_step
from mlperf_rn50.train.reference import Reference, ReferenceComparison, find_reference
from mlperf_rn50.train.trainer import Trainer
from mlperf_rn50.train.watchdog.heartbeat import Heartbeat

T = TypeVar('T')
_LOCK_PERIOD_S = 0.5  # time between two attempts to take the lock
# A run that is being killed may still write its checkpoint, for which watcher and launcher together allow 35 s.
_LOCK_LIMIT_S = 60.0


@dataclass(frozen=True)
class RankPlace:
    """Host and cores of a rank, its number on that host, and the number of ranks there."""

    name: str
    local_rank: int
    local_size: int
    cores: str


@dataclass(frozen=True)
class Session:
    """Inputs of a run on one rank; only rank 0 has the reference and the arrays of the checkpoint to resume."""

    plan: Plan
    progress: Progress
    comm: Comm
    hosts: Sequence[RankPlace]
    heartbeat: Heartbeat
    folder: RunFolder
    resumption: checkpoint.LoadedCheckpoint | None
    reference: Reference | None

    @property
    def nodes(self) -> list[tuple[str, int]]:
        """Name and number of ranks of each host, in the order of the hosts' first ranks."""
        return [(h.name, h.local_size) for h in self.hosts if h.local_rank == 0]


@dataclass(frozen=True)
class TrainingRun(Session):
    """A run whose clock is running; train_data is endless. clock_start: monotonic time at which the clock was 0."""

    sinks: events.Sinks
    writer: BackgroundWriter
    best_weights: BestWeights
    trainer: Trainer
    train_data: Iterator[Batch]
    eval_data: Callable[[], Iterator[Batch]]
    comparison: ReferenceComparison
    clock_start: float
    wall_clock: WallClock

    def now_s(self) -> float:
        return time.monotonic() - self.clock_start

    def report_clock_steps(self) -> None:
        """Report each host whose wall clock jumped since the last call; all ranks must call this."""
        own = [self.hosts[self.comm.rank].name, self.wall_clock.take_step_s()]
        steps = dict(self.comm.gather_object(own, only_on_rank_0=True))
        for host in (h for h, step_s in steps.items() if abs(step_s) > STEP_S):
            self.sinks.handle(events.ClockStepped(host, steps[host]))


def on_rank_0(comm: Comm, make: Callable[[], T]) -> T | None:
    """Call a function on rank 0; return its result there, None on other ranks. Raise its UserError on every rank."""
    made, problem = None, None
    if comm.rank == 0:
        try:
            made = make()
        except UserError as e:
            problem = str(e)
    if problem := comm.gather_object(problem)[0]:
        raise UserError(problem)
    return made


def from_rank_0(comm: Comm, make: Callable[[], Any]) -> Any:
    """Call a function on rank 0 and return its result, a JSON value, on all ranks; raise errors as on_rank_0 does."""
    return comm.gather_object(on_rank_0(comm, make))[0]


@contextmanager
def hold_run(comm: Comm, run: RunFolder, heartbeat: Heartbeat) -> Iterator[None]:
    """Hold a run's lock and remove unfinished files; raise UserError on all ranks if another program keeps the lock."""
    lock, attempts = FileLock(run.lock), count()
    try:
        while not from_rank_0(comm, lambda: _take(lock, next(attempts) * _LOCK_PERIOD_S)):
            heartbeat.beat()
            time.sleep(_LOCK_PERIOD_S)
        if lock.is_held:
            clear_run(run)
            clear_abandoned(run)
        yield
    finally:
        lock.close()


def _take(lock: FileLock, waited_s: float) -> bool:
    """Take the lock of a run; return False while another program holds it."""
    with writing(lock.path):
        if lock.take():
            return True
    if waited_s > _LOCK_LIMIT_S:
        raise UserError(f'{lock.path}: {lock.holder()} writes this run and has not ended within {_LOCK_LIMIT_S:.0f} s; '
                        'wait for it or stop it')
    if not waited_s:
        print_stderr(f'mlperf-rn50: {lock.path}: another process still writes this run; waiting for it, at most '
            f'{_LOCK_LIMIT_S:.0f} s')
    return False


def load_resumption(comm: Comm, run: RunFolder, path: Path) -> checkpoint.LoadedCheckpoint:
    """Load a checkpoint, or the newest intact one of a folder, on rank 0; send all ranks its progress or UserError."""
    def load() -> checkpoint.LoadedCheckpoint:
        check_unfinished(run)
        return checkpoint.LoadedCheckpoint(path, *checkpoint.load(path)) if is_checkpoint(path) else \
            checkpoint.load_newest(path)
    loaded = on_rank_0(comm, load)
    name, before = comm.gather_object(loaded and [str(loaded.path), asdict(loaded.progress)])[0]
    return loaded or checkpoint.LoadedCheckpoint(Path(name), parse_progress(before), {})


def plan_new(config: Config, comm: Comm, nodes: Sequence[int]) -> tuple[Plan, Progress]:
    """Return plan and progress of a new run; rank 0 claims the run number and chooses a seed or layout that is null."""
    plan = make_plan(config, comm.world_size)
    drawn = secrets.randbelow(2**31) if config.run.seed is None else config.run.seed
    digest, seed, layout, index = from_rank_0(comm, lambda: [
        data_digest(config.data), drawn, with_layout(config).model.layout, new_run(Path(config.run.dir)).index])
    plan = replace(plan, config=replace(config, model=replace(config.model, layout=layout)))
    plan, batch = _complete(plan, seed, nodes), plan.global_batch_size
    return plan, Progress(0, seed, plan.world_size, 0.0, 0.0, batch, batch, config.data.num_train, index, list(nodes),
                          config=to_tree(plan.config), data_sha256=digest)


def plan_resumed(config: Config, world_size: int, nodes: Sequence[int], resumption: checkpoint.LoadedCheckpoint,
                 is_elastic: bool, allowed: Sequence[str] = (), digest: str = '') -> tuple[Plan, Progress]:
    """Return plan and progress of a resumed run; raise UserError if configuration, ranks or checkpoint do not match."""
    before = resumption.progress
    plan = make_elastic_plan(config, world_size, before.lr_batch_size) if is_elastic else make_plan(config, world_size)
    _check_resumption(resumption, plan, is_elastic, digest)
    step = resumed_step(plan, before.step, before.global_batch_size, before.nodes == list(nodes))
    if step >= plan.max_epochs * plan.steps_per_epoch:
        raise ConfigError(f'train.max_epochs: got {plan.max_epochs}, and the run has already completed all of them; '
                          'increase it to resume')
    check_changes(find_changes(before.config, config), allowed, str(resumption.path))
    plan = _complete(plan, before.seed, nodes)
    return plan, replace(
        before, step=step, world_size=plan.world_size, global_batch_size=plan.global_batch_size, data_sha256=digest,
        nodes=list(nodes), num_resumes=before.num_resumes + 1, images=0, train_s=0.0, config=to_tree(plan.config))


def _complete(plan: Plan, seed: int, nodes: Sequence[int]) -> Plan:
    return replace(plan, config=replace(plan.config, run=replace(plan.config.run, seed=seed)), nodes=tuple(nodes))


def _check_resumption(resumption: checkpoint.LoadedCheckpoint, plan: Plan, is_elastic: bool, digest: str) -> None:
    before = resumption.progress
    seed = plan.config.run.seed
    facts = [('data.num_train', plan.config.data.num_train, before.num_train, 'use the same data'),
             (f'images and classes in {plan.config.data.dir}', f'SHA-256 {digest:.12}…',
              f'SHA-256 {before.data_sha256 or digest:.12}…', 'use the same data'),
             ('run.seed', before.seed if seed is None else seed, before.seed, 'omit run.seed')]
    if not is_elastic:
        facts += [('ranks', plan.world_size, before.world_size,
                   f'start {before.world_size} ranks, or resume with {plan.world_size} and --elastic'),
                  ('train.global_batch_size', plan.global_batch_size, before.global_batch_size, 'keep the batch size')]
    for name, got, expected, fix in facts:
        if got != expected:
            raise CheckpointError(f'{resumption.path}: {name}: got {got}, the checkpoint has {expected}; {fix}')


def open_session(config: Config, comm: Comm, heartbeat: Heartbeat, resume: tuple[RunFolder, Path] | None,
                 is_elastic: bool, allowed: Sequence[str]) -> Session:
    """Collect the inputs of a run; loop.train describes the arguments."""
    resumption = load_resumption(comm, *resume) if resume else None
    reference = on_rank_0(comm, lambda: find_reference(config, comm.world_size))
    own = [platform.node(), comm.local_rank, comm.local_size, render_cpu_list(os.sched_getaffinity(0))]
    hosts = [RankPlace(*row) for row in comm.gather_object(own)]
    nodes = nodes_of(hosts)
    plan, progress = plan_new(config, comm, nodes) if not resumption else plan_resumed(
        config, comm.world_size, nodes, resumption, is_elastic, allowed,
        from_rank_0(comm, lambda: data_digest(config.data)))
    folder = resume[0] if resume else RunFolder(Path(config.run.dir), progress.result_index)
    return Session(plan, progress, comm, hosts, heartbeat, folder, resumption, reference)


def nodes_of(hosts: Sequence[RankPlace]) -> list[int]:
    """Return the node number of every rank; nodes count from 0, in the order of their first ranks."""
    numbers = {name: i for i, name in enumerate(dict.fromkeys(h.name for h in hosts))}
    return [numbers[h.name] for h in hosts]
