"""Our training step against torch's, eager and compiled: ResNet-50 v1.5, 224x224, batch 32, 2 threads; images/s.

Usage: python benchmarks/step.py PRECISION
"""
import sys

from compare import HUGE_PAGES, PEER, TORCH, bench, compare, of_precision, run_json

precision = sys.argv[1]
options = ['--precisions', precision, '--batch-sizes', 32, '--warmup-steps', 2, '--steps', 5,
           *of_precision(precision)]


def torch_rate(*more: str, **variables: str) -> float:
    return run_json([TORCH, PEER, 'step', '--precision', precision, '--steps', 5, *more], **variables)['images_per_s']


sides = {'mlperf-rn50 bench train': lambda: bench('train', *options)[0]['images_per_s'], 'torch eager': torch_rate,
         'torch compiled': lambda: torch_rate('--compile')}
if precision == 'bfloat16':
    sides['(torch compiled, with huge pages)'] = lambda: torch_rate('--compile', **HUGE_PAGES)
compare(f'training step, {precision}', sides, rounds=3, target={'float32': 1.5, 'bfloat16': 1.25}[precision])
