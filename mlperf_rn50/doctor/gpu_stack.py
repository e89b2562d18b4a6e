"""Checks that MXNet, GPUs, driver and CUDA libraries are compatible, and that trial batches ran.

Source: machine code in the published wheels (cuobjdump); NVIDIA's MXNet release notes 24.05 and
24.06; NVIDIA's CUDA compatibility guide (a CUDA 12 driver runs every CUDA 12 program; an older
driver needs the compatibility package); DALI's support matrix (its wheels for CUDA 12 need driver
525).
"""

import ctypes
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from mlperf_rn50.doctor.result import Check, MxnetFacts, RankFacts, hosts_of
from mlperf_rn50.system.environment import version_of
from mlperf_rn50.system.gpu_env import NVIDIA_VARIABLE, SET_VARIABLE, settings_of
from mlperf_rn50.system.gpus import Gpu

Problem = tuple[str, str]  # and how to fix it

# Compute capabilities with machine code in the published mxnet-cu112 and mxnet-cu117 wheels, which
# have no PTX.
WHEEL_ARCHITECTURES = ((5, 0), (6, 0), (7, 0), (8, 0), (8, 6))
WHEELS = ('mxnet-cu112', 'mxnet-cu117')
_CONTAINER_MAJORS = range(6, 10)  # compute capabilities 6.0 to 9.x (Hopper) in NVIDIA's container
_LIBRARIES = {
    11: 'libcudart.so.11.0 libcublas.so.11 libcudnn.so.8 libnccl.so.2 libcufft.so.10 '
    'libcurand.so.10 libcusolver.so.11 libnvrtc.so.11.2 libcuda.so.1 libcuda.so',
    12: 'libcudart.so.12 libcublas.so.12 libcudnn.so.9 libnccl.so.2 libcufft.so.11 '
    'libcurand.so.10 libcusolver.so.11 libnvrtc.so.12 libcuda.so.1',
}
# To compile an engine, cuDNN 8.9.6 opens libnvrtc.so.11.2, which MXNet has loaded, and libcuda.so
# by this name only (nvrtcHelper::load in libcudnn_ops_infer.so.8). Some installations of drivers
# lack this name.
_COMPILING = 'libcuda.so'
# by CUDA major version, for programs of all its minor versions on any Linux
_OLDEST_DRIVERS = {11: 450, 12: 525}
# NVIDIA's container needs the first driver or a newer one; on data centre cards, one of the others
# is enough if the compatibility package is used.
_CONTAINER_DRIVER = 545
_DATA_CENTRE_DRIVERS = ((470, 57), (525, 85), (535, 86))
_DATA_CENTRE = re.compile(r'(NVIDIA )?(Tesla|(GH|GB|[PVTAHLB])\d+\w*\b)')
_CONTAINER = "NVIDIA's container"
USE_CONTAINER = (
    "use NVIDIA's container: docker build --build-arg VARIANT=ngc --build-arg "
    'BASE=nvcr.io/nvidia/mxnet:24.06-py3 . (docs/setup.md)'
)
_ERROR_WORDS = ('Check failed', 'Error:', 'cuDNN', 'CUDA', 'out of memory')
_LOWER_BATCH = 'lower train.local_batch_size or train.eval_batch_size, or set model.layout to NCHW'
_FIXES = (  # (part of an MXNet error, fix)
    (
        'out of memory',
        'lower train.local_batch_size (raise train.gradient_accumulation_steps to keep the global '
        'batch size) or train.eval_batch_size',
    ),
    (
        'no kernel image',
        "this MXNet has no code for this card; use NVIDIA's container (docs/setup.md)",
    ),
    ('CUDNN_STATUS_NOT_SUPPORTED', f'cuDNN has no kernel for these sizes; {_LOWER_BATCH}'),
    ('CUDNN_STATUS_BAD_PARAM', f'cuDNN rejects these sizes; {_LOWER_BATCH}'),
    ('insufficient for CUDA runtime', 'install a newer NVIDIA driver'),
    ('DALI', 'set data.decoder to cpu; if DALI still fails, install a newer NVIDIA driver'),
)


