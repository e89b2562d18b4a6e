"""What the commands that run on every rank share: their configuration, and the rank itself."""
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from mlperf_rn50.config import Config
from mlperf_rn50.options import resolve_config
from mlperf_rn50.system.cgroup import find_limits
from mlperf_rn50.system.launcher_env import launched_local, launched_rank, launched_size
from mlperf_rn50.system.topology import set_omp_threads, unbound_threads
from mlperf_rn50.train.watchdog.position import PHASES, Position
from mlperf_rn50.train.watchdog.signals import STOP_SIGNALS, handle_in_thread
from mlperf_rn50.train.watchdog.stall_report import stalled_folder
from mlperf_rn50.train.watchdog.watcher import run_watched


def load_config(options: Namespace, argv: Sequence[str], parser: ArgumentParser) -> tuple[Config, Any]:
    """The configuration of a run, and for one that is resumed its folder and checkpoint."""
    if not options.resume:
        return resolve_config(Path(options.config) if options.config else None, argv, parser), None
    from mlperf_rn50.train.checkpoint.run_folder import find_run
    resume = find_run(Path(options.resume))
    return resolve_config(resume[0].config, argv, parser), resume


def add_resume_options(parser: ArgumentParser) -> None:
    """Adds the options of a run that goes on."""
    parser.add_argument('--resume', metavar='DIR', type=str, help='go on with the run in this folder')
    parser.add_argument('--elastic', action='store_true', help='--resume with another number of ranks than before')
    parser.add_argument('--allow-changed', metavar='KEYS', type=str,
                        help='--resume with other values of these keys than before, such as schedule.base_lr,data.crop')


def in_rank(program: Callable[[Position], int], config: Config, can_stop: bool = False,
            run_dir: Path | None = None) -> int:
    """Run this rank's part of a command, watched where a launcher started it.

    Asked to stop, it is ended at once unless can_stop; run_dir: None for that of the configuration.
    """
    launched_rank(), launched_local()  # what a launcher got wrong is said before anything starts
    # MXNet reads OMP_NUM_THREADS once, when it is imported; unset, it spins as many threads as the machine has.
    set_omp_threads(unbound_threads(os.sched_getaffinity(0), os.cpu_count() or 1, launched_local()[1], find_limits()))
    if config.train.device == 'cpu':  # a rank that waits must leave its core to the others: look for work every 5 ms
        os.environ.setdefault('HOROVOD_CYCLE_TIME', '5')
    if launched_size() is None:
        position = Position()
        with handle_in_thread(position.request_stop if can_stop else None):  # before the imports, which take seconds
            return program(position)
    limits_s = {phase: getattr(config.comm, key) for phase, key in PHASES.items()}
    folder = stalled_folder(run_dir or Path(config.run.dir), dict(os.environ))
    # Asked to stop while it starts, a run stops after its first step: the signals wait until train() lets them in.
    signal.pthread_sigmask(signal.SIG_BLOCK if can_stop else signal.SIG_UNBLOCK, STOP_SIGNALS)
    return run_watched(program, config.comm.stall_limit_s, limits_s, folder, can_stop)
