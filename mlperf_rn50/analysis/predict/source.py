"""Load the base and the interconnect of a prediction from untrusted logs or bench files, or from published systems."""
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from mlperf_rn50.analysis.predict.anchors import base_of, is_machine, link_of
from mlperf_rn50.analysis.predict.bench_file import Bench, MeasuredExchange, MeasuredStep, load_bench
from mlperf_rn50.analysis.predict.model import BACKWARD_SHARE, UNKNOWN_GBIT_S, compute_s, ring_s
from mlperf_rn50.analysis.predict.prediction import FLOAT16_BYTES, Base, Costs, Layout, Link, generation_of
from mlperf_rn50.analysis.recipe.choose import is_within
from mlperf_rn50.analysis.sets.load import load_run_sets
from mlperf_rn50.analysis.sets.published import load_table
from mlperf_rn50.analysis.sets.recipe import Recipe
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
_UNKNOWN_EPOCHS = 'No minutes are predicted, because epochs are known only for ResNet-50 with 224-pixel images'
_UNMEASURED = ('Not measured: evaluations (assumed to take a third of the training time of 50,000 images), first-epoch '
               'overhead on one node (assumed to be zero), input pipeline (assumed to keep up)')
ASSUMED = (f'Ports between nodes unknown: {UNKNOWN_GBIT_S:g} Gbit/s per node assumed, with a wider interval; pass '
           '--link-gbit-s or a bench allreduce file')
_SAME_BYTES = 1.1  # largest ratio between the gradients of a source and of a bench allreduce file
_SAME_LOCAL = 1.1  # up to this ratio, two local batches are too similar for a slope of the step time


@dataclass(frozen=True)
class Source:
    """Measurements that predictions start from; None stands for unknown."""

    base: Base
    link: Link | None
    sets: tuple[RunSet, ...] = ()
    notes: tuple[str, ...] = ()
    gradient_bytes: int = FLOAT16_BYTES
    is_changed: bool = False  # by --what-if, so that other measured sets do not apply


def _from_published(name: str) -> Source:
    """Return a published system by its full name or the last part of that name, and the other sets of its machine."""
    bases = {f'{s.round}/{s.org}/{s.name}': (s, base) for s in load_table() if (base := base_of(s))}
    found = [full for full, (s, _) in bases.items() if name.casefold() in (full.casefold(), s.name.casefold())]
    if len(found) == 1:
        run_set, base = bases[found[0]]
        return Source(base, None, (run_set, *(s for s, _ in bases.values() if s is not run_set and not s.is_duplicate
                                              and is_machine(s, run_set))))
    if found:
        raise ConfigError(f'SOURCE: got {name}, which names {len(found)} published systems, expected one of '
                          f'{some(found, _MAX_NAMES)}')
    same_round = [full for full in bases if full.startswith(f'{name.casefold().partition("/")[0]}/')]
    hint = nearest(name, same_round) or nearest(name, [*bases]) or nearest(name, [s.name for s, _ in bases.values()])
    raise ConfigError(f'{printable(name)}: not a file, folder or published system' + (
        hint or f'; expected a run, a study, a JSON file of bench, or a name such as {[*bases][-1]}'))


def _choose_steps(bench: Bench, per_node: int | None, local_batch_size: int | None) -> list[MeasuredStep]:
    """Return the rows with the fewest hosts and, among these, with the number of ranks per node nearest to per_node.

    The rows differ only in the local batch: the requested one or, if there is none, the largest comes first.
    """
    def distance(s: MeasuredStep) -> tuple[int, float, int]:
        return s.num_hosts, abs(s.num_ranks / s.num_hosts - (per_node or 1)), s.num_ranks
    least = min(map(distance, bench.steps))
    found = sorted((s for s in bench.steps if distance(s) == least),
                   key=lambda s: (s.local_batch_size != local_batch_size, -s.local_batch_size))
    kinds = {s.kind for s in found if s.local_batch_size == local_batch_size} or {s.kind for s in found}
    same = [s for s in found if s.kind in kinds]
    if len(kinds) > 1 or len({s.local_batch_size for s in same}) < len(same):
        names = [f'{s.kind}, {s.local_batch_size} per rank' for s in same]
        raise ConfigError(f'{bench.path}: got {len(found)} matching measurements, expected one for each batch; measure '
                          f'one network, precision and input (found: {some(names, _MAX_NAMES)})')
    return same


def _from_bench(bench: Bench, per_node: int | None, local_batch_size: int | None) -> Source:
    """Return the chosen steps of bench train as a base; only ResNet-50 at 224 pixels counts as ImageNet."""
    step, *others = _choose_steps(bench, per_node, local_batch_size)
    local, batch, step_s = step.local_batch_size, step.local_batch_size * step.num_ranks, step.step_ms / 1e3
    is_known = step.model == 'resnet50' and step.image_size == _IMAGENET_PIXELS
    base = Base(f'{step.kind}, {local} per rank', str(bench.path), step.num_hosts, step.num_ranks,
                bench.accelerator is not None, batch, step_s,
                (1 - BACKWARD_SHARE) * step_s * IMAGENET_VAL / batch if is_known else None, 0.0, IMAGENET_TRAIN,
                None if is_known else f'images of {step.image_size} pixels', None, generation_of(bench.accelerator),
                tuple((s.local_batch_size, s.step_ms / 1e3) for s in others
                      if not is_within(s.local_batch_size, local, _SAME_LOCAL)))
    return Source(base, None, (), (_UNMEASURED if is_known else _UNKNOWN_EPOCHS,),
                  (2 if step.precision == 'float16' else 4) * step.num_parameters)


