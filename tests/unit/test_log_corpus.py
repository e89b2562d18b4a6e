"""Logs of every kind: a folder of tests/logs is a tree of logs, and its expected.json the facts that are read from it.

A new case is a new folder; `python tests/unit/test_log_corpus.py` writes every expected.json; see `git diff`.
"""
import dataclasses
import json
import sys
import tracemalloc
from pathlib import Path

import pytest
from lines import mllog, write_lines

from mlperf_rn50.errors import UserError
from mlperf_rn50.mlperf.description import _count, load_object
from mlperf_rn50.mlperf.reader import read_events, read_run
from mlperf_rn50.mlperf.run import Notes, Run
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


def test_memory_does_not_grow_with_the_log(tmp_path):
    path = tmp_path / 'result_0.txt'
    with open(path, 'w') as f:
        f.write('x' * 9_000_000 + '\n')
        for epoch in range(10_100):
            f.write(mllog('eval_accuracy', epoch, 0.5, epoch_num=epoch) + '\n')
            f.write(mllog(f'opt_{epoch}', 0, 'x' * 400) + '\n')
        f.write(':::MLLOG ' + '[' * 2_000_000)
    tracemalloc.start()
    run = read_run(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(run.evaluations) == 10_000 and len(run.warnings) < 200 and len(run.optimizer) == 64
    assert peak < 12_000_000


def test_what_is_kept_of_a_log_and_of_its_description_is_bounded(tmp_path):
    notes = Notes()
    for k in range(60):
        notes.warn(k, str(k))
        notes.contradict(k, str(k))
    assert [w.is_contradiction for w in notes.warnings()] == [True] * 51 + [False] * 51
    assert notes.warnings()[-1].text == 'more warnings follow; they are left out'
    (tmp_path / 'env.json').write_text(' ' * (1 << 20) + '{}')
    with pytest.raises(ValueError, match='is larger than 1048576 bytes'):
        load_object(tmp_path / 'env.json')


@pytest.mark.parametrize('value, count', [
    ('8', 8), (' 8.0 ', 8), (8.0, 8), ('1' * 9, 111_111_111), ('1' * 10, None), (10**9 - 1, 10**9 - 1), (10**9, None),
    (2.5, None), (-1, None), (True, None), ('8 x', None)])
def test_a_count_of_a_description_is_a_whole_number_of_nine_digits(value, count):
    assert _count(value) == count


def test_lines_keep_their_numbers_after_a_long_one(tmp_path):
    path = write_lines(tmp_path / 'log', ['a' * 3_000_000, 'b', mllog('run_start', 0)])
    assert [number for number, _ in read_events(path)] == [3]


def test_a_missing_log_is_named(tmp_path):
    with pytest.raises(UserError, match='result_9.txt: cannot read the log'):
        read_run(tmp_path / 'result_9.txt')


if __name__ == '__main__':
    for path in map(Path, sys.argv[1:] or CASES):
        (path / 'expected.json').write_text(json.dumps(facts_of(path), indent=1) + '\n')
