"""Which host failed, and why: a line in the run folder for each rank or host, counted when hosts are chosen again."""
import json
from dataclasses import dataclass
from pathlib import Path

from mlperf_rn50.files import no_link

FAILURES = 'failures.jsonl'


@dataclass(frozen=True)
class Failure:
    """One rank or host that failed.

    Args:
        job: the start of the ranks that it belongs to, MLPERF_RN50_JOB.
        rank: that failed, None for a host.
    """

    job: str
    host: str
    cause: str
    rank: int | None = None


def note_failure(folder: Path, failure: Failure) -> None:
    """Adds a failure to the list of a run folder; one that cannot be written has been said all the same."""
    try:
        with open(folder / FAILURES, 'a', opener=no_link) as f:
            f.write(json.dumps(vars(failure)) + '\n')
    except OSError:
        pass
