"""What the training loop needs of Horovod, and a stand-in for one process.

Without a launcher (mpirun, horovodrun, srun) there is one rank and Horovod is not touched: MPI cannot
always start alone. Ranks that share a GPU exchange in two stages, see sharing.py.
"""
import json
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from itertools import cycle
from typing import Any, Protocol

import mxnet as mx
import numpy as np

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.system.launcher_env import launched_size
from mlperf_rn50.train.comm.sharing import check_places, find_sets, find_stages

# More sums than are ever under way at once, and few enough names for Horovod's cache.
_MAX_IN_BACKGROUND = 16
Exchange = Callable[[], AbstractContextManager[None]]


class Comm(Protocol):
    """The ranks of a run. Every method but the properties is called by all ranks, in the same order."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int

    def broadcast(self, arrays: Mapping[str, mx.nd.NDArray]) -> None:
        """Gives every rank the arrays of rank 0, in place."""

    def sum_gradients(self, grads: Sequence[mx.nd.NDArray], bucket: int = 0) -> None:
        """Sums a bucket of gradients over ranks in place, as one exchange, without waiting for it.

        Buckets with other numbers may be under way at the same time.
        """

    def sum_in_background(self, array: mx.nd.NDArray) -> mx.nd.NDArray:
        """The sum over ranks of a small array, without waiting for it."""

    def average(self, arrays: Sequence[mx.nd.NDArray]) -> None:
        """Averages over ranks in place."""

    def sum(self, counts: Sequence[int]) -> list[int]:
        """Exact sums of integers over ranks."""

    def gather_object(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order: anything that JSON can hold."""

    def barrier(self) -> None:
        """Returns once every rank has called it."""

    def subset(self, size: int) -> 'Comm | None':
        """The first `size` ranks, one of the sizes named to open_comm; None on the others."""


def fp16_scale(world_size: int) -> float:
    """What gradients are multiplied with before they travel in 16 bits: a power of two.

    Large, so that small values do not flush to zero; but a sum over all ranks of values up to 16 stays below
    float16's 65,504. Larger ones are clipped.
    """
    return 2.0 ** max(0, 12 - math.ceil(math.log2(world_size)))


def _copy(sources: Sequence[mx.nd.NDArray], targets: Sequence[mx.nd.NDArray]) -> None:
    """Copies arrays into others without waiting for it, but not into themselves."""
    for source, target in zip(sources, targets):
        if source is not target:
            source.copyto(target)


def _set_to_minus_0(arrays: Sequence[mx.nd.NDArray]) -> None:
    """Fills arrays with what leaves every number as it is, to the bit, when it is added."""
    for array in arrays:
        array[:] = 0
        array *= -1


class LocalComm:
    """One rank: nothing to exchange."""

    rank, world_size, local_rank, local_size = 0, 1, 0, 1

    def broadcast(self, *_, **__):
        pass

    sum_gradients = average = barrier = broadcast

    def sum_in_background(self, array):
        return array

    def sum(self, counts):
        return [int(c) for c in counts]

    def gather_object(self, value):
        return [json.loads(json.dumps(value))]

    def subset(self, size):
        return self


def check_controller(env: Mapping[str, str], has_mpi: bool, has_gloo: bool) -> None:
    """Raise ConfigError where the launcher has ranks meet in a way that Horovod was built without."""
    if env.get('HOROVOD_CONTROLLER') == 'gloo' and not has_gloo:
        raise ConfigError('HOROVOD_CONTROLLER: got gloo from the launcher, and this Horovod was built without Gloo; '
                          'start the ranks through MPI: launch/mpirun.sh')
    if 'OMPI_COMM_WORLD_SIZE' in env and not has_mpi:
        raise ConfigError('got ranks of mpirun, and this Horovod was built without MPI; start them with '
                          'launch/horovodrun.sh')


