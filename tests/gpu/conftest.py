"""What the tests on GPUs share: the device, and the figures for the junit report.

MLPERF_RN50_TEST_GPU=run is set by launch/test.sh --gpu; with dry the same tests run on the CPU, for those who change
them: what a CPU can do, with less of it.
"""
import os
from pathlib import Path
from typing import Any

import pytest
from helpers import return_memory

IS_DRY = os.environ.get('MLPERF_RN50_TEST_GPU') == 'dry'
# What follows compares float32 with the CPU's: without it tensor cores of Ampere and later round it to 11 bits.
os.environ.setdefault('NVIDIA_TF32_OVERRIDE', '0')


@pytest.fixture(scope='session')
def device_id() -> int | None:
    """The GPU of tests that need one; None in a dry run."""
    return None if IS_DRY else 0


@pytest.fixture(autouse=True)
def computable(request):
    """In a dry run leave out what no CPU computes: NHWC, float16 and nvJPEG."""
    values = getattr(request.node, 'callspec', None)
    if values and {'NHWC', 'float16', 'mixed'} & set(values.params.values()):
        only_on_a_gpu('a CPU has no kernel for it')


@pytest.fixture(autouse=True)
def returned_test_memory():
    """Return freed memory after each test: these compare whole networks."""
    yield
    return_memory()


@pytest.fixture(scope='session')
def context(device_id):
    """The MXNet context of the same."""
    from mlperf_rn50.data.batches import device_context
    return device_context(device_id)


@pytest.fixture(scope='session')
def num_gpus() -> int:
    """GPUs that ranks of this machine can have, one each; 2 ranks in a dry run."""
    import mxnet as mx
    return 2 if IS_DRY else mx.context.num_gpus()


@pytest.fixture(params=[1, 2])
def ranks_per_device(request) -> int:
    return request.param


@pytest.fixture
def num_ranks(num_gpus, ranks_per_device) -> int:
    """Ranks of a test of several, as many on each GPU; 2 in a dry run."""
    num = 2 if IS_DRY else num_gpus * ranks_per_device
    if num < 2:
        pytest.skip('one rank has no others')
    return num


@pytest.fixture
def figure(record_property):
    """Put a measured value into the junit report: figure(name, value, unit='')."""
    def record(name: str, value: Any, unit: str = '') -> None:
        record_property(name, f'{value} {unit}'.rstrip())
    return record


@pytest.fixture
def check_distances(figure):
    """Put distances from the CPU, by name, into the report, and assert that none is beyond its tolerance."""
    def check(what: str, found: dict[str, float], tolerance: float | dict[str, float]) -> None:
        for_all = isinstance(tolerance, float)
        for kind, value in ({'largest': max(found.values())} if for_all else found).items():
            figure(f'{what}: {kind} distance from the CPU', value, '|difference| / |value|')
        too_far = {n: d for n, d in found.items() if not d <= (tolerance if for_all else tolerance[n])}  # also NaN
        assert too_far == {}
    return check


@pytest.fixture(scope='session')
def device_options(device_id) -> list[str]:
    """Options of train and bench for the device, in the recipe's precision and layout; float32 NCHW in a dry run."""
    if device_id is None:
        return ['--train.device=cpu', '--train.precision=float32', '--model.layout=NCHW']
    return ['--train.device=gpu', '--train.precision=float16', '--model.layout=NHWC', '--model.fused_bn_relu=null',
            '--data.pad_to_4_channels=true']


@pytest.fixture(scope='session')
def pictures(tmp_path_factory) -> Path:
    """A folder with prepared photographs, as far as they can be made up."""
    from gpu.pictures import pack_pictures
    return pack_pictures(tmp_path_factory.mktemp('pictures'), 16 if IS_DRY else 512)


def only_on_a_gpu(reason: str) -> None:
    """Leaves a test out of a dry run."""
    if IS_DRY:
        pytest.skip(f'dry run: {reason}')
