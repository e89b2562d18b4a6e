"""Answers as text that fits the width of a terminal, Markdown, JSON and CSV."""

import io
import json

import pytest
from helpers import Terminal, json_table, shipped_logs

from mlperf_rn50 import cli
from mlperf_rn50.analysis.show.data import render_json
from mlperf_rn50.analysis.show.plain import fit_columns
from mlperf_rn50.text import cut_names

HEAD, ROW = ('system', 'nodes', 'minutes', 'cost', 'seed'), ('box', '1', '2.50', '9.99', '7')


@pytest.mark.parametrize(
    'width, minor, shown',
    json_table("""
null | ["cost"]         | "system nodes minutes cost seed"
44   | ["cost"]         | "system nodes minutes cost seed"
43   | []               | "system nodes minutes cost"
43   | ["cost"]         | "system nodes minutes seed"
30   | ["seed", "cost"] | "system nodes minutes"
30   | ["cost", "seed"] | "system nodes minutes"
20   | []               | "system nodes"
"""),
)
def test_least_important_columns_give_way_to_the_width(width, minor, shown):
    shown = shown.split()
    lines = fit_columns(HEAD, [ROW], width, minor).splitlines()
    assert lines[0].split() == shown
    assert lines[2].split() == [ROW[HEAD.index(h)] for h in shown]
    hidden = len(HEAD) - len(shown)
    assert lines[3:] == (
        [f'{hidden} more column{"s" if hidden > 1 else ""}: --wide'] if hidden else []
    )
    assert not width or len(lines[1]) <= width


def test_colours_take_no_width():
    painted = [*ROW[:4], '\x1b[31m7\x1b[0m']
    assert fit_columns(HEAD, [painted], 44).count('\x1b') == 2


def test_long_names_are_cut_in_the_middle_and_remain_two():
    names = ['ND96amsr_A100_v4_n1_mxnet', 'ND96amsr_A100_v4_n8_mxnet', 'box']
    table = ('system', 'nodes'), [(name, '1') for name in names]
    assert names[0] in fit_columns(*table, 40)
    cut = [line.split()[0] for line in fit_columns(*table, 33).splitlines()[2:]]
    assert cut == ['ND96ams…1_mxnet', 'ND96ams…8_mxnet', 'box']
    assert cut_names(['abcdefg'], 6) == ['abc…fg']
    twins = ['abcdefg', 'abcxefg']
    assert cut_names(twins, 6) == twins


@pytest.mark.parametrize(
    'stream, options, is_cut',
    [(Terminal(), [], True), (Terminal(), ['--wide'], False), (io.StringIO(), [], False)],
    ids=['terminal', 'wide', 'pipe'],
)
def test_report_fits_the_terminal_unless_it_is_piped_or_wide(monkeypatch, stream, options, is_cut):
    monkeypatch.setenv('COLUMNS', '60')
    monkeypatch.setenv('NO_COLOR', '1')
    monkeypatch.setattr('sys.stdout', stream)
    assert cli.main(['report', str(shipped_logs() / 'digits_sweep'), *options]) == 0
    text = stream.getvalue()
    width = max(map(len, text.splitlines()))
    assert width <= 60 if is_cut else width > 120
    assert ('more columns: --wide' in text) == is_cut


def test_iterators_in_the_data_are_lists_of_the_json():
    parts = render_json({'a': 1, 'b': ({'c': iter([k, [k]])} for k in (1, 2)), 'd': {}})
    whole = {'a': 1, 'b': [{'c': [1, [1]]}, {'c': [2, [2]]}], 'd': {}}
    assert ''.join(parts) == json.dumps(whole, indent=1)
