"""The tests on GPUs as a dry run on the CPU: that they run, and that a page comes of it which says what it is."""
import json
import os
import sys

import pytest
from gpu.page import DRY_RUN, write_page
from helpers import ROOT, run


def dry_run(folder, *words):
    """Runs some of them into a folder; outcomes by test, and figures by name."""
    environment = {**os.environ, 'MLPERF_RN50_TEST_GPU': 'dry', 'MLPERF_RN50_GPU_RESULT': str(folder),
                   'PYTHONPATH': str(ROOT)}
    assert run([sys.executable, ROOT / 'tests/gpu/machine.py', folder], env=environment).returncode == 0
    done = run([sys.executable, '-m', 'pytest', '-q', *words], cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout
    made = write_page(folder, 0.0)
    result = json.loads(made[0].read_text())
    assert result['dry_run'] and DRY_RUN in made[1].read_text() and made[0].name.startswith('gpu_dry_run_')
    assert result['counts']['failed'] == result['counts']['error'] == 0
    return {t['name']: t['outcome'] for t in result['tests']}, {f['name']: f for f in result['figures']}


def test_layers_images_and_streams(tmp_path):
    outcomes, figures = dry_run(tmp_path, 'tests/gpu/test_layers.py', 'tests/gpu/test_pipeline.py',
                                'tests/gpu/test_node.py')
    for kind in ('convolution 3x3', 'BatchNorm', 'dense', 'residual unit'):
        for precision, layout in (('float32', 'NCHW'), ('float16', 'NHWC')):
            assert outcomes[f'test_layers.py::test_a_layer[{kind}-{precision}-{layout}]'] == 'passed'
            assert figures[f'{kind}, {precision}, {layout}: distance from the CPU']['verdict'] == 'within'
    # The stand-in for float16 rounds, so that a comparison that is none would be seen.
    assert figures['residual unit, float16, NHWC: distance from the CPU']['value'] > 1e-4
    assert figures['streams, decoder cpu, 5 batches ahead: overwritten of 12']['value'] == 0
    assert 'not run' in outcomes.values()  # nvJPEG's


@pytest.mark.slow
def test_a_step_an_exchange_a_bench_and_a_run(tmp_path):
    outcomes, figures = dry_run(
        tmp_path, *(f'tests/gpu/test_{name}.py' for name in ('step', 'exchange', 'bench', 'train')), '-k',
        'resnet18-float16-NHWC or groups or one_gpu or sums_of_all or digits or killed')
    assert set(outcomes.values()) == {'passed'}
    assert figures['resnet18, float16, NHWC, lars: grad, distance from the CPU']['value'] > 1e-4
    assert figures['digits, 2 ranks: Top-1']['verdict'] == 'within'
    assert figures['bench train, made-up images, 1 GPU']['verdict'] == ''  # a CPU is held against nothing
