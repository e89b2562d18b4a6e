"""Load the base and the interconnect of a prediction from logs, bench files (untrusted) or
published systems."""

import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, MsgspecError, Struct, ValidationError, convert, field
from msgspec.json import decode

from mlperf_rn50.analysis.predict.anchors import (
    base_of,
    is_machine,
    link_of,
    network_of,
    with_network,
)
from mlperf_rn50.analysis.predict.model import BACKWARD_SHARE, compute_s, ring_s
from mlperf_rn50.analysis.predict.prediction import Base, Costs, Layout, Link
from mlperf_rn50.analysis.recipe.choose import is_within
from mlperf_rn50.analysis.sets.load import Rules, describe_others, load_logs
from mlperf_rn50.analysis.sets.published import NAME, load_table, with_round
from mlperf_rn50.analysis.sets.run_set import RunSet, generation_of
from mlperf_rn50.analysis.sets.settings import Recipe
from mlperf_rn50.errors import ConfigError, UserError, nearest
from mlperf_rn50.files import read_text
from mlperf_rn50.mllog.logged_run import IMAGENET_TRAIN, IMAGENET_VAL
from mlperf_rn50.text import printable, some

_IMAGENET_PIXELS = 224
_MAX_NAMES = 5  # maximum names listed in a message
_compared = attrgetter('round', 'org', 'other_dataset', 'recipe.target_accuracy', 'accelerator')
_INCOMPLETE = (
    'no run has finished, the number of nodes changed, or the logs lack the number of nodes, the '
    'number of accelerators or ranks, or the time of an epoch'
)
_UNMEASURED = (
    'Not measured: evaluations (assumed to take a third of the training time of 50,000 images), '
    'first-epoch overhead on one node (assumed to be zero), input pipeline (assumed to keep up)'
)
# largest ratio of equal gradients, and of local batches that are too similar for a slope of the
# step time
_ALIKE = 1.1
# maximum characters of a decoder's error in a message, and of an accelerator's name
_MAX_TEXT = 200
_MAX_FILE_BYTES = 4 * 2**20
_Text = Annotated[str, Meta(pattern=r'\A[\w .,/+-]{1,40}\Z')]
_Count = Annotated[int, Meta(ge=1, le=10**6)]
_Bytes = Annotated[int, Meta(ge=1, le=10**12)]
_Ms = Annotated[float, Meta(ge=1e-3, le=1e8)]


class _Measured(Struct, frozen=True):
    model: _Text
    local_batch_size: _Count
    num_ranks: _Count
    num_hosts: _Count

    def __post_init__(self) -> None:
        if self.num_ranks % self.num_hosts:
            raise ValueError(
                f'num_hosts: got {self.num_hosts}, expected a divisor of the {self.num_ranks} ranks'
            )


class MeasuredStep(_Measured, frozen=True):
    """A row of bench train: a step on all ranks."""

    precision: _Text
    input: _Text
    image_size: _Count
    num_parameters: _Bytes
    step_ms: _Ms
    images_per_s: Annotated[float, Meta(gt=0, le=1e12)] | None = None
    gradient_bytes: _Bytes | None = None  # unknown in files of version 0.6.0

    @property
    def step_s(self) -> float:
        """Seconds of a step: the median or, with real images, the mean, because a step that waits
        for several batches of images follows others that do not wait."""
        if self.input == 'real' and self.images_per_s:
            return self.local_batch_size * self.num_ranks / self.images_per_s
        return self.step_ms / 1e3

    @property
    def kind(self) -> str:
        layout = f'{self.num_hosts}x{self.num_ranks // self.num_hosts}'
        return (
            f'{self.model}, {self.precision}, {self.input} images of {self.image_size} pixels, '
            f'{layout}'
        )


class MeasuredExchange(_Measured, frozen=True):
    """Exchange of a step's gradients between hosts. step_ms is the time of a step with the
    exchange."""

    num_hosts: Annotated[int, Meta(ge=2, le=10**6)]
    time_ms: Annotated[float, Meta(ge=1e-6, le=1e8)]
    num_bytes: _Bytes = field(name='bytes')
    step_ms: _Ms


