"""The configuration reference is that of the dataclasses."""
import dataclasses
import sys
from typing import get_args

from helpers import ROOT, run

from mlperf_rn50.config import SECTIONS
from mlperf_rn50.options import add_config_options

REFERENCE = ROOT / 'docs/configuration.md'


def test_the_reference_is_what_the_dataclasses_say():
    done = run([sys.executable, ROOT / 'docs/make_reference.py'], env={'PYTHONPATH': str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert REFERENCE.read_text() == done.stdout, 'run: python docs/make_reference.py > docs/configuration.md'


def test_every_key_has_a_meaning_there_and_in_the_help():
    from jsonargparse import ArgumentParser
    parser = ArgumentParser(usage='')
    add_config_options(parser)
    text, shown = REFERENCE.read_text(), ' '.join(parser.format_help().split())
    for name, section in SECTIONS.items():
        part = text.split(f'\n## {name}\n')[1].split('\n## ')[0]
        for key in dataclasses.fields(section):
            [row] = [line for line in part.splitlines() if line.startswith(f'| `{key.name}` |')]
            assert len(row.split('|')[-2].strip()) > 8, row
            assert f'--{name}.{key.name}' in shown
    assert 'images per optimizer step over all ranks' in shown


def test_numbers_have_bounds():
    """A number without bounds would be believed, whatever it is."""
    without = [f'{name}.{f.name}' for name, section in SECTIONS.items() for f in dataclasses.fields(section)
               if {int, float} & {f.type, *get_args(f.type)} and 'bounds' not in f.metadata]
    assert not without
