"""Ours against other programs, in turn: medians, and their ratio to the fastest; what every comparison here calls."""
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS, TORCH = ROOT / '.venv/bin/python', ROOT / 'benchmarks/.venv/bin/python'
PEER = ROOT / 'benchmarks/torch_peer.py'
# As the launchers set it.
HUGE_PAGES = {'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1'}
ENVIRONMENT = {'OMP_NUM_THREADS': '2', **HUGE_PAGES}


def run_json(command: Sequence[object], **variables: str) -> dict:
    """The JSON object that a program prints, on 2 threads."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, cwd=ROOT,
                          env={**os.environ, 'OMP_NUM_THREADS': '2', **variables})
    if done.returncode:
        sys.exit(f'{" ".join(map(str, command))}: exit code {done.returncode}\n{done.stderr[-2000:]}')
    return json.loads(done.stdout[done.stdout.index('{'):])


def bench(*arguments: object) -> list[dict]:
    """The rows of the first table of `mlperf-rn50 bench`."""
    command = [ROOT / 'launch/bind.sh', OURS, '-m', 'mlperf_rn50', 'bench', *arguments, '--format', 'json']
    return run_json(command, **ENVIRONMENT)['tables'][0]['rows']


def compare(title: str, sides: dict[str, Callable[[], float]], rounds: int, target: float) -> None:
    """Measures every side `rounds` times in turn. The first is ours; it is compared with the fastest of the others.

    Those in brackets are shown with their own ratio, and not compared with.
    """
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, measure in sides.items():
            found[name].append(measure())
            print(f'round {number + 1}  {name:32s} {found[name][-1]:10.2f}', file=sys.stderr, flush=True)
    medians = {name: statistics.median(values) for name, values in found.items()}
    ours = next(iter(medians.values()))
    for name, median in medians.items():
        print(f'{name:34s} median {median:10.2f}  of {" ".join(f"{v:.2f}" for v in found[name])}  {ours / median:.3f}')
    best = max(list(v for n, v in medians.items() if not n.startswith('('))[1:])
    print(f'{title}: ratio {ours / best:.3f}, wanted {target}', flush=True)
