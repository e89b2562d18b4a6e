"""All that a run folder has about a run: its log, metrics and configuration. The files are
untrusted."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TypeVar

import msgspec

from mlperf_rn50.config import Config, check_values
from mlperf_rn50.config_file import load_tree, override
from mlperf_rn50.errors import ConfigError, UserError
from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.mllog.read.reader import read_run
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.runfolder.records import (
    LossScaleRecord,
    MetricsRecord,
    ResumedRecord,
    TrainRecord,
    read_all_records,
)

_MAX_RECORDS = 200_000
T = TypeVar('T')


@dataclass(frozen=True)
class RunData:
    """A run with its records; what is missing or unreadable is None or empty."""

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

    def preserved(self) -> 'RunData':
        """Return the run without the records of training that a resume discarded."""
        kept: list[MetricsRecord] = []
        last_step, last_epoch = math.inf, math.inf
        for record in reversed(self.records):
            if isinstance(record, ResumedRecord):
                last_step = min(last_step, record.step)
                if record.epoch is not None:
                    last_epoch = min(last_epoch, record.epoch + 1e-6)
            elif isinstance(record, LossScaleRecord):
                if record.step > last_step:
                    continue
            elif getattr(record, 'epoch', 0) > last_epoch:
                continue
            kept.append(record)
        return replace(self, records=kept[::-1])


def load_run(folder: RunFolder) -> RunData:
    """Read the log, the records and the configuration of a run; what is unreadable is missing."""
    log = None
    records = _read_records(folder.metrics)
    with suppress(UserError):
        log = read_run(folder.result, is_own=True)
    return RunData(folder, log, records, load_run_config(folder, records))


def _read_records(metrics: Path) -> tuple[MetricsRecord, ...]:
    """Return the records of a run; of too many steps, every second, fourth and so on."""
    records: list[MetricsRecord] = []
    period, num_steps = 1, 0
    for record in read_all_records(metrics):
        if isinstance(record, TrainRecord):
            num_steps += 1
            if num_steps % period:
                continue
        records.append(record)
        if len(records) < _MAX_RECORDS:
            continue
        period *= 2
        numbers = count()
        records = [r for r in records if not isinstance(r, TrainRecord) or next(numbers) % 2]
        if len(records) > _MAX_RECORDS * 3 // 4:  # of other kinds
            break
    return tuple(records)


def load_run_config(folder: RunFolder, records: Sequence[MetricsRecord]) -> Config | None:
    """Return the configuration of a run with the changes of its resumes; None if it is
    unreadable."""
    with suppress(ConfigError, msgspec.MsgspecError, AttributeError, TypeError):
        tree = load_tree(folder.config)
        for record in records:
            if isinstance(record, ResumedRecord):
                override(tree, {key: now for key, (_, now) in record.changed.items()})
        config = msgspec.convert(tree, Config)
        check_values(config)
        return config
    return None
