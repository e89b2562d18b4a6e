"""What does a prediction start from? A run, a study, a published system or what `bench` measured, as a base and a link.

Neither logs nor the JSON of a bench are trusted: what they hold is typed and bounded.
"""
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from mlperf_rn50.errors import ConfigError, UserError, nearest
from mlperf_rn50.files import parse_json, regular_file
from mlperf_rn50.mlperf.collect import number
from mlperf_rn50.mlperf.events import printable
from mlperf_rn50.mlperf.run import IMAGENET_TRAIN
from mlperf_rn50.study.convergence import System
from mlperf_rn50.study.known import KnownSet, known_of, load_published
from mlperf_rn50.study.predict import BACKWARD_SHARE, PUBLISHED_BYTES, Base, Link, base_for, base_of, published_link
from mlperf_rn50.study.systems import load_systems
from mlperf_rn50.study.text import some

# Gradients of ResNet-50 in float32, as ranks without accelerators exchange them.
_FLOAT32_BYTES = 4 * 25_557_032
_IMAGENET_VAL = 50_000
_IMAGENET_PIXELS = 224
_MAX_FILE_BYTES, _MAX_ROWS = 4 * 2**20, 1000  # of a bench
_MAX_MS, _MAX_COUNT, _MAX_BYTES = 1e8, 10**6, 10**12  # of what a bench holds
_MAX_SHOWN, _MAX_NAMES = 40, 8  # characters of a value, and names, in a sentence
_ASSUMED = ('Nobody says what joins the nodes: as much as between published systems is supposed; a bench allreduce, or '
            '--link-gbit-s, would say')
_PARTS = ('data', 'forward', 'backward', 'update')  # of a step, beside the exchange
_T = TypeVar('_T')


@dataclass(frozen=True)
class MeasuredStep:
    """A row of bench train; the step is that of all ranks, exchange_s what of it is exchange that is not hidden."""

    model: str
    precision: str
    images: str
    image_size: int
    local_batch_size: int
    num_ranks: int
    num_hosts: int
    step_s: float
    exchange_s: float
    num_parameters: int

    @property
    def gradients(self) -> tuple[int, str]:
        """Their bytes, and what they are."""
        bits = 16 if self.precision == 'float16' else 32
        return bits // 8 * self.num_parameters, f'float{bits} gradients of {self.model}'

    @property
    def name(self) -> str:
        return (f'{self.model}, {self.precision}, {self.images} images of {self.image_size} pixels, '
                f'{self.local_batch_size} per rank')


@dataclass(frozen=True)
class MeasuredExchange:
    """What bench allreduce says of the gradients of a step, and of the step with their exchange: None without one."""

    model: str
    local_batch_size: int
    num_ranks: int
    num_hosts: int
    num_bytes: int
    time_s: float
    step_s: float | None

    @property
    def gbit_s(self) -> float:
        """What crosses the link of each rank, in a ring."""
        return 2 * (self.num_ranks - 1) / self.num_ranks * self.num_bytes * 8 / self.time_s / 1e9


@dataclass(frozen=True)
class Bench:
    """A JSON file of bench train or bench allreduce."""

    path: Path
    has_accelerators: bool
    steps: tuple[MeasuredStep, ...] = ()
    exchange: MeasuredExchange | None = None


@dataclass(frozen=True)
class Power:
    """The mean power of a node over its runs; kinds: of what, such as ('cpu', 'gpu')."""

    watts: float
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """What a prediction starts from.

    Args:
        link: None where nobody says what joins the nodes.
        power: of a node of the base; None where nobody measured it.
    """

    base: Base
    link: Link | None
    sets: tuple[KnownSet, ...] = ()
    notes: tuple[str, ...] = ()
    power: Power | None = None
    gradients: tuple[int, str] = (_FLOAT32_BYTES, 'float32 gradients of ResNet-50')


