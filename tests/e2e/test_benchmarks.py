"""The benchmarks that the docs cite run, each with its smallest workload; so do the tests of GPUs, on the CPU."""
import os
import sys

import pytest
from helpers import ROOT, run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize('words, last', [
    ('scale.py 1 1', 'opening the data, s'), ('replay.py', ''), ('report.py 1x5', '')])
def test_a_benchmark_runs(words, last):
    name, *arguments = words.split()
    done = run([sys.executable, ROOT / 'benchmarks' / name, *arguments], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1].startswith(last)


def test_the_tests_on_gpus_pass_in_a_dry_run_on_the_cpu():
    small = 'not (bench or train or resnet50)'
    done = run([sys.executable, '-m', 'pytest', '-q', 'tests/gpu', '-k', small], cwd=ROOT,
               env={**os.environ, 'MLPERF_RN50_TEST_GPU': 'dry', 'PYTHONPATH': str(ROOT)})
    assert done.returncode == 0 and ' passed' in done.stdout, done.stdout
