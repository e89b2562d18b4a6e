"""First paragraph of the report: the best series, where efficiency is lost, what it costs, what is
refused. Pure."""

from collections.abc import Iterator, Sequence
from math import log2

from mlperf_rn50.analysis.report.headings import (
    has_other_epochs,
    labels_of,
    marks_of,
    mean_text,
)
from mlperf_rn50.analysis.sets.run_set import RunSet, evaluation_refs, time_refs, training_refs
from mlperf_rn50.analysis.sets.scaling import Comparison, Study
from mlperf_rn50.answer import Cell, number_cell, percent_cell
from mlperf_rn50.mllog import keys
from mlperf_rn50.mllog.rulesets import ROUND_OF
from mlperf_rn50.text import data_name, grouped, minutes, money, percent, plural, short

_MAX_NAMES, _MAX_REASON = 3, 90  # maximum systems listed in a sentence, and characters of a reason
_Names = dict[RunSet, Cell]


def summarise(studies: Sequence[Study]) -> list[list[Cell]]:
    """Return sentences, the most important first, as cells. Cells with numbers refer to their log
    lines."""
    labels = labels_of([s for study in studies for s in study.run_sets])
    names = {
        s: Cell(labels[s]) if len(studies) == 1 else Cell(f'{study.name}/{labels[s]}', study=number)
        for number, study in enumerate(studies, start=1)
        for s in study.run_sets
    }
    kinds = grouped((s for s in names if s.time_s and not s.is_duplicate), _goal)
    (*_, is_open), timed = max(
        kinds.items(),
        key=lambda kind: (len(kind[1]), not kind[0][2]),
        default=((None, None, False), []),
    )
    timed.sort(key=lambda s: s.time_s or 0.0)
    goal = ''
    if len({kind[:2] for kind in kinds}) > 1:
        target = timed[0].target_accuracy
        target_text = 'a target that is not logged' if target is None else percent(target)
        goal = f' to {target_text} on {data_name(timed[0].other_dataset)}'
    if len({kind[2] for kind in kinds}) > 1:
        goal += f' in the {"open" if is_open else "closed"} division'
    scaling = _scaling(studies, names)
    texts = [
        *scaling,
        *_fastest(timed, names, goal),
        *_prices(studies, timed, names, goal),
        _counts(names, _platform(studies)),
    ]
    texts[1 if timed else 0 : 0] = [*_refused(names), *_resumed(names)]
    return [[c if isinstance(c, Cell) else Cell(c) for c in text if c] for text in texts]


def _platform(studies: Sequence[Study]) -> str:
    """Return the one platform of all systems of a study, whatever their number of nodes, or ''. It
    may be a machine that simulates them."""
    findings = [f for study in studies for found in study.findings.values() for f in found]
    if len(studies) > 1 or all(f.kind != 'platform_equal' for f in findings):
        return ''
    return next(s.platform for s in studies[0].run_sets if s.platform)


def _goal(run_set: RunSet) -> tuple[str | None, float | None, bool]:
    """Return the data set, target and division; times with other ones are not compared."""
    return run_set.other_dataset, run_set.target_accuracy, run_set.division == keys.OPEN


def _near(a: float | None, b: float | None, *run_sets: RunSet) -> str:
    """Return a remark if a and b differ by at most the sum of the relative standard deviations of
    the sets' times."""
    share = sum((s.spread_s or 0.0) / (s.time_s or 1.0) for s in run_sets)
    is_near = abs((a or 0.0) - (b or 0.0)) <= share * (a or 0.0)
    return ' (equal within the spread)' if is_near else ''


def _time(run_set: RunSet) -> Cell:
    return Cell(minutes(run_set.time_s), run_set.time_s, time_refs(run_set))


def _epochs(run_set: RunSet) -> Cell:
    return number_cell(
        run_set.scored_epochs_mean,
        ',.1f',
        tuple(x for r in run_set.scored for x in evaluation_refs(r)),
    )


def _units(run_set: RunSet, per: int) -> str:
    """Return the number of accelerators or ranks, divided by per."""
    count = (run_set.num_units or 0) / per
    return f'{count:,g} {_unit(run_set)}{"" if count == 1 else "s"}'


def _unit(run_set: RunSet) -> str:
    return 'accelerator' if run_set.num_accelerators else 'rank'


def _efficiency(c: Comparison) -> Cell:
    return percent_cell(c.efficiency, '.1f', time_refs(c.run_set, c.baseline))


