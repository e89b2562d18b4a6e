"""A prediction as tables, with the sources of their numbers, and as JSON."""
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import mlperf_rn50
from mlperf_rn50.analysis.predict.answer import Answer
from mlperf_rn50.analysis.predict.prediction import Link, Prediction
from mlperf_rn50.analysis.predict.validation import costs_text, errors_text
from mlperf_rn50.analysis.report.text import MARKDOWN, render_section, terminal_style
from mlperf_rn50.analysis.sets.run_set import Recipe
from mlperf_rn50.table import Cell, Table, figures_cell, number_cell, percent_cell
from mlperf_rn50.text import data_name, money, plural

FORMAT = 'mlperf-rn50 predict 1'
KNEE = 'the layout from which on one per cent less time costs more than one per cent more node-hours'


def _group(pairs: Iterable[tuple[str, Prediction]]) -> dict[str, str]:
    """Return the names of the layouts by text."""
    named: dict[str, list[str]] = {}
    for text, row in pairs:
        named.setdefault(text, []).append(row.layout.name)
    return {text: ', '.join(names) for text, names in named.items()}


def _ms(seconds: float | None) -> Cell:
    return number_cell(None if seconds is None else 1e3 * seconds, ',.1f')


def _table(title: str, rows: Sequence[Prediction], cells_of: Callable[[Prediction], dict[str, Cell]],
           note: str = '') -> Table:
    """Return a table without the columns that are empty; a refused layout has the reason in place of numbers."""
    cells = [None if row.refusal else cells_of(row) for row in rows]
    known = [c for c in cells if c]
    head = tuple(h for h in known[0] if any(c[h].text != '-' for c in known)) if known else ('layout', 'answer')
    return Table(title, head, tuple(
        tuple(c[h] for h in head) if c else
        (Cell(row.layout.name), Cell(f'refused: {row.refusal}', span=len(head) - 1))
        for row, c in zip(rows, cells)), note)


def _answer_cells(answer: Answer, p: Prediction) -> dict[str, Cell]:
    layout, rate, cost = p.layout, p.images_per_s, answer.cost(p)
    interval = Cell('-') if p.minutes is None else Cell(f'{p.low_minutes:.2f} to {p.high_minutes:.2f}', p.low_minutes)
    return {'layout': Cell(layout.name), f'{answer.base.unit}s': number_cell(layout.num_units, ',d'),
            'batch': number_cell(layout.recipe.global_batch_size, ',d'),
            f'epochs, {data_name(answer.base.dataset)}': number_cell(p.epochs.mean if p.epochs else None, '.3g'),
            'time, min': number_cell(p.minutes, ',.2f'), '80 % interval': interval,
            'measured, min': number_cell(p.measured_minutes, ',.2f'), 'off by': percent_cell(p.error, '+.1f'),
            'images/s': number_cell(rate, ',.0f' if (rate or 0) >= 1000 else ',.1f'),
            'efficiency': percent_cell(p.efficiency), 'node-hours': figures_cell(p.node_hours),
            'cost': Cell('-' if cost is None else money(cost), cost),
            'kWh': figures_cell(answer.kwh(p))}


def answer_table(answer: Answer) -> Table:
    """Return time, throughput and cost of each layout."""
    notes = ['Efficiency: images/s of each against those of the source.']
    if answer.price is not None and answer.timed:
        notes.append(f'Cost: {answer.price:g} for a node-hour.')
    if any(r.error is not None for r in answer.rows):
        notes.append('Off by: predicted over measured.')
    return _table('Time to train' if answer.timed or not answer.predicted else 'Throughput', answer.rows,
                  partial(_answer_cells, answer), ' '.join(notes) if answer.predicted else '')


def _step_cells(p: Prediction) -> dict[str, Cell]:
    return {'layout': Cell(p.layout.name), 'images of each': number_cell(p.layout.local_batch_size, ',g'),
            'compute': _ms(p.compute_s), 'exchange': _ms(p.exchange_s), 'of it hidden': _ms(p.hidden_s),
            'other': _ms(p.other_s), 'step': _ms(p.step_s),
            'measured': _ms(p.measured_step_s), 'off by': percent_cell(p.step_error, '+.1f')}


def _schedule(recipe: Recipe) -> str:
    if recipe.step_epochs and recipe.decay == 'step':
        return 'a tenth at ' + ', '.join(f'{e:g}' for e in recipe.step_epochs)
    return '-' if recipe.decay_epochs is None else f'{recipe.decay or "-"}, {recipe.decay_epochs:g} epochs'


def _recipe_cells(row: Prediction) -> dict[str, Cell]:
    recipe = row.layout.recipe
    return {'layout': Cell(row.layout.name), 'batch': number_cell(recipe.global_batch_size, ',d'),
            'optimizer': Cell(recipe.opt_name or '-'), 'learning rate': number_cell(recipe.base_lr, '.6g'),
            'warm-up': number_cell(recipe.warmup_epochs, 'g'), 'schedule': Cell(_schedule(recipe)),
            'recipe of': Cell(row.recipe_source or '-')}


def _say(answer: Answer, row: Prediction) -> str:
    cost = answer.cost(row)
    return (f'{row.layout.name}, {row.minutes:.2f} min, {figures_cell(row.node_hours).text} node-hours'
            + (f', cost {money(cost)}' if cost is not None else ''))


