"""Train ResNet-50 on CIFAR-10 with the recipes of benchmarks/cifar10.md, which shows the results.

Usage: .venv/bin/python benchmarks/cifar10.py COMMAND    (run folders: logs/run/...; takes hours)
  target [RUNS [FOLDER]]  train with cifar10_cpu.yaml and cifar10_open.yaml in turn, until FOLDER
                          (default logs/run/cifar10_target) has RUNS complete runs of each (default
                          5); print both sides and the ratio of their median times. An interrupted
                          comparison continues.
  long SIDE EPOCHS [OPTIONS]
                          train with cifar10_cpu or cifar10_open, stretched to EPOCHS and evaluated
                          at the end; print Top-1 with and without mirror images
  trial NAME [OPTIONS]    train on 45,000 of the training images with cifar10_open.yaml; print Top-1
                          of the others. It does not use the official validation images.
OPTIONS are those of mlperf-rn50 train.
"""

import json
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from compare import ROOT, load_recipe, local_command, top1_of_epochs

from mlperf_rn50.data.prepare.cifar10 import cifar10
from mlperf_rn50.data.prepare.pack import pack

CONFIGS, RUNS = Path('launch/configs'), Path('logs/run')
SIDES = ('cifar10_cpu', 'cifar10_open')
PART, NUM_TRAIN, NUM_HELD = ROOT / 'data/cifar10_45k', 45_000, 5_000


def train(config: str, folder: Path, *options: object) -> None:
    """Train with one rank on all cores; end the program if the run does."""
    # fails for a run that misses its target
    subprocess.run(local_command(CONFIGS / f'{config}.yaml', folder, *options))
    if not ends(folder):
        sys.exit(f'{folder}: no complete run')


def ends(folder: Path) -> list[dict]:
    """Return the last record and the last Top-1 of each complete run in a folder."""
    texts = [path.read_text() for path in sorted(folder.glob('metrics*.jsonl'))]
    read = [[json.loads(line) for line in text.splitlines()] for text in texts]
    return [
        {**lines[-1], 'top1': top1_of_epochs(lines)[-1]}
        for lines in read
        if lines and lines[-1]['event'] == 'end'
    ]


def target(num_runs: int, folder: Path) -> None:
    for number in range(1, num_runs + 1):
        for side in SIDES:
            if len(ends(folder / side)) < number:
                resume = ['--resume'] if (folder / side).exists() else []
                train(side, folder / side, '--seeds', number, *resume)
    medians = []
    for side in SIDES:
        runs = ends(folder / side)
        times = [r['time_to_train_s'] for r in runs]
        medians.append(statistics.median(times))
        num_reached = sum(r['status'] == 'converged' for r in runs)
        print(
            f'{side:13s} {num_reached} of {len(runs)} runs reached the target; median '
            f'{medians[-1]:,.0f} s of '
            + ', '.join(f'{t:,.0f} ({100 * r["top1"]:.2f} %)' for t, r in zip(times, runs))
        )
    print(f'ratio of the medians {medians[1] / medians[0]:.3f}')


def long(side: str, epochs: str, options: list[str]) -> None:
    folder = RUNS / f'{side}_{epochs}_epochs'
    recipe = load_recipe(CONFIGS / f'{side}.yaml')
    warmup = recipe['schedule']['warmup_epochs'] * int(epochs) / recipe['schedule']['decay_epochs']
    stretched = f'--schedule.decay_epochs={epochs} --schedule.warmup_epochs={warmup}'
    at_the_end = f'--train.eval_period={epochs} --train.eval_offset={int(epochs) - 1}'
    words = f'{stretched} {at_the_end} --train.target_accuracy=1'.split()
    train(side, folder, *words, *options)
    [run] = ends(folder)
    top1 = []
    for flip in ('true', 'false'):
        words = ['evaluate', str(folder), '--data.eval_flip', flip, '--format', 'json']
        done = subprocess.run(
            [sys.executable, '-m', 'mlperf_rn50', *words], capture_output=True, text=True
        )
        top1.append(f'{100 * json.loads(done.stdout)["top1"]:.2f} %')
    print(
        f'{side}, {epochs} epochs, {run["images_per_s"]:.0f} images/s: Top-1 {top1[0]} with mirror '
        f'images, {top1[1]} without'
    )


def trial(name: str, options: list[str]) -> None:
    if (RUNS / name).exists():
        sys.exit(f'{RUNS / name} exists; choose a different name')
    if not (PART / 'manifest.json').exists():
        whole = cifar10(None)
        PART.mkdir(parents=True, exist_ok=True)
        pack(
            replace(whole, train=whole.train[:NUM_TRAIN], validation=whole.train[-NUM_HELD:]), PART
        )
    sizes = f'--data.num_train={NUM_TRAIN} --data.num_val={NUM_HELD} --train.target_accuracy=1'
    train('cifar10_open', RUNS / name, '--data.dir', PART, *sizes.split(), *options)
    [run] = ends(RUNS / name)
    top1, rate = 100 * run['top1'], run['images_per_s']
    print(f'{name}: Top-1 {top1:.2f} % of {NUM_HELD:,} held-out images, {rate:.0f} images/s')


def main(words: list[str]) -> None:
    os.chdir(ROOT)
    match words:
        case ['target', *more] if len(more) < 3:
            num_runs, folder = [*more, *('5', RUNS / 'cifar10_target')[len(more) :]]
            target(int(num_runs), Path(folder))
        case ['long', ('cifar10_cpu' | 'cifar10_open') as side, epochs, *options]:
            long(side, epochs, options)
        case ['trial', name, *options]:
            trial(name, options)
        case _:
            sys.exit(__doc__)


if __name__ == '__main__':
    main(sys.argv[1:])
