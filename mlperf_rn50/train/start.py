"""Everything before the clock of a run starts: ranks, plan, sinks, network, pipelines, warm-up."""
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np

from mlperf_rn50.config import Config, to_tree
from mlperf_rn50.data.pipeline import Batch, eval_batches, made_up_batches, train_batches
from mlperf_rn50.data.records import class_names
from mlperf_rn50.errors import CheckpointError, ConfigError, UserError
from mlperf_rn50.mlperf.writer import RunLog
from mlperf_rn50.model.weights import load_weights, set_weights
from mlperf_rn50.model.zoo import count_flops, count_parameters, image_shape
from mlperf_rn50.study.reference import Reference
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
from mlperf_rn50.train.run_lock import RunLock
from mlperf_rn50.train.saver import Saver
from mlperf_rn50.train.sinks.metrics import Metrics
from mlperf_rn50.train.sinks.mlperf_log import MlperfLog
from mlperf_rn50.train.sinks.terminal import Terminal
from mlperf_rn50.train.sinks.watched import Sampled, Watched
from mlperf_rn50.train.stop import catch
from mlperf_rn50.train.trainer import Trainer, device_notes
from mlperf_rn50.train.watch import Position

_LOCK_PERIOD_S = 0.5
_DROP_CACHES = Path('/proc/sys/vm/drop_caches')


class StopRequest:
    """Whether a signal asked this rank to stop."""

    def __init__(self, position: Position) -> None:
        self._position = position
        catch(position.ask)

    @property
    def is_set(self) -> bool:
        return self._position.is_asked


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


@dataclass
class Run:
    """One run on one rank: what it works with.

    Args:
        stop: whether this rank was asked to stop.
        train_data: training batches without end, from progress.step on.
        course: its evaluations beside those of reference runs, which rank 0 has.
    """

    plan: Plan
    comm: Comm
    hosts: Sequence[Host]
    folder: RunFolder
    sinks: events.Sinks
    stop: StopRequest
    saver: Saver
    keeper: Keeper
    progress: Progress
    trainer: Trainer
    train_data: Iterator[Batch]
    eval_data: Callable[[], Iterator[Batch]]
    clock: Clock
    course: Course

    @property
    def num_hosts(self) -> int:
        return len(_ranks_of_hosts(self.hosts))


@dataclass(frozen=True)
class Resumption:
    """What a resumed run goes on from.

    Args:
        arrays: of the checkpoint, on rank 0 only.
        damaged: newer checkpoints that cannot be used, each with what is wrong with it, on rank 0 only.
    """

    path: Path
    before: Progress
    arrays: dict[str, np.ndarray] | None
    damaged: Sequence[tuple[Path, str]] = ()


def from_rank_0(comm: Comm, make: Callable[[], Any]) -> Any:
    """What rank 0 makes, of JSON's kinds, on all ranks.

    Raises:
        UserError: rank 0 cannot; on every rank.
    """
    said: dict[str, Any] = {}
    if comm.rank == 0:
        try:
            said = {'made': make()}
        except UserError as e:
            said = {'error': str(e)}
    said = comm.gather_object(said)[0]
    if 'error' in said:
        raise UserError(said['error'])
    return said['made']


@contextmanager
def hold_run(comm: Comm, run: RunFolder, position: Position) -> Iterator[None]:
    """Nobody else writes a run meanwhile; what a killed writer of it has left unfinished is removed.

    Raises:
        UserError: somebody else goes on writing it; on every rank.
    """
    lock = RunLock(run)
    try:
        while not from_rank_0(comm, lock.take):
            position.now()
            time.sleep(_LOCK_PERIOD_S)
        if lock.is_held:
            run.clear_unfinished()
            clear_abandoned(run)
        yield
    finally:
        lock.close()


def load_resumption(comm: Comm, run: RunFolder, path: Path) -> Resumption:
    """A checkpoint that rank 0 reads for all: the newest whole one of a folder, or the one that is named.

    Raises:
        UserError: rank 0 cannot use it, or the run needs no resuming; on every rank.
    """
    own: list[Resumption] = []

    def load() -> list[Any]:
        check_unfinished(run)
        found = checkpoint.load_newest(path) if not is_one_checkpoint(path) else \
            checkpoint.Found(path, *checkpoint.load(path))
        own.append(Resumption(found.path, found.progress, found.arrays, found.damaged))
        return [str(found.path), asdict(found.progress)]
    name, before = from_rank_0(comm, load)
    return own[0] if own else Resumption(Path(name), parse_progress(before), None)


