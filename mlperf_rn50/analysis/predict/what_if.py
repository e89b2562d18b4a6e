"""Change the machine of a prediction: ports, TCP, hierarchical all-reduce, generation of the accelerators."""
import statistics
from dataclasses import replace
from typing import Annotated

from msgspec import Meta, Struct, ValidationError, convert

from mlperf_rn50.analysis.predict.prediction import FLOAT16_BYTES, Link, generation_of
from mlperf_rn50.analysis.predict.source import Source
from mlperf_rn50.analysis.sets.published import load_table
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.mllog.events import printable


class WhatIf(Struct, frozen=True, forbid_unknown_fields=True):
    """Changes to the measured machine; None and False mean no change."""

    link: Annotated[float, Meta(ge=1e-3, le=1e6)] | None = None  # Gbit/s of one port
    ports: Annotated[int, Meta(ge=1, le=1000)] | None = None  # per node
    generation: str | None = None  # of the accelerators
    local: Annotated[int, Meta(ge=1, le=10**7)] | None = None  # images per accelerator
    tcp: bool = False
    hierarchical: bool = False

    @property
    def text(self) -> str:
        changes = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return ' '.join(name if value is True else f'{name}={value}' for name, value in changes if value)


def parse_what_if(text: str | None) -> WhatIf | None:
    """Parse changes such as 'link=25 ports=2 tcp'; raise ConfigError for others."""
    if text is None:
        return None
    words = [word.partition('=') for word in text.split()]
    if len({name for name, *_ in words}) < len(words):
        raise ConfigError(f'--what-if: got a change twice in {printable(text)}, expected each at most once')
    try:
        found = convert({name: value if is_set else True for name, is_set, value in words}, WhatIf, strict=False)
    except ValidationError as e:
        raise ConfigError(f'--what-if: {printable(str(e))}; expected any of link=GBIT_S, ports=N, generation=NAME, '
                          'local=IMAGES, tcp and hierarchical') from e
    if not found.text:
        raise ConfigError('--what-if: got nothing, expected changes such as link=25')
    return found


def _speed(generation: str, num_units: int) -> float:
    """Return the median images/s per accelerator of published one-node sets, if possible of those with num_units."""
    speeds = [(s.num_units, s.images_per_s / s.num_units) for s in load_table() if s.num_nodes == 1 and s.num_units
              and s.images_per_s and generation_of(s.accelerator) == generation and not s.refusal]
    if not speeds:
        raise ConfigError('--what-if: expected generations with published one-node sets, but there are none of '
                          f'{generation or "the source"}')
    alike = [speed for n, speed in speeds if n == num_units]
    return statistics.median(alike or [speed for _, speed in speeds])


def change(source: Source, what_if: WhatIf) -> Source:
    """Return the source with the changes, except local; raise ConfigError if they cannot be predicted."""
    base, link = source.base, source.link or Link(None, FLOAT16_BYTES, 'unknown')
    if base.num_nodes > 1:
        raise ConfigError(f'--what-if: got a SOURCE on {base.num_nodes} nodes, expected a measurement on one node')
    if what_if.link:
        link = replace(link, gbit_s=what_if.link * (what_if.ports or 1), source='--what-if')
    elif what_if.ports:
        raise ConfigError('--what-if: got ports without link, expected also link=GBIT_S, the rate of a port')
    if what_if.generation:
        new = what_if.generation.upper()
        step_s = base.step_s * _speed(base.generation, base.num_units) / _speed(new, base.num_units)
        base = replace(base, name=f'{base.name} with {new}', step_s=step_s, generation=new, steps=(), is_scaled=True)
    link = replace(link, is_tcp=what_if.tcp, is_hierarchical=what_if.hierarchical)
    return replace(source, base=base, link=link, is_changed=base.is_scaled or link != source.link)
