"""Change the machine of a prediction: ports, TCP, hierarchical all-reduce, generation of the accelerators."""
import statistics
from dataclasses import replace
from typing import Annotated

from msgspec import Meta, Struct, ValidationError, convert

from mlperf_rn50.analysis.predict.prediction import Link, generation_of
from mlperf_rn50.analysis.predict.source import ASSUMED, Source
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
    base, link, notes = source.base, source.link, source.notes
    if base.num_nodes > 1:
        raise ConfigError(f'--what-if: got a SOURCE on {base.num_nodes} nodes, expected a measurement on one node')
    if what_if.link:
        link = Link(what_if.link * (what_if.ports or 1), link.exchange_bytes if link else source.gradient_bytes,
                    '--what-if')
        notes = tuple(note for note in notes if note != ASSUMED)
    elif what_if.ports or link is None and (what_if.tcp or what_if.hierarchical):
        raise ConfigError('--what-if: got a change of the exchange at an unknown rate, expected also link=GBIT_S, the '
                          'rate of a port')
    if what_if.generation and not base.has_accelerators:
        raise ConfigError('--what-if: got generation, but ranks on CPUs; expected a SOURCE with accelerators')
    if what_if.generation:
        new = what_if.generation.upper()
        step_s = base.step_s * _speed(base.generation, base.num_units) / _speed(new, base.num_units)
        base = replace(base, name=f'{base.name} with {new}', step_s=step_s, generation=new, steps=(), is_scaled=True)
    if link and (what_if.tcp or what_if.hierarchical or what_if.generation):  # not those of measured overlap, latency
        link = Link(link.gbit_s, link.exchange_bytes, link.source, 0.0, None, what_if.tcp, what_if.hierarchical)
    return replace(source, base=base, link=link, notes=notes, is_changed=base.is_scaled or link != source.link)
