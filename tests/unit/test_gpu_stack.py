"""Checks of GPUs with made-up facts: MXNet builds, cards, drivers, libraries, environment and trial
batches."""

from dataclasses import replace

import pytest
from helpers import json_table
from rank_facts import assert_reads, rank_facts

from mlperf_rn50.doctor.gpu_stack import (
    check_environment,
    check_gpus,
    check_libraries,
    check_trial,
    environment_facts,
    mxnet_facts,
    one_line,
)
from mlperf_rn50.doctor.result import Trial
from mlperf_rn50.system.gpu_env import DEVICE_VARIABLE, SETTINGS, missing_settings, settings_of
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
V100, A100, H100 = 'Tesla V100 7.0', 'NVIDIA A100 8.0', 'NVIDIA H100 9.0'


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


BUILDS = {'wheels': WHEELS, 'container': CONTAINER, 'custom': CUSTOM, 'cpu': CPU}
# MXNet build, card with its compute capability, driver, libcuda, and the result.
CARDS = """
wheels | Tesla V100 7.0 | 525.60.13 | 12000 | ok: 1 x Tesla V100; ...; MXNet from mxnet-cu117
wheels | Tesla V100 7.0 | 470.82.01 | 12020 | ok: ...driver 470.82.01
container | Tesla V100 7.0 | 470.82.01 | 12040 | ok: ...; MXNet from NVIDIA's container 24.06
container | RTX 4090 8.9 | 545.23.08 | 12030 | ok: ...4090
custom | NVIDIA H100 9.0 | 535.129.03 | 12020 | ok: ...MXNet from a custom build
wheels | Tesla V100 7.0 | 470.82.01 | 11040 | failed: ... DALI (CUDA 12) needs 525 or ... driver
wheels | Tesla V100 7.0 | 520.61 |  | failed: ...DALI (CUDA 12) needs 525 or newer; ... newer
wheels | Tesla V100 7.0 | 418.40 | 10010 | failed: ...MXNet (CUDA 11) needs 450 or newer, DALI
wheels | K40 3.5 | 535.129.03 | 12020 | failed: ...have code only up to 8.6 ... build MXNet
wheels | NVIDIA H100 9.0 | 545.23.08 | 12030 | failed: ...compute capability 9.0; ... VARIANT=ngc
wheels | B200 10.0 | 545.23.08 | 12030 | failed: ...neither the published ... build MXNet
container | Tesla V100 7.0 | 470.82.01 | 11040 | failed: ... it is for CUDA 11 ... cuda/compat/lib
container | NVIDIA A100 8.0 | 525.60.13 | 12000 | failed: ...545 or ... also 470.57 ... newer
container | RTX 4090 8.9 | 535.129.03 | 12020 | failed: ...needs 545 or newer ... newer driver
container | Tesla M60 5.2 | 545.23.08 | 12030 | failed: ...code only from 6.0 on ... VARIANT=cu117
custom | NVIDIA A100 8.0 | 470.82.01 | 11040 | failed: ...MXNet (CUDA 12) needs 525 or newer, DALI
cpu | NVIDIA A100 8.0 | 535.129.03 | 12020 | failed: MXNet on h1 is a CPU build ... VARIANT=ngc
"""


@pytest.mark.parametrize('case', CARDS.strip().splitlines())
def test_cards_and_drivers(case):
    mxnet, card, driver, libcuda, expected = case.split(' | ')
    check = check_gpus([row(BUILDS[mxnet], [gpu(card, driver)], libcuda=libcuda)], 'gpu')
    assert_reads(check, expected)


@pytest.mark.parametrize(
    'num_open, uuids, hosts, is_warned',
    json_table("""
1 | "ab" | ["h1", "h1"] | true
8 | "ab" | ["h1", "h1"] | false  # with CUDA_VISIBLE_DEVICES
1 | "ab" | ["h1", "h2"] | false
1 | "aa" | ["h1", "h1"] | false
"""),
)
def test_ranks_that_cannot_open_the_other_gpus_do_not_use_nvlink(num_open, uuids, hosts, is_warned):
    ranks = zip(uuids, hosts)
    rows = [row(gpus=[gpu(A100, uuid=u)], host=h, num_open_gpus=num_open) for u, h in ranks]
    warning = 'warning: NVLink is not used on h1, because each rank'
    assert_reads(check_gpus(rows, 'gpu'), warning if is_warned else 'ok: ')


def test_ranks_on_instances_of_one_card_need_no_nvlink():
    cards = [replace(gpu(A100, uuid=f'MIG-{k}'), bus_id='0000:3b:00.0') for k in 'ab']
    rows = [row(gpus=[card], num_open_gpus=1) for card in cards]
    assert check_gpus(rows, 'gpu').status == 'ok'


FIRST, SECOND, THIRD = gpu(V100), gpu(H100, uuid='GPU-b'), gpu(V100, uuid='GPU-c')
TWO = [FIRST, SECOND]


