"""Colour: on a terminal, where NO_COLOR does not forbid it, and nowhere else."""
import io
import re

import pytest
from helpers import call
from lines import write_set

from mlperf_rn50.cli._colour import has_colour, paint, paint_status, paint_statuses


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ('NO_COLOR', 'FORCE_COLOR'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('TERM', 'xterm')


@pytest.mark.parametrize('stream, variables, expected', [
    (Terminal(), {}, True), (io.StringIO(), {}, False), (Terminal(), {'NO_COLOR': '1'}, False),
    (Terminal(), {'NO_COLOR': ''}, True), (Terminal(), {'TERM': 'dumb'}, False),
    (io.StringIO(), {'FORCE_COLOR': '1'}, True), (Terminal(), {'FORCE_COLOR': '1', 'NO_COLOR': '1'}, False)])
def test_when_there_is_colour(stream, variables, expected, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert has_colour(stream) == expected


def test_the_status_of_a_line_is_coloured_and_no_other_word():
    text = 'ok     name  all ok\nfailed     disk  failed to write\n  v0.5   open   pass, levels 1 and 2\n  bypass'
    shown = paint_statuses(text, Terminal())
    assert shown == (f'{paint("ok", "green")}     name  all ok\n{paint("failed", "red")}     disk  failed to write\n'
                     f'  v0.5   open   {paint("pass", "green")}, levels 1 and 2\n  bypass')
    assert paint_statuses(text, io.StringIO()) == text and paint_status('unknown') == 'unknown'


def test_a_report_is_the_same_text_with_and_without_colour(tmp_path, monkeypatch):
    write_set(tmp_path / 'sweep/1x4', 2, status=lambda k: 'success' if k else 'aborted')
    piped = call('report', tmp_path)
    monkeypatch.setenv('FORCE_COLOR', '1')
    shown = call('report', tmp_path).stdout
    assert (piped.returncode, piped.stderr) == (0, '') and '\x1b' not in piped.stdout
    assert re.findall(r'\x1b\[(3\d)m(\w+)\x1b', shown) == [('33', 'aborted'), ('32', 'converged')]
    assert f'{paint("Runs", "bold")}\n' in shown and re.sub(r'\x1b\[\d+m', '', shown) == piped.stdout
