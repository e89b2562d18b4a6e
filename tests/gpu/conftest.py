"""Shared fixtures of the GPU tests: the device, and figures for results.jsonl.

launch/test.sh --gpu sets MLPERF_RN50_TEST_GPU=run. With MLPERF_RN50_TEST_GPU=dry smaller tests run
on the CPU, except tests that a CPU cannot run, so that changes to the tests can be tried without a
GPU.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from helpers import return_memory

from mlperf_rn50.system.gpu_env import DEVICE_VARIABLE, missing_settings

IS_DRY = os.environ.get('MLPERF_RN50_TEST_GPU') == 'dry'
if not IS_DRY:  # as every command does before it imports MXNet
    os.environ.update(missing_settings({**os.environ, DEVICE_VARIABLE: 'gpu'}))
# Without this, tensor cores of Ampere and later round float32 to 11 bits, which does not match the
# CPU.
os.environ.setdefault('NVIDIA_TF32_OVERRIDE', '0')


def pytest_runtest_logreport(report):
    """Append the result of each test to results.jsonl when it ends, because the part may be stopped
    later."""
    if (folder := os.environ.get('MLPERF_RN50_GPU_RESULT')) and (
        report.when == 'call' or not report.passed
    ):
        result = {
            'test': report.nodeid,
            'status': report.outcome,
            'seconds': round(report.duration, 1),
            'reason': report.longreprtext[-2000:],
            'figures': dict(report.user_properties),
        }
        with open(Path(folder, 'results.jsonl'), 'a') as file:
            file.write(json.dumps(result) + '\n')


@pytest.fixture(scope='session')
def device_id() -> int | None:
    """GPU index; None in a dry run."""
    return None if IS_DRY else 0


@pytest.fixture(autouse=True)
def computable(request):
    """In a dry run, skip what a CPU cannot compute: NHWC, float16 and nvJPEG."""
    values = getattr(request.node, 'callspec', None)
    if values and {'NHWC', 'float16', 'mixed'} & set(values.params.values()):
        only_on_a_gpu('there is no CPU kernel')


@pytest.fixture(autouse=True)
def returned_test_memory():
    """Return freed memory after each test, because the tests compare whole networks."""
    yield
    return_memory()


@pytest.fixture(scope='session')
def context(device_id):
    """MXNet context of the device."""
    from mlperf_rn50.data.batches import device_context

    return device_context(device_id)


@pytest.fixture(scope='session')
def num_gpus() -> int:
    """Number of GPUs of this machine; 2 in a dry run."""
    import mxnet as mx

    return 2 if IS_DRY else mx.context.num_gpus()


@pytest.fixture(params=[1, 2])
def ranks_per_device(request) -> int:
    return request.param


@pytest.fixture
def num_ranks(num_gpus, ranks_per_device) -> int:
    """Number of ranks, at least 2, equally many on each GPU; 2 in a dry run."""
    num = 2 if IS_DRY else num_gpus * ranks_per_device
    if num < 2:
        pytest.skip('needs two ranks')
    return num


@pytest.fixture
def figure(record_property):
    """Function that adds a measured value to the result of the test."""

    def record(name: str, value: Any, unit: str = '') -> None:
        record_property(name, f'{value} {unit}'.rstrip())

    return record


@pytest.fixture
def check_distances(figure):
    """Function that adds distances from the CPU, by name, to the report and asserts that all are
    within tolerance."""

    def check(what: str, distances: dict[str, float], tolerance: float | dict[str, float]) -> None:
        is_common = isinstance(tolerance, float)
        for kind, value in (
            {'largest': max(distances.values())} if is_common else distances
        ).items():
            figure(f'{what}: {kind} distance from the CPU', value, '|difference| / |value|')
        limits = dict.fromkeys(distances, tolerance) if is_common else tolerance
        # also fails for NaN
        assert {n: d for n, d in distances.items() if not d <= limits[n]} == {}

    return check


@pytest.fixture(scope='session')
def device_options(device_id) -> list[str]:
    """Options of train and bench for the device, in float16; float32 in a dry run."""
    if device_id is None:
        return ['--train.device=cpu', '--train.precision=float32']
    return [
        '--train.device=gpu',
        '--train.precision=float16',
        '--model.fused_bn_relu=null',
        '--data.pad_to_4_channels=true',
    ]


@pytest.fixture(scope='session')
def pictures(tmp_path_factory) -> Path:
    """Prepared data set of synthetic photographs."""
    from gpu.pictures import pack_pictures

    return pack_pictures(tmp_path_factory.mktemp('pictures'), 16 if IS_DRY else 512)


def only_on_a_gpu(reason: str) -> None:
    """Skip the test in a dry run."""
    if IS_DRY:
        pytest.skip(f'dry run: {reason}')
