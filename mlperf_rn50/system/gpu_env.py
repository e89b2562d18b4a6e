"""Environment variables for ranks on GPUs; values set by the user or by NVIDIA's container are
kept.

Each command sets the missing variables if its device is a GPU. For other programs, the launchers
set MLPERF_RN50_DEVICE, and launch/bind.sh then sets each rank's missing variables, inside its
container.
"""

from collections.abc import Mapping

DEVICE_VARIABLE = 'MLPERF_RN50_DEVICE'
# names of the variables set by the program or by launch/bind.sh
SET_VARIABLE = 'MLPERF_RN50_SET_FOR_GPU'
NVIDIA_VARIABLE = 'NVIDIA_MXNET_VERSION'  # set in NVIDIA's container only

# Values without a source come from NVIDIA's MLPerf submissions with MXNet in v0.6 and v0.7.
SETTINGS = {
    # CUDA then numbers GPUs like nvidia-smi and NVML; by default, 0 is the fastest. Source: CUDA
    # C++ Programming Guide.
    'CUDA_DEVICE_ORDER': 'PCI_BUS_ID',
    'MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_FWD': '999',  # the whole forward pass runs as one segment
    # cuDNN times its convolutions once and uses the fastest within a workspace of 1 GB. Source:
    # MXNet 1.9.1.
    'MXNET_CUDNN_AUTOTUNE_DEFAULT': '1',
    'HOROVOD_CYCLE_TIME': '0.1',  # gradients wait at most 0.1 ms for their exchange (5 ms on CPUs)
    # so that each exchange has the full bandwidth; NVIDIA set it only in v0.7
    'HOROVOD_NUM_NCCL_STREAMS': '1',
    # Excludes Open MPI's own InfiniBand transport, which deadlocked with NCCL on 96 nodes. Source:
    # NVIDIA's submission for v1.1; Horovod 0.28.1, runner/mpi_run.py.
    'OMPI_MCA_btl': '^openib',
}
# Only for NVIDIA's build. Its BatchNorm kernels choose a tiling for each shape instead of a fixed
# one, and ignored cuDNN flags cause no warnings. Source: NVIDIA's submission for v1.1.
_NVIDIA_SETTINGS = {
    # With the next three, NVIDIA measured the speeds that docs/gpu.md quotes (RN50v1.5/runner of
    # DeepLearningExamples). Graphs omit operators that touch a network's inputs or outputs, and
    # recapture the others if their temporary space moves; parameters and gradients stay in place
    # (CachedOp::StaticInitExec, cuda_graphs.h of NVIDIA's MXNet 1.8).
    'MXNET_ENABLE_CUDA_GRAPHS': '1',
    # An operator counts as done when it is launched; see wait_for in train/comm/device.py.
    'MXNET_ASYNC_GPU_ENGINE': '1',
    'HOROVOD_ENABLE_ASYNC_COMPLETION': '1',  # the same for exchanges
    'MXNET_CUDNN_NHWC_BN_HEURISTIC_FWD': '1',
    'MXNET_CUDNN_NHWC_BN_HEURISTIC_BWD': '1',
    'MXNET_CUDNN_NHWC_BN_ADD_HEURISTIC_FWD': '1',
    'MXNET_CUDNN_NHWC_BN_ADD_HEURISTIC_BWD': '1',
    'MXNET_CUDNN_WARN_ON_IGNORED_FLAGS': '0',
}


def settings_of(is_nvidias: bool) -> dict[str, str]:
    """Return all settings for NVIDIA's build of MXNet or for another one."""
    return {**SETTINGS, **(_NVIDIA_SETTINGS if is_nvidias else {})}


def missing_settings(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to the environment of a rank; none unless its device is a GPU."""
    if env.get(DEVICE_VARIABLE) != 'gpu':
        return {}
    settings = settings_of(is_nvidias=bool(env.get(NVIDIA_VARIABLE)))
    added = {name: value for name, value in settings.items() if name not in env}
    return {
        **added,
        SET_VARIABLE: ','.join([*filter(None, env.get(SET_VARIABLE, '').split(',')), *added]),
    }
