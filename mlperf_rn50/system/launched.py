"""What the launcher of this process says of it, from the environment and before any communication."""
import os
import platform

# Set by Open MPI, MPICH and Slurm's PMI, and horovodrun with Gloo, for each process they start.
_RANK = ('OMPI_COMM_WORLD_RANK', 'PMI_RANK', 'PMIX_RANK', 'HOROVOD_RANK')
_SIZE = ('OMPI_COMM_WORLD_SIZE', 'PMI_SIZE', 'PMIX_SIZE', 'HOROVOD_SIZE')
_LOCAL_RANK = ('OMPI_COMM_WORLD_LOCAL_RANK', 'MPI_LOCALRANKID', 'HOROVOD_LOCAL_RANK')
_LOCAL_SIZE = ('OMPI_COMM_WORLD_LOCAL_SIZE', 'MPI_LOCALNRANKS', 'HOROVOD_LOCAL_SIZE')


def _number(names: tuple[str, ...]) -> int | None:
    return next((int(os.environ[n]) for n in names if n in os.environ), None)


def launched_size() -> int | None:
    """Number of ranks, None without a launcher."""
    return _number(_SIZE)


def launched_rank() -> int:
    """This process's rank; 0 without a launcher."""
    return _number(_RANK) or 0


def launched_local() -> tuple[int, int]:
    """This process's rank on its node and the number of ranks there; (0, 1) without a launcher."""
    return _number(_LOCAL_RANK) or 0, _number(_LOCAL_SIZE) or 1


def rank_name() -> str:
    """This process for a message: 'rank 2 on h3'."""
    return f'rank {launched_rank()} on {platform.node()}'
