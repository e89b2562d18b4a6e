"""Fixtures of all cluster tests: hosts, the image, a small training, and jobs."""

import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from cluster.hosts import Cluster, Host
from e2e.training import pack_tiny
from helpers import ROOT, argv, run, skip_for, variables, wait_for

from mlperf_rn50.runfolder.jsonl import read_lines

TOOLS = """ip nsenter unshare ssh sshd munged slurmctld slurmd sbatch debootstrap buildah podman
    runc docker dockerd""".split()
# For trainings with several ranks on a core.
VARIABLES = variables('OMP_NUM_THREADS=1 OMPI_MCA_pml=ob1 OMPI_MCA_btl=tcp,self,vader')
IMAGE = 'localhost/mlperf_rn50:test'
BUILD_LIMIT_S = 3600
# A small network, and a target that the first evaluation reaches.
QUICK = ('--model.name', 'resnet18', '--train.target_accuracy', '0.05')
# Files that pip and apt need to reach the package sources of this machine.
HOST_SETTINGS = [p for p in ('/etc/ssl/certs', '/etc/pip.conf') if Path(p).exists()]


@pytest.fixture(scope='session', autouse=True)
def _tools():
    path = f'{os.environ["PATH"]}:/usr/sbin:/sbin'
    missing = ', '.join(t for t in TOOLS if not shutil.which(t, path=path))
    skip_for(missing and f'{missing}: tests/install.sh installs it')
    skip_for('not root' if os.geteuid() else '')


@pytest.fixture(scope='session')
def cluster(tmp_path_factory):
    """Hosts h1 to h3: h1 with the launcher and rank 0, h2 for faults, and h3 as an unaffected
    host."""
    hosts = Cluster(tmp_path_factory.mktemp('hosts'), 3)
    yield hosts
    hosts.close()


@pytest.fixture(autouse=True)
def _clean(request):
    """End processes and restore links after each test."""
    yield
    if 'cluster' in request.fixturenames:
        request.getfixturevalue('cluster').reset()


def buildah(*arguments):
    done = run(
        ['buildah', *arguments],
        timeout=BUILD_LIMIT_S,
        env={**os.environ, 'BUILDAH_ISOLATION': 'chroot'},
    )
    assert done.returncode == 0, f'{arguments}: {done.stdout[-3000:]}{done.stderr[-3000:]}'
    return done.stdout.strip()


def debian_mirror() -> str:
    """Return the URL of the Debian mirror that this machine uses."""
    for path in [Path('/etc/apt/sources.list'), *Path('/etc/apt/sources.list.d').glob('debian.*')]:
        text = path.read_text() if path.exists() else ''
        if mirror := re.search(r'https?://\S+/debian(?=/?\s)', text):
            return mirror[0]
    return 'http://deb.debian.org/debian'


