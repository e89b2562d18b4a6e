"""How long training stands still for a checkpoint. Usage: python benchmarks/stall.py [CHECKOUT...]

ResNet-50 at 64x64 on made-up images, one rank with 2 threads, a checkpoint (204 MB) every 10 of 128 steps; the stall
is the time between the steps around a checkpoint less the usual one. Other checkouts take turns with this one.
"""
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from compare import ENVIRONMENT, OURS, ROOT

KEYS = {'data.synthetic': 'true', 'data.num_train': 4096, 'data.num_val': 64, 'data.image_size': 64,
        'data.resize_shorter': 64, 'train.local_batch_size': 32, 'train.max_epochs': 1, 'schedule.warmup_epochs': 0,
        'run.metrics_period_steps': 1, 'checkpoint.period_steps': 10, 'checkpoint.period_epochs': 0}


def stalls_s(checkout: Path) -> list[float]:
    """Seconds that each checkpoint of a run took from its training."""
    with tempfile.TemporaryDirectory(dir=ROOT / 'logs') as folder:
        options = [f'--{k}={v}' for k, v in KEYS.items()]
        command = [OURS, '-m', 'mlperf_rn50', 'train', *options, f'--run.dir={folder}']
        subprocess.run(command, cwd=checkout, env={**os.environ, **ENVIRONMENT, 'PYTHONPATH': str(checkout)},
                       capture_output=True, check=False)
        lines = [json.loads(line) for line in (Path(folder) / 'metrics.jsonl').read_text().splitlines()]
    at = {m['step']: m['time_s'] for m in lines if m['event'] == 'train'}
    usual = statistics.median(at[s] - at[s - 4] for s in range(18, max(at), 10))  # no checkpoint among these
    return [at[s + 2] - at[s - 2] - usual for s in range(20, max(at) - 5, 10)]


def main(checkouts: list[Path]) -> None:
    found: dict[Path, list[float]] = {c: [] for c in checkouts}
    for _ in range(2):
        for checkout in checkouts:
            found[checkout] += stalls_s(checkout)
    for checkout, values in found.items():
        print(f'{checkout.name:20s} stall per checkpoint: median {statistics.median(values):.2f} s, '
              f'{min(values):.2f} to {max(values):.2f} s, n = {len(values)}')


if __name__ == '__main__':
    main([ROOT, *(Path(p).resolve() for p in sys.argv[1:])])
