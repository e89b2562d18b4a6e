"""Load the base and the interconnect of a prediction from untrusted logs or bench files, or from published systems."""
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from mlperf_rn50.analysis.predict.bench_file import Bench, MeasuredExchange, MeasuredStep, is_bench, load_bench
from mlperf_rn50.analysis.predict.model import BACKWARD_SHARE, base_for, base_of
from mlperf_rn50.analysis.predict.prediction import PUBLISHED_LINK, Base, Link
from mlperf_rn50.analysis.sets.load import load_run_sets
from mlperf_rn50.analysis.sets.published import load_published, load_table
from mlperf_rn50.analysis.sets.run_set import RunSet
from mlperf_rn50.errors import ConfigError, UserError, nearest
from mlperf_rn50.mllog.events import printable
from mlperf_rn50.mllog.run import IMAGENET_TRAIN, IMAGENET_VAL
from mlperf_rn50.text import some

_FLOAT32_BYTES = 4 * 25_557_032  # gradients of ResNet-50; ranks without accelerators exchange float32
_IMAGENET_PIXELS = 224
_MAX_NAMES = 8  # maximum names listed in a message
_kind = attrgetter('round', 'org', 'other_dataset', 'recipe.target_accuracy', 'accelerator')  # equal in comparable sets
_INCOMPLETE = ('no run has finished, or the logs lack the number of nodes, the number of accelerators or ranks, or the '
               'time of an epoch')
_ASSUMED = (f'Interconnect unknown: assuming {PUBLISHED_LINK.gbit_s:g} Gbit/s, as for the published systems; pass '
            '--link-gbit-s or a bench allreduce file')


@dataclass(frozen=True)
class Power:
    """Mean power of one node during the runs; kinds: types of the measured processors, such as ('cpu', 'gpu')."""

    watts: float
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """Measurements that predictions start from; None stands for unknown."""

    base: Base
    link: Link | None
    sets: tuple[RunSet, ...] = ()
    notes: tuple[str, ...] = ()
    power: Power | None = None  # of one node of the base
    gradients: tuple[int, str] | None = None  # size in bytes, and a text with type and network


def published_by_name(name: str) -> RunSet:
    """Return a published system by its full name or the last part of that name; raise ConfigError if it is unknown."""
    whole = {f'{s.round}/{s.org}/{s.name}': s for s in load_table() if s.has_recipe and base_of(s)}
    found = [w for w, s in whole.items() if name.casefold() in (w.casefold(), s.name.casefold())]
    if len(found) == 1:
        return whole[found[0]]
    if found:
        raise ConfigError(f'SOURCE: got {name}, which names {len(found)} published systems, expected one of '
                          f'{some(found, _MAX_NAMES)}')
    parent = name.casefold().rpartition('/')[0]
    near = [w for place in (parent, parent.partition('/')[0]) if place for w in whole
            if w.casefold().startswith(f'{place}/')]  # systems of the same round
    hint = nearest(name, near) or nearest(name, list(whole)) or nearest(name, [s.name for s in whole.values()])
    raise ConfigError(f'{printable(name)}: not a file, folder or published system' + (
        hint or f'; expected a run, a study, a JSON file of bench, or a name such as {list(whole)[-1]}'))


def _smallest(sets: Sequence[RunSet], per_node: int | None) -> list[RunSet]:
    least = min(k.num_nodes or 0 for k in sets)
    found = [k for k in sets if k.num_nodes == least]
    return [k for k in found if k.num_units == least * (per_node or 0)] or found


def power_of(run_set: RunSet) -> Power | None:
    """Return the mean power of one node of a system; None if its energy was not measured."""
    energy = run_set.energy
    if not energy or not energy.joules or not energy.seconds or not run_set.num_nodes:
        return None
    return Power(energy.joules / energy.seconds / run_set.num_nodes, energy.measured)


