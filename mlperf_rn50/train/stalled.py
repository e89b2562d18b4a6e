"""What is found out about a rank that stands still, before it is ended: its stacks, and whom it waits for.

It goes to <run folder>/stalled/<job>/rank_<r>.txt and .json, which the other ranks' watchers read where they share the
folder. All of it is done in a process of its own and within a time limit: storage and rank may hang.
"""
import json
import os
import platform
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mlperf_rn50.files import write_atomically
from mlperf_rn50.system.launched import launched_rank
from mlperf_rn50.train.failures import Failure, note_failure

# In the rank, faulthandler writes its Python stacks on this one, which nothing else uses.
STACK_SIGNAL = getattr(signal, 'SIGSTKFLT', 16)  # Python 3.10 has no name for it
WAITING = 'waiting'
_PY_SPY_LIMIT_S = 20
_STOPPED_STATES = ('T', 't')
_CLOCK_SKEW_S = 60
# What names one start of all ranks, in each of them: our launchers, Open MPI, Slurm.
_JOBS = ('MLPERF_RN50_JOB', 'PMIX_NAMESPACE', 'OMPI_MCA_ess_base_jobid', 'SLURM_JOB_ID')
_FULL_BYTES = 1_000_000


@dataclass(frozen=True)
class State:
    """Where a rank stands still.

    Args:
        rank, host, step, phase: of the rank.
        doing: reading data, computing or waiting (for the other ranks).
        num_reached: exchanges it has reached, counted alike on all ranks.
        time_s: when this was written, seconds since 1970.
    """

    rank: int
    host: str
    step: int
    phase: str
    doing: str
    num_reached: int
    time_s: float


def stalled_folder(run_dir: Path, variables: dict[str, str]) -> Path:
    """Where the ranks of one start tell of a stall."""
    job = next((variables[n] for n in _JOBS if n in variables), 'job')
    return run_dir / 'stalled' / re.sub(r'[^\w.-]', '_', job)


