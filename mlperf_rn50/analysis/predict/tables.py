"""Render predictions as tables, with the sources of all numbers, and as JSON."""
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import mlperf_rn50
from mlperf_rn50.analysis.predict.answer import Answer
from mlperf_rn50.analysis.predict.prediction import Link, Prediction
from mlperf_rn50.analysis.predict.source import Power
from mlperf_rn50.analysis.predict.validation import KNOWLEDGE_TEXTS, errors_text
from mlperf_rn50.analysis.report.text import MARKDOWN, render_section, terminal_style
from mlperf_rn50.analysis.sets.recipe import Recipe
from mlperf_rn50.table import Cell, Table, figures_cell, number_cell, percent_cell
from mlperf_rn50.text import data_name, money, plural

FORMAT = 'mlperf-rn50 predict 1'


def _group(pairs: Iterable[tuple[str, Prediction]]) -> dict[str, str]:
    """Return the distinct texts, each with the names of the layouts that have it, joined by commas."""
    named: dict[str, list[str]] = {}
    for text, row in pairs:
        named.setdefault(text, []).append(row.layout.name)
    return {text: ', '.join(names) for text, names in named.items()}


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
    costs, layout = answer.costs, p.layout
    is_beyond = p.knowledge and costs.most_nodes and (
        layout.num_nodes > costs.most_nodes or layout.local_batch_size < costs.least_local)
    if p.knowledge is None:
        return 'one node'
    is_bench = answer.source.link is not None and answer.source.link.extra_s is not None
    text = 'own bench' if is_bench else KNOWLEDGE_TEXTS[p.knowledge] if p.base.has_accelerators else 'set on CPUs'
    return text + (', extrapolated' if is_beyond else '')


def _answer_cells(answer: Answer, p: Prediction) -> dict[str, Cell]:
    layout, rate, cost = p.layout, p.images_per_s, answer.cost(p)
    interval = Cell('-') if p.minutes is None else Cell(f'{p.low_minutes:.2f} to {p.high_minutes:.2f}', p.low_minutes)
    return {'layout': Cell(layout.name), f'{answer.base.unit}s': number_cell(layout.num_units, ',d'),
            'batch': number_cell(layout.recipe.global_batch_size, ',d'),
            f'epochs, {data_name(answer.base.dataset)}': number_cell(p.epochs.mean if p.epochs else None, '.3g'),
            'time, min': number_cell(p.minutes, ',.2f'), '80 % interval': interval,
            'basis': Cell(_basis(answer, p)), 'measured, min': number_cell(p.measured_minutes, ',.2f'),
            'error': percent_cell(p.error, '+.1f'),
            'images/s': number_cell(rate, ',.0f' if (rate or 0) >= 1000 else ',.1f'),
            'efficiency': percent_cell(p.efficiency), 'node-hours': figures_cell(p.node_hours),
            'cost': Cell('-' if cost is None else money(cost), cost),
            'kWh': figures_cell(answer.kwh(p))}


def answer_table(answer: Answer) -> Table:
    """Return the table of time, throughput and cost."""
    notes = [f'Efficiency: images/s per {answer.base.unit}, relative to the source.']
    if answer.price is not None and answer.timed:
        notes.append(f'Cost: {answer.price:g} per node-hour.')
    if any(r.error is not None for r in answer.rows):
        notes.append('Error: predicted / measured - 1.')
    return _table('Time to train' if answer.timed or not answer.predicted else 'Throughput', answer.rows,
                  partial(_answer_cells, answer), ' '.join(notes) if answer.predicted else '')


def _step_cells(p: Prediction) -> dict[str, Cell]:
    return {'layout': Cell(p.layout.name), f'images/{p.base.unit}': number_cell(p.layout.local_batch_size, ',g'),
            'compute': _ms(p.compute_s), 'exchange': _ms(p.exchange_s), 'overlapped': _ms(p.hidden_s),
            'other': _ms(p.other_s), 'step': _ms(p.step_s),
            'measured share': percent_cell(p.measured_share), 'measured': _ms(p.measured_step_s),
            'error': percent_cell(p.step_error, '+.1f')}


def _schedule(recipe: Recipe) -> str:
    if recipe.step_epochs and recipe.decay == 'step':
        return 'step at ' + ', '.join(f'{e:g}' for e in recipe.step_epochs)
    return '-' if recipe.decay_epochs is None else f'{recipe.decay or "-"}, {recipe.decay_epochs:g} epochs'