def load_reference(comm: Comm, config: Config) -> Reference | None:
    """What the run is compared with, which rank 0 alone reads and has.

    Raises:
        UserError: what was named cannot be read, or compared with; on every rank.
    """
    own: list[Reference | None] = [None]

    def find() -> None:
        own[0] = find_reference(config, comm.world_size)
    from_rank_0(comm, find)
    return own[0]


def plan_run(config: Config, comm: Comm, nodes: Sequence[int], resumption: Resumption | None,
             is_elastic: bool, allowed: Sequence[str] = ()) -> tuple[Plan, Progress]:
    """The plan of a run and how far it is, the same on all ranks.

    Args:
        nodes: of every rank, counted from 0.
        is_elastic: whether it may go on with another number of ranks.
        allowed: keys of the configuration that may differ from before, beside those that always may.

    Raises:
        UserError: configuration, ranks and checkpoint do not go together.
    """
    if not resumption:
        plan = replace(make_plan(config, comm.world_size), nodes=tuple(nodes))
        drawn = secrets.randbelow(2**31) if config.run.seed is None else config.run.seed
        seed, index = from_rank_0(comm, lambda: [drawn, new_run(Path(config.run.dir)).index])
        batch = plan.global_batch_size
        progress = Progress(0, seed, plan.world_size, 0.0, 0.0, batch, batch, config.data.num_train, index,
                            list(nodes))
        plan = _with_seed(plan, seed)
        return plan, replace(progress, config=to_tree(plan.config))
    before = resumption.before
    plan = make_elastic_plan(config, comm.world_size, before.lr_batch_size) if is_elastic \
        else make_plan(config, comm.world_size)
    plan = replace(plan, nodes=tuple(nodes))
    _check_resumption(resumption, plan, is_elastic)
    step = resumed_step(plan, before.step, before.global_batch_size, before.nodes == list(nodes))
    if step >= plan.max_epochs * plan.steps_per_epoch:
        raise ConfigError(f'train.max_epochs: got {plan.max_epochs}, and the checkpoint has taken all of them; '
                          'raise it to go on')
    check_changes(find_changes(before.config, config), allowed, str(resumption.path))
    plan = _with_seed(plan, before.seed)
    return plan, replace(
        before, step=step, world_size=plan.world_size, global_batch_size=plan.global_batch_size,
        nodes=list(nodes), num_resumes=before.num_resumes + 1, images=0, train_s=0.0, config=to_tree(plan.config))


def _with_seed(plan: Plan, seed: int) -> Plan:
    return replace(plan, config=replace(plan.config, run=replace(plan.config.run, seed=seed)))


def _check_resumption(resumption: Resumption, plan: Plan, is_elastic: bool) -> None:
    """Raise CheckpointError where a checkpoint does not fit the ranks and the configuration."""
    before = resumption.before
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


def open_sinks(config: Config, comm: Comm, folder: RunFolder, position: Position, is_resumed: bool,
               first_step: int) -> events.Sinks:
    """What reads the events on this rank, from a step on: most of it on rank 0 only."""
    sinks: list[events.Sink] = [Watched(position), Sampled(open_telemetry(config, comm, folder))]
    if comm.rank == 0:
        log = RunLog(folder.result, folder.result_v06 if config.run.log_v06 else None, is_resumed)
        sinks += [MlperfLog(log), Metrics(folder), Terminal(folder)]
        if config.run.tensorboard:
            from mlperf_rn50.train.sinks.tensorboard import TensorBoard
            sinks.append(TensorBoard(folder.tensorboard, first_step))
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


def _ranks_of_hosts(hosts: Sequence[Host]) -> list[tuple[str, int]]:
    """Name and number of ranks of each host, in the order of their first rank."""
    return [(h.name, h.local_size) for h in hosts if h.local_rank == 0]


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


