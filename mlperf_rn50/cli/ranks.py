"""Configuration and start of the commands that run on every rank."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from mlperf_rn50.config import Config
from mlperf_rn50.config_file import load_yaml, override, resolve_config, resolve_tree
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.system.cgroup import find_limits
from mlperf_rn50.system.gpu_env import DEVICE_VARIABLE, missing_settings
from mlperf_rn50.system.launcher_env import launched_local, launched_rank, launched_size
from mlperf_rn50.system.processor import set_omp_threads, unbound_threads
from mlperf_rn50.train.watchdog.heartbeat import PHASES, Heartbeat
from mlperf_rn50.train.watchdog.stall_report import stalled_folder
from mlperf_rn50.train.watchdog.watcher import run_rank, run_watched

if TYPE_CHECKING:
    from mlperf_rn50.train.comm.horovod import Comm


def load_config(
    options: Namespace, argv: Sequence[str], parser: ArgumentParser
) -> tuple[Config, Any]:
    """Return the configuration of a run and, for --resume, the run folder and checkpoint."""
    if options.resume and options.config:
        raise ConfigError(
            '--resume, --config: got both, expected one; a resumed run has its own configuration'
        )
    if options.resume:
        from mlperf_rn50.train.checkpoint.changes import recorded_changes
        from mlperf_rn50.train.checkpoint.resumable import find_run

        run, path = find_run(Path(options.resume))
        tree = override(load_yaml(run.config), recorded_changes(run))
        return resolve_tree(tree, str(run.config), argv, parser), (run, path)
    return resolve_config(Path(options.config) if options.config else None, argv, parser), None


def open_ranks(config: Config, heartbeat: Heartbeat, subset_sizes: Sequence[int] = ()) -> Comm:
    """Return all started ranks, and groups of the given numbers of them; imports MXNet and
    Horovod."""
    from mlperf_rn50.train.comm.horovod import open_comm
    from mlperf_rn50.train.comm.sharing import sharing_of

    gc.enable()  # see in_rank
    gc.freeze()
    compression = config.gradient_compression
    return open_comm(compression, subset_sizes, heartbeat.exchange, sharing_of(config))


@contextmanager
def _without_unused_packages() -> Iterator[None]:
    """Hide scikit-learn and SciPy, which MXNet would import for classes that no rank uses; this
    takes 0.9 of 2.5 s."""
    hidden = {'sklearn', 'scipy'} - sys.modules.keys()
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def in_rank(
    program: Callable[[Heartbeat], int],
    config: Config,
    can_stop: bool = False,
    run_dir: Path | None = None,
) -> int:
    """Run this rank's part of a command, with a watchdog if a launcher started it.

    Unless can_stop is set, a stop request ends the program at once. run_dir is by default run.dir
    of the configuration.
    """
    # Report invalid launcher variables before anything starts.
    launched_rank()
    num_local = launched_local()[1]
    # MXNet reads OMP_NUM_THREADS once, on import. If unset, MXNet starts a spinning thread per
    # core.
    cores = os.sched_getaffinity(0)
    set_omp_threads(unbound_threads(cores, os.cpu_count() or 1, num_local, find_limits()))
    # poll only every 5 ms, so that a waiting rank leaves its core to the others
    if config.train.device == 'cpu':
        os.environ.setdefault('HOROVOD_CYCLE_TIME', '5')
    else:  # also without a launcher
        os.environ.update(missing_settings({**os.environ, DEVICE_VARIABLE: config.train.device}))
    program = _without_unused_packages()(program)
    # until open_ranks, because the imports leave no garbage to look for
    gc.disable()
    if launched_size() is None:
        return run_rank(program, Heartbeat(), can_stop)
    limits_s = {phase: getattr(config.comm, key) for phase, key in PHASES.items()}
    folder = stalled_folder(run_dir or Path(config.run.dir), dict(os.environ))
    return run_watched(program, limits_s, folder, can_stop)
