"""Program behind the launch scripts; launch/engines/launcher.sh runs it."""
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
from tempfile import TemporaryFile

from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK, EXIT_RESUMABLE, EXIT_USAGE, ConfigError, UserError
from mlperf_rn50.files import writing_folder
from mlperf_rn50.launch import sweep
from mlperf_rn50.launch.attempts import give_up_reason, newest_run
from mlperf_rn50.launch.engines import ENGINES, Engine, environment, nodes_of_slurm_job, plain_output, program_of_ranks
from mlperf_rn50.launch.hosts import check_ranks, common_slots, silent_hosts
from mlperf_rn50.launch.options import AlreadyReported, Options, make_parser, parse_options, say, usage_of, values_of
from mlperf_rn50.launch.process import HOST_LOST, LAUNCHER_SIGNALS, as_child, processes_of, run_engine
from mlperf_rn50.launch.supervisor import RunPlace, Supervisor
from mlperf_rn50.runfolder.locks import FileLock
from mlperf_rn50.runfolder.records import Failure, note_failure, read_attempts
from mlperf_rn50.system.gpu_env import device_of_words
from mlperf_rn50.system.mpi_session import SETTING_FILES, SHARED_MEMORY, mpi_settings, no_room, reason_of, tmp_dir
from mlperf_rn50.system.signals import SignalQueue
from mlperf_rn50.text import plural

_MAX_ARGUMENT_BYTES = (128 << 10) - 1  # Linux's limit per argument, MAX_ARG_STRLEN, less the final zero byte
_NUM_OPEN_FILES = 32  # of Open MPI, in addition to 4 per rank; with less, 1 and 4 ranks hung
_MIN_FREE_BYTES = 16 << 20  # free space that the files of Open MPI and DALI need on this machine
# The launcher waits _GRACE_S longer than the start limit, which ranks that already run enforce themselves.
_START_LIMIT, _GRACE_S = 'comm.start_limit_s', 120.0
_MPI_ERRORS = (EXIT_FAILED, *range(128 + signal.NSIG, 256))  # exit codes of mpirun's own errors
_KEYS = ('run.num_nodes', 'run.ranks_per_node', _START_LIMIT, 'train.device')
_LEFTOVER = re.compile(r'mlperf_rn50-(\d+-[0-9a-f]{8}-\w+)')  # folder of launch/engines/openmpi.sh or bind.sh


