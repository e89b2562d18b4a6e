"""Recorded answers: each file of tests/answers has a command in its first line, then its output.

`pytest --update tests/unit/test_answers.py` records all again; review what changed. To add a case,
add a file with a command.
"""

import shlex

import pytest
from helpers import ROOT, call

CASES = sorted((ROOT / 'tests/answers').glob('*.txt'))


@pytest.mark.parametrize('case', CASES, ids=[p.stem for p in CASES])
def test_output_is_as_recorded(case, request, monkeypatch):
    monkeypatch.chdir(ROOT)
    command, _, recorded = case.read_text().partition('\n')
    done = call(*shlex.split(command.removeprefix('$ mlperf-rn50 ')))
    found = f'{done.stdout}{done.stderr}exit code {done.returncode}\n'
    if request.config.getoption('--update'):
        case.write_text(f'{command}\n{found}')
    else:
        assert found == recorded
