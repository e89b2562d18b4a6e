"""Two ranks on a core each against two single-core runs at the same time, ResNet-50 v1.5, 224x224, batch 32, float32.

Usage: python benchmarks/weak_scaling.py
"""
import json
import os
import subprocess
import sys

from compare import ENVIRONMENT, OURS, ROOT, compare

BENCH = [str(OURS), '-m', 'mlperf_rn50', 'bench', 'train', '--batch-sizes', '32', '--warmup-steps', '2', '--steps', '6',
         '--model.fused_bn_relu', 'true', '--format', 'json']
VARIABLES = {**os.environ, **ENVIRONMENT, 'OMP_NUM_THREADS': '1'}


def rates(commands: list[list[str]]) -> list[float]:
    """Images/s of programs that run at the same time."""
    running = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=VARIABLES)
               for c in commands]
    found = []
    for program in running:
        out, err = program.communicate()
        if program.returncode:
            sys.exit(err[-2000:])
        found.append(json.loads(out[out.index('{'):])['tables'][0]['rows'][0]['images_per_s'])
    return found


compare('weak scaling', {
    '2 ranks x 1 core': lambda: rates([['launch/ranks.sh', '2', *BENCH]])[0],
    '2 independent runs on a core each': lambda: sum(rates([['taskset', '-c', str(i), *BENCH] for i in (0, 1)]))},
    rounds=3, target=0.92)
