"""Render live runs for a terminal: facts of one run or a table of several, and accuracy curves in
remaining rows."""

import os
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from mlperf_rn50.analysis.sets.run_set import cost_of
from mlperf_rn50.analysis.watch.run_facts import (
    LIVE_LEVELS,
    epoch_text,
    facts_of,
    run_heading,
    status_text,
    status_word,
)
from mlperf_rn50.analysis.watch.run_state import BandPoint, LiveRun
from mlperf_rn50.text import duration, money, percent, printable

_STYLES = {'good': 'green', 'warn': 'yellow', 'bad': 'red', '': ''}
_COLOURS = ('cyan', 'magenta', 'yellow', 'green', 'blue', 'red')
_MARKS, _ASCII_MARKS = '●◆▲■▼★', '*o+x#@'
_LEAST_ROWS, _MOST_ROWS, _FEW_ROWS, _AXIS_COLUMNS, _ROOMY, _WIDE = 5, 20, 14, 7, 100, 130
_MAX_WARNINGS = 3  # maximum number of warnings shown per run; the page and --format json list all


def _band_at(points: Sequence[BandPoint], epoch: float) -> tuple[float, float] | None:
    """Return the limits of the reference band at an epoch, interpolated linearly, or None outside
    its epochs."""
    known = [(p.epoch, p.low, p.high) for p in points if p.low is not None and p.high is not None]
    if not known or not known[0][0] <= epoch <= known[-1][0]:
        return None
    epochs, low, high = zip(*known)
    return float(np.interp(epoch, epochs, low)), float(np.interp(epoch, epochs, high))


def _targets(runs: Sequence[LiveRun]) -> list[float]:
    return sorted({r.target for r in runs if r.target is not None})


def _top(runs: Sequence[LiveRun]) -> float:
    """Return the upper end of the accuracy axis, a multiple of 10 %."""
    values = [e.accuracy for r in runs for e in r.evaluations] + _targets(runs)
    values += [p.high for r in runs for p in r.band if p.high is not None]
    return min(1.0, (int(10 * max(values, default=0.9)) + 1) / 10)


def draw_curves(runs: Sequence[LiveRun], width: int, rows: int, is_ascii: bool = False) -> Text:
    """Draw Top-1 against epochs, with legend and axes; width and rows are the size in
    characters."""
    columns, height, top = max(2, width - _AXIS_COLUMNS), rows - 2, _top(runs)
    epochs = [e.epoch for r in runs for e in r.evaluations]
    last = max([1, *epochs, *(r.max_epochs or 0 for r in runs)])
    marks, fill, line = (_ASCII_MARKS, ':', '-') if is_ascii else (_MARKS, '░', '╌')
    cells = [[(' ', '')] * columns for _ in range(height)]

    def row(accuracy: float) -> int:
        return min(max(round((1 - accuracy / top) * (height - 1)), 0), height - 1)

    def column(epoch: float) -> int:
        return min(max(round(epoch / last * (columns - 1)), 0), columns - 1)

    for x in range(columns if len(runs) == 1 else 0):
        if ends := _band_at(runs[0].band, x / (columns - 1) * last):
            for y in range(row(ends[1]), row(ends[0]) + 1):
                cells[y][x] = fill, 'dim'
    for target in _targets(runs):
        cells[row(target)] = [(line, 'dim')] * columns
    for k, run in enumerate(runs):
        for e in run.evaluations:
            mark = marks[k % len(marks)], _COLOURS[k % len(_COLOURS)]
            cells[row(e.accuracy)][column(e.epoch)] = mark
    labels = {row(top * i / 2): f'{100 * top * i / 2:3.0f} % ' for i in range(3)}
    text = Text(_legend(runs, marks, fill, line)[:width] + '\n', no_wrap=True)
    for y, content in enumerate(cells):
        text.append(labels.get(y, '').rjust(_AXIS_COLUMNS - 1) + ('|' if is_ascii else '│'), 'dim')
        for style, same in groupby(content, key=itemgetter(1)):
            text.append(''.join(char for char, _ in same), style)
        text.append('\n')
    return text.append('epoch 0' + str(last).rjust(width - len('epoch 0')), 'dim')


def _legend(runs: Sequence[LiveRun], marks: str, fill: str, line: str) -> str:
    parts = [
        f'{marks[k % len(marks)]} {"Top-1" if len(runs) == 1 else name}'
        for k, name in enumerate(_names(runs))
        if runs[k].evaluations
    ]
    if len(runs) == 1 and any(p.low is not None for p in runs[0].band):
        parts.append(f'{fill} {runs[0].num_reference} reference runs')
    if targets := ' and '.join(map(percent, _targets(runs))):
        parts.append(f'{line} target {targets}')
    return '  '.join(parts)


