"""Start of the ranks of a launcher, with the limits, guards and checks around it."""
import os
import re
import resource
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

from mlperf_rn50.config import Config
from mlperf_rn50.errors import EXIT_FAILED, EXIT_RESUMABLE, ConfigError
from mlperf_rn50.files import writing_folder
from mlperf_rn50.launch.arguments import Options, announce
from mlperf_rn50.launch.attempts import give_up_reason, newest_run
from mlperf_rn50.launch.engines import CHECKOUT, Engine, environment, nodes_of_slurm_job, plain_output
from mlperf_rn50.launch.hosts import check_ranks, common_slots, silent_hosts
from mlperf_rn50.launch.process import HOST_LOST, LAUNCHER_SIGNALS, StatusReader, as_child, processes_of, run_engine
from mlperf_rn50.launch.supervisor import Placement, Supervisor
from mlperf_rn50.runfolder.locks import LAUNCHER_LOCK, FileLock
from mlperf_rn50.runfolder.records import Failure, note_failure, read_attempts
from mlperf_rn50.system.cgroup import free_processes, processes_needed
from mlperf_rn50.system.launcher_env import resume_command
from mlperf_rn50.system.mpi_session import SETTING_FILES, SHARED_MEMORY, mpi_settings, no_room, reason_of, tmp_dir
from mlperf_rn50.system.signals import SignalQueue
from mlperf_rn50.text import plural

_MAX_ARGUMENT_BYTES = (128 << 10) - 1  # Linux's limit per argument, MAX_ARG_STRLEN, less the final zero byte
_NUM_OPEN_FILES = 32  # of Open MPI, in addition to 4 per rank; with fewer, runs of 1 rank and of 4 ranks hung
_MIN_FREE_BYTES = 16 << 20  # free space that the files of Open MPI and DALI need on this machine
# The launcher waits _GRACE_S longer than the start limit, which ranks that already run enforce themselves.
_GRACE_S = 120.0
_MPI_ERRORS = (EXIT_FAILED, *range(128 + signal.NSIG, 256))  # exit codes of mpirun's own errors
_GUARD = str(CHECKOUT / 'launch/guard.sh')
_LEFTOVER = re.compile(r'mlperf_rn50-(\d+-[0-9a-f]{8}-\w+)')  # folder of launch/engines/openmpi.sh or bind.sh


