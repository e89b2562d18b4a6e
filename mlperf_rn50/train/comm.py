"""What the training loop needs of Horovod, and a stand-in for one process.

Without a launcher (mpirun, horovodrun, srun) there is one rank and Horovod is not touched: MPI cannot
always start alone.
"""
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from itertools import cycle
from typing import Any, Protocol

import mxnet as mx
import numpy as np

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.system.launched import launched_size

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


class LocalComm:
    """One rank: nothing to exchange."""

    rank, world_size, local_rank, local_size = 0, 1, 0, 1

    def broadcast(self, arrays):
        pass

    def sum_gradients(self, grads, bucket=0):
        pass

    def sum_in_background(self, array):
        return array

    def average(self, arrays):
        pass

    def sum(self, counts):
        return [int(c) for c in counts]

    def gather_object(self, value):
        return [json.loads(json.dumps(value))]

    def barrier(self):
        pass

    def subset(self, size):
        return self


class HorovodComm:
    """The ranks Horovod knows."""

    def __init__(self, compression: str = 'none', subset_sizes: Sequence[int] = (), exchange: Exchange = nullcontext):
        """See open_comm."""
        import horovod.mxnet as hvd
        size = launched_size() or 1
        sets = {n: hvd.ProcessSet(list(range(n))) for n in subset_sizes if n < size}
        with exchange():
            hvd.init(process_sets=list(sets.values()))
        self._exchange = exchange
        self._hvd, self._compression, self._sets = hvd, compression, sets
        self._among = {'process_set': hvd.global_process_set}
        self._turns = cycle(range(_MAX_IN_BACKGROUND))
        self.rank, self.world_size = hvd.rank(), hvd.size()
        self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()

    def broadcast(self, arrays):
        # Not Horovod's own broadcast, which may read a tensor's name after the tensor was sent and its name freed
        # (0.28.1, EnqueueTensorBroadcast). Every other rank contributes -0, so the sum is rank 0's array to the bit.
        ordered = [array for _, array in sorted(arrays.items())]
        if self.rank:
            for array in ordered:
                array[:] = 0
                array *= -1
        with self._exchange():
            self._hvd.grouped_allreduce_(ordered, op=self._hvd.Sum, **self._among, name=f'broadcast/{min(arrays)}')

    def sum_gradients(self, grads, bucket=0):
        name = f'gradients/{bucket}'
        if self._compression == 'none' or grads[0].dtype == np.float16:  # which has its loss scale
            self._hvd.grouped_allreduce_(list(grads), op=self._hvd.Sum, **self._among, name=name)
            return
        scale, most = fp16_scale(self.world_size), np.finfo(np.float16).max / self.world_size
        small = [mx.nd.clip(g * scale, -most, most).astype('float16') for g in grads]
        self._hvd.grouped_allreduce_(small, op=self._hvd.Sum, **self._among, name=name)
        for grad, reduced in zip(grads, small):
            grad[:] = reduced.astype(grad.dtype) / scale

    def sum_in_background(self, array):
        # Horovod refuses a name that is still under way, and several of these are when the network is slow.
        name = f'background/{next(self._turns)}'
        return self._hvd.allreduce(array, op=self._hvd.Sum, **self._among, name=name)

    def average(self, arrays):
        with self._exchange():
            self._hvd.grouped_allreduce_(arrays, op=self._hvd.Average, **self._among, name='average')

    def sum(self, counts):
        own = mx.nd.array(list(counts), dtype='int64')
        with self._exchange():
            total = self._hvd.allreduce(own, op=self._hvd.Sum, **self._among, name='counts').asnumpy()
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
            return self._hvd.allgather(mx.nd.array(array, dtype=array.dtype), name=name, **self._among).asnumpy()

    def barrier(self):
        self.sum([0])

    def subset(self, size):
        if size == self.world_size:
            return self
        if self.rank >= size:
            return None
        part = copy(self)
        part._turns = cycle(range(_MAX_IN_BACKGROUND))  # its own: the names must agree among its ranks
        part.world_size, part._among = size, {'process_set': self._sets[size]}
        part.local_size = min(self.local_size, size - (self.rank - self.local_rank))
        return part


def open_comm(compression: str, subset_sizes: Sequence[int] = (), exchange: Exchange = nullcontext) -> Comm:
    """The ranks of this run: Horovod's under a launcher, else the stand-in.

    Args:
        compression: comm.compression of the configuration.
        subset_sizes: how many ranks some parts of the work will be done by, see Comm.subset.
        exchange: entered around what waits for all ranks.

    Raises:
        ConfigError: a launcher started several processes and Horovod is missing or has no MXNet support.
    """
    size = launched_size()
    if size is None:
        return LocalComm()
    try:
        return HorovodComm(compression, subset_sizes, exchange)
    except ImportError as e:
        raise ConfigError(f'horovod: got {" ".join(str(e).split())}, expected Horovod built with MXNet for {size} '
                          'processes; run launch/setup.sh') from e