def mxnet_facts(
    packages: Mapping[str, str],
    env: Mapping[str, str],
    maps: str,
    has_cuda: bool,
    has_fused_norm: bool,
) -> MxnetFacts:
    """Describe this process's MXNet. maps: /proc/self/maps, which lists the loaded libraries."""
    release = env.get(NVIDIA_VARIABLE, '')
    wheel = next((n for n in WHEELS if n in packages), '')
    compatibility = env.get('_CUDA_COMPAT_STATUS', '')
    if not has_cuda:
        return MxnetFacts('cpu', release or wheel, {}, compatibility)
    pattern = r'/(libcudart|libcublas|libcudnn|libnccl)\.so\.([\d.]+)$'
    libraries = dict(sorted(set(re.findall(pattern, maps, re.MULTILINE))))
    kind: Literal['container', 'wheels', 'other'] = 'wheels' if wheel else 'other'
    if release or has_fused_norm:
        kind = 'container'
    return MxnetFacts(kind, release or wheel, libraries, compatibility)


def cuda_libraries(major: int) -> dict[str, str | None]:
    """Return versions of the libraries that MXNet needs with CUDA 11 or 12: '' if unknown, None if
    not loadable."""
    result: dict[str, str | None] = {}
    for name in _LIBRARIES[major].split():
        try:
            result[name] = version_of(ctypes.CDLL(name), name)
        except (OSError, AttributeError):
            result[name] = None
    return result