class _Object:
    """An object of a JSON file that is not trusted; place: where it stands in it, such as 'tables[0].rows[1]'."""

    def __init__(self, path: Path, place: str, value: Any):
        self._path, self._place = path, place
        if not isinstance(value, dict):
            raise self._error(place or 'the file', value, 'an object')
        self._value = value

    def _error(self, place: str, got: Any, expected: str) -> UserError:
        text = printable(json.dumps(got, ensure_ascii=False))
        shown = text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN - 1] + '…'
        return UserError(f'{self._path}: {place}: got {shown}, expected {expected}; write it with mlperf-rn50 bench '
                         'train --format json, or bench allreduce')

    def _field(self, key: str, expected: str, take: Callable[[Any], _T | None]) -> _T:
        found = take(self._value.get(key))
        if found is None:
            raise self._error(f'{self._place}.{key}' if self._place else key, self._value.get(key), expected)
        return found

    def number(self, key: str, low: float, high: float) -> float:
        return self._field(key, f'a number from {low:g} to {high:g}', lambda v: number(v, low, high))

    def count(self, key: str, low: int = 1, high: int = _MAX_COUNT) -> int:
        return self._field(key, f'a whole number from {low} to {high}',
                           lambda v: v if isinstance(v, int) and number(v, low, high) is not None else None)

    def seconds(self, key: str, least_ms: float = 0.0) -> float:
        return self.number(key, least_ms, _MAX_MS) / 1000

    def has(self, key: str) -> bool:
        return key in self._value

    def text(self, key: str) -> str:
        return printable(self._field(key, 'a text', lambda v: v if isinstance(v, str) else None))[:_MAX_SHOWN]

    def object(self, key: str) -> '_Object':
        return _Object(self._path, f'{self._place}.{key}' if self._place else key, self._value.get(key))

    def objects(self, key: str) -> list['_Object']:
        place = f'{self._place}.{key}' if self._place else key
        values = self._field(key, f'a list of 1 to {_MAX_ROWS} objects',
                             lambda v: v if isinstance(v, list) and 0 < len(v) <= _MAX_ROWS else None)
        return [_Object(self._path, f'{place}[{i}]', value) for i, value in enumerate(values)]

    def is_list_with_something(self, key: str) -> bool:
        return bool(self._field(key, 'a list', lambda v: v if isinstance(v, list) else None))


def _read_start(path: Path, num_bytes: int) -> bytes:
    try:
        with open(path, 'rb', opener=regular_file) as f:
            return f.read(num_bytes)
    except OSError as e:
        raise UserError(f'{path}: cannot be read: {e.strerror}') from e


def is_bench(path: Path) -> bool:
    """Whether a path is a file with a JSON object, rather than a log or a folder.

    Raises:
        UserError: it cannot be read.
    """
    return os.path.isfile(path) and (path.suffix == '.json' or _read_start(path, 64).lstrip()[:1] == b'{')


def load_bench(path: Path) -> Bench:
    """What a JSON file of bench train or bench allreduce says.

    Raises:
        UserError: it is something else, or holds what no bench writes.
    """
    content = _read_start(path, _MAX_FILE_BYTES + 1)
    if len(content) > _MAX_FILE_BYTES:
        raise UserError(f'{path}: is larger than {_MAX_FILE_BYTES} bytes, expected the JSON of a bench')
    try:
        whole = _Object(path, '', parse_json(content))
    except ValueError as e:
        raise UserError(f'{path}: is no JSON that can be read ({printable(str(e))[:2 * _MAX_SHOWN]}); write it with '
                        'mlperf-rn50 bench train --format json, or bench allreduce') from e
    kind = re.fullmatch('mlperf-rn50 bench (train|allreduce) 1', whole.text('format'))
    if not kind:
        raise UserError(f'{path}: format: got {whole.text("format")}, expected mlperf-rn50 bench train 1, or bench '
                        'allreduce 1')
    machine, tables = whole.object('machine'), whole.objects('tables')
    has_accelerators = machine.is_list_with_something('gpus')
    if kind[1] == 'train':
        return Bench(path, has_accelerators, tuple(map(_step, tables[0].objects('rows'))))
    return Bench(path, has_accelerators, exchange=_exchange(path, machine, tables))


