"""Which program this is: its version, its commit, the packages under it and the machine, for a report of any kind."""
import platform
import re
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path

import mlperf_rn50
from mlperf_rn50.system.processor import find_processor

_MXNETS = ('mxnet', 'mxnet-cu112', 'mxnet-cu117')
_PACKAGES = (*_MXNETS, 'horovod', 'nvidia-dali-cuda120', 'numpy', 'mlperf-logging', 'mlperf-compliance', 'openmpi')
_NAMES = {'nvidia-dali-cuda120': 'DALI', 'horovod': 'Horovod', 'openmpi': 'Open MPI', 'numpy': 'NumPy'}


def package_versions() -> dict[str, str]:
    """Versions of the packages that matter, those installed."""
    result = {'mlperf-rn50': mlperf_rn50.__version__}  # an editable install keeps the version it was made with
    for name in _PACKAGES:
        try:
            result[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    # What a container has otherwise than as packages of Python.
    if not any(name in result for name in _MXNETS) and (version := _mxnet_version()):
        result['mxnet'] = version
    if 'mxnet' in result and 'openmpi' not in result and (
            said := re.match(r'mpirun \(Open MPI\) (\S+)', output_of('mpirun', '--version'))):
        result['openmpi'] = said[1]
    return result


def _mxnet_version() -> str | None:
    """The version that MXNet's files say, without its being imported."""
    found = util.find_spec('mxnet')
    for folder in (found and found.submodule_search_locations) or ():
        path = Path(folder) / 'libinfo.py'
        if path.is_file() and (said := re.search(r"^__version__ = '([\w.+-]+)'", path.read_text(), re.MULTILINE)):
            return said[1]
    return None


def output_of(*command: str, timeout_s: float = 10) -> str:
    """What a command prints; '' where it does not exist, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors='replace', timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return ''
    return done.stdout if done.returncode == 0 else ''


def git_commit() -> str | None:
    """Commit of the program's checkout, with '-dirty' where files differ from it; None outside one."""
    command = ['git', '-C', str(Path(mlperf_rn50.__file__).parent), 'describe', '--always', '--dirty', '--abbrev=40']
    return output_of(*command, '--exclude=*').strip() or None


def render_stack() -> str:
    """What --version prints: the program, what it stands on, and the machine."""
    versions, processor, commit = package_versions(), find_processor(), git_commit()
    mxnet = next((n for n in versions if n.startswith('mxnet')), 'mxnet')
    names = {mxnet: f'MXNet {mxnet.partition("-")[2]}'.strip(), **_NAMES}
    limit = f', of it {processor.uses} (DNNL_MAX_CPU_ISA)' if processor.uses != processor.has else ''
    return '\n'.join([
        f'mlperf-rn50 {versions["mlperf-rn50"]}' + (f' (commit {commit})' if commit else ''),
        ', '.join(f'{name} {versions.get(package, "not installed")}' for package, name in names.items()),
        f'Python {sys.version.split()[0]}, {platform.platform()}',
        f'{processor.name or platform.machine()}, {processor.has}{limit}'])
