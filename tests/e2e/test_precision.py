"""bfloat16 is refused in one line where there is no AVX-512, before anything starts.

On any machine: under DNNL_MAX_CPU_ISA=AVX2, MXNet is what it is on a processor without AVX-512.
"""
import os

import pytest
from e2e.training import THIN, arguments
from helpers import ROOT, call, run

AVX2 = {**os.environ, 'DNNL_MAX_CPU_ISA': 'AVX2'}
DIGITS = ['--config', ROOT / 'launch/configs/digits_cpu.yaml']
BFLOAT16 = '--train.precision=bfloat16'


@pytest.mark.parametrize('words, option', [
    (['train', *DIGITS, BFLOAT16], 'train.precision'), (['bench', 'allreduce', BFLOAT16], 'train.precision'),
    (['bench', 'train', '--precisions', 'float32,bfloat16'], '--precisions')])
def test_it_is_refused(tmp_path, monkeypatch, words, option):
    monkeypatch.setenv('DNNL_MAX_CPU_ISA', 'AVX2')
    done = call(*words, '--run.dir', tmp_path / 'run')
    assert (done.returncode, done.stdout) == (2, ''), done.stderr
    [said] = done.stderr.splitlines()
    assert f'{option}: got bfloat16, ' in said and 'AVX-512' in said and said.endswith('use float32')
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_launcher_ends_with_the_doctor(tmp_path):
    done = run([ROOT / 'launch/local.sh', *DIGITS, '--run-dir', tmp_path / 'run', BFLOAT16, '--data.synthetic=true'],
               env=AVX2)
    assert done.returncode == 1 and 'failed      processor ' in done.stderr, done.stderr
    assert 'fix: train.precision: got bfloat16, ' in done.stderr
    assert list(tmp_path.rglob('result_*')) == []


def test_a_plan_for_another_machine_can_be_made(monkeypatch):
    monkeypatch.setenv('DNNL_MAX_CPU_ISA', 'AVX2')
    assert call('train', *DIGITS, BFLOAT16, '--dry-run').returncode == 0


@pytest.mark.slow
def test_float32_trains_there(tiny, tmp_path):
    done = run([*THIN, *arguments(tmp_path, tiny, '--train.target_accuracy=0.01')], env=AVX2)
    assert done.returncode == 0, done.stderr
    assert '"uses": "AVX2"' in (tmp_path / 'env.json').read_text()
    assert '"DNNL_MAX_CPU_ISA": "AVX2"' in (tmp_path / 'env.json').read_text()