def _step(row: _Object) -> MeasuredStep:
    num_ranks, step_s = row.count('num_ranks'), row.seconds('step_ms', 1e-3)
    exchange_s = row.seconds('all_reduce_ms')
    shown_s = step_s - sum(row.seconds(f'{part}_ms') for part in _PARTS)  # each was waited for
    return MeasuredStep(
        row.text('model'), row.text('precision'), row.text('input'), row.count('image_size'),
        row.count('local_batch_size'), num_ranks, row.count('num_hosts', 1, num_ranks), step_s,
        min(max(shown_s, 0.0), exchange_s) if num_ranks > 1 else 0.0, row.count('num_parameters', 1, _MAX_BYTES))


def _exchange(path: Path, machine: _Object, tables: Sequence[_Object]) -> MeasuredExchange:
    over = next((m for t in tables if (m := re.fullmatch(r'All-reduce over (\d{1,6}) ranks', t.text('title')))), None)
    table = next((t for t in tables if t.text('title') == 'The gradients of a step'), None)
    if not over or not table or int(over[1]) < 2:
        raise UserError(f'{path}: no table of an all-reduce over 2 or more ranks and of the gradients of a step; write '
                        'it with mlperf-rn50 bench allreduce --format json')
    num_ranks, row = int(over[1]), table.objects('rows')[0]
    return MeasuredExchange(row.text('model'), row.count('local_batch_size'), num_ranks,
                            machine.count('num_hosts', 1, num_ranks), row.count('bytes', 1, _MAX_BYTES),
                            row.seconds('time_ms', 1e-6), row.seconds('step_ms', 1e-3) if row.has('step_ms') else None)


def full_name(known: KnownSet) -> str:
    """Of a published system."""
    return f'{known.round}/{known.org}/{known.name}'


def find_published(name: str) -> KnownSet:
    """A published system by its whole name, or by the last part of it.

    Raises:
        ConfigError: there is none, or several have that last part.
    """
    sets = load_published()
    found = ([s for s in sets if full_name(s).casefold() == name.casefold()]
             or [s for s in sets if s.name.casefold() == name.casefold()])
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f'{name}: names {len(found)} published systems, expected one of '
                          f'{printable(some([full_name(s) for s in found], _MAX_NAMES))}')
    hint = nearest(name, [full_name(s) for s in sets]) or nearest(name, [s.name for s in sets])
    raise ConfigError(f'{printable(name)}: neither a file or folder nor a published system'
                      + (hint or '; expected a run, a study, the JSON of a bench, or a name such as '
                                 f'{full_name(sets[-1])}'))


def _why_not(system: System) -> str:
    return printable(f'{system.name}: ' + (system.refusal or 'its logs do not tell the number of nodes, what shares '
                                           'the work, or how long an epoch takes, or no run of it has ended'))


def choose_set(systems: Sequence[System], name: str | None, per_node: int | None) -> tuple[KnownSet, list[KnownSet]]:
    """The set that a prediction starts from, and all of its kind.

    Args:
        name: of the system to start from; None for that with the fewest nodes.
        per_node: accelerators or ranks on a node, which decide where several have so few.

    Raises:
        UserError: none can be started from, or several could.
    """
    known = [(s, k) for s in systems if (k := known_of(s)) and base_of(k)]
    if not known:
        raise UserError(f'nothing to start from: {"; ".join(map(_why_not, systems[:3]))}')
    chosen = [k for _, k in known if k.name == name] if name else _smallest([k for _, k in known], per_node)
    names = [k.name for _, k in known]
    if not chosen:
        raise ConfigError(f'--system: got {name}, expected one of {printable(some(names, _MAX_NAMES))}'
                          f'{nearest(name or "", names)}')
    if len(chosen) > 1:
        which = ', '.join(k.source for k in chosen[:_MAX_NAMES])
        raise ConfigError(f'--system: {len(chosen)} systems could be started from, expected one: '
                          f'{printable(some([k.name for k in chosen], _MAX_NAMES))} ({printable(which)})')
    return chosen[0], [k for _, k in known if _kind(k) == _kind(chosen[0])]


def power_of(system: System) -> Power | None:
    """The power of a node of a system; None where its runs have no telemetry of it."""
    energy = system.energy
    if not energy or not energy.joules or not energy.seconds or not system.num_nodes:
        return None
    return Power(energy.joules / energy.seconds / system.num_nodes, energy.measured)


