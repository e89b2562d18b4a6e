"""Planted time faults, each of which `mlperf-rn50 why` must name with its share of the run, and healthy runs.

Each run trains ResNet-18 on digits, drawn as JPEG images of about 25 kB, with two ranks. Each rank has its own host, a
network namespace of this machine, and Open MPI's TCP is the link. Requires root, the packages of tests/install.sh, and
control groups of version 1.

fault        planted by
decoding     CPU quota of 2.5 % for the decoding threads of DALI
disk         data on a loop device, read at 1.25 MB/s (blkio), from which the page cache is emptied at each step
slow_rank    rank 1 sleeps for 30 % of the time of forward and backward pass, before the exchange
link         token buckets (tc tbf) of 300 Mbit/s at both hosts
python       the training loop sleeps for 2 s at every third step, before it asks for images
batch        2 images per rank instead of 32
checkpoints  one every 4 steps to a loop device, written at 15 MB/s (blkio)
evaluation   30 times as many validation images

Shares do not come from the timer of the product. A program that replaces .venv/bin/mlperf-rn50 on the two hosts empties
the engine of MXNet around each phase, so that the loop is never ahead of the device, and reads the clock, which is the
same for both hosts. The share is that of the run from run_start to run_stop of the log: waiting for images (decoding,
disk), from the end of the faster backward pass to that of the slower one (slow_rank), from there to the end of the
exchange (link), sleep (python), save_checkpoint (checkpoints), and eval_start to eval_stop of the log (evaluation).
That of batch is the time that the same images would not have taken in the healthy run before it; this run, too, has the
usual program. So all shares but that of batch are valid on a busy machine.

Usage: .venv/bin/python benchmarks/why_time.py [--kinds disk,link] [--rounds 3] [--healthy 10]
"""
import argparse
import io
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / 'tests'))
from cluster.conftest import Job, mounted  # noqa: E402
from cluster.hosts import Cluster  # noqa: E402
from e2e.training import log_events  # noqa: E402

from mlperf_rn50.data.prepare.command import pack  # noqa: E402
from mlperf_rn50.data.prepare.samples import Dataset, Sample, digits  # noqa: E402
from mlperf_rn50.table import fit_columns  # noqa: E402

CLI, BLKIO, DECODING = ROOT / '.venv/bin/mlperf-rn50', Path('/sys/fs/cgroup/blkio'), Path('/sys/fs/cgroup/cpu/why_time')
NUM_TRAIN, NUM_VAL, LOCAL_BATCH, EPOCHS = 768, 64, 32, 2
NUM_FEW, NUM_MANY = 240, 30 * NUM_VAL  # training images for batches of 2; validation images of an oversized set
TOLERANCE = 0.03
HEAD = ('fault', 'run s', 'planted %', 'verdict', 'named %', 'ok')
PROGRAM = f"""#!{ROOT}/.venv/bin/python -E
import os, sys, time
from mlperf_rn50.cli import main, train

def plant():
    import mxnet
    from mlperf_rn50.train import loop
    from mlperf_rn50.train.trainer import Trainer
    rank, stamps, num_steps = os.environ['OMPI_COMM_WORLD_RANK'], [], 0
    step, exchange, save = Trainer.step, Trainer.exchange, loop.save_checkpoint

    def stamp():
        mxnet.nd.waitall()
        stamps.append(time.monotonic())

    def note(kind, *values):
        with open(f'{{FOLDER}}/{{kind}}_{{rank}}', 'a') as f:
            print(*values, file=f)

    def images(batches):
        stamp()
        batch = next(batches)
        stamp()
        yield batch

    def planted_step(self, batches, *words, **keys):
        nonlocal num_steps
        num_steps += 1
        stamps.clear()
        stamp()
        if KIND == 'python' and num_steps % 3 == 0:
            time.sleep(2)
        if KIND == 'disk':
            with open(f'{{FOLDER}}/disk/data/train.rec', 'rb') as f:
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if KIND == 'decoding':
            for thread in os.listdir('/proc/self/task'):
                if open(f'/proc/self/task/{{thread}}/comm').read().startswith('[DALI][TP'):
                    open('{DECODING}/tasks', 'w').write(thread)
        result = step(self, images(batches), *words, **keys)
        note('stamps', *stamps)
        return result

    def planted_exchange(self, *words, **keys):
        mxnet.nd.waitall()
        if KIND == 'slow_rank' and rank == '1':
            time.sleep(0.3 * (time.monotonic() - stamps[-1]))
        stamp()
        result = exchange(self, *words, **keys)
        stamp()
        return result

    def planted_save(run):
        begin = time.monotonic()
        save(run)
        note('saves', time.monotonic() - begin)
    Trainer.step, Trainer.exchange, loop.save_checkpoint = planted_step, planted_exchange, planted_save

def planted(*arguments):
    plant()
    return inner(*arguments)
inner, train._train = train._train, planted
sys.exit(main())
"""


class Lab(NamedTuple):
    """Two hosts, and a folder that contains the mount point `disk` of a loop device; device: its numbers."""

    cluster: Cluster
    folder: Path
    device: str


