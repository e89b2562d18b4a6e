"""First paragraph of the report: the best series, where efficiency is lost, what it costs, what is
refused. Pure."""

from collections.abc import Iterator, Sequence
from math import log2

from mlperf_rn50.analysis.report.refs import (
    evaluation_refs,
    has_other_epochs,
    labels_of,
    time_refs,
    training_refs,
)
from mlperf_rn50.analysis.sets.run_set import RunSet
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
    kinds = grouped(
        (s for s in names if s.time_s and not s.is_duplicate),
        lambda s: (s.other_dataset, s.target_accuracy, s.division == keys.OPEN),
    )
    (*_, is_open), timed = max(
        kinds.items(),
        key=lambda kind: (len(kind[1]), not kind[0][2]),
        default=((None, None, False), []),
    )
    timed.sort(key=lambda s: s.time_s or 0.0)
    goal = (
        f' to {percent(timed[0].target_accuracy or 0.0)} on {data_name(timed[0].other_dataset)}'
        if len({kind[:2] for kind in kinds}) > 1
        else ''
    )
    goal += f' in the {"open" if is_open else "closed"} division' * (
        len({kind[2] for kind in kinds}) > 1
    )
    scaling = _scaling(studies, names)
    texts = [
        *scaling,
        *_fastest(timed, names, goal),
        *_prices(studies, timed, names, goal),
        _counts(names),
    ]
    texts[1 if timed else 0 : 0] = [*_refused(names), *_resumed(names)]
    return [[c if isinstance(c, Cell) else Cell(c) for c in text if c] for text in texts]


def _near(a: float | None, b: float | None, *run_sets: RunSet) -> str:
    """Return a remark if a and b differ by at most the sum of the relative standard deviations of
    the sets' times."""
    share = sum((s.spread_s or 0.0) / (s.time_s or 1.0) for s in run_sets)
    return (
        ' (equal within the spread)' if abs((a or 0.0) - (b or 0.0)) <= share * (a or 0.0) else ''
    )


def _time(run_set: RunSet) -> Cell:
    return Cell(minutes(run_set.time_s), run_set.time_s, time_refs(run_set))


def _epochs(run_set: RunSet) -> Cell:
    return number_cell(
        run_set.scored_epochs_mean,
        ',.1f',
        tuple(x for r in run_set.scored for x in evaluation_refs(r)),
    )


def _units(run_set: RunSet, per: int = 1) -> str:
    """Return the number of accelerators or ranks, divided by per."""
    count = (run_set.num_units or 0) / per
    return f'{count:,g} {"accelerator" if run_set.num_accelerators else "rank"}' + 's' * (
        count != 1
    )


def _efficiency(c: Comparison) -> Cell:
    return percent_cell(c.efficiency, '.1f', time_refs(c.run_set, c.baseline))


def _scaling(studies: Sequence[Study], names: _Names) -> list[tuple]:
    """Return a sentence on the series with the largest ratio of nodes, and one that compares
    several series.

    They are compared between the two numbers of nodes with the largest product of the number of
    series and the number of doublings.
    """
    # by nodes of the baseline and of the other set, division
    pairs: dict[tuple, list[Comparison]] = {}
    for of, x in ((study.comparison_of, x) for study in studies for x in study.series):
        found = {
            (c.baseline.num_nodes or 1, c.run_set.num_nodes or 1, s.division == keys.OPEN): c
            for s in reversed(x.run_sets)
            if (c := of.get(s)) and c.efficiency
        }
        for pair, c in found.items():
            if pair[0] < pair[1]:
                pairs.setdefault(pair, []).append(c)
    if not pairs:
        return []
    widest = max(max(pairs.items(), key=lambda p: p[0][1] / p[0][0])[1], key=lambda c: c.speedup)
    (base, nodes, _), compared = max(
        pairs.items(), key=lambda p: (len(p[1]) > 1, len(p[1]) * log2(p[0][1] / p[0][0]))
    )
    best, *others = sorted(compared, key=lambda c: -(c.efficiency or 0.0))
    return [
        (
            f'On {widest.run_set.num_nodes:,} nodes, ',
            names[widest.run_set],
            ' takes ',
            _time(widest.run_set),
            f' minutes{_mark(widest.run_set)}, ',
            _speedup(widest),
            ' times as fast as ',
            names[widest.baseline],
            f' on {plural(widest.baseline.num_nodes or 0, "node")}{_mark(widest.baseline)}: '
            'efficiency ',
            _efficiency(widest),
            *_factors(widest),
            '.',
        ),
        *[
            (
                f'From {base:,} to {nodes:,} nodes, the series of ',
                names[best.run_set],
                ' becomes ',
                _speedup(best),
                ' times as fast (efficiency ',
                _efficiency(best),
                '), ',
                *_listed(
                    [
                        (
                            'that of ',
                            names[c.run_set],
                            ' ',
                            _speedup(c),
                            ' times (',
                            _efficiency(c),
                            ')',
                            _near(
                                best.efficiency,
                                c.efficiency,
                                best.run_set,
                                best.baseline,
                                c.run_set,
                                c.baseline,
                            ),
                        )
                        for c in others
                    ]
                ),
                '.',
            )
        ]
        * bool(others),
    ]


