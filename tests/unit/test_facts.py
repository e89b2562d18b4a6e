"""Facts that the doctor gathers: the run folder of several ranks, trial batches, and a GPU."""

import os
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import msgspec
import mxnet as mx
import numpy as np
import pytest
from nets import small_config
from numbered import with_data

from mlperf_rn50.config import Config
from mlperf_rn50.data import pipeline
from mlperf_rn50.data.pipeline import whole_images
from mlperf_rn50.doctor import facts as doctor_facts
from mlperf_rn50.doctor.facts import examine, run_folder_problem, try_batches
from mlperf_rn50.doctor.result import MxnetFacts, Trial
from mlperf_rn50.system.gpus import Gpu
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.options import TrainConfig
from mlperf_rn50.train.plan import fit_batch


def problems(folders, hosts=('h1', 'h2')):
    """Return the run folder problems of two ranks on these hosts; rank 1 looks while rank 0 waits
    for it."""
    sent, found = [], []

    def gather(own):
        sent.append(own)
        return hosts if len(sent) == 1 else [own]

    def look():
        gathered = iter((hosts, [sent[-1]]))
        found.append(problem_of(1, lambda own: next(gathered), lambda: None))

    def problem_of(rank, gather, barrier):
        comm = SimpleNamespace(rank=rank, gather_object=gather, barrier=barrier)
        return run_folder_problem(folders[rank], comm)

    return [problem_of(0, gather, look), *found]


def test_shared_run_folder_is_found_and_left_unchanged(tmp_path):
    assert problems([tmp_path / 'logs/run'] * 2) == ['', '']
    assert not list(tmp_path.iterdir())  # the run creates it, not the doctor
    (tmp_path / 'logs').mkdir()
    (tmp_path / 'logs/result_0.txt').touch()
    assert problems([tmp_path / 'logs'] * 2) == ['', '']
    assert [p.name for p in (tmp_path / 'logs').iterdir()] == ['result_0.txt']


def test_unshared_run_folder_is_reported(tmp_path):
    (tmp_path / 'h2/run').mkdir(parents=True)
    problem_0, problem_1 = problems([tmp_path / 'h1/run', tmp_path / 'h2/run'])
    assert problem_0 == '' and problem_1.startswith(f'no {tmp_path}/h2/run/.doctor-')
    assert not (tmp_path / 'h1').exists()


def test_only_rank_0_reports_unwritable_run_folder(tmp_path):
    (tmp_path / 'file').touch()
    problem_0, problem_1 = problems([tmp_path / 'file/run'] * 2)
    assert problem_0 == f'{tmp_path}/file/run: {os.strerror(20)}' and problem_1 == ''


def test_single_host_is_not_checked(tmp_path):
    assert problems([tmp_path / 'run'] * 2, hosts=('h1', 'h1')) == [None]


NO_JPEG = np.frombuffer(b'\xff\xd8\xff\xe0 no JPEG' * 9, np.uint8)


def config(**train):
    return small_config(num_train=20, **train)


def test_one_batch_of_each_kind_is_tried(monkeypatch, thin_resnets):
    seen = []
    evaluating = doctor_facts.Trainer.evaluating

    @contextmanager
    def recorded(trainer):
        with evaluating(trainer) as net:
            yield lambda images: seen.append(images.shape) or net(images)

    monkeypatch.setattr(doctor_facts.Trainer, 'evaluating', recorded)
    trial = try_batches(config(eval_batch_size=5), 1, 0, None)
    assert (trial.what, trial.problem, seen) == ('an evaluation', '', [(5, 3, 32, 32)])
    assert trial.seconds > 0


