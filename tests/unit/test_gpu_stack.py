"""Checks of GPUs with made-up facts: MXNet builds, cards, drivers, libraries and trial
batches."""

import pytest
from rank_facts import rank_facts

from mlperf_rn50.doctor.gpu_stack import (
    check_gpus,
    check_libraries,
    check_trial,
    cuda_libraries,
    mxnet_facts,
    one_line,
)
from mlperf_rn50.doctor.result import Trial
from mlperf_rn50.system.gpus import Gpu

MAPS = """7f1-7f2 r-xp 00000000 08:01 1 /usr/lib/libcuda.so.535.129.03
7f3-7f4 r-xp 00000000 08:01 2 /usr/local/cuda/lib64/libcudart.so.{cudart}
7f5-7f6 r--p 00000000 08:01 2 /usr/local/cuda/lib64/libcudart.so.{cudart}
7f7-7f8 r-xp 00000000 08:01 3 /usr/lib/libcudnn.so.{cudnn}
7f9-7fa r-xp 00000000 08:01 4 /usr/lib/libcudnn_ops_infer.so.8
"""
PLAIN = {'mxnet': '1.9.1'}
CUDA11, CUDA12 = MAPS.format(cudart='11.8.89', cudnn='8'), MAPS.format(cudart='12.4', cudnn='9.1.0')
WHEELS = mxnet_facts({'mxnet-cu117': '1.9.1'}, {}, CUDA11, True, False)
CONTAINER = mxnet_facts(PLAIN, {'NVIDIA_MXNET_VERSION': '24.06'}, CUDA12, True, True)
CPU = mxnet_facts(PLAIN, {}, '', False, False)
CUSTOM = mxnet_facts(PLAIN, {}, CUDA12, True, False)
V100, A100, H100 = 'Tesla V100-SXM2-16GB 7.0', 'NVIDIA A100-SXM4-40GB 8.0', 'NVIDIA H100 9.0'
RTX4090 = 'NVIDIA GeForce RTX 4090 8.9'


def gpu(card, driver='535.129.03', uuid='GPU-a'):
    name, _, capability = card.rpartition(' ')
    return Gpu(uuid, name, '', capability, driver, None)


def row(mxnet=WHEELS, gpus=(), host='h1', device=0, libcuda='12020', **changes):
    facts = {
        'packages': {'nvidia-dali-cuda120': '2.4.0'},
        'cuda_libraries': {'libcuda.so.1': libcuda},
        **changes,
    }
    return rank_facts(0, host, mxnet=mxnet, gpus=list(gpus), device=device, **facts)


def test_kind_of_mxnet_build():
    # In the last case, ssh starts a rank without the variables of the container.
    builds = [CPU, WHEELS, CONTAINER, CUSTOM, mxnet_facts(PLAIN, {}, '', True, True)]
    assert [(m.kind, m.release, m.cuda_major) for m in builds] == [
        ('cpu', '', 11),
        ('wheels', 'mxnet-cu117', 11),
        ('container', '24.06', 12),
        ('other', '', 12),
        ('container', '', 12),
    ]
    assert WHEELS.libraries == {'libcudart': '11.8.89', 'libcudnn': '8'}


@pytest.mark.parametrize(
    'mxnet, card, driver, libcuda, found',
    [
        (
            WHEELS,
            V100,
            '525.60.13',
            '12000',
            '1 x Tesla V100-SXM2-16GB; driver 525.60.13; MXNet from mxnet-cu117',
        ),
        # with CUDA's compatibility package
        (WHEELS, V100, '470.82.01', '12020', 'driver 470.82.01'),
        (
            CONTAINER,
            V100,
            '470.82.01',
            '12040',
            "driver 470.82.01; MXNet from NVIDIA's container 24.06",
        ),
        (CONTAINER, RTX4090, '545.23.08', '12030', '4090'),
        (CUSTOM, H100, '535.129.03', '12020', 'MXNet from a custom build'),
    ],
)
def test_suitable_cards_and_drivers(mxnet, card, driver, libcuda, found):
    check = check_gpus([row(mxnet, [gpu(card, driver)], libcuda=libcuda)], 'gpu')
    assert check.status == 'ok' and found in check.found, check


