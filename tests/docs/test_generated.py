"""The pages that are made from the program are up to date, name everything, and man shows its page whole."""
import re
import shutil
import sys
from argparse import SUPPRESS, _SubParsersAction

import pytest
from helpers import ROOT, run, skip_for

from mlperf_rn50.cli import whole_parser

MAN, REFERENCE = ROOT / 'docs/mlperf-rn50.1', ROOT / 'docs/configuration.md'


@pytest.mark.parametrize('script, page', [('make_man.py', MAN), ('make_reference.py', REFERENCE)])
def test_a_page_is_what_its_script_writes(script, page):
    done = run([sys.executable, ROOT / 'docs' / script], env={'PYTHONPATH': str(ROOT), 'COLUMNS': '40'})
    assert done.returncode == 0, done.stderr
    assert page.read_text() == done.stdout, f'run: python docs/{script} > {page.relative_to(ROOT)}'


def test_every_option_and_key_is_described():
    [commands] = [a for a in whole_parser()._actions if isinstance(a, _SubParsersAction)]
    man = MAN.read_text().replace('\\-', '-')
    shown = [(name, a) for name, parser in commands.choices.items() for a in parser._actions
             if a.help != SUPPRESS and a.dest != 'help' and ('.' in a.dest or a.metavar != 'CONFIG')]
    assert len(shown) > 100 and [a.option_strings for _, a in shown if not a.help or len(a.help) < 8] == []
    assert [word for _, a in shown for word in a.option_strings if f'\\fB{word}\\fR' not in man] == []
    assert re.findall(r'^\.SS (\w+)', man.partition('.SH CONFIGURATION')[0], re.MULTILINE) == [*commands.choices]
    rows = re.findall(r'^\| `(\w+)` \|.*\| .{8,} \|$', REFERENCE.read_text(), re.MULTILINE)
    assert set(rows) == {a.dest.partition('.')[2] for name, a in shown if name == 'train' and '.' in a.dest}


def test_man_shows_it_without_a_warning():
    skip_for('' if shutil.which('groff') else 'groff is not installed')
    done = run(['groff', '-man', '-ww', '-Tutf8', '-P-cbou', MAN])
    assert (done.returncode, done.stderr) == (0, '')
    assert '--schedule.warmup_epochs WARMUP_EPOCHS' in done.stdout and '\\' not in done.stdout
