"""Epochs to converge and time to train of each layout of a study. Pure."""
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from mlperf_rn50.errors import UserError
from mlperf_rn50.mlperf.reader import Run, read_run


@dataclass(frozen=True)
class Layout:
    """The runs of one folder."""

    name: str
    runs: tuple[Run, ...]

    @property
    def converged(self) -> tuple[Run, ...]:
        return tuple(r for r in self.runs if r.status == 'converged')


def find_layouts(folder: Path) -> list[Layout]:
    """The folders below one that hold result_<k>.txt, in the order of their ranks, and what is in them.

    Raises:
        UserError: there are none.
    """
    logs: dict[Path, list[Path]] = {}
    for path in sorted(folder.rglob('result_*.txt')):
        if re.fullmatch(r'result_\d+\.txt', path.name):
            logs.setdefault(path.parent, []).append(path)
    if not logs:
        raise UserError(f'{folder}: no result_<k>.txt in it or below it')
    found = [Layout(p.name, tuple(read_run(log) for log in sorted(paths, key=lambda q: int(q.stem[7:]))))
             for p, paths in logs.items()]
    return sorted(found, key=lambda lay: (max((r.num_ranks or 0) for r in lay.runs), lay.name))


def _each(values: Sequence[str]) -> str:
    return ', '.join(dict.fromkeys(values)) or '-'


def _mean(values: Sequence[float]) -> str:
    return f'{sum(values) / len(values):.1f}' if values else '-'


def render_layouts(layouts: Sequence[Layout], table_format: str = 'simple') -> str:
    """The table of a study: one row per layout, runs that did not converge included, data and hosts named."""
    rows = []
    for layout in layouts:
        runs, done = layout.runs, layout.converged
        epochs = [r.epochs_to_converge for r in done if r.epochs_to_converge is not None]
        times = [r.time_to_train_s for r in done if r.time_to_train_s is not None]
        rows.append([
            layout.name, _each([str(r.global_batch_size) for r in runs]), _each([f'{r.base_lr:g}' for r in runs
                                                                              if r.base_lr is not None]),
            f'{len(done)} / {len(runs)}', ', '.join(map(str, epochs)) or '-', _mean(epochs),
            ', '.join(f'{t:.1f}' for t in times) or '-', _mean(times)])
    head = ['nodes x ranks', 'global batch', 'base LR', 'converged / started', 'epochs to converge', 'mean',
            'time to train, s', 'mean']
    every = [r for layout in layouts for r in layout.runs]
    notes = [f'data: {_each([f"{r.dataset}" for r in every])}'
             + ('' if all(r.is_imagenet for r in every) else ' (not ImageNet)'),
             f'target: Top-1 {_each([f"{100 * r.target_accuracy:.2f} %" for r in every if r.target_accuracy])}',
             f'ran on: {_each([str(r.platform) for r in every])}']
    notes += [f'{r.path}: {r.status}' for r in every if r.status != 'converged']
    notes += [f'{r.path}: resumed {r.num_resumes} times' for r in every if r.num_resumes]
    return tabulate(rows, head, table_format, disable_numparse=True) + '\n\n' + '\n'.join(notes)
