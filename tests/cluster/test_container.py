"""The image, really built from the Dockerfile and run: buildah without a container engine, and podman."""
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers import HANG_LIMIT_S, ROOT, run

IMAGE = 'localhost/mlperf_rn50:test'
BUILD_LIMIT_S = 3600
# A small network, and a target that its first evaluation reaches.
QUICK = ('--model.name', 'resnet18', '--train.target_accuracy', '0.05')
# pip and apt must find the package sources this machine uses.
HOST_SETTINGS = [p for p in ('/etc/ssl/certs', '/etc/pip.conf') if Path(p).exists()]


def buildah(*arguments, timeout=BUILD_LIMIT_S):
    done = run(['buildah', *arguments], timeout=timeout, env={**os.environ, 'BUILDAH_ISOLATION': 'chroot'})
    assert done.returncode == 0, f'{arguments}: {done.stdout[-3000:]}{done.stderr[-3000:]}'
    return done.stdout.strip()


def debian_mirror() -> str:
    """Where this machine gets Debian from."""
    for path in [Path('/etc/apt/sources.list'), *Path('/etc/apt/sources.list.d').glob('debian.*')]:
        found = re.search(r'https?://\S+/debian(?=/?\s)', path.read_text()) if path.exists() else None
        if found:
            return found[0]
    return 'http://deb.debian.org/debian'


def base_image(folder) -> str:
    """A Debian made by debootstrap, kept from one run of the tests to the next under the digest of how it is made."""
    # With certificates, whose folder is then read-only: those of this machine.
    command = ['debootstrap', '--variant=minbase', '--include=ca-certificates', 'bookworm']
    name = f'localhost/mlperf_rn50-base:{hashlib.sha256(" ".join(command).encode()).hexdigest()[:12]}'
    if run(['buildah', 'inspect', '--type', 'image', name]).returncode == 0:
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
def image(tmp_path_factory):
    """The CPU image, built as its users build it; layers whose inputs have not changed are those of the last build."""
    base = base_image(tmp_path_factory.mktemp('debian'))
    mounts = [word for path in HOST_SETTINGS for word in ('--volume', f'{path}:{path}:ro')]
    build = ['bud', '--quiet', '--layers', '--isolation', 'chroot', '--build-arg', f'BASE={base}', *mounts]
    buildah(*build, '--target', 'build', '--tag', f'{IMAGE}-build', ROOT)  # named, or the pruning would take it
    buildah(*build, '--tag', IMAGE, ROOT)
    buildah('rmi', '--prune')
    return IMAGE


@pytest.fixture
def container(image):
    made = buildah('from', image)
    yield made
    buildah('rm', made)


def test_the_image_is_small_enough_and_starts_as_a_user(image, container):
    size = int(run(['podman', 'image', 'inspect', '--format', '{{.Size}}', image]).stdout)
    assert size < 2.5e9, size  # DALI alone is 1 GB
    config = run(['podman', 'image', 'inspect', '--format', '{{.Config.User}} {{.Config.Entrypoint}}', image]).stdout
    assert config.split() == ['1000', '[mlperf-rn50]']
    assert buildah('run', container, '--', 'id', '-un') == 'rn50'
    assert buildah('run', container, '--', 'mlperf-rn50', '--version').startswith('mlperf-rn50 ')
    somebody = ('run', '--user', '12345:0', container, '--', '/opt/mlperf_rn50/launch/user.sh')
    home = buildah(*somebody, 'bash', '-c', 'whoami && echo ~ && touch ~/file && ssh -G host | grep ^port')
    assert home.split() == ['user12345', '/home/rn50', 'port', '22']
    assert not buildah('run', container, '--', 'find', '/etc/ssh', '-name', 'ssh_host_*')
    said = buildah('run', container, '--', '/opt/mlperf_rn50/launch/setup.sh', '--check')
    assert 'every library resolves' in said and 'with MPI, Gloo import' in said


def test_the_image_prepares_trains_and_logs(container, tmp_path):
    tmp_path.chmod(0o777)
    mount = ('--volume', f'{tmp_path}:/data')
    buildah('run', *mount, container, '--', 'mlperf-rn50', 'prepare', 'digits', '--out', '/data/digits')
    said = buildah('run', *mount, container, '--', '/opt/mlperf_rn50/launch/local.sh', '--ranks-per-node', '2',
                   '--config', '/opt/mlperf_rn50/launch/configs/digits_cpu.yaml', '--data.dir', '/data/digits',
                   '--run-dir', '/data/run', *QUICK)
    assert 'status              converged' in said
    checked = run([ROOT / '.venv/bin/mlperf-rn50', 'check', tmp_path / 'run/result_0.txt', '--ruleset', '4.0.0'])
    assert checked.returncode == 0, checked.stdout


@pytest.fixture
def podman_settings(tmp_path, monkeypatch):
    """podman as it runs on machines that allow little: another runtime, low limits."""
    path = tmp_path / 'containers.conf'
    path.write_text('[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]\n'
                    '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\n')
    monkeypatch.setenv('CONTAINERS_CONF', str(path))


def test_docker_sh_trains_with_podman(image, podman_settings, digits, tmp_path):
    done = subprocess.run(
        [ROOT / 'launch/docker.sh', '--image', image, '--mount', digits, '--config',
         '/opt/mlperf_rn50/launch/configs/digits_cpu.yaml', '--ranks-per-node', '2', '--run-dir', tmp_path / 'run',
         '--data.dir', digits, *QUICK],
        cwd=tmp_path, capture_output=True, text=True, timeout=HANG_LIMIT_S,
        env={**os.environ, 'MLPERF_RN50_DOCKER': 'podman', 'OMP_NUM_THREADS': '1'})
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'status              converged' in done.stdout
    assert (tmp_path / 'run/result_0.txt').exists()
    assert '"OMP_NUM_THREADS": "1"' in (tmp_path / 'run/env.json').read_text()
