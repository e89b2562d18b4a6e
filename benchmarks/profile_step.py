"""Parts and operations of one training step of ours against each other, and their FLOP/s against the measured peak.

ResNet-50 v1.5, 224x224, batch 32, 2 threads.
Usage: python benchmarks/profile_step.py PRECISION
The parts are those of `mlperf-rn50 bench train`; the operations are what oneDNN says of its own (DNNL_VERBOSE).
"""
import json
import math
import os
import re
import statistics
import subprocess
import sys
from collections import defaultdict

from compare import ENVIRONMENT, OURS, ROOT

STEPS, WARMUP = 5, 2
NUM_STEPS = WARMUP + 2 * STEPS  # the bench takes as many apart as it times
CONVOLUTION = re.compile(r'mb(\d+)_ic(\d+)oc(\d+)_ih\d+oh(\d+)kh(\d+)sh(\d+).*_iw\d+ow(\d+)kw(\d+)')


def run_bench(precision: str) -> tuple[dict, list[list[str]]]:
    """The row of the bench, and the fields of every oneDNN line."""
    command = [OURS, '-m', 'mlperf_rn50', 'bench', 'train', '--batch-sizes', '32', '--precisions', precision,
               '--warmup-steps', WARMUP, '--steps', STEPS, '--format', 'json', '--model.fused_bn_relu', 'true',
               '--data.pad_to_4_channels', 'true' if precision == 'bfloat16' else 'false']
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, cwd=ROOT, check=True,
                          env={**os.environ, **ENVIRONMENT, 'DNNL_VERBOSE': '1'})
    lines = done.stdout.splitlines()
    said = [line.split(',') for line in lines if line.startswith('dnnl_verbose,exec,')]
    rest = '\n'.join(line for line in lines if not line.startswith('dnnl_verbose'))
    return json.loads(rest[rest.index('{'):])['tables'][0]['rows'][0], said


def operation(fields: list[str]) -> tuple[str, str, str]:
    """Primitive, direction and shape."""
    return fields[3], fields[5].replace('undef', ''), fields[9]


def flops(primitive: str, shape: str) -> int:
    found = CONVOLUTION.match(shape) if primitive == 'convolution' else None
    if not found:
        return 0
    mb, ic, oc, oh, kh, _, ow, kw = map(int, found.groups())
    return 2 * math.prod((mb, ic, oc, oh, ow, kh, kw))


def per_step(milliseconds: list[float]) -> float:
    """What an operation takes in a step: the median, as the first step is slow, as often as it occurs."""
    return statistics.median(milliseconds) * len(milliseconds) / NUM_STEPS


def main() -> None:
    precision = sys.argv[1]
    row, said = run_bench(precision)
    times: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for fields in said:
        if 'mb2048ic2048oc2048' not in fields[9]:  # the products that the peak is measured with
            times[operation(fields)].append(float(fields[-1]))
    print(f'{precision}: step {row["step_ms"]:.0f} ms, {row["images_per_s"]:.1f} images/s; one after another: '
          + ', '.join(f'{p.replace("_", "-")} {row[f"{p}_ms"]:.1f} ms'
                      for p in ('data', 'forward', 'backward', 'all_reduce', 'update'))
          + f'; {row["gflops"]:.0f} of {row["peak_gflops"]:.0f} GFLOP/s, {100 * row["share_of_peak"]:.0f} % of peak')
    kinds: dict[tuple[str, str], float] = defaultdict(float)
    for (primitive, direction, _), values in times.items():
        kinds[primitive, direction] += per_step(values)
    print('\n| kind of operation | ms a step |\n|---|---|')
    for (primitive, direction), ms in sorted(kinds.items(), key=lambda k: -k[1])[:10]:
        print(f'| {primitive} {direction} | {ms:.0f} |')
    print('\n| operation | shape | times | ms a step | share of peak |\n|---|---|---|---|---|')
    for (primitive, direction, shape), values in sorted(times.items(), key=lambda k: -per_step(k[1]))[:10]:
        share = flops(primitive, shape) / statistics.median(values) * 1000 / 1e9 / row['peak_gflops']
        print(f'| {primitive} {direction} | {shape} | {len(values) / NUM_STEPS:.0f} | {per_step(values):.1f} | '
              f'{f"{100 * share:.0f} %" if share else "no multiply-adds"} |')


if __name__ == '__main__':
    main()
