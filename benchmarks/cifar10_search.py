"""Try a recipe on part of CIFAR-10: train on 20,000 of the training images, and evaluate on 5,000 others.

Train for 4 epochs with launch/configs/cifar10_cpu.yaml and the given options, in bfloat16, which needs about as many
epochs as float32. The official validation images are not used.
Usage: .venv/bin/python benchmarks/cifar10_search.py NAME [OPTIONS of mlperf-rn50 train]    (run folder: logs/run/NAME)
"""
import os
import subprocess
import sys
from dataclasses import replace

from compare import HUGE_PAGES, PYTHON, ROOT, read_metrics

from mlperf_rn50.data.prepare.cifar10 import cifar10
from mlperf_rn50.data.prepare.command import pack

DATA, RUNS = ROOT / 'data/cifar10_part', ROOT / 'logs/run'
NUM_TRAIN, NUM_HELD = 20_000, 5_000
OPTIONS = {'data.dir': DATA, 'data.num_train': NUM_TRAIN, 'data.num_val': NUM_HELD, 'data.pad_to_4_channels': 'true',
           'train.precision': 'bfloat16', 'train.target_accuracy': 1, 'train.max_epochs': 4, 'train.eval_period': 4,
           'train.eval_offset': 3, 'schedule.decay_epochs': 4, 'schedule.warmup_epochs': 0.8,
           'checkpoint.period_epochs': 0}


def prepare() -> None:
    """Pack the training and evaluation images into DATA unless DATA exists."""
    if not (DATA / 'manifest.json').exists():
        whole = cifar10(None)
        DATA.mkdir(parents=True, exist_ok=True)
        pack(replace(whole, train=whole.train[:NUM_TRAIN], validation=whole.train[-NUM_HELD:]), DATA)


def main(name: str, options: list[str]) -> None:
    if (RUNS / name).exists():
        sys.exit(f'{RUNS / name} exists; choose a different name')
    prepare()
    given = [word for key, value in OPTIONS.items() for word in (f'--{key}', str(value))]
    command = [PYTHON, '-m', 'mlperf_rn50', 'train', '--config', 'launch/configs/cifar10_cpu.yaml', '--run.dir',
               RUNS / name, *given, *options]
    done = subprocess.run([str(c) for c in command], cwd=ROOT, env={**os.environ, **HUGE_PAGES})
    lines = read_metrics(RUNS / name)
    if lines[-1].get('status') != 'aborted':  # a complete run aborts, because it cannot reach the target of 100 %
        sys.exit(done.returncode or 1)
    top1 = next(m['num_top1'] / m['num_images'] for m in reversed(lines) if m['event'] == 'eval')
    print(f'{name}: Top-1 {100 * top1:.2f} % of {NUM_HELD} held-out images, {lines[-1]["images_per_s"]:.0f} images/s')


if __name__ == '__main__':
    main(sys.argv[1], sys.argv[2:])
