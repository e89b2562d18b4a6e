"""The share of the matrix-product peak that a training step reaches, %: ours and a checkout of 0.4.0, in turn.

ResNet-50 v1.5, 224x224, batch 32, 2 threads; the peak is that of the same process.
Usage: python3.11 benchmarks/shares.py PRECISION CHECKOUT [ROUNDS]
"""
import sys
from pathlib import Path

from compare import bench, compare, of_precision

precision, old = sys.argv[1], Path(sys.argv[2]).resolve()
options = ['--precisions', precision, '--batch-sizes', 32, '--warmup-steps', 2, '--steps', 5,
           *of_precision(precision)]


def share(**checkout: Path) -> float:
    row = bench('train', *options, **checkout)[0]
    print(f'  {row["images_per_s"]:.2f} images/s, {row["gflops"]:.0f} of {row["peak_gflops"]:.0f} GFLOP/s',
          file=sys.stderr)
    return 100 * row['share_of_peak']


compare(f'share of peak, {precision}, %; of which 72 (float32) and 78 (bfloat16) were wanted',
        {'mlperf-rn50': share, '0.4.0': lambda: share(checkout=old)}, int((sys.argv[3:] or ['3'])[0]))
