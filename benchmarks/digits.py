"""Ours against torch: training digits to 74.9 %, run_start to run_stop; network, data, batch, precision the same.

The schedule, too. Usage: python benchmarks/digits.py    (rates: runs per minute, so that more is better)
"""
import json
import subprocess
import sys
import tempfile
from itertools import count
from pathlib import Path

from compare import PEER, ROOT, TORCH, compare, run_json

SEEDS = {name: count() for name in ('two', 'one', 'torch')}


def ours(ranks: int, seeds) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = ['launch/local.sh', '--ranks-per-node', str(ranks), '--config', 'launch/configs/digits_cpu.yaml',
                   '--run-dir', folder, '--run.seed', str(next(seeds))]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        end = json.loads((Path(folder) / 'metrics.jsonl').read_text().splitlines()[-1])
    print(f'  {ranks} ranks: {end["epochs_to_converge"]} epochs, {end["time_to_train_s"]:.1f} s', file=sys.stderr)
    return 60 / end['time_to_train_s']


def torch_rate() -> float:
    end = run_json([TORCH, PEER, 'digits', '--seed', next(SEEDS['torch'])])
    print(f'  torch: {end["epochs"]} epochs, {end["time_to_train_s"]:.1f} s, Top-1 {end["top1"]:.4f}', file=sys.stderr)
    return 60 / end['time_to_train_s']


compare('digits, one rank with 2 threads', {'mlperf-rn50, 1 rank': lambda: ours(1, SEEDS['one']),
                                            'torch eager': torch_rate}, 3, 2)
compare('digits demo, 2 ranks', {'mlperf-rn50, 2 ranks': lambda: ours(2, SEEDS['two']),
                                 'torch eager': torch_rate}, 3, 2)