def _scaling(studies: Sequence[Study], names: _Names) -> list[tuple]:
    """Return a sentence on the series with the largest ratio of nodes, and one that compares
    several series.

    They are compared between the two numbers of nodes with the largest product of the number of
    series and the number of doublings, unless --baseline compares them with another series.
    """
    # by nodes of the baseline and of the other set, goal and division
    pairs: dict[tuple, list[Comparison]] = {}
    for of, x in ((study.comparison_of, x) for study in studies for x in study.series):
        found = {
            (c.baseline.num_nodes or 1, c.run_set.num_nodes or 1, *_goal(s)): c
            for s in reversed(x.run_sets)
            if (c := of.get(s)) and c.efficiency
        }
        for pair, c in found.items():
            if pair[0] < pair[1]:
                pairs.setdefault(pair, []).append(c)
    if not pairs:
        return []
    widest = max(max(pairs.items(), key=lambda p: p[0][1] / p[0][0])[1], key=lambda c: c.speedup)
    sentences = [_widest(widest, names)]
    members = {s: x.run_sets for study in studies for x in study.series for s in x.run_sets}
    own = {
        pair: [c for c in compared if c.baseline in members[c.run_set]]
        for pair, compared in pairs.items()
    }
    (base, nodes, *_), compared = max(
        own.items(), key=lambda p: (len(p[1]) > 1, len(p[1]) * log2(p[0][1] / p[0][0]))
    )
    if len(compared) > 1:
        ordered = sorted(compared, key=lambda c: -(c.efficiency or 0.0))
        sentences.append(_compared_series(ordered, f'From {base:,} to {nodes:,} nodes', names))
    return sentences


def _widest(c: Comparison, names: _Names) -> tuple:
    """Return the sentence on the series with the largest ratio of nodes."""
    return (
        f'On {c.run_set.num_nodes:,} nodes, ',
        names[c.run_set],
        ' takes ',
        _time(c.run_set),
        f' minutes{_mark(c.run_set)}, ',
        _speedup(c),
        ' times as fast as ',
        names[c.baseline],
        f' on {plural(c.baseline.num_nodes or 0, "node")}{_mark(c.baseline)}: efficiency ',
        _efficiency(c),
        *_factors(c),
        '.',
    )


def _compared_series(compared: Sequence[Comparison], scope: str, names: _Names) -> tuple:
    """Return the sentence on several series, the most efficient first."""
    best, *others = compared
    items = []
    for c in others:
        four = (best.run_set, best.baseline, c.run_set, c.baseline)
        near = _near(best.efficiency, c.efficiency, *four)
        items.append(
            ('that of ', names[c.run_set], ' ', _speedup(c), ' times (', _efficiency(c), ')', near)
        )
    return (
        f'{scope}, the series of ',
        names[best.run_set],
        ' becomes ',
        _speedup(best),
        ' times as fast (efficiency ',
        _efficiency(best),
        '), ',
        *_listed(items),
        '.',
    )


def _mark(run_set: RunSet) -> str:
    """Return the marks of a time in parentheses."""
    marks = marks_of(run_set)
    return f' ({", ".join(marks)})' if marks else ''


def _speedup(c: Comparison) -> Cell:
    return number_cell(c.speedup, ',.2f', time_refs(c.run_set, c.baseline))


def _factors(c: Comparison) -> Iterator[Cell | str]:
    """Yield the factors of an efficiency, the largest loss first."""
    if c.rest is None:  # the others may be unknown too
        return
    epochs: tuple = ()
    if c.epoch_ratio != 1:
        scope = ' in the scored runs)' if has_other_epochs(c.run_set, c.baseline) else ')'
        epochs = (' (', _epochs(c.run_set), ' instead of ', _epochs(c.baseline), scope)
    factors = (
        (c.hardware_efficiency, f'images/s per {_unit(c.run_set)}', ()),
        (c.epoch_ratio, 'epochs', epochs),
        (c.rest, 'rest', ()),
    )
    refs = training_refs(c.run_set, c.baseline)
    for k, (value, name, more) in enumerate(sorted(factors, key=lambda f: f[0] or 0.0)):
        yield from (' x ' if k else ' = ', f'{name} ', percent_cell(value, '.1f', refs), *more)


