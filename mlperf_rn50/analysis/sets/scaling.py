"""How much faster, and how efficient, are more accelerators, and why? Speed-up and its factors. Pure."""
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mlperf_rn50.analysis.sets import rcp
from mlperf_rn50.analysis.sets.convergence import System, ratio
from mlperf_rn50.errors import UserError
from mlperf_rn50.text import some

UNNAMED = 'unnamed'  # a platform that nobody has named: the default of run.submission_platform
# The factors of a speed-up must give it back to this share, else the log's intervals overlap or miss.
IDENTITY_TOLERANCE = 0.01
MAX_NAMES = 8  # of systems in a sentence
MAX_OF_SPLITS = 8  # systems of one number of units that are compared pair by pair


@dataclass(frozen=True)
class Rate:
    """Throughput against the ideal of so many times the smallest system's, as scaling studies print it."""

    units: int  # accelerators, or ranks where there are none
    ideal: float  # images/s if every unit did what one of the smallest system's does
    real: float

    @property
    def efficiency(self) -> float:
        return self.real / self.ideal


def scale_rate(base_units: int, base_rate: float, units: int, rate: float) -> Rate:
    """The row of the scaling-efficiency table for a number of units."""
    return Rate(units, base_rate / base_units * units, rate)


@dataclass(frozen=True)
class Comparison:
    """A system against the baseline of its study; every factor above 1 makes it faster."""

    system: System
    baseline: System
    speedup: float  # time of the baseline over that of the system
    efficiency: float | None  # speedup over the ratio of units; None where these are of another kind
    throughput_gain: float | None
    hardware_efficiency: float | None  # throughput_gain over the ratio of units
    epoch_ratio: float | None  # epochs of the baseline over those of the system, statistics
    # Of the shares of the time that training at full speed takes; the rest is the first epoch's extra, evaluations
    # and what lies between.
    share_ratio: float | None
    identity_error: float | None  # |throughput_gain x epoch_ratio x share_ratio / speedup - 1|


def full_speed_share(system: System) -> float | None:
    """Share of the time on the clock that its epochs take at the speed of those after the first."""
    parts, epoch_s, epochs = system.parts, system.epoch_s, system.scored_epochs_mean
    if parts is None or epoch_s is None or epochs is None or not parts.on_clock_s:
        return None
    return epochs * epoch_s / parts.on_clock_s


def has_other_units(system: System, baseline: System) -> bool:
    """Whether two systems count what is not alike: accelerators of two models, or accelerators and ranks on CPUs."""
    models, counts = ((system.accelerator, baseline.accelerator), (system.num_accelerators, baseline.num_accelerators))
    return None not in models and models[0] != models[1] or None not in counts and bool(counts[0]) != bool(counts[1])


def _is_other_copy(system: System, baseline: System) -> bool:
    return system.is_copy and system is not baseline


def compare(system: System, baseline: System) -> Comparison | None:
    """A system against a baseline; None where one of them has no time, or is a copy of another system."""
    time_s, base_s = system.time_s, baseline.time_s
    if not time_s or not base_s or _is_other_copy(system, baseline):
        return None
    units = None if has_other_units(system, baseline) else ratio(system.num_units, baseline.num_units)
    total = base_s / time_s
    gain = ratio(system.images_per_s, baseline.images_per_s)
    epochs = ratio(baseline.scored_epochs_mean, system.scored_epochs_mean)
    share = ratio(full_speed_share(system), full_speed_share(baseline))
    error = abs(gain * epochs * share / total - 1) if gain and epochs and share else None
    return Comparison(system, baseline, total, ratio(total, units), gain, ratio(gain, units), epochs, share, error)


@dataclass(frozen=True)
class Split:
    """Two node splits of the same number of units: how much the slower one loses."""

    units: int
    faster: System
    slower: System
    difference: float  # images/s of the faster over that of the slower, minus 1
    time_difference: float | None  # time to train of the slower over that of the faster, minus 1; None without both


def _compare_pair(a: System, b: System) -> Split | None:
    """Two systems of one number of units; None on as many nodes, or with units of another kind."""
    rate_a, rate_b, nodes = a.images_per_s, b.images_per_s, (a.num_nodes, b.num_nodes)
    if not a.num_units or not rate_a or not rate_b or None in nodes or nodes[0] == nodes[1] or has_other_units(a, b):
        return None
    fast, slow = (a, b) if rate_a >= rate_b else (b, a)
    times = ratio(slow.time_s, fast.time_s)
    return Split(a.num_units, fast, slow, max(rate_a, rate_b) / min(rate_a, rate_b) - 1, times - 1 if times else None)


