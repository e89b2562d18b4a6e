"""A run with the records that explain its time and accuracy. The files are untrusted."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

import msgspec

from mlperf_rn50.config import Config, check_values
from mlperf_rn50.config_file import load_tree, override
from mlperf_rn50.errors import ConfigError, UserError
from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.mllog.read.reader import read_run
from mlperf_rn50.runfolder.jsonl import read_lines
from mlperf_rn50.runfolder.names import RunFolder, run_number, run_numbers
from mlperf_rn50.runfolder.records import MetricsRecord, ResumedRecord

_MAX_RECORDS, _MAX_CONFIG_BYTES = 200_000, 1 << 14
T = TypeVar('T')


@dataclass(frozen=True)
class WhyRun:
    """A run to explain; what is missing or unreadable is None or empty."""

    folder: RunFolder
    log: Run | None = None
    # lines of metrics.jsonl in their order; a resume may repeat epochs
    records: Sequence[MetricsRecord] = ()
    config: Config | None = None  # without keys of other versions

    def all(self, kind: type[T]) -> list[T]:
        """Return the records of a kind in their order."""
        return [r for r in self.records if isinstance(r, kind)]

    def last(self, kind: type[T]) -> T | None:
        return next(iter(self.all(kind)[::-1]), None)


def run_folder_at(path: Path) -> RunFolder:
    """Return the newest run of a folder, or the run of a given log. Raise UserError if there is
    none."""
    if (number := run_number(path.name)) is not None:
        return RunFolder(path.parent, number)
    if not path.is_dir() or not (numbers := run_numbers(path)):
        raise UserError(f'{path}: got no run, expected a run folder, or result_<k>.txt in one')
    return RunFolder(path, max(numbers))


def load_run(folder: RunFolder) -> WhyRun:
    """Read the log, the records and the configuration of a run; what is unreadable is missing."""
    log, config = None, None
    lines: Iterator[tuple[int, MetricsRecord]] = read_lines(folder.metrics, MetricsRecord)  # type: ignore[arg-type]
    records = tuple(record for _, record in islice(lines, _MAX_RECORDS))
    with suppress(UserError):
        log = read_run(folder.result)
    with suppress(ConfigError, msgspec.MsgspecError, AttributeError, TypeError):
        tree = load_tree(folder.config, _MAX_CONFIG_BYTES)
        for record in records:
            if isinstance(record, ResumedRecord):
                override(tree, {key: now for key, (_, now) in record.changed.items()})
        loaded = msgspec.convert(tree, Config)
        check_values(loaded)
        config = loaded
    return WhyRun(folder, log, records, config)
