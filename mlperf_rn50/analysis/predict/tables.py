"""Render predictions as tables, with the sources of all numbers, and as JSON."""
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import mlperf_rn50
from mlperf_rn50.analysis.predict.answer import Answer
from mlperf_rn50.analysis.predict.model import HOP_S, STAGES_S, latency_s
from mlperf_rn50.analysis.predict.prediction import Link, Prediction, relative_error
from mlperf_rn50.analysis.predict.validation import KNOWLEDGE_TEXTS, validate_published
from mlperf_rn50.analysis.recipe.reference import describe
from mlperf_rn50.analysis.report.text import MARKDOWN, render_section, terminal_style
from mlperf_rn50.table import Cell, Table, figures_cell, number_cell, percent_cell
from mlperf_rn50.text import data_name, money, percent, plural


def _group(pairs: Iterable[tuple[str, Prediction]], before: str = '', after: str = '') -> list[str]:
    """Return a line for each distinct text; it starts with the names of the layouts that have the text."""
    named: dict[str, list[str]] = {}
    for text, row in pairs:
        named.setdefault(text, []).append(row.layout.name)
    return [f'{before}{", ".join(names)}{after}: {text}' for text, names in named.items()]


def _ms(seconds: float | None) -> Cell:
    return number_cell(None if seconds is None else 1e3 * seconds, ',.1f')


def _table(title: str, rows: Sequence[Prediction], cells_of: Callable[[Prediction], dict[str, Cell]],
           note: str = '') -> Table:
    """Return a table without empty columns; a refused layout has the reason in place of numbers."""
    cells = [None if row.refusal else cells_of(row) for row in rows]
    known = [c for c in cells if c]
    head = tuple(h for h in known[0] if any(c[h].text != '-' for c in known)) if known else ('layout', 'answer')
    return Table(title, head, tuple(
        tuple(c[h] for h in head) if c else
        (Cell(row.layout.name), Cell(f'refused: {row.refusal}', span=len(head) - 1))
        for row, c in zip(rows, cells)), note)


def _basis(answer: Answer, p: Prediction) -> str:
    """Return what the prediction is based on, and whether it is beyond all published sets."""
    costs, layout, link = answer.costs, p.layout, answer.source.link
    if p.knowledge is None:
        return 'one node' if layout.num_nodes == 1 else 'same layout'
    is_bench = p.base.run_set is None or link is not None and link.extra_s is not None
    text = 'own bench' if is_bench else KNOWLEDGE_TEXTS[p.knowledge] if p.base.has_accelerators else 'set on CPUs'
    is_beyond = layout.num_nodes > costs.most_nodes or layout.local_batch_size < costs.least_local
    return f'{text}, extrapolated' if costs.most_nodes and is_beyond else text


def _answer_cells(answer: Answer, p: Prediction) -> dict[str, Cell]:
    layout, epochs, rate, cost = p.layout, p.layout.epochs, p.images_per_s, answer.cost(p)
    interval = Cell(f'{p.interval[0]:,.2f} to {p.interval[1]:,.2f}', p.interval[0]) if p.interval else Cell('-')
    return {'layout': Cell(layout.name), f'{answer.base.unit}s': number_cell(layout.num_units, ',d'),
            'batch': number_cell(layout.recipe.global_batch_size, ',d'),
            f'epochs, {data_name(answer.base.dataset)}': number_cell(epochs.mean if epochs else None, '.3g'),
            'time, min': number_cell(p.minutes, ',.2f'), '80 % interval': interval,
            'basis': Cell(_basis(answer, p)), 'measured, min': number_cell(p.measured_minutes, ',.2f'),
            'error': percent_cell(relative_error(p.minutes, p.measured_minutes), '+.1f'),
            'images/s': number_cell(rate, ',.0f' if (rate or 0) >= 1000 else ',.1f'),
            'efficiency': percent_cell(p.efficiency), 'node-hours': figures_cell(p.node_hours),
            'cost': Cell('-' if cost is None else money(cost), cost)}


def _step_cells(p: Prediction) -> dict[str, Cell]:
    measured_s = p.measured.step_s if p.measured else None
    return {'layout': Cell(p.layout.name), f'images/{p.base.unit}': number_cell(p.layout.local_batch_size, ',g'),
            'compute': _ms(p.compute_s), 'exchange': _ms(p.exchange_s), 'overlapped': _ms(p.hidden_s),
            'other': _ms(p.other_s), 'step': _ms(p.step_s),
            'measured share': percent_cell(p.measured_share), 'measured': _ms(measured_s),
            'error': percent_cell(relative_error(p.step_s, measured_s), '+.1f')}


