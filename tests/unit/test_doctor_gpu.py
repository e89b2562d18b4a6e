"""Doctor checks of GPUs with made-up facts: MXNet builds, cards, drivers and trial batches."""

import sys
from contextlib import contextmanager

import mxnet as mx
import numpy as np
import pytest
from numbered import with_data

from mlperf_rn50.config import Config
from mlperf_rn50.data import pipeline
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.data.pipeline import whole_images
from mlperf_rn50.doctor import facts as doctor_facts
from mlperf_rn50.doctor import gpu_stack
from mlperf_rn50.doctor.gpu_stack import (
    check_gpus,
    check_libraries,
    check_trial,
    cuda_major,
    mxnet_facts,
    one_line,
)
from mlperf_rn50.model.options import ModelConfig
from mlperf_rn50.system.gpus import Gpu
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.options import TrainConfig

MAPS = """7f1-7f2 r-xp 00000000 08:01 1 /usr/lib/libcuda.so.535.129.03
7f3-7f4 r-xp 00000000 08:01 2 /usr/local/cuda/lib64/libcudart.so.{cudart}
7f5-7f6 r--p 00000000 08:01 2 /usr/local/cuda/lib64/libcudart.so.{cudart}
7f7-7f8 r-xp 00000000 08:01 3 /usr/lib/libcudnn.so.{cudnn}
7f9-7fa r-xp 00000000 08:01 4 /usr/lib/libcudnn_ops_infer.so.8
"""
WHEELS = mxnet_facts(
    {'mxnet-cu117': '1.9.1'}, {}, MAPS.format(cudart='11.8.89', cudnn='8'), True, False
)
CONTAINER = mxnet_facts(
    {'mxnet': '1.9.1'},
    {'NVIDIA_MXNET_VERSION': '24.06'},
    MAPS.format(cudart='12.4.127', cudnn='9.1.0'),
    True,
    True,
)
CPU = mxnet_facts({'mxnet': '1.9.1'}, {}, '', False, False)
CUSTOM = mxnet_facts(
    {'mxnet': '1.9.1'}, {}, MAPS.format(cudart='12.8.90', cudnn='9.7.1'), True, False
)
V100, A100, H100, B200, RTX4090, M60 = (
    ('Tesla V100-SXM2-16GB', '7.0'),
    ('NVIDIA A100-SXM4-40GB', '8.0'),
    ('NVIDIA H100 80GB HBM3', '9.0'),
    ('NVIDIA B200', '10.0'),
    ('NVIDIA GeForce RTX 4090', '8.9'),
    ('Tesla M60', '5.2'),
)
R470, R520, R525_OLD, R535, R545, R418 = (
    '470.82.01',
    '520.61',
    '525.60.13',
    '535.129.03',
    '545.23.08',
    '418.40',
)


def gpu(card, driver=R535, uuid='GPU-a'):
    return {'name': card[0], 'compute_cap': card[1], 'driver_version': driver, 'uuid': uuid}


def row(mxnet=WHEELS, gpus=(), host='h1', device=0, libcuda='12020', **changes):
    return {
        'host': host,
        'mxnet': mxnet,
        'gpus': list(gpus),
        'visible': None,
        'device': device,
        'device_problem': '',
        'num_open_gpus': 8,
        'packages': {'nvidia-dali-cuda120': '2.4.0'},
        'trial': None,
        'cuda_libraries': {'libcuda.so.1': libcuda},
        **changes,
    }


def test_kind_of_mxnet_build():
    # In the last case, ssh starts a rank without the variables of the container.
    builds = [CPU, WHEELS, CONTAINER, CUSTOM, mxnet_facts({'mxnet': '1.9.1'}, {}, '', True, True)]
    assert [(m['kind'], m['release'], cuda_major(m)) for m in builds] == [
        ('cpu', '', 11),
        ('wheels', 'mxnet-cu117', 11),
        ('container', '24.06', 12),
        ('other', '', 12),
        ('container', '', 12),
    ]
    assert WHEELS['libraries'] == {'libcudart': '11.8.89', 'libcudnn': '8'}


