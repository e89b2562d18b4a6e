"""Report of a stalled rank: its stacks, and which ranks wait for which.

The report is written to <run folder>/stalled/<job>/rank_<r>.txt and .json, and the times of the
last steps to rank_<r>_steps.jsonl. The watchers of other ranks read it on a shared file system.
Storage or the rank may hang, so a forked process with a time limit writes and reads the reports.
"""

import os
import platform
import re
import select
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from mlperf_rn50.files import make_folder, write_atomically
from mlperf_rn50.runfolder import jsonl
from mlperf_rn50.runfolder.records import Failure, StepSpans, note_failure
from mlperf_rn50.system.launcher_env import launched_rank
from mlperf_rn50.train.watchdog.heartbeat import WAITING, RankState

# Otherwise unused signal on which faulthandler writes the stacks of the rank.
STACK_SIGNAL = getattr(signal, 'SIGSTKFLT', 16)  # Python 3.10 has no name for it
_CLOCK_SKEW_S = 60  # tolerated difference between the clocks of hosts
_QUIET_S = 1.0  # time without new output after which a dump of stacks counts as complete
_MAX_NAMED = 10  # maximum number of ranks named in a message
# Environment variables that identify one launch of the ranks, set by the launchers, Open MPI or
# Slurm.
_JOB_VARIABLES = ('MLPERF_RN50_JOB', 'PMIX_NAMESPACE', 'OMPI_MCA_ess_base_jobid', 'SLURM_JOB_ID')
_FULL_BYTES = 1_000_000  # free bytes below which a folder counts as full


def stalled_folder(run_dir: Path, variables: dict[str, str]) -> Path:
    """Return the folder for the stall reports of one launch of the ranks."""
    job = next((variables[n] for n in _JOB_VARIABLES if n in variables), 'job')
    return run_dir / 'stalled' / re.sub(r'[^\w.-]', '_', job)


def run_limited(limit_s: float, work: Callable[[], str]) -> str:
    """Run work in a forked process; return '' if it fails or exceeds the limit."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(writer, work().encode())
        except BaseException:  # no error may end the watcher
            os._exit(1)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, 'rb') as pipe:
        is_done = bool(select.select([pipe], [], [], limit_s)[0])
        text = pipe.read() if is_done else b''
    if not is_done:
        os.kill(pid, signal.SIGKILL)
    # a process that waits for storage may never end
    _, status = os.waitpid(pid, 0 if is_done else os.WNOHANG)
    return text.decode() if is_done and not status else ''


def note_failed(
    folder: Path | None,
    reason: str,
    is_outside: bool,
    silent_s: float | None = None,
    late_rank: int | None = None,
) -> str:
    """Add this rank and its host to the failures of the run, which a launcher counts to choose
    hosts; return ''."""
    if folder:
        failure = Failure(
            job=os.environ.get('MLPERF_RN50_JOB', ''),
            host=platform.node(),
            cause=reason,
            rank=launched_rank(),
            is_outside=is_outside,
            silent_s=silent_s,
            late_rank=late_rank,
        )
        note_failure(folder.parent.parent, failure)
    return ''


def record(
    folder: Path, state: RankState, pid: int, stacks: int, steps: Sequence[StepSpans] = ()
) -> str:
    """Write state and last steps of a stalled rank, and its stacks from a pipe; return the path of
    the stacks."""
    make_folder(folder)
    stem = folder / f'rank_{state.rank}'
    write_atomically(Path(f'{stem}.json'), jsonl.encode(state))
    lines = ''.join(f'{jsonl.encode(s)}\n' for s in steps)
    write_atomically(Path(f'{stem}_steps.jsonl'), lines)
    when = time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(state.time_s))
    head = f'rank {state.rank} on {state.host}, step {state.step}, {state.phase}, {state.doing}'
    write_atomically(Path(f'{stem}.txt'), f'{head}; {when}\n\n{_dump_stacks(pid, stacks)}')
    return f'{stem}.txt'


def _dump_stacks(pid: int, stacks: int) -> str:
    os.kill(pid, STACK_SIGNAL)
    text, block, wait_s = b'', b'-', 3 * _QUIET_S
    while block and select.select([stacks], [], [], wait_s)[0]:
        block, wait_s = os.read(stacks, 1 << 16), _QUIET_S
        text += block
    return text.decode(errors='replace') or 'no stacks: the process did not answer\n'


def is_stopped(pid: int) -> bool:
    """Check whether a process is stopped by a signal or a debugger. Source: proc(5)."""
    return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] in ('T', 't')


def read_states(folder: Path, since_s: float) -> list[RankState]:
    states = []
    for path in folder.glob('rank_*.json'):
        with suppress(OSError):
            state = jsonl.decode(path.read_bytes(), RankState)
            if state and state.time_s >= since_s - _CLOCK_SKEW_S:
                states.append(state)
    return sorted(states, key=lambda s: s.rank)


def explain(own: RankState, others: Sequence[RankState], size: int) -> str:
    """Describe which ranks a stalled rank waits for, or which ranks wait for it; size: total number
    of ranks."""
    states = sorted([own, *others], key=lambda s: s.rank)
    front = max(s.num_reached for s in states)
    behind = [s for s in states if s.num_reached < front]
    waiting = _name_ranks([s.rank for s in states if s.num_reached == front])
    silent = sorted(set(range(size)) - {s.rank for s in states})
    exchange = f'an exchange ({own.phase})'
    if own.phase == 'training':
        exchange = f'the exchange of step {max(s.step for s in states) + 1}'
    if own in behind:
        text = f'busy: {own.doing}; {waiting} waiting for it in {exchange}'
    elif behind:
        late = [f'rank {s.rank} on {s.host} (busy: {s.doing})' for s in behind]
        if len(late) > _MAX_NAMED:
            late[_MAX_NAMED:] = ['...']
        text = f'waiting in {exchange} for {", ".join(late)}'
    elif own.doing != WAITING:
        text = f'busy: {own.doing}'
    elif silent:
        text = f'waiting in {exchange}'
    else:
        text = f'waiting in {exchange}, which all ranks have reached; check the network'
    return f'{text}; no report from {_name_ranks(silent)}' if silent else text


def find_late(states: Sequence[RankState]) -> str:
    """Return the rank for which the others wait, '' if none or those of several hosts are late."""
    front = max(s.num_reached for s in states)
    late = [s for s in states if s.num_reached < front]
    return str(late[0].rank) if len({s.host for s in late}) == 1 else ''


def _name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as shortened text, such as 'rank 2' or 'ranks 0, 1, 3'."""
    names = ', '.join(map(str, ranks[:_MAX_NAMED]))
    more = f', ... {ranks[-1]} ({len(ranks)})' if len(ranks) > _MAX_NAMED else ''
    return f'rank{"s" if len(ranks) > 1 else ""} {names}{more}'


def full_folders() -> str:
    """Describe the folders for temporary files and shared memory that are full; '' if there are
    none."""
    texts = []
    for folder in dict.fromkeys([os.environ.get('TMPDIR', '/tmp'), '/dev/shm']):
        with suppress(OSError):
            usage = shutil.disk_usage(folder)
            if usage.free < _FULL_BYTES:
                total = f'{usage.total / 1e6:.0f} MB'
                texts.append(f'{folder} is full ({usage.free} bytes free of {total})')
    return ' and '.join(texts)
