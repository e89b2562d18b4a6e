"""Ours against torch: training digits to 74.9 %, run_start to run_stop; network, data, batch, precision the same.

The schedule and the momentum rule, too. Usage: .venv/bin/python benchmarks/digits.py [ROUNDS]    (runs to the target
per minute, so that more is better; 0 for one that does not reach it; 3 rounds unless said, each with its own seed)
"""
import sys
from collections.abc import Callable
from itertools import count

from compare import BOUND, ROOT, compare, train_ours, train_torch

CONFIG, ROUNDS = ROOT / 'launch/configs/digits_cpu.yaml', int((sys.argv[1:] or ['3'])[0])


def per_minute(train: Callable[[int], dict]) -> Callable[[], float]:
    """A side: trains with the next seed."""
    seeds = count()

    def measure() -> float:
        result = train(next(seeds))
        print(f'  {result["epochs"]} epochs, {result["time_to_train_s"]:.1f} s, Top-1 {result["top1"][-1]:.4f}',
              file=sys.stderr)
        return 60 / result['time_to_train_s'] if result['is_converged'] else 0.0
    return measure


compare('digits, one rank on 2 cores', {
    'mlperf-rn50': per_minute(lambda seed: train_ours(CONFIG, seed)),
    'torch eager': per_minute(lambda seed: train_torch(CONFIG, seed, **BOUND)),
    'torch compiled': per_minute(lambda seed: train_torch(CONFIG, seed, '--compile', **BOUND)),
    '(mlperf-rn50, 2 ranks x 1 core)': per_minute(lambda seed: train_ours(CONFIG, seed, ranks=2))}, ROUNDS, 1.25)
