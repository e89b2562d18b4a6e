"""Records that a run or its launcher writes to a run folder as JSON lines."""
from dataclasses import dataclass
from pathlib import Path

from mlperf_rn50.runfolder.jsonl import append, read_lines

_FAILURES = 'failures.jsonl'


@dataclass(frozen=True)
class Failure:
    """Failure of a rank, or of a host if rank is None; job: MLPERF_RN50_JOB, which identifies a start of all ranks.

    is_outside: whether the cause is outside the program, such as a lost host or a kill; launch/guard.sh writes these.
    """

    job: str
    host: str
    cause: str
    rank: int | None = None
    is_outside: bool = False


def note_failure(folder: Path, failure: Failure) -> None:
    append(folder / _FAILURES, failure)


def read_failures(folder: Path) -> list[Failure]:
    """Return the failures in a run folder, which a launcher counts to choose hosts for a restart."""
    return [failure for _, failure in read_lines(folder / _FAILURES, Failure)]
