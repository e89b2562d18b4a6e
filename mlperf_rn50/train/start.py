"""Everything before the clock of a run starts: ranks, plan, sinks, network, pipelines, warm-up."""
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

import mxnet as mx

from mlperf_rn50.config import Config, to_tree
from mlperf_rn50.data.pipeline import Batch, eval_batches, made_up_batches, train_batches
from mlperf_rn50.data.records import class_names
from mlperf_rn50.errors import CheckpointError, ConfigError, UserError
from mlperf_rn50.files import writing
from mlperf_rn50.locks import FileLock
from mlperf_rn50.mlperf.writer import RunLog
from mlperf_rn50.model.weights import load_weights, set_weights
from mlperf_rn50.model.zoo import count_flops, count_parameters, image_shape
from mlperf_rn50.study.reference import Reference
from mlperf_rn50.system.launched import say
from mlperf_rn50.system.telemetry import Telemetry
from mlperf_rn50.system.topology import leave_openmp_to_engine
from mlperf_rn50.train import checkpoint, events
from mlperf_rn50.train.changes import check_changes, find_changes
from mlperf_rn50.train.comm import Comm
from mlperf_rn50.train.course import Course, find_reference, open_course, tell_reference
from mlperf_rn50.train.device import device_id_of
from mlperf_rn50.train.keep import Keeper
from mlperf_rn50.train.plan import Plan, make_elastic_plan, make_plan, resumed_step
from mlperf_rn50.train.progress import Progress, parse_progress
from mlperf_rn50.train.run_folder import RunFolder, check_unfinished, clear_abandoned, is_one_checkpoint, new_run
from mlperf_rn50.train.saver import Saver
from mlperf_rn50.train.sinks.metrics import Metrics
from mlperf_rn50.train.sinks.mlperf_log import MlperfLog
from mlperf_rn50.train.sinks.terminal import Terminal
from mlperf_rn50.train.sinks.watched import Sampled, Watched
from mlperf_rn50.train.trainer import Trainer, device_notes
from mlperf_rn50.train.watch import Position

T = TypeVar('T')
_LOCK_PERIOD_S = 0.5
_DROP_CACHES = Path('/proc/sys/vm/drop_caches')
# What is being killed may still write its checkpoint: a watcher and a launcher give it 35 s together.
_LOCK_LIMIT_S = 60.0


class Clock:
    """The run's clock: monotonic, and going on from an earlier part of the run."""

    def __init__(self, before_s: float):
        self._start = time.monotonic() - before_s

    def now_s(self) -> float:
        return time.monotonic() - self._start


@dataclass(frozen=True)
class Host:
    """Where a rank is: the host's name, the rank's number there, how many there are, and its cores."""

    name: str
    local_rank: int
    local_size: int
    cores: str


@dataclass(frozen=True)
class Session:
    """What a run is started with, on one rank; reference: on rank 0 only, None where there is nothing.

    Args:
        resumption: the checkpoint that a resumed run goes on from, whose arrays rank 0 alone has; None for a new run.
    """

    plan: Plan
    progress: Progress
    comm: Comm
    hosts: Sequence[Host]
    position: Position
    folder: RunFolder
    resumption: checkpoint.Found | None
    reference: Reference | None

    @property
    def nodes(self) -> list[tuple[str, int]]:
        """Name and number of ranks of each host, in the order of their first rank."""
        return [(h.name, h.local_size) for h in self.hosts if h.local_rank == 0]


@dataclass(frozen=True)
class Run(Session):
    """A run whose clock runs; train_data is without end, from progress.step on; rank 0 has the course's reference."""

    sinks: events.Sinks
    saver: Saver
    keeper: Keeper
    trainer: Trainer
    train_data: Iterator[Batch]
    eval_data: Callable[[], Iterator[Batch]]
    clock: Clock
    course: Course


def on_rank_0(comm: Comm, make: Callable[[], T]) -> T | None:
    """Return what rank 0 makes, None on the other ranks; raise its UserError on every rank."""
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
    """Return what rank 0 makes, of JSON's kinds, on all ranks; see on_rank_0."""
    return comm.gather_object(on_rank_0(comm, make))[0]