def _choose_step(bench: Bench, per_node: int | None, local_batch_size: int | None) -> MeasuredStep:
    """Return the bench train row with the fewest hosts and, among those, the ranks per node nearest to per_node."""
    def distance(s: MeasuredStep) -> tuple[int, float, int]:
        return s.num_hosts, abs(s.num_ranks / s.num_hosts - (per_node or 1)), s.num_ranks
    least = min(map(distance, bench.steps))
    found = [s for s in bench.steps if distance(s) == least]
    found = [s for s in found if s.local_batch_size == local_batch_size] or found
    if len(found) > 1:
        raise ConfigError(f'{bench.path}: got {len(found)} matching measurements, expected one; pass '
                          '--local-batch-size, or measure a single network, precision and input (found: '
                          f'{"; ".join(s.name for s in found[:_MAX_NAMES])})')
    return found[0]


def _base_of_step(step: MeasuredStep, bench: Bench) -> tuple[Base, tuple[str, ...]]:
    """Return a measured step as a base, and notes on assumptions; only ResNet-50 at 224 pixels counts as ImageNet."""
    batch = step.local_batch_size * step.num_ranks
    base = Base(step.name, str(bench.path), step.num_hosts, step.num_ranks, bench.has_accelerators, batch, step.step_s,
                step.exchange_s, None, None, IMAGENET_TRAIN, f'images of {step.image_size} pixels')
    if step.model != 'resnet50' or step.image_size != _IMAGENET_PIXELS:
        return base, ('No minutes are predicted, because epochs are known only for ResNet-50 with 224-pixel images',)
    evaluation_s = (1 - BACKWARD_SHARE) * step.step_s * IMAGENET_VAL / batch
    return replace(base, evaluation_s=evaluation_s, outside_s=0.0, dataset=None), (
        'Not measured: evaluations (assumed to take a third of the training time of 50,000 images), first-epoch '
        'overhead on one node (assumed to be zero), input pipeline (assumed to keep up)',)


def _exchange_link(base: Base, bench: Bench, exchange: MeasuredExchange) -> Link:
    """Return the measured link. The exchange overlaps if less than half of its time adds to a step."""
    source = f'bench allreduce over {exchange.num_ranks} ranks on {exchange.num_hosts} nodes, {bench.path}'
    if exchange.step_ms is None or base.num_nodes > 1 or base.local_batch_size != exchange.local_batch_size:
        return Link(exchange.gbit_s, exchange.num_bytes, False, source)
    time_s, shown_s = exchange.time_ms / 1000, exchange.step_ms / 1000 - (base.step_s - base.exchange_s)
    return Link(exchange.gbit_s, exchange.num_bytes, shown_s < time_s / 2,
                f'{source}; {1e3 * max(shown_s, 0.0):.1f} of its {1e3 * time_s:.1f} ms add to a step')


def _find_link(source: Source, bench: Bench | None, gbit_s: float | None) -> tuple[Link | None, tuple[str, ...]]:
    """Return the requested link, otherwise the measured or the published one, and notes about this link."""
    base, measured, notes = source.base, None, tuple[str, ...]()
    if bench and bench.exchange:
        measured = _exchange_link(base, bench, bench.exchange)
        if bench.exchange.num_hosts == 1:
            notes = (f'{bench.path}: measured within one host, so the interconnect is unknown',)
    if gbit_s and measured:
        return replace(measured, gbit_s=gbit_s, source='--link-gbit-s, gradient size from bench allreduce'), notes
    if gbit_s:
        num_bytes, kind = source.gradients or (
            (PUBLISHED_LINK.exchange_bytes, 'float16 gradients of ResNet-50') if base.has_accelerators else
            (_FLOAT32_BYTES, 'float32 gradients of ResNet-50'))
        return Link(gbit_s, num_bytes, False, f'--link-gbit-s, assumed {kind}'), notes
    if notes:
        return None, notes
    return measured or (PUBLISHED_LINK if base.has_accelerators else None), ()


