"""The functions of tests/gpu on the CPU, so that a change of the program that breaks them is seen without a GPU."""
import os
import sys

import pytest
from helpers import ROOT, run


@pytest.mark.slow
def test_the_tests_on_gpus_pass_in_a_dry_run_on_the_cpu():
    small = 'not (bench or train or resnet50)'
    done = run([sys.executable, '-m', 'pytest', '-q', 'tests/gpu', '-k', small], cwd=ROOT,
               env={**os.environ, 'MLPERF_RN50_TEST_GPU': 'dry', 'PYTHONPATH': str(ROOT)})
    assert done.returncode == 0 and ' passed' in done.stdout, done.stdout