@contextmanager
def hold_run(comm: Comm, run: RunFolder, position: Position) -> Iterator[None]:
    """Hold the lock of a run, and remove what a killed writer of it has left unfinished.

    Raises:
        UserError: another program still writes the run after a minute; on every rank.
    """
    lock, attempts = FileLock(run.lock), count()
    try:
        while not from_rank_0(comm, lambda: _take(lock, next(attempts) * _LOCK_PERIOD_S)):
            position.now()
            time.sleep(_LOCK_PERIOD_S)
        if lock.is_held:
            run.clear_unfinished()
            clear_abandoned(run)
        yield
    finally:
        lock.close()


def _take(lock: FileLock, waited_s: float) -> bool:
    """Take the lock of a run; False while another program has it, to be asked again."""
    with writing(lock.path):
        if lock.take():
            return True
    if waited_s > _LOCK_LIMIT_S:
        raise UserError(f'{lock.path}: {lock.holder()} writes this run and has not ended within {_LOCK_LIMIT_S:.0f} s; '
                        'let it end, or stop it')
    if not waited_s:
        say(f'mlperf-rn50: {lock.path}: another process still writes this run; waiting for it, at most '
            f'{_LOCK_LIMIT_S:.0f} s')
    return False


def load_resumption(comm: Comm, run: RunFolder, path: Path) -> checkpoint.Found:
    """A checkpoint that rank 0 reads for all: the newest whole one of a folder, or the one that is named.

    Raises:
        UserError: rank 0 cannot use it, or the run needs no resuming; on every rank.
    """
    def load() -> checkpoint.Found:
        check_unfinished(run)
        return checkpoint.Found(path, *checkpoint.load(path)) if is_one_checkpoint(path) else \
            checkpoint.load_newest(path)
    own = on_rank_0(comm, load)
    name, before = comm.gather_object(own and [str(own.path), asdict(own.progress)])[0]
    return own or checkpoint.Found(Path(name), parse_progress(before), {})


def plan_new(config: Config, comm: Comm, nodes: Sequence[int]) -> tuple[Plan, Progress]:
    """The plan of a new run and its first record, the same on all ranks: rank 0 draws the seed and claims the number.

    Raises:
        UserError: configuration and ranks do not go together, or the run folder cannot be written.
    """
    plan = make_plan(config, comm.world_size)
    drawn = secrets.randbelow(2**31) if config.run.seed is None else config.run.seed
    seed, index = from_rank_0(comm, lambda: [drawn, new_run(Path(config.run.dir)).index])
    plan, batch = _with(plan, seed, nodes), plan.global_batch_size
    return plan, Progress(0, seed, plan.world_size, 0.0, 0.0, batch, batch, config.data.num_train, index, list(nodes),
                          config=to_tree(plan.config))


def plan_resumed(config: Config, world_size: int, nodes: Sequence[int], resumption: checkpoint.Found,
                 is_elastic: bool, allowed: Sequence[str] = ()) -> tuple[Plan, Progress]:
    """The plan of a resumed run and how far it is; allowed: keys that may differ, beside those that always may.

    Raises:
        UserError: configuration, ranks and checkpoint do not go together.
    """
    before = resumption.progress
    plan = make_elastic_plan(config, world_size, before.lr_batch_size) if is_elastic else make_plan(config, world_size)
    _check_resumption(resumption, plan, is_elastic)
    step = resumed_step(plan, before.step, before.global_batch_size, before.nodes == list(nodes))
    if step >= plan.max_epochs * plan.steps_per_epoch:
        raise ConfigError(f'train.max_epochs: got {plan.max_epochs}, and the checkpoint has taken all of them; '
                          'raise it to go on')
    check_changes(find_changes(before.config, config), allowed, str(resumption.path))
    plan = _with(plan, before.seed, nodes)
    return plan, replace(
        before, step=step, world_size=plan.world_size, global_batch_size=plan.global_batch_size,
        nodes=list(nodes), num_resumes=before.num_resumes + 1, images=0, train_s=0.0, config=to_tree(plan.config))


def _with(plan: Plan, seed: int, nodes: Sequence[int]) -> Plan:
    return replace(plan, config=replace(plan.config, run=replace(plan.config.run, seed=seed)), nodes=tuple(nodes))


