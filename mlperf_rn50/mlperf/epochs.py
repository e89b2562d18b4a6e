"""Epochs of later logs that count from 0: TensorFlow's of v0.7 to v1.0, MosaicML's of v2.0."""
from typing import TypeVar

from mlperf_rn50.mlperf.collect import Found, Mark

T = TypeVar('T')


def renumber(found: Found) -> None:
    """Make the epochs of a log start from 1; its evaluations, too, where none is of an epoch that is not yet begun."""
    if min([*found.epochs, *found.blocks], default=1) != 0:
        return
    marks = {epoch: found.eval_starts.get(epoch, mark) for epoch, (mark, _) in found.accuracies.items()}
    is_from_0 = all(epoch <= _last_begun(found, mark) for epoch, mark in marks.items())
    found.epochs, found.blocks = _shifted(found.epochs), _shifted(found.blocks)
    found.epoch_stops, found.stats = _shifted(found.epoch_stops), _shifted(found.stats)
    if is_from_0:
        found.accuracies = _shifted(found.accuracies)
        found.eval_starts, found.eval_stops = _shifted(found.eval_starts), _shifted(found.eval_stops)


def _shifted(where: dict[int, T]) -> dict[int, T]:
    return {epoch + 1: value for epoch, value in where.items()}


def _last_begun(found: Found, mark: Mark) -> int:
    """Return the last epoch, as the log counts, that begins before a mark."""
    return max((first + count - 1 for first, (start, count) in (found.epochs or found.blocks).items()
                if start.line < mark.line), default=0)