def _recipe_cells(row: Prediction) -> dict[str, Cell]:
    recipe = row.layout.recipe
    return {'layout': Cell(row.layout.name), 'batch': number_cell(recipe.global_batch_size, ',d'),
            'optimizer': Cell(recipe.opt_name or '-'), 'learning rate': number_cell(recipe.base_lr, '.6g'),
            'warm-up': number_cell(recipe.warmup_epochs, 'g'), 'schedule': Cell(_schedule(recipe)),
            'recipe source': Cell(row.recipe_source or '-')}


def _row_text(answer: Answer, row: Prediction) -> str:
    cost = answer.cost(row)
    return (f'{row.layout.name}, {row.minutes:.2f} min, {figures_cell(row.node_hours).text} node-hours'
            + (f', cost {money(cost)}' if cost is not None else ''))


def verdicts(answer: Answer) -> list[str]:
    """Return lines on the fastest, the cheapest and the knee layout."""
    fastest, cheapest, knee = answer.fastest, answer.cheapest, answer.knee
    changes = [f'What if {answer.what_if.text}: {_change_text(row, old)}' for row, old in
               zip(answer.rows, answer.unchanged) if answer.what_if and row.step_s and old.step_s]
    return changes + _best_lines(answer, fastest, cheapest, knee)


def _change_text(row: Prediction, old: Prediction) -> str:
    new, before, unit = (row.minutes, old.minutes, 'min') if row.minutes and old.minutes else (
        1e3 * (row.step_s or 0.0), 1e3 * (old.step_s or 1.0), 'ms per step')
    return f'{row.layout.name}, {new:.2f} instead of {before:.2f} {unit} ({100 * (new / before - 1):+.1f} %)'


def _best_lines(answer: Answer, fastest: Prediction | None, cheapest: Prediction | None,
                knee: Prediction | None) -> list[str]:
    if not fastest or not cheapest or not knee or len(answer.timed) < 2:
        return []
    which = ' predicted layout' if len(answer.timed) < len(answer.rows) else ''  # another one may be faster
    if fastest is cheapest:
        return [f'Fastest and cheapest{which}: {_row_text(answer, fastest)}']
    knee_text = (f'{_row_text(answer, knee)}; beyond it, 1 % less time needs more than 1 % more node-hours'
                 if knee is not fastest else
                 f'not reached up to {fastest.layout.name}; 1 % less time needs less than 1 % more node-hours')
    return [f'Fastest{which}: {_row_text(answer, fastest)}', f'Cheapest{which}: {_row_text(answer, cheapest)}',
            f'Knee: {knee_text}']


def _link_line(link: Link | None) -> str:
    if link is None:
        return 'Interconnect: unknown'
    rate = 'unknown rate' if link.gbit_s is None else f'{link.gbit_s:.4g} Gbit/s per node'
    ways = [*(['TCP'] if link.is_tcp else []), 'hierarchical all-reduce' if link.is_hierarchical else 'ring all-reduce']
    overlap = f'{100 * link.overlap:.0f} % can overlap with the backward pass' if link.overlap else 'no overlap'
    return (f'Interconnect: {rate}, {" with ".join(ways)} of {link.exchange_bytes / 1e6:.1f} MB, {overlap}; source: '
            f'{link.source}')


def _costs_line(answer: Answer) -> str:
    costs, link = answer.costs, answer.source.link
    if link and link.extra_s is not None:
        return f'Latency on several nodes: {1e3 * link.extra_s:.1f} ms per step, measured by bench allreduce'
    if not costs.latency_s:
        return 'Latency on several nodes: none assumed'
    latency_s = costs.latency_s.get(answer.base.generation, costs.other_latency_s)
    return f'Latency on several nodes: {1e3 * latency_s:.1f} ms per step, fitted to {costs.source}'


def _power_line(power: Power) -> str:
    processors = ' and '.join(f'{kind.upper()}s' for kind in power.kinds)
    return (f'Energy: {power.watts:,.0f} W per node, the mean power of its {processors} in the source runs, assumed '
            'for all layouts')