def _check_resumption(resumption: checkpoint.Found, plan: Plan, is_elastic: bool) -> None:
    """Raise CheckpointError where a checkpoint does not fit the ranks and the configuration."""
    before = resumption.progress
    seed = plan.config.run.seed
    facts = [('data.num_train', plan.config.data.num_train, before.num_train, 'use the same data'),
             ('run.seed', before.seed if seed is None else seed, before.seed, 'a run keeps its seed, leave it out')]
    if not is_elastic:
        facts += [('ranks', plan.world_size, before.world_size,
                   f'start {before.world_size} ranks, or give --elastic to go on with {plan.world_size}'),
                  ('train.global_batch_size', plan.global_batch_size, before.global_batch_size,
                   'leave the batch as it was')]
    for name, got, expected, fix in facts:
        if got != expected:
            raise CheckpointError(f'{resumption.path}: {name}: got {got}, the checkpoint has {expected}; {fix}')


def open_session(config: Config, comm: Comm, position: Position, resume: tuple[RunFolder, Path] | None,
                 is_elastic: bool, allowed: Sequence[str]) -> Session:
    """What a run is started with; see loop.train."""
    resumption = load_resumption(comm, *resume) if resume else None
    reference, hosts = on_rank_0(comm, lambda: find_reference(config, comm.world_size)), find_hosts(comm)
    nodes = nodes_of(hosts)
    plan, progress = plan_resumed(config, comm.world_size, nodes, resumption, is_elastic, allowed) if resumption else \
        plan_new(config, comm, nodes)
    folder = resume[0] if resume else RunFolder(Path(config.run.dir), progress.result_index)
    return Session(plan, progress, comm, hosts, position, folder, resumption, reference)


def open_sinks(session: Session) -> events.Sinks:
    """What reads the events on this rank: most of it on rank 0 only."""
    run, folder = session.plan.config.run, session.folder
    sinks: list[events.Sink] = [Watched(session.position),
                                Sampled(open_telemetry(session.plan.config, session.comm, folder))]
    if session.comm.rank == 0:
        log = RunLog(folder.result, folder.result_v06 if run.log_v06 else None, session.resumption is not None)
        sinks += [MlperfLog(log), Metrics(folder), Terminal(folder)]
        if run.tensorboard:
            from mlperf_rn50.train.sinks.tensorboard import TensorBoard
            sinks.append(TensorBoard(folder.tensorboard, session.progress.step))
    return events.Sinks(sinks)


