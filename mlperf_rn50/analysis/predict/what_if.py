"""Change the machine of a prediction: ports, TCP, hierarchical all-reduce, generation of the accelerators."""
from dataclasses import dataclass, replace

from mlperf_rn50.analysis.predict.costs import speed_of
from mlperf_rn50.analysis.predict.prediction import FLOAT16_BYTES, Link
from mlperf_rn50.analysis.predict.source import Source
from mlperf_rn50.errors import ConfigError


@dataclass(frozen=True)
class WhatIf:
    """Changes to the measured machine; None and False keep it."""

    link: float | None = None  # Gbit/s of one port
    ports: int | None = None  # per node
    generation: str | None = None  # of the accelerators
    local: int | None = None  # images per accelerator
    tcp: bool = False
    hierarchical: bool = False

    @property
    def text(self) -> str:
        return ' '.join(name if value is True else f'{name}={value}' for name, value in vars(self).items() if value)


def change(source: Source, what_if: WhatIf) -> Source:
    """Return the source with the changes, except local; raise ConfigError if speed or ports are unknown."""
    base, link = source.base, source.link or Link(None, FLOAT16_BYTES, 'unknown')
    if what_if.link or what_if.ports:
        rate = what_if.link or link.gbit_s
        if rate is None:
            raise ConfigError('--what-if: got ports for an unknown interconnect, expected also link=GBIT_S')
        link = replace(link, gbit_s=rate * (what_if.ports or 1), source='--what-if')
    if what_if.tcp:  # with Horovod's default buffers, the exchange overlaps, but each member adds latency
        link = replace(link, is_tcp=True, overlap=1.0)
    if new := what_if.generation:
        per_node = base.num_units // base.num_nodes
        speeds = {g: speed_of(g, per_node) for g in (base.generation, new.upper())}
        if missing := [g or 'the source' for g, speed in speeds.items() if not speed]:
            raise ConfigError(f'--what-if: got generation={new}, expected one with published one-node sets of '
                              f'{per_node} accelerators; there are none for {missing[0]}')
        step_s = base.step_s * (speeds[base.generation] or 0.0) / (speeds[new.upper()] or 1.0)
        base = replace(base, step_s=step_s, accelerator=new.upper(), steps=())
    is_other = what_if.link or what_if.ports or what_if.tcp or what_if.generation  # measured sets no longer apply
    return replace(source, base=base, link=replace(link, is_hierarchical=what_if.hierarchical),
                   sets=source.sets[:1] if is_other else source.sets)
