"""Gradient exchange between ranks that share a GPU. Pure except for sharing_of.

NCCL rejects a communicator with two ranks on one GPU. Horovod creates a communicator per process
set at the first exchange of a GPU array, and sends host arrays through MPI or Gloo. Therefore the
ranks of each GPU sum their gradients in host memory. One of them, the leader, then exchanges the
sum through NCCL and returns the result in the same way.
"""

from collections.abc import Sequence
from contextlib import suppress

from mlperf_rn50.config import Config
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.system.launcher_env import launched_size


def find_stages(rank: int, num_ranks: int, num_sharing: int) -> tuple[range, range]:
    """Return the ranks that share the GPU of a rank, leader first, and the leaders of all GPUs.

    Each exchange calls this, so it returns ranges, which cost the same for any number of ranks,
    also as dict keys.
    """
    first = rank - rank % num_sharing
    return range(first, min(first + num_sharing, num_ranks)), range(0, num_ranks, num_sharing)


def find_sets(num_ranks: int, num_sharing: int) -> list[range]:
    """Return all sets of ranks that exchange arrays, the set of all ranks first."""
    stages = [
        s
        for rank in range(0, num_ranks, num_sharing)
        for s in find_stages(rank, num_ranks, num_sharing)
    ]
    return list(dict.fromkeys([range(num_ranks), *(s for s in stages if len(s) > 1)]))


def check_places(places: Sequence[tuple[str, int]], num_sharing: int) -> None:
    """Raise ConfigError if ranks that should share a GPU are not consecutive ranks of one host."""
    for rank, (host, local_rank) in enumerate(places):
        first = rank - rank % num_sharing
        first_host, first_local_rank = places[first]
        if (host, local_rank // num_sharing) != (first_host, first_local_rank // num_sharing):
            raise ConfigError(
                f'run.ranks_per_device: got {num_sharing}, and ranks {first} and {rank}, which are '
                f'to share a GPU, are number {first_local_rank} on {first_host} and number '
                f'{local_rank} on {host}; start a multiple of {num_sharing} ranks on every node, '
                'numbered node by node'
            )


def sharing_of(config: Config) -> int:
    """Return how many consecutive ranks first sum in host memory; 1 without NCCL, as Horovod then
    sums there."""
    if launched_size() is not None and config.train.device == 'gpu':
        with suppress(ImportError):  # open_comm reports a missing Horovod
            import horovod.mxnet as hvd

            return config.run.ranks_per_device if hvd.nccl_built() else 1
    return 1


def describe_exchange(
    controller: str, device: str, num_ranks: int, num_sharing: int, has_nccl: bool
) -> str:
    """Describe the path of gradients between the ranks of a run."""
    if device != 'gpu':
        return f'{controller} controller'
    if not has_nccl:
        return f'{controller} controller, gradients through host memory and {controller}'
    num_gpus = -(-num_ranks // num_sharing)
    if num_sharing == 1:
        return f'{controller} controller, gradients of {num_gpus} GPUs through NCCL'
    last = f', then of {num_gpus} GPUs through NCCL' if num_gpus > 1 else ''
    return (
        f'{controller} controller, gradients of {num_sharing} ranks of a GPU through host memory '
        f'and {controller}{last}'
    )