class Run(NamedTuple):
    """Finished run: folder, seconds from run_start to run_stop and of evaluations.

    With a fault, also seconds of rank 0 in save_checkpoint, and stamps by name (ranks, steps), in this order.
    """

    folder: Path
    wall_s: float
    eval_s: float
    save_s: float = 0.0
    begun: np.ndarray = np.zeros(1)
    asked: np.ndarray = np.zeros(1)
    arrived: np.ndarray = np.zeros(1)
    computed: np.ndarray = np.zeros(1)
    exchanged: np.ndarray = np.zeros(1)


class Fault(NamedTuple):
    """Expected verdict and part (None for any); seconds, given also the healthy run; what is throttled; options."""

    verdict: str
    part: str | None
    seconds: Callable[[Run, Run], float]
    throttled: tuple[str, int] = ('read', 0)  # bytes/s; 0 for no limit
    data: str = 'data'
    options: tuple[str, ...] = ()


FAULTS = {
    'decoding': Fault('input', 'decoding', lambda run, _: (run.arrived - run.asked).sum(1).mean()),
    'disk': Fault('input', 'storage', lambda run, _: (run.arrived - run.asked).sum(1).mean(), ('read', 1_250_000),
                  data='disk/data'),
    'slow_rank': Fault('slow_rank', None, lambda run, _: np.ptp(run.computed, 0).sum()),
    'link': Fault('exchange', 'link', lambda run, _: (run.exchanged.max(0) - run.computed.max(0)).sum()),
    'python': Fault('python', None, lambda run, _: (run.asked - run.begun).sum(1).mean()),
    'batch': Fault('batch', None, lambda run, healthy: run.wall_s - NUM_FEW / NUM_TRAIN / EPOCHS * healthy.wall_s,
                   data='few', options=('--train.global_batch_size=4', '--train.max_epochs=1')),
    'checkpoints': Fault('checkpoints', None, lambda run, _: run.save_s, ('write', 15_000_000),
                         options=('--checkpoint.period_steps=4',)),
    'evaluation': Fault('evaluation', None, lambda run, _: run.eval_s, data='many')}
HEALTHY = Fault('healthy', None, lambda run, _: 0.0)


def draw(sample: Sample, number: int) -> Sample:
    """Return a digit of 256 x 256 pixels with noise."""
    pixels = np.asarray(Image.open(io.BytesIO(sample.read())).convert('RGB').resize((256, 256)), np.float32)
    noisy, encoded = pixels + np.random.default_rng(number).normal(0, 20, pixels.shape), io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(encoded, 'JPEG', quality=80)
    return Sample(sample.label, f'{sample.name}-{number}', encoded.getvalue())


def prepare(folder: Path) -> None:
    whole = digits()
    train = [draw(sample, i) for i, sample in enumerate(whole.train[:NUM_TRAIN])]
    validation = [draw(whole.validation[i % len(whole.validation)], i) for i in range(NUM_MANY)]
    for name, num_train, num_val in (('data', NUM_TRAIN, NUM_VAL), ('disk/data', NUM_TRAIN, NUM_VAL),
                                     ('few', NUM_FEW, NUM_VAL), ('many', NUM_TRAIN, NUM_MANY)):
        pack(Dataset('digits', 'digits', whole.classes, train[:num_train], validation[:num_val]), folder / name)