def test_dali_decodes_a_batch_like_those_of_training(monkeypatch, thin_resnets):
    seen = []
    run = pipeline.run_pipeline
    monkeypatch.setattr(pipeline, 'run_pipeline', lambda pipe: seen.append(run(pipe)) or seen[-1])
    with_files = with_data(config(), synthetic=False)
    trial = try_batches(with_files, 1, 0, None)
    assert (trial.what, trial.problem, len(seen)) == ('DALI with data.decoder=cpu', '', 1)
    assert seen[0][0].as_tensor().shape() == [4, 3, 32, 32]
    monkeypatch.setattr(doctor_facts, 'synthetic_inputs', lambda num: whole_images([NO_JPEG] * num))
    trial = try_batches(with_data(with_files, crop='none'), 1, 0, None)
    # The decoder's message, without DALI's traceback before it.
    assert trial.what == 'DALI with data.decoder=cpu'
    assert 'input pipeline failed: ' in trial.problem and 'pipeline.py' not in trial.problem


def test_error_of_a_kernel_is_one_line(monkeypatch, thin_resnets):
    def refuse(*_):
        raise mx.MXNetError('Check failed: CUDNN_STATUS_NOT_SUPPORTED\nStack trace:\n  [bt] (0)')

    monkeypatch.setattr(doctor_facts.Trainer, 'forward', refuse)
    trial = try_batches(config(), 1, 0, None)
    assert trial.what == 'a training pass'
    assert trial.problem == 'Check failed: CUDNN_STATUS_NOT_SUPPORTED'
    wrong = Config(train=TrainConfig(global_batch_size=7))
    assert 'global_batch_size' in try_batches(wrong, 2, 0, None).problem
    fitting = fit_batch(wrong, 2)  # for --elastic
    assert 'CUDNN' in try_batches(fitting, 2, 0, None).problem


@pytest.mark.parametrize(
    'kind, capability, is_tried',
    [('cpu', '', True), ('wheels', '8.6', True), ('wheels', '9.0', False)],
)
def test_batches_are_tried_on_a_gpu_for_which_mxnet_has_code(
    kind, capability, is_tried, monkeypatch
):
    tried = Trial('a training pass', '', [], 1.0, 0)
    contexts: list[int | None] = []
    gpus = [Gpu('GPU-1', 'card', '', capability, '580.159', None)] if capability else []
    stand_ins = {
        'device_id_of': lambda *_: 0,
        'find_visible_gpus': lambda: gpus,
        'try_batches': lambda *_: tried,
        'mxnet_facts': lambda *_, **__: MxnetFacts(kind, '', {}, ''),
        'device_context': lambda number: contexts.append(number) or mx.cpu(),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(doctor_facts, name, stand_in)
    [facts], _ = examine(config(device='gpu'), False, Comm())
    assert (facts['device'], facts['device_problem']) == (0, '')
    assert facts['trial'] == (msgspec.to_builtins(tried) if is_tried else None)
    assert contexts == [0 if is_tried else None]


def test_doctor_of_one_rank_does_not_need_horovod(monkeypatch):
    monkeypatch.setitem(sys.modules, 'horovod.mxnet', None)
    rows, checks = examine(config(), False, Comm())
    [check] = [c for c in checks if c.name == 'Horovod']
    assert (check.status, rows[0]['horovod']['has_gloo']) == ('not needed', False)
    assert check.found.startswith('one rank, without Horovod (import of horovod.mxnet halted')


@pytest.mark.parametrize('num_kept, status', [(0, 'failed'), (1, 'failed'), (2, 'ok'), (9, 'ok')])
def test_space_of_kept_checkpoints_is_not_needed_again(monkeypatch, tmp_path, num_kept, status):
    """A run keeps two; while the third is written, the disk has all of them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor_facts, 'checkpoint_bytes', lambda _: 1000)
    usage = doctor_facts.shutil.disk_usage(tmp_path)._replace(free=1500)
    monkeypatch.setattr(doctor_facts.shutil, 'disk_usage', lambda _: usage)
    _, checks = examine(config(), True, Comm(), num_kept)
    [check] = [c for c in checks if c.name == 'disk']
    assert check.status == status


def test_device_option_applies_without_a_configuration(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    _, checks = examine(config(device='gpu', precision='float16'), False, Comm())
    [check] = [c for c in checks if c.name == 'GPU']
    assert check.status == 'failed' and 'is a CPU build' in check.found
    assert {'GPU environment', 'trial batches'} <= {c.name for c in checks}