@pytest.mark.parametrize(
    'mxnet, card, driver, libcuda, status, found, fix',
    [
        (
            WHEELS,
            V100,
            R525_OLD,
            '12000',
            'ok',
            '1 x Tesla V100-SXM2-16GB; driver 525.60.13; MXNet from mxnet-cu117',
            '',
        ),
        (
            WHEELS,
            V100,
            R470,
            '11040',
            'failed',
            'driver 470.82.01 on h1; DALI (CUDA 12) needs 525 or newer',
            'driver',
        ),
        (
            WHEELS,
            V100,
            R520,
            '',
            'failed',
            'driver 520.61 on h1; DALI (CUDA 12) needs 525 or newer',
            'newer driver',
        ),
        # with CUDA's compatibility package
        (WHEELS, V100, R470, '12020', 'ok', 'driver 470.82.01', ''),
        (
            WHEELS,
            ('K40', '3.5'),
            R535,
            '12020',
            'failed',
            'have code only up to 8.6',
            'build MXNet for this card',
        ),
        (
            WHEELS,
            V100,
            R418,
            '10010',
            'failed',
            'driver 418.40 on h1; MXNet (CUDA 11) needs 450 or newer, '
            'DALI (CUDA 12) needs 525 or newer',
            'newer driver',
        ),
        (
            WHEELS,
            H100,
            R545,
            '12030',
            'failed',
            'has compute capability 9.0; the published mxnet-cu wheels have code only up to 8.6',
            "NVIDIA's container: docker build --build-arg VARIANT=ngc",
        ),
        (
            WHEELS,
            B200,
            R545,
            '12030',
            'failed',
            'neither the published wheels nor',
            'build MXNet for this card',
        ),
        (
            CONTAINER,
            V100,
            R470,
            '12040',
            'ok',
            "driver 470.82.01; MXNet from NVIDIA's container 24.06",
            '',
        ),
        (
            CONTAINER,
            V100,
            R470,
            '11040',
            'failed',
            'it is for CUDA 11, and the compatibility package',
            'cuda/compat/lib',
        ),
        (
            CONTAINER,
            A100,
            R525_OLD,
            '12000',
            'failed',
            'needs 545 or newer; on data centre cards also 470.57, 525.85, 535.86 or later',
            'newer driver',
        ),
        (CONTAINER, RTX4090, R535, '12020', 'failed', 'needs 545 or newer', 'newer driver'),
        (CONTAINER, RTX4090, R545, '12030', 'ok', '4090', ''),
        (
            CONTAINER,
            M60,
            R545,
            '12030',
            'failed',
            'container has code only from 6.0 on',
            'MLPERF_RN50_VARIANT=cu117',
        ),
        (CUSTOM, H100, R535, '12020', 'ok', 'MXNet from a custom build', ''),
        (
            CUSTOM,
            A100,
            R470,
            '11040',
            'failed',
            'MXNet (CUDA 12) needs 525 or newer, DALI (CUDA 12) needs 525',
            '',
        ),
        (
            CPU,
            A100,
            R535,
            '12020',
            'failed',
            'MXNet on h1 is a CPU build',
            'MLPERF_RN50_VARIANT=ngc',
        ),
    ],
)
def test_cards_and_drivers(mxnet, card, driver, libcuda, status, found, fix):
    check = check_gpus([row(mxnet, [gpu(card, driver)], libcuda=libcuda)], 'gpu')
    assert (check.status, found in check.found, fix in check.fix) == (status, True, True), check


@pytest.mark.parametrize(
    'num_open, uuids, hosts, is_warned',
    [
        # the latter with CUDA_VISIBLE_DEVICES
        (1, 'ab', ['h1', 'h1'], True),
        (8, 'ab', ['h1', 'h1'], False),
        (1, 'ab', ['h1', 'h2'], False),
        (1, 'aa', ['h1', 'h1'], False),
        (1, 'a', ['h1'], False),
    ],
)
def test_ranks_that_cannot_open_the_other_gpus_do_not_use_nvlink(num_open, uuids, hosts, is_warned):
    gathered = [
        row(gpus=[gpu(A100, uuid=u)], host=h, num_open_gpus=num_open) for u, h in zip(uuids, hosts)
    ]
    check = check_gpus(gathered, 'gpu')
    assert (
        check.status,
        check.found.startswith('NVLink is not used on h1, because each rank'),
    ) == (('warning', True) if is_warned else ('ok', False))


def test_driver_without_dali_needs_only_mxnets_minimum():
    assert (
        check_gpus([row(gpus=[gpu(V100, R470)], libcuda='11040', packages={})], 'gpu').status
        == 'ok'
    )


TWO = [gpu(V100, uuid='GPU-a'), gpu(H100, uuid='GPU-b')]


