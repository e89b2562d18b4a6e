"""A training run: open it (ranks, plan, folder, sinks), build it (build.py), and train to its end
(loop.py).

resume.py has what only a resumed run needs. The docstring of run_events.py is an outline of a run.
"""

import os
import platform
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from mlperf_rn50.config import Config, check_values, to_tree
from mlperf_rn50.data.recordio import find_split
from mlperf_rn50.errors import ConfigError, RunFailed
from mlperf_rn50.files import make_folder, writing
from mlperf_rn50.mllog.writer import RunLog
from mlperf_rn50.model.fused import layout_warnings, with_layout
from mlperf_rn50.parser import Drill
from mlperf_rn50.runfolder.locks import FileLock
from mlperf_rn50.runfolder.names import RunFolder, new_run
from mlperf_rn50.system.cgroup import render_cpu_list
from mlperf_rn50.system.launcher_env import print_stderr
from mlperf_rn50.system.telemetry import Telemetry
from mlperf_rn50.train import run_events as events
from mlperf_rn50.train.build import build, start_clock
from mlperf_rn50.train.checkpoint.progress import Progress
from mlperf_rn50.train.checkpoint.resumable import clear_abandoned, clear_run
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.comm.rank_checks import digest_of_all_hosts
from mlperf_rn50.train.compare import find_reference, open_comparison
from mlperf_rn50.train.loop import OpenRun, RankPlace, train_to_end
from mlperf_rn50.train.plan import Plan, make_elastic_plan, make_plan, rate_world_size
from mlperf_rn50.train.resume import load_resumption, plan_resumed
from mlperf_rn50.train.sinks.drilled import Drilled
from mlperf_rn50.train.sinks.every_rank import Sampled, TraceFile, Watched
from mlperf_rn50.train.sinks.metrics_file import Metrics
from mlperf_rn50.train.sinks.mlperf_log import MlperfLog
from mlperf_rn50.train.sinks.progress_lines import ProgressLines
from mlperf_rn50.train.watchdog.heartbeat import Heartbeat

LOCK_PERIOD_S = 0.5  # time between two attempts to take the lock
# A run that is being killed may still write its checkpoint, for which watcher and launcher together
# allow 35 s.
LOCK_LIMIT_S = 60.0


@dataclass(frozen=True)
class RunArguments:
    """Arguments of train() on one rank.

    Args:
        config: the configuration, not yet checked; that of a resumed run was read from its run
            folder.
        resume: the run to resume, with its checkpoints folder or a single checkpoint; None starts a
            new run.
        is_elastic: True if a resumed run may have a different number of ranks, and a new one
            another number than the configured one.
        allowed: configuration keys that may change on resume, in addition to those declared with
            free_option.
        warnings: warnings about the configuration, which the run reports.
        drill: a fault to cause.
    """

    config: Config
    comm: Comm
    heartbeat: Heartbeat
    resume: tuple[RunFolder, Path] | None = None
    is_elastic: bool = False
    allowed: Sequence[str] = ()
    warnings: Sequence[str] = ()
    drill: Drill | None = None


def train(arguments: RunArguments) -> tuple[events.Ended, RunFolder]:
    """Train until the target is reached, the epochs are used up or a stop is requested; raise
    UserError on failure.

    Return the end of the run (converged, aborted or interrupted) and its files.
    """
    check_values(arguments.config)
    drill, world_size = arguments.drill, arguments.comm.world_size
    if drill and drill.rank >= world_size:
        raise ConfigError(f'--drill: got rank {drill.rank}, expected one below {world_size}')
    arguments.heartbeat.beat('start-up')
    with open_run(arguments) as opened:
        if drill and drill.rank == arguments.comm.rank:
            opened.sinks.append(Drilled(drill, opened.folder.metrics))
        for text in [*arguments.warnings, *layout_warnings(opened.plan.config)]:
            opened.emit(events.Warned(text))
        run = start_clock(build(opened))
        return train_to_end(run), run.folder


@contextmanager
def open_run(arguments: RunArguments) -> Iterator[OpenRun]:
    """Plan a run and hold its folder, with open sinks; raise UserError if the arguments do not fit
    data or checkpoint."""
    config, comm = arguments.config, arguments.comm
    with ExitStack() as cleanup:
        resumption = None
        if arguments.resume:
            folder, path = arguments.resume
            cleanup.enter_context(hold_run(comm, folder, arguments.heartbeat))
            resumption = load_resumption(comm, folder, path)
        digest = data_of_all_hosts(config, comm)
        if resumption:
            batch = resumption.progress.lr_batch_size
        else:
            num_ranks = rate_world_size(config, comm.world_size, arguments.is_elastic)
            batch = config.global_batch_size(num_ranks) or num_ranks
        # before a folder is created
        reference = comm.on_rank_0(lambda: find_reference(config, batch))
        cores = render_cpu_list(os.sched_getaffinity(0))
        own = [platform.node(), comm.local_rank, comm.local_size, cores]
        hosts = [RankPlace(*row) for row in comm.gather_object(own)]
        nodes = nodes_of(hosts)
        if resumption:
            plan, progress = plan_resumed(
                config,
                comm.world_size,
                nodes,
                resumption,
                is_elastic=arguments.is_elastic,
                allowed=arguments.allowed,
                digest=digest,
            )
        else:
            plan, progress = plan_new(config, comm, nodes, digest, arguments.is_elastic)
            folder = RunFolder(Path(config.run.dir), progress.result_index)
            cleanup.enter_context(hold_run(comm, folder, arguments.heartbeat))
        num_epochs = progress.step // plan.steps_per_epoch
        run = OpenRun(
            plan=plan,
            progress=progress,
            comm=comm,
            hosts=hosts,
            heartbeat=arguments.heartbeat,
            folder=folder,
            comparison=open_comparison(reference, plan, folder.metrics, num_epochs),
            resumption=resumption,
            sinks=[],
        )
        for sink in open_sinks(run):
            run.sinks.append(sink)
            cleanup.callback(sink.close)
        yield run


