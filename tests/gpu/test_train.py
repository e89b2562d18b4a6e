"""Training on GPUs: binding of ranks, digits and CIFAR-10 to 74.9 %, resume of a killed run."""

import os
import re
from pathlib import Path

import msgspec
import psutil
import pytest
from e2e.training import command, metrics, pack_tiny, start, wait_for_checkpoint
from gpu.conftest import IS_DRY, only_on_a_gpu
from helpers import CLI, ROOT, run

from mlperf_rn50.mllog.read.reader import read_run
from mlperf_rn50.runfolder.names import list_checkpoints
from mlperf_rn50.system.gpus import find_visible_gpus
from mlperf_rn50.system.power import find_gpus
from mlperf_rn50.system.telemetry import read_gpu
from mlperf_rn50.system.topology import SYS, choose_binding, find_topology
from mlperf_rn50.train.checkpoint.checkpoint import load

TARGET = 0.749


def test_every_rank_is_bound_near_its_gpu(num_gpus, figure):
    bus_ids = [g.bus_id for g in find_visible_gpus()]
    topology = find_topology(SYS, sorted(os.sched_getaffinity(0)), bus_ids)
    num = max(1, len(bus_ids))
    bindings = [choose_binding(topology, r, num, 1) for r in range(num)]
    figure('GPU and NUMA node of each rank', [(b.gpu, b.numa_node) for b in bindings])
    if not IS_DRY:
        assert len(bus_ids) == num_gpus and [b.gpu for b in bindings] == list(range(num))
        numbers = {n.number for n in topology.nodes}
        near = [(b.numa_node, node) for b, node in zip(bindings, topology.gpus) if node in numbers]
        assert all(got == node for got, node in near)


def test_nvml_reports_memory_and_power(figure):
    nvml, handles = find_gpus()
    values = [read_gpu(nvml, h) for h in handles]
    figure('NVML', msgspec.to_builtins(values))
    assert (values or IS_DRY) and all(v.memory_used_bytes and v.power_w for v in values)


def train(figure, what, name, data_dir, run_dir, num_ranks, batch, *options):
    """Train to the target with launch/local.sh and a configuration in launch/configs; return the
    output."""
    config = f'--config {ROOT}/launch/configs/{name}.yaml --ranks-per-node {num_ranks}'
    batch = batch // num_ranks * num_ranks
    keys = f'--run.telemetry=true --run.seed=1 --train.global_batch_size={batch}'
    folders = ['--run.dir', run_dir, f'--data.dir={data_dir}']
    launch = [ROOT / 'launch/local.sh', *config.split(), *keys.split(), *folders, *options]
    done = run(launch, timeout=3600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    what, log = f'{what}, {num_ranks} ranks', read_run(run_dir / 'result_0.txt')
    figure(f'{what}: Top-1', log.final_accuracy, 'fraction')
    figure(f'{what}: epochs', log.epochs_to_converge, 'epochs')
    figure(f'{what}: from run_start to run_stop', log.time_to_train_s, 's')
    assert log.status == 'converged' and log.final_accuracy >= TARGET
    return done.stdout + done.stderr


def test_digits_on_all_gpus(digits, tmp_path, num_gpus, device_options, figure):
    num_ranks = min(num_gpus, 16)
    output = train(figure, 'digits', 'digits_cpu', digits, tmp_path, num_ranks, 64, *device_options)
    bound = sorted(re.findall(r'^\s*(rank \d+ on .*: cores .*)', output, re.MULTILINE))
    for number, line in enumerate(bound):
        figure(f'binding {number}', re.sub(r' on \S+', '', line, count=1))
    assert len(bound) == num_ranks
    if not IS_DRY:
        assert len({re.search(r'GPU (\d+)', line)[1] for line in bound}) == num_ranks


def test_cifar10_on_all_gpus(tmp_path, num_gpus, device_options, figure):
    only_on_a_gpu('it takes half an hour on a CPU')
    folder = Path(os.environ.get('MLPERF_RN50_CIFAR10') or ROOT / 'data/cifar10')
    if not (folder / 'manifest.json').is_file():
        pytest.skip('CIFAR-10 is not prepared: mlperf-rn50 prepare cifar10 --out data/cifar10')
    # The 5 epochs of the recipe are for one rank with 128 images.
    options, num_ranks = [*device_options, '--schedule.decay_epochs=8'], min(num_gpus, 8)
    train(figure, 'CIFAR-10', 'cifar10_cpu', folder, tmp_path / 'run', num_ranks, 128, *options)


def test_killed_run_resumes(tmp_path, device_options, figure):
    tiny = pack_tiny(tmp_path / 'tiny')
    options = [*device_options, '--checkpoint.period_epochs=0', '--checkpoint.period_steps=4']
    process = start(command(tmp_path / 'run', tiny, *options))
    wait_for_checkpoint(tmp_path / 'run', 8, process)
    for victim in [*psutil.Process(process.pid).children(recursive=True), process]:
        victim.kill()
    process.communicate()
    done = run([*CLI, 'train', '--resume', tmp_path / 'run'])
    assert done.returncode == 1, done.stderr  # the target is unreachable
    resumed_at = metrics(tmp_path / 'run', 'resumed')[0]['step']
    assert resumed_at >= 8 and resumed_at % 4 == 0
    progress, trainer = load(list_checkpoints(tmp_path / 'run/checkpoints')[-1])
    assert progress.step == 20 and all(abs(a).max() < 1e6 for a in trainer.arrays.values())
    # A run that is killed between an evaluation and the next checkpoint repeats the evaluation.
    assert {m['epoch'] for m in metrics(tmp_path / 'run', 'eval')} == {1, 2, 3, 4}
    figure('killed after the checkpoint of step 8, resumed at', resumed_at, 'step')
