"""Processor of this host, the instruction sets that oneDNN, MXNet's library for CPUs, may use, and
OpenMP threads.

Sources: /proc/cpuinfo, and oneDNN's variable DNNL_MAX_CPU_ISA, whose value must be in capitals.
"""

import ctypes
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.system.cgroup import GroupLimits, read_small

CPUINFO = Path('/proc/cpuinfo')
# (level, required CPU flags, values of DNNL_MAX_CPU_ISA that limit oneDNN to it); a level includes
# the previous ones.
_LEVELS = (
    ('no SSE4.1', (), ()),
    ('SSE4.1', ('sse4_1',), ('SSE41',)),
    ('AVX', ('avx',), ('AVX',)),
    ('AVX2', ('avx2',), ('AVX2', 'AVX2_VNNI', 'AVX512_MIC', 'AVX512_MIC_4OPS')),
    ('AVX-512', ('avx512f', 'avx512bw', 'avx512vl', 'avx512dq'), ('AVX512_CORE',)),
    ('AVX-512 VNNI', ('avx512_vnni',), ('AVX512_CORE_VNNI',)),
    ('AVX-512 BF16', ('avx512_bf16',), ('AVX512_CORE_BF16',)),
    ('AMX', ('amx_tile', 'amx_int8', 'amx_bf16'), ('AVX512_CORE_AMX',)),
)
_NAMES = tuple(name for name, _, _ in _LEVELS)


@dataclass(frozen=True)
class Processor:
    """Model and instruction set level of a processor. Unknown numbers are None."""

    name: str
    vendor: str
    family: int | None
    model: int | None
    has: str  # highest level of the processor
    uses: str  # highest level that oneDNN may use
    limit: str  # DNNL_MAX_CPU_ISA; '' if not set

    @property
    def has_avx512(self) -> bool:
        """True if oneDNN may use AVX-512, which its bfloat16 convolutions need."""
        return _NAMES.index(self.uses) >= _NAMES.index('AVX-512')


def parse_processor(cpuinfo: str, variables: Mapping[str, str]) -> Processor:
    """Parse the first processor of /proc/cpuinfo. The environment may limit the level that oneDNN
    uses."""

    def field(name: str) -> str:
        match = re.search(rf'^{name}\s*: (.*)$', cpuinfo, re.MULTILINE)
        return match[1].strip() if match else ''

    def number(name: str) -> int | None:
        return int(field(name)) if field(name).isdecimal() else None

    flags = set(field('flags').split())
    supported = takewhile(lambda level: flags.issuperset(level[1]), _LEVELS)
    has = len(list(supported)) - 1
    limit = variables.get('DNNL_MAX_CPU_ISA', '')
    limits = [i for i, (_, _, values) in enumerate(_LEVELS) if limit in values]
    uses = min([has, *limits])
    return Processor(
        name=field('model name'),
        vendor=field('vendor_id'),
        family=number('cpu family'),
        model=number('model'),
        has=_NAMES[has],
        uses=_NAMES[uses],
        limit=limit,
    )


def find_processor() -> Processor:
    """Return the processor of this host. The environment may limit the instruction set that oneDNN
    uses."""
    return parse_processor(read_small(CPUINFO), os.environ)


def check_precision(option: str, precision: str, processor: Processor) -> None:
    """Raise ConfigError for bfloat16 without AVX-512, because MXNet's oneDNN would crash."""
    if precision != 'bfloat16' or processor.has_avx512:
        return
    if processor.has != processor.uses:
        raise ConfigError(
            f'{option}: got bfloat16 with {processor.uses} (DNNL_MAX_CPU_ISA={processor.limit} '
            f'limits a processor with {processor.has}), expected AVX-512; unset the variable, or '
            'use float32'
        )
    raise ConfigError(
        f'{option}: got bfloat16 on a processor with {processor.has}, expected AVX-512; use float32'
    )


def omp_threads(text: str) -> int | None:
    """Return OMP_NUM_THREADS of the outermost parallel region; None without a number. Source:
    OpenMP 5.2, 21.1.2.

    A number that no machine bears, such as 100000, with which libgomp aborts, counts as none.
    """
    first = text.partition(',')[0].strip()
    return int(first) if re.fullmatch(r'[1-9]\d{0,3}', first, re.ASCII) else None


def quota_threads(num_threads: int, local_size: int, limits: GroupLimits) -> int:
    """Limit the threads of a rank to its share of the CPU quota. Above the quota, the kernel pauses
    all ranks."""
    if limits.quota_cpus is None:
        return num_threads
    return max(1, min(num_threads, int(limits.quota_cpus // local_size)))


def unbound_threads(
    cpus: Collection[int], num_machine_cpus: int, local_size: int, limits: GroupLimits
) -> int:
    """Return a rank's number of threads without launch/bind.sh. If cpus are all of the node's,
    ranks divide them."""
    num_threads = len(cpus)
    if num_threads == len(limits.cpuset or range(num_machine_cpus)):
        num_threads = max(1, num_threads // local_size)
    return quota_threads(num_threads, local_size, limits)


def set_omp_threads(num_threads: int) -> int:
    """Set OMP_NUM_THREADS unless it is already a number. Return the effective number."""
    threads = omp_threads(os.environ.get('OMP_NUM_THREADS', '')) or num_threads
    os.environ['OMP_NUM_THREADS'] = str(threads)  # one number, because MXNet reads no list
    return threads


def leave_openmp_to_engine() -> None:
    """Disable OpenMP teams in this thread. Call this after importing MXNet.

    On a CPU, MXNet computes in a thread of its engine; another thread that copies an array would
    start a second team. With more team threads than cores, libgomp stops active waiting, and a
    small step takes 1.1 to 1.4 times as long. Source: libgomp, gomp_managed_threads and
    GOMP_SPINCOUNT.
    """
    with suppress(OSError):  # this MXNet uses a different OpenMP library
        ctypes.CDLL('libgomp.so.1').omp_set_num_threads(1)
