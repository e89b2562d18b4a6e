"""What a result is of: python tests/gpu/machine.py FOLDER writes FOLDER/machine.jsonl, whatever does not import."""
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_GPU_KEYS = ('name', 'memory.total', 'compute_cap', 'driver_version', 'mig.mode.current', 'power.limit',
             'clocks.max.sm', 'pcie.link.gen.max', 'ecc.mode.current', 'persistence_mode')
_VARIABLES = ('MLPERF_RN50_', 'MXNET_', 'HOROVOD_', 'NCCL_', 'CUDA_', 'NVIDIA_', 'DALI_', 'OMP_', 'KMP_', 'OMPI_MCA_',
              'UCX_', 'LD_PRELOAD', 'TF32')
_SECRETS = ('SECRET', 'TOKEN', 'PASSWORD', 'KEY', 'CREDENTIAL')


def told(ask: Callable[[], Any]) -> Any:
    """What a question finds, or in a few words why it finds nothing: a page says both."""
    try:
        return ask()
    except Exception as e:  # what is asked here must not keep a page from being made
        return f'not found: {type(e).__name__}: {" ".join(str(e).split())[:150]}'


def relevant_variables(environment: dict[str, str]) -> dict[str, str]:
    """The variables that decide how the program runs, without what opens something."""
    return {k: v for k, v in sorted(environment.items())
            if k.startswith(_VARIABLES) and not any(s in k for s in _SECRETS)}


def _mxnet() -> dict[str, Any]:
    import mxnet as mx

    from mlperf_rn50.model.fused import has_norm_add_relu, has_norm_relu
    has = mx.runtime.Features()
    joined = {'BatchNorm with act_type': has_norm_relu(), 'BatchNormAddRelu': has_norm_add_relu()}
    return {'MXNet': mx.__version__, 'MXNet has': ', '.join(f for f in ('CUDA', 'CUDNN', 'NCCL', 'TENSORRT', 'MKLDNN')
                                                           if f in has and has.is_enabled(f)),
            'joined operators': ', '.join(name for name, is_there in joined.items() if is_there) or 'none',
            'GPUs that MXNet sees': mx.context.num_gpus()}


def _horovod() -> str:
    import horovod
    import horovod.mxnet as hvd
    built = {'MPI': hvd.mpi_built(), 'Gloo': hvd.gloo_built(), 'NCCL': hvd.nccl_built()}
    return f'{horovod.__version__} with {", ".join(k for k, v in built.items() if v)}'


def _versions() -> dict[str, Any]:
    from importlib import import_module
    return {name: told(lambda module=module: import_module(module).__version__)
            for name, module in (('DALI', 'nvidia.dali'), ('NumPy', 'numpy'))}


def _libraries() -> dict[str, str]:
    """The CUDA libraries that the loader finds, of any version that an MXNet is for."""
    from mlperf_rn50.system.gpu_stack import cuda_libraries
    return {n: v for major in (11, 12) for n, v in cuda_libraries(major).items() if v is not None}


def _visible() -> list[str]:
    """What CUDA counts from 0: cards, or instances of one that is divided (MIG); not their serial numbers."""
    from mlperf_rn50.system.gpus import find_visible_gpus
    return [f'{g.name}, compute capability {g.compute_cap}, {g.memory_bytes} bytes'
            + (f', MIG instance {g.instance}' if g.instance else '') for g in find_visible_gpus()]


def find_machine(is_dry: bool) -> dict[str, Any]:
    """Card, driver, versions and environment, without the name of the host or of who is logged in."""
    from mlperf_rn50.system.hardware import find_hardware, query_gpus
    from mlperf_rn50.system.stack import git_commit, package_versions
    mxnet = told(_mxnet)
    hardware = told(find_hardware)
    cpu = hardware.get('cpu', {}).get('model') if isinstance(hardware, dict) else hardware
    return {'dry_run': is_dry, 'gpus': told(lambda: query_gpus(*_GPU_KEYS) or query_gpus('name', 'driver_version')),
            'visible': told(_visible),
            'versions': {**(mxnet if isinstance(mxnet, dict) else {'MXNet': mxnet}), 'Horovod': told(_horovod),
                         **_versions(), 'Python': sys.version.split()[0], 'packages': told(package_versions)},
            'CUDA libraries': told(_libraries), 'cpu': cpu, 'cpu_cores': len(os.sched_getaffinity(0)),
            'memory_bytes': told(lambda: hardware['memory_bytes']), 'os': platform.platform(),
            'variables': relevant_variables(dict(os.environ)), 'program': told(git_commit)}


if __name__ == '__main__':
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    found = find_machine(os.environ.get('MLPERF_RN50_TEST_GPU') == 'dry')
    Path(sys.argv[1], 'machine.jsonl').write_text(json.dumps({'kind': 'machine', **found}, default=str) + '\n')
