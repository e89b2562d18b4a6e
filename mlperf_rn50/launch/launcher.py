"""Start of the ranks: an engine, with the limits and guards around it, is stopped in stages.

The engine runs in a separate session, so that a terminal's Ctrl-C reaches only the launcher. The
launcher reads its signals one after another. It forwards a stop request and then gives the ranks
time for a checkpoint.
"""

import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum, auto
from io import FileIO
from pathlib import Path
from tempfile import TemporaryDirectory

from mlperf_rn50.config import Config
from mlperf_rn50.errors import EXIT_AT_ONCE, EXIT_FAILED, EXIT_RESUMABLE, ConfigError, RunFailed
from mlperf_rn50.launch.attempts import give_up_reason
from mlperf_rn50.launch.engines import (
    CHECKOUT,
    Engine,
    Options,
    announce,
    environment,
    plain_output,
    run_scontrol,
    slurm_name,
)
from mlperf_rn50.launch.helpers import (
    HOST_LOST,
    as_child,
    memory_file,
    start_helper,
    text_of,
    wait_briefly,
)
from mlperf_rn50.launch.hosts import check_ranks, silent_hosts
from mlperf_rn50.launch.placement import Placement
from mlperf_rn50.launch.supervisor import NOT_REACHED, StatusReader, StopReader
from mlperf_rn50.runfolder.records import Failure, note_failure, read_attempts, read_failures
from mlperf_rn50.system.launcher_env import RANK_VARIABLES, resume_command
from mlperf_rn50.system.mpi_session import (
    SETTING_FILES,
    SHARED_MEMORY,
    blame_settings,
    mpi_settings,
    reason_of,
    tmp_dir,
)
from mlperf_rn50.system.signals import STOP_SIGNALS, SignalQueue, end_with_parent
from mlperf_rn50.text import printable

STOP_LIMIT_S = 600.0  # time for a checkpoint after a stop request
TERM_LIMIT_S = 10.0  # time for the engine to end after SIGTERM
# time to end after a run has logged its end, without and with a stop request
END_LIMITS_S = (120.0, 30.0)
LOOK_S = 10.0  # time between two checks whether the run has ended
# The launcher waits GRACE_S longer than the start limit, which ranks that already run enforce
# themselves.
GRACE_S = 120.0
# time for the guards to start on this machine, and for each of them
_GUARDS_S = 60.0
_GUARD_S = 0.5
_LIST_S = 20.0  # time for launch/guard.sh to list the processes of a job; each host has 15 s
# In the names of jobs beside the attempts (a test of Open MPI, the end of MPS), because the guards
# of an attempt may still be ending the processes with its name.
SIDE_JOB = 'm'
SCONTROL_PAUSE_S = 5.0  # before a second question to Slurm
_EXEC_S = 0.1  # in which a process begins to execute a program
GUARD = str(CHECKOUT / 'launch/guard.sh')
# Linux's limit per argument, MAX_ARG_STRLEN, less the final zero byte
_MAX_ARGUMENT_BYTES = (128 << 10) - 1
_MPI_ERRORS = (EXIT_FAILED, *range(128 + signal.NSIG, 256))  # exit codes of mpirun's own errors
# folder of launch/engines/openmpi.sh or bind.sh
_LEFTOVER = re.compile(r'mlperf_rn50-(\d+-[0-9a-f]{8}[-\w]*)')
_LEFTOVER_S = 3600.0  # least age: containers with the host's /dev/shm do not see its processes
_OF_RANKS = tuple(f'{name}='.encode() for name in RANK_VARIABLES)  # of ranks and their children


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
    if number == HOST_LOST:
        return Stage.TERMINATING
    if number in STOP_SIGNALS:
        return Stage.TERMINATING if is_forced else Stage.STOPPING
    return None


def next_stage(stage: Stage, required: Stage | None, is_late: bool) -> Stage:
    """Return the stage after the present one, never an earlier one.

    Args:
        required: by a signal or a stop request; None for neither.
        is_late: whether the time limit of the present stage is exceeded.
    """
    if required is not None:
        return max(stage, required)
    if not is_late:
        return stage
    return Stage.KILLING if stage >= Stage.TERMINATING else Stage.TERMINATING


