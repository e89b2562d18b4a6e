"""Device of a rank."""

import os
import platform
import time
from dataclasses import asdict

import msgspec
import mxnet as mx
from mxnet import nd
from mxnet.ndarray import NDArray

from mlperf_rn50.config import Config
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.system.gpus import VISIBLE, View, choose_gpus, find_visible_gpus, make_view
from mlperf_rn50.train.comm.horovod import Comm


def cast(array: NDArray, precision: str) -> NDArray:
    if precision == 'bfloat16':  # NumPy has no bfloat16, so amp_cast needs MXNet's type
        from mxnet.contrib.amp.amp import bfloat16

        return nd.amp_cast(array, dtype=bfloat16)
    return array.astype(precision)


def gemm_times(
    side: int, precision: str, context: mx.Context, num: int, num_products: int = 1
) -> list[float]:
    """Return the seconds of products of square matrices, num times num_products, after two
    warm-ups."""
    a, b = (cast(nd.random.normal(shape=(side, side), ctx=context), precision) for _ in range(2))
    seconds = []
    for _ in range(2 + num):
        nd.waitall()
        start = time.perf_counter()
        for _ in range(num_products):
            nd.FullyConnected(a, b, num_hidden=side, no_bias=True)
        nd.waitall()
        seconds.append(time.perf_counter() - start)
    return seconds[2:]


def measure_peak(precision: str, context: mx.Context, num: int = 12, side: int = 2048) -> float:
    """Return the FLOP/s of the fastest matrix products. Call it with float32 before amp.init, with
    bfloat16 after.

    side: of the matrices on a CPU. A product of 2,048 takes a fast GPU no longer than its launch.
    """
    side, num_products = (4096, 20) if context.device_type == 'gpu' else (side, 1)
    return 2 * num_products * side**3 / min(gemm_times(side, precision, context, num, num_products))


def device_id_of(config: Config, comm: Comm) -> int | None:
    """Return MXNet's number of this rank's GPU, None on CPUs. All ranks must call this and get the
    same ConfigError."""
    if config.train.device == 'cpu':
        return None
    num_gpus = mx.context.num_gpus()
    gpus = find_visible_gpus() if num_gpus else []
    own = make_view(platform.node(), gpus, num_gpus, os.environ.get(VISIBLE))
    views = msgspec.convert(comm.gather_object(asdict(own)), list[View])
    if not any(v.uuids for v in views):
        raise ConfigError(
            'train.device: got gpu, but MXNet finds no GPU; install a GPU build (launch/setup.sh '
            'with MLPERF_RN50_VARIANT) and the driver, or set train.device=cpu'
        )
    return choose_gpus(views, config.run.ranks_per_device)[comm.rank]
