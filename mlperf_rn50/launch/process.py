"""Run an engine, the program that starts the ranks: stop it in stages, return its exit code and
clean up.

The engine runs in a separate session, so that a terminal's Ctrl-C reaches only the launcher. The
launcher reads its signals one after another. It forwards a stop request and then gives the ranks
time for a checkpoint.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum, auto
from pathlib import Path

from mlperf_rn50.errors import EXIT_FAILED
from mlperf_rn50.system.launcher_env import RANK_VARIABLES
from mlperf_rn50.system.signals import STOP_SIGNALS, SignalQueue, end_with_parent

HOST_LOST = signal.SIGUSR2  # sent by a guard
LAUNCHER_SIGNALS = (*STOP_SIGNALS, HOST_LOST, signal.SIGCHLD)
STOP_LIMIT_S = 600.0  # time for a checkpoint after a stop request
TERM_LIMIT_S = 10.0  # time for the engine to end after SIGTERM
# time to end after a run has logged its end, without and with a stop request
END_LIMITS_S = (120.0, 30.0)
_LOOK_S = 10.0  # time between two checks whether the run has ended
_OF_RANKS = tuple(f'{name}='.encode() for name in RANK_VARIABLES)  # of ranks and their children
# Returns the status of a run that has ended, '' before the end, None if no run has begun.
StatusReader = Callable[[], str | None]


class Stage(IntEnum):
    """Stage of stopping an engine."""

    RUNNING = auto()
    STOPPING = auto()
    TERMINATING = auto()
    KILLING = auto()


_WAITING = {Stage.RUNNING: 'still starting', Stage.STOPPING: 'the stop request has had no effect'}


def stage_of(number: int | None, is_forced: bool) -> Stage | None:
    """Return the stage that a stop request, a later Ctrl-C or HOST_LOST requires; None for other
    signals and None."""
    if number == HOST_LOST or number in STOP_SIGNALS and is_forced:
        return Stage.TERMINATING
    return Stage.STOPPING if number in STOP_SIGNALS else None


def next_stage(stage: Stage, required: Stage | None) -> Stage:
    """Return the next stage after a signal that requires one, or after a timeout if required is
    None; never go back."""
    late = Stage.KILLING if stage >= Stage.TERMINATING else Stage.TERMINATING
    return late if required is None else max(stage, required)


def as_child() -> None:
    """Reset the signals of a new process, and let it end with the launcher; used as preexec_fn."""
    signal.set_wakeup_fd(-1)  # the pipe belongs to the launcher
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, HOST_LOST, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LAUNCHER_SIGNALS)
    end_with_parent(signal.SIGTERM)


def run_engine(
    command: Sequence[str],
    env: Mapping[str, str],
    signals: SignalQueue,
    job: str,
    limit_s: float = 0.0,
    status: StatusReader | None = None,
    report: Callable[[str], object] = lambda _: None,
    end_signal: signal.Signals = signal.SIGTERM,
    messengers: Sequence[subprocess.Popen] = (),
    output: int | None = None,
) -> int:
    """Run an engine to its end; return its exit code, 128 + N after signal N.

    The exit code is EXIT_FAILED if a host was lost, or if a time limit was exceeded before any stop
    request.

    Args:
        job: value of MLPERF_RN50_JOB in the environment of every process of the job.
        limit_s: limit for the start of the run; 0 for none. Once the run has begun, its ranks
            enforce their own limits.
        status: see StatusReader; None for a program without a state to save, which a stop request
            ends.
        report: called with a message about an exceeded limit, before the engine is terminated.
        messengers: processes that forward SIGUSR1 to the ranks as a stop request; if empty, the
            engine forwards it.
    """
    process = subprocess.Popen(
        command,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=as_child,
        stdout=output,
        stderr=output,
    )
    stage, since, has_ended, is_lost = Stage.RUNNING, time.monotonic(), False, False
    looked = since
    limits = {
        Stage.RUNNING: limit_s or float('inf'),
        Stage.STOPPING: STOP_LIMIT_S,
        Stage.TERMINATING: TERM_LIMIT_S,
        Stage.KILLING: 1.0,
    }
    while process.poll() is None:
        number = signals.next(min(1.0, since + limits[stage] - time.monotonic()))
        required, now = stage_of(number, signals.is_forced or not status), time.monotonic()
        if status and stage in _WAITING and not has_ended and now - looked >= _LOOK_S:
            looked, has_ended = now, bool(status())
            if has_ended:
                since, limits = now, limits | dict(zip(_WAITING, END_LIMITS_S))
        is_late = required is None and now - since >= limits[stage]
        if is_late and stage is Stage.RUNNING and not has_ended and status and status() is not None:
            is_late, limits[stage] = False, float('inf')
        if required is None and not is_late:
            continue
        if is_late and stage in _WAITING:
            report(
                f'{"the run has ended, but not its processes" if has_ended else _WAITING[stage]} '
                'after '
                f'{limits[stage]:.0f} s'
            )
        is_lost |= number == HOST_LOST or is_late and stage is Stage.RUNNING
        after = next_stage(stage, required)
        if after is stage and not is_late:
            continue  # the signal of this stage was already sent
        stage, since = after, time.monotonic()
        if stage is Stage.STOPPING:
            for messenger in messengers or [process]:
                messenger.send_signal(signal.SIGUSR1)
        elif stage is Stage.TERMINATING:
            process.send_signal(end_signal)
        elif stage is Stage.KILLING:
            kill_job(job, process.pid)
    if signals.is_forced or stage > Stage.STOPPING and (not status or stage is Stage.KILLING):
        kill_job(job, process.pid)
    # mpirun leaves its ssh clients behind if their logins hang
    kill_all(processes_of(job, with_ranks=False))
    if is_lost:
        return EXIT_FAILED
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def kill_job(job: str, group: int) -> None:
    """Kill the remaining processes of a job on this machine."""
    kill_all([-group, *processes_of(job)])


def kill_all(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def processes_of(job: str, with_ranks: bool = True) -> list[int]:
    """Return the processes of a job on this machine, found by their environment."""
    wanted, found = f'MLPERF_RN50_JOB={job}'.encode(), []
    for path in Path('/proc').glob('[0-9]*/environ'):
        with suppress(OSError):  # ended, or owned by another user
            variables = path.read_bytes().split(b'\0')
            if wanted in variables and (
                with_ranks or not any(v.startswith(_OF_RANKS) for v in variables)
            ):
                found.append(int(path.parent.name))
    return found


if __name__ == '__main__':
    # Execute mpirun or orted of a Slurm job with SIGTERM blocked. scancel sends SIGTERM also to
    # these programs, which would then kill the ranks. Open MPI unblocks all signals in the ranks.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    os.execv(sys.argv[1], sys.argv[1:])
