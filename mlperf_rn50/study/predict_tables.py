"""What a prediction says, for every form of it: tables with where their numbers come from, and JSON."""
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import mlperf_rn50
from mlperf_rn50.study.known import Recipe
from mlperf_rn50.study.predict import Costs, Link
from mlperf_rn50.study.predict_answer import Answer, Row, unit_name
from mlperf_rn50.study.predict_validation import Validation, costs_text
from mlperf_rn50.study.report_text import render_section
from mlperf_rn50.study.table import Cell, Table, figures_cell, number_cell, percent_cell
from mlperf_rn50.study.text import data_name, money, plural

FORMAT = 'mlperf-rn50 predict 1'
KNEE = 'the layout from which on one per cent less time costs more than one per cent more node-hours'


def _ms(seconds: float | None) -> Cell:
    return number_cell(None if seconds is None else 1e3 * seconds, ',.1f')


def _table(title: str, rows: Sequence[tuple[Row, dict[str, Cell]]], note: str = '') -> Table:
    """A table without the columns that nothing is known of; a refused layout has the reason in place of numbers."""
    heads = [list(cells) for row, cells in rows if not row.prediction.refusal]
    head = tuple(h for h in (heads[0] if heads else ('layout', 'answer'))
                 if any(cells[h].text != '-' for row, cells in rows if not row.prediction.refusal) or not heads)
    return Table(title, head, tuple(
        (Cell(row.layout.name), Cell(f'refused: {row.prediction.refusal}', span=len(head) - 1))
        if row.prediction.refusal else tuple(cells[h] for h in head) for row, cells in rows), note)


def _interval(row: Row) -> Cell:
    p = row.prediction
    return Cell('-') if p.low_minutes is None or p.high_minutes is None else Cell(
        f'{p.low_minutes:.2f} to {p.high_minutes:.2f}', p.low_minutes)


def _answer_cells(answer: Answer, row: Row) -> dict[str, Cell]:
    p, layout = row.prediction, row.layout
    rate = p.images_per_s
    return {'layout': Cell(layout.name), unit_name(answer.base): number_cell(layout.num_units, ',d'),
            'batch': number_cell(layout.recipe.global_batch_size, ',d'),
            f'epochs, {data_name(answer.base.dataset)}': number_cell(p.epochs.mean if p.epochs else None, '.3g'),
            'time, min': number_cell(p.minutes, ',.2f'), '80 % interval': _interval(row),
            'measured, min': number_cell(row.measured_minutes, ',.2f'), 'off by': percent_cell(row.error, '+.1f'),
            'images/s': number_cell(rate, ',.0f' if (rate or 0) >= 1000 else ',.1f'),
            'efficiency': percent_cell(row.efficiency),
            'node-hours': figures_cell(row.node_hours),
            'cost': Cell('-' if (cost := answer.cost(row)) is None else money(cost), cost),
            'kWh': figures_cell(answer.kwh(row))}


def answer_table(answer: Answer) -> Table:
    """Time, throughput and cost of each layout."""
    rows = [(r, {} if r.prediction.refusal else _answer_cells(answer, r)) for r in answer.rows]
    title = 'Time to train' if answer.timed or answer.is_refused else 'Throughput'
    return _table(title, rows, '' if answer.is_refused else
                  'Efficiency: images/s of each against those of the source.'
                  + (f' Cost: {answer.price:g} for a node-hour.' if answer.price is not None and answer.timed else '')
                  + (' Off by: predicted over measured.' if any(r.error is not None for r in answer.rows) else ''))


def _step_cells(row: Row) -> dict[str, Cell]:
    p = row.prediction
    return {'layout': Cell(row.layout.name), 'images of each': number_cell(row.layout.local_batch_size, ',g'),
            'compute': _ms(p.compute_s), 'exchange': _ms(p.exchange_s), 'of it hidden': _ms(p.hidden_s),
            'other': _ms(p.other_s), 'step': _ms(p.step_s),
            'measured': _ms(row.measured.step_s if row.measured else None),
            'off by': percent_cell(row.step_error, '+.1f')}


def step_table(answer: Answer) -> Table | None:
    """Where the time of a step goes; None where all are refused."""
    rows = [(r, _step_cells(r)) for r in answer.rows if not r.prediction.refusal]
    return _table('Where a step goes, ms', rows, 'Step = compute + exchange - hidden + other.') if rows else None


