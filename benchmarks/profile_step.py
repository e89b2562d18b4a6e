"""Parts and operations of one training step of ours against each other, and their FLOP/s against the measured peak.

ResNet-50 v1.5, 224x224, batch 32, 2 threads, unless options of `mlperf-rn50 bench train` say otherwise.
Usage: .venv/bin/python benchmarks/profile_step.py PRECISION [OPTIONS]
The parts are those of `mlperf-rn50 bench train`; the operations are what oneDNN says of its own (DNNL_VERBOSE).
Floors: at the rate of the fastest matrix product or that of a copy in memory, by what is multiplied, read and written;
what lies in a cache can be faster. MXNet's own operations (casts, slices) have no row.
"""
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from compare import ENVIRONMENT, OURS, ROOT, of_precision

STEPS, WARMUP = 5, 2
NUM_STEPS = WARMUP + 2 * STEPS  # the bench takes as many apart as it times
# Passes over the tensor that the shape names, at least: a norm reads its input for the statistics, and again.
PASSES = {('batch_normalization', 'forward_training'): 3, ('batch_normalization', 'backward'): 5, ('sum', ''): 3,
          ('eltwise', 'forward_training'): 2, ('eltwise', 'backward_data'): 3, ('reorder', ''): 2,
          ('pooling_v2', 'forward_training'): 1.5, ('pooling_v2', 'backward_data'): 1.5}
CONVOLUTION = re.compile(r'mb(\d+)_ic(\d+)oc(\d+)_ih(\d+)oh(\d+)kh(\d+)sh(\d+).*_iw(\d+)ow(\d+)kw(\d+)')


def run_bench(precision: str, options: list[str]) -> tuple[dict, list[list[str]]]:
    """The row of the bench, and the fields of every oneDNN line."""
    command = [OURS, '-m', 'mlperf_rn50', 'bench', 'train', '--batch-sizes', '32', '--precisions', precision,
               *of_precision(precision), *options, '--warmup-steps', WARMUP, '--steps', STEPS, '--format', 'json']
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
    mb, ic, oc, _, oh, kh, _, _, ow, kw = map(int, found.groups())
    return 2 * math.prod((mb, ic, oc, oh, ow, kh, kw))


def copy_rate(num_bytes: int = 1 << 27, num_threads: int = 2) -> float:
    """Bytes a second that a copy reads and writes, the best of some. num_bytes: that each thread copies."""
    arrays = [(np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)) for _ in range(num_threads)]
    with ThreadPoolExecutor(num_threads) as pool:
        def seconds() -> float:
            start = time.perf_counter()
            list(pool.map(lambda pair: np.copyto(pair[1], pair[0]), arrays))
            return time.perf_counter() - start
        return 2 * num_threads * num_bytes / min(seconds() for _ in range(7))


def moved_bytes(primitive: str, direction: str, shape: str, sizes: list[int]) -> float:
    """Bytes that an operation reads and writes at least. sizes: bytes of an element of what it reads and writes."""
    if found := CONVOLUTION.match(shape):
        mb, ic, oc, ih, oh, kh, _, iw, ow, kw = map(int, found.groups())
        if primitive == 'convolution':
            return max(sizes) * (mb * ic * ih * iw + oc * ic * kh * kw + mb * oc * oh * ow)
    numbers = shape.split('x') if 'x' in shape else dict(re.findall(r'(mb|ic|ih|iw)(\d+)', shape)).values()
    elements = math.prod(map(int, numbers))
    return elements * (sum(sizes) if primitive == 'reorder' else PASSES.get((primitive, direction), 0) * max(sizes))


def floor_ms(operation: tuple[str, str, str], sizes: list[int], peak: float, copied: float) -> float:
    """Milliseconds that an operation on arrays in memory takes at least. peak: FLOP/s; copied: bytes/s."""
    primitive, _, shape = operation
    return 1000 * max(flops(primitive, shape) / peak, moved_bytes(*operation, sizes) / copied)


def per_step(milliseconds: list[float]) -> float:
    """What an operation takes in a step: the median, as the first step is slow, as often as it occurs."""
    return statistics.median(milliseconds) * len(milliseconds) / NUM_STEPS


def main() -> None:
    precision = sys.argv[1]
    row, said = run_bench(precision, sys.argv[2:])
    times: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    floors: dict[tuple[str, str], float] = defaultdict(float)
    copied = copy_rate()
    for fields in said:
        if 'mb2048ic2048oc2048' not in fields[9]:  # the products that the peak is measured with
            primitive, direction, shape = operation(fields)
            times[primitive, direction, shape].append(float(fields[-1]))
            sizes = [2 if kind == 'bf16' else 4 for kind in re.findall(r'_(bf16|f32)::', fields[6])]
            floors[primitive, direction] += floor_ms((primitive, direction, shape), sizes, 1e9 * row['peak_gflops'],
                                                     copied) / NUM_STEPS
    print(f'{precision}: step {row["step_ms"]:.0f} ms, {row["images_per_s"]:.1f} images/s; one after another: '
          + ', '.join(f'{p.replace("_", "-")} {row[f"{p}_ms"]:.1f} ms'
                      for p in ('data', 'forward', 'backward', 'all_reduce', 'update'))
          + f'; {row["gflops"]:.0f} of {row["peak_gflops"]:.0f} GFLOP/s, {100 * row["share_of_peak"]:.0f} % of peak')
    kinds: dict[tuple[str, str], float] = defaultdict(float)
    for (primitive, direction, _), values in times.items():
        kinds[primitive, direction] += per_step(values)
    print('\n| kind of operation | ms a step | floor |\n|---|---|---|')
    for kind, ms in sorted(kinds.items(), key=lambda k: -k[1])[:10]:
        print(f'| {" ".join(kind)} | {ms:.0f} | {floors[kind]:.0f} |')
    update = 1000 * 5 * 4 * row['num_parameters'] / copied  # reads weight, gradient and velocity, writes two of them
    least = sum(floors.values()) + update
    print(f'| update | {row["update_ms"]:.0f} | {update:.0f} |\n| all | {row["step_ms"]:.0f} | {least:.0f} |\n\n'
          f'copied: {copied / 1e9:.1f} GB/s read and written; all at their floors: '
          f'{100 * row["gflop_per_step"] / least / row["peak_gflops"] * 1000:.0f} % of peak')
    print('\n| operation | shape | times | ms a step | share of peak |\n|---|---|---|---|---|')
    for (primitive, direction, shape), values in sorted(times.items(), key=lambda k: -per_step(k[1]))[:10]:
        share = flops(primitive, shape) / statistics.median(values) * 1000 / 1e9 / row['peak_gflops']
        print(f'| {primitive} {direction} | {shape} | {len(values) / NUM_STEPS:.0f} | {per_step(values):.1f} | '
              f'{f"{100 * share:.0f} %" if share else "no multiply-adds"} |')


if __name__ == '__main__':
    main()
