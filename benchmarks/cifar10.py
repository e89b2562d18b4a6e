"""Compare the two recipes of benchmarks/cifar10.md, which shows the results (takes hours).

Usage: .venv/bin/python benchmarks/cifar10.py target [RUNS [FOLDER]]

Trains ResNet-50 on CIFAR-10 with cifar10_cpu.yaml and cifar10_open.yaml in turn, until FOLDER
(default logs/run/cifar10_target) has RUNS complete runs of each (default 5). Prints both sides and
the ratio of their median times. An interrupted comparison continues.
"""

import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

from compare import ROOT, ended_runs, local_command, top1_of_epochs

SIDES = ('cifar10_cpu', 'cifar10_open')


def train(side: str, folder: Path, number: int) -> None:
    """Train with one rank on all cores until the folder has a number of complete runs."""
    resume = ['--resume'] if folder.exists() else []
    config = f'launch/configs/{side}.yaml'
    # fails for a run that misses its target
    subprocess.run(local_command(config, folder, '--seeds', number, *resume))
    if not ended_runs(folder):
        sys.exit(f'{folder}: no complete run')


def median_s(side: str, folder: Path) -> float:
    """Print the runs of a side; return the median of their times."""
    runs = ended_runs(folder)
    times = [lines[-1].get('time_to_train_s', math.inf) for lines in runs]  # inf: it failed
    median = statistics.median(times)
    num_reached = sum(lines[-1]['status'] == 'converged' for lines in runs)
    texts = [
        f'{time_s:,.0f} ({100 * (top1_of_epochs(lines) or [0.0])[-1]:.2f} %)'
        for time_s, lines in zip(times, runs)
    ]
    print(f'{side:13s} {num_reached} of {len(runs)} runs reached the target')
    print(f'{"":13s} median {median:,.0f} s of {", ".join(texts)}')
    return median


def target(num_runs: int, folder: Path) -> None:
    for number in range(1, num_runs + 1):
        for side in SIDES:
            if len(ended_runs(folder / side)) < number:
                train(side, folder / side, number)
    first_s, second_s = (median_s(side, folder / side) for side in SIDES)
    print(f'ratio of the medians {second_s / first_s:.3f}')


def main(words: list[str]) -> None:
    os.chdir(ROOT)
    match words:
        case ['target', *more] if len(more) < 3:
            num_runs, folder = [*more, *('5', 'logs/run/cifar10_target')[len(more) :]]
            target(int(num_runs), Path(folder))
        case _:
            sys.exit(__doc__)


if __name__ == '__main__':
    main(sys.argv[1:])
