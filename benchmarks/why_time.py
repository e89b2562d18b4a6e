"""Planted time faults, each of which `mlperf-rn50 why` must name with its share of the run, and
healthy runs.

Each run trains ResNet-18 on digits, drawn as JPEG images of about 25 kB, with two ranks. Each rank
has its own host, a network namespace of this machine. Requires root, the packages of
tests/install.sh, and control groups of version 1.

decoding     CPU quota of 5 % for the threads of DALI
disk         data on a loop device, read at 1.25 MB/s (blkio); each step empties the page cache
slow_rank    rank 1 sleeps for 30 % of the time of forward and backward pass, before the exchange
link         token buckets (tc tbf) of 300 Mbit/s at both hosts
python       the training loop sleeps for 1 s at every third step, before it asks for images
batch        2 images per rank instead of 32
checkpoints  one every 4 steps, to a loop device that is written at 15 MB/s (blkio)
evaluation   30 times as many validation images

Shares do not come from the timer of the product. A program mounted over .venv/bin/mlperf-rn50 on
the two hosts empties the engine of MXNet between the phases, so that the loop is never ahead of the
device, and reads the clock, which both hosts share. The share is that of the run from run_start to
run_stop of the log: waiting for images (decoding, disk), from the end of the faster backward pass
to that of the slower one (slow_rank), from there to the end of the exchange (link), sleep (python),
save_checkpoint (checkpoints), eval_start to eval_stop of the log (evaluation). For batch, it is the
time from the end of the slower backward pass to the next step. Of two ranks, the slower one counts
in each step. So the shares are valid on a busy machine, too.
"""

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
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

from mlperf_rn50.analysis.show.text import fit_columns  # noqa: E402
from mlperf_rn50.data.prepare.pack import pack  # noqa: E402
from mlperf_rn50.data.prepare.samples import Dataset, Sample, digits  # noqa: E402

CLI, BLKIO = ROOT / '.venv/bin/mlperf-rn50', '/sys/fs/cgroup/blkio/blkio.throttle'
DECODING = Path(f'/sys/fs/cgroup/cpu/why_time_{os.getpid()}')
EPOCHS, STEPS = 2, 24  # with 64 images per step
# training and validation
SIZES = {'data': (768, 64), 'disk/data': (768, 64), 'few': (240, 64), 'many': (768, 1920)}
OPTIONS = {
    'model.name': 'resnet18',
    'data.image_size': 64,
    'data.resize_shorter': 64,
    'train.max_epochs': EPOCHS,
    'train.target_accuracy': 1.0,
    'checkpoint.period_epochs': 0,
}
TOLERANCE = 0.03
# The ranks append the stamps of each step to a file: begin, images asked for and arrived, backward
# and exchange ended.
PROGRAM = f"""#!{ROOT}/.venv/bin/python -E
import os, sys, time
from mlperf_rn50.cli import main, train

def plant():
    import mxnet
    from mlperf_rn50.train import loop
    from mlperf_rn50.train.trainer import Trainer
    rank, stamps, num_steps = os.environ['OMPI_COMM_WORLD_RANK'], [], 0
    data, notes = open('FOLDER/disk/data/train.rec', 'rb'), open(f'FOLDER/notes_{{rank}}', 'w', 1)
    step, exchange, save = Trainer.step, Trainer.exchange, loop.save_checkpoint

    def stamp():
        mxnet.nd.waitall()
        stamps.append(time.monotonic())

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
        if 'KIND' == 'python' and num_steps % 3 == 0:
            time.sleep(1)
        os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for thread in os.listdir('/proc/self/task') if 'KIND' == 'decoding' else ():
            if open(f'/proc/self/task/{{thread}}/comm').read().startswith('[DALI]'):
                open('{DECODING}/tasks', 'w').write(thread)
        result = step(self, images(batches), *words, **keys)
        print(*stamps, file=notes)
        return result

    def planted_exchange(self, *words, **keys):
        mxnet.nd.waitall()
        time.sleep(('KIND', rank) == ('slow_rank', '1') and 0.3 * (time.monotonic() - stamps[-1]))
        stamp()
        result = exchange(self, *words, **keys)
        stamp()
        return result

    def planted_save(run):
        begin = time.monotonic()
        save(run)
        print(time.monotonic() - begin, file=open(f'FOLDER/saves_{{rank}}', 'a'))
    Trainer.step, Trainer.exchange = planted_step, planted_exchange
    loop.save_checkpoint = planted_save
inner, train._train = train._train, lambda *arguments: plant() or inner(*arguments)
sys.exit(main())
"""


