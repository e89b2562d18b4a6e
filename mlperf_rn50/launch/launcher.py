"""Start of the ranks of a launcher, with the limits, guards and checks around it."""

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
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from io import FileIO
from pathlib import Path
from tempfile import TemporaryDirectory

from mlperf_rn50.config import Config
from mlperf_rn50.errors import EXIT_AT_ONCE, EXIT_FAILED, EXIT_RESUMABLE, ConfigError, RunFailed
from mlperf_rn50.launch.arguments import Options, announce
from mlperf_rn50.launch.attempts import give_up_reason
from mlperf_rn50.launch.engines import CHECKOUT, Engine, environment, plain_output, run_scontrol
from mlperf_rn50.launch.helpers import memory_file, start_helper, text_of, wait_briefly
from mlperf_rn50.launch.hosts import check_ranks, silent_hosts
from mlperf_rn50.launch.process import (
    HOST_LOST,
    LAUNCHER_SIGNALS,
    TERM_LIMIT_S,
    StatusReader,
    processes_of,
    run_engine,
)
from mlperf_rn50.launch.supervisor import NOT_REACHED, Placement, Supervisor
from mlperf_rn50.runfolder.locks import folder_lock
from mlperf_rn50.runfolder.records import Failure, note_failure, read_attempts, read_failures
from mlperf_rn50.system.launcher_env import resume_command
from mlperf_rn50.system.mpi_session import (
    SETTING_FILES,
    SHARED_MEMORY,
    mpi_settings,
    reason_of,
    tmp_dir,
)
from mlperf_rn50.system.signals import SignalQueue
from mlperf_rn50.text import printable