def _exchange_link(base: Base, bench: Bench, exchange: MeasuredExchange) -> Link:
    """Return the measured ports, and the time besides computing and exchange if a step with exchange was measured.

    The base must have one node, and the step as many images per accelerator or rank as one of the base's steps.
    """
    num_ranks, num_hosts, local = exchange.num_ranks, exchange.num_hosts, exchange.local_batch_size
    time_s = exchange.time_ms / 1e3
    link = Link(ring_s(exchange.num_bytes, num_ranks, 1.0) / time_s, exchange.num_bytes,
                f'bench allreduce over {num_ranks} ranks on {num_hosts} nodes, {bench.path}')
    is_alike = local in (base.local_batch_size, *(b for b, _ in base.steps))
    if exchange.step_ms is None or base.num_nodes > 1 or num_hosts == 1 or not is_alike:
        return link
    layout = Layout(num_hosts, num_ranks // num_hosts, Recipe(None, local * num_ranks))
    shown_s = max(0.0, exchange.step_ms / 1e3 - compute_s(base, layout, link, Costs()))
    return replace(link, overlap=max(0.0, 1 - shown_s / time_s), extra_s=max(0.0, shown_s - time_s), source=(
        f'{link.source}; {1e3 * shown_s:.1f} ms of a step are not hidden, all-reduce {1e3 * time_s:.1f} ms'))


def _find_link(source: Source, bench: Bench | None, gbit_s: float | None) -> tuple[Link | None, tuple[str, ...]]:
    """Return the ports as requested or, failing that, as measured, as described or as unknown; and notes about them."""
    base, num_bytes, notes = source.base, source.gradient_bytes, tuple[str, ...]()
    if bench and bench.exchange:
        measured = _exchange_link(base, bench, bench.exchange)
        if not is_within(measured.exchange_bytes, num_bytes, _SAME_BYTES):
            notes = (f'{bench.path}: {measured.exchange_bytes / 1e6:.1f} MB of gradients are used, but the source has '
                     f'{num_bytes / 1e6:.1f} MB',)
        if bench.exchange.num_hosts > 1 and not gbit_s:
            return measured, notes
        num_bytes = measured.exchange_bytes
        notes += () if gbit_s else (f'{bench.path}: measured within one host, so the interconnect is unknown',)
    if gbit_s or not base.has_accelerators:
        return Link(gbit_s, num_bytes, '--link-gbit-s') if gbit_s else None, notes
    link = link_of(base.run_set, num_bytes)
    return link, notes if link.gbit_s else (*notes, ASSUMED)


def load_source(words: Sequence[str], system: str | None = None, per_node: int | None = None,
                local_batch_size: int | None = None, gbit_s: float | None = None) -> Source:
    """Load logs, a published system or bench files; per_node and local_batch_size select one of several layouts."""
    loaded = [(word, load_bench(Path(word)), os.path.lexists(word)) for word in words]
    folders = [Path(word) for word, bench, is_path in loaded if is_path and not bench]
    names = [word for word, _, is_path in loaded if not is_path]
    steps, exchanges = ([b for _, b, _ in loaded if b and getattr(b, kind)] for kind in ('steps', 'exchange'))
    if bool(folders) + len(names) + len(steps) != 1 or len(exchanges) > 1:
        raise ConfigError(f'SOURCE: got {printable(", ".join(words))}, expected one run, study, published system or '
                          'bench train file, and at most one bench allreduce file')
    if system and not folders:
        raise ConfigError(f'--system: got {system}, expected a SOURCE that is a folder of several systems')
    source = (_from_systems(load_run_sets(folders), system, per_node) if folders else
              _from_published(names[0]) if names else _from_bench(steps[0], per_node, local_batch_size))
    link, notes = _find_link(source, exchanges[0] if exchanges else None, gbit_s)
    return replace(source, link=link, notes=(*source.notes, *notes))


def _from_systems(run_sets: Sequence[RunSet], name: str | None, per_node: int | None) -> Source:
    """Return the named system, or the one with the fewest nodes, and all comparable sets."""
    def distance(b: Base) -> tuple[int, bool]:
        return b.num_nodes, b.num_units != b.num_nodes * (per_node or 0)
    bases = [base for s in run_sets if (base := base_of(s))]
    if not bases:
        reasons = '; '.join(f'{s.name}: {s.refusal or _INCOMPLETE}' for s in run_sets[:3])
        raise UserError(f'no set to predict from: {printable(reasons)}')
    least, names = min(map(distance, bases)), [b.name for b in bases]
    chosen = [b for b in bases if (b.name == name if name else distance(b) == least)]
    if len(chosen) != 1:
        expected = some([f'{b.name} ({b.source})' for b in chosen] or names, _MAX_NAMES)
        raise ConfigError(f'--system: got {name or "no name"}, which matches {len(chosen)} systems, expected one of '
                          f'{printable(expected)}{"" if chosen else nearest(name or "", names)}')
    [base] = chosen
    comparable = [b for b in bases if _kind(b.run_set) == _kind(base.run_set)]
    steps = {b.local_batch_size: b.step_s for b in comparable if b.num_nodes == base.num_nodes == 1
             and b.num_units == base.num_units
             and not is_within(b.local_batch_size, base.local_batch_size, _SAME_LOCAL)}
    notes = () if len(comparable) == 1 or name else (
        f'Predicted from {base.name}, the smallest of {len(comparable)} systems; --system NAME selects another',)
    return Source(replace(base, steps=tuple(steps.items())), None, tuple(b.run_set for b in comparable if b.run_set),
                  notes, FLOAT16_BYTES if base.has_accelerators else _FLOAT32_BYTES)
