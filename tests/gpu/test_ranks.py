"""Ranks that Horovod starts on one GPU: steps as of one rank, a killed rank, and a run's other
commands.

The ranks also run this file: python tests/gpu/test_ranks.py OUT DEVICE NUM_SHARING.
"""

import json
import os
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from e2e.test_stops import Job
from e2e.training import arguments, metrics, pack_tiny
from gpu.compare import distance, make_batch, set_weights, step_config, weights_of
from gpu.conftest import IS_DRY
from helpers import CLI, ROOT, run, under_ranks
from parallel.workers import freeze_statistics
from PIL import Image

from mlperf_rn50.config import Config
from mlperf_rn50.data.batches import Batch
from mlperf_rn50.runfolder.jsonl import read_lines
from mlperf_rn50.train.comm.device import device_id_of
from mlperf_rn50.train.comm.horovod import Comm, open_comm
from mlperf_rn50.train.plan import make_plan
from mlperf_rn50.train.trainer import Trainer

GLOBAL_BATCH, NUM_STEPS = 16, 3
# Largest relative distance of the velocities after NUM_STEPS from those of one rank. Sums over
# images are rounded in another order.
TOLERANCE = {'float32': 1e-3, 'float16': 5e-2}
PRECISIONS = ['float32'] if IS_DRY else ['float32', 'float16']
CASES = [(p, policy) for p in PRECISIONS for policy in ('static', 'dynamic')]


def case_config(precision: str, policy: str) -> Config:
    """Configuration without fused operators, so that statistics of BatchNorm can be frozen."""
    config = step_config('resnet18', 'NCHW', precision, 'sgd')
    return replace(config, train=replace(config.train, loss_scale_policy=policy))


def own_part(whole: Batch, comm: Comm) -> Batch:
    """Return the images of a rank."""
    size = GLOBAL_BATCH // comm.world_size
    own = slice(comm.rank * size, (comm.rank + 1) * size)
    return Batch(whole.images[own], whole.labels[own], size)


def velocities(config: Config, comm: Comm, device_id: int | None) -> np.ndarray:
    """Return the velocities of all weights after some steps; all ranks have the same images
    together."""
    size = GLOBAL_BATCH // comm.world_size
    local = replace(config, train=replace(config.train, local_batch_size=size))
    trainer = Trainer(make_plan(local, comm.world_size), comm, comm.rank, device_id)
    set_weights(trainer, weights_of(config), config.model.layout)
    trainer.broadcast()
    freeze_statistics(trainer.net)
    batch = own_part(make_batch(config, config.train.precision, device_id), comm)
    for _ in range(NUM_STEPS):
        trainer.read(trainer.step(iter([batch]), 0, 0.01))
    arrays = sorted(trainer.snapshot().items())
    return np.concatenate([a.ravel() for n, a in arrays if n.startswith('optimizer/velocity')])


def main(out: str, device: str, num_sharing: str) -> None:
    """Train each case on a rank; rank r writes r.npz."""
    config = case_config(*CASES[0])
    placed = replace(
        config,
        train=replace(config.train, device=device),
        run=replace(config.run, ranks_per_device=int(num_sharing)),
    )
    comm = open_comm('none', num_sharing=int(num_sharing))
    device_id = device_id_of(placed, comm)
    found = {'_'.join(case): velocities(case_config(*case), comm, device_id) for case in CASES}
    np.savez(Path(out, str(comm.rank)), device=device_id or 0, **found)


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    """Function that starts ranks on one GPU on first use; returns the arrays of each rank."""

    @cache
    def start(num_ranks: int) -> list:
        out = tmp_path_factory.mktemp('ranks')
        worker = [sys.executable, __file__, out, 'cpu' if IS_DRY else 'gpu', num_ranks]
        command = under_ranks(num_ranks, ['env', f'PYTHONPATH={ROOT}:{ROOT}/tests', *worker])
        sharing = {'MLPERF_RN50_RANKS_PER_DEVICE': str(num_ranks)}
        done = run(command, env={**os.environ, **sharing})
        assert done.returncode == 0, done.stderr[-3000:]
        return [np.load(out / f'{r}.npz') for r in range(num_ranks)]

    return start


