"""What the launcher of this process says of it, from the environment and before any communication."""
import os
import platform
import re
import sys
from collections.abc import Mapping

from mlperf_rn50.errors import ConfigError

# Set by Open MPI, MPICH and Slurm's PMI, and horovodrun with Gloo, for each process they start.
_RANK = ('OMPI_COMM_WORLD_RANK', 'PMI_RANK', 'PMIX_RANK', 'HOROVOD_RANK')
_SIZE = ('OMPI_COMM_WORLD_SIZE', 'PMI_SIZE', 'PMIX_SIZE', 'HOROVOD_SIZE')
_LOCAL_RANK = ('OMPI_COMM_WORLD_LOCAL_RANK', 'MPI_LOCALRANKID', 'HOROVOD_LOCAL_RANK')
_LOCAL_SIZE = ('OMPI_COMM_WORLD_LOCAL_SIZE', 'MPI_LOCALNRANKS', 'HOROVOD_LOCAL_SIZE')


def environment_number(name: str, env: Mapping[str, str] = os.environ) -> int | None:
    """The whole number in an environment variable; None where it is not set, ConfigError for anything else."""
    text = env.get(name)
    if text is None:
        return None
    if not re.fullmatch(r'\s*\d{1,9}\s*', text, re.ASCII):
        raise ConfigError(f'{name}: got {text[:40]!r} in the environment, expected a whole number')
    return int(text)


def omp_threads(text: str) -> int | None:
    """Threads of a process by OMP_NUM_THREADS, which may list those of nested levels; None where it says none.

    Source: OpenMP 5.2, 21.1.2.
    """
    first = text.partition(',')[0].strip()
    return int(first) if re.fullmatch(r'[1-9]\d{0,8}', first, re.ASCII) else None


def _number(names: tuple[str, ...]) -> int | None:
    return next((environment_number(n) for n in names if n in os.environ), None)


def _slurm_number(name: str) -> int | None:
    """A number of the Slurm step whose srun --mpi=pmix started this process: PMIx says the rank alone."""
    return environment_number(name) if 'PMIX_RANK' in os.environ else None


def launched_size() -> int | None:
    """Number of ranks, None without a launcher."""
    size = _number(_SIZE)
    return _slurm_number('SLURM_STEP_NUM_TASKS') if size is None else size


def launched_rank() -> int:
    """This process's rank; 0 without a launcher."""
    return _number(_RANK) or 0


def launched_local() -> tuple[int, int]:
    """This process's rank on its node and the number of ranks there; (0, 1) without a launcher."""
    rank, size = _number(_LOCAL_RANK), _number(_LOCAL_SIZE)
    if rank is None and size is None and (num_tasks := _slurm_number('SLURM_STEP_NUM_TASKS')):
        rank, size = _slurm_number('SLURM_LOCALID'), num_tasks // (_slurm_number('SLURM_STEP_NUM_NODES') or 1)
    return rank or 0, size or 1


def rank_name() -> str:
    """This process for a message: 'rank 2 on h3'."""
    return f'rank {launched_rank()} on {platform.node()}'


def say(line: str) -> None:
    """Write a line to stderr in one piece, beside those of other ranks; unbuffered, print() takes two."""
    if sys.stderr:  # None where it was closed
        sys.stderr.write(f'{line}\n')
        sys.stderr.flush()