@pytest.mark.parametrize(
    'mxnet, card, driver, libcuda, found, fix',
    [
        (
            WHEELS,
            V100,
            '470.82.01',
            '11040',
            'driver 470.82.01 on h1; DALI (CUDA 12) needs 525 or newer',
            'driver',
        ),
        (
            WHEELS,
            V100,
            '520.61',
            '',
            'driver 520.61 on h1; DALI (CUDA 12) needs 525 or newer',
            'newer driver',
        ),
        (
            WHEELS,
            'K40 3.5',
            '535.129.03',
            '12020',
            'have code only up to 8.6',
            'build MXNet for this card',
        ),
        (
            WHEELS,
            V100,
            '418.40',
            '10010',
            'h1; MXNet (CUDA 11) needs 450 or newer, DALI (CUDA 12) needs 525 or newer',
            'newer driver',
        ),
        (
            WHEELS,
            H100,
            '545.23.08',
            '12030',
            'has compute capability 9.0; the published mxnet-cu wheels',
            "NVIDIA's container: docker build --build-arg VARIANT=ngc",
        ),
        (
            WHEELS,
            'B200 10.0',
            '545.23.08',
            '12030',
            'neither the published wheels nor',
            'build MXNet for this card',
        ),
        (
            CONTAINER,
            V100,
            '470.82.01',
            '11040',
            'it is for CUDA 11, and the compatibility package',
            'cuda/compat/lib',
        ),
        (
            CONTAINER,
            A100,
            '525.60.13',
            '12000',
            'needs 545 or newer; on data centre cards also 470.57, 525.85, 535.86 or later',
            'newer driver',
        ),
        (CONTAINER, RTX4090, '535.129.03', '12020', 'needs 545 or newer', 'newer driver'),
        (
            CONTAINER,
            'Tesla M60 5.2',
            '545.23.08',
            '12030',
            'container has code only from 6.0 on',
            'MLPERF_RN50_VARIANT=cu117',
        ),
        (
            CUSTOM,
            A100,
            '470.82.01',
            '11040',
            'MXNet (CUDA 12) needs 525 or newer, DALI (CUDA 12) needs 525',
            '',
        ),
        (CPU, A100, '535.129.03', '12020', 'MXNet on h1 is a CPU build', 'MLPERF_RN50_VARIANT=ngc'),
    ],
)
def test_unsuitable_cards_and_drivers(mxnet, card, driver, libcuda, found, fix):
    check = check_gpus([row(mxnet, [gpu(card, driver)], libcuda=libcuda)], 'gpu')
    assert (check.status, found in check.found, fix in check.fix) == ('failed', True, True), check


def test_driver_without_dali_needs_only_mxnets_minimum():
    old = row(gpus=[gpu(V100, '470.82.01')], libcuda='11040', packages={})
    assert check_gpus([old], 'gpu').status == 'ok'


@pytest.mark.parametrize(
    'num_open, uuids, hosts, is_warned',
    [
        (1, 'ab', ['h1', 'h1'], True),
        (8, 'ab', ['h1', 'h1'], False),  # with CUDA_VISIBLE_DEVICES
        (1, 'ab', ['h1', 'h2'], False),
        (1, 'aa', ['h1', 'h1'], False),
    ],
)
def test_ranks_that_cannot_open_the_other_gpus_do_not_use_nvlink(num_open, uuids, hosts, is_warned):
    check = check_gpus(
        [
            row(gpus=[gpu(A100, uuid=u)], host=h, num_open_gpus=num_open)
            for u, h in zip(uuids, hosts)
        ],
        'gpu',
    )
    assert check.status == ('warning' if is_warned else 'ok')
    assert ('NVLink is not used on h1, because each rank' in check.found) == is_warned


FIRST, SECOND, THIRD = gpu(V100), gpu(H100, uuid='GPU-b'), gpu(V100, uuid='GPU-c')
TWO = [FIRST, SECOND]


@pytest.mark.parametrize(
    'gathered, status, found',
    [
        ([row(gpus=TWO)], 'ok', '1 x Tesla V100'),  # no rank uses the H100
        ([row(gpus=TWO), row(gpus=TWO, device=1, host='h2')], 'failed', 'NVIDIA H100 on h2'),
        ([row(gpus=TWO, device=None)], 'failed', 'NVIDIA H100 on h1'),
        (
            [row(gpus=[FIRST] * 2), row(gpus=[FIRST]), row(gpus=[THIRD], host='h2')],
            'ok',
            '2 x Tesla',
        ),
        ([row(gpus=[FIRST, THIRD], device=d) for d in (0, 1)], 'ok', '2 x Tesla'),
        ([row()], 'failed', 'the driver on h1 lists no GPU'),
        ([row(visible='')], 'failed', 'no GPU is visible on h1 (CUDA_VISIBLE_DEVICES=)'),
        ([row(gpus=[FIRST], device=None, device_problem='no room')], 'failed', 'no room'),
    ],
)
def test_check_covers_the_gpus_in_use(gathered, status, found):
    check = check_gpus(gathered, 'gpu')
    assert (check.status, check.found.startswith(found)) == (status, True), check
    assert check_gpus(gathered, 'cpu').status == 'not needed'


