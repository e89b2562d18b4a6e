"""The tests on GPUs without one: their comparisons, the script that runs them, and a dry run on the CPU."""
import os
import pty
import shutil
import signal
import sys
from contextlib import suppress
from types import SimpleNamespace
from xml.etree import ElementTree

import mxnet as mx
import numpy as np
import pytest
from gpu.compare import compare_block, distance, distances, from_layout, to_layout, too_far
from gpu.streams import overwritten, read_late
from helpers import ROOT, run
from mxnet.gluon import nn


def test_distances():
    a = np.array([3.0, 4.0])
    assert distance(a, a) == 0 and distance(a * 1.1, a) == pytest.approx(0.1)
    assert distance(np.array([3.0, np.nan]), a) == distance(a[:1], a) == float('inf')
    assert distance(a, 0 * a) == 5
    found = distances({'x': a, 'y': a}, {'x': a, 'z': a})
    assert found == {'x': 0, 'z': float('inf'), 'y': float('inf')}
    assert too_far({'x': 0.1, 'y': 0.3, 'z': float('nan')}, 0.2).keys() == {'y', 'z'}
    assert too_far({'x': 0.1, 'y': 0.3}, {'x': 0.05, 'y': 0.5}) == {'x': 0.1}


def test_layouts_are_each_others_inverse():
    a = np.arange(120).reshape(2, 3, 4, 5)
    assert to_layout(a, 'NHWC').shape == (2, 4, 5, 3) and to_layout(a[0, 0], 'NHWC').shape == (4, 5)
    np.testing.assert_array_equal(from_layout(to_layout(a, 'NHWC'), 'NHWC'), a)
    np.testing.assert_array_equal(to_layout(a, 'NCHW'), a)


def test_a_layer_that_computes_something_else_is_found():
    def norm(epsilon):
        return lambda layout: nn.BatchNorm(axis=layout.index('C'), in_channels=4, epsilon=epsilon)
    same = compare_block(norm(1e-5), (4, 4, 3, 3), 'NHWC', 'float32', mx.cpu())
    other = compare_block(norm(1e-1), (4, 4, 3, 3), 'NHWC', 'float32', mx.cpu(), norm(1e-5))
    assert too_far(same, 1e-5) == {}
    assert {'output', 'gradient of the input', 'gradient of gamma 0'} <= too_far(other, 1e-3).keys()


def test_a_pipeline_that_uses_memory_again_too_early_is_found():
    """A stand-in whose batches all share memory, written again while the last one waits to be read."""
    memory = np.zeros(96, np.float32)
    shared = mx.nd.from_numpy(memory.reshape((2, 3, 4, 4)), zero_copy=True)

    def batches(is_shared):
        for step in range(6):
            if is_shared:
                memory[:] = np.repeat([2 * step, 2 * step + 1], 48)
            images = shared if is_shared else mx.nd.array(
                np.broadcast_to(np.array([2 * step, 2 * step + 1]).reshape((2, 1, 1, 1)), (2, 3, 4, 4)))
            yield SimpleNamespace(images=images, labels=mx.nd.array([2 * step, 2 * step + 1], dtype='int32'))
    expected = [[2 * s, 2 * s + 1] for s in range(6)]
    assert overwritten(read_late(batches(False), 6, mx.cpu(), 32), expected) == []
    wrong = overwritten(read_late(batches(True), 6, mx.cpu(), 1024), expected)
    assert wrong and wrong[0].startswith('batch 0: images ')
    assert overwritten([([None], [1])], [[1]]) == ['batch 0: images [None], labels [1], expected [1]']


def make_checkout(folder, setup):
    """The scripts that prove the program on GPUs, with a set-up that does something else."""
    for name in ('launch/test.sh', 'tests/gpu/run.sh'):
        (folder / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / 'launch/setup.sh').write_text(f'#!/bin/bash\n{setup}\n')
    (folder / 'launch/setup.sh').chmod(0o755)
    return folder


def clean(**variables):
    """The environment without what asks for tests on a GPU."""
    return {**{k: v for k, v in os.environ.items() if not k.startswith('MLPERF_RN50_')}, **variables}


@pytest.mark.parametrize('nvidia_smi, why', [
    (None, 'there is no nvidia-smi, so no NVIDIA driver'),
    ('#!/bin/sh\necho "NVIDIA-SMI has failed" >&2; exit 9\n', 'nvidia-smi finds none'),
    ('#!/bin/sh\necho "No devices were found"\n', 'nvidia-smi finds none')])
