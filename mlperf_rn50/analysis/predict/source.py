"""Sources of a prediction: a run, a study, a published system or what `bench` measured, as a base and a link.

Neither logs nor the JSON of a bench are trusted: their values are typed and bounded.
"""
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlperf_rn50.analysis.predict.bench_file import Bench, MeasuredExchange, MeasuredStep, is_bench, load_bench
from mlperf_rn50.analysis.predict.model import BACKWARD_SHARE, base_for, base_of
from mlperf_rn50.analysis.predict.prediction import PUBLISHED_LINK, Base, Link
from mlperf_rn50.analysis.sets.convergence import System
from mlperf_rn50.analysis.sets.load import load_systems
from mlperf_rn50.analysis.sets.run_set import KnownSet, known_of, load_published
from mlperf_rn50.errors import ConfigError, UserError, nearest
from mlperf_rn50.mllog.events import printable
from mlperf_rn50.mllog.run import IMAGENET_TRAIN
from mlperf_rn50.text import some

# Gradients of ResNet-50 in float32, as ranks without accelerators exchange them.
_FLOAT32_BYTES = 4 * 25_557_032
_IMAGENET_VAL = 50_000
_IMAGENET_PIXELS = 224
_MAX_NAMES = 8  # in a sentence
_ASSUMED = ('Nobody says what joins the nodes: as much as between published systems is supposed; a bench allreduce, or '
            '--link-gbit-s, would say')


@dataclass(frozen=True)
class Power:
    """The mean power of a node over its runs; kinds: of which processors, such as ('cpu', 'gpu')."""

    watts: float
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """The source of a prediction.

    Args:
        power: of a node of the base; None where it was not measured.
        gradients: their bytes, and their type and network; None where nothing tells them.
    """

    base: Base
    link: Link | None
    sets: tuple[KnownSet, ...] = ()
    notes: tuple[str, ...] = ()
    power: Power | None = None
    gradients: tuple[int, str] | None = None


def find_published(name: str) -> KnownSet:
    """Return a published system by its whole name, or by the last part of it.

    Raises:
        ConfigError: there is none.
    """
    whole = {f'{s.round}/{s.org}/{s.name}': s for s in load_published()}
    short = {s.name: s for s in load_published()}
    by_name = {word.casefold(): s for word, s in (whole | short).items()}
    if found := by_name.get(name.casefold()):
        return found
    hint = nearest(name, list(whole)) or nearest(name, list(short))
    raise ConfigError(f'{printable(name)}: neither a file or folder nor a published system' + (
        hint or f'; expected a run, a study, the JSON of a bench, or a name such as {list(whole)[-1]}'))


def _why_not(system: System) -> str:
    return printable(f'{system.name}: ' + (system.refusal or 'its logs do not tell the number of nodes, what shares '
                                           'the work, or how long an epoch takes, or no run of it has ended'))


def _smallest(sets: Sequence[KnownSet], per_node: int | None) -> list[KnownSet]:
    least = min(k.num_nodes or 0 for k in sets)
    found = [k for k in sets if k.num_nodes == least]
    return [k for k in found if k.num_units == least * (per_node or 0)] or found


def _kind(known: KnownSet) -> tuple:
    """The facts that sets beside each other share."""
    return known.round, known.org, known.dataset, known.recipe.target_accuracy, known.accelerator


def power_of(system: System) -> Power | None:
    """Return the power of a node of a system; None where its runs have no telemetry of it."""
    energy = system.energy
    if not energy or not energy.joules or not energy.seconds or not system.num_nodes:
        return None
    return Power(energy.joules / energy.seconds / system.num_nodes, energy.measured)


def _choose_step(bench: Bench, per_node: int | None, local_batch_size: int | None) -> MeasuredStep:
    """Return the row of bench train to start from: of few hosts, with about as many ranks on each as are asked for.

    Raises:
        ConfigError: several rows could be.
    """
    def distance(s: MeasuredStep) -> tuple[int, float, int]:
        return s.num_hosts, abs(s.num_ranks / s.num_hosts - (per_node or 1)), s.num_ranks
    least = min(map(distance, bench.steps))
    found = [s for s in bench.steps if distance(s) == least]
    found = [s for s in found if s.local_batch_size == local_batch_size] or found
    if len(found) > 1:
        raise ConfigError(f'{bench.path}: {len(found)} measurements could be started from: '
                          f'{"; ".join(s.name for s in found[:_MAX_NAMES])}; choose a batch with --local-batch-size, '
                          'or measure one network, precision and input')
    return found[0]