def _schedule(recipe: Recipe) -> str:
    if recipe.step_epochs and recipe.decay == 'step':
        return 'a tenth at ' + ', '.join(f'{e:g}' for e in recipe.step_epochs)
    return '-' if recipe.decay_epochs is None else f'{recipe.decay or "-"}, {recipe.decay_epochs:g} epochs'


def _recipe_cells(row: Row) -> dict[str, Cell]:
    recipe = row.layout.recipe
    return {'layout': Cell(row.layout.name), 'batch': number_cell(recipe.global_batch_size, ',d'),
            'optimizer': Cell(recipe.opt_name or '-'), 'learning rate': number_cell(recipe.base_lr, '.6g'),
            'warm-up': number_cell(recipe.warmup_epochs, 'g'), 'schedule': Cell(_schedule(recipe)),
            'recipe of': Cell(row.recipe_source or '-')}


def recipe_table(answer: Answer) -> Table | None:
    """What would be trained, and who says so; None where nobody does."""
    rows = [(r, _recipe_cells(r)) for r in answer.rows if not r.prediction.refusal and r.recipe_source]
    return _table('Recipes', rows) if rows else None


def _say(answer: Answer, row: Row) -> str:
    cost = answer.cost(row)
    return (f'{row.layout.name}, {row.minutes:.2f} min, {figures_cell(row.node_hours).text} node-hours'
            + (f', cost {money(cost)}' if cost is not None else ''))


def verdicts(answer: Answer) -> list[str]:
    """The fastest layout, the cheapest, and the knee between them."""
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
    base, unit = answer.base, unit_name(answer.base)
    units = f'{base.num_units} {unit if base.num_units > 1 else unit[:-1]}'
    return (f'Source: {base.name}, {base.source}: {plural(base.num_nodes, "node")}, {units}, '
            f'batch {base.global_batch_size:,}, {1e3 * base.step_s:.1f} ms a step; '
            f'data: {data_name(answer.base.dataset)}')


def _epoch_lines(answer: Answer) -> list[str]:
    """Who says how many epochs the layouts take."""
    named: dict[str, list[str]] = {}
    for row in answer.rows:
        if row.prediction.epochs:
            named.setdefault(row.prediction.epochs.source, []).append(row.layout.name)
    data = data_name(answer.base.dataset)
    return [f'Epochs of {", ".join(names)} on {data}: {text}' for text, names in named.items()]


def _link_line(link: Link | None) -> str:
    if link is None:
        return 'Link between nodes: not known'
    hidden = 'hidden behind the backward pass' if link.is_hidden else 'not hidden'
    return (f'Link between nodes: {link.gbit_s:.4g} Gbit/s, ring all-reduce of {link.exchange_bytes / 1e6:.1f} MB, '
            f'{hidden}; from {link.source}')


def _costs_line(costs: Costs) -> str:
    if not costs.step_s and costs.outside_s is None:
        return 'Other costs on several nodes: none are supposed'
    return f'Other costs on several nodes: {costs_text(costs)}'


def _power_lines(answer: Answer) -> list[str]:
    power = answer.source.power
    if power is None:
        return []
    of = ' and '.join(f'{kind.upper()}s' for kind in power.kinds)
    return [f'Energy: {power.watts:,.0f} W a node, the mean of the {of} over the runs of the source; that a node takes '
            'as much on other layouts is supposed']


def _error_line(answer: Answer, validation: Validation) -> str:
    if not answer.base.has_accelerators:
        return 'Error of the model: no published system has several nodes of ranks without accelerators to judge it by'
    number = len(validation.predicted)
    if validation.median_error is None or validation.high_error is None:
        return 'Error of the model: not known'
    return (f'Error of the model on {number} published systems, each with the costs of other rounds: '
            f'{100 * validation.median_error:.1f} % (median), {100 * validation.high_error:.1f} % (90th percentile); '
            f'the interval held {validation.num_held} of {number} times')


def constants(answer: Answer, validation: Validation) -> list[str]:
    """What the predictions are made from, who says so, and how well such predictions did."""
    return [_source_line(answer), *_epoch_lines(answer), _link_line(answer.source.link), _costs_line(answer.costs),
            *_power_lines(answer), _error_line(answer, validation)]


