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
from typing import Any

from mlperf_rn50.doctor.result import Check, Facts, hosts_of
from mlperf_rn50.system.gpu_env import NVIDIA_VARIABLE, SET_VARIABLE, settings_of

# Compute capabilities with machine code in the published mxnet-cu112 and mxnet-cu117 wheels, which
# have no PTX.
WHEEL_ARCHITECTURES = ((5, 0), (6, 0), (7, 0), (8, 0), (8, 6))
WHEELS = ('mxnet-cu112', 'mxnet-cu117')
_CONTAINER_MAJORS = range(6, 10)  # compute capabilities 6.0 to 9.x (Hopper) in NVIDIA's container
_LIBRARIES = {
    11: (
        'libcudart.so.11.0',
        'libcublas.so.11',
        'libcudnn.so.8',
        'libnccl.so.2',
        'libcufft.so.10',
        'libcurand.so.10',
        'libcusolver.so.11',
        'libnvrtc.so.11.2',
        'libcuda.so.1',
        'libcuda.so',
    ),
    12: (
        'libcudart.so.12',
        'libcublas.so.12',
        'libcudnn.so.9',
        'libnccl.so.2',
        'libcufft.so.11',
        'libcurand.so.10',
        'libcusolver.so.11',
        'libnvrtc.so.12',
        'libcuda.so.1',
    ),
}
# To compile an engine, cuDNN 8.9.6 opens libnvrtc.so.11.2, which MXNet has loaded, and libcuda.so
# by this name only (nvrtcHelper::load in libcudnn_ops_infer.so.8). Some installations of drivers
# lack this name.
_COMPILING = 'libcuda.so'
# by CUDA major version, for programs of all its minor versions on any Linux
_OLDEST_DRIVERS = {11: 450, 12: 525}
# NVIDIA's container needs the first driver or a newer one; on data centre cards, one of the others
# is enough if the compatibility package is used.
_CONTAINER_DRIVER, _DATA_CENTRE_DRIVERS = 545, ((470, 57), (525, 85), (535, 86))
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
) -> dict[str, Any]:
    """Describe this process's MXNet. Its kind is cpu, wheels, container (NVIDIA's build, wherever
    it runs) or other."""
    release = env.get(NVIDIA_VARIABLE, '')
    wheel = next((n for n in WHEELS if n in packages), '')
    kind = (
        'cpu'
        if not has_cuda
        else 'container'
        if release or has_fused_norm
        else 'wheels'
        if wheel
        else 'other'
    )
    loaded = set(
        re.findall(r'/(libcudart|libcublas|libcudnn|libnccl)\.so\.([\d.]+)$', maps, re.MULTILINE)
    )
    return {
        'kind': kind,
        'release': release or wheel,
        'libraries': dict(sorted(loaded)) if has_cuda else {},
        'compatibility': env.get('_CUDA_COMPAT_STATUS', ''),
    }


def cuda_major(mxnet: Mapping[str, Any]) -> int:
    """Return the CUDA major version of an MXNet build. If unknown, 12 for NVIDIA's container, else
    11."""
    version = mxnet['libraries'].get('libcudart', '')
    return 12 if version.startswith('12.') or not version and mxnet['kind'] == 'container' else 11


def _version_of(library: ctypes.CDLL, name: str) -> str:
    """Return the version number that a library reports, or '' if it reports none."""
    number = ctypes.c_int()
    if name.startswith('libcudnn'):
        return str(library.cudnnGetVersion())
    functions = {
        'libcudart': 'cudaRuntimeGetVersion',
        'libnccl': 'ncclGetVersion',
        'libcuda': 'cuDriverGetVersion',
    }
    function = functions.get(name.partition('.')[0])
    return (
        str(number.value)
        if function and getattr(library, function)(ctypes.byref(number)) == 0
        else ''
    )


def cuda_libraries(major: int) -> dict[str, str | None]:
    """Return versions of the libraries that MXNet needs with CUDA 11 or 12: '' if unknown, None if
    not loadable."""
    result: dict[str, str | None] = {}
    for name in _LIBRARIES[major]:
        try:
            result[name] = _version_of(ctypes.CDLL(name), name)
        except (OSError, AttributeError):
            result[name] = None
    return result


