"""The manual page is that of the parsers, names everything that can be typed, and is one that man shows whole."""
import re
import shutil
import sys
from argparse import SUPPRESS, _SubParsersAction

from helpers import ROOT, run, skip_for

from mlperf_rn50.cli import command_names, whole_parser

PAGE = ROOT / 'docs/mlperf-rn50.1'


def test_the_page_is_what_the_parsers_say():
    done = run([sys.executable, ROOT / 'docs/make_man.py'], env={'PYTHONPATH': str(ROOT), 'COLUMNS': '40'})
    assert done.returncode == 0, done.stderr
    assert PAGE.read_text() == done.stdout, 'run: python docs/make_man.py > docs/mlperf-rn50.1'


def test_every_command_and_option_is_on_the_page():
    text = PAGE.read_text().replace('\\-', '-')
    assert re.findall(r'^\.SS (\w+)', text.partition('.SH CONFIGURATION')[0], re.MULTILINE) == command_names()
    [commands] = [a for a in whole_parser()._actions if isinstance(a, _SubParsersAction)]
    typed = {word for parser in commands.choices.values() for a in parser._actions if a.help != SUPPRESS
             for word in a.option_strings if '.' in word or a.metavar != 'CONFIG'} - {'-h', '--help'}
    assert len(typed) > 100 and [word for word in typed if f'\\fB{word}\\fR' not in text] == []


def test_man_shows_it_without_a_warning():
    skip_for('' if shutil.which('groff') else 'groff is not installed')
    done = run(['groff', '-man', '-ww', '-Tutf8', '-P-cbou', PAGE])
    assert (done.returncode, done.stderr) == (0, '')
    assert 'mlperf-rn50 report [OPTIONS...] PATH [PATH ...]' in done.stdout
    assert '--schedule.warmup_epochs WARMUP_EPOCHS' in done.stdout and '\\' not in done.stdout