class HorovodComm:
    """The ranks Horovod knows."""

    def __init__(self, compression: str = 'none', subset_sizes: Sequence[int] = (), exchange: Exchange = nullcontext,
                 num_sharing: int = 1):
        """See open_comm."""
        import horovod.mxnet as hvd
        check_controller(os.environ, hvd.mpi_built(), hvd.gloo_built())
        size = launched_size() or 1
        wanted = [ranks for n in (size, *subset_sizes) if n <= size for ranks in find_sets(n, num_sharing)]
        sets = {ranks: hvd.ProcessSet(list(ranks)) for ranks in wanted if len(ranks) < size}
        with exchange():
            hvd.init(process_sets=list(sets.values()))
        self._exchange = exchange
        self._hvd, self._compression, self._num_sharing = hvd, compression, num_sharing
        self._sets = {**sets, tuple(range(size)): hvd.global_process_set}
        self._turns = cycle(range(_MAX_IN_BACKGROUND))
        self._kept: dict[str, list[mx.nd.NDArray]] = {}
        self.rank, self.world_size = hvd.rank(), hvd.size()
        self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
        if num_sharing > 1:
            check_places(self.gather_object([platform.node(), self.local_rank]), num_sharing)

    def broadcast(self, arrays):
        # Not Horovod's own broadcast, which may read a tensor's name after the tensor was sent and its name freed
        # (0.28.1, EnqueueTensorBroadcast). Every other rank contributes -0, so the sum is rank 0's array to the bit.
        ordered = [array for _, array in sorted(arrays.items())]
        if self.rank:
            _set_to_minus_0(ordered)
        name = f'broadcast/{min(arrays)}'
        with self._exchange():
            self._sum(ordered, name)
        self._kept.pop(name, None)  # not needed again for long

    def sum_gradients(self, grads, bucket=0):
        name = f'gradients/{bucket}'
        if self._compression == 'none' or grads[0].dtype == np.float16:  # which has its loss scale
            self._sum(list(grads), name)
            return
        scale, most = fp16_scale(self.world_size), np.finfo(np.float16).max / self.world_size
        small = [mx.nd.clip(g * scale, -most, most).astype('float16') for g in grads]
        self._sum(small, name)
        for grad, reduced in zip(grads, small):
            grad[:] = reduced.astype(grad.dtype) / scale

    def sum_in_background(self, array):
        # Horovod refuses a name that is still under way, and several of these are when the network is slow.
        total = array.copy()
        self._sum([total], f'background/{next(self._turns)}')
        return total

    def average(self, arrays):
        with self._exchange():
            self._sum(arrays, 'average')
        for array in arrays:
            array /= self.world_size

    def _sum(self, arrays, name):
        """Sums arrays of the device over ranks in place, as one exchange, without waiting for it.

        float16 is summed in float16 on the host, as it is by NCCL: a sum beyond its range is infinite in the leader's
        sum, and so for all. Every rank takes the result from where its GPU's ranks last agreed on it.
        """
        sharers, leaders = find_stages(self.rank, self.world_size, self._num_sharing)
        hosts = self._host_arrays(arrays, name) if len(sharers) > 1 else arrays
        _copy(arrays, hosts)
        name = f'{name}/{self.world_size}'  # a subset has sets of sharers and leaders in common with all ranks
        self._sum_among(sharers, hosts, f'{name}/sharers')
        if len(leaders) > 1:
            if self.rank == sharers[0]:
                _copy(hosts, arrays)
                self._sum_among(leaders, arrays, name)
                _copy(arrays, hosts)
            else:
                _set_to_minus_0(hosts)
            self._sum_among(sharers, hosts, f'{name}/back')
        _copy(hosts, arrays)

    def _sum_among(self, ranks, arrays, name):
        if len(ranks) > 1:
            self._hvd.grouped_allreduce_(arrays, op=self._hvd.Sum, process_set=self._sets[ranks], name=name)

    def _host_arrays(self, arrays, name):
        """Arrays in host memory like those of a device, which stay as they are where they are there already.

        They are kept for the next exchange of this name: a driver takes long to lock new pages in memory.
        """
        if arrays[0].context == mx.cpu():
            return arrays
        kept = self._kept.get(name, [])
        if [(h.shape, h.dtype) for h in kept] != [(a.shape, a.dtype) for a in arrays]:
            kept = [mx.nd.empty(a.shape, mx.cpu_pinned(a.context.device_id), a.dtype) for a in arrays]
            self._kept[name] = kept
        return kept

    def sum(self, counts):
        own = mx.nd.array(list(counts), dtype='int64')
        with self._exchange():
            total = self._hvd.allreduce(own, op=self._hvd.Sum, process_set=self._all, name='counts').asnumpy()
        return [int(c) for c in total]

    def gather_object(self, value):
        own = np.frombuffer(json.dumps(value).encode(), np.uint8)
        lengths = self._gather(np.array([own.size], np.int64), 'lengths')
        texts = self._gather(own, 'texts').tobytes()
        ends = np.cumsum(lengths)
        return [json.loads(texts[end - n:end]) for n, end in zip(lengths, ends)]

    def _gather(self, array, name):
        """The 1-D arrays of all ranks, one after another; they may differ in length."""
        with self._exchange():
            own = mx.nd.array(array, dtype=array.dtype)
            return self._hvd.allgather(own, name=name, process_set=self._all).asnumpy()

    @property
    def _all(self):
        return self._sets[tuple(range(self.world_size))]

    def barrier(self):
        self.sum([0])

    def subset(self, size):
        if size == self.world_size:
            return self
        if self.rank >= size:
            return None
        part = copy(self)
        part._turns = cycle(range(_MAX_IN_BACKGROUND))  # its own: the names must agree among its ranks
        part.world_size = size
        part.local_size = min(self.local_size, size - (self.rank - self.local_rank))
        return part


def open_comm(compression: str, subset_sizes: Sequence[int] = (), exchange: Exchange = nullcontext,
              num_sharing: int = 1) -> Comm:
    """The ranks of this run: Horovod's under a launcher, else the stand-in.

    Args:
        subset_sizes: how many ranks some parts of the work will be done by, see Comm.subset.
        exchange: entered around what waits for all ranks.
        num_sharing: neighbouring ranks that share a GPU and sum among themselves first, see sharing_of. The last GPU,
            also that of a subset, may have fewer.

    Raises:
        ConfigError: a launcher started several processes and Horovod is missing or has no MXNet support, or the ranks
            of a GPU are not neighbours.
    """
    size = launched_size()
    if size is None:
        return LocalComm()
    try:
        return HorovodComm(compression, subset_sizes, exchange, num_sharing)
    except ImportError as e:
        raise ConfigError(f'horovod: got {" ".join(str(e).split())}, expected Horovod built with MXNet for {size} '
                          'processes; run launch/setup.sh') from e
