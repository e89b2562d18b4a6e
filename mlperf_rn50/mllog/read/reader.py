"""Conversion of log files of v0.5 (:::MLPv0.5.0), v0.6 (:::MLL) and v0.7 to v4.0 (:::MLLOG) to
Runs.

A log is not trusted. It is read as a stream, a value is used only if its type and range are valid,
and anything inconsistent becomes a finding with a line number.
"""

import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from mlperf_rn50.errors import UserError
from mlperf_rn50.files import numbered_lines, open_regular, walk
from mlperf_rn50.mllog import events, keys
from mlperf_rn50.mllog.events import LineFormat, LogEvent, decode_events
from mlperf_rn50.mllog.findings import Findings
from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.mllog.read.raw_log import RawLog
from mlperf_rn50.mllog.read.resolve import RunResolver
from mlperf_rn50.text import printable

_FORMS = {  # by the first bytes of a file
    rb'\xff\xfe|\xfe\xff': 'UTF-16; convert it to UTF-8',  # as written by some shells
    rb'\x1f\x8b': 'packed with gzip; unpack it',
    rb'\xfd7zXZ': 'packed with xz; unpack it',
    rb'\(\xb5/\xfd': 'packed with zstd; unpack it',
    rb'BZh\d': 'packed with bzip2; unpack it',
    rb'PK\x03\x04': 'packed with zip; unpack it',
    rb'7z\xbc\xaf': 'packed with 7-Zip; unpack it',
    rb'(?s).{257}ustar': 'packed with tar; unpack it',
}


def _check_form(path: Path) -> None:
    """Raise UserError for a file that has to be converted first; ignore one that cannot be read."""
    with suppress(OSError), open_regular(path) as f:
        head = f.read(512)
        for magic, form in _FORMS.items():
            if re.match(magic, head):
                raise UserError(f'{path}: the file is {form}')


def read_events(path: Path) -> Iterator[tuple[int, LogEvent | ValueError]]:
    """Yield (line number, event, or ValueError if damaged) of a file. Raise UserError if the file
    is unreadable."""
    try:
        for line_number, line in numbered_lines(path):
            if b':::ML' in line:
                for event in decode_events(line.decode('utf-8', 'replace')):
                    if isinstance(event, LogEvent):
                        event.line = line_number
                    yield line_number, event
    except OSError as e:
        raise UserError(f'{path}: cannot read the log: {e.strerror}') from e


def find_logs(path: Path, pattern: str) -> tuple[list[Path], list[OSError]]:
    """Return the files and folders in or below a folder with matching names, and the errors of
    unreadable folders."""
    errors: list[OSError] = []
    logs = [
        Path(folder, name)
        for folder, folders, names in walk(path, errors.append)
        for name in (*folders, *names)
        if re.fullmatch(pattern, name)
    ]
    return sorted(logs, key=lambda p: (p.parent, len(p.name), p.name)), errors


def no_logs(folder: Path) -> str:
    """Return the message for a folder without logs, with a hint if it has files of other names that
    may be logs."""
    others = Counter(
        p.with_name(f'*{p.suffix}')
        for p in find_logs(folder, r'.*\.(log|out|txt|gz|xz|zst|bz2)')[0]
    )
    hint = ''
    for p, _ in others.most_common(1):
        hint = f'; files of other names are read if they are given, such as {p}'
        if p.suffix not in ('.log', '.out', '.txt'):
            hint += ', unpacked'
    return f'contains no result_<k>.txt, nor do its subfolders{hint}'


# OtherBenchmark.benchmark of programs that train nothing
NOT_TRAINING = 'MLPerf Inference', 'no training'


class OtherBenchmark(UserError):
    """The log is of a benchmark other than ResNet, or of a program that trains nothing."""

    def __init__(self, text: str, benchmark: str = ''):
        super().__init__(text, benchmark)
        self.benchmark = benchmark

    def __str__(self) -> str:
        return str(self.args[0])


