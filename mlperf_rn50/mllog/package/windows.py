"""The five runs of a larger group that count: the window of consecutive runs whose score is the
median of all windows.

Source: MLPerf training policies, Scoring, since v1.1: runs are sorted by an objective criterion,
here the time of run_start; a window without a valid result counts as infinite; if the median
window is invalid, so is the entire result.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mlperf_rn50.mllog.logged_run import Run

WINDOWS_SINCE = 'v1.1'  # first round whose rules permit more than five runs


@dataclass(frozen=True, eq=False)
class Window:
    """Consecutive runs, and the score of their set."""

    runs: Sequence[Run]
    minutes: float  # infinite for a set without a valid result

    @property
    def text(self) -> str:
        score = 'no valid result' if math.isinf(self.minutes) else f'{self.minutes:.2f} min'
        return f'{self.runs[0].path.name} to {self.runs[-1].path.name}: {score}'


def split_windows(runs: Sequence[Run], size: int) -> list[Sequence[Run]]:
    """Return the windows of consecutive runs in order of their starts. A run without run_start
    failed before it, and has the time of its last line."""
    times_s = {r.path: r.last_s if r.start_s is None else r.start_s for r in runs}
    ordered = sorted(runs, key=lambda r: (times_s[r.path] or math.inf, r.path.name))
    return [ordered[k : k + size] for k in range(len(ordered) - size + 1)]


def median_window(windows: Sequence[Window]) -> Window:
    """Return the window with the median score, of an even number the slower one of the two in the
    middle."""
    return sorted(windows, key=lambda w: w.minutes)[len(windows) // 2]


def render_windows(windows: Sequence[Window], chosen: Window) -> list[str]:
    """Return the score of each window as text; the chosen one is marked."""
    return [
        f'runs {w.text}' + (' (the median, which counts)' if w is chosen else '') for w in windows
    ]
