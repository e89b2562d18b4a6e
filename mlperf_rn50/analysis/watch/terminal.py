"""Runs that go on, for a terminal: what is known of each, and their curves in the room that is left."""
import os
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from mlperf_rn50.analysis.watch.facts import epoch_text, facts_of, heading, level_of, status_text, status_word
from mlperf_rn50.analysis.watch.run_state import BandPoint, LiveRun, cost_of
from mlperf_rn50.mllog.events import printable
from mlperf_rn50.text import duration, money, percent

_STYLES = {'good': 'green', 'warn': 'yellow', 'bad': 'red', '': ''}
_COLOURS = ('cyan', 'magenta', 'yellow', 'green', 'blue', 'red')
_MARKS, _ASCII_MARKS = '●◆▲■▼★', '*o+x#@'
_LEAST_ROWS, _MOST_ROWS, _FEW_ROWS, _AXIS_COLUMNS, _ROOMY, _WIDE = 5, 20, 14, 7, 100, 130
_MAX_WARNINGS = 3  # of a run; the page and --format json have all


def _interpolated(points: Sequence[BandPoint], epoch: float) -> tuple[float, float] | None:
    """The ends of the band at an epoch, between the points beside it."""
    known = [(p.epoch, p.low, p.high) for p in points if p.low is not None and p.high is not None]
    if not known or not known[0][0] <= epoch <= known[-1][0]:
        return None
    right = next(i for i, p in enumerate(known) if p[0] >= epoch)
    (e0, l0, h0), (e1, l1, h1) = known[max(right - 1, 0)], known[right]
    share = (epoch - e0) / (e1 - e0) if e1 > e0 else 1.0
    return l0 + share * (l1 - l0), h0 + share * (h1 - h0)


def _targets(runs: Sequence[LiveRun]) -> list[float]:
    return sorted({r.setup.target for r in runs if r.setup.target is not None})


def _top(runs: Sequence[LiveRun]) -> float:
    """The upper end of the accuracies, a whole tenth."""
    values = [e.accuracy for r in runs for e in r.evaluations] + _targets(runs)
    values += [p.high for r in runs for p in r.reference.band if p.high is not None]
    return min(1.0, (int(10 * max(values, default=0.9)) + 1) / 10)


def last_epoch(runs: Sequence[LiveRun]) -> int:
    """The right end of a picture of accuracies: where the schedule ends, if that is known."""
    return max([r.clock.max_epochs or 0 for r in runs] + [r.evaluations[-1].epoch for r in runs if r.evaluations] + [1])


def draw_curves(runs: Sequence[LiveRun], width: int, rows: int, is_ascii: bool = False) -> Text:
    """Top-1 against epochs as text of some columns and rows, legend and axis included."""
    columns, height = width - _AXIS_COLUMNS, rows - 2
    top, last = _top(runs), last_epoch(runs)
    marks, fill, line = (_ASCII_MARKS, ':', '-') if is_ascii else (_MARKS, '░', '╌')
    cells = [[(' ', '')] * columns for _ in range(height)]

    def row(accuracy: float) -> int:
        return min(max(round((1 - accuracy / top) * (height - 1)), 0), height - 1)

    def column(epoch: float) -> int:
        return min(max(round(epoch / last * (columns - 1)), 0), columns - 1)
    for x in range(columns if len(runs) == 1 else 0):
        if ends := _interpolated(runs[0].reference.band, x / (columns - 1) * last):
            for y in range(row(ends[1]), row(ends[0]) + 1):
                cells[y][x] = fill, 'dim'
    for target in _targets(runs):
        cells[row(target)] = [(line, 'dim') for _ in cells[row(target)]]
    for k, run in enumerate(runs):
        for e in run.evaluations:
            cells[row(e.accuracy)][column(e.epoch)] = marks[k % len(marks)], _COLOURS[k % len(_COLOURS)]
    labels = {row(top * i / 2): f'{100 * top * i / 2:3.0f} % ' for i in range(3)}
    text = Text(_legend(runs, marks, fill, line)[:width] + '\n', no_wrap=True)
    for y, content in enumerate(cells):
        text.append(labels.get(y, '').rjust(_AXIS_COLUMNS - 1) + ('|' if is_ascii else '│'), 'dim')
        for style, same in groupby(content, key=itemgetter(1)):
            text.append(''.join(char for char, _ in same), style)
        text.append('\n')
    left = 'epoch 0'
    return text.append(left + str(last).rjust(width - len(left)), 'dim')