def data_of_all_hosts(config: Config, comm: Comm) -> str:
    """Return the digest of the data; raise DataError if they do not fit, or differ between hosts,
    before rank 0 writes files."""
    if not config.data.synthetic:
        for split in ('train', 'validation'):
            find_split(config.data, split)
    return digest_of_all_hosts(config.data, comm)


def nodes_of(hosts: Sequence[RankPlace]) -> list[int]:
    """Return the node number of every rank; nodes count from 0, in the order of their first
    ranks."""
    numbers = {name: i for i, name in enumerate(dict.fromkeys(h.name for h in hosts))}
    return [numbers[h.name] for h in hosts]


def plan_new(
    config: Config, comm: Comm, nodes: Sequence[int], digest: str, is_elastic: bool = False
) -> tuple[Plan, Progress]:
    """Return plan and progress of a new run; rank 0 claims the run number and chooses a seed or
    layout that is null.

    is_elastic: whether the number of ranks may differ from the configured one, for whose global
    batch size the learning rate is.
    """
    configured = config.world_size if is_elastic else None
    full = plan = make_plan(config, configured or comm.world_size)
    if configured:
        plan = make_elastic_plan(config, comm.world_size, full.global_batch_size)

    def choose() -> list[Any]:
        seed = secrets.randbelow(2**31) if config.run.seed is None else config.run.seed
        return [seed, with_layout(config).model.layout, new_run(Path(config.run.dir)).index]

    seed, layout, index = comm.from_rank_0(choose)
    config = replace(
        config,
        model=replace(config.model, layout=layout),
        run=replace(config.run, seed=seed),
    )
    plan = replace(plan, config=config, nodes=tuple(nodes))
    progress = Progress(
        step=0,
        seed=seed,
        world_size=plan.world_size,
        best_top1=0.0,
        clock_s=0.0,
        global_batch_size=plan.global_batch_size,
        lr_batch_size=full.global_batch_size,
        num_train=config.data.num_train,
        result_index=index,
        nodes=list(nodes),
        config=to_tree(config),
        data_sha256=digest,
    )
    return plan, progress


@contextmanager
def hold_run(comm: Comm, run: RunFolder, heartbeat: Heartbeat) -> Iterator[None]:
    """Hold a run's lock and remove unfinished files; raise UserError on all ranks if another
    program keeps the lock."""
    lock = FileLock(run.lock)
    attempts = count()
    try:
        while not comm.from_rank_0(lambda: _take(lock, next(attempts) * LOCK_PERIOD_S)):
            heartbeat.beat()
            time.sleep(LOCK_PERIOD_S)
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
    if waited_s > LOCK_LIMIT_S:
        raise RunFailed(  # a host that was lost may still hold it, so that a restart helps
            f'{lock.path}: {lock.holder()} writes this run and has not ended within '
            f'{LOCK_LIMIT_S:.0f} s; wait for it or stop it'
        )
    if not waited_s:
        print_stderr(
            f'mlperf-rn50: {lock.path}: another process still writes this run; waiting for it, at '
            f'most {LOCK_LIMIT_S:.0f} s'
        )
    return False


def open_sinks(run: OpenRun) -> Iterator[events.Sink]:
    """Open this rank's sinks for events; most of them exist only on rank 0."""
    config, folder = run.plan.config, run.folder
    yield Watched(run.heartbeat)
    yield Sampled(open_telemetry(config, run.comm, folder))
    yield TraceFile(folder.trace(run.comm.rank))
    if run.comm.rank:
        return
    v06_path = folder.result_v06 if config.run.log_v06 else None
    yield MlperfLog(RunLog(folder.result, v06_path, is_resumed=run.resumption is not None))
    yield Metrics(folder, config.data.dataset)
    yield ProgressLines(folder, config)
    if config.run.tensorboard:
        from mlperf_rn50.train.sinks.tensorboard import TensorBoard

        yield TensorBoard(folder.tensorboard, run.progress.step, config)


def open_telemetry(config: Config, comm: Comm, run: RunFolder) -> Telemetry:
    """Return this node's telemetry; it records only if configured, and only on the node's first
    rank."""
    if not config.run.telemetry or comm.local_rank:
        return Telemetry(None)
    make_folder(run.dir)  # the run folder may be on a local disk of each node
    num_gpus = 0
    if config.train.device == 'gpu':
        num_gpus = -(-comm.local_size // config.run.ranks_per_device)
    return Telemetry(run.telemetry(platform.node()), num_gpus)
