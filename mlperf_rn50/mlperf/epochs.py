"""Epochs of logs that count from another number than their format: from 0 in later rounds, from 1 in v0.5."""
from typing import TypeVar

from mlperf_rn50.mlperf.collect import Found

T = TypeVar('T')


def renumber(found: Found) -> None:
    """Lets the epochs of a log start from 1, and its evaluations count what was trained before them."""
    shift = _training_shift(found)
    if not shift:
        return
    found.epochs, found.blocks = _shifted(found.epochs, shift), _shifted(found.blocks, shift)
    found.epoch_stops, found.stats = _shifted(found.epoch_stops, shift), _shifted(found.stats, shift)
    shift = _evaluation_shift(found)
    found.accuracies = _shifted(found.accuracies, shift)
    found.eval_starts, found.eval_stops = _shifted(found.eval_starts, shift), _shifted(found.eval_stops, shift)


def _shifted(where: dict[int, T], shift: int) -> dict[int, T]:
    return {epoch + shift: value for epoch, value in where.items()}


def _training_shift(found: Found) -> int:
    first = min([*found.epochs, *found.blocks], default=1)
    if first == 0:
        return 1
    # Where the line of the first epoch is lost, the clock runs for as long as one before the second.
    return -1 if first == 2 and found.format == 'MLPv0.5.0' and not found.resumes and not _is_first_lost(found) else 0


def _is_first_lost(found: Found) -> bool:
    start_s = found.clock_s(found.epochs[2][0]) if 2 in found.epochs else None
    next_s = found.clock_s(found.epochs[3][0]) if 3 in found.epochs else None
    return start_s is None or next_s is None or start_s >= next_s - start_s


def _evaluation_shift(found: Found) -> int:
    """By how much the first evaluation names another epoch than the last one that was begun before it."""
    if not found.accuracies:
        return 0
    epoch, (mark, _) = min(found.accuracies.items())
    begun = [first + count - 1 for where in (found.epochs, found.blocks) for first, (start, count) in where.items()
             if start.line < mark.line]
    shift = max(begun, default=epoch) - epoch
    return shift if abs(shift) == 1 else 0
