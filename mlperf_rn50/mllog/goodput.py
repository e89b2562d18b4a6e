"""Parts of the elapsed time of a run, and its goodput: the share that made preserved progress.

Source: the definition of goodput and badput in the README of Google's ml-goodput-measurement.
Evaluations of the result count as progress here, because time to train includes them. Pure
functions, except read_goodput. All times are seconds since run_start.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

from mlperf_rn50.mllog.elapsed import SKEW_S, Resume, until
from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.runfolder.names import run_of
from mlperf_rn50.runfolder.records import (
    EvalRecord,
    MetricsRecord,
    PartRecord,
    TrainRecord,
    read_all_records,
    read_records,
)

# Names of the parts, and their texts.
PARTS = {
    'training': 'training',
    'evaluation': 'evaluation',
    'start_up': 'start-up',
    'waiting': 'waiting for hosts',
    'paused': 'paused by the user',
    'reading': 'reading before the first step',
    'checkpoints': 'checkpoints',
    'steps_repeated': 'steps computed again',
    'evaluation_repeated': 'evaluation repeated',
    'stalled': 'stalled until detection',
}
# A moment belongs to the first of these parts of which it has all spans. down: before run_start,
# and from a fault or requested stop to the resume. lost: from a checkpoint to the fault or stop
# after which the run resumed from it. The other spans are those of a PartRecord.
_RULES = (
    ('start_up', {'down', 'start_up'}),
    ('paused', {'down', 'pause'}),
    ('waiting', {'down'}),
    ('checkpoints', {'checkpoint'}),
    ('evaluation_repeated', {'lost', 'evaluation'}),
    ('stalled', {'lost', 'stall'}),
    ('steps_repeated', {'lost'}),
    ('evaluation', {'evaluation'}),
    ('reading', {'reading'}),
    ('training', set[str]()),
)
_PROGRESS = 'training', 'evaluation'
_LEAST_S = 0.05  # of a part that is shown as text
MAX_RECORDS = 50_000  # of one run; it has no goodput if there are more
# without a recorded end; a resume decides what is preserved
_UNKNOWN = 'failed', 'unreadable'
Span = tuple[float, float]


@dataclass(frozen=True)
class Goodput:
    """Seconds of a run by part, which add up to the time from the start of its program to its end,
    or to its last sign of life."""

    parts: Mapping[str, float]

    @property
    def elapsed_s(self) -> float:
        return sum(self.parts.values())

    @property
    def share(self) -> float:
        """Goodput: the share of the elapsed time that made preserved progress."""
        return sum(self.parts[name] for name in _PROGRESS) / self.elapsed_s

    @property
    def text(self) -> str:
        known = {PARTS[name]: s for name, s in self.parts.items() if s >= _LEAST_S}
        listed = ', '.join(f'{name} {seconds:.1f} s' for name, seconds in known.items())
        return f'{100 * self.share:.1f} % of {self.elapsed_s:.1f} s ({listed})'


def split_time(spans: Mapping[str, Sequence[Span]], whole: Span) -> dict[str, float]:
    """Return the seconds of each part of a time, given spans by the names of _RULES."""
    start_s, end_s = whole
    marks = [(max(t, start_s), step, name) for name, s in spans.items() for t, step in _ends(s)]
    inside = sorted(mark for mark in marks if mark[0] < end_s)
    parts = dict.fromkeys(PARTS, 0.0)
    depth = Counter[str]()
    for (now_s, step, name), (next_s, *_) in pairwise([(start_s, 0, ''), *inside, (end_s, 0, '')]):
        depth[name] += step
        active = {n for n, count in depth.items() if count > 0}
        parts[next(part for part, needed in _RULES if needed <= active)] += next_s - now_s
    return parts


def _ends(spans: Iterable[Span]) -> Iterable[tuple[float, int]]:
    """Yield start and end of each span, with the change of the number of spans there."""
    for start_s, end_s in spans:
        if start_s < end_s:
            yield start_s, 1
            yield end_s, -1


def find_goodput(
    resumes: Sequence[Resume], records: Sequence[PartRecord], end_s: float | None
) -> Goodput | None:
    """Return the parts of a run until end_s, or None if not all were recorded, or if the time of a
    checkpoint is unknown."""
    first = records[0] if records else PartRecord('', 0.0, 0.0)
    num_starts = sum(r.name == 'start_up' for r in records)
    is_recorded = first.name == 'start_up' and first.time_s <= SKEW_S and num_starts > len(resumes)
    if not is_recorded or end_s is None or any(r.checkpoint_s is None for r in resumes):
        return None
    resumes = until(resumes, end_s)
    spans = {r.name: list[Span]() for r in records}
    for record in records:
        spans[record.name].append((record.time_s - record.seconds, record.time_s))
    down = [(r.stopped_s, r.resumed_s) for r in resumes]
    spans['down'] = [(-math.inf, 0.0), *down]
    spans['pause'] = [span for span, r in zip(down, resumes) if r.is_pause]
    spans['lost'] = [(r.checkpoint_s or 0.0, r.stopped_s) for r in resumes]
    start_s = min(first.time_s - first.seconds, 0.0)
    parts = split_time(spans, (start_s, end_s))
    return Goodput(parts) if sum(parts.values()) > 0 else None


def last_seen_s(records: Iterable[MetricsRecord]) -> float:
    """Return the time of the last record of progress, which may be later than the last line of the
    log."""
    times = (r.time_s for r in records if isinstance(r, TrainRecord | EvalRecord | PartRecord))
    return max(filter(None, times), default=0.0)


def goodput_of(run: Run, records: Sequence[PartRecord], seen_s: float) -> Goodput | None:
    """Return the goodput of a run up to its end or its last sign of life, or None if it is unknown.

    seen_s: result of last_seen_s.
    """
    num_evaluations = sum(r.name == 'evaluation' for r in records)
    is_complete = len(run.evaluations) <= num_evaluations and len(records) < MAX_RECORDS
    if run.status in _UNKNOWN or not is_complete:
        return None
    end_s = run.time_to_train_s
    if end_s is None:
        end_s = max(run.seen_s or 0.0, seen_s)
    return find_goodput(run.resumes, records, end_s)


def render_goodput(goodput: Goodput | None) -> dict[str, Any]:
    """Return the keys of a JSON object for a goodput; None if it is unknown."""
    if goodput is None:
        return {'goodput': None, 'goodput_parts_s': None}
    parts = {name: round(seconds, 3) for name, seconds in goodput.parts.items()}
    return {'goodput': goodput.share, 'goodput_parts_s': parts}


def read_goodput(run: Run) -> Goodput | None:
    """Return the goodput of a run, with the records beside its log."""
    metrics = run_of(run.path).metrics
    records = [record for _, record in islice(read_records(metrics, PartRecord), MAX_RECORDS)]
    seen_s = 0.0
    if run.time_to_train_s is None:
        seen_s = last_seen_s(read_all_records(metrics))
    return goodput_of(run, records, seen_s)
