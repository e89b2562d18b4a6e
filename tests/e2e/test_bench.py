"""Bench commands and the benchmark scripts cited in the docs, with minimal workloads."""

import json
import os
import shlex
import sys
import tarfile

import pytest
from helpers import CLI, ROOT, call, run, under_ranks, write_files

from mlperf_rn50.bench import operators

SHORT = '--format json --warmup-steps 0 --steps 1 --comm.stall_limit_s 900'
SMALL = f'{SHORT} --model.name resnet18 --data.image_size 32 --data.resize_shorter 32'


@pytest.fixture(autouse=True)
def small_products(monkeypatch):
    monkeypatch.setattr(operators, 'GEMM_SIDES', (256, 512))


def bench(words, num_ranks=0):
    """Return the tables of a bench in this process or, with num_ranks, in new ones."""
    words = ['bench', *shlex.split(words)]
    done = run(under_ranks(num_ranks, [*CLI, *words])) if num_ranks else call(*words)
    assert done.returncode == 0, done.stderr
    return [t['rows'] for t in json.loads(done.stdout)['tables']]


def test_step_row_contains_all_measurements():
    [[row]] = bench(f'train --batch-sizes 2 {SMALL} --steps 3')
    shown = [row[k] for k in ('model', 'num_ranks', 'num_steps', 'local_batch_size')]
    assert shown == ['resnet18', 1, 3, 2]
    assert row['images_per_s'] == pytest.approx(2000 / row['step_ms'])
    assert row['gflops'] == pytest.approx(row['gflop_per_step'] / row['step_ms'] * 1000)
    assert row['share_of_peak'] == pytest.approx(row['gflops'] / row['peak_gflops'])
    assert min(row[f'{part}_ms'] for part in ('forward', 'backward', 'update')) > 0
    assert row['memory_mib'] > 100


@pytest.mark.slow
@pytest.mark.needs_avx512
def test_ranks_and_precisions_form_a_grid():
    words = 'train --ranks 1,2 --precisions bfloat16,float32 --batch-sizes 2'
    rows, *scaling = bench(f'{words} {SMALL}', 2)
    grid = [(p, n) for p in ('float32', 'bfloat16') for n in (1, 2)]
    assert [(r['precision'], r['num_ranks']) for r in rows] == grid
    assert len(scaling) == 2  # one for each precision


def test_real_data_and_telemetry(digits, tmp_path):
    data = f'--config launch/configs/digits_cpu.yaml --data.dir {digits}'
    more = f'--telemetry true --run.dir {tmp_path} --model.name resnet18'
    [[row]] = bench(f'train {data} --inputs real --batch-sizes 8 {SHORT} {more}')
    assert (row['input'], row['image_size']) == ('real', 32)
    assert [p.name.startswith('telemetry_0_') for p in tmp_path.glob('[!.]*')] == [True]


def test_bench_data_rows(digits):
    data = f'--config launch/configs/digits_cpu.yaml --data.dir {digits}'
    rows, need = bench(
        f'data {data} --threads 1 --batch-sizes 16,8 --node-images-per-s 1000 {SHORT}'
    )
    grid = [(size, cache) for size in (16, 8) for cache in ('cold', 'warm')]
    assert [(r['local_batch_size'], r['cache']) for r in rows] == grid
    assert need[1]['images_per_s'] == 2000
    assert need[1]['mb_per_s'] == pytest.approx(2000 * rows[0]['record_bytes'] / 1e6)


@pytest.mark.slow
@pytest.mark.parametrize('compression, value_bytes', [('none', 4), ('fp16', 2)])
def test_bench_allreduce_counts_the_bytes_that_are_exchanged(compression, value_bytes):
    words = f'allreduce --batch-sizes 2 --comm.compression {compression}'
    sizes, [grads] = bench(f'{words} {SMALL}', 2)
    assert [r['bytes'] for r in sizes][::8] == [1024 * value_bytes, 2**26 * value_bytes]
    # 2 (n - 1) / n = 1
    assert all(r['bus_gb_per_s'] == pytest.approx(r['algorithm_gb_per_s']) for r in sizes)
    assert grads['bytes'] == value_bytes * 11_689_512 and grads['measured_share'] > 0


@pytest.mark.parametrize(
    'precisions, num_ranks',
    [
        (['float32'], 0),
        pytest.param(
            ['float32', 'bfloat16'], 1, marks=[pytest.mark.slow, pytest.mark.needs_avx512]
        ),
    ],
)
def test_bench_ops_rows(precisions, num_ranks):
    tables = bench(f'ops --batch-sizes=1 --precisions {",".join(precisions)} {SMALL}', num_ranks)
    assert [rows[0]['precision'] for rows in tables] == [p for p in precisions for _ in range(2)]
    for rows in tables[1::2]:
        assert sum(r['count'] for r in rows) == 20
        assert all(r['forward_gflops'] > 0 and r['backward_ms'] > 0 for r in rows)


@pytest.fixture(scope='module')
def peers():
    """PyTorch for comparisons."""
    done = run([ROOT / 'benchmarks/setup.sh'], cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    'words, last',
    [
        ('scale.py 1 1', 'order of an epoch, ms'),
        ('replay.py', ''),
        (
            'compare.py step --rounds 1 --batch-sizes 2',
            'training step, batch 2, float32, images/s: ratio ',
        ),
        ('cifar10.py target 5 logs/cifar10_target', 'ratio of the medians '),
    ],
)
def test_benchmark_script_runs(peers, words, last):
    done = run([sys.executable, *shlex.split(f'benchmarks/{words}')], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1].startswith(last)


@pytest.mark.slow
def test_all_gpu_parts_pass_in_cpu_dry_run(tmp_path):
    programs = {
        'nvidia-smi': '#!/bin/sh\necho NVIDIA A100-SXM4-80GB, 8.0',
        'nvidia-cuda-mps-control': '#!/bin/sh\ncat > /dev/null',  # a running service
    }
    write_files(tmp_path / 'bin', programs, mode=0o755)
    env = {
        **os.environ,
        'MLPERF_RN50_TEST_GPU': 'dry',
        'MLPERF_RN50_GPU_RESULT': str(tmp_path),
        'PATH': f'{tmp_path}/bin:{os.environ["PATH"]}',
    }
    done = run([ROOT / 'launch/test.sh', '--gpu', '--minutes', 600], timeout=36000, env=env)
    assert done.returncode == 0, done.stdout
    [archive] = tmp_path.glob('gpu_NVIDIA_A100_SXM4_80GB_*.tar.gz')
    with tarfile.open(archive) as tar:
        files = {
            m.name.partition('/')[2]: tar.extractfile(m).read()
            for m in tar.getmembers()
            if m.isfile()
        }
    results = [json.loads(line) for line in files['results.jsonl'].splitlines()]
    assert {(r['status'], r['reason']) for r in results if 'part' in r} <= {
        ('passed', ''),
        ('left out', 'a CPU has no nvJPEG'),
        ('left out', 'no Python with PyTorch and NumPy; name one with --torch-python'),
    }
    assert {r['status'] for r in results if 'test' in r} == {'passed', 'skipped'}
    assert json.loads(files['profile.json'])['traceEvents'] and json.loads(files['doctor.json'])
    lines = files['summary.txt'].decode().splitlines()
    assert len(lines) < 20 and '; dry run on a CPU' in lines[0]
    assert any(line.startswith('A100 SXM 80GB: bench train should') for line in lines)