def _by_units(systems: Sequence[System]) -> dict[int, list[System]]:
    """The systems with a throughput, by their number of units."""
    groups: dict[int, list[System]] = {}
    for system in systems:
        if system.num_units and system.images_per_s and not system.is_copy:
            groups.setdefault(system.num_units, []).append(system)
    return groups


def _widest_split(systems: Sequence[System]) -> list[Split]:
    """The fastest of many systems beside the slowest on another number of nodes."""
    fastest = max(systems, key=lambda s: s.images_per_s or 0.0)
    splits = (_compare_pair(fastest, s) for s in systems if s is not fastest)
    return sorted((s for s in splits if s), key=lambda s: -s.difference)[:1]


def compare_splits(systems: Sequence[System]) -> list[Split]:
    """Systems of the same number of units on different numbers of nodes, each pair once.

    Of more than MAX_OF_SPLITS with one number of units, which have too many pairs, only the fastest and slowest.
    """
    splits: list[Split] = []
    for group in _by_units(systems).values():
        if len(group) > MAX_OF_SPLITS:
            splits += _widest_split(group)
        else:
            splits += filter(None, (_compare_pair(a, b) for i, a in enumerate(group) for b in group[i + 1:]))
    return splits


@dataclass(frozen=True)
class Study:
    """Systems that may be compared: the same data and target, side by side in one folder."""

    name: str
    systems: tuple[System, ...]
    baseline: System
    comparisons: tuple[Comparison | None, ...]  # None for a system without a time; all where only one has a time
    splits: tuple[Split, ...]
    rates: tuple[Rate | None, ...]
    cautions: tuple[str, ...]  # what systems that are compared do not have in common, to be said before any ratio
    notes: tuple[str, ...]
    price_per_node_hour: float | None = None  # in any currency

    def cost(self, system: System) -> float | None:
        """What a system's time costs; None without a price, a time or a number of nodes."""
        if self.price_per_node_hour is None or system.node_hours is None:
            return None
        return system.node_hours * self.price_per_node_hour

    @cached_property
    def notes_by_start(self) -> dict[str, list[str]]:
        """The cautions and notes by what stands before one of their colons, such as the name of a system."""
        found: dict[str, list[str]] = {}
        for note in (*self.cautions, *self.notes):
            words = note.split(': ')
            for count in range(1, len(words)):
                found.setdefault(': '.join(words[:count]), []).append(note)
        return found


def _cautions_of(system: System, baseline: System) -> list[str]:
    result = []
    if has_other_units(system, baseline):
        kinds = [s.accelerator or ('accelerators' if s.num_accelerators else 'ranks on CPUs')
                 for s in (system, baseline)]
        result.append(f'{kinds[0]}, not {kinds[1]} as in {baseline.name}: the speed-up is of other hardware, and there '
                      'is no efficiency')
    if system.round != baseline.round:
        result.append(f'rules of {system.round}, not {baseline.round} as in {baseline.name}')
    if system.division and baseline.division and system.division != baseline.division:
        result.append(f'{system.division} division, not {baseline.division} as {baseline.name}')
    return [f'{system.name}: {text}' for text in result]


def _machine(system: System) -> str:
    """Its platform without the number of nodes, as in 2xDGX-1; '' where nobody named it."""
    platform = system.platform or UNNAMED
    return '' if platform == UNNAMED else re.sub(r'^\d+ *x *', '', platform).casefold()


def _unknown_accelerators(comparisons: Sequence[Comparison | None], baseline: System) -> list[str]:
    """What an efficiency supposes where nobody says what the accelerators are."""
    others = [c.system for c in comparisons if c and c.system is not baseline and c.efficiency is not None
              and c.system.num_accelerators and None in (c.system.accelerator, baseline.accelerator)
              and (not _machine(c.system) or _machine(c.system) != _machine(baseline))]
    unknown = list(dict.fromkeys(s.name for s in (baseline, *others) if s.accelerator is None)) if others else []
    if not unknown:
        return []
    return [f'the accelerator of {some(unknown, MAX_NAMES)} is not known: an efficiency supposes that all '
            'are alike']