class _TornLines:
    """Lines that cannot be decoded, and what they may have contained."""

    def __init__(self) -> None:
        self.findings = Findings()
        self.resumes: list[LogEvent] = []
        self.first = ''  # the first line, with the reason
        self.quoted = 0  # the first line that is JSON within JSON

    def add(self, line: int, error: ValueError) -> None:
        reason, text = error.args
        self.first = self.first or f'line {line}: {reason[:200]}'
        if not self.quoted and re.match(r':::ML.*?\{\s*\\', text):
            self.quoted = line
        # time and status depend on each such line
        vital = re.search(r'run_st\w*|run_res\w*|eval_acc\w*', text)
        if vital and vital[0] == events.RUN_RESUMED:
            self.resumes.append(LogEvent('MLLOG', events.RUN_RESUMED, 0.0, line=line))
        kind = 'event_torn' if vital else 'line_torn'
        self.findings.flag(kind, line, reason, vital and vital[0][:40])


def _check_benchmark(path: Path, event: LogEvent) -> None:
    """Raise OtherBenchmark for an event of another benchmark."""
    if event.key == 'loadgen_version':
        raise OtherBenchmark(
            f'{path}: got a log of MLPerf Inference (LoadGen), expected one of MLPerf Training',
            NOT_TRAINING[0],
        )
    benchmark = event.value if event.key == keys.SUBMISSION_BENCHMARK else keys.RESNET
    if event.line_format == 'MLPv0.5.0':
        benchmark = event.metadata['benchmark']
    if benchmark != keys.RESNET:
        raise OtherBenchmark(
            f'{path}: got a log of the benchmark {benchmark!r:.80}, expected resnet',
            printable(str(benchmark)[:80]),
        )


def _check_logs(path: Path, logs: dict[LineFormat, RawLog], torn: _TornLines) -> None:
    """Raise UserError for a file without a log of a training run."""
    if torn.quoted and not logs.keys() & {'MLLOG', 'MLL'}:
        raise UserError(
            f'{path}: line {torn.quoted} is JSON within JSON, as in a notebook or the log of a '
            'container, expected the lines of a log; save the text of the output'
        )
    if not logs:
        found = 'contains no MLPerf log line'
        if torn.first:
            found = f'no MLPerf log line can be decoded ({torn.first})'
        raise UserError(f'{path}: {found}; expected lines with :::MLLOG, :::MLL or :::MLPv0.5.0')
    if not any(log.is_training for log in logs.values()):
        raise OtherBenchmark(
            f'{path}: got a log without lines of a training run, such as run_start or '
            'eval_accuracy, expected one of MLPerf Training',
            NOT_TRAINING[1],
        )


def _has_begun(log: RawLog, num_formats: int) -> bool:
    """Return whether the training of a log has begun. The clock of v0.5 starts before the
    initialisation, when another format still lacks run_start."""
    is_early = log.is_v05 and num_formats > 1 and not (log.epochs or log.accuracies)
    return keys.RUN_START in log.single and not is_early


def read_run(path: Path, now_s: float | None = None, is_own: bool = False) -> Run:
    """Return the run in a log at now_s since 1970 (None: now). Raise UserError unless the log is of
    one run, of ResNet or, with is_own, of any network that this program trains."""
    _check_form(path)
    logs: dict[LineFormat, RawLog] = {}
    torn, last_line = _TornLines(), 0
    for last_line, event in read_events(path):
        if isinstance(event, ValueError):
            torn.add(last_line, event)
            continue
        if not is_own:
            _check_benchmark(path, event)
        if event.line_format not in logs:
            logs[event.line_format] = RawLog(event.line_format)
        try:
            logs[event.line_format].add(event)
        except ValueError as e:
            raise UserError(f'{path}: {e}') from e
    _check_logs(path, logs, torn)

    # Logs of this program contain the same run in two formats; the newer format contains more.
    order: tuple[LineFormat, ...] = ('MLLOG', 'MLL', 'MLPv0.5.0')
    best = max((logs[f] for f in order if f in logs), key=lambda log: _has_begun(log, len(logs)))
    best.findings.include(torn.findings)
    # A resume may be logged in one format only, or on a torn line.
    best.resumed = max((torn.resumes, *(log.resumed for log in logs.values())), key=len)
    now_s = time.time() if now_s is None else now_s
    return RunResolver(path, best, last_line, now_s).run()
