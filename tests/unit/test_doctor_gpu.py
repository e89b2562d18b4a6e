"""What the doctor says of GPUs, on made-up facts: both MXNets, cards, drivers and batches that were tried."""

import mxnet as mx
import pytest

from mlperf_rn50.config import Config, DataConfig, ModelConfig, TrainConfig
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.system.gpu_stack import (
    capability_problem,
    check_gpus,
    check_libraries,
    check_trial,
    cuda_libraries,
    cuda_major,
    loaded_libraries,
    mxnet_facts,
    one_line,
    used_gpus,
)
from mlperf_rn50.train import examine
from mlperf_rn50.train.comm import LocalComm

MAPS = """7f1-7f2 r-xp 00000000 08:01 1 /usr/lib/libcuda.so.535.129.03
7f3-7f4 r-xp 00000000 08:01 2 /usr/local/cuda/lib64/libcudart.so.{cudart}
7f5-7f6 r--p 00000000 08:01 2 /usr/local/cuda/lib64/libcudart.so.{cudart}
7f7-7f8 r-xp 00000000 08:01 3 /usr/lib/libcudnn.so.{cudnn}
7f9-7fa r-xp 00000000 08:01 4 /usr/lib/libcudnn_ops_infer.so.8
"""
WHEELS = mxnet_facts({'mxnet-cu117': '1.9.1'}, {}, MAPS.format(cudart='11.8.89', cudnn='8'), True, False)
CONTAINER = mxnet_facts({'mxnet': '1.9.1'}, {'NVIDIA_MXNET_VERSION': '24.06'},
                        MAPS.format(cudart='12.4.127', cudnn='9.1.0'), True, True)
CPU = mxnet_facts({'mxnet': '1.9.1'}, {}, '', False, False)
OWN = mxnet_facts({'mxnet': '1.9.1'}, {}, MAPS.format(cudart='12.8.90', cudnn='9.7.1'), True, False)
V100, A100, H100, B200, RTX4090, M60 = (
    ('Tesla V100-SXM2-16GB', '7.0'), ('NVIDIA A100-SXM4-40GB', '8.0'), ('NVIDIA H100 80GB HBM3', '9.0'),
    ('NVIDIA B200', '10.0'), ('NVIDIA GeForce RTX 4090', '8.9'), ('Tesla M60', '5.2'))
R470, R525_OLD, R535, R545, R418 = '470.82.01', '525.60.13', '535.129.03', '545.23.08', '418.40'


def gpu(card, driver=R535, uuid='GPU-a'):
    return {'name': card[0], 'compute_cap': card[1], 'driver_version': driver, 'uuid': uuid, 'parent': None}


def row(mxnet=WHEELS, gpus=(), host='h1', device=0, libcuda='12020', **changes):
    return {'host': host, 'mxnet': mxnet, 'gpus': list(gpus), 'visible': None, 'device': device, 'device_problem': '',
            'cuda_libraries': {'libcuda.so.1': libcuda}, 'trial': None, **changes}


def test_which_mxnet_is_at_hand():
    assert [m['kind'] for m in (CPU, WHEELS, CONTAINER, OWN)] == ['cpu', 'wheels', 'container', 'other']
    assert [m['release'] for m in (CPU, WHEELS, CONTAINER, OWN)] == ['', 'mxnet-cu117', '24.06', '']
    assert WHEELS['libraries'] == {'libcudart': '11.8.89', 'libcudnn': '8'}
    assert [cuda_major(m) for m in (CPU, WHEELS, CONTAINER, OWN)] == [11, 11, 12, 12]
    by_operator = mxnet_facts({'mxnet': '1.9.1'}, {}, '', True, True)  # a host that ssh starts without the variables
    assert by_operator['kind'] == 'container' and cuda_major(by_operator) == 12
    assert loaded_libraries('') == {}