@pytest.mark.parametrize(
    'gathered, status, found',
    [
        ([row(gpus=TWO)], 'ok', '1 x Tesla V100'),  # no rank uses the H100
        (
            [row(gpus=TWO), row(gpus=TWO, device=1, host='h2')],
            'failed',
            'NVIDIA H100 80GB HBM3 on h2',
        ),
        ([row(gpus=TWO, device=None)], 'failed', 'NVIDIA H100 80GB HBM3 on h1'),
        (
            [
                row(gpus=[TWO[0]] * 2),
                row(gpus=[TWO[0]]),
                row(gpus=[gpu(V100, uuid='GPU-c')], host='h2'),
            ],
            'ok',
            '2 x Tesla',
        ),
        (
            [row(gpus=[TWO[0], gpu(V100, uuid='GPU-d')], device=d) for d in (0, 1)],
            'ok',
            '2 x Tesla',
        ),
        ([row()], 'failed', 'the driver on h1 lists no GPU'),
        ([row(visible='')], 'failed', 'no GPU is visible on h1 (CUDA_VISIBLE_DEVICES=)'),
        (
            [row(gpus=TWO[:1], device=None, device_problem='run.ranks_per_device: got 1')],
            'failed',
            'run.ranks_per_device',
        ),
    ],
)
def test_check_covers_the_gpus_in_use(gathered, status, found):
    check = check_gpus(gathered, 'gpu')
    assert (check.status, check.found.startswith(found)) == (status, True), check
    assert check_gpus(gathered, 'cpu').status == 'not needed'


def test_libraries_match_the_cuda_version():
    assert [
        f'libcudnn.so.{n}' in gpu_stack.cuda_libraries(major) for major, n in ((11, 8), (12, 9))
    ] == [True, True]
    missing = check_libraries(
        [row(), row(CONTAINER, host='h2', cuda_libraries={'libcudnn.so.9': None})], 'gpu'
    )
    assert (missing.status, missing.found) == (
        'failed',
        'not found on h2 for CUDA 12: libcudnn.so.9',
    )
    assert check_libraries([row(cuda_libraries={'a': '1', 'b': ''})], 'gpu').found == 'a 1, b'
    assert (
        check_libraries([row(CPU)], 'gpu').status
        == check_libraries([row()], 'cpu').status
        == 'not needed'
    )


def test_library_name_that_only_cudnn_opens_is_a_warning():
    assert 'libcuda.so' in gpu_stack.cuda_libraries(
        11
    ) and 'libcuda.so' not in gpu_stack.cuda_libraries(12)
    blind = row(host='h2', cuda_libraries={'libcuda.so.1': '12020', 'libcuda.so': None})
    check = check_libraries([row(), blind], 'gpu')
    assert (check.status, check.found) == (
        'warning',
        'libcuda.so not found on h2, so cuDNN cannot use engines that it compiles at run time',
    )
    both = check_libraries([row(cuda_libraries={'libcuda.so.1': None, 'libcuda.so': None})], 'gpu')
    assert (both.status, both.found) == ('failed', 'not found on h1 for CUDA 11: libcuda.so.1')


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


def tried(problem='', seconds=2.0, warnings=()):
    return {
        'what': 'an evaluation',
        'problem': problem,
        'warnings': warnings,
        'seconds': seconds,
        'used_bytes': 5 * 10**9,
    }


@pytest.mark.parametrize(
    'error, fix',
    [
        (REFUSED, 'cuDNN has no kernel for these sizes'),
        ('cudaMalloc retry failed: out of memory', 'lower train.local_batch_size'),
        (
            'CUDA driver version is insufficient for CUDA runtime version',
            'install a newer NVIDIA driver',
        ),
        ('Check failed: something else', 'model.layout NCHW, float32 and a smaller batch'),
    ],
)
def test_refused_kernel_is_reported_with_advice(error, fix):
    check = check_trial([row(trial=tried()), row(host='h2', trial=tried(one_line(error)))])
    assert (
        check.status == 'failed'
        and check.found == f'an evaluation on h2: {one_line(error)}'
        and fix in check.fix
    )


def test_fix_for_a_decoder_is_another_decoder_or_driver():
    check = check_trial(
        [row(trial={**tried('nvJPEG error 5'), 'what': 'DALI with data.decoder=mixed'})]
    )
    assert (
        check.status == 'failed'
        and check.found == 'DALI with data.decoder=mixed on h1: nvJPEG error 5'
    )
    assert (
        check.fix == 'set data.decoder to cpu; if DALI still fails, install a newer NVIDIA driver'
    )


def test_successful_trial_batches():
    check = check_trial([row(trial=tried()), row(trial=tried(seconds=4.4))])
    assert check.status == 'ok' and 'in at most 4 s; afterwards, up to 5.0 GB' in check.found
    assert check_trial([row()]).status == 'not needed'
    warned = check_trial(
        [row(trial=tried()), row(trial=tried(warnings=['model.layout: got NHWC']))]
    )
    assert (warned.status, warned.found) == ('warning', 'model.layout: got NHWC')


NO_JPEG = np.frombuffer(b'\xff\xd8\xff\xe0 no JPEG' * 9, np.uint8)


# --- gathering of facts
# --------------------------------------------------------------------------------------


def config(**train):
    data = DataConfig(
        num_train=20, num_val=8, num_classes=3, image_size=32, resize_shorter=32, synthetic=True
    )
    return Config(
        data=data,
        model=ModelConfig(name='resnet18'),
        train=TrainConfig(local_batch_size=4, **train),
    )