def _listed(items: Sequence[tuple]) -> Iterator[Cell | str]:
    """Yield the first items of a list, joined with commas or 'and', and the number of the
    others."""
    for k, item in enumerate(items[:_MAX_NAMES]):
        if k:
            yield ' and ' if k == len(items) - 1 else ', '
        yield from item
    if len(items) > _MAX_NAMES:
        yield f' and {len(items) - _MAX_NAMES} more'


def _fastest(timed: Sequence[RunSet], names: _Names, goal: str) -> list[tuple]:
    if not timed:
        return []
    first, *others = timed
    basis = 'MLPerf score' if first.score_minutes is not None else mean_text(first)
    if first.judgement.is_unchecked:
        basis += ', rules not checked'
    before = [
        (names[s], ' ', _time(s), _mark(s), _near(first.time_s, s.time_s, first, s)) for s in others
    ]
    return [
        (
            names[first],
            f' is the fastest of {len(timed):,} systems{goal}: ' if others else ' takes ',
            _time(first),
            f' minutes ({basis}) and ',
            _epochs(first),
            ' epochs',
            ' of the three scored runs' if has_other_epochs(first) else '',
            ', before ' if others else '',
            *_listed(before),
            '.',
        )
    ]


def _prices(
    studies: Sequence[Study], timed: Sequence[RunSet], names: _Names, goal: str
) -> Iterator[tuple]:
    """Yield the costs of the cheapest and the fastest system, if there is a price."""
    costs = {
        s: cost
        for study in studies
        for s in study.run_sets
        if s in timed and (cost := study.cost(s)) is not None
    }
    if not costs:
        return
    cheapest = min(costs, key=lambda s: costs[s])
    fastest = min(timed, key=lambda s: s.time_s or 0.0)
    end: tuple = (', which is also the fastest',)
    if fastest not in costs:
        end = ('; the cost on ', names[fastest], ', the fastest, is unknown')
    elif cheapest is not fastest:
        end = ('; the fastest is ', *_price(fastest, costs[fastest], names))
    yield (
        f'At {studies[0].price_per_node_hour:,g} per node-hour, a run{goal} costs least on ',
        *_price(cheapest, costs[cheapest], names),
        *end,
        '.',
    )


def _price(run_set: RunSet, cost: float, names: _Names) -> tuple:
    """Return a system with its cost, size and time."""
    nodes = run_set.num_nodes or 1
    return (
        names[run_set],
        ', ',
        Cell(money(cost), cost, time_refs(run_set)),
        f' ({plural(nodes, "node")} of {_units(run_set, nodes)}, ',
        _time(run_set),
        f' minutes{_mark(run_set)})',
    )


def _resumed(names: _Names) -> Iterator[tuple]:
    """Yield which systems have resumed runs, and what became of the time of a single one."""
    resumed = [(s, f' ({len(s.resumed):,} of {plural(len(s.counted), "run")})') for s in names]
    found = [(names[s], text) for s, text in resumed if s.resumed]
    runs = [r for s in names for r in s.resumed]
    if found:
        only = [f'; {r.elapsed.text}' for r in runs if r.elapsed and len(runs) == 1]
        yield (
            'Resumed: ',
            *_listed(found),
            *only,
            '. A system with a resumed run has no MLPerf score.',
        )


def _counts(names: _Names, platform: str) -> tuple:
    """Return how many runs converged, and on which platform all of them ran, if it is one."""
    states = [r.status for s in names for r in s.counted]
    num_running = states.count('running')
    running = f'; {num_running} still running' if num_running else ''
    place = f', all on {platform}' if platform else ''
    return (
        f'{states.count("converged"):,} of {plural(len(states), "run")} of '
        f'{plural(len(names), "system")} converged{running}{place}.',
    )


def _refused(names: _Names) -> Iterator[tuple]:
    """Yield which systems are refused, by which rules and why; several systems have shortened
    reasons."""
    refused = [s for s in names if s.reasons]
    if not refused:
        return
    rounds = {ROUND_OF[s.judgement.ruleset]: None for s in refused if s.judgement.ruleset}
    by = f' by the rules of {", ".join(rounds)}' if rounds else ''
    reasons = ['; '.join(s.reasons) for s in refused]
    if len(refused) > 1:
        reasons = [short(reason, _MAX_REASON) for reason in reasons]
    yield (
        f'Refused{by}: {len(refused):,} of {plural(len(names), "system")}: ',
        *_listed([(names[s], f' ({reason})') for s, reason in zip(refused, reasons)]),
        '.',
    )