def verdicts(answer: Answer) -> list[str]:
    """Return the fastest layout, the cheapest, and the knee between them."""
    fastest, cheapest, knee = answer.fastest, answer.cheapest, answer.knee
    if not fastest or not cheapest or not knee or len(answer.timed) < 2:
        return []
    if fastest is cheapest:
        return [f'Fastest and cheapest: {_say(answer, fastest)}']
    knees = (f'Knee: {_say(answer, knee)}: {KNEE}' if knee is not fastest else
             f'Knee: not reached: up to {fastest.layout.name} one per cent less time costs less than one per cent more '
             'node-hours')
    return [f'Fastest: {_say(answer, fastest)}', f'Cheapest: {_say(answer, cheapest)}', knees]


def _source_line(answer: Answer) -> str:
    base = answer.base
    return (f'Source: {base.name}, {base.source}: {plural(base.num_nodes, "node")}, '
            f'{plural(base.num_units, base.unit)}, batch {base.global_batch_size:,}, '
            f'{1e3 * base.step_s:.1f} ms a step; data: {data_name(answer.base.dataset)}')


def _link_line(link: Link | None) -> str:
    if link is None:
        return 'Link between nodes: not known'
    hidden = 'hidden behind the backward pass' if link.is_hidden else 'not hidden'
    return (f'Link between nodes: {link.gbit_s:.4g} Gbit/s, ring all-reduce of {link.exchange_bytes / 1e6:.1f} MB, '
            f'{hidden}; from {link.source}')


def _power_lines(answer: Answer) -> list[str]:
    power = answer.source.power
    if power is None:
        return []
    of = ' and '.join(f'{kind.upper()}s' for kind in power.kinds)
    return [f'Energy: {power.watts:,.0f} W a node, the mean of the {of} over the runs of the source; that a node takes '
            'as much on other layouts is supposed']


def constants(answer: Answer) -> list[str]:
    """Return the values that the predictions are made from, their sources, and the errors of such predictions."""
    epochs = _group((r.epochs.source, r) for r in answer.rows if r.epochs)
    costs, error = 'none are supposed', ': no published system has several nodes of ranks without accelerators to ' \
                                        'judge it by'
    if validation := answer.validation:
        costs = costs_text(answer.costs)
        error = (f' on {validation.num_predicted} published systems, each with the costs of other rounds: '
                 f'{errors_text(validation)}')
    return [_source_line(answer), *(f'Epochs of {names} on {data_name(answer.base.dataset)}: {text}'
                                    for text, names in epochs.items()),
            _link_line(answer.source.link), f'Other costs on several nodes: {costs}', *_power_lines(answer),
            f'Error of the model{error}']


def heading(answer: Answer) -> str:
    """Return the source, target and data of a prediction."""
    targets = {r.layout.recipe.target_accuracy for r in answer.predicted}
    target = targets.pop() if len(targets) == 1 else None
    goal = '' if target is None else f': Top-1 {100 * target:.2f} % on {data_name(answer.base.dataset)}'
    return f'Prediction from {answer.base.name}{goal}'


def notes_of(answer: Answer) -> list[str]:
    """Return what weakens the numbers."""
    doubts = _group((doubt, row) for row in answer.rows for doubt in row.doubts)
    return [*answer.source.notes, *(f'{names}: {text}' for text, names in doubts.items())]


def render_tables(answer: Answer, is_markdown: bool = False, title: Callable[[str], str] = str) -> str:
    """Return the prediction as tables, for a terminal or as Markdown; title colours headings."""
    tables = [answer_table(answer)]
    if answer.predicted:
        tables.append(_table('Where a step goes, ms', answer.predicted, _step_cells,
                             'Step = compute + exchange - hidden + other.'))
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
                      'minutes', 'low_minutes', 'high_minutes', 'node_hours'),
            'cost': answer.cost(p), 'kwh': answer.kwh(p),
            **_fields(p, 'measured_step_s', 'measured_minutes'), 'doubts': list(p.doubts)}


def render_json(answer: Answer) -> str:
    """Return the prediction as JSON; docs/predict.md explains its keys."""
    base, link, power, validation = answer.base, answer.source.link, answer.source.power, answer.validation
    best = {'fastest': answer.fastest, 'cheapest': answer.cheapest, 'knee': answer.knee}
    return json.dumps({
        'format': FORMAT, 'version': mlperf_rn50.__version__,
        'source': {**_fields(base, 'name', 'source', 'num_nodes', 'num_units', 'unit', 'global_batch_size', 'step_s',
                             'dataset'), 'is_imagenet': base.dataset is None},
        'link': link and asdict(link),
        'costs': _fields(answer.costs, 'step_s', 'step_spread_s', 'outside_s', 'source'),
        'validation': validation and _fields(validation, 'num_predicted', 'num_held', 'median_error', 'high_error'),
        'price_per_node_hour': answer.price, 'node_watts': power and power.watts,
        'predictions': [_row_object(answer, r) for r in answer.rows],
        **{name: row and row.layout.name for name, row in best.items()}, 'notes': notes_of(answer)},
        indent=1, allow_nan=False)