@pytest.mark.parametrize('num_ranks', [2, 4])
@pytest.mark.parametrize('precision, policy', CASES)
def test_ranks_of_a_gpu_step_as_one_rank(precision, policy, num_ranks, results, figure):
    name = f'{precision}_{policy}'
    [expected], got = [r[name] for r in results(1)], [r[name] for r in results(num_ranks)]
    assert all((r['device'] == 0).all() for r in results(num_ranks))
    assert all((other == got[0]).all() for other in got)
    far = distance(got[0], expected)
    figure(f'{num_ranks} ranks, {precision}, {policy}: distance from one rank', far)
    assert far <= TOLERANCE[precision]


@pytest.fixture(scope='module')
def tiny(tmp_path_factory) -> Path:
    return pack_tiny(tmp_path_factory.mktemp('data') / 'tiny')


def test_killed_rank_of_a_gpu_is_restarted(tiny, tmp_path, device_options, figure):
    # long enough that the run has not ended when the rank is killed
    num_epochs, period = (4, 2) if IS_DRY else (60, 10)
    words = '--restarts 2 --ranks-per-node 2 --ranks-per-device 2'.split()
    epochs = f'--train.max_epochs={num_epochs} --schedule.decay_epochs={num_epochs}'.split()
    checkpoints = f'--checkpoint.period_steps={period}'
    job = Job(tmp_path, tiny, *words, *epochs, checkpoints, *device_options)
    try:
        job.wait_for('training', 1)
        job.ranks()[-1].kill()
        code, out = job.end()
    finally:  # also at the limit of this part; the launcher ends its ranks
        job.process.terminate()
    assert code == 1 and 'killed by signal 9 (SIGKILL)' in out, out  # the target is unreachable
    [resumed] = metrics(job.run_dir, 'resumed')
    figure('resumed after kill -9 of a rank, at', resumed['step'], 'step')
    evaluations = [m['epoch'] for m in metrics(job.run_dir, 'eval')]
    assert resumed['step'] % period == 0
    assert sorted(set(evaluations)) == [*range(1, num_epochs + 1)]


@pytest.fixture(scope='module')
def one_rank(tiny, tmp_path_factory, device_options) -> Path:
    """Folder of a converged run of launch/local.sh with one rank and telemetry."""
    folder = tmp_path_factory.mktemp('one_rank')
    (folder / 'c.yaml').write_text('{}\n')
    words = arguments(folder / 'run', tiny, *device_options)[1:]
    launch = [ROOT / 'launch/local.sh', '--config', folder / 'c.yaml', '--run-dir', folder / 'run']
    keys = ['--run.telemetry=true', '--train.target_accuracy=0.01']
    own = [word for word in words if not word.startswith('--run.dir')]
    done = run([*launch, '--ranks-per-node', '1', *own, *keys])
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return folder / 'run'


def test_one_rank_writes_telemetry(one_rank, figure):
    assert metrics(one_rank, 'end')[0]['status'] == 'converged'
    [path] = one_rank.glob('telemetry*.jsonl')
    samples = [dict(line) for _, line in read_lines(path, dict)]
    figure('telemetry', samples[-1])
    assert samples and (IS_DRY or json.dumps(samples).count('power_w'))


@pytest.mark.parametrize(
    'words, shown',
    [
        ('why {run}', ''),
        ('evaluate {run}', 'Top-1'),
        ('export {run} --format gluon --out {out}', ''),
        ('export {run} --format onnx --out {out}', ''),
        ('classify {run} {image}', ''),
    ],
    ids=['why', 'evaluate', 'export gluon', 'export onnx', 'classify'],
)
def test_command_of_a_run(words, shown, one_rank, tmp_path):
    if 'onnx' in words:
        pytest.importorskip('onnx')
    image = tmp_path / 'digit.png'
    Image.new('L', (32, 32), 128).save(image)
    command = words.format(run=one_rank, out=tmp_path / 'out', image=image).split()
    done = run([*CLI, *command])
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert shown in done.stdout


if __name__ == '__main__':
    main(*sys.argv[1:])