class _Machine(Struct):
    gpus: list[str]


class _Table(Struct):
    rows: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=1000)]


class _File(Struct):
    format: Literal['mlperf-rn50 bench train 1', 'mlperf-rn50 bench allreduce 1']
    machine: _Machine
    tables: Annotated[list[_Table], Meta(min_length=1)]


@dataclass(frozen=True)
class Bench:
    """A JSON file of bench train (steps) or bench allreduce (exchange)."""

    path: Path
    accelerator: str | None  # None for ranks on CPUs
    steps: Sequence[MeasuredStep] = ()
    exchange: MeasuredExchange | None = None


@dataclass(frozen=True)
class Source:
    """Measurements that predictions start from."""

    base: Base
    link: Link
    sets: Sequence[RunSet] = ()
    notes: Sequence[str] = ()
    machine_link: Link | None = None  # the measured one, if --what-if has changed the link


class WhatIf(Struct, frozen=True, forbid_unknown_fields=True):
    """Changes to the measured machine. None and False mean no change."""

    link: Annotated[float, Meta(ge=1e-3, le=1e6)] | None = None  # Gbit/s of one port
    ports: Annotated[int, Meta(ge=1, le=1000)] | None = None  # per node
    generation: str | None = None  # of the accelerators
    local: Annotated[int, Meta(ge=1, le=10**7)] | None = None  # images per accelerator
    # of a training image, as a fraction of the measured
    pixels: Annotated[float, Meta(ge=1e-3, le=1e3)] | None = None
    epochs: _Count | None = None  # of any recipe, with an evaluation after each
    tcp: bool = False
    hierarchical: bool = False

    def __str__(self) -> str:
        changes = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return ' '.join(
            name if value is True else f'{name}={value}' for name, value in changes if value
        )


def load_bench(path: Path) -> Bench | None:
    """Load a JSON file of bench train or bench allreduce. Return None unless the path is a file
    with suffix .json."""
    if path.suffix != '.json' or not path.is_file():
        return None
    try:
        found = decode(read_text(path, _MAX_FILE_BYTES), type=_File)
        accelerator = found.machine.gpus[0][:_MAX_TEXT] if found.machine.gpus else None
        if found.format == 'mlperf-rn50 bench train 1':  # further tables compare numbers of ranks
            steps = convert(found.tables[0].rows, list[MeasuredStep])
            return Bench(path, accelerator, steps)
        exchange = convert(found.tables[-1].rows[0], MeasuredExchange)
        return Bench(path, accelerator, exchange=exchange)
    except (OSError, MsgspecError, ValueError, RecursionError) as e:
        raise UserError(
            f'{path}: {printable(str(e))[:_MAX_TEXT]}; expected output of mlperf-rn50 bench train, '
            'or of bench allreduce over several hosts, with --format json'
        ) from e


def _names(names: Iterable[str], tree: Path | str) -> str:
    """Return the first names and, if there are more, the command that lists the systems of a
    tree."""
    found = list(names)
    text = some(found, _MAX_NAMES)
    return text if len(found) <= _MAX_NAMES else f'{text}; list them all: mlperf-rn50 report {tree}'


def _from_published(given: str) -> Source:
    """Return a published system by its full name or the last part of that name, and the other sets
    of its machine."""
    name = '/'.join(with_round(Path(NAME, given.removeprefix(f'{NAME}/'))).parts[1:])
    bases = {s: base for s in load_table() if (base := base_of(s))}
    # the newest set first
    named = {'/'.join(f.parts[1:]): s for s in reversed(bases) for f in reversed(s.folders)}
    wanted = name.casefold()
    found = {
        s: full
        for full, s in named.items()
        if wanted in (full.casefold(), Path(full).name.casefold())
    }
    if not found:  # the name of a round or of an organisation in it
        found = {s: full for full, s in named.items() if full.casefold().startswith(f'{wanted}/')}
    if len(found) > 1:
        raise ConfigError(
            f'SOURCE: got {name}, which names {len(found)} published systems, expected one of '
            f'{_names(sorted(found.values()), NAME)}'
        )
    if not found:
        raise ConfigError(
            f'{printable(given)}: not a file, folder or published system{_alike(name, named)}'
        )
    [run_set] = found
    others = [s for s in bases if s is not run_set and is_machine(s, run_set)]
    return Source(bases[run_set], link_of(run_set), (run_set, *others))