def _names(runs: Sequence[LiveRun]) -> list[str]:
    """Return the paths of the runs without their common parent folder."""
    paths = [os.path.normpath(printable(r.path)) for r in runs]
    common = os.path.dirname(os.path.commonprefix(paths)) if len(set(paths)) > 1 else ''
    return [p[len(common) + 1 :] if common.strip('/') else p for p in paths]


def _facts_table(run: LiveRun, price: float | None) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style='dim', no_wrap=True, overflow='crop')
    table.add_column(overflow='fold')
    for name, fact in facts_of(run, price).rows:
        table.add_row(name.text, Text(fact.text, _STYLES[fact.level]))
    return table


def _overview(runs: Sequence[LiveRun], width: int, price: float | None) -> Table:
    """Return a table with one row per run."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style='dim', width=width)
    for run, path in zip(runs, _names(runs)):
        step, cost = run.checkpoints.step, cost_of(run.node_hours(), price)
        cells: dict[str, RenderableType] = {
            'run': Text(path),
            'status': Text(status_word(run), _STYLES[LIVE_LEVELS[run.status]]),
            'epoch': epoch_text(run),
            'Top-1': percent(run.evaluations[-1].accuracy) if run.evaluations else '-',
            'images/s': '-' if run.images_per_s is None else f'{run.images_per_s:,.0f}',
            'skew': '-' if run.skew is None else percent(run.skew, '.1f'),
            'left': '-' if run.left_s is None else duration(run.left_s),
        }
        if width >= _ROOMY:
            cells['checkpoint'] = '-' if step is None else f'step {step}'
        if price is not None:
            cells['cost'] = '-' if cost is None else money(cost)
        if not table.columns:
            table.add_column('run', overflow='fold')
            for name in list(cells)[1:]:
                side: JustifyMethod = 'left' if name in ('status', 'epoch') else 'right'
                table.add_column(name, justify=side, no_wrap=True, overflow='crop')
        table.add_row(*cells.values())
    return table


def _warnings(runs: Sequence[LiveRun]) -> list[Text]:
    """Return the warnings of all runs. If there are several runs, include their unusual
    statuses."""
    lines = []
    for run, name in zip(runs, _names(runs)):
        warnings, prefix = list(run.warnings), ''
        if len(runs) > 1:
            prefix = f'{name}: '
            if status_word(run) not in ('running', 'converged'):
                warnings.insert(0, status_text(run))
        more = len(warnings) - _MAX_WARNINGS
        shown = warnings[:_MAX_WARNINGS] + ([f'and {more} more'] if more > 0 else [])
        lines += [Text(f'{prefix}{text}', 'yellow', overflow='fold') for text in shown]
    return lines


def render(
    runs: Sequence[LiveRun], console: Console, price: float | None = None, rows: int | None = None
) -> RenderableType:
    """Render the runs for a console. They take at most `rows` rows; None means that the number is
    not limited."""
    width, is_ascii = console.width, not console.encoding.lower().startswith('utf')
    title = run_heading(runs[0]) if len(runs) == 1 else f'{len(runs)} runs'
    table = _facts_table(runs[0], price) if len(runs) == 1 else _overview(runs, width, price)
    head: list[RenderableType] = [Text(title, 'bold', overflow='fold'), *_warnings(runs)]
    if not any(r.evaluations or r.band for r in runs):
        return Group(*head, table)

    def room_below(*parts: RenderableType) -> int:
        options = console.options.update(height=None)
        used = sum(len(console.render_lines(part, options)) for part in parts)
        return _MOST_ROWS if rows is None else min(rows - used - 1, _MOST_ROWS)

    if width >= _WIDE and len(runs) == 1 and (room := room_below(*head)) >= _LEAST_ROWS:
        both = Table.grid(padding=0)
        both.add_column(width=width // 2)
        both.add_column(width=width - width // 2)
        both.add_row(table, draw_curves(runs, width - width // 2, room, is_ascii))
        return Group(*head, both)
    if (room := room_below(*head, table, '')) < _LEAST_ROWS:
        return Group(*head, table)
    return Group(*head, table, '', draw_curves(runs, width, room if rows else _FEW_ROWS, is_ascii))