def _row_text(answer: Answer, row: Prediction) -> str:
    cost = answer.cost(row)
    return (f'{row.layout.name}, {row.minutes:,.2f} min, {figures_cell(row.node_hours).text} node-hours'
            + (f', cost {money(cost)}' if cost is not None else ''))


def _change_text(row: Prediction, old: Prediction) -> str:
    new, before, unit = (row.minutes, old.minutes, 'min') if row.minutes and old.minutes else (
        1e3 * (row.step_s or 0.0), 1e3 * (old.step_s or 1.0), 'ms per step')
    return f'{row.layout.name}, {new:,.2f} instead of {before:,.2f} {unit} ({percent(new / before - 1, "+.1f")})'


def verdicts(answer: Answer) -> list[str]:
    """Return lines on the changes of what_if, and on the fastest, the cheapest and the knee layout."""
    what_if = answer.request.what_if
    changes = [f'What if {what_if.text}: {_change_text(row, old)}' for row, old in zip(answer.rows, answer.unchanged)
               if what_if and row.step_s and old.step_s]
    if len(answer.timed) < 2:
        return changes
    which = ' predicted layout' if len(answer.timed) < len(answer.rows) else ''  # one without a time may be faster
    fastest, cheapest, knee = (_row_text(answer, answer.best[name]) for name in ('fastest', 'cheapest', 'knee'))
    if fastest == cheapest:
        return [*changes, f'Fastest and cheapest{which}: {fastest}']
    return [*changes, f'Fastest{which}: {fastest}', f'Cheapest{which}: {cheapest}', (
        f'Knee: {knee}; beyond it, 1 % less time needs more than 1 % more node-hours' if knee != fastest else
        f'Knee: not reached up to {fastest.partition(",")[0]}; 1 % less time needs less than 1 % more node-hours')]


def _link_line(link: Link | None) -> str:
    if link is None:
        return 'Interconnect: unknown'
    rate = 'unknown rate' if link.gbit_s is None else f'{link.gbit_s:,.4g} Gbit/s per node'
    ways = [*(['TCP'] if link.is_tcp else []), 'hierarchical all-reduce' if link.is_hierarchical else 'ring all-reduce']
    overlap = '' if link.extra_s is None else f', {100 * link.overlap:.0f} % of it overlapped'
    return (f'Interconnect: {rate}, {" with ".join(ways)} of {link.exchange_bytes / 1e6:.1f} MB{overlap}; source: '
            f'{link.source}')


def _costs_line(answer: Answer) -> str:
    costs, link = answer.costs, answer.source.link
    if link and link.extra_s is not None:
        return f'Latency on several nodes: {1e3 * link.extra_s:.1f} ms per step, measured by bench allreduce'
    if not costs.latency_s:
        return 'Latency on several nodes: none assumed'
    tcp = f', and {1e3 * HOP_S:g} ms per member of the ring over TCP' if link and link.is_tcp else ''
    stages = f', and {1e3 * STAGES_S:g} ms for reductions within a node' if link and link.is_hierarchical else ''
    return (f'Latency on several nodes: {1e3 * latency_s(answer.base, costs):.1f} ms per step, fitted to '
            f'{costs.source}{tcp}{stages}')


def _error_line(answer: Answer) -> str:
    if not answer.base.has_accelerators:
        return 'Model error: unknown, because all published systems with several nodes have accelerators'
    own = validate_published().errors['own', 'round']
    return (f'Model error on {plural(len(own.absolute), "published set")} from their own one-node set, without the '
            f'costs of the same round: {percent(own.median, ".1f")} (median), {percent(own.high, ".1f")} (90th '
            f'percentile); {own.num_held} of {len(own.absolute)} measured times are within the 80 % interval')