class StageClock:
    """Stage of stopping an engine, and the time limit of each stage."""

    def __init__(self, limit_s: float, status: StatusReader | None):
        self.stage = Stage.RUNNING
        self.awaited = _WAITING
        # of the run, as last seen by StatusReader; the engine may still run when it has ended
        self.run_status: str | None = None
        self._status = status
        self._since = self._looked = time.monotonic()
        self.limits = {
            Stage.RUNNING: limit_s or float('inf'),
            Stage.STOPPING: STOP_LIMIT_S,
            Stage.TERMINATING: TERM_LIMIT_S,
            Stage.KILLING: 1.0,
        }

    @property
    def limit_s(self) -> float:
        return self.limits[self.stage]

    def left_s(self) -> float:
        return self._since + self.limit_s - time.monotonic()

    def update_limits(self) -> None:
        """Look from time to time, and when the time is up, whether the run has begun or ended.

        A run that has begun needs no limit for its start; the processes of one that has ended get
        less time.
        """
        now = time.monotonic()
        is_due = now - self._looked >= LOOK_S or self.left_s() <= 0
        if not self._status or self.stage not in _WAITING or not is_due:
            return
        self._looked = now
        was_over = bool(self.run_status)
        with suppress(OSError):  # storage may answer at the next look
            self.run_status = self._status()
        is_over = bool(self.run_status)
        if is_over and not was_over:
            self._since = now
            self.awaited = dict.fromkeys(_WAITING, 'the run has ended, but not its processes')
            self.limits[Stage.RUNNING], self.limits[Stage.STOPPING] = END_LIMITS_S
        elif was_over and not is_over:  # the end was that of an earlier attempt
            self.awaited = _WAITING
            self.limits[Stage.STOPPING] = STOP_LIMIT_S
        if self.run_status == '':
            self.limits[Stage.RUNNING] = float('inf')

    def enter(self, stage: Stage) -> None:
        self.stage = stage
        self._since = time.monotonic()


