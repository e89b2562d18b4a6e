"""Communication between ranks through Horovod, and for a single process.

Without a launcher (mpirun, horovodrun, srun) there is one rank, and Horovod is not used because MPI
cannot always start without a launcher. Ranks that share a GPU exchange in two stages; see
sharing.py.
"""

import atexit
import ctypes
import json
import os
import platform
import signal
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from itertools import cycle
from typing import Any, TypeVar

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from mlperf_rn50.errors import ConfigError, UserError
from mlperf_rn50.system.launcher_env import launched_size, print_stderr, rank_name
from mlperf_rn50.train.comm.cores import thread_ids
from mlperf_rn50.train.comm.sharing import check_places, find_sets, find_stages

# Variables that a launcher sets together with the number of ranks; without them, it is left over in
# the environment.
_SET_WITH = {
    'OMPI_COMM_WORLD_SIZE': 'PMIX_NAMESPACE',
    'HOROVOD_SIZE': 'HOROVOD_GLOO_RENDEZVOUS_ADDR',
}
# Number of names for background sums: more than are ever pending, and few enough for Horovod's
# cache.
_MAX_IN_BACKGROUND = 16
# Factor on gradients that are exchanged in 16 bits: a power of two, and large, so that small values
# do not become zero. It turns a gradient of 8 into 2**15, half of the largest float16; larger
# gradients are clipped.
_FP16_SCALE, _FP16_LIMIT = 2.0**12, 2.0**15
# Period of looks at Horovod's thread; time for the loss of another rank to be reported, up to 8.5 s
# after it by rank.
_LOOK_S, LOST_S = 1.0, 20.0
Exchange = Callable[[], AbstractContextManager[None]]
T = TypeVar('T')


class Comm:
    """The ranks of a run. All must call the methods in the same order. This base class is for a
    single rank."""

    rank, world_size, local_rank, local_size = 0, 1, 0, 1
    threads: Set[str] = frozenset()  # those that exchange gradients, of this process
    compression = 'none'  # of float32 gradients in the exchange

    def broadcast(self, arrays: Mapping[str, NDArray]) -> None:
        """Copy the arrays of rank 0 to all ranks, in place."""

    def average_gradients(self, grads: Sequence[NDArray], bucket: int = 0) -> None:
        """Average a bucket of gradients over ranks in place, as one exchange, without waiting;
        several may overlap."""

    def sum_in_background(self, array: NDArray) -> NDArray:
        """Return a small array, summed over ranks, without waiting for the sum."""
        return array

    def average(self, arrays: Sequence[NDArray]) -> None:
        """Average arrays over ranks in place."""

    def sum(self, counts: Sequence[int]) -> list[int]:
        """Return exact sums of integers over ranks."""
        return [int(c) for c in counts]

    def minimum(self, values: np.ndarray) -> np.ndarray:
        """Return the minimum over ranks of each element; values: float64, with the same shape on
        all ranks."""
        return values

    def gather_object(self, value: Any, only_on_rank_0: bool = False) -> list[Any]:
        """Return the JSON values of all ranks, in rank order; with only_on_rank_0, an empty list on
        other ranks."""
        return [json.loads(json.dumps(value))]

    def on_rank_0(self, make: Callable[[], T]) -> T | None:
        """Call a function on rank 0; return its result, None on other ranks. Raise its UserError on
        every rank, with its exit code."""
        made, problem = None, None
        if self.rank == 0:
            try:
                made = make()
            except UserError as e:
                problem = [str(e), e.exit_code]
        if problem := self.gather_object(problem)[0]:
            error = UserError(problem[0])
            error.exit_code = problem[1]
            raise error
        return made

    def from_rank_0(self, make: Callable[[], Any]) -> Any:
        """Call a function on rank 0; return its result, a JSON value, on all ranks. Raise errors as
        on_rank_0 does."""
        return self.gather_object(self.on_rank_0(make))[0]

    def barrier(self) -> None:
        """Wait for all ranks."""

    def subset(self, size: int) -> 'Comm | None':
        """Return a Comm of the first `size` ranks, None on the others; size: one of open_comm's
        subset_sizes."""
        return self


def _copy(sources: Sequence[NDArray], targets: Sequence[NDArray]) -> None:
    """Copy arrays into targets without waiting; skip arrays that are their own targets."""
    for source, target in zip(sources, targets):
        if source is not target:
            source.copyto(target)


def wait_for(array: NDArray) -> None:
    """Wait until an array is computed; raise the MXNetError of a failed operator.

    With MXNET_ASYNC_GPU_ENGINE, wait_to_read() waits only for the launch (WaitForVar of NVIDIA's
    threaded_engine.cc). A copy to the host waits for the GPU, in a thread for copies.
    """
    if array.context.device_type == 'gpu':
        array.reshape((-1,))[:1].asnumpy()
    else:
        array.wait_to_read()


def _set_to_minus_0(arrays: Sequence[NDArray]) -> None:
    """Fill arrays with -0, because adding it changes no bit of any number."""
    for array in arrays:
        array[:] = 0
        array *= -1