@dataclass(frozen=True)
class Launcher:
    """A running launcher: its name, engine, options and signals.

    load: returns the configuration of a command line of train.
    """

    name: str
    engine: Engine
    options: Options
    signals: SignalQueue
    load: Callable[[Sequence[str]], Config]

    def say(self, text: str) -> None:
        """Print a message to stderr."""
        announce(f'launch {self.name}', text)

    def settle(self) -> tuple[Placement, Config]:
        """Return the placement of the ranks and the configuration; options of the launcher override its values."""
        o = self.options
        if not o.config and not o.resume:
            raise ConfigError('--config: got nothing, expected a file from launch/configs')
        if not o.config and not o.run_dir:
            raise ConfigError('--resume: got no --run-dir, expected the folder of the run to resume')
        run = None if o.config else newest_run(Path(o.run_dir or ''))
        if not o.config and not run:
            with folder_lock(Path(o.run_dir or '')):  # another launcher may be starting the run
                raise ConfigError(f'--resume: got no run in {o.run_dir}, expected one; start it with --config')
        config = self.load(['--config', str(run.config), *o.train] if run else o.as_train)
        names = nodes_of_slurm_job(os.environ) if self.engine.in_slurm else [h.name for h in o.hosts]
        is_free = run and o.hosts  # a resumed run may have fewer hosts than before
        num_nodes = o.nodes or (None if is_free else config.run.num_nodes) or len(names) or 1
        if names and len(names) < num_nodes:
            raise ConfigError(f'--nodes: got {num_nodes} with {len(names)} hosts, expected at least as many hosts; '
                              'add hosts or lower --nodes')
        ranks_per_node = o.ranks_per_node or common_slots(o.hosts[:num_nodes]) or config.run.ranks_per_node or 1
        check_ranks(o.hosts[:num_nodes], ranks_per_node)
        hosts = tuple(names[:num_nodes]) or ('localhost',) * num_nodes
        return Placement(Path(run.dir if run else config.run.dir), hosts, ranks_per_node), config

    def start(self, config: Config, place: Placement, job: str, words: Sequence[str],
              status: StatusReader) -> int:
        """Run a command of the program on all ranks, with limits for its start and end; return its exit code."""
        def report(text: str) -> None:
            command = [_GUARD, '--list', *dict.fromkeys(place.hosts), job]
            left = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.splitlines()
            self.say(f'{words[0]}: {text}; waiting for {", ".join(left) or "nothing"}; stopped')
            note_failure(place.run_dir, Failure(job, '', f'{words[0]}: {text}'))  # '': no host is at fault
        limit_s, device = config.comm.start_limit_s, config.train.device
        code = self.start_ranks(place, job, [*self.engine.program(self.options), *words], device,
                                limit_s + _GRACE_S if limit_s else 0.0, status, report)
        if code in _MPI_ERRORS and status() is None:
            self.try_mpi(place, f'{job}m', device)
        return code

    def try_mpi(self, place: Placement, job: str, device: str) -> None:
        """If Open MPI cannot start ranks, report why; raise ConfigError if settings of the user are the cause."""
        if self.engine.script_for(self.options.image) != 'openmpi.sh' or (
                self.signals.is_requested or silent_hosts([h.name for h in self.options.hosts])):
            return
        *prefix, _, program = self.engine.program(self.options)
        top, settings = Path(program).parents[2], mpi_settings(os.environ, CHECKOUT / '.venv')
        command = [*prefix, f'{top}/.venv/bin/python', '-I', f'{top}/launch/engines/try_mpi.py']

        def reason_with(names: Collection[str]) -> str:
            env = {k: v for k, v in os.environ.items() if k not in settings} | {n: settings[n] for n in names}
            env |= {SETTING_FILES: os.devnull, 'MLPERF_RN50_MPI_HELP': '1'}
            with TemporaryFile('w+') as output:
                name = job + secrets.token_hex(4)  # the guards of an earlier job may still end its processes
                code = self.start_ranks(place, name, command, device, _GRACE_S, env=env, output=output.fileno())
                output.seek(0)
                return reason_of(output.read()) if code in _MPI_ERRORS else ''
        if not (reason := reason_with(settings)) or not settings or reason_with(()):
            return self.say(f'Open MPI cannot start ranks: {reason}') if reason else None
        faults = next(([name] for name in settings if not reason_with(settings.keys() - {name})), list(settings))
        if reason == (lost := reason_of('')):  # Open MPI loses some messages of ranks
            reason = next((r for _ in range(5) if (r := reason_with(settings)) != lost), lost)
        shown = ', '.join(f'{n}={settings[n]}{"" if n in os.environ else " in mca-params.conf"}' for n in faults)
        raise ConfigError(f'{shown}: Open MPI cannot start ranks with this setting: {reason}; correct or remove it')

    def start_ranks(self, place: Placement, job: str, command: Sequence[str], device: str, limit_s: float = 0.0,
                    status: StatusReader = lambda: None, report: Callable[[str], object] = lambda _: None,
                    env: Mapping[str, str] = os.environ, output: int | None = None) -> int:
        """Run a program on all ranks and return its exit code; see run_engine for the limits."""
        self.engine.check_horovod(self.options.image, len(place.hosts) * place.ranks_per_node)
        # With Slurm's variables, mpirun would start the ranks on the nodes of the surrounding Slurm job.
        outer = {k: v for k, v in env.items() if self.engine.in_slurm or not k.startswith('SLURM_')}
        env = environment(self.options, {**plain_output(sys.stdout, outer), **outer}, job, device)
        script = str(CHECKOUT / 'launch/engines' / self.engine.script_for(self.options.image))
        slots = ','.join(f'{host}:{place.ranks_per_node}' for host in place.hosts)
        if len(slots) > _MAX_ARGUMENT_BYTES:
            raise ConfigError(f'hosts: got {len(slots):,} characters for {len(place.hosts):,} hosts, expected at most '
                              f'{_MAX_ARGUMENT_BYTES:,} (limit of Linux for an argument); use shorter host names')
        remove_leftovers((SHARED_MEMORY, tmp_dir()))
        with self._guards(place, job) as guards:
            code = run_engine([script, slots, *command], env, self.signals, job, limit_s, status, report,
                              end_signal=signal.SIGINT if self.engine.in_slurm else signal.SIGTERM,
                              messengers=() if self.engine.forwards_stop else guards, output=output)
        for folder in (SHARED_MEMORY, tmp_dir()):  # Open MPI does not clean up after a killed job
            shutil.rmtree(folder / f'mlperf_rn50-{job}', ignore_errors=True)
        return code

    @contextmanager
    def _guards(self, place: Placement, job: str) -> Iterator[Sequence[subprocess.Popen]]:
        """Run a guard per host of ssh or horovodrun; it ends the ranks if the launcher dies and reports a lost host."""
        hosts = place.hosts if self.options.hosts or not self.engine.forwards_stop else ()
        reader, writer = os.pipe()  # one pipe for all guards, because the number of open files is limited
        words = ['--launcher', str(os.getpid()), os.path.abspath(place.run_dir), job]
        guards = [subprocess.Popen([_GUARD, '--host', host, *words], preexec_fn=as_child, stdout=writer,
                                   start_new_session=True) for host in hosts]
        os.close(writer)
        try:
            with open(reader) as output:
                output.read()  # wait until each guard is ready; before that, a stop request would end it
            yield guards
        finally:
            for host, process in zip(hosts, guards):
                if process.poll() is not None:  # a guard ends earlier if it loses the connection to its host
                    note_failure(place.run_dir, Failure(job, host, 'lost its connection to the launcher',
                                                         is_outside=True))
                process.terminate()
                process.send_signal(signal.SIGCONT)  # it may be stopped
            for process in guards:
                process.wait()
            self.signals.discard(HOST_LOST)  # it concerns the job that has ended

    def run(self) -> int:
        """Run the launcher and return its exit code."""
        self.engine.program(self.options)  # report a missing image or folder first
        place, config = self.settle()
        check_room(self.engine, place.ranks_per_node)
        token, device = f'{os.getpid()}-{secrets.token_hex(4)}', config.train.device
        if self.options.doctor and mpi_settings(os.environ, CHECKOUT / '.venv'):
            self.try_mpi(place, f'{token}-m', device)
        with folder_lock(place.run_dir):
            silent = silent_hosts if self.options.hosts else lambda _: []
            code = Supervisor(partial(self.start, config), silent, self.say, self.signals, self.options, place,
                              bool(self.options.hosts), os.environ.get('SLURM_JOB_ID', token), token).run_all()
        if self.options.ranks_per_device > 1:
            with closing(SignalQueue(LAUNCHER_SIGNALS)) as signals:  # new, without earlier stop requests
                replace(self, signals=signals).start_ranks(replace(place, ranks_per_node=1), f'{token}-m',
                                                           [str(CHECKOUT / 'launch/mps.sh'), 'stop'], device)
        return requeue(code, place.run_dir, self.say) if self.engine.in_slurm else code

    def run_program(self, ranks_per_node: int, command: Sequence[str], device: str) -> int:
        """Run a program with a number of ranks on this machine or each host, without checks and restarts."""
        hosts, job = self.options.hosts, f'{os.getpid()}-{secrets.token_hex(4)}'
        check_ranks(hosts, ranks_per_node)
        with TemporaryDirectory() as folder:
            place = Placement(Path(folder), tuple(h.name for h in hosts) or ('localhost',), ranks_per_node)
            code = self.start_ranks(place, job, [str(CHECKOUT / 'launch/bind.sh'), *command], device)
            if code == EXIT_FAILED:
                self.try_mpi(place, f'{job}m', device)
        return code


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Lock a run folder for one launcher; remove the folders created here if they stay empty."""
    made = [p for p in (folder, *folder.parents) if not p.exists()]  # deepest first
    lock = FileLock(folder / LAUNCHER_LOCK)
    with writing_folder(folder, '--run-dir'):
        folder.mkdir(parents=True, exist_ok=True)
        is_taken = lock.take()
    if not is_taken:
        raise ConfigError(f'--run-dir: {folder} is in use by {lock.holder()}; wait for it or use a new folder')
    try:
        yield
    finally:
        with suppress(OSError):
            lock.path.unlink()  # before close(), so that no other launcher can lock a file that is then deleted
        lock.close()
        with suppress(OSError):
            for path in made:
                path.rmdir()


def check_room(engine: Engine, num_ranks: int) -> None:
    """Raise ConfigError if TMPDIR is unusable, or if Open MPI would hang or abort for want of files or processes."""
    if not os.access(tmp_dir(), os.W_OK | os.X_OK):
        raise ConfigError(f'TMPDIR: {tmp_dir()} is not a writable folder; create it or set TMPDIR to another one')
    if engine.script != 'openmpi.sh':
        return
    limit, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], _NUM_OPEN_FILES + 4 * num_ranks
    if 0 <= limit < needed:
        raise ConfigError(f'ulimit -n: got {limit} open files, expected at least {needed}, which Open MPI needs for '
                          f'{plural(num_ranks, "rank")} on a node; run ulimit -n {needed} before the launcher')
    left, needed = free_processes(), processes_needed(num_ranks)
    if left and left[0] < needed:
        raise ConfigError(f'processes: {left[1]}, of which {left[0]} are free, expected {needed} for '
                          f'{plural(num_ranks, "rank")} on a node; raise the limit')
    for folder, name in ((tmp_dir(), 'TMPDIR'), (SHARED_MEMORY, str(SHARED_MEMORY))):
        if folder.is_dir() and (free := shutil.disk_usage(folder).free) < _MIN_FREE_BYTES:
            raise ConfigError(no_room(name, folder, free, _MIN_FREE_BYTES))


def remove_leftovers(folders: Iterable[Path]) -> None:
    """Remove the empty job folders of killed launchers, unless a process of the job still runs."""
    for path in [path for folder in folders for path in folder.glob('mlperf_rn50-*')]:
        match = _LEFTOVER.fullmatch(path.name)
        with suppress(OSError):  # not empty, or already removed
            if match and path.lstat().st_uid == os.geteuid() and not processes_of(match[1]):
                path.rmdir()


def requeue(code: int, run_dir: Path, report: Callable[[str], None]) -> int:
    """Requeue a Slurm job whose run can be resumed, unless it was cancelled or must give up; return the exit code."""
    if code != EXIT_RESUMABLE:
        return code
    job = os.environ['SLURM_JOB_ID']
    if reason := give_up_reason(read_attempts(run_dir, job)):
        report(reason)
        return EXIT_FAILED
    shown = subprocess.run(['scontrol', 'show', 'job', job], capture_output=True, text=True).stdout
    # An ending job is COMPLETING both after scancel and at its time limit; only the reason tells them apart.
    if 'JobState=RUNNING' in shown or 'Reason=TimeLimit' in shown:
        report('stopped before the end of the run; the job is requeued and resumes from its checkpoint')
        if subprocess.run(['scontrol', 'requeue', job]).returncode:
            report(f'Slurm did not requeue the job; resume with: {resume_command(run_dir)}')
    else:
        report(f'cancelled; the checkpoint is in {run_dir}; resume with: {resume_command(run_dir)}')
    return code