def test_without_a_gpu_it_says_so_in_one_line_and_sets_up_nothing(tmp_path, nvidia_smi, why):
    checkout, tools = make_checkout(tmp_path / 'checkout', 'touch was_set_up'), tmp_path / 'bin'
    tools.mkdir()
    for name in ('bash', 'dirname', 'timeout', 'env'):
        (tools / name).symlink_to(next(p for p in (f'/usr/bin/{name}', f'/bin/{name}') if os.path.exists(p)))
    if nvidia_smi:
        (tools / 'nvidia-smi').write_text(nvidia_smi.replace('/bin/sh', '/bin/bash'))
        (tools / 'nvidia-smi').chmod(0o755)
    before = sorted(checkout.rglob('*'))
    done = run(['bash', checkout / 'launch/test.sh', '--gpu'], env={'PATH': str(tools)})
    assert done.returncode == 2 and done.stdout == ''
    assert done.stderr == f'launch/test.sh --gpu: no GPU here: {why}; nothing was set up or run\n'
    assert sorted(checkout.rglob('*')) == before


@pytest.mark.parametrize('made, imports, given, expected', [
    ('', False, None, 'cu117'), ('', True, None, 'ngc'), ('cpu x', True, None, 'ngc'),
    ('cu112 x', False, None, 'cu112'), ('', True, 'cu112', 'cu112')])
def test_the_variant_that_is_set_up(tmp_path, made, imports, given, expected):
    """Up to the set-up, which says what it was asked for and fails."""
    make_checkout(tmp_path, 'echo "variant $MLPERF_RN50_VARIANT"; exit 3')
    text, tools = (tmp_path / 'tests/gpu/run.sh').read_text(), tmp_path / 'bin'
    assert 'PATH=/usr/local/bin:/usr/bin:/bin python3' in text
    (tmp_path / 'tests/gpu/run.sh').write_text(text.replace('PATH=/usr/local/bin:/usr/bin:/bin python3', 'python3'))
    (tmp_path / '.venv/.setup').mkdir(parents=True)
    tools.mkdir()
    if made:
        (tmp_path / '.venv/.setup/made').write_text(made + '\n')
    for path, body in ((tools / 'nvidia-smi', 'echo "GPU 0: NVIDIA A100"; for i in {1..9999}; do echo more; done'),
                       (tools / 'python3', f'exit {0 if imports else 1}')):
        path.write_text(f'#!/bin/bash\n{body}\n')
        path.chmod(0o755)
    done = run(['bash', tmp_path / 'launch/test.sh', '--gpu'],
               env=clean(PATH=f'{tools}:{os.environ["PATH"]}', **({'MLPERF_RN50_VARIANT': given} if given else {})))
    # Not 2, which is what it ends with where there is no GPU.
    assert (done.returncode, done.stdout) == (1, f'variant {expected}\n'), done.stderr


@pytest.mark.parametrize('capability, variant, is_refused', [
    ('9.0', 'cu117', True), ('12.0', 'cu112', True), ('8.9', 'cu117', False), ('9.0', 'ngc', False)])
def test_a_card_that_the_wheels_have_no_code_for_is_refused_first(tmp_path, capability, variant, is_refused):
    make_checkout(tmp_path, 'exit 3')
    smi = tmp_path / 'bin/nvidia-smi'
    smi.parent.mkdir()
    smi.write_text(f'#!/bin/bash\n[ "$1" = -L ] && echo "GPU 0: H" || echo "NVIDIA H100, {capability}"\n')
    smi.chmod(0o755)

    done = run(['bash', tmp_path / 'launch/test.sh', '--gpu'],
               env=clean(PATH=f'{smi.parent}:{os.environ["PATH"]}', MLPERF_RN50_VARIANT=variant))

    assert done.returncode == (2 if is_refused else 1)
    assert ('NVIDIA H100: the MXNet of' in done.stderr and done.stderr.count('\n') == 1) is is_refused, done.stderr


def make_proof(folder, nvidia_smi, pytest_does):
    """A checkout with two files of tests on GPUs and programs that stand in for those it calls; its environment."""
    make_checkout(folder, 'true')
    tools = folder / '.venv/bin'
    tools.mkdir(parents=True)
    for name in ('a', 'b'):
        (folder / f'tests/gpu/test_{name}.py').touch()
    for name, body in {'nvidia-smi': nvidia_smi, 'python': f'echo "python $*" >>{folder}/said; {pytest_does}',
                       'pytest': 'exit 1'}.items():  # the container's pytest, which does not see what .venv has
        (tools / name).write_text(f'#!/bin/bash\n{body}\n')
        (tools / name).chmod(0o755)
    return clean(PATH=f'{tools}:{os.environ["PATH"]}', MLPERF_RN50_GPU_RESULT=str(folder / 'out'),
                 MLPERF_RN50_VARIANT='cu117')


