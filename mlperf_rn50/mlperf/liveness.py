"""Is a log without an end still being written?"""
import re
from pathlib import Path

from mlperf_rn50.locks import is_locked

# A log that was not written for so long is that of a run that died, unless its own pace is slower.
_QUIET_S = 600.0
_QUIET_GAPS = 3
# However slow a run is, something happens in a day; and a copy of an old log is as old as its last event.
_DAY_S = 86400.0


def age_s(log: Path, now_s: float) -> float | None:
    """Seconds since a log was written; None where nobody can tell."""
    try:
        return max(now_s - log.stat().st_mtime, 0.0)
    except OSError:
        return None


def is_written(log: Path, age: float | None, since_event_s: float, longest_gap_s: float) -> bool:
    """Return whether a log without run_stop, written so many seconds ago, belongs to a run that is not over."""
    lock = re.fullmatch(r'result_(\d+)(?:_v0\.6)?', log.stem)
    if lock and (is_held := is_locked(log.with_name(f'.run_{lock[1]}.lock'))) is not None:
        return is_held
    limit_s = max(_QUIET_S, _QUIET_GAPS * min(longest_gap_s, _DAY_S))
    return age is not None and age < limit_s and since_event_s < max(limit_s, _DAY_S)