@dataclass(frozen=True)
class Launcher:
    """A running launch script; `here` is the path of the checkout."""

    here: Path
    script: Path
    engine: Engine
    options: Options
    signals: SignalQueue

    def settle_layout(self) -> tuple[RunPlace, float, str]:
        """Return the layout of the run (options take precedence over the configuration), its start limit and device."""
        o, run_dir, nodes, ranks, start_limit_s, device = self.options, self.options.run_dir or '', '', '', '0', 'cpu'
        if o.config:
            options = [*(['--run.dir', run_dir] if run_dir else []), *o.train]
            run_dir, nodes, ranks, start_limit_s, device = values_of(self.here, o.config, options, ['run.dir', *_KEYS])
        elif not o.resume:
            raise ConfigError('--config: got nothing, expected a file from launch/configs')
        elif not run_dir:
            raise ConfigError('--resume: got no --run-dir, expected the folder of the run to resume')
        elif run := newest_run(Path(run_dir)):
            nodes, ranks, start_limit_s, device = values_of(self.here, str(run.config), o.train, _KEYS)
            nodes = '' if o.hosts else nodes  # a resumed run may have fewer hosts than before
        names = nodes_of_slurm_job(os.environ) if self.engine.in_slurm else [h.name for h in o.hosts]
        num_nodes = o.nodes or int(nodes or 0) or len(names) or 1
        if names and len(names) < num_nodes:
            raise ConfigError(f'--nodes: got {num_nodes} with {len(names)} hosts, expected at least as many hosts; '
                              'add hosts or lower --nodes')
        ranks_per_node = o.ranks_per_node or common_slots(o.hosts[:num_nodes]) or int(ranks or 0) or 1
        check_ranks(o.hosts[:num_nodes], ranks_per_node)
        hosts = tuple(names[:num_nodes]) if names else ('localhost',) * num_nodes
        return RunPlace(Path(run_dir), hosts, ranks_per_node), float(start_limit_s), device

    def start(self, start_limit_s: float, device: str, layout: RunPlace, job: str, words: Sequence[str],
              status: Callable[[], str | None]) -> int:
        """Run a command of the program on all ranks, with limits for its start and end; return its exit code."""
        def report(text: str) -> None:
            command = [str(self.here / 'launch/guard.sh'), '--list', *dict.fromkeys(layout.hosts), job]
            left = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.splitlines()
            say(self.script, f'{words[0]}: {text}; waiting for {", ".join(left) or "nothing"}; stopped')
            note_failure(layout.run_dir, Failure(job, '', f'{words[0]}: {text}'))  # counts for no host
        code = self.start_ranks(layout, job, [*program_of_ranks(self.here, self.script.stem, self.options), *words],
                                device, start_limit_s + _GRACE_S if start_limit_s else 0.0, status, report)
        if code in _MPI_ERRORS and status() is None:
            self.try_mpi(layout, f'{job}m', device)
        return code

    def try_mpi(self, layout: RunPlace, job: str, device: str) -> None:
        """Report why Open MPI cannot start ranks, if so; raise ConfigError if settings of the user prevent it."""
        if self.engine.script != 'openmpi.sh' or self.options.image and self.engine.in_slurm or (
                self.signals.is_requested or silent_hosts([h.name for h in self.options.hosts])):
            return
        *prefix, _, program = program_of_ranks(self.here, self.script.stem, self.options)
        top, settings = Path(program).parents[2], mpi_settings(os.environ, self.here / '.venv')
        command = [*prefix, f'{top}/.venv/bin/python', '-I', f'{top}/launch/engines/try_mpi.py']

        def reason_with(names: Collection[str]) -> str:
            env = {k: v for k, v in os.environ.items() if k not in settings} | {n: settings[n] for n in names}
            env |= {SETTING_FILES: os.devnull, 'MLPERF_RN50_MPI_HELP': '1'}
            with TemporaryFile('w+') as output:
                name = job + secrets.token_hex(4)  # the guards of an earlier job may still end its processes
                code = self.start_ranks(layout, name, command, device, _GRACE_S, env=env, output=output.fileno())
                output.seek(0)
                return reason_of(output.read()) if code in _MPI_ERRORS else ''
        if not (reason := reason_with(settings)) or not settings or reason_with(()):
            return say(self.script, f'Open MPI cannot start ranks: {reason}') if reason else None
        faults = next(([name] for name in settings if not reason_with(settings.keys() - {name})), list(settings))
        if reason == (lost := reason_of('')):  # Open MPI loses some messages of ranks
            reason = next((r for _ in range(5) if (r := reason_with(settings)) != lost), lost)
        shown = ', '.join(f'{n}={settings[n]}{"" if n in os.environ else " in mca-params.conf"}' for n in faults)
        raise ConfigError(f'{shown}: Open MPI cannot start ranks with this setting: {reason}; correct or remove it')

    def start_ranks(self, layout: RunPlace, job: str, command: Sequence[str], device: str, limit_s: float = 0.0,
                    status: Callable[[], str | None] = lambda: None, report: Callable[[str], object] = lambda _: None,
                    env: Mapping[str, str] = os.environ, output: int | None = None) -> int:
        """Run a program on all ranks and return its exit code; see run_engine for the limits."""
        self.engine.check_horovod(self.options.image, len(layout.hosts) * layout.ranks_per_node)
        # With Slurm's variables, mpirun would start the ranks on the nodes of the surrounding Slurm job.
        outer = {k: v for k, v in env.items() if self.engine.in_slurm or not k.startswith('SLURM_')}
        env = environment(self.options, {**plain_output(sys.stdout, outer), **outer}, job, device)
        name = 'srun.sh' if self.engine.in_slurm and self.options.image else self.engine.script
        script = str(self.here / 'launch/engines' / name)
        slots = ','.join(f'{host}:{layout.ranks_per_node}' for host in layout.hosts)
        if len(slots) > _MAX_ARGUMENT_BYTES:
            raise ConfigError(f'hosts: got {len(slots):,} characters for {len(layout.hosts):,} hosts, expected at most '
                              f'{_MAX_ARGUMENT_BYTES:,} (limit of Linux for an argument); use shorter host names')
        remove_leftovers((SHARED_MEMORY, tmp_dir()))
        with self._guards(layout, job) as guards:
            code = run_engine([script, slots, *command], env, self.signals, job, limit_s, status, report,
                              end_signal=signal.SIGINT if self.engine.in_slurm else signal.SIGTERM,
                              messengers=() if self.engine.forwards_stop else guards, output=output)
        for folder in (SHARED_MEMORY, tmp_dir()):  # Open MPI does not clean up after a killed job
            shutil.rmtree(folder / f'mlperf_rn50-{job}', ignore_errors=True)
        return code

    @contextmanager
    def _guards(self, layout: RunPlace, job: str) -> Iterator[Sequence[subprocess.Popen]]:
        """Start a guard per host, which ends the ranks if the launcher dies and reports a lost host to the launcher."""
        guard = str(self.here / 'launch/guard.sh')
        hosts = layout.hosts if self.options.hosts or not self.engine.forwards_stop else ()
        reader, writer = os.pipe()  # one pipe for all guards, because the number of open files is limited
        words = ['--launcher', str(os.getpid()), os.path.abspath(layout.run_dir), job]
        guards = [subprocess.Popen([guard, '--host', host, *words], preexec_fn=as_child, stdout=writer,
                                   start_new_session=True) for host in hosts]
        os.close(writer)
        try:
            with open(reader) as output:
                output.read()  # wait until each guard is ready; before that, a stop request would end it
            yield guards
        finally:
            for host, process in zip(hosts, guards):
                if process.poll() is not None:  # it ends earlier if the connection to its host does
                    note_failure(layout.run_dir, Failure(job, host, 'lost its connection to the launcher',
                                                         is_outside=True))
                process.terminate()
                process.send_signal(signal.SIGCONT)  # it may be stopped
            for process in guards:
                process.wait()
            self.signals.discard(HOST_LOST)  # it concerns the job that has ended

    def run(self) -> int:
        """Run the launcher and return its exit code."""
        if self.options.only_prints:
            self._print()
        program_of_ranks(self.here, self.script.stem, self.options)  # report a missing image or folder first
        layout, start_limit_s, device = self.settle_layout()
        check_room(self.engine, layout.ranks_per_node)
        token, report = f'{os.getpid()}-{secrets.token_hex(4)}', partial(say, self.script)
        if self.options.doctor and mpi_settings(os.environ, self.here / '.venv'):
            self.try_mpi(layout, f'{token}-m', device)
        batch_job = os.environ.get('SLURM_JOB_ID', token)
        with folder_lock(layout.run_dir):
            silent = silent_hosts if self.options.hosts else lambda _: []
            code = Supervisor(partial(self.start, start_limit_s, device), silent, report, self.signals, self.options,
                              layout, bool(self.options.hosts), batch_job, token).run_all()
        if self.options.ranks_per_device > 1:
            with closing(SignalQueue(LAUNCHER_SIGNALS)) as signals:  # new, without earlier stop requests
                replace(self, signals=signals).start_ranks(replace(layout, ranks_per_node=1), f'{token}-m',
                                                           [str(self.here / 'launch/mps.sh'), 'stop'], device)
        return requeue(code, layout.run_dir, report) if self.engine.in_slurm else code

    def _print(self) -> None:
        """Replace this process with the program that prints the requested values; no rank is started."""
        o, program = self.options, str(self.here / '.venv/bin/mlperf-rn50')
        words = [*(['--config', o.config] if o.config else []), *(['--run.dir', o.run_dir] if o.run_dir else []),
                 *o.train]
        for key, value in (('num_nodes', o.nodes), ('ranks_per_node', o.ranks_per_node)):
            words += [f'--run.{key}', str(value)] if value else []
        as_child()
        os.execv(program, [program, 'train', *words])


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Lock a run folder for one launcher; remove the folders created here if they stay empty."""
    made = [p for p in (folder, *folder.parents) if not p.exists()]  # deepest first
    lock = FileLock(folder / '.launcher.lock')
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
    """Raise ConfigError if TMPDIR is unusable, or Open MPI would hang on a full disk or for want of open files."""
    if not os.access(tmp_dir(), os.W_OK | os.X_OK):
        raise ConfigError(f'TMPDIR: {tmp_dir()} is not a writable folder; create it or set TMPDIR to another one')
    if engine.script != 'openmpi.sh':
        return
    limit, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], _NUM_OPEN_FILES + 4 * num_ranks
    if 0 <= limit < needed:
        raise ConfigError(f'ulimit -n: got {limit} open files, expected at least {needed}, which Open MPI needs for '
                          f'{plural(num_ranks, "rank")} on a node; run ulimit -n {needed} before the launcher')
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
    """Requeue a Slurm job whose run can be resumed, unless it was cancelled; return the exit code."""
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
            report(f'Slurm did not requeue the job; resume with --resume --run-dir {run_dir}')
    else:
        report(f'cancelled; the checkpoint is in {run_dir}')
    return code


def run_ranks(here: Path, script: Path, argv: Sequence[str], signals: SignalQueue) -> int:
    """Run a program with a number of ranks on this machine, for launch/ranks.sh."""
    if len(argv) < 2 or not re.fullmatch(r'0*[1-9]\d{0,5}', argv[0], re.ASCII):
        print(usage_of(script), file=sys.stderr)
        return EXIT_USAGE
    device = device_of_words(argv[1:])
    if device == 'cpu':
        os.environ.setdefault('HOROVOD_CYCLE_TIME', '5')  # the value that the program sets on CPUs
    per_device = os.environ.get('MLPERF_RN50_RANKS_PER_DEVICE') or '1'
    options = parse_options(make_parser(script, False, None), ['--ranks-per-device', per_device])
    launcher = Launcher(here, script, ENGINES['local'], options, signals)
    layout, job = RunPlace(Path(), ('localhost',), int(argv[0])), f'{os.getpid()}-{secrets.token_hex(4)}'
    if (code := launcher.start_ranks(layout, job, [str(here / 'launch/bind.sh'), *argv[1:]], device)) == EXIT_FAILED:
        launcher.try_mpi(layout, f'{job}m', device)
    return code


def main(argv: Sequence[str]) -> int:
    """Run a launch script, argv[0], with its options; return its exit code."""
    script, words = Path(argv[0]), argv[1:]
    here, signals = script.parent.parent, SignalQueue(LAUNCHER_SIGNALS)
    try:
        if script.name == 'ranks.sh':
            return run_ranks(here, script, words, signals)
        if script.name == 'sweep.sh':
            return sweep.run(here, script, words, signals)
        engine = ENGINES[script.stem]
        options = parse_options(make_parser(script, engine.has_hosts, engine.image_option), words)
        if os.environ.get('SLURM_RESTART_COUNT', '0') != '0' and script.stem == 'slurm':
            options = replace(options, resume=True)  # a requeued job resumes its run
        return Launcher(here, script, engine, options, signals).run()
    except AlreadyReported:
        return EXIT_USAGE
    except UserError as e:
        say(script, str(e))
        return e.exit_code
    except SystemExit as e:  # --help
        return int(e.code or EXIT_OK)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
