"""The benchmarks that the docs cite run, each with its smallest workload."""
import sys

import pytest
from helpers import ROOT, run


@pytest.mark.slow
@pytest.mark.parametrize('words, last', [
    ('scale.py 1 1', 'opening the data, s'), ('replay.py', ''), ('report.py 1x5', '')])
def test_a_benchmark_runs(words, last):
    name, *arguments = words.split()
    done = run([sys.executable, ROOT / 'benchmarks' / name, *arguments], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1].startswith(last)