@pytest.mark.parametrize('mxnet, card, driver, libcuda, status, said, fix', [
    (WHEELS, V100, R470, '11040', 'ok', '1 x Tesla V100-SXM2-16GB; driver 470.82.01; MXNet of mxnet-cu117', ''),
    (WHEELS, A100, R545, '12030', 'ok', 'A100', ''),
    (WHEELS, RTX4090, R535, '12020', 'ok', '4090', ''),
    (WHEELS, V100, R418, '10010', 'failed', 'driver 418.40 on h1; CUDA 11 needs 450 or newer', 'newer driver'),
    (WHEELS, H100, R545, '12030', 'failed', 'has compute capability 9.0; the published mxnet-cu wheels hold code up to '
     '8.6', "NVIDIA's container: docker build --build-arg VARIANT=ngc"),
    (WHEELS, B200, R545, '12030', 'failed', 'neither the published wheels nor', 'build MXNet for this card'),
    (CONTAINER, V100, R470, '12040', 'ok', "driver 470.82.01; MXNet of NVIDIA's container 24.06", ''),
    (CONTAINER, V100, R470, '11040', 'failed', 'it is for CUDA 11, and the compatibility package', 'cuda/compat/lib'),
    (CONTAINER, A100, R535, '12020', 'ok', 'A100', ''),
    (CONTAINER, A100, R525_OLD, '12000', 'failed', 'needs 545 or newer; on data centre cards also 470.57, 525.85, '
     '535.86 or later', 'newer driver'),
    (CONTAINER, RTX4090, R535, '12020', 'failed', 'needs 545 or newer', 'newer driver'),
    (CONTAINER, RTX4090, R545, '12030', 'ok', '4090', ''),
    (CONTAINER, H100, R545, '12030', 'ok', '1 x NVIDIA H100 80GB HBM3; driver 545.23.08', ''),
    (CONTAINER, H100, R535, '12020', 'ok', 'H100', ''),
    (CONTAINER, H100, '550.54.15', '', 'ok', 'H100', ''),
    (CONTAINER, B200, '570.86.10', '12080', 'failed', 'compute capability 10.0; neither the', 'build MXNet'),
    (CONTAINER, ('GeForce', '12.0'), '570.86', '12080', 'failed', 'neither the', 'build MXNet'),
    (CONTAINER, M60, R545, '12030', 'failed', "NVIDIA's container has code from 6.0 on", 'MLPERF_RN50_VARIANT=cu117'),
    (OWN, H100, R535, '12020', 'ok', 'MXNet of an own build', ''),
    (OWN, A100, R470, '11040', 'failed', 'CUDA 12 needs 525 or newer', ''),
    (CPU, A100, R535, '12020', 'failed', 'MXNet on h1 is a CPU build', 'MLPERF_RN50_VARIANT=ngc')])
def test_cards_and_drivers(mxnet, card, driver, libcuda, status, said, fix):
    check = check_gpus([row(mxnet, [gpu(card, driver)], libcuda=libcuda)], 'gpu')
    assert (check.status, said in check.found, fix in check.fix) == (status, True, True), check


@pytest.mark.parametrize('capability, runs', [('5.0', True), ('5.2', True), ('6.1', True), ('7.0', True), ('7.5', True),
                                              ('8.0', True), ('8.6', True), ('8.9', True), ('9.0', False),
                                              ('10.0', False), ('3.5', False), ('', False)])
def test_compute_capabilities_of_the_wheels(capability, runs):
    assert (capability_problem('wheels', capability) == ('', '')) == runs


def test_the_check_speaks_of_the_gpus_that_ranks_use():
    two = [gpu(V100, uuid='GPU-a'), gpu(H100, uuid='GPU-b')]
    assert used_gpus(row(gpus=two)) == two[:1] and used_gpus(row(gpus=two, device=None)) == two
    assert check_gpus([row(gpus=two)], 'gpu').status == 'ok'  # the H100 is nobody's
    assert check_gpus([row(gpus=two), row(gpus=two, device=1, host='h2')], 'gpu').found.startswith('NVIDIA H100 80GB '
                                                                                                 'HBM3 on h2')
    shared = [row(gpus=[gpu(V100)]), row(gpus=[gpu(V100)]), row(gpus=[gpu(V100, uuid='GPU-c')], host='h2')]
    assert check_gpus(shared, 'gpu').found.startswith('2 x Tesla V100')
    assert check_gpus(shared, 'cpu').status == 'not needed'


def test_no_gpu_in_sight():
    assert check_gpus([row()], 'gpu').found == 'no driver tells of one on h1'
    assert 'CUDA_VISIBLE_DEVICES=)' in check_gpus([row(visible='')], 'gpu').found
    problem = check_gpus([row(gpus=[gpu(V100)], device=None, device_problem='run.ranks_per_device: got 1')], 'gpu')
    assert (problem.status, problem.found) == ('failed', 'run.ranks_per_device: got 1')


def test_libraries_are_those_of_the_cuda_at_hand():
    assert 'libcudnn.so.8' in cuda_libraries(11) and 'libcudnn.so.9' in cuda_libraries(12)
    missing = check_libraries([row(), row(CONTAINER, host='h2', cuda_libraries={'libcudnn.so.9': None})], 'gpu')
    assert (missing.status, missing.found) == ('failed', 'not found on h2 for CUDA 12: libcudnn.so.9')
    assert check_libraries([row(cuda_libraries={'a': '1', 'b': ''})], 'gpu').found == 'a 1, b'
    assert check_libraries([row()], 'cpu').status == 'not needed'


REFUSED = """Traceback (most recent call last):
  File "../src/operator/nn/cudnn/cudnn_batch_norm-inl.h", line 205
MXNetError: Check failed: e == CUDNN_STATUS_SUCCESS (9 vs. 0) : cuDNN: CUDNN_STATUS_NOT_SUPPORTED
Stack trace:
  [bt] (0) /lib/libmxnet.so(+0x1) [0x7f]"""


@pytest.mark.parametrize('error, line', [
    (REFUSED, 'MXNetError: Check failed: e == CUDNN_STATUS_SUCCESS (9 vs. 0) : cuDNN: CUDNN_STATUS_NOT_SUPPORTED'),
    ('\nsomething\n  odd', 'something'), ('', 'an error without a word'), ('x' * 900, 'x' * 300)])