def _numbers(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version. A missing number is 0."""
    first, second = [*map(int, re.findall(r'\d+', version)), 0, 0][:2]
    return first, second


def _capability_problem(kind: str, capability: str) -> Problem | None:
    """Return the problem if a kind of MXNet build has no code for a compute capability such as
    8.9."""
    major, minor = _numbers(capability)
    if major > _CONTAINER_MAJORS[-1]:
        return (
            f'neither the published wheels nor {_CONTAINER} (last release: 24.06) has code for it',
            'use V100, A100 or H100, or build MXNet for this card',
        )
    if kind == 'wheels' and not any(major == a and minor >= b for a, b in WHEEL_ARCHITECTURES):
        fix = 'use V100, A100 or A10, or build MXNet for this card'
        return (
            'the published mxnet-cu wheels have code only up to 8.6 (which also runs on 8.9)',
            USE_CONTAINER if major in _CONTAINER_MAJORS else fix,
        )
    if kind == 'container' and major not in _CONTAINER_MAJORS:
        return (
            f'{_CONTAINER} has code only from 6.0 on',
            'install MXNet with MLPERF_RN50_VARIANT=cu117 launch/setup.sh',
        )
    return None


def _driver_problem(row: RankFacts, gpu: Gpu) -> Problem | None:
    """Return the problem if the driver of a GPU cannot run MXNet and DALI."""
    if row.mxnet.kind == 'container':
        return _driver_problem_in_container(row, gpu)
    series, _ = _numbers(gpu.driver_version)
    needed = {'MXNet': row.mxnet.cuda_major}
    if 'nvidia-dali-cuda120' in row.packages:
        needed['DALI'] = 12
    unmet = [
        f'{library} (CUDA {major}) needs {_OLDEST_DRIVERS[major]} or newer'
        for library, major in needed.items()
        if series < _OLDEST_DRIVERS[major] and (_driver_cuda(row) or 0) < major
    ]
    return (', '.join(unmet), 'install a newer driver') if unmet else None


def _driver_problem_in_container(row: RankFacts, gpu: Gpu) -> Problem | None:
    series, release = _numbers(gpu.driver_version)
    if series >= _CONTAINER_DRIVER:
        return None
    is_known = any(series == a and release >= b for a, b in _DATA_CENTRE_DRIVERS)
    if not (is_known and _DATA_CENTRE.match(gpu.name)):
        others = ', '.join(f'{a}.{b}' for a, b in _DATA_CENTRE_DRIVERS)
        return (
            f'{_CONTAINER} (CUDA 12.4) needs {_CONTAINER_DRIVER} or newer; on data centre cards '
            f'also {others} or later in these series',
            'install a newer driver, or use the wheels: MLPERF_RN50_VARIANT=cu117',
        )
    cuda = _driver_cuda(row)
    if cuda is None or cuda >= 12:
        return None
    status = f' ({row.mxnet.compatibility})' if row.mxnet.compatibility else ''
    return (
        f'it is for CUDA {cuda}, and the compatibility package is not in use{status}',
        'start the container with its default entry point, or put /usr/local/cuda/compat/lib '
        'first in LD_LIBRARY_PATH',
    )


def _driver_cuda(row: RankFacts) -> int | None:
    """Return libcuda's CUDA major version, which is newer with the compatibility package."""
    version = row.cuda_libraries.get('libcuda.so.1') or ''
    return int(version) // 1000 if version.isdecimal() else None


def has_code(mxnet: MxnetFacts, gpus: Sequence[Gpu]) -> bool:
    """Return whether an MXNet build has code for all these GPUs."""
    return not any(_capability_problem(mxnet.kind, gpu.compute_cap) for gpu in gpus)


def _gpu_problems(row: RankFacts) -> Iterator[Problem]:
    """Yield (problem, fix) for each problem with a rank's GPU."""
    host = row.host
    if row.mxnet.kind == 'cpu':
        yield (
            f'MXNet on {host} is a CPU build',
            'run MLPERF_RN50_VARIANT=cu117 launch/setup.sh, or for Hopper MLPERF_RN50_VARIANT=ngc '
            "launch/setup.sh in NVIDIA's container",
        )
    if not row.gpus:
        found = f'the driver on {host} lists no GPU'
        if row.visible is not None:
            found = f'no GPU is visible on {host} (CUDA_VISIBLE_DEVICES={row.visible})'
        yield (
            found,
            'install the NVIDIA driver, give the container access to the GPUs, or correct '
            'CUDA_VISIBLE_DEVICES',
        )
    for gpu in row.used_gpus:
        if problem := _capability_problem(row.mxnet.kind, gpu.compute_cap):
            has = f'{gpu.name} on {host} has compute capability {gpu.compute_cap}'
            yield f'{has}; {problem[0]}', problem[1]
        if problem := _driver_problem(row, gpu):
            yield f'driver {gpu.driver_version} on {host}; {problem[0]}', problem[1]
    if row.device_problem:
        yield row.device_problem, ''


def check_gpus(rows: Sequence[RankFacts], device: str) -> Check:
    """Check that every rank has a GPU that works with its MXNet and driver."""
    name = 'GPU'
    if device != 'gpu':
        return Check(name, 'not needed', 'train.device=cpu')
    for problem, fix in (pair for row in rows for pair in _gpu_problems(row)):
        return Check(name, 'failed', problem, fix)
    used = {(r.host, r.device, gpu.uuid): gpu.name for r in rows for gpu in r.used_gpus}
    # instances of a card count once
    cards = {(r.host, gpu.bus_id or gpu.uuid) for r in rows for gpu in r.used_gpus}
    num_used = Counter(host for host, _ in cards)
    # NCCL finds NVLink through NVML, which lists only GPUs that the process can open.
    # CUDA_VISIBLE_DEVICES does not matter, because since CUDA 10.1 NCCL reaches invisible devices
    # too (p2p.cc).
    if alone := [r for r in rows if r.num_open_gpus == 1 < num_used[r.host]]:
        return Check(
            name,
            'warning',
            f'NVLink is not used on {hosts_of(alone)}, because each rank can open only one GPU of '
            'the node',
            'let every rank open all GPUs of its node, as with --gpus-per-node instead of '
            '--gpus-per-task',
        )
    shown = ', '.join(f'{n} x {card}' for card, n in Counter(used.values()).items())
    mxnet = rows[0].mxnet
    origins = {'container': f'{_CONTAINER} {mxnet.release}'.strip(), 'wheels': mxnet.release}
    origin = origins.get(mxnet.kind, 'a custom build')
    driver = rows[0].used_gpus[0].driver_version
    return Check(name, 'ok', f'{shown}; driver {driver}; MXNet from {origin}')


def check_libraries(rows: Sequence[RankFacts], device: str) -> Check:
    """Check that the loader finds the libraries that MXNet's CUDA version needs."""
    name = 'CUDA libraries'
    if device != 'gpu':
        return Check(name, 'not needed', 'train.device=cpu')
    if all(row.mxnet.kind == 'cpu' for row in rows):
        return Check(name, 'not needed', 'MXNet is a CPU build')
    for row in rows:
        absent = [n for n, version in row.cuda_libraries.items() if version is None]
        if missing := [n for n in absent if n != _COMPILING]:
            where = f'not found on {row.host} for CUDA {row.mxnet.cuda_major}'
            fix = 'run launch/setup.sh --check on that host; libcuda.so.1 comes with the driver'
            return Check(name, 'failed', f'{where}: {", ".join(missing)}', fix)
    if blind := [r for r in rows if r.cuda_libraries.get(_COMPILING, '') is None]:
        return Check(
            name,
            'warning',
            f'{_COMPILING} not found on {hosts_of(blind)}, so cuDNN cannot use engines that it '
            'compiles at run time',
            f'link {_COMPILING} to libcuda.so.1 in a folder of LD_LIBRARY_PATH',
        )
    versions = rows[0].cuda_libraries
    return Check(name, 'ok', ', '.join(f'{n} {v}'.strip() for n, v in versions.items()))


def one_line(error: str) -> str:
    """Shorten an MXNet error to the last line that names a failure or, if there is none, to the
    first line."""
    lines = [' '.join(line.split()) for line in error.splitlines()]
    lines = [
        line
        for line in lines
        if line and not line.startswith(('Traceback', 'Stack trace', '[bt]', 'File "'))
    ]
    failures = [line for line in lines if any(word in line for word in _ERROR_WORDS)]
    return (failures[-1:] or lines[:1] or ['an error without a message'])[0][:300]


def check_trial(rows: Sequence[RankFacts]) -> Check:
    """Check that DALI, a training pass and an evaluation ran on every GPU with the configured batch
    sizes."""
    name = 'trial batches'
    trials = [r.trial for r in rows if r.trial]
    for row in rows:
        if row.trial and row.trial.problem:
            found = f'{row.trial.what} on {row.host}: {row.trial.problem}'
            other = 'try model.layout NCHW, float32 and a smaller batch, to find the cause'
            fix = next((fix for text, fix in _FIXES if text in found), other)
            return Check(name, 'failed', found, fix)
    if idle := [r for r in rows if not r.trial]:
        return Check(name, 'not needed', f'no usable GPU on {hosts_of(idle)}')
    if warnings := [text for trial in trials for text in trial.warnings]:
        return Check(name, 'warning', warnings[0])
    seconds = max(trial.seconds for trial in trials)
    used = max(trial.used_bytes for trial in trials)
    return Check(
        name,
        'ok',
        f'a training pass, an evaluation and (unless data.synthetic) DALI ran on every rank in at '
        f'most {seconds:.0f} s; afterwards, up to {used / 1e9:.1f} GB of a GPU were in use',
    )


def environment_facts(
    env: Mapping[str, str], is_nvidias: bool
) -> dict[str, tuple[str | None, str]]:
    """Return each setting's value in this process (None if not set) and its source, program or
    user."""
    from_program = env.get(SET_VARIABLE, '').split(',')
    return {
        name: (env.get(name), 'program' if name in from_program else 'user')
        for name in settings_of(is_nvidias)
    }


def check_environment(rows: Sequence[RankFacts]) -> Check:
    """Check that every rank on a GPU has all settings and that their values are the same on all
    hosts."""
    name = 'GPU environment'
    for row in rows:
        if missing := [s for s, (value, _) in row.gpu_environment.items() if value is None]:
            known = settings_of(True)
            values = ' '.join(f'{s}={known[s]}' for s in missing)
            found = f'not set on {row.host}: {", ".join(missing)}'
            return Check(name, 'warning', found, f'export {values}, or {NVIDIA_VARIABLE}')
    texts: dict[str, list[str]] = {'program': [], 'user': []}
    for setting, (value, source) in rows[0].gpu_environment.items():
        odd = [r for r in rows if r.gpu_environment.get(setting, (value,))[0] != value]
        if odd:
            other = f'{odd[0].gpu_environment[setting][0]} on {hosts_of(odd)}'
            found = f'{setting}={other}, but {value} on {rows[0].host}'
            return Check(name, 'warning', found, 'use the same value on all hosts')
        texts[source].append(f'{setting}={value}')
    groups = [f'set by the {source}: {", ".join(t)}' for source, t in texts.items() if t]
    return Check(name, 'ok', '; '.join(groups))