def _alike(name: str, named: Mapping[str, RunSet]) -> str:
    """Return a hint at the published systems whose names are like an unknown name."""
    found = {s: full for full, s in named.items() if _letters(name) in _letters(full)}
    if len(found) < 2:
        names = {s.name for s in named.values()}
        if hint := nearest(name, [*named]) or nearest(name, sorted(names)):
            return hint
    alike = [found[s] for s in sorted(found, key=attrgetter('num_nodes'))]
    return (
        '; expected a run, a study, a JSON file of bench, or a system such as '
        f'{_names(alike or named, NAME)}'
    )


def _letters(name: str) -> str:
    """Return the lower-case letters and digits of a name, since one is A100-SXM, a100_sxm or
    A100 SXM."""
    return re.sub(r'[\W_]', '', name.casefold())


def _from_bench(bench: Bench, local_batch_size: int | None) -> Source:
    """Return the step at the requested local batch or, if it was not measured, at the largest, and
    the other steps.

    Only ResNet-50 at 224 pixels counts as ImageNet.
    """
    names = [f'{s.kind}, {s.local_batch_size} per rank' for s in bench.steps]
    if len({(s.kind, s.num_parameters) for s in bench.steps}) > 1 or len(set(names)) < len(names):
        raise ConfigError(
            f'{bench.path}: got {some(names, _MAX_NAMES)}, expected rows that differ only in the '
            'batch'
        )
    step, *others = sorted(
        bench.steps, key=lambda s: (s.local_batch_size != local_batch_size, -s.local_batch_size)
    )
    base = Base(
        name=step.kind,
        source=str(bench.path),
        num_nodes=step.num_hosts,
        num_units=step.num_ranks,
        has_accelerators=bench.accelerator is not None,
        global_batch_size=step.local_batch_size * step.num_ranks,
        step_s=step.step_s,
        evaluation_s=None,
        outside_s=0.0,
        train_samples=IMAGENET_TRAIN,
        dataset=f'images of {step.image_size} pixels',
        generation=generation_of(bench.accelerator),
        steps=_other_steps(step.local_batch_size, ((s.local_batch_size, s.step_s) for s in others)),
    )
    value_bytes = 2 if step.precision == 'float16' else 4
    num_bytes = step.gradient_bytes or value_bytes * step.num_parameters
    link = Link(None, num_bytes, 'unknown')
    if (step.model, step.image_size) != ('resnet50', _IMAGENET_PIXELS):
        return Source(base, link)
    forward_s = (1 - BACKWARD_SHARE) * base.step_s
    evaluation_s = forward_s * IMAGENET_VAL / base.global_batch_size
    base = replace(base, evaluation_s=evaluation_s, dataset=None)
    return Source(base, link, notes=(_UNMEASURED,))


def _other_steps(local: float, steps: Iterable[tuple[float, float]]) -> dict[float, float]:
    """Return the seconds of steps by local batch, of the batches that differ enough from that of
    the base."""
    return {size: step_s for size, step_s in steps if not is_within(size, local, _ALIKE)}


