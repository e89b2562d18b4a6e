"""Logs of every kind: a folder of tests/logs is a tree of logs, and its expected.json the facts that are read from it.

A new case is a new folder; `python tests/unit/test_log_corpus.py` writes every expected.json; see `git diff`.
"""
import dataclasses
import json
import sys
from pathlib import Path

import pytest

from mlperf_rn50.errors import UserError
from mlperf_rn50.mlperf.run import Run
from mlperf_rn50.study.systems import load_systems

LOGS = Path(__file__).parents[1] / 'logs'
CASES = sorted(p for p in LOGS.iterdir() if p.is_dir())


def facts_of_run(run: Run) -> dict:
    """Return every fact of a run that has a value; of a warning its line and whether it is a contradiction."""
    facts = {f.name: getattr(run, f.name) for f in dataclasses.fields(run)} | {
        'path': run.path.name, 'age_s': None, 'optimizer': dict(run.optimizer), 'lines': dict(run.lines),
        'sources': {k: [s.basis, s.line] for k, s in run.sources.items()},
        'warnings': [[w.line, w.is_contradiction] for w in run.warnings]}
    return {k: v for k, v in facts.items() if v not in (None, (), {}, [])}


def facts_of(case: Path) -> object:
    """Return what is read from a tree of logs, as JSON has it."""
    try:
        systems = load_systems([case])
    except UserError as e:
        return {'error': type(e).__name__}
    facts = [{'folder': str(s.folder.relative_to(case)), 'is_refused': s.refusal is not None, 'is_copy': s.is_copy,
              'num_doubts': len(s.doubts), 'num_warnings': len(s.warnings), 'score_minutes': s.score_minutes,
              'copies': [[c.run.path.name, c.original.path.name] for c in s.copies],
              'runs': [facts_of_run(r) for r in s.runs]} for s in systems]
    return json.loads(json.dumps(facts), parse_float=lambda text: round(float(text), 6))


@pytest.mark.parametrize('case', CASES, ids=lambda p: p.name)
def test_facts_of_a_log(case):
    assert facts_of(case) == json.loads((case / 'expected.json').read_text())


if __name__ == '__main__':
    for path in map(Path, sys.argv[1:] or CASES):
        (path / 'expected.json').write_text(json.dumps(facts_of(path), indent=1) + '\n')