def _legend(runs: Sequence[LiveRun], marks: str, fill: str, line: str) -> str:
    parts = [f'{marks[k % len(marks)]} {"Top-1" if len(runs) == 1 else name}' for k, name in enumerate(names_of(runs))
             if runs[k].evaluations]
    if len(runs) == 1 and any(p.low is not None for p in runs[0].reference.band):
        parts.append(f'{fill} {runs[0].reference.num_reference} reference runs')
    targets = ' and '.join(map(percent, _targets(runs)))
    return '  '.join(parts + [f'{line} target {targets}'] * bool(targets))


def names_of(runs: Sequence[LiveRun]) -> list[str]:
    """A short name of each run: what its path has beyond those of all."""
    paths = [os.path.normpath(printable(r.place.path)) for r in runs]
    common = os.path.dirname(os.path.commonprefix(paths)) if len(set(paths)) > 1 else ''
    return [p[len(common) + 1:] if common.strip('/') else p for p in paths]


def _facts_table(run: LiveRun, price: float | None) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style='dim', no_wrap=True, overflow='crop')
    table.add_column(overflow='fold')
    for fact in facts_of(run, price):
        table.add_row(fact.name, Text(fact.text, _STYLES[fact.level]))
    return table


def _overview(runs: Sequence[LiveRun], width: int, price: float | None) -> Table:
    """A row per run; the step of the checkpoint where there is room, cost where there is a price."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style='dim', width=width)
    table.add_column('run', overflow='fold')
    columns = ['status', 'epoch', 'Top-1', 'images/s', 'skew', 'left', *(['checkpoint'] if width >= _ROOMY else []),
               *(['cost'] if price is not None else [])]
    for name in columns:
        table.add_column(name, justify='left' if name in ('status', 'epoch') else 'right', no_wrap=True,
                         overflow='crop')
    for run, name in zip(runs, names_of(runs)):
        last, step, cost = run.evaluations[-1:], run.place.checkpoints.step, cost_of(run.node_hours, price)
        cells: dict[str, RenderableType] = {
            'status': Text(status_word(run), _STYLES[level_of(run)]), 'epoch': epoch_text(run.clock),
            'Top-1': percent(last[0].accuracy) if last else '-',
            'images/s': '-' if run.clock.images_per_s is None else f'{run.clock.images_per_s:,.0f}',
            'skew': '-' if run.skew is None else percent(run.skew, '.1f'),
            'left': '-' if run.clock.left_s is None else duration(run.clock.left_s),
            'checkpoint': '-' if step is None else f'step {step}', 'cost': '-' if cost is None else money(cost)}
        table.add_row(Text(name), *(cells[c] for c in columns))
    return table


def _warnings(runs: Sequence[LiveRun]) -> list[Text]:
    """What to mind, the run named where there are several."""
    found = []
    for run, name in zip(runs, names_of(runs)):
        where = f'{name}: ' if len(runs) > 1 else ''
        worth = [status_text(run)] if len(runs) > 1 and status_word(run) not in ('running', 'converged') else []
        said = [*worth, *run.warnings]
        found += [Text(f'{where}{text}', 'yellow', overflow='fold') for text in said[:_MAX_WARNINGS]]
        if len(said) > _MAX_WARNINGS:
            found.append(Text(f'{where}and {len(said) - _MAX_WARNINGS} more', 'yellow'))
    return found


def render(runs: Sequence[LiveRun], console: Console, price: float | None = None,
           rows: int | None = None) -> RenderableType:
    """The runs as they are now, in so many rows; None for as many as are wanted."""
    width, is_ascii = console.width, not console.encoding.lower().startswith('utf')
    title = heading(runs[0]) if len(runs) == 1 else f'{len(runs)} runs'
    table = _facts_table(runs[0], price) if len(runs) == 1 else _overview(runs, width, price)
    head: list[RenderableType] = [Text(title, 'bold', overflow='fold'), *_warnings(runs)]
    if not any(r.evaluations or r.reference.band for r in runs):
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
