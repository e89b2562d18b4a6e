"""Reading .jsonl files of unknown origin."""
import os

import msgspec
import pytest

from mlperf_rn50.files import MAX_LINE_BYTES
from mlperf_rn50.jsonl import decode, read_lines


class Step(msgspec.Struct):
    step: int
    loss: float | None = None


@pytest.mark.parametrize('content', ['{"step": "1"}', '{"step": 1, "loss": NaN}', '[1]', '', '{"step": 1',
                                     '[' * 100_000, b'\xff'])
def test_what_does_not_fit_is_none(content):
    assert decode(content, Step) is None


def test_lines_keep_their_numbers_and_a_torn_one_is_skipped(tmp_path):
    path = tmp_path / 'steps.jsonl'
    path.write_text('{"step": 1}\nnoise\n{"other": 2}\n{"step": 3, "loss": 0.5}\n{"step": 4}')
    assert list(read_lines(path, Step, b'"step"')) == [(1, Step(1)), (4, Step(3, 0.5))]
    path.write_text('x' * (2 * MAX_LINE_BYTES) + '{"step": 1}\n{"step": 2}\n')
    assert list(read_lines(path, Step)) == [(2, Step(2))]


def test_a_named_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / 'pipe')
    assert list(read_lines(tmp_path / 'pipe', Step)) == []
