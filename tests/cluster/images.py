"""The image, built from the Dockerfile by buildah, without a container engine."""
import hashlib
import os
import re
import shutil
from pathlib import Path

from helpers import ROOT, run

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


def build_image(folder) -> str:
    """The CPU image, built as its users build it; layers whose inputs have not changed are those of the last build."""
    base = base_image(folder)
    mounts = [word for path in HOST_SETTINGS for word in ('--volume', f'{path}:{path}:ro')]
    build = ['bud', '--quiet', '--layers', '--isolation', 'chroot', '--build-arg', f'BASE={base}', *mounts]
    buildah(*build, '--target', 'build', '--tag', f'{IMAGE}-build', ROOT)  # named, or the pruning would take it
    buildah(*build, '--tag', IMAGE, ROOT)
    run(['buildah', 'rmi', '--prune'], timeout=BUILD_LIMIT_S)  # but for what a build holds that was killed elsewhere
    return IMAGE
