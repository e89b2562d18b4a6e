"""The environment that ranks on GPUs get from the launchers, unless a variable is set already.

The launchers say which device a run is for (MLPERF_RN50_DEVICE) and launch/bind.sh, before every rank and inside its
container, sets what is missing there; so what the user or NVIDIA's container has set stays.
"""
from collections.abc import Mapping, Sequence

DEVICE_VARIABLE = 'MLPERF_RN50_DEVICE'
SET_VARIABLE = 'MLPERF_RN50_SET_FOR_GPU'  # names of those that launch/bind.sh has set

# Source, where no other is named: NVIDIA's MLPerf submissions in MXNet, v0.6 and v0.7.
SETTINGS = {
    # CUDA counts GPUs as nvidia-smi and NVML do; else the fastest is 0. Source: CUDA C++ Programming Guide.
    'CUDA_DEVICE_ORDER': 'PCI_BUS_ID',
    'MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_FWD': '999',  # the forward pass is pushed to the engine as one piece
    'MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_BWD': '25',  # in pieces, so that the first gradients travel before it ends
    # A graph is captured with the addresses of its arrays and captured anew only when MXNet's temporary space moves
    # (MXNet 1.9.1, src/imperative/cuda_graphs.h); DALI's batches, and what Horovod sums, come from outside: not tried.
    # Off is MXNet's default; some later recipes set 1.
    'MXNET_ENABLE_CUDA_GRAPHS': '0',
    # cuDNN times its convolutions once and takes the fastest that fits the workspace of 1 GB. Source: MXNet 1.9.1.
    'MXNET_CUDNN_AUTOTUNE_DEFAULT': '1',
    'HOROVOD_CYCLE_TIME': '0.1',  # gradients wait at most 0.1 ms for their exchange (on CPUs 5 ms)
    'HOROVOD_NUM_NCCL_STREAMS': '1',  # one exchange at a time has all of the links; v0.7 only
}


def missing_settings(env: Mapping[str, str]) -> dict[str, str]:
    """What is to be added to the environment of a rank: nothing where its device is no GPU."""
    if env.get(DEVICE_VARIABLE) != 'gpu':
        return {}
    added = {name: value for name, value in SETTINGS.items() if name not in env}
    return {**added, SET_VARIABLE: ','.join(added)}


def device_of_words(words: Sequence[str]) -> str:
    """The device that the words of a command line ask for; cpu where they do not say, or cannot be read."""
    def value_of(option: str) -> str | None:
        found = [words[i + 1] if word == option else word.partition('=')[2] for i, word in enumerate(words)
                 if word.startswith(f'{option}=') or word == option and i + 1 < len(words)]
        return found[-1] if found else None
    import yaml  # every rank begins with this module, and none of them needs it
    device, config, run_dir = value_of('--train.device'), value_of('--config'), value_of('--resume')
    config = f'{run_dir}/config.yaml' if config is None and run_dir is not None else config
    if device is None and config is not None:
        try:
            with open(config, encoding='utf-8') as f:
                device = yaml.safe_load(f)['train']['device']
        except (OSError, ValueError, yaml.YAMLError, LookupError, TypeError, RecursionError):
            pass  # the program says what is wrong
    return 'gpu' if device == 'gpu' else 'cpu'