def _mark(run_set: RunSet) -> str:
    """Return the mark of times and ratios of resumed runs."""
    return ' (resumed)' * run_set.is_resumed


def _speedup(c: Comparison) -> Cell:
    return number_cell(c.speedup, ',.2f', time_refs(c.run_set, c.baseline))


def _factors(c: Comparison) -> Iterator[Cell | str]:
    """Yield the factors of an efficiency, the largest loss first."""
    unit, refs = (
        'accelerator' if c.run_set.num_accelerators else 'rank',
        training_refs(c.run_set, c.baseline),
    )
    scope = ' in the scored runs' * has_other_epochs(c.run_set, c.baseline)
    epochs = (
        (' (', _epochs(c.run_set), ' instead of ', _epochs(c.baseline), scope, ')')
        if c.epoch_ratio != 1
        else ()
    )
    factors = (
        (c.hardware_efficiency, f'images/s per {unit}', ()),
        (c.epoch_ratio, 'epochs', epochs),
        (c.rest, 'rest', ()),
    )
    if c.rest is not None:  # it is known if the others are
        for k, (value, name, more) in enumerate(sorted(factors, key=lambda f: f[0] or 0.0)):
            yield from (' x ' if k else ' = ', f'{name} ', percent_cell(value, '.1f', refs), *more)


def _listed(items: Sequence[tuple]) -> Iterator[Cell | str]:
    """Yield the first items of a list, joined with commas or 'and', and the number of the
    others."""
    shown = items[:_MAX_NAMES]
    for k, item in enumerate(shown):
        yield from ((' and ' if k == len(items) - 1 else ', ') * bool(k), *item)
    yield f' and {len(items) - len(shown)} more' * (len(items) > len(shown))


def _fastest(timed: Sequence[RunSet], names: _Names, goal: str) -> list[tuple]:
    if not timed:
        return []
    first, *others = timed
    basis = f'MLPerf score{", rules not checked" * first.judgement.is_unchecked}'
    if first.score_minutes is None:
        basis = (
            'mean of '
            f'{len(first.scored)}{", refused" * bool(first.reasons)}'
            f'{", resumed" * first.is_resumed}'
        )
    before = [
        (names[s], ' ', _time(s), _mark(s), _near(first.time_s, s.time_s, first, s)) for s in others
    ]
    scope = ' of the three scored runs' * has_other_epochs(first)
    return [
        (
            names[first],
            f' is the fastest of {len(timed):,} systems{goal}: ' if others else ' takes ',
            _time(first),
            f' minutes ({basis}) and ',
            _epochs(first),
            ' epochs',
            scope,
            ', before ' * bool(others),
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
    if costs:
        cheapest, fastest = (
            min(costs, key=lambda s: costs[s]),
            min(costs, key=lambda s: s.time_s or 0.0),
        )
        low, fast = (
            (
                names[s],
                ', ',
                Cell(money(costs[s]), costs[s], time_refs(s)),
                f' ({plural(s.num_nodes or 0, "node")} of {_units(s, s.num_nodes or 1)}, ',
                _time(s),
                f' minutes{_mark(s)})',
            )
            for s in (cheapest, fastest)
        )
        end = (
            ('; the fastest is ', *fast)
            if cheapest is not fastest
            else (', which is also the fastest',)
        )
        yield (
            f'At {studies[0].price_per_node_hour:,g} per node-hour, a run{goal} costs least on ',
            *low,
            *end,
            '.',
        )


def _resumed(names: _Names) -> Iterator[tuple]:
    """Yield which systems have resumed runs, and what became of the time of a single one."""
    found = [
        (names[s], f' ({len(s.resumed):,} of {plural(len(s.counted), "run")})')
        for s in names
        if s.resumed
    ]
    parts = [r.elapsed.text for s in names for r in s.resumed if r.elapsed]
    if found:
        only = [f'; {text}' for text in parts if sum(len(s.resumed) for s in names) == 1]
        yield (
            'Resumed: ',
            *_listed(found),
            *only,
            '. A system with a resumed run has no MLPerf score.',
        )


def _counts(names: _Names) -> tuple:
    """Return how many runs converged."""
    states = [r.status for s in names for r in s.runs]
    running = f'; {states.count("running")} still running'
    return (
        f'{states.count("converged"):,} of {plural(len(states), "run")} of '
        f'{plural(len(names), "system")} converged'
        f'{running * ("running" in states)}.',
    )


def _refused(names: _Names) -> Iterator[tuple]:
    """Yield which systems are refused, by which rules and why; several systems have shortened
    reasons."""
    refused = [s for s in names if s.reasons]
    rounds = {ROUND_OF[s.judgement.ruleset]: None for s in refused if s.judgement.ruleset}
    by = f' by the rules of {", ".join(rounds)}' if rounds else ''
    reasons = {s: '; '.join(s.reasons) for s in refused}
    if refused:
        yield (
            f'Refused{by}: {len(refused):,} of {plural(len(names), "system")}: ',
            *_listed(
                [
                    (
                        names[s],
                        f' ({reasons[s] if len(refused) == 1 else short(reasons[s], _MAX_REASON)})',
                    )
                    for s in refused
                ]
            ),
            '.',
        )
