"""What the tests on GPUs share: the device, and where figures and outcomes go, which page.py makes a page of.

MLPERF_RN50_TEST_GPU=run is set by launch/test.sh --gpu; with dry the same tests run on the CPU, for those who change
them: whatever a CPU can do, with less of it. MLPERF_RN50_GPU_RESULT is the folder of the result.
"""
import json
import os
from pathlib import Path
from typing import Any

import pytest

IS_DRY = os.environ.get('MLPERF_RN50_TEST_GPU') == 'dry'
# What follows compares float32 with the CPU's: without it tensor cores of Ampere and later round it to 11 bits.
os.environ.setdefault('NVIDIA_TF32_OVERRIDE', '0')


def append(path: Path | None, record: dict[str, Any]) -> None:
    """Adds a record to a file of the result, which is there whatever happens next."""
    if path:
        with open(path, 'a', encoding='utf-8') as f:
            f.write(json.dumps(record, default=str) + '\n')


def _result_file(name: str) -> Path | None:
    folder = os.environ.get('MLPERF_RN50_GPU_RESULT')
    return Path(folder, name) if folder else None


def pytest_collection_finish(session):
    names = [i.nodeid.rpartition('tests/gpu/')[2] for i in session.items if 'tests/gpu/' in i.nodeid]
    append(_result_file('outcomes.jsonl'), {'kind': 'tests', 'names': names})


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    name = item.nodeid.rpartition('tests/gpu/')[2]
    if report.when != 'call' and report.outcome == 'passed':
        return
    why = ''
    if report.outcome == 'skipped':
        why = str(report.longrepr[2]).removeprefix('Skipped: ')
    elif report.outcome == 'failed':
        why = ' '.join(str(call.excinfo.value).split())[:300] if call.excinfo else ''
    append(_result_file('outcomes.jsonl'), {
        'kind': 'test', 'name': name, 'outcome': {'skipped': 'not run'}.get(report.outcome, report.outcome),
        'reason': why, 'seconds': round(report.duration, 1)})


@pytest.fixture(scope='session')
def device_id() -> int | None:
    """The GPU of tests that need one; None in a dry run."""
    return None if IS_DRY else 0


@pytest.fixture(scope='session', autouse=True)
def layers():
    """In a dry run layers that compute in NHWC and float16 on the CPU."""
    if not IS_DRY:
        yield
        return
    from gpu.stand_in import stand_ins
    with stand_ins():
        yield


@pytest.fixture(scope='session')
def context(device_id):
    """The MXNet context of the same."""
    from mlperf_rn50.data.pipeline import device_context
    return device_context(device_id)


@pytest.fixture(scope='session')
def num_gpus() -> int:
    """GPUs that ranks of this machine can have, one each; 2 ranks in a dry run."""
    import mxnet as mx
    return 2 if IS_DRY else mx.context.num_gpus()


@pytest.fixture
def figure(request):
    """Takes down a figure for the page: figure(name, value, unit, low=…, high=…, expects='published', source=…)."""
    path, name_of_test = _result_file('figures.jsonl'), request.node.nodeid.rpartition('tests/gpu/')[2]

    def take(name: str, value: Any, unit: str = '', **held_against: Any) -> None:
        append(path, {'kind': 'figure', 'test': name_of_test, 'name': name, 'value': value, 'unit': unit,
                      **held_against})
    return take


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
