"""CIFAR-10 to 74.9 %: ours, torch (eager and compiled) and 0.4.0 with its own recipe, in turn.

torch trains by our configuration: the same network, batch, schedule, augmentation and momentum rule. Both evaluate
after every epoch. Neither clock holds the making of the network, what the first step and evaluation compile or choose,
or the reading of the arrays; ours goes from run_start to run_stop.

Usage: .venv/bin/python benchmarks/cifar10.py rate [OPTIONS]      images/s of training, some steps of each side a round
       .venv/bin/python benchmarks/cifar10.py target [OPTIONS]    whole runs: epochs, Top-1, seconds; hours
"""
import argparse
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from compare import BOUND, ROOT, bench, compare, of_precision, train_ours, train_torch

CONFIG = Path('launch/configs/cifar10_cpu.yaml')
WARMUP_STEPS, STEPS = 3, 12
OURS, OLD = 'mlperf-rn50', '(mlperf-rn50 0.4.0)'
# Variables and options of torch's sides: what its users may set without another library.
TORCH_SIDES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    'torch eager': ((), {}), 'torch compiled': (('--compile',), {}),
    'torch eager, huge pages, bound': ((), BOUND), 'torch compiled, huge pages, bound': (('--compile',), BOUND)}
TO_TARGET = [name for name, (_, variables) in TORCH_SIDES.items() if variables]


def our_rate(precision: str, checkout: Path = ROOT) -> float:
    return bench('train', '--config', checkout / CONFIG, '--inputs', 'real', '--precisions', precision,
                 '--batch-sizes', 128, '--warmup-steps', WARMUP_STEPS, '--steps', STEPS, *of_precision(precision),
                 checkout=checkout)[0]['images_per_s']


def torch_rate(precision: str, options: tuple[str, ...], variables: dict[str, str]) -> float:
    return train_torch(ROOT / CONFIG, 0, '--precision', precision, '--warmup-steps', WARMUP_STEPS, '--steps',
                       STEPS, *options, **variables)['images_per_s']


def rates(precision: str, rounds: int, old: Path | None) -> None:
    sides: dict[str, Callable[[], float]] = {OURS: lambda: our_rate(precision)}
    for name, how in TORCH_SIDES.items():
        sides[name] = lambda how=how: torch_rate(precision, *how)  # type: ignore[misc]
    if old:
        sides[OLD] = lambda: our_rate(precision, old)
    compare(f'CIFAR-10, images/s of training, {precision}', sides, rounds, 1.25)


def targets(precision: str, seeds: list[int], old: Path | None, wanted: list[str]) -> None:
    ours = ('--train.precision', precision, *of_precision(precision))
    sides: dict[str, Callable[[int], dict]] = {OURS: lambda seed: train_ours(ROOT / CONFIG, seed, *ours)}
    for name in TO_TARGET:
        options, variables = TORCH_SIDES[name]
        sides[name] = lambda seed, options=options, variables=variables: train_torch(  # type: ignore[misc]
            ROOT / CONFIG, seed, '--precision', precision, *options, **variables)
    if old:
        sides[OLD] = lambda seed: train_ours(old / CONFIG, seed, *ours, checkout=old)
    sides = {name: run for name, run in sides.items() if not wanted or name in wanted}
    found: dict[str, list[dict]] = {name: [] for name in sides}
    for seed in seeds:
        for name, run in sides.items():
            last = run(seed)
            found[name].append(last)
            print(f'seed {seed}  {name:34s} {last["epochs"]} epochs, {last["time_to_train_s"]:7.1f} s, Top-1 '
                  + ' '.join(f'{100 * t:.2f}' for t in last['top1']), file=sys.stderr, flush=True)
    medians = {name: statistics.median(r['time_to_train_s'] if r['is_converged'] else math.inf for r in runs)
               for name, runs in found.items()}
    for name, seconds in medians.items():
        epochs = ', '.join(str(r['epochs']) if r['is_converged'] else 'not reached' for r in found[name])
        ratio = f'; ours takes {medians[OURS] / seconds:.3f} of it' if OURS in medians else ''
        print(f'{name:34s} median {seconds:7.1f} s; epochs {epochs}{ratio}')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('what', choices=['rate', 'target'])
    parser.add_argument('--precision', choices=['float32', 'bfloat16'], default='float32')
    parser.add_argument('--rounds', type=int, default=3, help='of rate (default 3)')
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2], help='of target (default 0 1 2)')
    parser.add_argument('--old', type=lambda p: Path(p).resolve(), help='a checkout of 0.4.0, with .venv and data')
    parser.add_argument('--sides', nargs='+', default=[], choices=[OURS, *TO_TARGET, OLD],
                        help='of target: these alone, where hours lack')
    options = parser.parse_args()
    if OLD in options.sides and not options.old or options.what == 'rate' and options.sides:
        parser.error('--sides: of target, and 0.4.0 with --old')
    if options.what == 'rate':
        rates(options.precision, options.rounds, options.old)
    else:
        targets(options.precision, options.seeds, options.old, options.sides)


if __name__ == '__main__':
    main()