def test_an_error_is_one_line(error, line):
    assert one_line(error) == line


def tried(problem='', what='an evaluation', seconds=2.0):
    return {'what': what, 'problem': problem, 'seconds': seconds, 'used_bytes': 5 * 10**9}


@pytest.mark.parametrize('error, fix', [
    (REFUSED, 'cuDNN has no kernel for these sizes'),
    ('cudaMalloc retry failed: out of memory', 'lower train.local_batch_size'),
    ('CUDA: no kernel image is available for execution on the device', "NVIDIA's container"),
    ('Check failed: something else', 'model.layout NCHW, float32 and a smaller batch')])
def test_a_refused_kernel_is_met_by_the_doctor(error, fix):
    check = check_trial([row(trial=tried()), row(host='h2', trial=tried(one_line(error)))])
    assert check.status == 'failed' and check.found == f'an evaluation on h2: {one_line(error)}' and fix in check.fix


def test_batches_that_ran():
    check = check_trial([row(trial=tried()), row(trial=tried(seconds=4.4))])
    assert check.status == 'ok' and 'in 4 s at most; up to 5.0 GB' in check.found
    assert check_trial([row()]).status == 'not needed'


# --- the facts -----------------------------------------------------------------------------------------------

def config(**train):
    data = DataConfig(num_train=20, num_val=8, num_classes=3, image_size=32, resize_shorter=32, synthetic=True)
    return Config(data=data, model=ModelConfig(name='resnet18'), train=TrainConfig(local_batch_size=4, **train))


def test_one_batch_of_each_kind_is_tried():
    found = examine.try_batches(config(), 1, 0, None)
    assert (found['what'], found['problem']) == ('an evaluation', '') and found['seconds'] > 0


@pytest.mark.parametrize('part, what', [('forward', 'a training pass'), ('fold', 'an evaluation')])
def test_what_a_kernel_refuses_is_one_line(monkeypatch, part, what):
    def refuse(*_):
        raise mx.MXNetError(REFUSED)
    monkeypatch.setattr(examine.Trainer, part, refuse)
    found = examine.try_batches(config(), 1, 0, None)
    assert found['what'] == what and found['problem'].endswith('CUDNN_STATUS_NOT_SUPPORTED')


def test_the_evaluation_batch_of_the_configuration_goes_through_the_folded_network(monkeypatch):
    seen = []

    def refuse(images):
        seen.append(images.shape)
        raise mx.MXNetError(REFUSED)
    monkeypatch.setattr(examine.Trainer, 'eval_net', property(lambda trainer: refuse))
    found = examine.try_batches(config(eval_batch_size=5), 1, 0, None)
    assert seen == [(5, 3, 32, 32)]
    assert found['what'] == 'an evaluation' and found['problem'].endswith('CUDNN_STATUS_NOT_SUPPORTED')


def test_a_plan_that_cannot_be_is_the_problem_of_the_trial():
    wrong = Config(train=TrainConfig(global_batch_size=7))
    assert 'global_batch_size' in examine.try_batches(wrong, 2, 0, None)['problem']


@pytest.mark.parametrize('num_gpus', [1, 2])
def test_facts_of_a_rank_on_a_gpu(monkeypatch, tmp_path, num_gpus):
    """With MXNet's calls for GPUs stood in for: the device, its memory and the trial."""
    cards = [dict(name='A100', compute_cap='8.0', uuid=f'GPU-{i}', memory_bytes=40 << 30) for i in range(num_gpus)]
    monkeypatch.setattr(examine, 'own_facts', lambda folder, mxnet: {'host': 'h1', 'gpus': cards, 'mxnet': mxnet})
    monkeypatch.setattr(examine, 'device_id_of', lambda c, comm: 0)
    monkeypatch.setattr(examine, 'device_context', lambda device_id: mx.cpu())
    monkeypatch.setattr(examine, 'try_batches', lambda c, size, rank, device_id: {'device': device_id})
    monkeypatch.setattr(examine, '_horovod_facts', lambda *_: {})
    [found] = examine.gather_facts(config(device='gpu'), True, LocalComm())
    assert (found['device'], found['device_problem'], found['trial']) == (0, '', {'device': 0})
    assert found['mxnet']['kind'] == 'cpu'


def test_a_rank_without_a_gpu_says_why(monkeypatch):
    def none(*_):
        raise ConfigError('train.device: got gpu, and MXNet sees none')
    monkeypatch.setattr(examine, 'device_id_of', none)
    monkeypatch.setattr(examine, '_horovod_facts', lambda *_: {})
    [found] = examine.gather_facts(config(device='gpu'), True, LocalComm())
    assert (found['device'], found['trial']) == (None, None)
    assert found['device_problem'].endswith('MXNet sees none')


def test_a_device_of_the_command_line_counts_without_a_configuration(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    _, checks = examine.examine(config(device='gpu', precision='float16'), False, LocalComm())
    [found] = [c for c in checks if c.name == 'GPU']
    assert found.status == 'failed' and 'is a CPU build' in found.found
    assert {'GPU environment', 'trial batches'} <= {c.name for c in checks}