def _measured_link(source: Source, path: str, exchange: MeasuredExchange) -> Link:
    """Return the measured ports, and the time of a step besides computing and exchange.

    The latter needs a base on one node, with the same gradients and images per accelerator or rank.
    """
    num_ranks, local = exchange.num_ranks, exchange.local_batch_size
    base, num_bytes, time_s = source.base, source.link.exchange_bytes, exchange.time_ms / 1e3
    link = Link(
        ring_s(exchange.num_bytes, num_ranks, 1.0) / time_s,
        num_bytes,
        f'bench allreduce over {num_ranks} ranks on {exchange.num_hosts} nodes, {path}',
    )
    has_batch = local == base.local_batch_size or local in base.steps
    if base.num_nodes > 1 or not is_within(exchange.num_bytes, num_bytes, _ALIKE) or not has_batch:
        return link
    layout = Layout(
        exchange.num_hosts, num_ranks // exchange.num_hosts, Recipe(None, local * num_ranks)
    )
    shown_s = max(0.0, exchange.step_ms / 1e3 - compute_s(base, layout, link, Costs()))
    return replace(
        link,
        exchange_bytes=exchange.num_bytes,
        overlap=max(0.0, 1 - shown_s / time_s),
        extra_s=max(0.0, shown_s - time_s),
    )


def load_source(
    words: Sequence[str],
    system: str | None = None,
    per_node: int | None = None,
    local_batch_size: int | None = None,
    gbit_s: float | None = None,
) -> Source:
    """Load logs, a published system or bench files. per_node selects a system, local_batch_size a
    bench row."""
    # Sort the words into folders, names and bench files.
    folders, names, steps, exchanges = [], [], [], []
    for word in words:
        bench = load_bench(Path(word))
        if bench and bench.exchange:
            exchanges.append((word, bench.exchange))
        elif bench:
            steps.append(bench)
        elif os.path.lexists(word):
            folders.append(Path(word))
        else:
            names.append(word)
    if len(folders) + len(names) + len(steps) != 1 or len(exchanges) > 1:
        raise ConfigError(
            f'SOURCE: got {printable(", ".join(words))}, expected one run, study, published system '
            'or bench train file, and at most one bench allreduce file'
        )
    if system and not folders:
        raise ConfigError(
            f'--system: got {system}, expected a SOURCE that is a folder of several systems'
        )

    # Load the only source, then the link from an option or a file.
    if folders:
        source = _from_systems(folders[0], system, per_node)
    elif names:
        source = _from_published(names[0])
    else:
        source = _from_bench(steps[0], local_batch_size)
    if gbit_s:
        return replace(source, link=replace(source.link, gbit_s=gbit_s, source='--link-gbit-s'))
    for path, exchange in exchanges:
        source = replace(source, link=_measured_link(source, path, exchange))
        if source.link.extra_s is None:
            note = (
                f'{path}: only the rate is used, because gradients or images per rank differ from '
                'a one-node SOURCE'
            )
            source = replace(source, notes=(*source.notes, note))
    return source


def _choose_system(
    folder: Path, bases: Mapping[RunSet, Base], name: str | None, per_node: int | None
) -> RunSet:
    """Return the named set or, without a name, the one with the fewest nodes and, of several, with
    per_node accelerators or ranks on each."""

    def distance(b: Base) -> tuple[int, bool]:
        return b.num_nodes, b.num_units != b.num_nodes * (per_node or 0)

    least, names = min(map(distance, bases.values())), [b.name for b in bases.values()]
    chosen = {
        s: b
        for s, b in bases.items()
        if (name in (b.name, b.full_name) if name else distance(b) == least)
    }
    if len(chosen) != 1:
        alike = [b.name if names.count(b.name) == 1 else b.full_name for b in chosen.values()]
        hint = '' if chosen else nearest(name or '', names)
        raise ConfigError(
            f'--system: got {name or "no name"}, which matches {len(chosen)} systems, expected one '
            f'of {printable(_names(alike or names, folder))}{hint}'
        )
    [run_set] = chosen
    return run_set