def heading(answer: Answer) -> str:
    """What is predicted."""
    targets = {r.layout.recipe.target_accuracy for r in answer.rows if not r.prediction.refusal}
    target = targets.pop() if len(targets) == 1 else None
    goal = '' if target is None else f': Top-1 {100 * target:.2f} % on {data_name(answer.base.dataset)}'
    return f'Prediction from {answer.base.name}{goal}'


def notes_of(answer: Answer) -> list[str]:
    """What weakens the numbers."""
    named: dict[str, list[str]] = {}
    for row in answer.rows:
        for doubt in row.prediction.doubts:
            named.setdefault(doubt, []).append(row.layout.name)
    return [*answer.source.notes, *(f'{", ".join(names)}: {text}' for text, names in named.items())]


def render_tables(answer: Answer, validation: Validation, is_markdown: bool = False,
                  title: Callable[[str], str] = str) -> str:
    """The prediction as tables, for a terminal or as Markdown; title colours headings."""
    tables = [t for t in (answer_table(answer), step_table(answer), recipe_table(answer)) if t]
    return render_section(heading(answer), [*verdicts(answer), *constants(answer, validation)], tables,
                          notes_of(answer), is_markdown, title)


def _row_object(answer: Answer, row: Row) -> dict[str, Any]:
    p, layout = row.prediction, row.layout
    return {'layout': layout.name, 'num_nodes': layout.num_nodes, 'units_per_node': layout.units_per_node,
            'global_batch_size': layout.recipe.global_batch_size or None, 'refusal': p.refusal,
            'recipe': None if p.refusal else asdict(layout.recipe),
            'recipe_source': row.recipe_source or None,
            'epochs': p.epochs.mean if p.epochs else None, 'epochs_low': p.epochs.low if p.epochs else None,
            'epochs_high': p.epochs.high if p.epochs else None, 'epochs_source': p.epochs.source if p.epochs else None,
            'compute_s': p.compute_s, 'exchange_s': p.exchange_s, 'hidden_s': p.hidden_s, 'other_s': p.other_s,
            'step_s': p.step_s, 'images_per_s': p.images_per_s, 'efficiency': row.efficiency, 'minutes': p.minutes,
            'low_minutes': p.low_minutes, 'high_minutes': p.high_minutes, 'node_hours': row.node_hours,
            'cost': answer.cost(row), 'kwh': answer.kwh(row),
            'measured_step_s': row.measured.step_s if row.measured else None,
            'measured_minutes': row.measured_minutes, 'doubts': list(p.doubts)}


def _validation_object(validation: Validation) -> dict[str, Any]:
    return {'num_predicted': len(validation.predicted), 'num_held': validation.num_held,
            'median_error': validation.median_error, 'high_error': validation.high_error}


def predict_object(answer: Answer, validation: Validation) -> dict[str, Any]:
    """The prediction as JSON; docs/predict.md says what its keys mean."""
    base, link, costs = answer.base, answer.source.link, answer.costs
    return {
        'format': FORMAT, 'version': mlperf_rn50.__version__,
        'source': {'name': base.name, 'source': base.source, 'num_nodes': base.num_nodes, 'num_units': base.num_units,
                   'unit': unit_name(base)[:-1], 'global_batch_size': base.global_batch_size, 'step_s': base.step_s,
                   'dataset': base.dataset, 'is_imagenet': base.dataset is None},
        'link': link and {'gbit_s': link.gbit_s, 'exchange_bytes': link.exchange_bytes, 'is_hidden': link.is_hidden,
                          'source': link.source},
        'costs': {'step_s': costs.step_s, 'step_spread_s': costs.step_spread_s, 'outside_s': costs.outside_s,
                  'source': costs.source},
        'validation': _validation_object(validation) if base.has_accelerators else None,
        'price_per_node_hour': answer.price,
        'node_watts': answer.source.power.watts if answer.source.power else None,
        'predictions': [_row_object(answer, r) for r in answer.rows],
        **{name: row.layout.name if row else None
           for name, row in (('fastest', answer.fastest), ('cheapest', answer.cheapest), ('knee', answer.knee))},
        'notes': notes_of(answer)}


def render_json(answer: Answer, validation: Validation) -> str:
    """predict_object as text."""
    return json.dumps(predict_object(answer, validation), indent=1, allow_nan=False)
