"""From a log file of any round to a Run: v0.5 (:::MLPv0.5.0), v0.6 (:::MLL), v0.7 to v4.0 (:::MLLOG).

A log is not trusted. It is read as a stream; what it says is taken only where it has the right type and range;
what is odd about it becomes a warning with its line.
"""
import time
from collections.abc import Iterator
from pathlib import Path

from mlperf_rn50.errors import UserError
from mlperf_rn50.files import numbered_lines
from mlperf_rn50.mllog import keys
from mlperf_rn50.mllog.events import LineFormat, LogEvent, decode_events
from mlperf_rn50.mllog.read.description import find_description
from mlperf_rn50.mllog.read.raw_log import RawLog
from mlperf_rn50.mllog.read.resolve import RunResolver
from mlperf_rn50.mllog.run import Notes, Run


def read_events(path: Path) -> Iterator[tuple[int, LogEvent | ValueError]]:
    """The events of a file by line, or the error of a torn one; raise UserError where the file cannot be read."""
    try:
        for line_number, line in numbered_lines(path):
            if b':::ML' in line:
                for event in decode_events(line.decode('utf-8', 'replace')):
                    yield line_number, event
    except OSError as e:
        raise UserError(f'{path}: cannot read the log: {e.strerror}') from e


class OtherBenchmark(UserError):
    """A log, but of another benchmark than ResNet."""


def _check_benchmark(path: Path, event: LogEvent) -> None:
    if event.line_format == 'MLPv0.5.0':
        benchmark = event.metadata['benchmark']
    else:
        benchmark = event.value if event.key == keys.SUBMISSION_BENCHMARK else keys.RESNET
    if benchmark != keys.RESNET:
        raise OtherBenchmark(f'{path}: a log of the benchmark {benchmark!r:.80}, expected resnet')


def _collect(path: Path) -> tuple[dict[LineFormat, RawLog], Notes, int]:
    """What the lines of each format say, what is wrong with others, and the last line of the log."""
    found: dict[LineFormat, RawLog] = {}
    torn = Notes()
    last_line = 0
    for last_line, event in read_events(path):
        if isinstance(event, ValueError):
            torn.warn(last_line, f'torn line, left out: {str(event)[:200]}', 'torn line, left out')
            continue
        _check_benchmark(path, event)
        if (half := found.get(event.line_format)) is None:
            half = found[event.line_format] = RawLog(event.line_format)
        try:
            half.add(last_line, event)
        except ValueError as e:
            raise UserError(f'{path}: {e}') from e
    return found, torn, last_line


def _is_utf16(path: Path) -> bool:
    """Whether a file starts with the mark of UTF-16, as some shells write what they redirect."""
    with open(path, 'rb') as f:
        return f.read(2) in (b'\xff\xfe', b'\xfe\xff')


def read_run(path: Path, now_s: float | None = None) -> Run:
    """The run of a log file; raise UserError where it cannot be read, or is no log of one ResNet run.

    Args:
        now_s: seconds since 1970, by which a log without run_stop is still being written; the present where None.
    """
    found, torn, last_line = _collect(path)
    if not found:
        raise UserError(f'{path}: no MLPerf log line in it; expected lines with :::MLLOG, :::MLL or :::MLPv0.5.0'
                        + (', not UTF-16: write it as UTF-8' if _is_utf16(path) else ''))
    # Our own logs hold two formats of the same run: the later one says more.
    order: tuple[LineFormat, ...] = ('MLLOG', 'MLL', 'MLPv0.5.0')
    best = max((found[f] for f in order if f in found), key=lambda half: keys.RUN_START in half.single)
    best.notes.include(torn)
    description, trouble = find_description(path)
    if trouble:
        best.notes.warn(None, trouble)
    return RunResolver(path, best, description, last_line, time.time() if now_s is None else now_s).run()
