"""Check that the libraries of MXNet and Horovod resolve, and that MXNet, DALI and Horovod import.

Usage: .venv/bin/python launch/check_setup.py VARIANT [NOTE]; launch/setup.sh runs this. A note
states why Horovod is missing. The exit code is 2 after a message, and 1 if an import fails.
"""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

# They come with the driver of the host.
OF_DRIVER = {'libcuda.so.1', 'libnvidia-ml.so.1'}


def refuse(text: str) -> NoReturn:
    print(f'launch/setup.sh: {text}', file=sys.stderr)
    sys.exit(2)


def missing_libraries(packages: list[str]) -> set[str]:
    """Return the libraries that the loader does not find. Horovod finds MXNet's when MXNet is
    loaded."""
    files: list[Path] = []
    for name in packages:
        spec = find_spec(name)
        if spec is None:
            refuse('.venv is unfinished; run launch/setup.sh')
        for folder in spec.submodule_search_locations or ():
            files += Path(folder).rglob('*.so')
    listed = subprocess.run(['ldd', *files], capture_output=True, text=True).stdout
    return set(re.findall(r'^\s*(\S+) => not found', listed, re.MULTILINE)) - {'libmxnet.so'}


def imported_versions(has_horovod: bool) -> str:
    """Import the packages; return their versions."""
    import mxnet
    import nvidia.dali

    found = f'MXNet {mxnet.__version__}, DALI {nvidia.dali.__version__}'
    if not has_horovod:
        return found
    import horovod
    import horovod.mxnet as hvd

    parts = {
        'MPI': hvd.mpi_built,
        'Gloo': hvd.gloo_built,
        'NCCL': hvd.nccl_built,
        'CUDA': hvd.cuda_built,
    }
    built = '+'.join(name for name, is_built in parts.items() if is_built())
    return f'{found}, Horovod {horovod.__version__} with {built}'


def main(variant: str, note: str = '') -> None:
    missing = missing_libraries(['mxnet'] if note else ['mxnet', 'horovod'])
    names = ', '.join(sorted(missing))
    if missing and variant != 'cpu' and missing <= OF_DRIVER:
        print(
            f'all libraries resolve except {names}, which comes with the driver of the host{note}'
        )
    elif missing:
        refuse(f'the loader does not find these libraries: {names}')
    else:
        print(f'all libraries resolve; {imported_versions(not note)} import{note}')


if __name__ == '__main__':
    main(*sys.argv[1:])
