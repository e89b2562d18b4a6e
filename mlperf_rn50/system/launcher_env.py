"""Rank and size of this process from the launcher's environment, without communication."""
import os
import platform
import re
import shlex
import sys
from argparse import ArgumentParser
from pathlib import Path

from mlperf_rn50.errors import ConfigError

COMMAND = 'MLPERF_RN50_COMMAND'  # the user's command line of a launcher, quoted for a shell
# Set for each process by Open MPI, MPICH, Slurm's PMI, and horovodrun with Gloo.
_RANK = ('OMPI_COMM_WORLD_RANK', 'PMI_RANK', 'PMIX_RANK', 'HOROVOD_RANK')
_SIZE = ('OMPI_COMM_WORLD_SIZE', 'PMI_SIZE', 'PMIX_SIZE', 'HOROVOD_SIZE')
_LOCAL_RANK = ('OMPI_COMM_WORLD_LOCAL_RANK', 'MPI_LOCALRANKID', 'HOROVOD_LOCAL_RANK')
_LOCAL_SIZE = ('OMPI_COMM_WORLD_LOCAL_SIZE', 'MPI_LOCALNRANKS', 'HOROVOD_LOCAL_SIZE')


def environment_number(name: str) -> int | None:
    """Return the whole number in an environment variable, None if it is not set; raise ConfigError for other text."""
    text = os.environ.get(name)
    if text is None:
        return None
    if not re.fullmatch(r'\s*\d{1,9}\s*', text, re.ASCII):
        raise ConfigError(f'{name}: got {text[:40]!r} in the environment, expected a whole number')
    return int(text)


def _number(names: tuple[str, ...]) -> int | None:
    return next((environment_number(n) for n in names if n in os.environ), None)


def _slurm_number(name: str) -> int | None:
    """Return a number of the Slurm step under srun --mpi=pmix, where PMIx sets only the rank; otherwise None."""
    return environment_number(name) if 'PMIX_RANK' in os.environ else None


def launched_size() -> int | None:
    """Return the number of ranks; None if no launcher started them."""
    size = _number(_SIZE)
    return _slurm_number('SLURM_STEP_NUM_TASKS') if size is None else size


def launched_rank() -> int:
    """Return this process's rank; 0 if no launcher started it."""
    return _number(_RANK) or 0


def launched_local() -> tuple[int, int]:
    """Return this process's rank on its node and the number of ranks there; (0, 1) without a launcher."""
    rank, size = _number(_LOCAL_RANK), _number(_LOCAL_SIZE)
    if rank is None and size is None and (num_tasks := _slurm_number('SLURM_STEP_NUM_TASKS')):
        rank, even = _slurm_number('SLURM_LOCALID'), -(-num_tasks // (_slurm_number('SLURM_STEP_NUM_NODES') or 1))
        tasks = os.environ.get('SLURM_STEP_TASKS_PER_NODE', '')
        size = _tasks_on_node(tasks, _slurm_number('SLURM_NODEID') or 0) or even
    rank, size = rank or 0, size or 1
    if rank >= size:
        raise ConfigError(f'rank on this node: got {rank} with {size} ranks, expected at most {size - 1}, from the '
                          'environment of the launcher; start the ranks with a script in launch/')
    return rank, size


def _tasks_on_node(text: str, node: int) -> int:
    """Return the tasks of a node from Slurm's list, such as 4(x2),3 for 4, 4 and 3; 0 if it is not in the list."""
    for tasks, repeats in re.findall(r'(\d{1,9})(?:\(x(\d{1,9})\))?', text, re.ASCII):
        node -= int(repeats or 1)
        if node < 0:
            return int(tasks)
    return 0


def resume_command(checkpoints: Path, is_newest: bool = True) -> str:
    """Return the command line that resumes a run; is_newest: whether it is the one that the launcher would resume."""
    num_ranks = os.environ.get('OMPI_COMM_WORLD_SIZE')  # of mpirun without a launcher
    typed = shlex.join(['mlperf-rn50', 'train', *sys.argv[2:]])
    words = shlex.split(os.environ.get(COMMAND) or f'mpirun -np {num_ranks} ' * bool(num_ranks) + typed)
    place = next((i for i in range(2, len(words) + 1)
                  if os.path.basename(words[i - 2]) == 'mlperf-rn50' and words[i - 1] == 'train'), 0)
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument('--resume', nargs='?', const='')
    if is_newest and not place:  # a launcher
        given, others = parser.parse_known_args(words)
        return shlex.join([*others, '--resume', *([str(checkpoints)] if given.resume else [])])
    num_local = launched_local()[1]
    ranks = [*(['--hosts', 'HOSTS'] if num_local < (launched_size() or 1) else []), str(num_local)]
    start = words[:place] or ['launch/ranks.sh', *ranks, 'mlperf-rn50', 'train']
    given, changes = parser.parse_known_args(words[place or len(words):])  # the run folder lacks a resume's options
    return shlex.join([*start, '--resume', str(checkpoints), *(changes if given.resume else [])])


def rank_name() -> str:
    """Return the name of this process for a message, such as 'rank 2 on h3'."""
    return f'rank {launched_rank()} on {platform.node()}'


def print_stderr(line: str) -> None:
    """Write a line to stderr in a single write, so that lines of ranks do not mix; unbuffered print() writes twice."""
    if sys.stderr:  # None if stderr was closed at the start
        sys.stderr.write(f'{line}\n')
        sys.stderr.flush()