def start(config: Config, comm: Comm, hosts: Sequence[Host], position: Position, stop: StopRequest,
          resumption: Resumption | None, folder: RunFolder, plan: Plan, progress: Progress,
          sinks: events.Sinks, reference: Reference | None = None) -> Run:
    """Builds and warms up everything, off the clock; the clock starts when it returns.

    Raises:
        UserError: the data or the weights cannot be used.
    """
    if not resumption:
        sinks.see(events.Opened(plan.config, _ranks_of_hosts(hosts), *_clear_caches(config, comm, sinks)))
        sinks.see(events.InitStarted(plan, progress.seed))
    device_id = device_id_of(config, comm)
    leave_openmp_to_engine()
    trainer = Trainer(plan, comm, progress.seed, device_id, position.computed)
    source, notes = _initial_weights(config, comm, trainer) if not resumption else ('', [])
    trainer.broadcast()
    train_data = position.told(
        train_batches(plan.config, plan.train_shard(comm.rank), progress.seed, progress.step, device_id))
    eval_data = eval_batches(plan.config, plan.eval_shard(comm.rank), device_id)
    made_up = made_up_batches(plan.config, plan.train_shard(comm.rank), device_id)
    trainer.warm_up(made_up, next(made_up_batches(plan.config, plan.eval_shard(comm.rank), device_id)),
                    config.train.num_warmup_steps)
    if resumption:
        _restore(trainer, comm, resumption, progress)
    else:
        sinks.see(events.Built(plan, progress.seed, trainer.tensor_names, count_parameters(trainer.net),
                               count_flops(trainer.net, image_shape(config)), source, notes))
    for text in device_notes(config, os.environ):
        sinks.see(events.Noted(text))
    mx.nd.waitall()
    mx.random.seed(progress.seed)  # dropout, the same with and without a warm-up
    course = open_course(reference, plan, folder.metrics, progress.step // plan.steps_per_epoch)
    if comm.rank == 0 and (told := tell_reference(course, plan.config, comm.world_size)):
        sinks.see(told)
    saver, classes = Saver(position.now), class_names(config.data) if comm.rank == 0 else []
    if not resumption:
        sinks.see(events.InitStopped())
    comm.barrier()
    run = Run(plan, comm, hosts, folder, sinks, stop, saver, Keeper(folder, plan, classes), progress, trainer,
              train_data, lambda: position.told(eval_data()), Clock(progress.clock_s), course)
    if resumption and resumption.damaged:
        reasons = '; '.join(reason for _, reason in resumption.damaged)
        sinks.see(events.Warned(f'{reasons}; put aside, the run goes on from {resumption.path}'))
    sinks.see(_began(run, resumption))
    return run


def _began(run: Run, resumption: Resumption | None) -> events.Event:
    """What the start of the clock is in the log."""
    if not resumption:
        return events.RunStarted(run.plan, run.num_hosts)
    before = resumption.before
    return events.Resumed(run.plan, run.num_hosts, run.progress.step, run.progress.clock_s, str(resumption.path),
                          before.world_size, before.global_batch_size, find_changes(before.config, run.plan.config))


def _initial_weights(config: Config, comm: Comm, trainer: Trainer) -> tuple[str, list[str]]:
    """Puts kept weights into rank 0's network, where asked for; where they came from, and notes.

    Raises:
        UserError: rank 0 cannot use them; on every rank.
    """
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


def _restore(trainer: Trainer, comm: Comm, resumption: Resumption, progress: Progress) -> None:
    """Goes back to a checkpoint, which only rank 0 has read; off the clock."""
    path, arrays = resumption.path, resumption.arrays or {}

    def check() -> None:
        checkpoint.check_arrays(path, arrays, trainer.array_shapes())
        checkpoint.put_aside([p for p, _ in resumption.damaged])
        checkpoint.begin_again(path.parent, path, progress, arrays)
    from_rank_0(comm, check)
    trainer.restore(resumption.arrays)
    trainer.optimizer.last_lr = progress.last_lr or None
    trainer.optimizer.is_batch_new = resumption.before.global_batch_size != progress.global_batch_size
    trainer.loss_scale.value, trainer.loss_scale.num_finite_steps = progress.loss_scale, progress.num_finite_steps
