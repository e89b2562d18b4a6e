"""The answers of predict: predictions as sentences and tables with the sources of all numbers, and
the errors of the model."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import mlperf_rn50
from mlperf_rn50.analysis.predict.costs import MultiNodeCase, Validation, validate_published
from mlperf_rn50.analysis.predict.layouts import Predictions
from mlperf_rn50.analysis.predict.model import HOP_S, STAGES_S, UNKNOWN_GBIT_S, latency_s
from mlperf_rn50.analysis.predict.prediction import (
    KNOWLEDGE_TEXTS,
    Link,
    Number,
    Prediction,
    relative_error,
)
from mlperf_rn50.analysis.recipe.reference import describe_recipe
from mlperf_rn50.analysis.sets.run_set import cost_of
from mlperf_rn50.answer import Answer, Cell, Table, figures_cell, number_cell, percent_cell
from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK
from mlperf_rn50.text import data_name, grouped, money, percent, plural, significant

# Columns that a narrow terminal omits first, the last first.
_MINOR = (
    'measured',
    'overlapped',
    'other',
    '80 % interval',
    'speed-up',
    'epochs',
    'recipe',
    'measured share',
    'error',
)
_ASSUMED = (
    f'Ports between nodes unknown: {UNKNOWN_GBIT_S:g} Gbit/s per node assumed, with a wider '
    'interval; pass --link-gbit-s or a bench allreduce file'
)
Cells = dict[str, Cell]  # of a row, by column


def _by_text(pairs: Iterable[tuple[str, Prediction]], before: str = '') -> list[str]:
    """Return a line for each distinct text. It starts with the names of the layouts that have the
    text."""
    return [
        f'{before}{", ".join(row.layout.name for _, row in members)}: {text}'
        for text, members in grouped(pairs, lambda pair: pair[0]).items()
    ]


def _ms(seconds: Number) -> Cell:
    return number_cell(None if seconds is None else 1e3 * seconds, ',.1f')


def _range_cell(interval: tuple[float, float] | None) -> Cell:
    if interval is None:
        return Cell('-')
    low, high = interval
    return Cell(f'{low:,.2f} to {high:,.2f}', low)


def _error_cell(predicted: Number, measured: Number) -> Cell:
    return percent_cell(relative_error(predicted, measured), '+.1f')


def _table(
    title: str,
    rows: Sequence[Prediction],
    cells_of: Callable[[Prediction], Cells],
    notes: dict[str, str],
) -> Table:
    """Return a table without empty columns. A refused layout has the reason instead of numbers.
    notes are by column."""
    cells = [None if row.refusal else cells_of(row) for row in rows]
    known = [c for c in cells if c]
    head = [h for h in (known[0] if known else ()) if any(c[h].text != '-' for c in known)]
    head = head or ['layout', 'answer']
    return Table(
        title,
        head,
        [
            tuple(c[h] for h in head) if c else _refused(row, len(head) - 1)
            for row, c in zip(rows, cells)
        ],
        note=' '.join(text for column, text in notes.items() if column in head),
        minor=_MINOR,
    )


def _refused(p: Prediction, span: int) -> tuple[Cell, ...]:
    text, measured = f'refused: {p.refusal}', _measured_cell(p).text
    if measured != '-':
        text += f'; measured {measured}'
    return Cell(p.layout.name), Cell(text, span=span)


def _basis(found: Predictions, p: Prediction) -> str:
    """Return what the prediction is based on, and whether it is beyond all published sets."""
    base, costs, layout = found.source.base, found.costs, p.layout
    if p.knowledge is None:
        return 'one node' if layout.num_nodes == 1 else 'same layout'
    text = KNOWLEDGE_TEXTS[p.knowledge] if base.has_accelerators else 'set on CPUs'
    if base.run_set is None or found.source.link.extra_s is not None:
        text = 'own bench'
    is_beyond = layout.num_nodes > costs.most_nodes or layout.local_batch_size < costs.least_local
    return f'{text}, extrapolated' if costs.most_nodes and is_beyond else text


def _measured_cell(p: Prediction) -> Cell:
    """Return the measured minutes at the batch of the row or, if there are none, the fewest at
    another batch."""
    if p.measured_minutes or not p.best_measured_minutes:
        return number_cell(p.measured_minutes, ',.2f')
    return Cell(
        f'{p.best_measured_minutes:,.2f} at {p.best_measured_batch_size:,}', p.best_measured_minutes
    )


def _time_cells(p: Prediction) -> Cells:
    epochs = p.layout.epochs
    return {
        'layout': Cell(p.layout.name),
        'batch': number_cell(p.layout.recipe.global_batch_size, ',d'),
        'recipe': Cell(epochs.kind if epochs else '-'),
        'epochs': number_cell(epochs.mean if epochs else None, '.3g'),
        'minutes': number_cell(p.minutes, ',.2f'),
        '80 % interval': _range_cell(p.interval),
        'unchanged': number_cell(p.unchanged_minutes, ',.2f'),
        'change': _error_cell(p.minutes, p.unchanged_minutes),
        'measured': _measured_cell(p),
        'error': _error_cell(p.minutes, p.measured_minutes),
        'speed-up': number_cell(p.speedup, ',.2f'),
        'efficiency': percent_cell(p.efficiency, '.1f'),
        'node-hours': figures_cell(p.node_hours),
        'cost': Cell('-' if p.cost is None else money(p.cost), p.cost),
    }


def _step_cells(found: Predictions, p: Prediction) -> Cells:
    rate, unit = p.images_per_s or 0.0, found.source.base.unit
    return {
        'layout': Cell(p.layout.name),
        f'images/{unit}': number_cell(p.layout.local_batch_size, ',g'),
        'compute': _ms(p.compute_s),
        'exchange': _ms(p.exchange_s),
        'overlapped': _ms(p.hidden_s),
        'other': _ms(p.other_s),
        'step': _ms(p.step_s),
        'unchanged': _ms(p.unchanged_step_s),
        'measured share': percent_cell(p.measured_share),
        'measured': _ms(p.measured_step_s),
        'error': _error_cell(p.step_s, p.measured_step_s),
        'images/s': number_cell(rate, ',.0f' if rate >= 1000 else ',.1f'),
        f'images/s per {unit}, %': number_cell(100 * (p.hardware_efficiency or 0.0), '.1f'),
        'basis': Cell(_basis(found, p)),
    }


def _sentence(found: Predictions, p: Prediction) -> str:
    """Return the answer for a layout: a measured time first, then the predicted one unless it is
    of the measured recipe."""
    text, epochs, batch = p.layout.name, p.layout.epochs, p.layout.recipe.global_batch_size
    then, at_batch = ', ', f' at batch {batch:,}'
    cost = cost_of(p.known_node_hours, found.request.price)
    spent = f', {figures_cell(p.known_node_hours).text} node-hours'
    if cost is not None:
        spent = f', cost {money(cost)}'
    if p.best_measured_minutes:
        text += (
            f', measured {p.best_measured_minutes:,.2f} min at batch '
            f'{p.best_measured_batch_size:,} ({p.best_measured_system}){spent}'
        )
        if p.best_measured_minutes == p.measured_minutes:
            return text
        then = f'; at this batch, predicted from {found.source.base.name} '
        if p.best_measured_batch_size != batch:
            then = f'; at another batch, {batch:,}, predicted '
        at_batch = spent = ''
    if p.refusal:
        return f'{text}, refused: {p.refusal}'
    if not p.minutes or not p.interval or not epochs:
        return f'{text}{then}{_ms(p.step_s).text} ms per step, minutes unknown'
    kind = ' (interpolated recipe)' if epochs.kind == 'interpolated' else ''
    among = '' if epochs.low == epochs.high else f' ({epochs.low:g} to {epochs.high:g})'
    return (
        f'{text}{then}{p.minutes:,.2f} min ({_range_cell(p.interval).text}){at_batch}{kind}, '
        f'{epochs.mean:.3g} epochs{among}{spent}'
    )


def _sentences(found: Predictions) -> Iterator[str]:
    """Yield a sentence for a single layout, or sentences on the fastest, the cheapest and the knee
    layout."""
    num_timed = len(found.timed)
    if num_timed < 2:
        only = 'Only layout with a time: ' if num_timed < len(found.rows) and num_timed else ''
        for row in found.timed or found.predicted or found.rows:
            yield only + _sentence(found, row)
        return
    # one without a time may be faster
    which = ' layout with a time' if num_timed < len(found.rows) else ''
    for name, row in found.best.items():
        yield f'{name.capitalize()}{which}: {_sentence(found, row)}'


def _resumed(found: Predictions) -> list[str]:
    """Return a line on sets with resumed runs, whose times are measured values here, if there are
    any."""
    names = [s.name for s in found.source.sets if any(r.num_resumes for r in s.scored)]
    if not names:
        return []
    text = 'their times are not those of uninterrupted runs'
    return [f'Resumed runs: {", ".join(names)}; {text}']


def _link_line(link: Link) -> str:
    rate = 'unknown rate' if link.gbit_s is None else f'{significant(link.gbit_s)} Gbit/s per node'
    way = 'hierarchical' if link.is_hierarchical else 'ring'
    if link.is_tcp:
        way = f'TCP, {way}'
    overlap = '' if link.extra_s is None else f', {100 * link.overlap:.0f} % of it overlapped'
    network = f' ({link.network})' if link.network else ''
    return (
        f'Interconnect: {rate}, {way} all-reduce of {link.exchange_bytes / 1e6:.1f} '
        f'MB{network}{overlap}; source: {link.source}'
    )


def _costs_line(found: Predictions) -> str:
    costs, link = found.costs, found.source.link
    seconds, source = latency_s(found.source.base, costs), costs.source
    if link.extra_s is not None:
        seconds, source = link.extra_s, 'measured by bench allreduce'
    else:
        if link.is_tcp:
            source += f', and {1e3 * HOP_S:g} ms per member of the ring over TCP'
        if link.is_hierarchical:
            source += f', and {1e3 * STAGES_S:g} ms for reductions within a node'
    return f'Latency on several nodes: {1e3 * seconds:.1f} ms per step, {source}'


def _error_line(found: Predictions) -> str:
    if not found.source.base.has_accelerators:
        return (
            'Model error: unknown, because all published systems with several nodes have '
            'accelerators'
        )
    own = validate_published().errors['own', 'round']
    return (
        f'Model error on {plural(own.num_predicted, "published set")} from their own one-node set, '
        f'without the costs of the same round: {percent(own.median_error, ".1f")} (median), '
        f'{percent(own.high_error, ".1f")} (90th percentile); {own.num_held} of '
        f'{own.num_predicted} measured times are within the 80 % interval'
    )


def _inputs(found: Predictions) -> list[str]:
    """List the inputs of the predictions with their sources, and the error of the model."""
    base, data = found.source.base, data_name(found.source.base.dataset)
    recipes = (
        (f'{describe_recipe(r.layout.recipe)}; epochs on {data}: {r.layout.epochs.source}', r)
        for r in found.predicted
        if r.layout.epochs
    )
    return [
        f'Source: {base.name} ({base.source}), {plural(base.num_nodes, "node")}, '
        f'{plural(base.num_units, base.unit)}, batch {base.global_batch_size:,}, '
        f'{1e3 * base.step_s:.1f} ms per step on {data}',
        *_by_text(recipes, 'Recipe of '),
        _link_line(found.source.link),
        _costs_line(found),
        _error_line(found),
    ]


def _heading(found: Predictions) -> str:
    """Return the source, target and data of a prediction."""
    base, goal = found.source.base, ''
    targets = {t for r in found.predicted if (t := r.layout.recipe.target_accuracy)}
    if len(targets) == 1:
        goal = f': Top-1 {100 * targets.pop():.2f} %'
    return f'Prediction from {base.name}{goal} on {data_name(base.dataset)}'


def _warnings(found: Predictions) -> list[str]:
    source = found.source
    notes = [*source.notes]
    if source.link.gbit_s is None and source.base.has_accelerators:
        notes.append(_ASSUMED)
    return notes + _by_text((doubt, row) for row in found.rows for doubt in row.doubts)


def _draw(found: Predictions) -> Iterator[Any]:
    from mlperf_rn50.analysis.predict.plot import draw_prediction  # imports Matplotlib

    if plot := draw_prediction(found, _heading(found)):
        yield plot


def prediction_answer(found: Predictions) -> Answer:
    """Return predictions as an answer: the best layouts, then tables and their sources.
    docs/output.md explains the keys of the data."""
    base, request = found.source.base, found.request
    times = _table(
        'Predictions',
        found.rows,
        _time_cells,
        {
            'layout': f'Layout: nodes x {base.unit}s per node.',
            'speed-up': f'Speed-up and efficiency are relative to {base.layout.name}.',
            'error': 'Error: predicted / measured - 1.',
            'cost': f'Cost: {request.price or 0:g} per node-hour.',
        },
    )
    steps = _table(
        'Parts of a step, ms',
        found.predicted,
        partial(_step_cells, found),
        {'step': 'Step = compute + exchange - overlapped + other.'},
    )
    resumed, warnings = _resumed(found), _warnings(found)
    own = validate_published().errors['own', 'round'] if base.has_accelerators else None
    source = 'name source num_nodes num_units unit global_batch_size step_s dataset'.split()
    best = {name: row.layout.name for name, row in found.best.items()}
    return Answer(
        sentences=[*_sentences(found), *resumed],
        parts=[
            Answer(title=_heading(found), tables=[times]),
            Answer(
                title='Sources',
                sentences=_inputs(found),
                tables=[steps],
                notes=warnings,
                notes_title='Warnings',
            ),
        ],
        figures=partial(_draw, found),
        data={
            'format': 'mlperf-rn50 predict 3',
            'version': mlperf_rn50.__version__,
            'source': {name: getattr(base, name) for name in source},
            'link': asdict(found.source.link),
            'costs': asdict(found.costs),
            'validation': own and asdict(own),
            'what_if': request.what_if and str(request.what_if),
            'price_per_node_hour': request.price,
            'predictions': [{'name': row.layout.name, **asdict(row)} for row in found.rows],
            **{name: best.get(name) for name in ('fastest', 'cheapest', 'knee')},
            'notes': [*resumed, *warnings],
        },
        exit_code=EXIT_OK if found.predicted else EXIT_FAILED,
    )


def _validation_cells(case: MultiNodeCase, p: Prediction) -> Cells:
    target, epochs = case.target, p.layout.epochs
    return {
        'round': Cell(target.round),
        'organisation': Cell(target.org or '-'),
        'system': Cell(target.name),
        'source': Cell(case.base.name if case.base else '-'),
        'basis': Cell(KNOWLEDGE_TEXTS[p.knowledge or 'own']),
        'epochs': number_cell(epochs.mean if epochs else None, 'g'),
        'predicted min': number_cell(p.minutes, '.2f'),
        '80 % interval': _range_cell(p.interval),
        'measured min': number_cell(target.minutes, '.2f'),
        'error': _error_cell(p.minutes, target.minutes),
        'in interval': Cell('yes' if case.is_held(p) else 'no'),
    }


def _validated(case: MultiNodeCase, p: Prediction) -> dict[str, Any]:
    """Return a predicted set as an object of JSON."""
    target = case.target
    return {
        'round': target.round,
        'org': target.org,
        'system': target.name,
        'source': case.base and case.base.name,
        'knowledge': p.knowledge,
        'epochs': p.layout.epochs and p.layout.epochs.mean,
        'minutes': p.minutes,
        'interval': p.interval,
        'measured_minutes': target.minutes,
        'is_held': case.is_held(p),
    }


def validation_answer(found: Validation) -> Answer:
    """Return the errors by knowledge, the predictions without each set's round, and the excluded
    sets. docs/output.md explains the keys of the data."""
    data = {
        'format': 'mlperf-rn50 predict --validate 1',
        'version': mlperf_rn50.__version__,
        'errors': [
            {'knowledge': knowledge, 'left_out': left_out, **asdict(e)}
            for (knowledge, left_out), e in found.errors.items()
        ],
        'predictions': [_validated(case, p) for case, p in found.pairs],
        'not_predicted': found.not_predicted,
    }
    if not found.errors:
        return Answer(
            sentences=['No set on several nodes can be predicted', *found.not_predicted],
            data=data,
            exit_code=EXIT_FAILED,
        )
    errors = [
        {
            'basis': Cell(KNOWLEDGE_TEXTS[knowledge]),
            'left out': Cell(left_out),
            'sets': Cell(f'{e.num_predicted}'),
            'median error': Cell(percent(e.median_error, '.1f')),
            '90th percentile': Cell(percent(e.high_error, '.1f')),
            'worst': Cell(percent(e.worst_error, '.1f')),
            'in 80 % interval': Cell(
                f'{e.num_held} ({percent(e.num_held / e.num_predicted, ".0f")})'
            ),
        }
        for (knowledge, left_out), e in found.errors.items()
    ]
    sets = [_validation_cells(case, p) for case, p in found.pairs]
    titles = 'Errors', 'Predictions without the costs of the same round'
    return Answer(
        title='Errors of predict on sets that it was not fitted to',
        tables=[
            Table(title, list(rows[0]), [list(row.values()) for row in rows])
            for title, rows in zip(titles, (errors, sets))
        ],
        notes=found.not_predicted,
        notes_title='Not predicted',
        data=data,
    )
