"""Series and studies of systems: speed-up, efficiency, and the factors of the speed-up. Pure
functions."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mlperf_rn50.analysis.sets import rcp
from mlperf_rn50.analysis.sets.run_set import RunSet, cost_of, ratio
from mlperf_rn50.errors import UserError
from mlperf_rn50.mllog.findings import Finding, make_finding
from mlperf_rn50.text import grouped, plural, some

UNNAMED = 'unnamed'  # the default of run.submission_platform
MAX_NAMES = 8  # maximum system names in a message
MAX_OF_SPLITS = 8  # maximum systems with equal numbers of units that are all compared in pairs


@dataclass(frozen=True)
class Series:
    """Sets of one machine on at least two different numbers of nodes, sorted by number of nodes,
    then by time."""

    run_sets: Sequence[RunSet]

    @property
    def baseline(self) -> RunSet:
        """The set on the fewest nodes, and of several such sets the fastest."""
        return self.run_sets[0]

    @property
    def title(self) -> str:
        base, per_node = self.baseline, self.baseline.units_per_node
        nodes = ', '.join(dict.fromkeys(f'{s.num_nodes:,}' for s in self.run_sets))
        unit = 'accelerator' if base.num_accelerators else 'rank'
        if per_node != 1:
            unit += 's'
        if base.accelerator and base.num_accelerators:
            unit = base.accelerator
        return f'{base.name} on {nodes} nodes, {per_node:g} {unit} per node'


def machine(run_set: RunSet) -> str:
    """Return the platform without a leading number of nodes, such as 2x in 2xDGX-1, or '' if
    unknown."""
    platform = run_set.platform or UNNAMED
    return '' if platform == UNNAMED else re.sub(r'^\d+ *x *', '', platform).casefold()


def _series_kind(run_set: RunSet) -> tuple:
    """Return what all sets of a series share. Submissions differ in the case and spacing of
    framework names."""
    framework = ''.join((run_set.framework or '').casefold().split())
    return (
        run_set.study,
        run_set.round,
        run_set.org,
        run_set.accelerator,
        bool(run_set.num_accelerators),
        run_set.units_per_node,
        framework,
        run_set.division,
    )


def find_series(run_sets: Sequence[RunSet]) -> list[Series]:
    """Return the series among sets with the same data set and target. Sets without a time are in
    none.

    Platform names are compared only if two sets have the same number of nodes, because some contain
    this number.
    """
    timed = [
        s
        for s in run_sets
        if s.time_s and s.num_nodes and s.num_units
        if not (s.is_duplicate or s.has_changed_nodes)
    ]
    found = []
    for group in grouped(timed, _series_kind).values():
        has_unique_nodes = len({s.num_nodes for s in group}) == len(group)
        for part in [group] if has_unique_nodes else grouped(group, machine).values():
            if len({s.num_nodes for s in part}) > 1:
                part.sort(key=lambda s: (s.num_nodes or 0, s.time_s or 0.0))
                found.append(Series(part))
    return found


@dataclass(frozen=True)
class Comparison:
    """A system compared with its baseline. Units are accelerators or CPU ranks. A factor above 1
    means faster."""

    run_set: RunSet
    baseline: RunSet
    speedup: float  # time of the baseline / time of the system
    efficiency: float | None  # speedup / ratio of units, None for different kinds of units
    throughput_gain: float | None  # images/s of the system / images/s of the baseline
    hardware_efficiency: float | None  # throughput_gain / ratio of units
    epoch_ratio: float | None  # epochs of the baseline / epochs of the system
    share_ratio: float | None  # full_speed_share of the system / that of the baseline

    @property
    def rest(self) -> float | None:
        """Factor of the speed-up that neither throughput nor epochs explain: first epoch,
        evaluations and gaps."""
        return ratio(ratio(self.speedup, self.throughput_gain), self.epoch_ratio)


def full_speed_share(run_set: RunSet) -> float | None:
    """Return the share of the time to train spent at full speed, without first-epoch overhead and
    evaluations."""
    parts, epoch_s, epochs = run_set.parts, run_set.epoch_s, run_set.scored_epochs_mean
    if parts is None or epoch_s is None or epochs is None or not parts.on_clock_s:
        return None
    return epochs * epoch_s / parts.on_clock_s


def has_other_units(run_set: RunSet, baseline: RunSet) -> bool:
    """Return whether the units differ in kind: accelerators of two models, or accelerators and CPU
    ranks."""
    models = {run_set.accelerator, baseline.accelerator}
    have_accelerators = {bool(s.num_accelerators) for s in (run_set, baseline)}
    has_other_model = None not in models and len(models) > 1
    return has_other_model or len(have_accelerators) > 1


def compare(run_set: RunSet, baseline: RunSet) -> Comparison | None:
    """Compare a system with a baseline. Return None if a time is missing or the system is a
    duplicate."""
    time_s, base_s = run_set.time_s, baseline.time_s
    if not time_s or not base_s or run_set.is_duplicate and run_set is not baseline:
        return None
    units = ratio(run_set.num_units, baseline.num_units)
    has_changed = run_set.has_changed_nodes or baseline.has_changed_nodes
    if has_changed or has_other_units(run_set, baseline):
        units = None
    total = base_s / time_s
    gain = ratio(run_set.images_per_s, baseline.images_per_s)
    epochs = ratio(baseline.scored_epochs_mean, run_set.scored_epochs_mean)
    share = ratio(full_speed_share(run_set), full_speed_share(baseline))
    return Comparison(
        run_set=run_set,
        baseline=baseline,
        speedup=total,
        efficiency=ratio(total, units),
        throughput_gain=gain,
        hardware_efficiency=ratio(gain, units),
        epoch_ratio=epochs,
        share_ratio=share,
    )


@dataclass(frozen=True)
class Split:
    """Two systems with the same number of units on different numbers of nodes."""

    units: int
    faster: RunSet
    slower: RunSet
    difference: float  # relative difference of images/s
    time_difference: float | None  # relative difference of the time to train


def _compare_pair(a: RunSet, b: RunSet) -> Split | None:
    """Compare two systems with equally many units. Return None if node counts are equal or units
    differ in kind."""
    slow, fast = sorted((b, a), key=lambda s: s.images_per_s or 0.0)
    rates = ratio(fast.images_per_s, slow.images_per_s)
    nodes = {a.num_nodes, b.num_nodes}
    if not a.num_units or not rates or None in nodes or len(nodes) < 2 or has_other_units(a, b):
        return None
    times = ratio(fast.time_s, slow.time_s)
    return Split(
        units=a.num_units,
        faster=fast,
        slower=slow,
        difference=rates - 1,
        time_difference=1 - times if times else None,
    )


def _by_units(run_sets: Sequence[RunSet]) -> dict[int, list[RunSet]]:
    """Group the systems whose throughput on one number of nodes is known, without duplicates, by
    number of units."""
    known = (s for s in run_sets if s.num_units and s.images_per_s and not s.has_changed_nodes)
    return grouped((s for s in known if not s.is_duplicate), lambda s: s.num_units or 0)


def compare_splits(run_sets: Sequence[RunSet]) -> list[Split]:
    """Compare systems of equally many units on different numbers of nodes. A large group has one
    comparison."""
    splits: list[Split] = []
    for group in _by_units(run_sets).values():
        if len(group) > MAX_OF_SPLITS:
            fastest = max(group, key=lambda s: s.images_per_s or 0.0)
            found = filter(None, (_compare_pair(fastest, s) for s in group if s is not fastest))
            splits += sorted(found, key=lambda s: -s.difference)[:1]
        else:
            splits += filter(
                None, (_compare_pair(a, b) for i, a in enumerate(group) for b in group[i + 1 :])
            )
    return splits


@dataclass(frozen=True)
class Study:
    """Systems in one folder with the same data set and target, which can be compared."""

    name: str
    run_sets: Sequence[RunSet]
    baseline: RunSet  # the chosen one, or the first with a time
    # None without a time, and for systems that have no comparable system
    comparisons: Sequence[Comparison | None]
    splits: Sequence[Split]
    # about comparisons; those about the whole study are the baseline's
    findings: Mapping[RunSet, Sequence[Finding]]
    series: Sequence[Series] = ()
    price_per_node_hour: float | None = None  # in any currency

    def cost(self, run_set: RunSet) -> float | None:
        """Return the cost of a system's time, or None if price, time or number of nodes is
        unknown."""
        return cost_of(run_set.node_hours, self.price_per_node_hour)

    @cached_property
    def comparison_of(self) -> dict[RunSet, Comparison | None]:
        return dict(zip(self.run_sets, self.comparisons))

    @cached_property
    def others(self) -> list[RunSet]:
        """Systems that are in no series."""
        members = {s for x in self.series for s in x.run_sets}
        return [s for s in self.run_sets if s not in members]


def _differences(run_set: RunSet, baseline: RunSet) -> Iterator[Finding]:
    """Yield findings about differences, other than in size, between a system and the baseline."""
    if has_other_units(run_set, baseline):
        kinds = [
            s.accelerator or ('accelerators' if s.num_accelerators else 'ranks on CPUs')
            for s in (run_set, baseline)
        ]
        yield make_finding('hardware_differs', None, *kinds, baseline.name)
    if run_set.round != baseline.round:
        yield make_finding('rounds_differ', None, run_set.round, baseline.round, baseline.name)
    if run_set.division and baseline.division and run_set.division != baseline.division:
        yield make_finding(
            'divisions_differ', None, run_set.division, baseline.division, baseline.name
        )


def _unknown_accelerators(comparisons: Sequence[Comparison | None]) -> list[Finding]:
    """Return a warning if efficiencies assume that unknown accelerators are the same model."""
    pairs = [
        (c.baseline, c.run_set)
        for c in comparisons
        if c
        and c.run_set is not c.baseline
        and c.efficiency is not None
        and c.run_set.num_accelerators
        and None in (c.run_set.accelerator, c.baseline.accelerator)
        and (not machine(c.run_set) or machine(c.run_set) != machine(c.baseline))
    ]
    unknown = list(dict.fromkeys(s.name for pair in pairs for s in pair if s.accelerator is None))
    return [make_finding('accelerator_unknown', None, some(unknown, MAX_NAMES))] if unknown else []


def _compare_findings(
    run_sets: Sequence[RunSet], comparisons: Sequence[Comparison | None], baseline: RunSet
) -> dict[RunSet, list[Finding]]:
    """Return, for each system, findings about its comparison. The baseline has those about the
    whole study."""
    found: dict[RunSet, list[Finding]] = {s: [] for s in run_sets}
    found[baseline] += _unknown_accelerators(comparisons)
    for c in comparisons:
        if c is None or c.run_set is c.baseline:
            continue
        found[c.run_set] += _differences(c.run_set, c.baseline)
        period = max((s.eval_period or 0) for s in (c.run_set, c.baseline))
        difference = abs((c.run_set.epochs_mean or 0) - (c.baseline.epochs_mean or 0))
        if 0 < difference < period:
            found[c.run_set].append(
                make_finding(
                    'evidence_weak', None, c.baseline.name, difference, plural(period, 'epoch')
                )
            )
    platforms = {s.platform for s in run_sets if s.platform}
    if (
        len(platforms) == 1
        and platforms != {UNNAMED}
        and len({s.num_nodes for s in run_sets} - {None}) > 1
    ):
        found[baseline].append(make_finding('platform_equal', None, platforms.pop()))
    found[baseline] += [
        make_finding(
            'splits_hidden',
            None,
            len(group),
            f'{units} {"accelerators" if group[0].num_accelerators else "ranks"}',
        )
        for units, group in _by_units(run_sets).items()
        if len(group) > MAX_OF_SPLITS and len({s.num_nodes for s in group} - {None}) > 1
    ]
    for run_set in run_sets:
        score, official = run_set.score_minutes, rcp.official_score_minutes(run_set)
        if score and official and official != score:
            numbering = ''
            if any(r.is_from_0 for r in run_set.runs):
                numbering = ', by the numbers in the logs, which count from 0'
            found[run_set].append(
                make_finding('score_scaled', None, official, score, official / score, numbering)
            )
    if any(rcp.is_applicable(s) and rcp.check_rcp(s) is None for s in run_sets):
        found[baseline].append(make_finding('reference_unchecked'))
    return found


def _make_study(
    run_sets: Sequence[RunSet], chosen: RunSet | None, price_per_node_hour: float | None
) -> Study:
    series = find_series(run_sets)
    of_series = {s: x.baseline for x in series for s in x.run_sets}
    steady = [s for s in run_sets if s.time_s and not s.has_changed_nodes]
    bases = [
        chosen or of_series.get(s) or next((o for o in steady if not has_other_units(s, o)), s)
        for s in run_sets
    ]
    compared = list(map(compare, run_sets, bases))
    uses = Counter(c.baseline for c in compared if c)
    # a system that is compared only with itself has no speed-up to show
    comparisons = [
        c if c and (c.run_set is not c.baseline or uses[c.baseline] > 1) else None for c in compared
    ]
    baseline = chosen or next((s for s in run_sets if s.time_s), run_sets[0])
    return Study(
        name=baseline.study_name,
        run_sets=run_sets,
        baseline=baseline,
        comparisons=comparisons,
        splits=compare_splits(run_sets),
        findings=_compare_findings(run_sets, comparisons, baseline),
        series=series,
        price_per_node_hour=price_per_node_hour,
    )


def _is_apart(run_set: RunSet) -> bool:
    """Return whether a system is shown but not compared because it is refused or has no readable
    log."""
    return run_set.refusal is not None or all(r.status == 'unreadable' for r in run_set.runs)


def _kind(run_set: RunSet) -> tuple:
    return (
        run_set.is_imagenet,
        run_set.dataset if not run_set.is_imagenet else None,
        run_set.target_accuracy,
    )


def make_studies(
    run_sets: Sequence[RunSet],
    baseline: str | None = None,
    price_per_node_hour: float | None = None,
) -> list[Study]:
    """Return the studies of systems. Raise UserError for an unknown, ambiguous or refused baseline.

    Args:
        baseline: name of the baseline for all systems with the same data set and target; None
            selects the smallest set of each series and, for systems in no series, the smallest
            converged set with the same accelerator.
    """
    groups: dict[tuple, list[RunSet]] = {}
    chosen = [s for s in run_sets if s.name == baseline]
    if baseline is not None and len(chosen) != 1:
        names = ', '.join(sorted({s.name for s in run_sets}))
        problem = f'expected one of: {names}'
        if chosen:
            problem = f'which matches {len(chosen)} systems; report on fewer folders'
        raise UserError(f'--baseline: got {baseline}, {problem}')
    if chosen and chosen[0].refusal:
        raise UserError(f'--baseline: {baseline} is refused because {chosen[0].refusal}')
    if chosen and not chosen[0].time_s:
        raise UserError(f'--baseline: {baseline} has no time, expected one with a converged run')
    for run_set in sorted(run_sets, key=_is_apart):
        key: tuple = run_set.study, _kind(run_set)
        if chosen and _kind(run_set) == _kind(chosen[0]):
            key = ('chosen',)
        elif _is_apart(run_set) and key not in groups:  # joins a study of the same folder, if any
            key = next((k for k in groups if k[0] == run_set.study), key)
        groups.setdefault(key, []).append(run_set)
    return [
        _make_study(members, chosen[0] if key == ('chosen',) else None, price_per_node_hour)
        for key, members in groups.items()
    ]