def open_telemetry(config: Config, comm: Comm, run: RunFolder) -> Telemetry:
    """The telemetry of this rank's node, which its first rank writes, if it is asked for."""
    if not config.run.telemetry or comm.local_rank:
        return Telemetry(None)
    run.dir.mkdir(parents=True, exist_ok=True)  # a node may have a folder of its own there
    num_gpus = -(-comm.local_size // config.run.ranks_per_device) if config.train.device == 'gpu' else 0
    return Telemetry(run.telemetry(platform.node()), num_gpus)


def find_hosts(comm: Comm) -> list[Host]:
    """Where every rank is."""
    cores = sorted(os.sched_getaffinity(0))
    text = f'{cores[0]}-{cores[-1]}' if len(cores) == cores[-1] - cores[0] + 1 > 1 else ','.join(map(str, cores))
    return [Host(*row) for row in comm.gather_object([platform.node(), comm.local_rank, comm.local_size, text])]


def _drop_page_cache() -> str | None:
    """Flush this host's page cache, so that a run reads its data from storage; return why that failed, or None."""
    try:
        os.sync()
        _DROP_CACHES.write_text('3\n')
    except OSError as e:
        return f'{_DROP_CACHES}: {e.strerror} (needs root)'
    return None


def _clear_caches(config: Config, comm: Comm, sinks: events.Sinks) -> tuple[bool, str]:
    """Flushes the page cache of every node if asked to; whether all of them did, and why not."""
    if not config.run.clear_caches:
        return False, 'not asked for (run.clear_caches)'
    problem = _drop_page_cache() if comm.local_rank == 0 else None
    num_failed = comm.sum([problem is not None])[0]
    if num_failed:
        text = problem or f'{num_failed} nodes could not (needs root)'
        sinks.see(events.Warned(f'the page cache was not flushed: {text}'))
        return False, text
    return True, 'sync; echo 3 > /proc/sys/vm/drop_caches on every node'


def nodes_of(hosts: Sequence[Host]) -> list[int]:
    """The node of every rank, counted from 0 in the order of their first rank."""
    names = list(dict.fromkeys(h.name for h in hosts))
    return [names.index(h.name) for h in hosts]


def start(session: Session, sinks: events.Sinks) -> Run:
    """Build and warm up everything, off the clock; the clock starts when this returns.

    Raises:
        UserError: the data or the weights cannot be used.
    """
    plan, progress, comm, position = session.plan, session.progress, session.comm, session.position
    config, resumption = plan.config, session.resumption
    if not resumption:
        sinks.see(events.Opened(config, session.nodes, *_clear_caches(config, comm, sinks)))
        sinks.see(events.InitStarted(plan, progress.seed))
    device_id = device_id_of(config, comm)
    leave_openmp_to_engine()
    trainer = Trainer(plan, comm, progress.seed, device_id, position.computed)
    source, notes = _initial_weights(config, comm, trainer) if not resumption else ('', [])
    trainer.broadcast()
    train_shard, eval_shard = plan.train_shard(comm.rank), plan.eval_shard(comm.rank)
    train_data = position.told(train_batches(config, train_shard, progress.seed, progress.step, device_id))
    eval_data = eval_batches(config, eval_shard, device_id)
    trainer.warm_up(made_up_batches(config, train_shard, device_id),
                    next(made_up_batches(config, eval_shard, device_id)), config.train.num_warmup_steps)
    if resumption:
        _restore(trainer, comm, resumption, progress)
    else:
        sinks.see(events.Built(plan, progress.seed, trainer.tensor_names, count_parameters(trainer.net),
                               count_flops(trainer.net, image_shape(config)), source, notes))
    for text in device_notes(config, os.environ):
        sinks.see(events.Noted(text))
    mx.nd.waitall()
    mx.random.seed(progress.seed)  # dropout, the same with and without a warm-up
    course = open_course(session.reference, plan, session.folder.metrics, progress.step // plan.steps_per_epoch)
    if comm.rank == 0 and (told := tell_reference(course, config, comm.world_size)):
        sinks.see(told)
    classes = class_names(config.data) if comm.rank == 0 else []
    saver, keeper = Saver(position.now), Keeper(session.folder, plan, classes)
    if not resumption:
        sinks.see(events.InitStopped())
    comm.barrier()
    run = Run(**vars(session), sinks=sinks, saver=saver, keeper=keeper, trainer=trainer, train_data=train_data,
              eval_data=lambda: position.told(eval_data()), clock=Clock(progress.clock_s), course=course)
    _begin(run)
    return run


def _begin(run: Run) -> None:
    """Log the start of the clock."""
    found = run.resumption
    if not found:
        run.sinks.see(events.RunStarted(run.plan, len(run.nodes)))
        return
    if found.damaged:
        reasons = '; '.join(reason for _, reason in found.damaged)
        run.sinks.see(events.Warned(f'{reasons}; put aside, the run goes on from {found.path}'))
    before = found.progress
    run.sinks.see(events.Resumed(
        run.plan, len(run.nodes), run.progress.step, run.progress.clock_s, str(found.path), before.world_size,
        before.global_batch_size, find_changes(before.config, run.plan.config)))


def _initial_weights(config: Config, comm: Comm, trainer: Trainer) -> tuple[str, list[str]]:
    """Put kept weights into rank 0's network, where asked for; return where they came from, and notes."""
    path = config.train.init_weights
    if path is None:
        return '', []

    def take() -> list[Any]:
        kept, arrays = load_weights(Path(path))
        notes = set_weights(trainer.net, arrays)
        trainer.optimizer.reset_masters()
        return [f'{path} ({kept.model["name"]}, {kept.epoch} epochs on {kept.data["dataset"]}, SHA-256 '
                f'{kept.sha256[:12]}…)', notes]
    source, notes = from_rank_0(comm, take)
    return source, notes


def _restore(trainer: Trainer, comm: Comm, found: checkpoint.Found, progress: Progress) -> None:
    """Go back to a checkpoint, which only rank 0 has read; its arrays are let go of."""
    def check() -> None:
        checkpoint.check_arrays(found.path, found.arrays, trainer.array_shapes())
        checkpoint.put_aside([p for p, _ in found.damaged])
        checkpoint.begin_again(found.path.parent, found.path, progress, found.arrays)
    on_rank_0(comm, check)
    trainer.restore(found.arrays if comm.rank == 0 else None)
    found.arrays.clear()
    trainer.optimizer.last_lr = progress.last_lr or None
    trainer.optimizer.is_batch_new = found.progress.global_batch_size != progress.global_batch_size
    trainer.loss_scale.value, trainer.loss_scale.num_finite_steps = progress.loss_scale, progress.num_finite_steps
