"""Failures of hosts and ranks: lines in the run folder that a launcher counts to choose hosts for a restart."""
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
    """Failure of a rank, or of a host if rank is None; job: MLPERF_RN50_JOB, which identifies a start of all ranks.

    is_outside: whether the cause is outside the program, such as a lost host or a kill; launch/guard.sh writes these.
    """

    job: str
    host: str
    cause: str
    rank: int | None = None
    is_outside: bool = False


def append_line(path: Path, content: Mapping[str, Any]) -> None:
    """Append a JSON line to a file of a run folder; ignore errors, which the run reports elsewhere."""
    with suppress(OSError), open(path, 'a', opener=no_link) as f:
        f.write(json.dumps(content) + '\n')


def note_failure(folder: Path, failure: Failure) -> None:
    append_line(folder / _FILE, vars(failure))


def read_failures(folder: Path) -> list[Failure]:
    return [failure for _, failure in read_lines(folder / _FILE, Failure)]