def load_source(words: Sequence[str], system: str | None = None, per_node: int | None = None,
                local_batch_size: int | None = None, gbit_s: float | None = None) -> Source:
    """Load logs, a published system or bench files; per_node and local_batch_size select one of several layouts.

    Raises:
        UserError: a file is unreadable or lacks values that a prediction needs.
        ConfigError: the name is unknown or ambiguous.
    """
    benches = {word: load_bench(Path(word)) for word in words if is_bench(Path(word))}
    folders = [Path(word) for word in words if word not in benches and os.path.lexists(word)]
    published = [published_by_name(word) for word in words if not os.path.lexists(word)]
    steps = [benches[word] for word in words if word in benches and benches[word].steps]
    exchanges = [benches[word] for word in words if word in benches and benches[word].exchange]
    if bool(folders) + len(published) + len(steps) > 1 or len(exchanges) > 1:
        raise ConfigError(f'SOURCE: got {printable(", ".join(words))}, expected one run, study, published system or '
                          'bench train file, and at most one bench allreduce file')
    if system and not folders:
        raise ConfigError(f'--system: got {system}, expected a SOURCE that is a folder of several systems')
    exchange = exchanges[0] if exchanges else None
    if folders:
        source = _from_systems(load_run_sets(folders), system, per_node)
    elif published:
        source = _from_published(published[0])
    else:
        source = _from_bench(steps[0] if steps else None, exchange, per_node, local_batch_size)
    link, notes = _find_link(source, exchange, gbit_s)
    if link == PUBLISHED_LINK and not published:
        notes = (*notes, _ASSUMED)
    return replace(source, link=link, notes=(*source.notes, *notes))


def _from_systems(run_sets: Sequence[RunSet], name: str | None, per_node: int | None) -> Source:
    """Return the named system, or the one with the fewest nodes, and all comparable sets."""
    sets = [s for s in run_sets if s.has_recipe and base_of(s)]
    if not sets:
        reasons = '; '.join(f'{s.name}: {s.refusal or _INCOMPLETE}' for s in run_sets[:3])
        raise UserError(f'no set to predict from: {printable(reasons)}')
    chosen = [k for k in sets if k.name == name] if name else _smallest(sets, per_node)
    names = [k.name for k in sets]
    if not chosen:
        raise ConfigError(f'--system: got {name}, expected one of {printable(some(names, _MAX_NAMES))}'
                          f'{nearest(name or "", names)}')
    if len(chosen) > 1:
        which = ', '.join(k.source for k in chosen[:_MAX_NAMES])
        raise ConfigError(f'--system: {len(chosen)} systems match, expected one of '
                          f'{printable(some([k.name for k in chosen], _MAX_NAMES))} ({printable(which)})')
    run_set, base = chosen[0], base_of(chosen[0])
    assert base is not None  # sets without a base are excluded above
    comparable = tuple(k for k in sets if _kind(k) == _kind(run_set))
    notes = () if len(comparable) == 1 or name else (
        f'Predicted from {run_set.name}, the smallest of {len(comparable)} systems; --system NAME selects another',)
    return Source(base, None, comparable, notes, power_of(run_set))


def _from_published(run_set: RunSet) -> Source:
    """Return a published system, and the systems that the validation predicts from it."""
    base, sets = base_of(run_set), load_published()
    assert base is not None  # the published table has all times
    others = [s for s in sets if (s.num_nodes or 0) > 1 and (found := base_for(s, sets)) and found.run_set is run_set]
    return Source(base, None, (run_set, *others))


def _from_bench(steps: Bench | None, exchange: Bench | None, per_node: int | None,
                local_batch_size: int | None) -> Source:
    """Return the step of bench train or, without one, that of bench allreduce as a base."""
    if steps:
        step = _choose_step(steps, per_node, local_batch_size)
        base, notes = _base_of_step(step, steps)
        return Source(base, None, notes=notes, gradients=step.gradients)
    assert exchange and exchange.exchange  # load_source passes at least one of the two
    x = exchange.exchange
    if x.step_ms is None:
        raise UserError(f'{exchange.path}: step_ms is missing; pass a bench train file as well')
    step = MeasuredStep(x.model, x.local_batch_size, x.num_ranks, x.num_hosts, 'float32', 'synthetic', _IMAGENET_PIXELS,
                        x.num_bytes // 4, x.step_ms, 0.0, 0.0, 0.0, 0.0, 0.0)
    base, notes = _base_of_step(step, exchange)
    return Source(base, None, notes=(*notes, 'The step of bench allreduce includes the exchange, which is assumed '
                                     'not to overlap; a bench train file of one node improves the prediction'))