class Run(NamedTuple):
    """Finished run: folder; seconds from run_start to run_stop, of evaluations, and of rank 0 in
    save_checkpoint.

    The others are clocks of (ranks, steps), if a fault was planted in the program.
    """

    folder: Path
    wall_s: float
    eval_s: float
    save_s: float
    begun: np.ndarray
    asked: np.ndarray
    arrived: np.ndarray
    computed: np.ndarray
    exchanged: np.ndarray


class Fault(NamedTuple):
    """Expected verdict and part (None for any); planted seconds; limit of the disk."""

    verdict: str
    part: str | None
    seconds: Callable[[Run], float]
    limit: tuple[str, int] = ('read', 0)  # in bytes/s; 0 for none
    data: str = 'data'
    options: Mapping[str, int] = {}


FAULTS = {
    'decoding': Fault('input', 'decoding', lambda run: (run.arrived - run.asked).max(0).sum()),
    'disk': Fault(
        'input',
        'storage',
        lambda run: (run.arrived - run.asked).max(0).sum(),
        ('read', 1_250_000),
        'disk/data',
    ),
    'slow_rank': Fault('slow_rank', None, lambda run: np.ptp(run.computed, 0).sum()),
    'link': Fault(
        'exchange', 'link', lambda run: (run.exchanged.max(0) - run.computed.max(0)).sum()
    ),
    'python': Fault('python', None, lambda run: (run.asked - run.begun).sum(1).mean()),
    'batch': Fault(
        'batch',
        None,
        lambda run: (
            (run.exchanged - run.computed.max(0)).max(0).sum()
            + (run.asked[:, 1:] - run.exchanged[:, :-1]).max(0).sum()
        ),
        data='few',
        options={'train.global_batch_size': 4, 'train.max_epochs': 1},
    ),
    'checkpoints': Fault(
        'checkpoints',
        None,
        lambda run: run.save_s,
        ('write', 15_000_000),
        options={'checkpoint.period_steps': 4},
    ),
    'evaluation': Fault('evaluation', None, lambda run: run.eval_s, data='many'),
    'healthy': Fault('healthy', None, lambda run: 0.0),
}


def draw(sample: Sample, number: int) -> Sample:
    """Return a digit of 256 x 256 pixels with noise."""
    pixels = np.asarray(
        Image.open(io.BytesIO(sample.read())).convert('RGB').resize((256, 256)), np.float32
    )
    noisy, encoded = (
        pixels + np.random.default_rng(number).normal(0, 20, pixels.shape),
        io.BytesIO(),
    )
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(encoded, 'JPEG', quality=80)
    return Sample(sample.label, f'{sample.name}-{number}', encoded.getvalue())


def prepare(folder: Path) -> None:
    whole, (num_train, num_val) = digits(), SIZES['many']
    train = [draw(sample, i) for i, sample in enumerate(whole.train[:num_train])]
    validation = [draw(whole.validation[i % len(whole.validation)], i) for i in range(num_val)]
    for name, (num_train, num_val) in SIZES.items():
        pack(
            Dataset('digits', 'digits', whole.classes, train[:num_train], validation[:num_val]),
            folder / name,
        )


@contextmanager
def open_cluster(folder: Path) -> Iterator[Cluster]:
    """Start two hosts that share a folder with the data and, mounted as `disk`, a loop device."""
    with ExitStack() as cleanup:
        (folder / 'disk').mkdir()
        DECODING.mkdir()
        cleanup.callback(DECODING.rmdir)
        (DECODING / 'cpu.cfs_quota_us').write_text('5000')  # in a period of 100,000
        subprocess.run(
            ['mkfs.ext4', '-q', folder / 'disk.img', '2G'], check=True, capture_output=True
        )
        subprocess.run(['mount', '-o', 'loop', folder / 'disk.img', folder / 'disk'], check=True)
        cleanup.callback(subprocess.run, ['umount', '--lazy', folder / 'disk'], check=True)
        prepare(folder)
        cluster = Cluster(folder, 2)
        cleanup.callback(cluster.close)
        yield cluster


