"""Recorded answers: files of tests/answers have commands, each followed by its output.

`pytest --update tests/unit/test_answer.py` records all again; review what changed. To add a case,
add a command.
"""

import shlex

import pytest
from helpers import ROOT, call

PROMPT = '$ mlperf-rn50 '
CASES = sorted((ROOT / 'tests/answers').glob('*.txt'))


@pytest.mark.parametrize('case', CASES, ids=[p.stem for p in CASES])
def test_output_is_as_recorded(case, request, monkeypatch):
    monkeypatch.chdir(ROOT)
    recorded, found = case.read_text(), ''
    for line in recorded.splitlines():
        if line.startswith(PROMPT):
            done = call(*shlex.split(line.removeprefix(PROMPT)))
            found += f'{line}\n{done.stdout}{done.stderr}exit code {done.returncode}\n'
    if request.config.getoption('--update'):
        case.write_text(found)
    assert found == case.read_text()
