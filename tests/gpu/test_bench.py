"""Speed of steps on all GPUs, input and exchange. The tests do not check speeds; the figures are in
results.jsonl."""

import json
import re

import pytest
from gpu.conftest import IS_DRY
from gpu.pictures import pictures_config
from helpers import CLI, ROOT, run, under_ranks

CONFIG = ROOT / 'tests/gpu/resnet50.yaml'
SMALL = [
    '--model.name=resnet18',
    '--data.image_size=32',
    '--data.resize_shorter=32',
    '--train.device=cpu',
    '--train.precision=float32',
]
# The first batch that fits is measured: batches of the recipes for 80, 40 and 16 GB, and a smaller
# one.
BATCHES = [2] if IS_DRY else [408, 208, 128, 64]
FOR_TWO = BATCHES[-2:]  # for two ranks on a GPU


def options(num_warmup=20, num=100):
    num_warmup, num, small = (0, 2, SMALL) if IS_DRY else (num_warmup, num, [])
    return [
        '--config',
        CONFIG,
        '--format',
        'json',
        '--warmup-steps',
        num_warmup,
        '--steps',
        num,
        *small,
    ]


def tables_of(done) -> list[dict]:
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)['tables']


def bench_train(num_ranks, batches, *words):
    """Return the tables of bench train with the first batch that fits."""
    for batch in batches:
        done = run(
            under_ranks(
                num_ranks, [*CLI, 'bench', 'train', '--batch-sizes', batch, *options(), *words]
            )
        )
        if not re.search('out of memory|cudamalloc', done.stderr, re.IGNORECASE):
            break
    return tables_of(done)


def test_training_steps_on_all_gpus(ranks_per_device, num_ranks, figure):
    batches, words = (
        (BATCHES, ['--ranks', f'1,{num_ranks}']) if ranks_per_device == 1 else (FOR_TWO, [])
    )
    tables = bench_train(num_ranks, batches, '--run.ranks_per_device', ranks_per_device, *words)
    row = tables[0]['rows'][-1]
    what = f'bench train, synthetic images, {num_ranks} ranks, {ranks_per_device} on a GPU'
    figure(what, row['images_per_s'] / num_ranks * ranks_per_device, 'images/s per GPU')
    figure(
        f'{what}: share of a step spent waiting for the exchange',
        row['all_reduce_ms'] / row['step_ms'],
        'fraction',
    )
    if ranks_per_device == 1:
        figure(f'{what}: scaling efficiency', tables[1]['rows'][-1]['efficiency'], 'fraction')
    assert row['num_ranks'] == num_ranks


@pytest.mark.parametrize('decoder', ['cpu', 'mixed'])
def test_input_pipeline(decoder, pictures, figure):
    data = pictures_config(pictures).data
    words = {
        **{
            key: getattr(data, key)
            for key in ('dir', 'dataset', 'num_train', 'num_val', 'num_classes')
        },
        'synthetic': 'false',
        'decoder': decoder,
        'prefetch_depth': 3,
        'crop': 'random_resized',
        'read_threads': 4,
    }
    done = run(
        [
            *CLI,
            'bench',
            'data',
            '--caches',
            'warm',
            '--threads',
            '2' if IS_DRY else '4,8',
            '--batch-sizes',
            '8' if IS_DRY else '208',
            *options(10, 50),
            *(f'--data.{k}={v}' for k, v in words.items()),
        ]
    )
    rows = tables_of(done)[0]['rows']
    for row in rows:
        what = f'bench data, decoder {decoder}, {row["num_threads"]} threads'
        figure(what, row['images_per_s'], 'images/s per rank')
        figure(f'{what}: bytes of a record', row['record_bytes'], 'bytes')
    assert all(row['images_per_s'] > 0 for row in rows)


def test_allreduce(num_gpus, figure):
    if num_gpus < 2:
        pytest.skip('needs two ranks')
    done = run(
        under_ranks(
            num_gpus, [*CLI, 'bench', 'allreduce', '--batch-sizes', BATCHES[-1], *options(5, 20)]
        )
    )
    sizes, [grads] = (t['rows'] for t in tables_of(done))
    for row in (sizes[0], sizes[len(sizes) // 2], sizes[-1]):
        figure(
            f'bench allreduce, {num_gpus} ranks, {row["bytes"]:,} bytes',
            row['bus_gb_per_s'],
            'bus GB/s',
        )
    figure(f'bench allreduce, {num_gpus} ranks: the gradients of a step', grads['time_ms'], 'ms')
    figure(
        f'bench allreduce, {num_gpus} ranks: their share of a step',
        grads['measured_share'],
        'fraction',
    )
    assert grads['bytes'] > 0