def constants(answer: Answer) -> list[str]:
    """Return lines on the values behind the predictions, their sources and the error of the model."""
    base, power, data = answer.base, answer.source.power, data_name(answer.base.dataset)
    epochs = _group((r.epochs.source, r) for r in answer.rows if r.epochs)
    error = ': unknown, because all published systems with several nodes have accelerators'
    if answer.validation and (own := answer.validation.own):
        error = (f' on {plural(len(own.errors), "published set")} from their own one-node set, without the costs of '
                 f'the same round: {errors_text(own)}')
    return [f'Source: {base.name} ({base.source}), {plural(base.num_nodes, "node")}, '
            f'{plural(base.num_units, base.unit)}, batch {base.global_batch_size:,}, {1e3 * base.step_s:.1f} ms per '
            f'step on {data}', *(f'Epochs of {names} on {data}: {text}' for text, names in epochs.items()),
            _link_line(answer.source.link), _costs_line(answer),
            *([_power_line(power)] if power else []), f'Model error{error}']


def heading(answer: Answer) -> str:
    """Return the source, target and data of a prediction."""
    targets = {r.layout.recipe.target_accuracy for r in answer.predicted}
    target = targets.pop() if len(targets) == 1 else None
    goal = '' if target is None else f': Top-1 {100 * target:.2f} % on {data_name(answer.base.dataset)}'
    return f'Prediction from {answer.base.name}{goal}'


def notes_of(answer: Answer) -> list[str]:
    """Return the warnings about the numbers."""
    doubts = _group((doubt, row) for row in answer.rows for doubt in row.doubts)
    return [*answer.source.notes, *(f'{names}: {text}' for text, names in doubts.items())]


def render_tables(answer: Answer, is_markdown: bool = False, title: Callable[[str], str] = str) -> str:
    """Return the prediction as tables, for a terminal or as Markdown; title formats a heading."""
    tables = [answer_table(answer)]
    if answer.predicted:
        tables.append(_table('Parts of a step, ms', answer.predicted, _step_cells,
                             'Step = compute + exchange - overlapped + other.'))
    if known := [r for r in answer.predicted if r.recipe_source]:
        tables.append(_table('Recipes', known, _recipe_cells))
    return render_section(heading(answer), [*verdicts(answer), *constants(answer)], tables, notes_of(answer),
                          MARKDOWN if is_markdown else terminal_style(title))


def _fields(value: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _row_object(answer: Answer, p: Prediction) -> dict[str, Any]:
    recipe = p.layout.recipe
    epochs = {'epochs': 'mean', 'epochs_low': 'low', 'epochs_high': 'high', 'epochs_source': 'source'}
    return {'layout': p.layout.name, **_fields(p.layout, 'num_nodes', 'units_per_node'),
            'global_batch_size': recipe.global_batch_size or None, 'refusal': p.refusal,
            'recipe': None if p.refusal else asdict(recipe), 'recipe_source': p.recipe_source or None,
            **{key: getattr(p.epochs, name, None) for key, name in epochs.items()},
            **_fields(p, 'compute_s', 'exchange_s', 'hidden_s', 'other_s', 'step_s', 'images_per_s', 'efficiency',
                      'minutes', 'low_minutes', 'high_minutes', 'node_hours', 'knowledge', 'measured_share'),
            'cost': answer.cost(p), 'kwh': answer.kwh(p),
            **_fields(p, 'measured_step_s', 'measured_minutes'), 'doubts': list(p.doubts)}


def render_json(answer: Answer) -> str:
    """Return the prediction as JSON; docs/predict.md explains its keys."""
    base, link, power = answer.base, answer.source.link, answer.source.power
    own = answer.validation and answer.validation.own
    best = {'fastest': answer.fastest, 'cheapest': answer.cheapest, 'knee': answer.knee}
    return json.dumps({
        'format': FORMAT, 'version': mlperf_rn50.__version__,
        'source': {**_fields(base, 'name', 'source', 'num_nodes', 'num_units', 'unit', 'global_batch_size', 'step_s',
                             'dataset'), 'is_imagenet': base.dataset is None},
        'link': link and asdict(link),
        'costs': asdict(answer.costs),
        'validation': own and {'num_predicted': len(own.errors), 'num_held': own.num_held, 'median_error': own.median,
                               'high_error': own.high},
        'what_if': answer.what_if and answer.what_if.text,
        'price_per_node_hour': answer.price, 'node_watts': power and power.watts,
        'predictions': [_row_object(answer, r) for r in answer.rows],
        **{name: row and row.layout.name for name, row in best.items()}, 'notes': notes_of(answer)},
        indent=1, allow_nan=False)
