"""Is a log without an end still being written?"""
import os
import platform
import re
from pathlib import Path

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
    if (held := _is_locked(log)) is not None:
        return held
    limit_s = max(_QUIET_S, _QUIET_GAPS * min(longest_gap_s, _DAY_S))
    return age is not None and age < limit_s and since_event_s < max(limit_s, _DAY_S)


def _is_locked(log: Path) -> bool | None:
    """Whether a program of ours on this machine holds the lock of the run; None where there is none to ask."""
    m = re.fullmatch(r'result_(\d+)(?:_v0\.6)?', log.stem)
    if not m:
        return None
    try:
        import fcntl  # not on every laptop
        with open(os.open(log.with_name(f'.run_{m[1]}.lock'), os.O_RDONLY | os.O_NONBLOCK), 'rb') as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            # Locks of another node are not seen on every file system.
            holder = lock.read(200).decode('utf-8', 'replace').strip()
            return False if holder.endswith(f' on {platform.node()}') else None
    except (ImportError, OSError):
        return None
