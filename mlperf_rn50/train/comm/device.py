"""Device of a rank."""
import os
import platform
from dataclasses import asdict

import mxnet as mx

from mlperf_rn50.config import Config
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.system.gpus import VISIBLE, View, choose_gpus, find_visible_gpus, make_view
from mlperf_rn50.train.comm.horovod import Comm


def wait_for(array: mx.nd.NDArray) -> None:
    """Wait until an array is computed; raise the MXNetError of a failed operator.

    With MXNET_ASYNC_GPU_ENGINE, wait_to_read() waits only for the launch (WaitForVar of NVIDIA's threaded_engine.cc). A
    copy to the host waits for the GPU, in a thread for copies.
    """
    if array.context.device_type == 'gpu':
        array.reshape((-1,))[:1].asnumpy()
    else:
        array.wait_to_read()


def device_id_of(config: Config, comm: Comm) -> int | None:
    """Return MXNet's number of this rank's GPU, None on CPUs. All ranks must call this and get the same ConfigError."""
    if config.train.device == 'cpu':
        return None
    num_gpus = mx.context.num_gpus()
    own = make_view(platform.node(), find_visible_gpus() if num_gpus else [], num_gpus, os.environ.get(VISIBLE))
    views = [View(v['host'], tuple(v['uuids']), v['visible'], tuple(v['cards']))
             for v in comm.gather_object(asdict(own))]
    if not any(v.uuids for v in views):
        raise ConfigError('train.device: got gpu, but MXNet finds no GPU; install a GPU build (launch/setup.sh with '
                          'MLPERF_RN50_VARIANT) and the driver, or set train.device=cpu')
    return choose_gpus(views, config.run.ranks_per_device)[comm.rank]