def check_controller(env: Mapping[str, str], has_mpi: bool, has_gloo: bool) -> None:
    """Raise ConfigError without a launcher, or if Horovod was built without the controller that it
    requires."""
    found = [name for name in _SET_WITH if name in env]
    if found and not any(_SET_WITH[name] in env for name in found):
        raise ConfigError(
            f'{found[0]}: got {env[found[0]]!r} in the environment without a launcher; unset it, '
            'or start the ranks with launch/local.sh'
        )
    if env.get('HOROVOD_CONTROLLER') == 'gloo' and not has_gloo:
        raise ConfigError(
            'HOROVOD_CONTROLLER: got gloo from the launcher, but Horovod was built without Gloo; '
            'start the ranks with launch/mpirun.sh'
        )
    if 'OMPI_COMM_WORLD_SIZE' in env and not has_mpi:
        raise ConfigError(
            'mpirun started the ranks, but Horovod was built without MPI; use launch/horovodrun.sh'
        )


def end_without(thread: str) -> None:
    """End this rank by SIGABRT after Horovod's thread has ended by an exception, because exchanges
    would wait for it.

    The watcher of the rank then reports a lack of memory. At the end of the process, Horovod ends
    its thread itself; the main thread may have ended before, while a checkpoint is still being
    written.
    """
    is_ending = threading.Event()
    # called before the function that Horovod's init() has registered
    atexit.register(is_ending.set)
    while thread in thread_ids():
        if is_ending.wait(_LOOK_S):
            return
    if not is_ending.wait(LOST_S) and threading.main_thread().is_alive():
        print_stderr(
            f'mlperf-rn50: {rank_name()}: the thread of Horovod that exchanges gradients has ended'
        )
        # SIG_DFL, because Open MPI's handler would print its stack
        ctypes.CDLL(None).signal(signal.SIGABRT, 0)
        os.kill(os.getpid(), signal.SIGABRT)


