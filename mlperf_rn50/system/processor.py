"""Processor of this host, and the instruction sets that oneDNN, MXNet's library for CPUs, may use.

Sources: /proc/cpuinfo, and oneDNN's variable DNNL_MAX_CPU_ISA, whose value must be in capitals.
"""
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.system.cgroup import read_small

CPUINFO = Path('/proc/cpuinfo')
# (level, required CPU flags, values of DNNL_MAX_CPU_ISA that limit oneDNN to it); a level includes the previous ones.
_LEVELS = (
    ('no SSE4.1', (), ()),
    ('SSE4.1', ('sse4_1',), ('SSE41',)),
    ('AVX', ('avx',), ('AVX',)),
    ('AVX2', ('avx2',), ('AVX2', 'AVX2_VNNI', 'AVX512_MIC', 'AVX512_MIC_4OPS')),
    ('AVX-512', ('avx512f', 'avx512bw', 'avx512vl', 'avx512dq'), ('AVX512_CORE',)),
    ('AVX-512 VNNI', ('avx512_vnni',), ('AVX512_CORE_VNNI',)),
    ('AVX-512 BF16', ('avx512_bf16',), ('AVX512_CORE_BF16',)),
    ('AMX', ('amx_tile', 'amx_int8', 'amx_bf16'), ('AVX512_CORE_AMX',)))
_NAMES = tuple(name for name, _, _ in _LEVELS)


@dataclass(frozen=True)
class Processor:
    """Model and instruction set level of a processor; unknown numbers are None."""

    name: str
    vendor: str
    family: int | None
    model: int | None
    has: str  # highest level of the processor
    uses: str  # highest level that oneDNN may use
    limit: str  # DNNL_MAX_CPU_ISA; '' if not set

    @property
    def can_train_bfloat16(self) -> bool:
        """True if oneDNN 2.4 has bfloat16 convolutions for this processor."""
        return _NAMES.index(self.uses) >= _NAMES.index('AVX-512')


def parse_processor(cpuinfo: str, variables: Mapping[str, str]) -> Processor:
    """Parse the first processor of /proc/cpuinfo; the environment may limit the level that oneDNN uses."""
    def field(name: str) -> str:
        match = re.search(rf'^{name}\s*: (.*)$', cpuinfo, re.MULTILINE)
        return match[1].strip() if match else ''

    def number(name: str) -> int | None:
        return int(field(name)) if field(name).isdecimal() else None
    flags = set(field('flags').split())
    levels = range(len(_LEVELS))
    has = next((i - 1 for i in levels if not flags.issuperset(_LEVELS[i][1])), levels[-1])
    limit = variables.get('DNNL_MAX_CPU_ISA', '')
    uses = min(has, next((i for i in levels if limit in _LEVELS[i][2]), levels[-1]))
    return Processor(field('model name'), field('vendor_id'), number('cpu family'), number('model'), _NAMES[has],
                     _NAMES[uses], limit)


def find_processor() -> Processor:
    """Return the processor of this host; environment variables may limit the instruction set that oneDNN uses."""
    return parse_processor(read_small(CPUINFO), os.environ)


def check_precision(option: str, precision: str, processor: Processor) -> None:
    """Raise ConfigError for bfloat16 without AVX-512, because MXNet's oneDNN would crash."""
    if precision != 'bfloat16' or processor.can_train_bfloat16:
        return
    if processor.has != processor.uses:
        raise ConfigError(f'{option}: got bfloat16 with {processor.uses} (DNNL_MAX_CPU_ISA={processor.limit} limits '
                          f'a processor with {processor.has}), expected AVX-512; unset the variable, or use float32')
    raise ConfigError(f'{option}: got bfloat16 on a processor with {processor.has}, expected AVX-512; use float32')
