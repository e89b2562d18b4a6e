"""Log lines: what is written is read back, and noise is never an event."""
import io
import json
import logging
import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mlperf_compliance import mlperf_log as v05
from mlperf_compliance import tags
from mlperf_logging.mllog.mllog import MLLogger

from mlperf_rn50.mlperf.events import Event, decode_events, encode_v06

KEYS = st.text(string.ascii_letters + string.digits + '_', min_size=1)
# Within a value, a marker would start another line: the official parsers cannot read that either.
TEXTS = st.text().filter(lambda s: ':::' not in s)
VALUES = st.recursive(st.none() | st.booleans() | st.integers(-2**53, 2**53) | TEXTS
                      | st.floats(allow_nan=False, allow_infinity=False),
                      lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
                      max_leaves=8)
METADATA = st.dictionaries(KEYS.filter(lambda k: k not in ('file', 'lineno')), VALUES, max_size=3)
# What other programs leave on the line before ours; a log line itself would be another event.
PREFIXES = st.text(max_size=20).filter(lambda s: ':' not in s and '\n' not in s)


def decode_line(line):
    """The last event of a line, None without one; raises its error."""
    found = [*decode_events(line)][-1:] or [None]
    if isinstance(found[0], ValueError):
        raise found[0]
    return found[0]


def logger_into(buffer) -> logging.Logger:
    logger = logging.getLogger('test_events')
    logger.handlers[:] = [logging.StreamHandler(buffer)]
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    return logger


@given(KEYS, VALUES, METADATA, st.integers(0, 2**41), PREFIXES)
def test_official_mllog_lines_are_read_back(key, value, metadata, time_ms, prefix):
    buffer = io.StringIO()
    MLLogger(logger_into(buffer)).event(key, value, metadata, time_ms=time_ms)
    event = decode_line(prefix + buffer.getvalue())
    assert (event.key, event.value, event.time_s) == (key, value, time_ms / 1e3)
    assert {k: v for k, v in event.metadata.items() if k not in ('file', 'lineno')} == metadata
    assert event.line_format == 'MLLOG'


@given(st.sampled_from(tags.RESNET_TAGS), VALUES, PREFIXES)
def test_official_v05_lines_are_read_back(tag, value, prefix):
    buffer = io.StringIO()
    saved, v05.LOGGER = v05.LOGGER, logger_into(buffer)
    try:
        v05.resnet_print(tag, value)
    finally:
        v05.LOGGER = saved
    event = decode_line(prefix + buffer.getvalue())
    assert (event.line_format, event.key, event.value) == ('MLPv0.5.0', tag, value)
    assert event.metadata['file'].endswith('test_events.py')


@given(KEYS, VALUES, METADATA, st.integers(0, 2**41), PREFIXES)
def test_v06_lines_are_read_back(key, value, metadata, time_ms, prefix):
    event = Event('MLL', key, time_ms / 1e3, value, metadata)
    assert decode_line(prefix + encode_v06(event)) == event


@given(st.text())
def test_text_without_a_marker_is_no_event(text):
    if ':::ML' not in text:
        assert decode_line(text) is None


@given(st.sampled_from([':::MLLOG ', ':::MLL ', ':::MLPv0.5.0 ']), st.text())
@example(':::MLLOG ', '[' * 100_000)
def test_noise_after_a_marker_is_an_event_or_a_value_error(marker, noise):
    try:
        event = decode_line(marker + noise)
    except ValueError:
        return
    assert event is None or isinstance(event.key, str)


@given(KEYS, VALUES, METADATA, st.data())
def test_a_torn_line_is_an_error_and_never_another_event(key, value, metadata, data):
    line = ':::MLLOG ' + json.dumps({'namespace': '', 'time_ms': 1, 'event_type': 'POINT_IN_TIME', 'key': key,
                                     'value': value, 'metadata': metadata})
    cut = data.draw(st.integers(len(':::MLLOG '), len(line) - 1))
    with pytest.raises(ValueError):
        decode_line(line[:cut])