@pytest.mark.parametrize('ends, expected', [((0, 0), 0), ((0, 1), 1), ((139, 0), 1), ((5, 0), 0)])
def test_a_file_that_fails_or_crashes_does_not_stop_the_others(tmp_path, ends, expected):
    how = f'case $* in *test_a.py*) exit {ends[0]} ;; *test_b.py*) exit {ends[1]} ;; esac'
    environment = make_proof(tmp_path, 'echo "GPU 0: NVIDIA A100"', how)
    done = run(['bash', tmp_path / 'launch/test.sh', '--gpu', '-x'], env=environment)
    assert done.returncode == expected, done.stderr
    said = (tmp_path / 'said').read_text().splitlines()
    assert said[1:] == [f'python -m pytest tests/gpu/test_{name}.py --junitxml {tmp_path}/out/test_{name}.xml -x'
                        for name in 'ab']
    assert said[0].startswith('python -m mlperf_rn50 doctor') and '--train.device' not in said[0]
    again = run(['bash', tmp_path / 'launch/test.sh', '--gpu'], env=environment)
    assert again.returncode == 2 and f'{tmp_path}/out has files in it' in again.stderr


def test_interrupted_at_a_terminal_it_ends(tmp_path):
    env = make_proof(tmp_path, 'echo "GPU 0: NVIDIA A100"', 'case $* in *test_a.py*) echo ready; sleep 30 ;; esac')
    pid, terminal = pty.fork()
    if not pid:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests that a shell started in the background ignore it
        os.execvpe('bash', ['bash', str(tmp_path / 'launch/test.sh'), '--gpu'], env)
    seen = b''
    while b'ready' not in seen:
        seen += os.read(terminal, 1000)
    os.write(terminal, b'\x03')
    with suppress(OSError):  # the other end is closed
        while os.read(terminal, 1000):
            pass
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    said = (tmp_path / 'said').read_text().splitlines()
    assert [line.split()[3] for line in said[1:]] == ['tests/gpu/test_a.py']


def test_a_driver_that_hangs_is_none(tmp_path):
    env = make_proof(tmp_path, 'trap "" TERM; for i in {1..300}; do sleep 0.1; done; echo "GPU 0"', 'true')
    script = tmp_path / 'tests/gpu/run.sh'
    text = script.read_text()
    assert 'timeout --kill-after 5 60 nvidia-smi' in text
    script.write_text(text.replace('timeout --kill-after 5 60 nvidia-smi', 'timeout --kill-after 1 1 nvidia-smi'))
    done = run(['bash', tmp_path / 'launch/test.sh', '--gpu'], env=env)
    assert done.returncode == 2 and 'nvidia-smi finds none' in done.stderr and not (tmp_path / 'said').exists()


def test_tests_on_gpus_are_collected_everywhere_and_run_nowhere_else():
    seen = run([sys.executable, '-m', 'pytest', 'tests/gpu', '-v', '-m', 'not slow and not cluster and not browser'],
               cwd=ROOT, env=clean(MLPERF_RN50_NEED_ALL='1'))
    assert seen.returncode == 0, seen.stdout
    for path in (ROOT / 'tests/gpu').glob('test_*.py'):
        assert f'tests/gpu/{path.name}::' in seen.stdout
    assert 'tests that need a GPU: launch/test.sh --gpu' in seen.stdout
    assert ' skipped in ' in seen.stdout and ' passed' not in seen.stdout and 'error' not in seen.stdout


def dry_run(folder, *words):
    """Run some of the tests on the CPU; the properties of each in the junit report."""
    report = folder / 'junit.xml'
    done = run([sys.executable, '-m', 'pytest', '-q', '--junitxml', report, *words], cwd=ROOT,
               env=clean(MLPERF_RN50_TEST_GPU='dry', PYTHONPATH=str(ROOT)))
    assert done.returncode == 0, done.stdout
    return {p.get('name'): p.get('value') for p in ElementTree.parse(report).iter('property')}


def test_layers_images_and_streams_in_a_dry_run(tmp_path):
    figures = dry_run(tmp_path, 'tests/gpu/test_layers.py', 'tests/gpu/test_pipeline.py', 'tests/gpu/test_node.py')
    for kind in ('convolution 3x3', 'BatchNorm', 'dense', 'residual unit'):
        assert f'{kind}, float32, NCHW: distance from the CPU' in figures
    # The stand-in for float16 rounds, so that the comparison can fail.
    assert float(figures['residual unit, float16, NHWC: distance from the CPU'].split()[0]) > 1e-4
    assert figures['streams, decoder cpu, 5 batches ahead: overwritten of 12'].split()[0] == '0'


@pytest.mark.slow
def test_a_step_an_exchange_a_bench_and_a_run_in_a_dry_run(tmp_path):
    figures = dry_run(tmp_path, *(f'tests/gpu/test_{name}.py' for name in ('step', 'exchange', 'bench', 'train')),
                      '-k', 'resnet18-float16-NHWC or groups or one_gpu or sums_of_all or digits or killed')
    assert float(figures['resnet18, float16, NHWC, lars: grad, distance from the CPU'].split()[0]) > 1e-4
    assert float(figures['digits, 2 ranks: Top-1'].split()[0]) >= 0.749