def _numbers(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version. A missing number is 0."""
    first, second = [*map(int, re.findall(r'\d+', version)), 0, 0][:2]
    return first, second


def capability_problem(kind: str, capability: str) -> tuple[str, str] | None:
    """Return (problem, fix) if a kind of MXNet build has no code for a compute capability such as
    8.9, else None."""
    major, minor = _numbers(capability)
    if major > _CONTAINER_MAJORS[-1]:
        return (
            f'neither the published wheels nor {_CONTAINER} (last release: 24.06) has code for it',
            'use V100, A100 or H100, or build MXNet for this card',
        )
    if kind == 'wheels' and not any(major == a and minor >= b for a, b in WHEEL_ARCHITECTURES):
        fix = (
            USE_CONTAINER
            if major in _CONTAINER_MAJORS
            else 'use V100, A100 or A10, or build MXNet for this card'
        )
        return (
            'the published mxnet-cu wheels have code only up to 8.6 (which also runs on 8.9)',
            fix,
        )
    if kind == 'container' and major not in _CONTAINER_MAJORS:
        return (
            f'{_CONTAINER} has code only from 6.0 on',
            'install MXNet with MLPERF_RN50_VARIANT=cu117 launch/setup.sh',
        )
    return None


def driver_problem(
    mxnet: Mapping[str, Any], packages: Mapping[str, str], name: str, version: str, cuda_driver: str
) -> tuple[str, str] | None:
    """Return (problem, fix) if a driver cannot run MXNet and DALI, else None.

    Args:
        cuda_driver: libcuda's CUDA version, such as 12020; '' if unknown; newer with CUDA's
            compatibility package.
    """
    series, release = _numbers(version)
    if mxnet['kind'] != 'container':
        cuda = int(cuda_driver) // 1000 if cuda_driver.isdecimal() else 0
        needed = {
            'MXNet': cuda_major(mxnet),
            **({'DALI': 12} if 'nvidia-dali-cuda120' in packages else {}),
        }
        unmet = [
            f'{library} (CUDA {major}) needs {_OLDEST_DRIVERS[major]} or newer'
            for library, major in needed.items()
            if series < _OLDEST_DRIVERS[major] and cuda < major
        ]
        return (', '.join(unmet), 'install a newer driver') if unmet else None
    if series >= _CONTAINER_DRIVER:
        return None
    if not any(
        series == a and release >= b for a, b in _DATA_CENTRE_DRIVERS
    ) or not _DATA_CENTRE.match(name):
        others = ', '.join(f'{a}.{b}' for a, b in _DATA_CENTRE_DRIVERS)
        return (
            f'{_CONTAINER} (CUDA 12.4) needs {_CONTAINER_DRIVER} or newer; on data centre cards '
            f'also {others} or later in these series',
            'install a newer driver, or use the wheels: MLPERF_RN50_VARIANT=cu117',
        )
    if cuda_driver.isdecimal() and int(cuda_driver) < 12000:
        return (
            f'it is for CUDA {int(cuda_driver) // 1000}, and the compatibility package is not in '
            'use' + (f' ({mxnet["compatibility"]})' if mxnet['compatibility'] else ''),
            'start the container with its default entry point, or put /usr/local/cuda/compat/lib '
            'first in LD_LIBRARY_PATH',
        )
    return None


def used_gpus(row: Facts) -> list[dict[str, Any]]:
    """Return the GPU that a rank uses. If that is unknown, all GPUs that it sees."""
    device = row['device']
    return row['gpus'] if device is None or device >= len(row['gpus']) else [row['gpus'][device]]


def has_code(row: Facts) -> bool:
    """Return whether a rank's MXNet has code for its GPU."""
    return not any(
        capability_problem(row['mxnet']['kind'], gpu['compute_cap']) for gpu in used_gpus(row)
    )


def _gpu_problems(row: Facts) -> Iterator[tuple[str, str]]:
    """Yield (problem, fix) for each problem with a rank's GPU."""
    mxnet, host = row['mxnet'], row['host']
    if mxnet['kind'] == 'cpu':
        yield (
            f'MXNet on {host} is a CPU build',
            (
                'run MLPERF_RN50_VARIANT=cu117 launch/setup.sh, or for Hopper '
                "MLPERF_RN50_VARIANT=ngc launch/setup.sh in NVIDIA's container"
            ),
        )
    if not row['gpus']:
        yield (
            f'the driver on {host} lists no GPU'
            if row['visible'] is None
            else f'no GPU is visible on {host} (CUDA_VISIBLE_DEVICES={row["visible"]})',
            'install the NVIDIA driver, give the container access to the GPUs, or correct '
            'CUDA_VISIBLE_DEVICES',
        )
    for gpu in used_gpus(row):
        if problem := capability_problem(mxnet['kind'], gpu['compute_cap']):
            yield (
                f'{gpu["name"]} on {host} has compute capability {gpu["compute_cap"]}; '
                f'{problem[0]}',
                problem[1],
            )
        if problem := driver_problem(
            mxnet,
            row['packages'],
            gpu['name'],
            gpu['driver_version'],
            row['cuda_libraries'].get('libcuda.so.1') or '',
        ):
            yield f'driver {gpu["driver_version"]} on {host}; {problem[0]}', problem[1]
    if row['device_problem']:
        yield row['device_problem'], ''


def check_gpus(rows: Sequence[Facts], device: str) -> Check:
    """Check that every rank has a GPU that works with its MXNet and driver."""
    if device != 'gpu':
        return Check('GPU', 'not needed', 'train.device=cpu')
    for problem, fix in (pair for row in rows for pair in _gpu_problems(row)):
        return Check('GPU', 'failed', problem, fix)
    used = {(r['host'], r['device'], g['uuid']): g['name'] for r in rows for g in used_gpus(r)}
    num_used = Counter(host for host, _ in {(host, uuid) for host, _, uuid in used})
    # NCCL finds NVLink through NVML, which lists only GPUs that the process can open.
    # CUDA_VISIBLE_DEVICES does not matter, because since CUDA 10.1 NCCL reaches invisible devices
    # too (p2p.cc).
    if alone := [r for r in rows if r['num_open_gpus'] == 1 < num_used[r['host']]]:
        return Check(
            'GPU',
            'warning',
            f'NVLink is not used on {hosts_of(alone)}, because each rank can open only one '
            'GPU of the node',
            'let every rank open all GPUs of its node, as with --gpus-per-node instead of '
            '--gpus-per-task',
        )
    shown = ', '.join(f'{n} x {name}' for name, n in Counter(used.values()).items())
    mxnet, driver = rows[0]['mxnet'], used_gpus(rows[0])[0]['driver_version']
    origins = {'container': f'{_CONTAINER} {mxnet["release"]}'.strip(), 'wheels': mxnet['release']}
    return Check(
        'GPU',
        'ok',
        f'{shown}; driver {driver}; MXNet from {origins.get(mxnet["kind"], "a custom build")}',
    )


def check_libraries(rows: Sequence[Facts], device: str) -> Check:
    """Check that the loader finds the libraries that MXNet's CUDA version needs."""
    name = 'CUDA libraries'
    if device != 'gpu':
        return Check(name, 'not needed', 'train.device=cpu')
    if all(row['mxnet']['kind'] == 'cpu' for row in rows):
        return Check(name, 'not needed', 'MXNet is a CPU build')
    for row in rows:
        if missing := [
            n for n, version in row['cuda_libraries'].items() if version is None and n != _COMPILING
        ]:
            return Check(
                name,
                'failed',
                f'not found on {row["host"]} for CUDA {cuda_major(row["mxnet"])}: '
                f'{", ".join(missing)}',
                'run launch/setup.sh --check on that host; libcuda.so.1 comes with the driver',
            )
    if blind := [r for r in rows if r['cuda_libraries'].get(_COMPILING, '') is None]:
        return Check(
            name,
            'warning',
            f'{_COMPILING} not found on {hosts_of(blind)}, so cuDNN cannot use engines '
            'that it compiles at run time',
            f'link {_COMPILING} to libcuda.so.1 in a folder of LD_LIBRARY_PATH',
        )
    versions = rows[0]['cuda_libraries']
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


def check_trial(rows: Sequence[Facts]) -> Check:
    """Check that DALI, a training pass and an evaluation ran on every GPU with the configured batch
    sizes."""
    name = 'trial batches'
    tried = [r for r in rows if r['trial']]
    for row in tried:
        if problem := row['trial']['problem']:
            found = f'{row["trial"]["what"]} on {row["host"]}: {problem}'
            fix = next(
                (fix for text, fix in _FIXES if text in found),
                'try model.layout NCHW, float32 and a smaller batch, to find the cause',
            )
            return Check(name, 'failed', found, fix)
    if len(tried) < len(rows):
        return Check(
            name, 'not needed', f'no usable GPU on {hosts_of([r for r in rows if not r["trial"]])}'
        )
    if warnings := [text for r in tried for text in r['trial']['warnings']]:
        return Check(name, 'warning', warnings[0])
    seconds, used = (max(r['trial'][key] for r in tried) for key in ('seconds', 'used_bytes'))
    return Check(
        name,
        'ok',
        f'a training pass, an evaluation and (unless data.synthetic) DALI ran on every rank '
        f'in at most {seconds:.0f} s; afterwards, up to {used / 1e9:.1f} GB of a GPU were in use',
    )


def environment_facts(env: Mapping[str, str], is_nvidias: bool) -> dict[str, list[str | None]]:
    """Return each setting's value in this process (None if not set) and its source, program or
    user."""
    from_program = env.get(SET_VARIABLE, '').split(',')
    return {
        name: [env.get(name), 'program' if name in from_program else 'user']
        for name in settings_of(is_nvidias)
    }


def check_environment(rows: Sequence[Facts]) -> Check:
    """Check that every rank on a GPU has all settings and that their values are the same on all
    hosts."""
    name = 'GPU environment'
    for row in rows:
        missing = {
            s: settings_of(True)[s]
            for s, (value, _) in row['gpu_environment'].items()
            if value is None
        }
        if missing:
            return Check(
                name,
                'warning',
                f'not set on {row["host"]}: {", ".join(missing)}',
                f'export {" ".join(f"{s}={v}" for s, v in missing.items())}, or {NVIDIA_VARIABLE}',
            )
    settings = rows[0]['gpu_environment'].items()
    for setting, (value, _) in settings:
        odd = [r for r in rows if r['gpu_environment'].get(setting, [value])[0] != value]
        if odd:
            return Check(
                name,
                'warning',
                f'{setting}={odd[0]["gpu_environment"][setting][0]} on {hosts_of(odd)}, but '
                f'{value} on {rows[0]["host"]}',
                'use the same value on all hosts',
            )
    groups = {
        label: ', '.join(f'{n}={v}' for n, (v, source) in settings if source == origin)
        for origin, label in (('program', 'set by the program'), ('user', 'set by the user'))
    }
    return Check(
        name, 'ok', '; '.join(f'{label}: {text}' for label, text in groups.items() if text)
    )