@contextmanager
def open_lab(folder: Path) -> Iterator[Lab]:
    def call(*words: object) -> str:
        return subprocess.run([str(w) for w in words], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    with ExitStack() as cleanup:
        DECODING.mkdir()
        cleanup.callback(DECODING.rmdir)
        (DECODING / 'cpu.cfs_period_us').write_text('100000')
        (DECODING / 'cpu.cfs_quota_us').write_text('2500')
        call('truncate', '-s', '2G', folder / 'disk.img')
        call('mkfs.ext4', '-q', folder / 'disk.img')
        disk = call('losetup', '--find', '--show', folder / 'disk.img')
        cleanup.callback(call, 'losetup', '-d', disk)
        call('blockdev', '--setra', 0, disk)
        for name in ('disk', 'hosts'):
            (folder / name).mkdir()
        call('mount', disk, folder / 'disk')
        cleanup.callback(call, 'umount', '--lazy', folder / 'disk')
        prepare(folder)
        cluster = Cluster(folder / 'hosts', 2)
        cleanup.callback(cluster.close)
        yield Lab(cluster, folder, Path(f'/sys/block/{Path(disk).name}/dev').read_text().strip())


@contextmanager
def planted(lab: Lab, kind: str) -> Iterator[None]:
    """Plant a fault on both hosts during the block. A limit of the disk is for all processes, also for the kernel."""
    (direction, bytes_per_s), hosts, program = FAULTS[kind].throttled, lab.cluster.hosts, lab.folder / 'mlperf-rn50'
    program.write_text(PROGRAM.replace('KIND', repr(kind)).replace('{FOLDER}', str(lab.folder)))
    program.chmod(0o755)
    limit = BLKIO / f'blkio.throttle.{direction}_bps_device'
    with ExitStack() as cleanup:
        cleanup.enter_context(mounted(hosts, '--bind', program, CLI))
        limit.write_text(f'{lab.device} {bytes_per_s}')
        cleanup.callback(limit.write_text, f'{lab.device} 0')
        for host in hosts if kind == 'link' else ():
            host.call(*'tc qdisc add dev eth0 root tbf rate 300mbit burst 256kb latency 100ms'.split())
            cleanup.callback(host.call, *'tc qdisc del dev eth0 root'.split())
        yield


def train(lab: Lab, kind: str) -> Run:
    fault, run_dir = FAULTS.get(kind, HEALTHY), lab.folder / f'run{len(list(lab.folder.glob("run*.out"))) + 1}'
    splits = json.loads((lab.folder / fault.data / 'manifest.json').read_text())['splits']
    config = lab.folder / 'config.yaml'
    config.write_text(f"""
run: {{seed: 3, metrics_period_steps: 1}}
data: {{dir: {lab.folder / fault.data}, num_train: {splits["train"]["num_images"]}, dataset: digits,
       num_val: {splits["validation"]["num_images"]}, num_classes: 10, image_size: 64, resize_shorter: 64, crop: none,
       num_threads: 1, read_threads: 1}}
model: {{name: resnet18}}
schedule: {{base_lr: 0.01, warmup_epochs: 1, decay_epochs: 1000}}
train: {{global_batch_size: {2 * LOCAL_BATCH}, eval_period: 1, max_epochs: {EPOCHS}, target_accuracy: 1.0}}
comm: {{num_buckets: 1}}
checkpoint: {{period_epochs: 0, keep: 1}}
""")
    if kind == 'checkpoints':
        run_dir.mkdir()
        (run_dir / 'checkpoints').symlink_to(lab.folder / 'disk')
    with ExitStack() as cleanup:
        if fault is not HEALTHY and kind != 'batch':
            cleanup.enter_context(planted(lab, kind))
        cleanup.callback(lab.cluster.reset)  # ends a run if this program is stopped
        words = ['--hosts', 'h1,h2', '--config', config, '--no-doctor', *fault.options]
        job = Job(lab.cluster, 'mpirun.sh', words, run_dir)
        job.process.wait()
    assert 'aborted: the target was not reached' in job.output, job.output
    times = {key: np.array([e['time_ms'] / 1000 for e in log_events(run_dir) if e['key'] == key])
             for key in ('run_start', 'run_stop', 'eval_start', 'eval_stop')}
    run = Run(run_dir, (times['run_stop'] - times['run_start']).sum(), (times['eval_stop'] - times['eval_start']).sum())
    found = sorted(lab.folder.glob('stamps_*'))
    if found:  # of which the first steps are those of the warm-up
        stamps = np.array([np.loadtxt(path)[-EPOCHS * NUM_TRAIN // LOCAL_BATCH // 2:] for path in found])
        saves = [path.rename(run_dir / path.name) for path in lab.folder.glob('saves_0')]
        run = Run(*run[:3], sum(float(np.loadtxt(p).sum()) for p in saves), *np.moveaxis(stamps, 2, 0))
    for path in found:
        path.rename(run_dir / path.name)
    return run


def row(kind: str, run: Run, healthy: Run) -> list[str]:
    fault = FAULTS.get(kind, HEALTHY)
    planted_share = fault.seconds(run, healthy) / run.wall_s
    done = subprocess.run([CLI, 'why', run.folder, '--format', 'json'], stdout=subprocess.PIPE, text=True)
    named = json.loads(done.stdout) if done.returncode == 0 else {}
    is_ok = (named.get('verdict') == fault.verdict and fault.part in (None, named.get('part'))
             and (kind != 'slow_rank' or named.get('rank') == 1)
             and (fault is HEALTHY or abs(named['share'] - planted_share) <= TOLERANCE))
    return [kind, f'{run.wall_s:.1f}', f'{100 * planted_share:.1f}',
            ' '.join(str(named[key]) for key in ('verdict', 'part', 'rank') if named.get(key) is not None),
            f'{100 * named["share"]:.1f}' if named.get('share') is not None else '-', 'yes' if is_ok else 'no']


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or '').partition('\n')[0])
    parser.add_argument('--kinds', default=','.join(FAULTS), help='faults, separated by commas (default: %(default)s)')
    parser.add_argument('--rounds', type=int, default=3, help='runs per fault (default: %(default)s)')
    parser.add_argument('--healthy', type=int, default=10, help='healthy runs (default: %(default)s)')
    options, rows = parser.parse_args(), []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # removes hosts and disk
    with tempfile.TemporaryDirectory() as folder, open_lab(Path(folder)) as lab:
        for number in range(max(options.rounds, options.healthy)):
            healthy = train(lab, 'healthy')
            kinds = options.kinds.split(',') if number < options.rounds else []
            for kind in [*['healthy'] * (number < options.healthy), *kinds]:
                rows.append(row(kind, healthy if kind == 'healthy' else train(lab, kind), healthy))
                print(*rows[-1], file=sys.stderr, flush=True)
    print(fit_columns(HEAD, rows))
    return int(any(words[-1] == 'no' for words in rows))


if __name__ == '__main__':
    sys.exit(main())