def _from_systems(folder: Path, name: str | None, per_node: int | None) -> Source:
    """Return the named system of a folder, or the one with the fewest nodes, and all comparable
    sets."""
    run_sets, others = load_logs([folder], Rules())
    bases = {s: base for s in run_sets if (base := base_of(s))}
    if not bases:
        reasons = '; '.join(
            f'{s.name}: {"; ".join(s.reasons) or _INCOMPLETE}' for s in run_sets[:3]
        )
        raise UserError(f'no set to predict from: {printable(reasons)}')
    run_set = _choose_system(folder, bases, name, per_node)
    base = bases[run_set]
    network = network_of(run_set)
    comparable = {
        s: b
        for s, b in bases.items()
        if _compared(s) == _compared(run_set) and network_of(s) == network
    }
    alike = (
        (b.local_batch_size, b.step_s)
        for b in comparable.values()
        if (b.num_nodes, b.num_units) == (1, base.num_units) and base.num_nodes == 1
    )
    notes = []
    if len(comparable) > 1 and not name:
        notes.append(
            f'Predicted from {base.name}, the smallest of {len(comparable)} systems; --system NAME '
            'selects another'
        )
    if obstacles := run_set.judgement.obstacles:
        notes.append(f'{base.name} has no result for MLPerf: {"; ".join(obstacles)}')
    if other := describe_others(others):
        notes.append(other)
    return Source(
        replace(base, steps=_other_steps(base.local_batch_size, alike)),
        with_network(link_of(run_set), run_set),
        list(comparable),
        notes,
    )


def parse_what_if(text: str) -> WhatIf:
    """Parse changes such as 'link=25 ports=2 tcp'. Raise ConfigError for others."""
    words = [word.partition('=') for word in text.split()]
    try:
        found = convert(
            {name: value if is_set else True for name, is_set, value in words}, WhatIf, strict=False
        )
    except ValidationError as e:
        raise ConfigError(
            f'--what-if: {printable(str(e))}; expected any of link=GBIT_S, ports=N, '
            'generation=NAME, local=IMAGES, pixels=FRACTION, epochs=N, tcp and hierarchical'
        ) from e
    if len(str(found).split()) != len(words) or not words:
        raise ConfigError(
            f'--what-if: got {printable(text)}, expected changes such as link=25, each once'
        )
    return found


def change(source: Source, what_if: WhatIf) -> Source:
    """Return the source with the changes, except local. Raise ConfigError if they cannot be
    predicted."""
    base, link = replace(source.base, name=f'{source.base.name} with {what_if}'), source.link
    if base.num_nodes > 1:
        raise ConfigError(
            f'--what-if: got a SOURCE on {base.num_nodes} nodes, expected a measurement on one node'
        )
    if what_if.link:
        link = replace(
            link,
            gbit_s=what_if.link * (what_if.ports or 1),
            source='--what-if',
            overlap=0.0,
            extra_s=None,
        )
    elif what_if.ports:
        raise ConfigError('--what-if: got ports, expected also link=GBIT_S, the rate of a port')
    if what_if.generation:
        generation = what_if.generation.upper()
        step_s = base.local_batch_size / _published_speed(base, generation)
        base = replace(base, step_s=step_s, generation=generation)
    if what_if.pixels:  # convolutions take time in proportion to them
        base = replace(base, step_s=base.step_s * what_if.pixels)
    if what_if.generation or what_if.pixels:
        base = replace(base, steps={}, is_scaled=True)
    # the measured overlap and latency do not apply
    if what_if.tcp or what_if.hierarchical or what_if.generation:
        link = replace(
            link,
            overlap=0.0,
            extra_s=None,
            is_tcp=what_if.tcp,
            is_hierarchical=what_if.hierarchical,
        )
    return replace(source, base=base, link=link, machine_link=source.link)


def _published_speed(base: Base, generation: str) -> float:
    """Return the median images/s of an accelerator of a generation in published one-node sets."""
    speeds = [
        s.images_per_s / s.num_units
        for s in load_table()
        if s.num_nodes == 1 and s.num_units and s.images_per_s and not s.refusal
        if generation_of(s.accelerator).upper() == generation
    ]
    if not speeds or not base.has_accelerators:
        raise ConfigError(
            f'--what-if: got generation {generation} for {base.unit}s, expected one with published '
            'one-node sets, for accelerators'
        )
    return statistics.median(speeds)