def test_libraries_match_the_cuda_version():
    names = {major: cuda_libraries(major) for major in (11, 12)}
    assert 'libcudnn.so.8' in names[11] and 'libcudnn.so.9' in names[12]
    assert 'libcuda.so' in names[11] and 'libcuda.so' not in names[12]
    assert check_libraries([row(CPU)], 'gpu').status == 'not needed'
    assert check_libraries([row()], 'cpu').status == 'not needed'


@pytest.mark.parametrize(
    'mxnet, libraries, status, found',
    [
        (WHEELS, {'a': '1', 'b': ''}, 'ok', 'a 1, b'),
        (
            CONTAINER,
            {'libcudnn.so.9': None},
            'failed',
            'not found on h2 for CUDA 12: libcudnn.so.9',
        ),
        (
            WHEELS,
            {'libcuda.so.1': None, 'libcuda.so': None},
            'failed',
            'not found on h2 for CUDA 11: libcuda.so.1',
        ),
        # a name that only cuDNN opens
        (
            WHEELS,
            {'libcuda.so.1': '12020', 'libcuda.so': None},
            'warning',
            'libcuda.so not found on h2, so cuDNN cannot use engines that it compiles at run time',
        ),
    ],
)
def test_missing_libraries_are_named(mxnet, libraries, status, found):
    check = check_libraries([row(mxnet, host='h2', cuda_libraries=libraries), row()], 'gpu')
    assert (check.status, check.found) == (status, found)


REFUSED = """Traceback (most recent call last):
  File "../src/operator/nn/cudnn/cudnn_batch_norm-inl.h", line 205
operator() of a norm
MXNetError: Check failed: e == CUDNN_STATUS_SUCCESS (9 vs. 0) : cuDNN: CUDNN_STATUS_NOT_SUPPORTED
Stack trace:
  [bt] (0) /lib/libmxnet.so(+0x1) [0x7f]"""


@pytest.mark.parametrize(
    'error, line',
    [
        (
            REFUSED,
            'MXNetError: Check failed: e == CUDNN_STATUS_SUCCESS (9 vs. 0) : cuDNN: '
            'CUDNN_STATUS_NOT_SUPPORTED',
        ),
        ('\nsomething\n  odd', 'something'),
        ('', 'an error without a message'),
        ('x' * 900, 'x' * 300),
    ],
)
def test_error_is_reduced_to_one_line(error, line):
    assert one_line(error) == line


def trial(problem='', seconds=2.0, warnings=(), what='an evaluation'):
    return Trial(what, problem, list(warnings), seconds, 5 * 10**9)


@pytest.mark.parametrize(
    'what, error, fix',
    [
        ('x', REFUSED, 'cuDNN has no kernel for these sizes'),
        ('x', 'cudaMalloc retry failed: out of memory', 'lower train.local_batch_size'),
        ('x', 'driver version is insufficient for CUDA runtime version', 'install a newer NVIDIA'),
        ('x', 'Check failed: something else', 'model.layout NCHW, float32 and a smaller batch'),
        (
            'DALI with data.decoder=mixed',
            'nvJPEG error 5',
            'set data.decoder to cpu; if DALI still',
        ),
    ],
)
def test_refused_kernel_is_reported_with_advice(what, error, fix):
    failed = trial(one_line(error), what=what)
    check = check_trial([row(trial=trial()), row(host='h2', trial=failed)])
    assert check.status == 'failed' and fix in check.fix
    assert check.found == f'{what} on h2: {failed.problem}'


def test_successful_trial_batches():
    check = check_trial([row(trial=trial()), row(trial=trial(seconds=4.4))])
    assert check.status == 'ok' and 'in at most 4 s; afterwards, up to 5.0 GB' in check.found
    assert check_trial([row(), row(trial=trial())]).status == 'not needed'
    warned = check_trial([row(trial=trial()), row(trial=trial(warnings=['model.layout: NHWC']))])
    assert (warned.status, warned.found) == ('warning', 'model.layout: NHWC')