def base_image(folder) -> str:
    """Build a Debian image with debootstrap, cached under the digest of the command; return its
    name."""
    # Install certificates here, because a read-only mount covers their folder later.
    command = 'debootstrap --variant=minbase --include=ca-certificates bookworm'.split()
    digest = hashlib.sha256(' '.join(command).encode()).hexdigest()
    name = f'localhost/mlperf_rn50-base:{digest[:12]}'
    if run(argv('buildah inspect --type image {}', name)).returncode == 0:
        return name
    root = folder / 'root'
    done = run([*command, root, debian_mirror()], timeout=BUILD_LIMIT_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    container = buildah('from', 'scratch')
    buildah('add', '--quiet', container, root, '/')
    buildah('commit', '--quiet', '--rm', container, name)
    shutil.rmtree(root)
    return name


@pytest.fixture(scope='session')
def image(tmp_path_factory) -> str:
    """CPU image, built as users build it, with unchanged layers from the previous build."""
    with open(Path(tempfile.gettempdir()) / 'mlperf_rn50_image.lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other workers may build or prune
        base = base_image(tmp_path_factory.mktemp('debian'))
        mounts = [word for path in HOST_SETTINGS for word in ('--volume', f'{path}:{path}:ro')]
        build = argv('bud --quiet --layers --isolation chroot --build-arg {}', f'BASE={base}')
        build += mounts
        # a tag protects it from pruning
        buildah(*build, '--target', 'build', '--tag', f'{IMAGE}-build', ROOT)
        buildah(*build, '--tag', IMAGE, ROOT)
        # except leftovers of killed builds
        run(['buildah', 'rmi', '--prune'], timeout=BUILD_LIMIT_S)
        return IMAGE


@pytest.fixture
def podman_settings(tmp_path, monkeypatch):
    """Configure podman for restricted machines, with runc and low limits."""
    path = tmp_path / 'containers.conf'
    path.write_text("""[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
""")
    monkeypatch.setenv('CONTAINERS_CONF', str(path))


@pytest.fixture(scope='session')
def tiny_config(tmp_path_factory) -> Path:
    """Configuration that trains ResNet-18 on 200 digits until it is stopped."""
    folder = tmp_path_factory.mktemp('tiny')
    pack_tiny(folder / 'data')
    path = folder / 'tiny.yaml'
    path.write_text(f"""
run: {{seed: 3, metrics_period_steps: 1}}
data: {{dir: {folder}/data, dataset: tiny-digits, num_train: 150, num_val: 50, num_classes: 10,
       image_size: 32, resize_shorter: 32, crop: none, num_threads: 1, read_threads: 1}}
model: {{name: resnet18, zero_gamma: true}}
schedule: {{base_lr: 0.02, warmup_epochs: 1, decay_epochs: 1000}}
train: {{global_batch_size: 24, eval_period: 1, target_accuracy: 1.0}}
comm: {{stall_limit_s: 120, num_buckets: 2}}
checkpoint: {{period_steps: 5}}
""")
    return path


def run_metrics(run_dir: Path, event: str) -> list[dict]:
    """Return the records of an event in metrics.jsonl."""
    return [m for _, m in read_lines(run_dir / 'metrics.jsonl', dict) if m['event'] == event]


class Job:
    """Launcher on the first host."""

    def __init__(self, cluster: Cluster, launcher: str, arguments, run_dir: Path, variables=()):
        self.cluster, self.run_dir = cluster, run_dir
        self.output_path = run_dir.parent / f'{run_dir.name}.out'
        self._num_seen = (0, 0)  # lines of the log and of metrics.jsonl before this attempt
        self._environment = {**cluster.environment(), **VARIABLES, **dict(variables)}
        self.start([ROOT / 'launch' / launcher, *arguments, '--run-dir', run_dir])

    def start(self, command) -> None:
        with open(self.output_path, 'w') as output:
            self.process = subprocess.Popen(
                self.cluster.hosts[0].inside(command),
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return self.output_path.read_text()

    def wait_for(self, is_reached, what: str):
        """Wait while the launcher runs until is_reached() is true; return its value."""
        return wait_for(
            is_reached,
            lambda: self.process.poll() is None,
            lambda: f'{what} not reached: {self.output}',
        )

    def wait_for_step(self, step: int) -> None:
        self.wait_for(
            lambda: any(m['step'] >= step for m in run_metrics(self.run_dir, 'train')),
            f'step {step}',
        )

    def wait_for_restart(self, number: int) -> None:
        """Wait for restart `number` (from 1) after a failure; is_in() then considers only this
        attempt."""
        self.wait_for(lambda: f'restart {number} of ' in self.output, f'restart {number}')
        self._num_seen = len(self._log()), len(run_metrics(self.run_dir, 'train'))

    def _log(self) -> list[str]:
        path = self.run_dir / 'result_0.txt'
        return path.read_text().splitlines() if path.exists() else []

    def is_in(self, phase: str, num_hosts: int = 2) -> bool:
        """Return whether this attempt is in a phase: start-up, training, evaluation, or checkpoint
        (writing one)."""
        num_lines, num_steps = self._num_seen
        log = '\n'.join(self._log()[num_lines:])
        if phase == 'start-up':
            return all(h.ranks() for h in self.cluster.hosts[:num_hosts])
        is_evaluating = log.count('"eval_start"') > log.count('"eval_stop"')
        if phase == 'evaluation':
            return is_evaluating
        if phase == 'training':  # after a checkpoint
            return len(run_metrics(self.run_dir, 'train')) >= num_steps + 8 and not is_evaluating
        # The name contains the writer, so checkpoints left by killed ranks of earlier attempts do
        # not count.
        return any(
            checkpoint
            for rank in self.cluster.hosts[0].ranks()
            for checkpoint in (self.run_dir / 'checkpoints').glob(f'.step_*.{rank}.tmp')
        )

    @contextmanager
    def held_in(self, phase: str) -> Iterator[None]:
        """Wait for a phase; suspend rank 0 during the block if the phase is short."""
        self.wait_for(lambda: self.is_in(phase), phase)
        if phase in ('start-up', 'training'):
            yield
            return
        while True:
            pid = self.rank_pid(0)
            os.kill(pid, signal.SIGSTOP)
            if self.is_in(phase):  # may have ended before the signal
                break
            os.kill(pid, signal.SIGCONT)
            self.wait_for(lambda: self.is_in(phase), phase)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def rank_pid(self, number: int) -> int:
        """Wait for the rank on host `number` (from 0), which has only one; return its process
        ID."""
        return self.wait_for(self.cluster.hosts[number].rank, f'a rank on host {number}')

    def end(self) -> tuple[int, str]:
        """Wait until the launcher and all ranks have ended; return the exit code and the output."""
        wait_for(
            lambda: (
                self.process.poll() is not None and not any(h.ranks() for h in self.cluster.hosts)
            ),
            lambda: True,
            lambda: f'remaining: {[h.ranks() for h in self.cluster.hosts]}\n{self.output}',
        )
        return self.process.returncode, self.output


@contextmanager
def mounted(hosts: Sequence[Host], *words: object) -> Iterator[None]:
    """Run mount with some arguments on hosts; unmount at the end."""
    with ExitStack() as stack:
        for host in hosts:
            host.call('mount', *words)
            stack.callback(host.call, 'umount', '--lazy', words[-1])
        yield


@pytest.fixture
def start(cluster, tiny_config, tmp_path):
    """Function that starts a launcher on some hosts, with run folder tmp_path/run."""
    jobs = []

    def start_job(*arguments, launcher='mpirun.sh', num_hosts=2, **variables) -> Job:
        hosts = ['--hosts', ','.join(h.name for h in cluster.hosts[:num_hosts])]
        words = [*hosts, '--config', tiny_config, *arguments]
        jobs.append(Job(cluster, launcher, words, tmp_path / 'run', variables))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.process.kill()
        job.process.wait()
