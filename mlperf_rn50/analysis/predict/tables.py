"""Render predictions as tables, with the sources of all numbers, and as JSON."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial

import mlperf_rn50
from mlperf_rn50.analysis.predict.answer import Predictions
from mlperf_rn50.analysis.predict.costs import MultiNodeCase, Validation, validate_published
from mlperf_rn50.analysis.predict.model import HOP_S, STAGES_S, UNKNOWN_GBIT_S, latency_s
from mlperf_rn50.analysis.predict.prediction import (
    KNOWLEDGE_TEXTS,
    Link,
    Prediction,
    relative_error,
)
from mlperf_rn50.analysis.recipe.reference import describe_recipe
from mlperf_rn50.analysis.sets.run_set import cost_of
from mlperf_rn50.analysis.show.text import MARKDOWN, TERMINAL, Style, render_text
from mlperf_rn50.answer import Answer, Cell, Table, figures_cell, number_cell, percent_cell
from mlperf_rn50.text import data_name, grouped, money, percent, plural, printable

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
    'interval; pass '
    '--link-gbit-s or a bench allreduce file'
)


def _section(
    title: str,
    points: Sequence[str],
    tables: Sequence[Table],
    notes: Sequence[str],
    style: Style,
    notes_title: str = 'Warnings',
) -> str:
    """Return a section as text."""
    return render_text(
        Answer(title, sentences=points, tables=tables, notes=notes, notes_title=notes_title), style
    )


def _group(pairs: Iterable[tuple[str, Prediction]], before: str = '') -> list[str]:
    """Return a line for each distinct text. It starts with the names of the layouts that have the
    text."""
    return [
        f'{before}{", ".join(row.layout.name for _, row in members)}: {text}'
        for text, members in grouped(pairs, lambda pair: pair[0]).items()
    ]


def _ms(seconds: float | None) -> Cell:
    return number_cell(None if seconds is None else 1e3 * seconds, ',.1f')


def _table(
    title: str,
    rows: Sequence[Prediction],
    cells_of: Callable[[Prediction], dict[str, Cell]],
    notes: dict[str, str],
) -> Table:
    """Return a table without empty columns. A refused layout has the reason instead of numbers.
    notes are by column."""
    cells = [None if row.refusal else cells_of(row) for row in rows]
    known = [c for c in cells if c]
    head = (
        tuple(h for h in known[0] if any(c[h].text != '-' for c in known))
        if known
        else ('layout', 'answer')
    )
    return Table(
        title,
        head,
        tuple(
            tuple(c[h] for h in head)
            if c
            else (
                Cell(row.layout.name),
                Cell(
                    f'refused: {row.refusal}'
                    + (f'; measured {text}' if (text := _measured_cell(row).text) != '-' else ''),
                    span=len(head) - 1,
                ),
            )
            for row, c in zip(rows, cells)
        ),
        ' '.join(text for column, text in notes.items() if column in head),
        _MINOR,
    )


def _basis(answer: Predictions, p: Prediction) -> str:
    """Return what the prediction is based on, and whether it is beyond all published sets."""
    base, costs, layout = answer.source.base, answer.costs, p.layout
    if p.knowledge is None:
        return 'one node' if layout.num_nodes == 1 else 'same layout'
    is_bench = base.run_set is None or answer.source.link.extra_s is not None
    text = (
        'own bench'
        if is_bench
        else KNOWLEDGE_TEXTS[p.knowledge]
        if base.has_accelerators
        else 'set on CPUs'
    )
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


def _answer_cells(p: Prediction) -> dict[str, Cell]:
    layout, epochs = p.layout, p.layout.epochs
    interval = (
        Cell(f'{p.interval[0]:,.2f} to {p.interval[1]:,.2f}', p.interval[0])
        if p.interval
        else Cell('-')
    )
    return {
        'layout': Cell(layout.name),
        'batch': number_cell(layout.recipe.global_batch_size, ',d'),
        'recipe': Cell(epochs.kind if epochs else '-'),
        'epochs': number_cell(epochs.mean if epochs else None, '.3g'),
        'minutes': number_cell(p.minutes, ',.2f'),
        '80 % interval': interval,
        'unchanged': number_cell(p.unchanged_minutes, ',.2f'),
        'change': percent_cell(relative_error(p.minutes, p.unchanged_minutes), '+.1f'),
        'measured': _measured_cell(p),
        'error': percent_cell(relative_error(p.minutes, p.measured_minutes), '+.1f'),
        'speed-up': number_cell(p.speedup, ',.2f'),
        'efficiency': percent_cell(p.efficiency, '.1f'),
        'node-hours': figures_cell(p.node_hours),
        'cost': Cell('-' if p.cost is None else money(p.cost), p.cost),
    }


def _step_cells(answer: Predictions, p: Prediction) -> dict[str, Cell]:
    layout, unit = p.layout, answer.source.base.unit
    return {
        'layout': Cell(layout.name),
        f'images/{unit}': number_cell(layout.local_batch_size, ',g'),
        'compute': _ms(p.compute_s),
        'exchange': _ms(p.exchange_s),
        'overlapped': _ms(p.hidden_s),
        'other': _ms(p.other_s),
        'step': _ms(p.step_s),
        'unchanged': _ms(p.unchanged_step_s),
        'measured share': percent_cell(p.measured_share),
        'measured': _ms(p.measured_step_s),
        'error': percent_cell(relative_error(p.step_s, p.measured_step_s), '+.1f'),
        'images/s': number_cell(
            p.images_per_s, ',.0f' if (p.images_per_s or 0) >= 1000 else ',.1f'
        ),
        f'images/s per {unit}, %': number_cell(100 * (p.hardware_efficiency or 0.0), '.1f'),
        'basis': Cell(_basis(answer, p)),
    }


def _sentence(answer: Predictions, p: Prediction) -> str:
    """Return the answer for a layout, a measured time first, then the predicted one unless it is
    that of this batch."""
    cost, epochs, text, then = (
        cost_of(p.known_node_hours, answer.request.price),
        p.layout.epochs,
        p.layout.name,
        ', ',
    )
    spent = (
        f', {figures_cell(p.known_node_hours).text} node-hours'
        if cost is None
        else f', cost {money(cost)}'
    )
    if p.best_measured_minutes:
        text += (
            f', measured {p.best_measured_minutes:,.2f} min at batch '
            f'{p.best_measured_batch_size:,} '
            f'({p.best_measured_system}){spent}'
        )
        if p.best_measured_minutes == p.measured_minutes:
            return text
        spent, then = '', '; predicted '
    if p.refusal:
        return f'{text}, refused: {p.refusal}'
    if not p.minutes or not p.interval or not epochs:
        return f'{text}{then}{_ms(p.step_s).text} ms per step, minutes unknown'
    kind = ' (interpolated recipe)' if epochs.kind == 'interpolated' else ''
    among = '' if epochs.low == epochs.high else f' ({epochs.low:g} to {epochs.high:g})'
    return (
        f'{text}{then}{p.minutes:,.2f} min ({p.interval[0]:,.2f} to {p.interval[1]:,.2f}) at batch '
        f'{p.layout.recipe.global_batch_size:,}{kind}, {epochs.mean:.3g} epochs{among}{spent}'
    )


def verdicts(answer: Predictions) -> list[str]:
    """Return the answer: a sentence for a single layout, or lines on the fastest, the cheapest and
    the knee layout.

    A line on resumed runs follows, if there are any.
    """
    num_timed, lines = len(answer.timed), resumed_lines(answer)
    if num_timed < 2:
        return [
            _sentence(answer, row) for row in answer.timed or answer.predicted or answer.rows
        ] + lines
    # one without a time may be faster
    which = ' predicted layout' if num_timed < len(answer.rows) else ''
    return [
        f'{name.capitalize()}{which}: {_sentence(answer, row)}' for name, row in answer.best.items()
    ] + lines


def resumed_lines(answer: Predictions) -> list[str]:
    """Return a line on sets with resumed runs, whose times are measured values here, if there are
    any."""
    names = ', '.join(s.name for s in answer.source.sets if any(r.num_resumes for r in s.scored))
    return [f'Resumed runs: {names}; their times are not those of uninterrupted runs'] * bool(names)


def _link_line(link: Link) -> str:
    rate = 'unknown rate' if link.gbit_s is None else f'{link.gbit_s:,.4g} Gbit/s per node'
    way = ('TCP, ' if link.is_tcp else '') + ('hierarchical' if link.is_hierarchical else 'ring')
    overlap = '' if link.extra_s is None else f', {100 * link.overlap:.0f} % of it overlapped'
    network = f' ({link.network})' if link.network else ''
    return (
        f'Interconnect: {rate}, {way} all-reduce of {link.exchange_bytes / 1e6:.1f} '
        f'MB{network}{overlap}; source: '
        f'{link.source}'
    )


def _costs_line(answer: Predictions) -> str:
    costs, link = answer.costs, answer.source.link
    if link.extra_s is not None:
        return (
            f'Latency on several nodes: {1e3 * link.extra_s:.1f} ms per step, measured by '
            'bench allreduce'
        )
    tcp = f', and {1e3 * HOP_S:g} ms per member of the ring over TCP' if link.is_tcp else ''
    stages = (
        f', and {1e3 * STAGES_S:g} ms for reductions within a node' if link.is_hierarchical else ''
    )
    return (
        f'Latency on several nodes: {1e3 * latency_s(answer.source.base, costs):.1f} ms per step, '
        f'{costs.source}{tcp}{stages}'
    )


def _error_line(answer: Predictions) -> str:
    if not answer.source.base.has_accelerators:
        return (
            'Model error: unknown, because all published systems with several nodes have '
            'accelerators'
        )
    own = validate_published().errors['own', 'round']
    return (
        f'Model error on {plural(own.num_predicted, "published set")} from their own one-node '
        'set, without the '
        f'costs of the same round: {percent(own.median_error, ".1f")} (median), '
        f'{percent(own.high_error, ".1f")} '
        f'(90th percentile); {own.num_held} of {own.num_predicted} measured times are within the '
        '80 % interval'
    )


def _inputs(answer: Predictions) -> list[str]:
    """List the inputs of the predictions with their sources, and the error of the model."""
    base, data = answer.source.base, data_name(answer.source.base.dataset)
    return [
        f'Source: {base.name} ({base.source}), {plural(base.num_nodes, "node")}, '
        f'{plural(base.num_units, base.unit)}, batch {base.global_batch_size:,}, '
        f'{1e3 * base.step_s:.1f} ms per '
        f'step on {data}',
        *_group(
            (
                (
                    f'{describe_recipe(r.layout.recipe)}; epochs on {data}: '
                    f'{r.layout.epochs.source}',
                    r,
                )
                for r in answer.predicted
                if r.layout.epochs
            ),
            'Recipe of ',
        ),
        _link_line(answer.source.link),
        _costs_line(answer),
        _error_line(answer),
    ]


def answer_heading(answer: Predictions) -> str:
    """Return the source, target and data of a prediction."""
    base, targets = (
        answer.source.base,
        {r.layout.recipe.target_accuracy for r in answer.predicted} - {None},
    )
    goal = f': Top-1 {100 * (targets.pop() or 0.0):.2f} %' if len(targets) == 1 else ''
    return f'Prediction from {base.name}{goal} on {data_name(base.dataset)}'


def _notes(answer: Predictions) -> list[str]:
    """Return the warnings about the numbers."""
    is_assumed = answer.source.link.gbit_s is None and answer.source.base.has_accelerators
    return [
        *answer.source.notes,
        *[_ASSUMED] * is_assumed,
        *_group((doubt, row) for row in answer.rows for doubt in row.doubts),
    ]


def render_prediction(answer: Predictions, style: Style = TERMINAL) -> str:
    """Return the prediction as text: the answer, tables, and their sources."""
    notes = {
        'speed-up': f'Speed-up and efficiency are relative to {answer.source.base.layout.name}.',
        'error': 'Error: predicted / measured - 1.',
        'cost': f'Cost: {answer.request.price or 0:g} per node-hour.',
    }
    table = _table('Predictions', answer.rows, _answer_cells, notes)
    steps = _table(
        'Parts of a step, ms',
        answer.predicted,
        partial(_step_cells, answer),
        {'step': 'Step = compute + exchange - overlapped + other.'},
    )
    return '\n\n'.join(
        [
            style.gap.join(map(style.line, verdicts(answer))),
            _section(answer_heading(answer), (), [table], (), style),
            _section(
                'Sources',
                _inputs(answer),
                [steps] if answer.predicted else [],
                _notes(answer),
                style,
            ),
        ]
    )


def render_prediction_json(answer: Predictions) -> str:
    """Return the prediction as JSON, whose keys docs/predict.md explains."""
    base, what_if = answer.source.base, answer.request.what_if
    own = validate_published().errors['own', 'round'] if base.has_accelerators else None
    return json.dumps(
        {
            'format': 'mlperf-rn50 predict 3',
            'version': mlperf_rn50.__version__,
            'source': {
                name: getattr(base, name)
                for name in (
                    'name',
                    'source',
                    'num_nodes',
                    'num_units',
                    'unit',
                    'global_batch_size',
                    'step_s',
                    'dataset',
                )
            },
            'link': asdict(answer.source.link),
            'costs': asdict(answer.costs),
            'validation': own and asdict(own),
            'what_if': what_if and str(what_if),
            'price_per_node_hour': answer.request.price,
            'predictions': [{'name': row.layout.name, **asdict(row)} for row in answer.rows],
            **{
                name: answer.best[name].layout.name if name in answer.best else None
                for name in ('fastest', 'cheapest', 'knee')
            },
            'notes': [*resumed_lines(answer), *_notes(answer)],
        },
        indent=1,
        allow_nan=False,
    )


def _cells(case: MultiNodeCase, p: Prediction) -> tuple[Cell, ...]:
    target, (low, high) = case.target, p.interval or (0.0, 0.0)
    base = case.other if p.knowledge == 'other' else case.own
    return (
        Cell(target.round),
        Cell(target.org or '-'),
        Cell(target.name),
        Cell(base.name if base else '-'),
        Cell(KNOWLEDGE_TEXTS[p.knowledge or 'own']),
        number_cell(p.layout.epochs.mean if p.layout.epochs else None, 'g'),
        number_cell(p.minutes, '.2f'),
        Cell(f'{low:.2f} to {high:.2f}', low),
        number_cell(target.minutes, '.2f'),
        percent_cell(relative_error(p.minutes, target.minutes), '+.1f'),
        Cell('yes' if case.is_held(p) else 'no'),
    )


def render_validation(validation: Validation, is_markdown: bool = False) -> str:
    """Return as text the errors by knowledge, the predictions without each set's round, and the
    excluded sets."""
    if not validation.errors:
        return '\n'.join(
            map(printable, ('No set on several nodes can be predicted', *validation.not_predicted))
        )
    summary = Table(
        'Errors',
        (
            'basis',
            'left out',
            'sets',
            'median error',
            '90th percentile',
            'worst',
            'in 80 % interval',
        ),
        tuple(
            tuple(
                map(
                    Cell,
                    (
                        KNOWLEDGE_TEXTS[knowledge],
                        name,
                        f'{e.num_predicted}',
                        percent(e.median_error, '.1f'),
                        percent(e.high_error, '.1f'),
                        percent(e.worst_error, '.1f'),
                        f'{e.num_held} ({percent(e.num_held / e.num_predicted, ".0f")})',
                    ),
                )
            )
            for (knowledge, name), e in validation.errors.items()
        ),
    )
    rows = Table(
        'Predictions without the costs of the same round',
        (
            'round',
            'organisation',
            'system',
            'source',
            'basis',
            'epochs',
            'predicted min',
            '80 % interval',
            'measured min',
            'error',
            'in interval',
        ),
        tuple(_cells(c, p) for c, p in validation.pairs),
    )
    return _section(
        'Errors of predict on sets that it was not fitted to',
        (),
        [summary, rows],
        validation.not_predicted,
        MARKDOWN if is_markdown else TERMINAL,
        'Not predicted',
    )