class HorovodComm(Comm):
    def __init__(
        self, compression: str, subset_sizes: Sequence[int], exchange: Exchange, num_sharing: int
    ):
        """Start Horovod; see open_comm."""
        import horovod.mxnet as hvd

        check_controller(os.environ, hvd.mpi_built(), hvd.gloo_built())
        size = launched_size() or 1
        sizes = [n for n in (size, *subset_sizes) if n <= size]
        requested = [ranks for n in sizes for ranks in find_sets(n, num_sharing)]
        # Horovod itself has the set of all ranks.
        sets = {ranks: hvd.ProcessSet(list(ranks)) for ranks in requested if len(ranks) < size}
        before = set(thread_ids())
        with exchange():
            hvd.init(process_sets=list(sets.values()))
        self.threads = set(thread_ids()) - before
        # Horovod starts its own thread first, which then starts those of MPI.
        for thread in sorted(self.threads, key=int)[:1]:
            threading.Thread(target=end_without, args=(thread,), daemon=True).start()
        self._exchange = exchange
        self._hvd = hvd
        self.compression = compression
        self._num_sharing = num_sharing
        self._sets = {**sets, range(size): hvd.global_process_set}
        self._turns = cycle(range(_MAX_IN_BACKGROUND))
        self._host_cache: dict[str, list[NDArray]] = {}
        self.rank, self.world_size = hvd.rank(), hvd.size()
        self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
        if num_sharing > 1:
            check_places(self.gather_object([platform.node(), self.local_rank]), num_sharing)

    def broadcast(self, arrays):
        # Horovod's broadcast may read a tensor name after it is freed (0.28.1,
        # EnqueueTensorBroadcast). Instead, all ranks other than 0 contribute -0 to a sum, which
        # therefore equals the array of rank 0 to the bit.
        ordered = [array for _, array in sorted(arrays.items())]
        if self.rank:
            _set_to_minus_0(ordered)
        name = f'broadcast/{min(arrays)}'
        with self._exchange():
            self._sum(ordered, name)
            for array in ordered:
                wait_for(array)
        self._host_cache.pop(name, None)  # free host memory that is rarely needed

    def average_gradients(self, grads, bucket=0):
        # Each rank's values are divided by the number of ranks before they are added. With NCCL
        # before 2.10 and on a CPU, Horovod's Average divides only the sum, which may already have
        # overflowed in float16.
        name, factor = f'gradients/{bucket}', 1 / self.world_size
        # the loss scale suffices for float16
        if self.compression == 'none' or grads[0].dtype == np.float16:
            self._sum(list(grads), name, factor)
            return
        small = [
            mx.nd.clip(g * _FP16_SCALE, -_FP16_LIMIT, _FP16_LIMIT).astype('float16') for g in grads
        ]
        self._sum(small, name, factor)
        for grad, reduced in zip(grads, small):
            grad[:] = reduced.astype(grad.dtype) / _FP16_SCALE

    def sum_in_background(self, array):
        # Horovod rejects a name that is in use, and several sums may be pending on a slow network.
        total = array.copy()
        self._sum([total], f'background/{next(self._turns)}')
        return total

    def average(self, arrays):
        with self._exchange():
            self._sum(arrays, 'average')
            for array in arrays:
                wait_for(array)
        for array in arrays:
            array /= self.world_size

    def _sum(self, arrays, name, factor=1.0):
        """Sum device arrays in place over all ranks, scaled by a factor, in one exchange and
        without waiting.

        As with NCCL, float16 arrays are summed in float16 on the host, so that an overflow is
        infinite in the leader's sum and therefore on all ranks. Finally, each leader sends the
        result to the ranks of its GPU.
        """
        sharers, leaders = find_stages(self.rank, self.world_size, self._num_sharing)
        # the first of two stages must not overflow either
        if self._num_sharing > 1 and factor != 1:
            for array in arrays:
                array *= factor
            factor = 1.0
        hosts = self._host_arrays(arrays, name) if len(sharers) > 1 else arrays
        _copy(arrays, hosts)
        # a subset's Comm may exchange other arrays in the same process set
        name = f'{name}/{self.world_size}'
        self._sum_among(sharers, hosts, f'{name}/sharers')
        if len(leaders) > 1:
            if self.rank == sharers[0]:
                _copy(hosts, arrays)
                self._sum_among(leaders, arrays, name, factor)
                _copy(arrays, hosts)
            else:
                _set_to_minus_0(hosts)
            self._sum_among(sharers, hosts, f'{name}/back')
        _copy(hosts, arrays)

    def _sum_among(self, ranks, arrays, name, factor=1.0):
        if len(ranks) > 1:
            self._hvd.grouped_allreduce_(
                arrays,
                op=self._hvd.Sum,
                process_set=self._sets[ranks],
                name=name,
                prescale_factor=factor,
            )

    def _host_arrays(self, arrays, name):
        """Return host arrays shaped like device arrays, cached by name because drivers lock new
        pages slowly."""
        if arrays[0].context == mx.cpu():
            return arrays
        cached = self._host_cache.get(name, [])
        if [(h.shape, h.dtype) for h in cached] != [(a.shape, a.dtype) for a in arrays]:
            cached = [
                mx.nd.empty(a.shape, mx.cpu_pinned(a.context.device_id), a.dtype) for a in arrays
            ]
            self._host_cache[name] = cached
        return cached

    def sum(self, counts):
        return [int(c) for c in self._reduce(list(counts), 'int64', self._hvd.Sum)]

    def minimum(self, values):
        return self._reduce(values, 'float64', self._hvd.Min)

    def _reduce(self, values, dtype, op):
        own = mx.nd.array(values, mx.cpu(), dtype)  # a GPU may be the current context
        # If a name gets a different shape, Horovod's response cache drops it on all ranks (0.28.1,
        # response_cache.cc).
        name = f'{dtype}/{len(own)}'
        with self._exchange():
            return self._hvd.allreduce(own, op=op, process_set=self._all, name=name).asnumpy()

    def gather_object(self, value, only_on_rank_0=False):
        own = mx.nd.array(
            np.frombuffer(f'{json.dumps(value)},'.encode(), np.uint8), mx.cpu(), 'uint8'
        )
        with self._exchange():
            texts = (
                self._hvd.allgather(own, name='texts', process_set=self._all).asnumpy().tobytes()
            )
        # Only rank 0 spends time on parsing the values of many ranks.
        return [] if only_on_rank_0 and self.rank else json.loads(b'[' + texts[:-1] + b']')

    @property
    def _all(self):
        return self._sets[range(self.world_size)]

    def barrier(self):
        self.sum([0])

    def subset(self, size):
        if size == self.world_size:
            return self
        if self.rank >= size:
            return None
        part = copy(self)
        # a new cycle, so that tensor names agree within the subset
        part._turns = cycle(range(_MAX_IN_BACKGROUND))
        part.world_size = size
        part.local_size = min(self.local_size, size - (self.rank - self.local_rank))
        return part


def open_comm(
    compression: str,
    subset_sizes: Sequence[int] = (),
    exchange: Exchange = nullcontext,
    num_sharing: int = 1,
) -> Comm:
    """Return the ranks of Horovod under a launcher, otherwise a single rank, which does not need
    Horovod.

    If several ranks lack Horovod, raise ConfigError.

    Args:
        subset_sizes: sizes that Comm.subset will be called with.
        exchange: returns a context manager, which each operation that waits for all ranks enters.
        num_sharing: number of consecutive ranks that share a GPU (see sharing_of); the last GPU may
            have fewer.
    """
    size = launched_size()
    if size is None:
        return Comm()
    try:
        return HorovodComm(compression, subset_sizes, exchange, num_sharing)
    except ImportError as e:
        if size == 1:
            return Comm()
        raise ConfigError(
            f'horovod: got {" ".join(str(e).split())}, expected Horovod built with MXNet for '
            f'{size} ranks; start one rank, or run launch/setup.sh (for GPUs with nvcc of CUDA 11 '
            'in PATH)'
        ) from e