def run_engine(
    command: Sequence[str],
    env: Mapping[str, str],
    signals: SignalQueue,
    job: str,
    limit_s: float = 0.0,
    status: StatusReader | None = None,
    should_stop: StopReader = lambda: False,
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
        should_stop: whether the run must write a checkpoint and end; asked once the run has begun.
        report: called with a message about an exceeded limit, before the engine is terminated.
        messengers: processes that forward SIGUSR1 to the ranks as a stop request; if empty, the
            engine forwards it.
    """

    def prepare() -> None:
        as_child()
        end_with_parent(end_signal)

    process = subprocess.Popen(
        command,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=prepare,
        stdout=output,
        stderr=output,
    )
    clock = StageClock(limit_s, status)
    has_failed = False
    while process.poll() is None:
        number = signals.next(min(1.0, clock.left_s()))
        clock.update_limits()
        required = stage_of(number, signals.is_forced or not status)
        is_running = clock.stage is Stage.RUNNING
        can_stop = required is None and is_running and clock.run_status == ''
        if can_stop and should_stop():
            required = Stage.STOPPING
            clock.limits[required] = float('inf')  # after an evaluation; ranks have their own
        is_late = required is None and clock.left_s() <= 0
        if number == HOST_LOST or (is_late and is_running):
            has_failed = True
        stage = next_stage(clock.stage, required, is_late)
        if stage is clock.stage and not is_late:
            continue
        if is_late and clock.stage in clock.awaited:
            report(f'{clock.awaited[clock.stage]} after {clock.limit_s:.0f} s')
        clock.enter(stage)
        if stage is Stage.STOPPING:
            for messenger in messengers or [process]:
                messenger.send_signal(signal.SIGUSR1)
        elif stage is Stage.TERMINATING:
            process.send_signal(end_signal)
        elif stage is Stage.KILLING:
            kill_job(job, process.pid)
    # Ranks without a state to save, and those that were terminated in vain, are not waited for.
    is_terminated = clock.stage > Stage.STOPPING and not status
    if signals.is_forced or is_terminated or clock.stage is Stage.KILLING:
        kill_job(job, process.pid)
    kill_rest(job)
    if has_failed:
        return EXIT_FAILED
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def kill_job(job: str, group: int) -> None:
    """Kill the remaining processes of a job on this machine."""
    kill_all([-group, *processes_of(job)])


def kill_rest(job: str) -> None:
    """Kill what an engine that has ended leaves behind, except ranks, which may write a checkpoint.

    mpirun leaves its ssh clients if their logins hang. A second look finds one that was between two
    programs at the first, because it then has no environment for a moment.
    """
    kill_all(processes_of(job, with_ranks=False))
    time.sleep(_EXEC_S)
    kill_all(processes_of(job, with_ranks=False))


def kill_all(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def processes_of(job: str, with_ranks: bool = True) -> list[int]:
    """Return the processes of a job on this machine, found by their environment."""
    wanted = f'MLPERF_RN50_JOB={job}'.encode()
    found = []
    for path in Path('/proc').glob('[0-9]*/environ'):
        with suppress(OSError):  # ended, or owned by another user
            variables = path.read_bytes().split(b'\0')
            is_rank = any(v.startswith(_OF_RANKS) for v in variables)
            if wanted in variables and (with_ranks or not is_rank):
                found.append(int(path.parent.name))
    return found


def remove_leftovers(folders: Iterable[Path]) -> None:
    """Remove the old empty job folders of killed launchers, unless a process of the job still
    runs."""
    for path in [path for folder in folders for path in folder.glob('mlperf_rn50-*')]:
        match = _LEFTOVER.fullmatch(path.name)
        with suppress(OSError):  # not empty, or already removed
            status = path.lstat()
            is_old = time.time() - status.st_mtime > _LEFTOVER_S
            is_own = status.st_uid == os.geteuid()
            if match and is_own and is_old and not processes_of(match[1]):
                path.rmdir()


@dataclass(frozen=True)
class Launcher:
    """A running launcher: its name, engine, options and signals."""

    name: str
    engine: Engine
    options: Options
    signals: SignalQueue

    def say(self, text: str) -> None:
        """Print a message to stderr."""
        announce(f'launch {self.name}', text)

    def start(
        self,
        config: Config,
        placement: Placement,
        job: str,
        words: Sequence[str],
        status: StatusReader | None,
        should_stop: StopReader,
    ) -> int:
        """Run a command of the program on all ranks, with limits for its start and end; return its
        exit code."""

        def report(text: str) -> None:
            with memory_file() as output:
                list_job = [GUARD, '--list', *dict.fromkeys(placement.hosts), job]
                lister = start_helper(list_job, stdout=output)
                is_complete = wait_briefly([lister], self.signals, _LIST_S)
                left = text_of(output).splitlines()
            if not left:
                left = ['nothing' if is_complete else 'processes not listed in time']
            self.say(f'{words[0]}: {text}; waiting for {", ".join(left)}; stopped')
            # '': no host is at fault
            note_failure(placement.run_dir, Failure(job, '', f'{words[0]}: {text}'))

        limit_s = config.comm.start_limit_s
        code = self.start_ranks(
            placement,
            job,
            [*self.engine.program(self.options), *words],
            config.train.device,
            limit_s=limit_s + GRACE_S if limit_s else 0.0,
            status=status,
            should_stop=should_stop,
            report=report,
        )
        has_begun = False
        with suppress(OSError):  # storage may answer again
            has_begun = status is not None and status() is not None
        if code in _MPI_ERRORS and not has_begun:
            self.try_mpi(placement, job + SIDE_JOB, config.train.device)
        return code

    def try_mpi(self, placement: Placement, job: str, device: str) -> None:
        """If Open MPI cannot start ranks, report why; raise ConfigError if settings of the user are
        the cause."""
        if self.engine.script_for(self.options.image) != 'openmpi.sh':
            return
        silent = silent_hosts([h.name for h in self.options.hosts], self.signals)
        if silent or self.signals.is_requested:
            return
        *prefix, _bind, program = self.engine.program(self.options)
        top = Path(program).parents[2]
        command = [*prefix, f'{top}/.venv/bin/python', '-I', f'{top}/launch/engines/try_mpi.py']
        settings = mpi_settings(os.environ, CHECKOUT / '.venv')

        def reason_with(names: Collection[str]) -> str:
            env = {k: v for k, v in os.environ.items() if k not in settings}
            env |= {name: settings[name] for name in names}
            env |= {SETTING_FILES: os.devnull, 'MLPERF_RN50_MPI_HELP': '1'}
            # the guards of an earlier job may still end its processes
            own_job = job + secrets.token_hex(4)
            with memory_file() as output:
                code = self.start_ranks(
                    placement,
                    own_job,
                    command,
                    device,
                    limit_s=GRACE_S,
                    env=env,
                    output=output.fileno(),
                )
                return reason_of(text_of(output)) if code in _MPI_ERRORS else ''

        faults, reason = blame_settings(list(settings), reason_with)
        if not faults and reason:
            self.say(f'Open MPI cannot start ranks: {reason}')
        if not faults or self.signals.is_requested:
            return
        shown = ', '.join(
            f'{n}={settings[n]}{"" if n in os.environ else " in mca-params.conf"}' for n in faults
        )
        raise ConfigError(
            f'{shown}: Open MPI cannot start ranks with this setting: {reason}; correct or remove '
            'it'
        )

    def start_ranks(
        self,
        placement: Placement,
        job: str,
        command: Sequence[str],
        device: str,
        *,
        limit_s: float = 0.0,
        status: StatusReader | None = None,
        should_stop: StopReader = lambda: False,
        report: Callable[[str], object] = lambda _: None,
        env: Mapping[str, str] = os.environ,
        output: int | None = None,
    ) -> int:
        """Run a program on all ranks and return its exit code; see run_engine for the limits."""
        self.engine.check_horovod(self.options.image, placement.num_ranks)
        # With Slurm's variables, mpirun would start the ranks on the nodes of the surrounding Slurm
        # job.
        outer = {k: v for k, v in env.items() if self.engine.in_slurm or not k.startswith('SLURM_')}
        env = environment(self.options, {**plain_output(sys.stdout, outer), **outer}, job, device)
        script = str(CHECKOUT / 'launch/engines' / self.engine.script_for(self.options.image))
        slots = ','.join(f'{host}:{placement.ranks_per_node}' for host in placement.hosts)
        if len(slots) > _MAX_ARGUMENT_BYTES:
            raise ConfigError(
                f'hosts: got {len(slots):,} characters for {len(placement.hosts):,} hosts, '
                f'expected at most {_MAX_ARGUMENT_BYTES:,} (limit of Linux for an argument); use '
                'shorter host names'
            )
        remove_leftovers((SHARED_MEMORY, tmp_dir()))
        with self.guards(placement, job) as guards:
            if self.signals.is_requested:
                return EXIT_AT_ONCE
            code = run_engine(
                [script, slots, *command],
                env,
                self.signals,
                job,
                limit_s=limit_s,
                status=status,
                should_stop=should_stop,
                report=report,
                end_signal=signal.SIGINT if self.engine.in_slurm else signal.SIGTERM,
                messengers=() if self.engine.forwards_stop else guards,
                output=output,
            )
        for folder in (SHARED_MEMORY, tmp_dir()):  # Open MPI does not clean up after a killed job
            shutil.rmtree(folder / f'mlperf_rn50-{job}', ignore_errors=True)
        return code

    @contextmanager
    def guards(self, placement: Placement, job: str) -> Iterator[Sequence[subprocess.Popen]]:
        """Run a guard per host of ssh or horovodrun; it ends the ranks if the launcher dies and
        reports a lost host."""
        hosts = placement.hosts if self.options.hosts or not self.engine.forwards_stop else ()
        words = ['--launcher', str(os.getpid()), os.path.abspath(placement.run_dir), job]
        with memory_file() as reasons:
            # one pipe for all guards, because the number of open files is limited
            reader, writer = os.pipe()
            guards = [
                start_helper([GUARD, '--host', host, *words], stdout=writer, stderr=reasons)
                for host in hosts
            ]
            os.close(writer)
            try:
                with open(reader, 'rb', buffering=0) as output:  # closed when each guard is ready
                    self._await_end(output, _GUARDS_S + _GUARD_S * len(hosts))
                yield guards
            finally:
                lost = [host for host, process in zip(hosts, guards) if process.poll() is not None]
                for process in guards:
                    process.terminate()
                    process.send_signal(signal.SIGCONT)  # it may be stopped
                wait_briefly(guards, self.signals, TERM_LIMIT_S)
                lines = text_of(reasons).splitlines()
                causes = dict(line.split(' ', 1) for line in lines if f' {NOT_REACHED}: ' in line)
                for host in lost:  # a guard ends earlier if it loses the connection to its host
                    cause = printable(causes.get(host, 'lost its connection to the launcher'))
                    note_failure(placement.run_dir, Failure(job, host, cause, is_outside=True))
                self.signals.discard(HOST_LOST)  # it concerns the job that has ended

    def _await_end(self, output: FileIO, limit_s: float) -> None:
        """Wait for the end of an output, or a stop request; raise RunFailed after a time limit."""
        end = time.monotonic() + limit_s
        while not self.signals.is_requested:
            if select.select([output], [], [], 0.2)[0] and not output.read(select.PIPE_BUF):
                return
            if time.monotonic() > end:
                raise RunFailed(
                    f'{GUARD} did not start within {limit_s:.0f} s; see the load of this machine'
                )

    def run_program(self, ranks_per_node: int, command: Sequence[str], device: str) -> int:
        """Run a program with a number of ranks on this machine or each host, without checks and
        restarts."""
        check_ranks(self.options.hosts, ranks_per_node, 'RANKS')
        hosts = tuple(h.name for h in self.options.hosts) or ('localhost',)
        job = new_token()
        bound = [str(CHECKOUT / 'launch/bind.sh'), *command]
        with TemporaryDirectory() as folder:
            placement = Placement(Path(folder), hosts, ranks_per_node)
            code = self.start_ranks(placement, job, bound, device, status=lambda: None)
            for lost in read_failures(placement.run_dir):
                self.say(f'host {lost.host} {lost.cause}')
            if code == EXIT_FAILED:
                self.try_mpi(placement, job + SIDE_JOB, device)
        return code

    def requeue(self, code: int, run_dir: Path, has_begun: bool) -> int:
        """Requeue a Slurm job whose run can be resumed, unless it was cancelled or must give up;
        return the exit code.

        has_begun: whether the ranks of this start recorded anything. If not, the time limit ended
        in the doctor, and would probably end the next start there, too.
        """
        if code != EXIT_RESUMABLE:
            return code
        job = os.environ['SLURM_JOB_ID']
        if reason := give_up_reason(read_attempts(run_dir, job)):
            self.say(reason)
            return EXIT_FAILED
        chosen = self.options.run
        resume = f'resume with: {resume_command(chosen.checkpoints if chosen else run_dir)}'
        name = slurm_name(os.environ)
        is_shown, shown = run_scontrol('show', 'job', name)
        if not is_shown:  # slurmctld may be starting again
            time.sleep(SCONTROL_PAUSE_S)
            is_shown, shown = run_scontrol('show', 'job', name)
        if not is_shown:
            self.say(f'not requeued, because Slurm does not answer ({shown}); {resume}')
            return code
        # An ending job is COMPLETING both after scancel and at its time limit; only the reason
        # tells them apart.
        if 'JobState=RUNNING' not in shown and 'Reason=TimeLimit' not in shown:
            self.say(f'cancelled; the checkpoint is in {run_dir}; {resume}')
            return code
        if not has_begun:
            self.say(
                'stopped before the training began; not requeued, because the next start would '
                f'probably end here, too; if this was the time limit, increase --time; {resume}'
            )
            return code
        self.say(
            'stopped before the end of the run; the job is requeued and resumes from its checkpoint'
        )
        is_done, reason = run_scontrol('requeue', name)
        if not is_done:
            self.say(f'Slurm did not requeue the job ({reason}); {resume}')
        return code


def new_token() -> str:
    """Return the start of the names of all jobs of a launcher."""
    return f'{os.getpid()}-{secrets.token_hex(4)}'