def _smallest(sets: Sequence[KnownSet], per_node: int | None) -> list[KnownSet]:
    least = min(k.num_nodes or 0 for k in sets)
    found = [k for k in sets if k.num_nodes == least]
    return [k for k in found if k.num_units == least * (per_node or 0)] or found


def _kind(known: KnownSet) -> tuple:
    """What sets share that may be shown beside each other."""
    return known.round, known.org, known.dataset, known.recipe.target_accuracy, known.accelerator


def _choose_step(bench: Bench, per_node: int | None, local_batch_size: int | None) -> MeasuredStep:
    """The row of bench train to start from: of few hosts, with as many ranks on each as are asked for.

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


def _base_of_step(step: MeasuredStep, path: Path, has_accelerators: bool) -> tuple[Base, tuple[str, ...]]:
    """A base from a step alone: of ImageNet where it is the step of its network; and what was not measured."""
    batch = step.local_batch_size * step.num_ranks
    base = Base(step.name, str(path), step.num_hosts, step.num_ranks, has_accelerators, batch, step.step_s,
                step.exchange_s, None, None, IMAGENET_TRAIN, f'images of {step.image_size} pixels')
    if step.model != 'resnet50' or step.image_size != _IMAGENET_PIXELS:
        return base, ('A step alone says nothing of epochs, and the data is not ImageNet: there are no minutes',)
    evaluation_s = (1 - BACKWARD_SHARE) * step.step_s * _IMAGENET_VAL / batch
    return replace(base, evaluation_s=evaluation_s, outside_s=0.0, dataset=None), (
        'Not measured: evaluations (a third of the time that training takes for 50,000 images is supposed), and, on '
        'one node, what the first epoch takes more (nothing is supposed); that the input keeps up is supposed, too',)


def _base_of_exchange(bench: Bench, x: MeasuredExchange) -> tuple[Base, tuple[str, ...]]:
    """A base from bench allreduce alone, whose step has the exchange in it.

    Raises:
        UserError: it has no step.
    """
    if x.step_s is None:
        raise UserError(f'{bench.path}: has no step_ms, expected a bench train beside it')
    step = MeasuredStep(x.model, 'float32', 'synthetic', _IMAGENET_PIXELS, x.local_batch_size, x.num_ranks, x.num_hosts,
                        x.step_s, 0.0, x.num_bytes // 4)
    base, notes = _base_of_step(step, bench.path, bench.has_accelerators)
    return base, (*notes, 'The step of bench allreduce has the exchange in it, of which nothing is supposed to be '
                  'hidden: bench train on one node, beside it, would say more')


def _exchange_link(base: Base, bench: Bench, x: MeasuredExchange) -> Link:
    """The link that bench allreduce measured; whether its step is shorter than its parts."""
    source = f'bench allreduce over {x.num_ranks} ranks on {x.num_hosts} nodes, {bench.path}'
    local = base.global_batch_size / base.num_units
    if x.step_s is None or base.num_nodes > 1 or local != x.local_batch_size:
        return Link(x.gbit_s, x.num_bytes, False, source)
    shown_s = x.step_s - (base.step_s - base.exchange_s)
    return Link(x.gbit_s, x.num_bytes, shown_s < x.time_s / 2,
                f'{source}; of its {1e3 * x.time_s:.1f} ms a step there shows {1e3 * max(shown_s, 0.0):.1f}')


def _find_link(source: Source, bench: Bench | None, gbit_s: float | None) -> tuple[Link | None, tuple[str, ...]]:
    """What joins the nodes: as asked for, as measured, or as published systems have it; and what to know of it."""
    base = source.base
    measured = bench and bench.exchange and _exchange_link(base, bench, bench.exchange)
    notes: tuple[str, ...] = ()
    if measured and bench and bench.exchange and bench.exchange.num_hosts == 1:
        notes = (f'{bench.path}: measured within one host, which says nothing of what joins nodes',)
        measured = replace(measured, gbit_s=gbit_s) if gbit_s else None
    if gbit_s and measured:
        return replace(measured, gbit_s=gbit_s, source='--link-gbit-s, gradients as bench allreduce has them'), notes
    if gbit_s:
        num_bytes, of = source.gradients
        return Link(gbit_s, num_bytes, False, f'--link-gbit-s, {of} are supposed'), notes
    if measured or notes:
        return measured or None, notes
    return (published_link(), ()) if base.has_accelerators else (None, ())


def _gradients_of(base: Base) -> tuple[int, str]:
    """Bytes of the gradients of a run, whose log does not tell them, and what they are."""
    return ((PUBLISHED_BYTES, 'float16 gradients of ResNet-50') if base.has_accelerators else
            (_FLOAT32_BYTES, 'float32 gradients of ResNet-50'))


def _starts(words: Sequence[str]) -> tuple[list[Path], list[KnownSet], list[Bench]]:
    """The folders and logs, published systems and benches that words name."""
    folders, published, benches = [], [], []
    for word in words:
        path = Path(word)
        if is_bench(path):
            benches.append(load_bench(path))
        elif os.path.lexists(path):
            folders.append(path)
        else:
            published.append(find_published(word))
    return folders, published, benches


def _check_starts(words: Sequence[str], num_starts: int, num_exchanges: int, system: str | None,
                  has_folders: bool) -> None:
    if num_starts > 1 or num_exchanges > 1:
        raise ConfigError(f'SOURCE: {printable(", ".join(words))} are several things to start from, expected one: a '
                          'run or study, a published system, or a bench train; and at most one bench allreduce beside')
    if system and not has_folders:
        raise ConfigError(f'--system: got {system}, expected a SOURCE that is a folder of several systems')


def load_source(words: Sequence[str], system: str | None = None, per_node: int | None = None,
                local_batch_size: int | None = None, gbit_s: float | None = None) -> Source:
    """What a prediction starts from.

    Args:
        per_node: accelerators or ranks on a node that are asked for first.
        local_batch_size: images of each that are asked for.

    Raises:
        UserError: something cannot be read, or does not say what a prediction needs.
        ConfigError: there is none of that name, or several things could be started from.
    """
    folders, published, benches = _starts(words)
    steps = [b for b in benches if b.steps]
    exchanges = [b for b in benches if b.exchange]
    _check_starts(words, bool(folders) + len(published) + len(steps), len(exchanges), system, bool(folders))
    exchange = exchanges[0] if exchanges else None
    if folders:
        source = _from_systems(load_systems(folders), system, per_node)
    elif published:
        source = _from_published(published[0])
    else:
        source = _from_bench(steps[0] if steps else None, exchange, per_node, local_batch_size)
    link, notes = _find_link(source, exchange, gbit_s)
    if link == published_link() and not published:
        notes = (*notes, _ASSUMED)
    return replace(source, link=link, notes=(*source.notes, *notes))


def _from_systems(systems: Sequence[System], name: str | None, per_node: int | None) -> Source:
    known, sets = choose_set(systems, name, per_node)
    base = base_of(known)
    assert base is not None  # choose_set takes no other
    notes = () if len(sets) == 1 or name else (
        f'{known.name} of {len(sets)} systems is started from: it has the fewest nodes',)
    power = next((power_of(s) for s in systems if str(s.folder) == known.source), None)
    return Source(base, None, tuple(sets), notes, power, _gradients_of(base))


def _from_published(known: KnownSet) -> Source:
    """A published system, and those that are predicted from it to judge the model."""
    base = base_of(known)
    if base is None:
        raise ConfigError(f'{full_name(known)}: its logs do not tell the times that a prediction starts from')
    sets = load_published()
    others = [s for s in sets if s is not known and (s.num_nodes or 0) > 1 and base_for(s, sets) is known]
    return Source(base, None, (known, *others), gradients=_gradients_of(base))


def _from_bench(steps: Bench | None, exchange: Bench | None, per_node: int | None,
                local_batch_size: int | None) -> Source:
    """The step of bench train, or else the one that bench allreduce has."""
    if steps:
        step = _choose_step(steps, per_node, local_batch_size)
        base, notes = _base_of_step(step, steps.path, steps.has_accelerators)
        return Source(base, None, (), notes, gradients=step.gradients)
    assert exchange and exchange.exchange  # one of both is there
    base, notes = _base_of_exchange(exchange, exchange.exchange)
    return Source(base, None, (), notes)