def within(limit_s: float, work: Callable[[], str]) -> str | None:
    """What some work returns that is done in a process of its own; None where it fails or takes longer."""
    reader, writer = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        try:
            os.setpgid(0, 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
                signal.signal(number, signal.SIG_DFL)
            if os.getppid() == parent:
                os.write(writer, work().encode())
        except BaseException:  # whatever it is, the watcher goes on without
            os._exit(1)
        os._exit(0)
    os.close(writer)
    try:
        text, end = b'', time.monotonic() + limit_s
        while select.select([reader], [], [], max(0.0, end - time.monotonic()))[0]:
            block = os.read(reader, 65536)
            if not block:
                _, status = os.waitpid(pid, 0)
                return None if status else text.decode()
            text += block
        _kill_group(pid)
        os.waitpid(pid, os.WNOHANG)  # one that waits for storage may never end
        return None
    finally:
        os.close(reader)


def note(folder: Path, reason: str) -> str:
    """Adds this host to the failures of the run whose folder for stalls this is; a launcher counts them."""
    note_failure(folder.parent.parent, Failure(os.environ.get('MLPERF_RN50_JOB', ''), platform.node(), reason,
                                                 launched_rank()))
    return ''


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def record(folder: Path, state: State, pid: int, stack_fd: int) -> str:
    """Writes where a rank stands still and its stacks; returns the path of these."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f'rank_{state.rank}.json', json.dumps(asdict(state)))
    path = folder / f'rank_{state.rank}.txt'
    write_atomically(path, describe(state) + '\n\n' + dump_stacks(pid, stack_fd))
    return str(path)


def describe(state: State) -> str:
    """A state in a line."""
    when = time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(state.time_s))
    return f'rank {state.rank} on {state.host}, step {state.step}, {state.phase}, {state.doing}; {when}'


def read_states(folder: Path, since_s: float) -> list[State]:
    """The states of all ranks that have told theirs since a time, by rank."""
    states = []
    for path in folder.glob('rank_*.json'):
        try:
            state = State(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue
        if state.time_s >= since_s - _CLOCK_SKEW_S:
            states.append(state)
    return sorted(states, key=lambda s: s.rank)


def explain(own: int, states: Sequence[State], size: int) -> str:
    """Whom a rank that stands still waits for, or who waits for it.

    Args:
        own: the rank.
        states: of the ranks that stand still and say so, its own among them.
        size: number of ranks.
    """
    me = next(s for s in states if s.rank == own)
    if size == 1:
        return f'busy: {me.doing}'
    front = max(s.num_reached for s in states)
    there = [s.rank for s in states if s.num_reached == front]
    behind = [s for s in states if s.num_reached < front]
    silent = sorted(set(range(size)) - {s.rank for s in states})
    step = max(s.step for s in states) + 1
    exchange = f'the exchange of step {step}' if me.phase == 'training' else f'an exchange ({me.phase})'
    unknown = f'; nothing is known of {name_ranks(silent)}' if silent else ''
    if me in behind:
        verb = 'waits' if len(there) == 1 else 'wait'
        return f'busy: {me.doing}; {name_ranks(there)} {verb} for it in {exchange}{unknown}'
    if behind:
        late = ', '.join(f'rank {s.rank} on {s.host}' for s in behind)
        doing = ', '.join(dict.fromkeys(s.doing for s in behind))
        return (f'waiting in {exchange} for {late}, which {_have(behind)} not reached it (busy: {doing}); '
                f'{name_ranks(there)} {_have(there)}{unknown}')
    if me.doing != WAITING:
        others = f', as far as {name_ranks(there)}' if len(there) > 1 else ''
        return f'busy: {me.doing}{others}{unknown}'
    if silent:
        return f'waiting in {exchange}, which {name_ranks(there)} {_have(there)} reached{unknown}'
    return (f'waiting in {exchange}, which all ranks have reached and which does not end; look at the network between '
            'them')


def _have(ranks: Sequence[object]) -> str:
    return 'has' if len(ranks) == 1 else 'have'


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words: rank 2; ranks 0, 1 and 3; more than ten by number."""
    names = [str(r) for r in ranks]
    if len(names) == 1:
        return f'rank {names[0]}'
    if len(names) > 10:
        return f'{len(names)} ranks ({names[0]}, {names[1]}, ... {names[-1]})'
    return f'ranks {", ".join(names[:-1])} and {names[-1]}'


def dump_stacks(pid: int, stack_fd: int) -> str:
    """The stacks of a process, native ones too where py-spy is; and its threads as the kernel sees them.

    Args:
        pid: of the process, a child of this one's parent.
        stack_fd: where its faulthandler writes.
    """
    stacks = _py_spy(pid) or _own_stacks(pid, stack_fd)
    return '\n'.join([stacks, 'Threads, as the kernel sees them:', *_threads(pid), ''])


def _py_spy(pid: int) -> str:
    """What py-spy says; nothing where it is missing or not allowed to look."""
    program = shutil.which('py-spy', path=f'{Path(sys.executable).parent}:{os.environ.get("PATH", "")}')
    if not program:
        return ''
    # A stopped process has no native stack for it, and to try would take time.
    for how in ('--nonblocking',) if is_stopped(pid) else ('--native', '--nonblocking'):
        try:
            done = subprocess.run([program, 'dump', how, '--pid', str(pid)], capture_output=True, text=True,
                                  timeout=_PY_SPY_LIMIT_S)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if not done.returncode:
            return done.stdout
    return ''


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger: its state as in proc(5)."""
    return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] in _STOPPED_STATES


def _own_stacks(pid: int, stack_fd: int) -> str:
    """What the process itself writes; one that is stopped cannot."""
    os.kill(pid, STACK_SIGNAL)
    size, end = 0, time.monotonic() + 3
    while time.monotonic() < end:
        time.sleep(0.2)
        before, size = size, os.fstat(stack_fd).st_size
        if size and size == before:
            break
    return os.pread(stack_fd, 1 << 20, 0).decode(errors='replace') or 'The process tells no stack: it is stopped.\n'


def _threads(pid: int) -> list[str]:
    """A line per thread: number, name, state, what it waits for in the kernel, and its stack there if root asks."""
    def read(path: Path) -> str:
        try:
            return path.read_text(errors='replace').strip()
        except OSError:
            return ''
    lines = []
    for task in sorted(Path(f'/proc/{pid}/task').iterdir(), key=lambda t: int(t.name)):
        state = re.search(r'^State:\s+(.*)$', read(task / 'status'), re.MULTILINE)
        stack = ' < '.join(line.partition('] ')[2] for line in read(task / 'stack').splitlines()[:8])
        lines.append(f'{task.name} {read(task / "comm")}: {state[1] if state else ""}, {read(task / "wchan")}  {stack}')
    return lines


def full_folders() -> str:
    """Which of the folders that a start writes to is full: a sentence for the line that says its end, or nothing."""
    found = []
    for folder in dict.fromkeys([os.environ.get('TMPDIR', '/tmp'), '/dev/shm']):
        try:
            usage = shutil.disk_usage(folder)
        except OSError:
            continue
        if usage.free < _FULL_BYTES:
            found.append(f'{folder} is full ({usage.free} bytes free of {usage.total / 1e6:.0f} MB)')
    return ' and '.join(found)
