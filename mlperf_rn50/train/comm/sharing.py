"""Ranks that share a GPU: which ranks sum among themselves before the exchange. Pure but for sharing_of.

NCCL refuses a communicator with two ranks of one GPU. Horovod makes one for each process set, when the first array of a
GPU is exchanged in it, and sends arrays of the host through MPI or Gloo. So where ranks share a GPU, those of each GPU
sum among themselves in host memory, one of them, the leader, takes the sum through NCCL, and the others get the result
through host memory.
"""
from collections.abc import Sequence
from contextlib import suppress

from mlperf_rn50.config import Config
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.system.launcher_env import launched_size


def find_stages(rank: int, num_ranks: int, num_sharing: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The neighbours that share this rank's GPU, the first of which is their leader; and the leaders of all GPUs."""
    first = rank - rank % num_sharing
    return tuple(range(first, min(first + num_sharing, num_ranks))), tuple(range(0, num_ranks, num_sharing))


def find_sets(num_ranks: int, num_sharing: int) -> list[tuple[int, ...]]:
    """All ranks, and every other set of ranks in which arrays are exchanged."""
    stages = [s for rank in range(0, num_ranks, num_sharing) for s in find_stages(rank, num_ranks, num_sharing)]
    return list(dict.fromkeys([tuple(range(num_ranks)), *(s for s in stages if len(s) > 1)]))


def check_places(places: Sequence[tuple[str, int]], num_sharing: int) -> None:
    """Raise ConfigError where ranks that sum among themselves do not share a GPU."""
    for first in range(0, len(places), num_sharing):
        sharers = list(enumerate(places[first:first + num_sharing], first))
        (_, (host, local_rank)) = sharers[0]
        for rank, (other_host, other_local_rank) in sharers:
            if (other_host, other_local_rank // num_sharing) != (host, local_rank // num_sharing):
                raise ConfigError(
                    f'run.ranks_per_device: got {num_sharing}, and ranks {first} and {rank}, which are to share a GPU, '
                    f'are number {local_rank} on {host} and number {other_local_rank} on {other_host}; start a '
                    f'multiple of {num_sharing} ranks on every node, numbered node by node')


def decide_sharing(device: str, ranks_per_device: int, has_nccl: bool) -> int:
    """How many neighbouring ranks sum among themselves first; 1 where all take part in the exchange alike.

    Horovod without NCCL copies the arrays of a GPU to the host itself, and any ranks may exchange them.
    """
    return ranks_per_device if device == 'gpu' and has_nccl else 1


def sharing_of(config: Config) -> int:
    """The same for a run of this configuration, by the Horovod that is installed."""
    if launched_size() is None or decide_sharing(config.train.device, config.run.ranks_per_device, True) == 1:
        return 1
    with suppress(ImportError):  # open_comm reports it
        import horovod.mxnet as hvd
        return decide_sharing(config.train.device, config.run.ranks_per_device, bool(hvd.nccl_built()))
    return 1


def describe_exchange(controller: str, device: str, num_ranks: int, ranks_per_device: int, has_nccl: bool) -> str:
    """How gradients travel between the ranks of a run."""
    if device != 'gpu':
        return f'{controller} controller'
    if not has_nccl:
        return f'{controller} controller, gradients through host memory and {controller}'
    num_sharing = decide_sharing(device, ranks_per_device, has_nccl)
    num_gpus = -(-num_ranks // num_sharing)
    if num_sharing == 1:
        return f'{controller} controller, gradients of {num_gpus} GPUs through NCCL'
    last = f', then those of {num_gpus} GPUs through NCCL' if num_gpus > 1 else ''
    return (f'{controller} controller, gradients of {num_sharing} ranks of a GPU through host memory and '
            f'{controller}{last}')