def test_one_batch_of_each_kind_is_tried(monkeypatch, thin_resnets):
    seen, evaluating = [], doctor_facts.Trainer.evaluating

    @contextmanager
    def recorded(trainer):
        with evaluating(trainer) as net:
            yield lambda images: seen.append(images.shape) or net(images)

    monkeypatch.setattr(doctor_facts.Trainer, 'evaluating', recorded)
    trial = doctor_facts.try_batches(config(eval_batch_size=5), 1, 0, None)
    assert (trial['what'], trial['problem'], seen) == (
        'an evaluation',
        '',
        [(5, 3, 32, 32)],
    ) and trial['seconds'] > 0


def test_dali_decodes_a_batch_like_those_of_training(monkeypatch, thin_resnets):
    seen, run = [], pipeline.run_pipeline
    monkeypatch.setattr(pipeline, 'run_pipeline', lambda pipe: seen.append(run(pipe)) or seen[-1])
    with_files = with_data(config(), synthetic=False)
    trial = doctor_facts.try_batches(with_files, 1, 0, None)
    assert (trial['what'], trial['problem'], len(seen)) == ('DALI with data.decoder=cpu', '', 1)
    assert seen[0][0].as_tensor().shape() == [4, 3, 32, 32]
    monkeypatch.setattr(doctor_facts, 'synthetic_inputs', lambda num: whole_images([NO_JPEG] * num))
    trial = doctor_facts.try_batches(with_data(with_files, crop='none'), 1, 0, None)
    # The decoder's message, without DALI's traceback before it.
    assert (
        trial['what'] == 'DALI with data.decoder=cpu'
        and 'input pipeline failed: ' in trial['problem']
    )
    assert 'pipeline.py' not in trial['problem']


def test_error_of_a_kernel_is_one_line(monkeypatch, thin_resnets):
    def refuse(*_):
        raise mx.MXNetError(REFUSED)

    monkeypatch.setattr(doctor_facts.Trainer, 'forward', refuse)
    trial = doctor_facts.try_batches(config(), 1, 0, None)
    assert trial['what'] == 'a training pass' and trial['problem'].endswith(
        'CUDNN_STATUS_NOT_SUPPORTED'
    )
    wrong = Config(train=TrainConfig(global_batch_size=7))
    assert 'global_batch_size' in doctor_facts.try_batches(wrong, 2, 0, None)['problem']


def test_rank_with_a_gpu_tries_batches_on_it(monkeypatch):
    for name, value in (
        ('device_id_of', 0),
        ('device_context', mx.cpu()),
        ('try_batches', 'tried'),
    ):
        monkeypatch.setattr(doctor_facts, name, lambda *_, value=value: value)
    [facts] = doctor_facts.gather_facts(config(device='gpu'), False, Comm())
    assert (facts['device'], facts['device_problem'], facts['trial']) == (0, '', 'tried')


@pytest.mark.parametrize('card, trial', [('8.6', 'tried'), ('9.0', None)])
def test_nothing_is_tried_on_a_card_for_which_mxnet_has_no_code(card, trial, monkeypatch):
    gpu = Gpu('GPU-1', 'card', '', card, '580.159', None)
    for name, value in (
        ('device_id_of', 0),
        ('find_visible_gpus', [gpu]),
        ('try_batches', 'tried'),
        ('mxnet_facts', {'kind': 'wheels', 'libraries': {}}),
    ):
        monkeypatch.setattr(doctor_facts, name, lambda *_, value=value: value)
    contexts: list[int | None] = []
    monkeypatch.setattr(
        doctor_facts, 'device_context', lambda number: contexts.append(number) or mx.cpu()
    )
    [facts] = doctor_facts.gather_facts(config(device='gpu'), False, Comm())
    assert (facts['device'], facts['trial'], contexts) == (0, trial, [0 if trial else None])


def test_doctor_of_one_rank_does_not_need_horovod(monkeypatch):
    monkeypatch.setitem(sys.modules, 'horovod.mxnet', None)
    rows, checks = doctor_facts.examine(config(), False, Comm())
    [check] = [c for c in checks if c.name == 'Horovod']
    assert (check.status, rows[0]['horovod']['has_gloo']) == ('not needed', False)
    assert check.found.startswith('one rank, without Horovod (import of horovod.mxnet halted')


def test_device_option_applies_without_a_configuration(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    _, checks = doctor_facts.examine(config(device='gpu', precision='float16'), False, Comm())
    [check] = [c for c in checks if c.name == 'GPU']
    assert check.status == 'failed' and 'is a CPU build' in check.found
    assert {'GPU environment', 'trial batches'} <= {c.name for c in checks}