# Linux's limit per argument, MAX_ARG_STRLEN, less the final zero byte
_MAX_ARGUMENT_BYTES = (128 << 10) - 1
# The launcher waits _GRACE_S longer than the start limit, which ranks that already run enforce
# themselves.
_GRACE_S = 120.0
# time for the guards to start on this machine, and for each of them
_GUARDS_S, _GUARD_S = 60.0, 0.5
_LIST_S = 20.0  # time for launch/guard.sh to list the processes of a job; each host has 15 s
_MPI_ERRORS = (EXIT_FAILED, *range(128 + signal.NSIG, 256))  # exit codes of mpirun's own errors
_GUARD = str(CHECKOUT / 'launch/guard.sh')
# folder of launch/engines/openmpi.sh or bind.sh
_LEFTOVER = re.compile(r'mlperf_rn50-(\d+-[0-9a-f]{8}-\w+)')


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
        place: Placement,
        job: str,
        words: Sequence[str],
        status: StatusReader | None,
    ) -> int:
        """Run a command of the program on all ranks, with limits for its start and end; return its
        exit code."""

        def report(text: str) -> None:
            with memory_file() as output:
                lister = start_helper(
                    [_GUARD, '--list', *dict.fromkeys(place.hosts), job], stdout=output
                )
                rest = (
                    'nothing'
                    if wait_briefly([lister], self.signals, _LIST_S)
                    else 'processes not listed in time'
                )
                left = text_of(output).splitlines()
            self.say(f'{words[0]}: {text}; waiting for {", ".join(left) or rest}; stopped')
            # '': no host is at fault
            note_failure(place.run_dir, Failure(job, '', f'{words[0]}: {text}'))

        limit_s, device = config.comm.start_limit_s, config.train.device
        code = self.start_ranks(
            place,
            job,
            [*self.engine.program(self.options), *words],
            device,
            limit_s + _GRACE_S if limit_s else 0.0,
            status,
            report,
        )
        if code in _MPI_ERRORS and not (status and status() is not None):
            self.try_mpi(place, f'{job}m', device)
        return code

    def try_mpi(self, place: Placement, job: str, device: str) -> None:
        """If Open MPI cannot start ranks, report why; raise ConfigError if settings of the user are
        the cause."""
        if self.engine.script_for(self.options.image) != 'openmpi.sh' or (
            silent_hosts([h.name for h in self.options.hosts], self.signals)
            or self.signals.is_requested
        ):
            return
        *prefix, _, program = self.engine.program(self.options)
        top, settings = Path(program).parents[2], mpi_settings(os.environ, CHECKOUT / '.venv')
        command = [*prefix, f'{top}/.venv/bin/python', '-I', f'{top}/launch/engines/try_mpi.py']

        def reason_with(names: Collection[str]) -> str:
            env = {k: v for k, v in os.environ.items() if k not in settings} | {
                n: settings[n] for n in names
            }
            env |= {SETTING_FILES: os.devnull, 'MLPERF_RN50_MPI_HELP': '1'}
            with memory_file() as output:
                # the guards of an earlier job may still end its processes
                name = job + secrets.token_hex(4)
                code = self.start_ranks(
                    place, name, command, device, _GRACE_S, env=env, output=output.fileno()
                )
                return reason_of(text_of(output)) if code in _MPI_ERRORS else ''

        if not (reason := reason_with(settings)) or not settings or reason_with(()):
            return self.say(f'Open MPI cannot start ranks: {reason}') if reason else None
        faults = next(
            ([name] for name in settings if not reason_with(settings.keys() - {name})),
            list(settings),
        )
        if self.signals.is_requested:
            return None
        if reason == (lost := reason_of('')):  # Open MPI loses some messages of ranks
            reason = next((r for _ in range(5) if (r := reason_with(settings)) != lost), lost)
        shown = ', '.join(
            f'{n}={settings[n]}{"" if n in os.environ else " in mca-params.conf"}' for n in faults
        )
        raise ConfigError(
            f'{shown}: Open MPI cannot start ranks with this setting: {reason}; correct or remove '
            'it'
        )

    def start_ranks(
        self,
        place: Placement,
        job: str,
        command: Sequence[str],
        device: str,
        limit_s: float = 0.0,
        status: StatusReader | None = None,
        report: Callable[[str], object] = lambda _: None,
        env: Mapping[str, str] = os.environ,
        output: int | None = None,
    ) -> int:
        """Run a program on all ranks and return its exit code; see run_engine for the limits."""
        self.engine.check_horovod(self.options.image, len(place.hosts) * place.ranks_per_node)
        # With Slurm's variables, mpirun would start the ranks on the nodes of the surrounding Slurm
        # job.
        outer = {k: v for k, v in env.items() if self.engine.in_slurm or not k.startswith('SLURM_')}
        env = environment(self.options, {**plain_output(sys.stdout, outer), **outer}, job, device)
        script = str(CHECKOUT / 'launch/engines' / self.engine.script_for(self.options.image))
        slots = ','.join(f'{host}:{place.ranks_per_node}' for host in place.hosts)
        if len(slots) > _MAX_ARGUMENT_BYTES:
            raise ConfigError(
                f'hosts: got {len(slots):,} characters for {len(place.hosts):,} hosts, expected '
                'at most '
                f'{_MAX_ARGUMENT_BYTES:,} (limit of Linux for an argument); use shorter host names'
            )
        remove_leftovers((SHARED_MEMORY, tmp_dir()))
        with self._guards(place, job) as guards:
            if self.signals.is_requested:
                return EXIT_AT_ONCE
            code = run_engine(
                [script, slots, *command],
                env,
                self.signals,
                job,
                limit_s,
                status,
                report,
                end_signal=signal.SIGINT if self.engine.in_slurm else signal.SIGTERM,
                messengers=() if self.engine.forwards_stop else guards,
                output=output,
            )
        for folder in (SHARED_MEMORY, tmp_dir()):  # Open MPI does not clean up after a killed job
            shutil.rmtree(folder / f'mlperf_rn50-{job}', ignore_errors=True)
        return code

    @contextmanager
    def _guards(self, place: Placement, job: str) -> Iterator[Sequence[subprocess.Popen]]:
        """Run a guard per host of ssh or horovodrun; it ends the ranks if the launcher dies and
        reports a lost host."""
        hosts = place.hosts if self.options.hosts or not self.engine.forwards_stop else ()
        words = ['--launcher', str(os.getpid()), os.path.abspath(place.run_dir), job]
        with memory_file() as reasons:
            # one pipe for all guards, because the number of open files is limited
            reader, writer = os.pipe()
            guards = [
                start_helper([_GUARD, '--host', host, *words], stdout=writer, stderr=reasons)
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
                    note_failure(place.run_dir, Failure(job, host, cause, is_outside=True))
                self.signals.discard(HOST_LOST)  # it concerns the job that has ended

    def _await_end(self, output: FileIO, limit_s: float) -> None:
        """Wait for the end of an output, or a stop request; raise RunFailed after a time limit."""
        end = time.monotonic() + limit_s
        while not self.signals.is_requested:
            if select.select([output], [], [], 0.2)[0] and not output.read(select.PIPE_BUF):
                return
            if time.monotonic() > end:
                raise RunFailed(
                    f'{_GUARD} did not start within {limit_s:.0f} s; see the load of this machine'
                )

    def run(self, place: Placement, config: Config) -> int:
        """Run the launcher and return its exit code."""
        token, device = f'{os.getpid()}-{secrets.token_hex(4)}', config.train.device
        if self.options.doctor and mpi_settings(os.environ, CHECKOUT / '.venv'):
            self.try_mpi(place, f'{token}-m', device)
        with folder_lock(place.run_dir):
            probed = self.options.hosts
            code = Supervisor(
                partial(self.start, config),
                lambda names: silent_hosts(names if probed else (), self.signals),
                self.say,
                self.signals,
                self.options,
                place,
                bool(probed),
                os.environ.get('SLURM_JOB_ID', token),
                token,
            ).run_all()
        if self.options.ranks_per_device > 1:
            # new, without earlier stop requests
            with closing(SignalQueue(LAUNCHER_SIGNALS)) as signals:
                replace(self, signals=signals).start_ranks(
                    replace(place, ranks_per_node=1),
                    f'{token}-m',
                    [str(CHECKOUT / 'launch/mps.sh'), 'stop'],
                    device,
                    _GRACE_S,
                )
        return requeue(code, place.run_dir, self.say) if self.engine.in_slurm else code

    def run_program(self, ranks_per_node: int, command: Sequence[str], device: str) -> int:
        """Run a program with a number of ranks on this machine or each host, without checks and
        restarts."""
        hosts, job = self.options.hosts, f'{os.getpid()}-{secrets.token_hex(4)}'
        check_ranks(hosts, ranks_per_node)
        with TemporaryDirectory() as folder:
            place = Placement(
                Path(folder), tuple(h.name for h in hosts) or ('localhost',), ranks_per_node
            )
            code = self.start_ranks(
                place,
                job,
                [str(CHECKOUT / 'launch/bind.sh'), *command],
                device,
                status=lambda: None,
            )
            for lost in read_failures(place.run_dir):
                self.say(f'host {lost.host} {lost.cause}')
            if code == EXIT_FAILED:
                self.try_mpi(place, f'{job}m', device)
        return code


def remove_leftovers(folders: Iterable[Path]) -> None:
    """Remove the empty job folders of killed launchers, unless a process of the job still runs."""
    for path in [path for folder in folders for path in folder.glob('mlperf_rn50-*')]:
        match = _LEFTOVER.fullmatch(path.name)
        with suppress(OSError):  # not empty, or already removed
            if match and path.lstat().st_uid == os.geteuid() and not processes_of(match[1]):
                path.rmdir()


def requeue(code: int, run_dir: Path, report: Callable[[str], None]) -> int:
    """Requeue a Slurm job whose run can be resumed, unless it was cancelled or must give up; return
    the exit code."""
    if code != EXIT_RESUMABLE:
        return code
    job = os.environ['SLURM_JOB_ID']
    if reason := give_up_reason(read_attempts(run_dir, job)):
        report(reason)
        return EXIT_FAILED
    shown = run_scontrol('show', 'job', job)[1]
    # An ending job is COMPLETING both after scancel and at its time limit; only the reason tells
    # them apart.
    if 'JobState=RUNNING' in shown or 'Reason=TimeLimit' in shown:
        report(
            'stopped before the end of the run; the job is requeued and resumes from its checkpoint'
        )
        is_done, reason = run_scontrol('requeue', job)
        if not is_done:
            report(
                f'Slurm did not requeue the job ({reason}); resume with: {resume_command(run_dir)}'
            )
    else:
        report(f'cancelled; the checkpoint is in {run_dir}; resume with: {resume_command(run_dir)}')
    return code
