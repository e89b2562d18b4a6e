"""Which host failed, and why: a line in the run folder for each rank or host, counted when hosts are chosen again."""
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlperf_rn50.files import no_link
from mlperf_rn50.jsonl import read_lines

_FILE = 'failures.jsonl'


@dataclass(frozen=True)
class Failure:
    """A rank, or a host with rank None, that failed; job: the start that it belongs to, MLPERF_RN50_JOB."""

    job: str
    host: str
    cause: str
    rank: int | None = None


def append_line(path: Path, content: Mapping[str, Any]) -> None:
    """Append a JSON line to a file of a run folder; without room or folder it is lost, and the run reports why."""
    with suppress(OSError), open(path, 'a', opener=no_link) as f:
        f.write(json.dumps(content) + '\n')


def note_failure(folder: Path, failure: Failure) -> None:
    """Add a failure to the list of a run folder."""
    append_line(folder / _FILE, vars(failure))


def read_failures(folder: Path) -> list[Failure]:
    """Return all failures of a run folder, the oldest first."""
    return [failure for _, failure in read_lines(folder / _FILE, Failure)]