def _constants(answer: Answer) -> list[str]:
    """Return lines on the values behind the predictions, their sources and the error of the model."""
    base, rows, data = answer.base, answer.predicted, data_name(answer.base.dataset)
    return [f'Source: {base.name} ({base.source}), {plural(base.num_nodes, "node")}, '
            f'{plural(base.num_units, base.unit)}, batch {base.global_batch_size:,}, {1e3 * base.step_s:.1f} ms per '
            f'step on {data}',
            *_group(((f'{describe(r.layout.recipe)}; source: {r.recipe_source}', r) for r in rows if r.recipe_source),
                    'Recipe of '),
            *_group(((r.layout.epochs.source, r) for r in rows if r.layout.epochs), 'Epochs of ', f' on {data}'),
            _link_line(answer.source.link), _costs_line(answer), _error_line(answer)]


def heading(answer: Answer) -> str:
    """Return the source, target and data of a prediction."""
    targets = {r.layout.recipe.target_accuracy for r in answer.predicted}
    target = targets.pop() if len(targets) == 1 else None
    goal = '' if target is None else f': Top-1 {100 * target:.2f} % on {data_name(answer.base.dataset)}'
    return f'Prediction from {answer.base.name}{goal}'


def _notes(answer: Answer) -> list[str]:
    """Return the warnings about the numbers."""
    return [*answer.source.notes, *_group((doubt, row) for row in answer.rows for doubt in row.doubts)]


def render_tables(answer: Answer, is_markdown: bool = False, title: Callable[[str], str] = str) -> str:
    """Return the prediction as tables, for a terminal or as Markdown; title formats a heading."""
    price, notes = answer.request.price, [f'Efficiency: images/s per {answer.base.unit}, relative to the source.']
    if price is not None and answer.timed:
        notes.append(f'Cost: {price:g} per node-hour.')
    if any(r.minutes and r.measured_minutes for r in answer.rows):
        notes.append('Error: predicted / measured - 1.')
    tables = [_table('Time to train' if answer.timed or not answer.predicted else 'Throughput', answer.rows,
                     partial(_answer_cells, answer), ' '.join(notes) if answer.predicted else ''),
              _table('Parts of a step, ms', answer.predicted, _step_cells,
                     'Step = compute + exchange - overlapped + other.')]
    return render_section(heading(answer), [*verdicts(answer), *_constants(answer)],
                          tables if answer.predicted else tables[:1], _notes(answer),
                          MARKDOWN if is_markdown else terminal_style(title))


def _fields(value: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _row_object(answer: Answer, p: Prediction) -> dict[str, Any]:
    recipe, interval = p.layout.recipe, p.interval or (None, None)
    epochs = {'epochs': 'mean', 'epochs_low': 'low', 'epochs_high': 'high', 'epochs_source': 'source'}
    return {'layout': p.layout.name, **_fields(p.layout, 'num_nodes', 'units_per_node'),
            'global_batch_size': recipe.global_batch_size or None, 'refusal': p.refusal,
            'recipe': None if p.refusal else asdict(recipe), 'recipe_source': p.recipe_source or None,
            **{key: None if p.refusal else getattr(p.layout.epochs, name, None) for key, name in epochs.items()},
            **_fields(p, 'compute_s', 'exchange_s', 'hidden_s', 'other_s', 'step_s', 'images_per_s', 'efficiency',
                      'minutes', 'node_hours', 'knowledge', 'measured_share', 'measured_minutes', 'doubts'),
            'measured_step_s': p.measured and p.measured.step_s,
            'low_minutes': interval[0], 'high_minutes': interval[1], 'cost': answer.cost(p)}


def render_json(answer: Answer) -> str:
    """Return the prediction as JSON; docs/predict.md explains its keys."""
    base, link, what_if = answer.base, answer.source.link, answer.request.what_if
    own = validate_published().errors['own', 'round'] if base.has_accelerators else None
    return json.dumps({
        'format': 'mlperf-rn50 predict 1', 'version': mlperf_rn50.__version__,
        'source': {**_fields(base, 'name', 'source', 'num_nodes', 'num_units', 'unit', 'global_batch_size', 'step_s',
                             'dataset'), 'is_imagenet': base.dataset is None},
        'link': link and asdict(link), 'costs': asdict(answer.costs),
        'validation': own and {'num_predicted': len(own.absolute), 'num_held': own.num_held,
                               'median_error': own.median, 'high_error': own.high},
        'what_if': what_if and what_if.text, 'price_per_node_hour': answer.request.price,
        'predictions': [_row_object(answer, r) for r in answer.rows],
        **{name: answer.best[name].layout.name if answer.timed else None for name in ('fastest', 'cheapest', 'knee')},
        'notes': _notes(answer)}, indent=1, allow_nan=False)
