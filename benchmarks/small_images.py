"""Images/s of CIFAR-10 steps: as launch/configs/cifar10_cpu.yaml trains, and with one thing otherwise, in turn.

Usage: .venv/bin/python benchmarks/small_images.py PRECISION [ROUNDS]
"""
import sys

from compare import ROOT, compare, of_precision, run_json

PRECISION, ROUNDS = sys.argv[1], int((sys.argv[2:] or ['3'])[0])
# Ranks, images per rank, options and variables of each.
VARIANTS: dict[str, tuple[int, int, tuple[str, ...], dict[str, str]]] = {
    'batch 128, real images': (1, 128, (), {}),
    'batch 64': (1, 64, (), {}),
    'batch 256': (1, 256, (), {}),
    'batch 512': (1, 512, (), {}),
    '2 ranks of a core, 64 images each': (2, 64, (), {'OMP_NUM_THREADS': '1'}),
    'synthetic images': (1, 128, ('--inputs', 'synthetic'), {}),
    '2 DALI threads': (1, 128, ('--data.num_threads', '2'), {}),
    'without huge pages': (1, 128, (), {'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=0'}),
    'BatchNorm and ReLU apart': (1, 128, ('--model.fused_bn_relu', 'false'), {}),
    'momentum that is not Nesterov\'s': (1, 128, ('--optimizer.nesterov', 'false'), {}),
}
if PRECISION == 'bfloat16':
    VARIANTS['three channels'] = (1, 128, ('--data.pad_to_4_channels', 'false'), {})


def rate(num_ranks: int, size: int, options: tuple[str, ...], variables: dict[str, str]) -> float:
    command = [ROOT / 'launch/ranks.sh', num_ranks, ROOT / '.venv/bin/mlperf-rn50', 'bench', 'train', '--config',
               ROOT / 'launch/configs/cifar10_cpu.yaml', '--precisions', PRECISION, '--batch-sizes', size, '--inputs',
               'real', '--warmup-steps', 3, '--steps', 12, *of_precision(PRECISION), *options, '--format', 'json']
    return run_json(command, **variables)['tables'][0]['rows'][0]['images_per_s']


compare(f'CIFAR-10, images/s of training, {PRECISION}, as it is and the fastest otherwise',
        {name: lambda how=how: rate(*how) for name, how in VARIANTS.items()}, ROUNDS)  # type: ignore[misc]
