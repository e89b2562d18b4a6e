"""Measure the time and memory of `mlperf-rn50 report --out` for many logs.

The logs are synthetic logs of v0.7 with 62 to 90 epochs and an evaluation after each; one run in 20
misses the target. A process reports each tree of logs. CPU time includes its child processes.
Memory is the peak of the largest process. Usage: .venv/bin/python benchmarks/report.py
[SYSTEMSxRUNS ...]
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from compare import PYTHON, ROOT

sys.path.append(str(ROOT / 'tests'))
from lines import write_set  # noqa: E402  (in tests/)

SIZES = (
    '1x125',
    '1x250',
    '1x500',
    '150x1',
    '300x1',
    '600x1',
    '1x5000',
    '1x10000',
    '100x50',
    '100x100',
)
NODES = (1, 2, 4, 8, 16, 32, 64, 96)


def accuracies(rng: random.Random) -> list[float]:
    """Return the accuracies of a run of 62 to 90 epochs, which ends at 75.9 % or more with a
    probability of 95 %."""
    count, end = rng.randint(62, 90), 0.7585 if rng.random() < 0.05 else 0.7592
    before = [min(end - 0.68 * (1 - (i + 1) / count) ** 2, 0.7588) for i in range(count - 1)]
    return [round(a * 50_000) / 50_000 for a in (*before, end)]


def write_tree(folder: Path, num_systems: int, num_runs: int) -> Path:
    """Write the logs of systems with 1 to 96 nodes, each with num_runs runs; return the folder."""
    for s in range(num_systems):
        rng, nodes = random.Random(s), NODES[s % len(NODES)]
        curves = [accuracies(rng) for _ in range(num_runs)]
        write_set(
            folder / f'box{s:03d}_n{nodes}/resnet',
            num_runs,
            nodes=nodes,
            ranks=8 * nodes,
            batch=256 * nodes,
            accuracies=curves.__getitem__,
            eval_s=2.0,
            seed=lambda k, s=s: 100_000 * s + k,
            epoch_s=lambda k, rng=rng, nodes=nodes: rng.uniform(60.0, 66.0) / nodes**0.9,
            first_s=lambda k, rng=rng, nodes=nodes: rng.uniform(70.0, 75.0) / nodes**0.9,
            status=lambda k, curves=curves: 'success' if curves[k][-1] >= 0.759 else 'aborted',
        )
    return folder


def measure(tree: Path, out: Path) -> str:
    """Write the report of a tree; return a line with its time, memory, page size and exit code."""
    start = time.perf_counter()
    program = subprocess.Popen(
        [PYTHON, '-m', 'mlperf_rn50', 'report', tree, '--out', out, '--format', 'html'],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    _, code, usage = os.wait4(program.pid, 0)
    wall = time.perf_counter() - start
    program.returncode = os.waitstatus_to_exitcode(code)
    pages = sum(p.stat().st_size for p in out.glob('report.html')) / 1e6
    return (
        f'wall {wall:7.1f} s  CPU {usage.ru_utime + usage.ru_stime:7.1f} s  largest '
        f'{usage.ru_maxrss / 1024:5.0f} MB  page {pages:5.1f} MB  exit code {program.returncode}'
    )


def main() -> None:
    for size in sys.argv[1:] or SIZES:
        num_systems, num_runs = map(int, size.split('x'))
        with tempfile.TemporaryDirectory() as folder:
            tree = write_tree(Path(folder) / 'synthetic', num_systems, num_runs)
            print(f'{size:>8s}  {measure(tree, Path(folder) / "report")}', flush=True)


if __name__ == '__main__':
    main()