@contextmanager
def planted(cluster: Cluster, kind: str) -> Iterator[None]:
    """Plant a fault during the block. The disk is slow for all processes, because the kernel writes
    for the ranks."""
    (direction, bytes_per_s), program = FAULTS[kind].limit, cluster.folder / 'mlperf-rn50'
    program.write_text(PROGRAM.replace('KIND', kind).replace('FOLDER', str(cluster.folder)))
    program.chmod(0o755)
    number = (cluster.folder / 'disk').stat().st_dev
    limit, device = (
        Path(f'{BLKIO}.{direction}_bps_device'),
        f'{os.major(number)}:{os.minor(number)}',
    )
    Path(f'/sys/dev/block/{device}/queue/read_ahead_kb').write_text('0')
    with ExitStack() as cleanup:
        if kind != 'healthy':
            cleanup.enter_context(mounted(cluster.hosts, '--bind', program, CLI))
        cleanup.callback(limit.write_text, f'{device} 0')
        limit.write_text(f'{device} {bytes_per_s}')
        for host in cluster.hosts if kind == 'link' else ():
            host.call(
                *'tc qdisc add dev eth0 root tbf rate 300mbit burst 256kb latency 100ms'.split()
            )
            cleanup.callback(host.call, *'tc qdisc del dev eth0 root'.split())
        cleanup.callback(cluster.reset)  # ends a run if this program is stopped
        yield


def train(cluster: Cluster, kind: str) -> Run:
    fault, folder = FAULTS[kind], Path(tempfile.mkdtemp(prefix=f'{kind}_', dir=cluster.folder))
    keys = {
        **OPTIONS,
        'data.dir': cluster.folder / fault.data,
        **fault.options,
        **dict(zip(('data.num_train', 'data.num_val'), SIZES[fault.data])),
    }
    words = ['--hosts', 'h1,h2', '--config', ROOT / 'launch/configs/digits_cpu.yaml', '--no-doctor']
    if kind == 'checkpoints':
        (folder / 'checkpoints').symlink_to(tempfile.mkdtemp(dir=cluster.folder / 'disk'))
    with planted(cluster, kind):
        job = Job(
            cluster,
            'mpirun.sh',
            [*words, *(f'--{key}={value}' for key, value in keys.items())],
            folder,
        )
        job.process.wait()
    assert 'aborted: the target was not reached' in job.output, job.output
    times = {
        key: sum(e['time_ms'] / 1000 for e in log_events(folder) if e['key'] == key)
        for key in ('run_start', 'run_stop', 'eval_start', 'eval_stop')
    }
    notes = {
        p.name: np.loadtxt(p.rename(folder / p.name), ndmin=1)
        for p in cluster.folder.glob('*s_[01]')
    }
    num_steps = 60 if kind == 'batch' else STEPS  # the first ones are those of the warm-up
    clocks = np.array(
        [notes[name][-num_steps:] for name in ('notes_0', 'notes_1') if name in notes]
        or np.zeros((2, 1, 5))
    )
    return Run(
        folder,
        times['run_stop'] - times['run_start'],
        times['eval_stop'] - times['eval_start'],
        notes.get('saves_0', np.zeros(1)).sum(),
        *np.moveaxis(clocks, 2, 0),
    )


def make_row(kind: str, run: Run) -> list[str]:
    fault = FAULTS[kind]
    share = fault.seconds(run) / run.wall_s
    done = subprocess.run(
        [CLI, 'why', run.folder, '--format', 'json'], stdout=subprocess.PIPE, text=True
    )
    named = json.loads(done.stdout) if done.returncode == 0 else {}
    is_ok = (
        named.get('verdict') == fault.verdict
        and fault.part in (None, named.get('part'))
        and (kind != 'slow_rank' or named.get('rank') == 1)
        and (kind == 'healthy' or abs(named['share'] - share) <= TOLERANCE)
    )
    texts = [str(named[key]) for key in ('verdict', 'part', 'rank') if named.get(key) is not None]
    return [
        kind,
        f'{run.wall_s:.1f}',
        f'{100 * share:.1f}',
        ' '.join(texts) or '-',
        '-' if named.get('share') is None else f'{100 * named["share"]:.1f}',
        'yes' if is_ok else 'no',
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or '').partition('\n')[0])
    parser.add_argument(
        '--kinds',
        default=','.join(k for k in FAULTS if k != 'healthy'),
        help='default: %(default)s',
    )
    parser.add_argument(
        '--rounds', type=int, default=3, help='runs per fault (default: %(default)s)'
    )
    parser.add_argument(
        '--healthy', type=int, default=10, help='healthy runs (default: %(default)s)'
    )
    options, rows = parser.parse_args(), []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # removes hosts and disk
    with tempfile.TemporaryDirectory() as folder, open_cluster(Path(folder)) as cluster:
        for number in range(max(options.rounds, options.healthy)):
            kinds = options.kinds.split(',') if number < options.rounds else []
            for kind in [*['healthy'] * (number < options.healthy), *kinds]:
                rows.append(make_row(kind, train(cluster, kind)))
                print(*rows[-1], file=sys.stderr)
    print(fit_columns(('fault', 'run s', 'planted %', 'verdict', 'named %', 'ok'), rows))
    return int(any(row[-1] == 'no' for row in rows))


if __name__ == '__main__':
    sys.exit(main())