@pytest.mark.parametrize(
    'gathered, expected',
    [
        ([row(gpus=TWO)], 'ok: 1 x Tesla V100'),  # no rank uses the H100
        ([row(gpus=TWO), row(gpus=TWO, device=1, host='h2')], 'failed: NVIDIA H100 on h2'),
        ([row(gpus=TWO, device=None)], 'failed: NVIDIA H100 on h1'),
        (
            [row(gpus=[FIRST] * 2), row(gpus=[FIRST]), row(gpus=[THIRD], host='h2')],
            'ok: 2 x Tesla',
        ),
        ([row(gpus=[FIRST, THIRD], device=d) for d in (0, 1)], 'ok: 2 x Tesla'),
        ([row()], 'failed: the driver on h1 lists no GPU'),
        ([row(visible='')], 'failed: no GPU is visible on h1 (CUDA_VISIBLE_DEVICES=)'),
        ([row(gpus=[FIRST], device=None, device_problem='no room')], 'failed: no room'),
    ],
)
def test_check_covers_the_gpus_in_use(gathered, expected):
    assert_reads(check_gpus(gathered, 'gpu'), expected)
    assert check_gpus(gathered, 'cpu').status == 'not needed'


@pytest.mark.parametrize(
    'mxnet, libraries, expected',
    [
        (WHEELS, {'a': '1', 'b': ''}, 'ok: a 1, b'),
        (CONTAINER, {'libcudnn.so.9': None}, 'failed: ...h2 for CUDA 12: libcudnn.so.9; '),
        (
            WHEELS,
            {'libcuda.so.1': None, 'libcuda.so': None},
            'failed: ...h2 for CUDA 11: libcuda.so.1; ',
        ),
        # a name that only cuDNN opens
        (
            WHEELS,
            {'libcuda.so.1': '12020', 'libcuda.so': None},
            'warning: libcuda.so not found on h2, so cuDNN cannot',
        ),
    ],
)
def test_missing_libraries_are_named(mxnet, libraries, expected):
    rows = [row(mxnet, host='h2', cuda_libraries=libraries), row()]
    assert_reads(check_libraries(rows, 'gpu'), expected)


REFUSED = """Traceback (most recent call last):
  File "../src/operator/nn/cudnn/cudnn_batch_norm-inl.h", line 205
operator() of a norm
MXNetError: Check failed: e == CUDNN_STATUS_SUCCESS (9 vs. 0) : cuDNN: CUDNN_STATUS_NOT_SUPPORTED
Stack trace:
  [bt] (0) /lib/libmxnet.so(+0x1) [0x7f]"""


@pytest.mark.parametrize(
    'error, line',
    [
        (REFUSED, REFUSED.splitlines()[3]),
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
    'error, fix',
    [
        (REFUSED, 'cuDNN has no kernel for these sizes'),
        ('cudaMalloc retry failed: out of memory', 'lower train.local_batch_size'),
        ('driver version is insufficient for CUDA runtime version', 'install a newer NVIDIA'),
        ('Check failed: something else', 'model.layout NCHW, float32 and a smaller batch'),
        ('DALI: nvJPEG error 5', 'set data.decoder to cpu; if DALI still'),
    ],
)
def test_refused_kernel_is_reported_with_advice(error, fix):
    failed = one_line(error)
    rows = [row(trial=trial()), row(host='h2', trial=trial(failed, what='x'))]
    assert_reads(check_trial(rows), f'failed: x on h2: {failed}; ...{fix}')


def test_successful_trial_batches():
    warned = row(trial=trial(warnings=['model.layout: NHWC']))
    for second, expected in (
        (row(trial=trial(seconds=4.4)), 'ok: ...in at most 4 s; afterwards, up to 5.0 GB'),
        (row(), 'not needed: '),
        (warned, 'warning: model.layout: NHWC'),
    ):
        assert_reads(check_trial([row(trial=trial()), second]), expected)


CYCLE = 'HOROVOD_CYCLE_TIME'


def check_of(*envs, nvidias=()):
    """Return the check of ranks with these environments, and of further ones of NVIDIA's build."""
    facts = [environment_facts(e, False) for e in envs]
    facts += [environment_facts(e, True) for e in nvidias]
    check = check_environment(
        [rank_facts(i, f'h{i}', gpu_environment=f) for i, f in enumerate(facts)]
    )
    return check.status, check.found, check.fix


def test_doctor_lists_settings_and_warns_of_missing_and_differing_ones():
    env = {DEVICE_VARIABLE: 'gpu', CYCLE: '0.5'}
    status, found, _ = check_of({**env, **missing_settings(env)})
    assert status == 'ok' and found.endswith(f'; set by the user: {CYCLE}=0.5')
    assert found.startswith('set by the program: CUDA_DEVICE_ORDER=PCI_BUS_ID, MXNET_EXEC_BULK')
    assert check_of(SETTINGS, {k: v for k, v in SETTINGS.items() if k != CYCLE}) == (
        'warning',
        f'not set on h1: {CYCLE}',
        f'export {CYCLE}=0.1, or NVIDIA_MXNET_VERSION',
    )
    unlike = check_of(SETTINGS, {**SETTINGS, CYCLE: '5'})
    assert unlike[:2] == ('warning', f'{CYCLE}=5 on h1, but 0.1 on h0')
    # h1: a rank started by hand
    status, found, fix = check_of(nvidias=[settings_of(True), SETTINGS])
    assert status == 'warning' and found.startswith('not set on h1: MXNET_ENABLE_CUDA_GRAPHS, ')
    assert fix.endswith('=1 MXNET_CUDNN_WARN_ON_IGNORED_FLAGS=0, or NVIDIA_MXNET_VERSION')
    # another build
    assert check_of(SETTINGS, nvidias=[settings_of(True)])[0] == 'ok'