def _base_of_step(step: MeasuredStep, bench: Bench) -> tuple[Base, tuple[str, ...]]:
    """Return a step as a base, of ImageNet where it is the step of its network, and notes of what is not measured."""
    batch = step.local_batch_size * step.num_ranks
    base = Base(step.name, str(bench.path), step.num_hosts, step.num_ranks, bench.has_accelerators, batch, step.step_s,
                step.exchange_s, None, None, IMAGENET_TRAIN, f'images of {step.image_size} pixels')
    if step.model != 'resnet50' or step.image_size != _IMAGENET_PIXELS:
        return base, ('A step alone says nothing of epochs, and the data is not ImageNet: there are no minutes',)
    evaluation_s = (1 - BACKWARD_SHARE) * step.step_s * _IMAGENET_VAL / batch
    return replace(base, evaluation_s=evaluation_s, outside_s=0.0, dataset=None), (
        'Not measured: evaluations (a third of the time that training takes for 50,000 images is supposed), and, on '
        'one node, what the first epoch takes more (nothing is supposed); that the input keeps up is supposed, too',)


def _base_of_exchange(bench: Bench, x: MeasuredExchange) -> tuple[Base, tuple[str, ...]]:
    """Return the step of bench allreduce alone, with the exchange in it, as a base.

    Raises:
        UserError: it has no step.
    """
    if x.step_ms is None:
        raise UserError(f'{bench.path}: has no step_ms, expected a bench train beside it')
    step = MeasuredStep(x.model, x.local_batch_size, x.num_ranks, x.num_hosts, 'float32', 'synthetic', _IMAGENET_PIXELS,
                        x.num_bytes // 4, x.step_ms, 0.0, 0.0, 0.0, 0.0, 0.0)
    base, notes = _base_of_step(step, bench)
    return base, (*notes, 'The step of bench allreduce has the exchange in it, of which nothing is supposed to be '
                  'hidden: bench train on one node, beside it, would say more')


def _exchange_link(base: Base, bench: Bench, x: MeasuredExchange) -> Link:
    """Return the link that bench allreduce measured: hidden where its step is shorter than its parts."""
    source = f'bench allreduce over {x.num_ranks} ranks on {x.num_hosts} nodes, {bench.path}'
    if x.step_ms is None or base.num_nodes > 1 or base.local_batch_size != x.local_batch_size:
        return Link(x.gbit_s, x.num_bytes, False, source)
    time_s, shown_s = x.time_ms / 1000, x.step_ms / 1000 - (base.step_s - base.exchange_s)
    return Link(x.gbit_s, x.num_bytes, shown_s < time_s / 2,
                f'{source}; of its {1e3 * time_s:.1f} ms a step there shows {1e3 * max(shown_s, 0.0):.1f}')


def _find_link(source: Source, bench: Bench | None, gbit_s: float | None) -> tuple[Link | None, tuple[str, ...]]:
    """Return the link as asked for, as measured, or as of published systems, and notes about it."""
    base, measured, notes = source.base, None, tuple[str, ...]()
    if bench and bench.exchange:
        measured = _exchange_link(base, bench, bench.exchange)
        if bench.exchange.num_hosts == 1:
            notes = (f'{bench.path}: measured within one host, which says nothing of what joins nodes',)
    if gbit_s and measured:
        return replace(measured, gbit_s=gbit_s, source='--link-gbit-s, gradients as bench allreduce has them'), notes
    if gbit_s:
        num_bytes, kind = source.gradients or (
            (PUBLISHED_LINK.exchange_bytes, 'float16 gradients of ResNet-50') if base.has_accelerators else
            (_FLOAT32_BYTES, 'float32 gradients of ResNet-50'))
        return Link(gbit_s, num_bytes, False, f'--link-gbit-s, {kind} are supposed'), notes
    if notes:
        return None, notes
    return measured or (PUBLISHED_LINK if base.has_accelerators else None), ()


def load_source(words: Sequence[str], system: str | None = None, per_node: int | None = None,
                local_batch_size: int | None = None, gbit_s: float | None = None) -> Source:
    """Return the source that words name: folders and logs, a published system, benches.

    Args:
        per_node: accelerators or ranks on a node that are asked for first.
        local_batch_size: images of each that are asked for.

    Raises:
        UserError: something cannot be read, or lacks what a prediction needs.
        ConfigError: there is none of that name, or several things could be started from.
    """
    benches = {word: load_bench(Path(word)) for word in words if is_bench(Path(word))}
    folders = [Path(word) for word in words if word not in benches and os.path.lexists(word)]
    published = [find_published(word) for word in words if not os.path.lexists(word)]
    steps = [benches[word] for word in words if word in benches and benches[word].steps]
    exchanges = [benches[word] for word in words if word in benches and benches[word].exchange]
    if bool(folders) + len(published) + len(steps) > 1 or len(exchanges) > 1:
        raise ConfigError(f'SOURCE: {printable(", ".join(words))} are several things to start from, expected one: a '
                          'run or study, a published system, or a bench train; and at most one bench allreduce beside')
    if system and not folders:
        raise ConfigError(f'--system: got {system}, expected a SOURCE that is a folder of several systems')
    exchange = exchanges[0] if exchanges else None
    if folders:
        source = _from_systems(load_systems(folders), system, per_node)
    elif published:
        source = _from_published(published[0])
    else:
        source = _from_bench(steps[0] if steps else None, exchange, per_node, local_batch_size)
    link, notes = _find_link(source, exchange, gbit_s)
    if link == PUBLISHED_LINK and not published:
        notes = (*notes, _ASSUMED)
    return replace(source, link=link, notes=(*source.notes, *notes))


def _from_systems(systems: Sequence[System], name: str | None, per_node: int | None) -> Source:
    """The system of a name, or else the one with the fewest nodes, and all sets of its kind.

    Raises:
        UserError: none can be started from, or several could.
    """
    sets = [k for s in systems if (k := known_of(s)) and base_of(k)]
    if not sets:
        raise UserError(f'nothing to start from: {"; ".join(map(_why_not, systems[:3]))}')
    chosen = [k for k in sets if k.name == name] if name else _smallest(sets, per_node)
    names = [k.name for k in sets]
    if not chosen:
        raise ConfigError(f'--system: got {name}, expected one of {printable(some(names, _MAX_NAMES))}'
                          f'{nearest(name or "", names)}')
    if len(chosen) > 1:
        which = ', '.join(k.source for k in chosen[:_MAX_NAMES])
        raise ConfigError(f'--system: {len(chosen)} systems could be started from, expected one: '
                          f'{printable(some([k.name for k in chosen], _MAX_NAMES))} ({printable(which)})')
    known, base = chosen[0], base_of(chosen[0])
    assert base is not None  # as of all sets
    alike = tuple(k for k in sets if _kind(k) == _kind(known))
    notes = () if len(alike) == 1 or name else (
        f'{known.name} of {len(alike)} systems is started from: it has the fewest nodes',)
    power = next((power_of(s) for s in systems if str(s.folder) == known.source), None)
    return Source(base, None, alike, notes, power)


def _from_published(known: KnownSet) -> Source:
    """A published system, and those that are predicted from it to judge the model."""
    base, sets = base_of(known), load_published()
    assert base is not None  # their logs tell the times that a prediction starts from
    others = [s for s in sets if (s.num_nodes or 0) > 1 and (found := base_for(s, sets)) and found.known is known]
    return Source(base, None, (known, *others))


def _from_bench(steps: Bench | None, exchange: Bench | None, per_node: int | None,
                local_batch_size: int | None) -> Source:
    """The step of bench train, or else the one that bench allreduce has."""
    if steps:
        step = _choose_step(steps, per_node, local_batch_size)
        base, notes = _base_of_step(step, steps)
        return Source(base, None, notes=notes, gradients=step.gradients)
    assert exchange and exchange.exchange  # one of both is there
    base, notes = _base_of_exchange(exchange, exchange.exchange)
    return Source(base, None, notes=notes)
