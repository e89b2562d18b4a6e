"""Log lines: round trip and noise. Damaged and made-up logs cause neither a crash nor a false
success."""

import io
import logging
import os
import re
import string
import sys

import pytest
from helpers import HANG_LIMIT_S, ROOT, run
from hypothesis import example, given
from hypothesis import strategies as st
from invariants import check_report, check_run
from lines import mllog, run_lines, v05, v06
from mlperf_compliance import mlperf_log, tags
from mlperf_logging.mllog.mllog import MLLogger

from mlperf_rn50.mllog import events, keys
from mlperf_rn50.mllog.events import LogEvent, decode_events, encode_v06

NAMES = st.text(string.ascii_letters + string.digits + '_', min_size=1)
# A marker within a value would start a new line, which the official parsers cannot read either.
TEXTS = st.text().filter(lambda s: ':::' not in s)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | TEXTS
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
# Names of mllog's own parameters and of what the line contains besides.
_TAKEN = ('file', 'lineno', 'key', 'time_s', 'value')
METADATA = st.dictionaries(NAMES.filter(lambda k: k not in _TAKEN), VALUES, max_size=3)
KEYS = [
    value
    for module in (keys, events)
    for name, value in vars(module).items()
    if name.isupper() and isinstance(value, str)
] + ['opt_x']
LIKELY_VALUES = VALUES | st.sampled_from(
    ['success', 'resnet', 'lars', '4xbox', {'success': False}, {'epoch': 1, 'value': 0.5}]
    + [{'throughput': 100.0, 'learning_rate': 'x'}, float('nan'), float('inf')]
    + [0.76, 1, 2, 3, 64, 1281167, 50000]
)
LIKELY_KEYS = (
    'epoch_num first_epoch_num epoch_count status reason is_imagenet clock_s number_of_nodes '
    'number_of_ranks global_batch_size'
).split()
LIKELY_METADATA = st.dictionaries(st.sampled_from(LIKELY_KEYS), LIKELY_VALUES, max_size=3)
TIMES = st.floats(-1e5, 1e5)
LINES = (
    st.builds(
        lambda line, k, t, v, m: line(k, t, v, **m),
        st.sampled_from([mllog, v06]),
        st.sampled_from(KEYS),
        TIMES,
        LIKELY_VALUES,
        LIKELY_METADATA,
    )
    | st.builds(v05, st.sampled_from(tags.RESNET_TAGS), TIMES, LIKELY_VALUES)
    | st.text(max_size=20)
)
# Output of other programs before a log line; a marker in it would start a new event.
PREFIXES = st.text(max_size=20).filter(lambda s: ':' not in s and '\n' not in s)


def decode_line(line):
    """Return the last event of a line, or None; raise its decoding error."""
    decoded = [*decode_events(line)][-1:] or [None]
    if isinstance(decoded[0], ValueError):
        raise decoded[0]
    return decoded[0]


def logger_into(buffer) -> logging.Logger:
    logger = logging.getLogger('test_events')
    logger.handlers[:] = [logging.StreamHandler(buffer)]
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    return logger


@given(NAMES, VALUES, METADATA, st.integers(0, 2**41), PREFIXES)
def test_official_mllog_lines_and_v06_lines_round_trip(key, value, metadata, time_ms, prefix):
    buffer = io.StringIO()
    MLLogger(logger_into(buffer)).event(key, value, metadata, time_ms=time_ms)
    event = decode_line(prefix + buffer.getvalue())
    assert (event.key, event.value, event.time_s) == (key, value, time_ms / 1e3)
    assert {k: v for k, v in event.metadata.items() if k not in ('file', 'lineno')} == metadata
    assert event.line_format == 'MLLOG'
    event = LogEvent('MLL', key, time_ms / 1e3, value, metadata)
    assert decode_line(prefix + encode_v06(event)) == event


@given(st.sampled_from(tags.RESNET_TAGS), VALUES, PREFIXES)
def test_official_v05_lines_round_trip(tag, value, prefix):
    buffer = io.StringIO()
    saved, mlperf_log.LOGGER = mlperf_log.LOGGER, logger_into(buffer)
    try:
        mlperf_log.resnet_print(tag, value)
    finally:
        mlperf_log.LOGGER = saved
    event = decode_line(prefix + buffer.getvalue())
    assert (event.line_format, event.key, event.value) == ('MLPv0.5.0', tag, value)
    assert event.metadata['file'].endswith('test_events.py')


@given(st.sampled_from(['', ':::MLLOG ', ':::MLL ', ':::MLPv0.5.0 ']), st.text())
@example(':::MLLOG ', '[' * 100_000)
def test_noise_after_marker_yields_an_event_or_a_value_error(marker, noise):
    try:
        event = decode_line(marker + noise)
    except ValueError:
        return
    assert event is None or isinstance(event.key, str) and ':::ML' in marker + noise


@given(NAMES, VALUES, METADATA, st.data())
def test_torn_line_is_an_error(key, value, metadata, data):
    line = mllog(key, 0, value, **metadata)
    cut = data.draw(st.integers(len(':::MLLOG '), len(line) - 1))
    with pytest.raises(ValueError):
        decode_line(line[:cut])


@pytest.fixture(scope='module')
def path(tmp_path_factory):
    return tmp_path_factory.mktemp('log') / 'result_0.txt'


def write(path, lines):
    path.write_text('\n'.join(lines), errors='replace')
    return path


@given(lines=st.lists(LINES, max_size=30))
@example(lines=[mllog('lars_epsilon', 0, float('inf'))])
def test_made_up_log_keeps_invariants(path, lines):
    if check_run(write(path, lines)):
        check_report(path)


@given(data=st.data())
def test_damaged_log_never_becomes_a_success(path, data):
    """Lost, duplicate, moved or cut lines can hide epochs and the target but never invent them."""
    lines = run_lines((0.5, 0.6, 0.7), status='success')  # status success without reaching 75.9 %
    for _ in range(data.draw(st.integers(1, 6))):
        i, j = (data.draw(st.integers(0, len(lines) - 1)) for _ in (1, 2))
        match data.draw(st.sampled_from(['lose', 'double', 'move', 'cut', 'join'])):
            case 'lose':
                lines.pop(i)
            case 'double':
                lines.insert(j, lines[i])
            case 'move':
                lines.insert(j, lines.pop(i))
            case 'cut':
                lines[i] = lines[i][: data.draw(st.integers(0, len(lines[i])))]
            case 'join':
                lines[i] += lines[j]
    result = check_run(write(path, lines))
    assert result is None or result.status != 'converged' or result.division != 'closed'


@pytest.mark.parametrize('num_runs', [1000, pytest.param(15000, marks=pytest.mark.slow)])
def test_coverage_guided_fuzzer_finds_no_failure(tmp_path, num_runs):
    """Fuzz for a limited number of runs; tests/fuzz_reader.py can also run without a limit."""
    # Started through timeout, because the fuzzer includes the peak memory of the process from which
    # it was forked.
    done = run(
        [
            'timeout',
            HANG_LIMIT_S,
            sys.executable,
            ROOT / 'tests/fuzz_reader.py',
            f'-runs={num_runs}',
            '-seed=1',
            '-max_len=6000',
            f'-artifact_prefix={tmp_path}/',
            tmp_path,
            ROOT / 'tests/logs',
        ],
        env={**os.environ, 'TMPDIR': str(tmp_path)},  # the fuzzer ends the process at once
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    # it may add a run of an empty input
    assert int(re.search(r'Done (\d+) runs', done.stderr)[1]) >= num_runs