def _notes(systems: Sequence[System], comparisons: Sequence[Comparison | None], baseline: System) -> list[str]:
    notes = []
    for c in comparisons:
        if c is None or c.system is baseline:
            continue
        if c.identity_error is not None and c.identity_error > IDENTITY_TOLERANCE:
            notes.append(f'{c.system.name}: throughput, epochs and share give {100 * c.identity_error:.1f} % more or '
                         'less than the speed-up: intervals of its logs overlap or miss')
        period = max((s.eval_period or 0) for s in (c.system, baseline))
        difference = abs((c.system.epochs_mean or 0) - (baseline.epochs_mean or 0))
        if 0 < difference < period:
            notes.append(f'{c.system.name}: {difference:.1f} epochs from {baseline.name} on average, less than the '
                         f'{period} between two evaluations: weak evidence')
    platforms = {s.platform for s in systems if s.platform}
    if len(platforms) == 1 and platforms != {UNNAMED} and len({s.num_nodes for s in systems} - {None}) > 1:
        notes.append(f'all ran on: {platforms.pop()}')
    notes += [f'of the {len(group)} systems of {units} {"accelerators" if group[0].num_accelerators else "ranks"}, '
              'only the fastest and the slowest on another number of nodes stand side by side'
              for units, group in _by_units(systems).items() if len(group) > MAX_OF_SPLITS
              and len({s.num_nodes for s in group} - {None}) > 1]
    for system in systems:
        score, official = system.score_minutes, rcp.official_score_minutes(system)
        if score and official and official != score:
            notes.append(f'{system.name}: the official score is {official:.2f} min, {score:.2f} x '
                         f'{official / score:.4f}: it took fewer epochs than the reference')
    if any(rcp.is_applicable(s) and rcp.check_rcp(s) is None for s in systems):
        notes.append("reference convergence points were not checked: pip install 'mlperf-rn50[check]'")
    return notes


def _rate(system: System, baseline: System) -> Rate | None:
    """A row of the scaling-efficiency table; None where one of the systems has no rate, or other units."""
    base_units, base_rate, units, rate = (baseline.num_units, baseline.images_per_s, system.num_units,
                                          system.images_per_s)
    if not base_units or not base_rate or not units or not rate or has_other_units(
            system, baseline) or _is_other_copy(system, baseline):
        return None
    return scale_rate(base_units, base_rate, units, rate)


def _make_study(systems: Sequence[System], baseline: System, price_per_node_hour: float | None) -> Study:
    comparisons: tuple[Comparison | None, ...] = tuple(compare(s, baseline) for s in systems)
    if sum(c is not None for c in comparisons) < 2:
        comparisons = (None,) * len(systems)
    cautions = [text for c in comparisons if c for text in _cautions_of(c.system, baseline)]
    cautions += _unknown_accelerators(comparisons, baseline)
    return Study(baseline.study_name, tuple(systems), baseline, comparisons, tuple(compare_splits(systems)),
                 tuple(_rate(s, baseline) for s in systems), tuple(cautions),
                 tuple(_notes(systems, comparisons, baseline)), price_per_node_hour)


def _is_apart(system: System) -> bool:
    """Whether it is shown, but nothing is compared with it: none of its files is a log, or its runs are no set."""
    return system.refusal is not None or all(r.status == 'unreadable' for r in system.runs)


def _kind(system: System) -> tuple:
    return system.is_imagenet, system.dataset if not system.is_imagenet else None, system.target_accuracy


def make_studies(systems: Sequence[System], baseline: str | None = None,
                 price_per_node_hour: float | None = None) -> list[Study]:
    """The studies of some systems, each against its smallest that converged; raise UserError for no such baseline.

    Args:
        baseline: name of a system that all with its data and target are compared with instead.
    """
    groups: dict[tuple, list[System]] = {}
    chosen = [s for s in systems if s.name == baseline]
    if baseline is not None and len(chosen) != 1:
        names = ', '.join(sorted({s.name for s in systems}))
        raise UserError(f'--baseline: got {baseline}, expected one of: {names}' if not chosen else
                        f'--baseline: {baseline} names {len(chosen)} systems; report on fewer folders')
    if chosen and chosen[0].refusal:
        raise UserError(f'--baseline: {baseline} is no set: {chosen[0].refusal}')
    for system in sorted(systems, key=_is_apart):
        key: tuple = system.study, _kind(system)
        if chosen and _kind(system) == _kind(chosen[0]):
            key = ('chosen',)
        elif _is_apart(system) and key not in groups:  # shown with those it lies beside
            key = next((k for k in groups if k[0] == system.study), key)
        groups.setdefault(key, []).append(system)
    studies = []
    for key, members in groups.items():
        base = chosen[0] if key == ('chosen',) else next((s for s in members if s.time_s), members[0])
        studies.append(_make_study(members, base, price_per_node_hour))
    return studies
