"""Log corpus: each folder of tests/logs is a tree of logs, and its expected.json has the facts that
are not usual.

The expected facts are those of base.json, which are the most frequent ones, changed by
expected.json, where null is a fact that the log does not have. To add a case, add a folder. `pytest
--update tests/unit/test_log_corpus.py` writes every expected.json. If most logs have a new fact,
add it to base.json by hand.
"""

import dataclasses
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from mlperf_rn50.analysis.sets.defects import set_findings
from mlperf_rn50.analysis.sets.load import load_run_sets
from mlperf_rn50.errors import UserError
from mlperf_rn50.mllog.findings import Findings
from mlperf_rn50.mllog.logged_run import FactSource, Run
from mlperf_rn50.mllog.read.description import describe_entry, load_object

LOGS = Path(__file__).parents[1] / 'logs'
BASE = json.loads((LOGS / 'base.json').read_text())
CASES = sorted(p for p in LOGS.iterdir() if p.is_dir())


def facts_of_run(run: Run) -> dict:
    """Return the known facts of a run; findings are reduced to their line and id."""
    facts = {f.name: getattr(run, f.name) for f in dataclasses.fields(run)} | {
        'path': run.path.name,
        'age_s': None,
        'last_s': None,
        'start_s': None,
        'optimizer': dict(run.optimizer),
        'lines': dict(run.lines),
        'sources': {k: [s.basis, s.line] for k, s in run.sources.items()},
        'findings': [[f.line, f.kind] for f in run.findings],
    }
    return {k: v for k, v in facts.items() if v not in (None, (), {}, [])}


def facts_of(case: Path) -> object:
    """Return the facts of a tree of logs as decoded JSON: an error, or sets with facts and runs."""
    try:
        systems = load_run_sets([case])
    except UserError as e:
        return {'error': type(e).__name__}
    facts = [
        {
            'folder': str(s.folder.relative_to(case)),
            'is_refused': s.refusal is not None,
            'is_duplicate': s.is_duplicate,
            'num_findings': dict(Counter(f.grade for f in set_findings(s))),
            'duplicates': [[d.run.path.name, d.original.path.name] for d in s.duplicates],
            **({'score_minutes': s.score_minutes} if s.score_minutes else {}),
            'runs': [facts_of_run(r) for r in s.runs],
        }
        for s in systems
    ]
    return json.loads(json.dumps(facts), parse_float=lambda text: round(float(text), 6))


def usual_facts(folder: Path, k: int, run: dict) -> dict:
    """Return the usual facts of run k of a folder. In base.json, a key stands for the first line
    that contains it."""
    usual, path = BASE['run'], f'result_{k}.txt'
    log = folder / run.get('path', path)
    texts = log.read_bytes().decode('utf-8', 'replace').split('\n') if log.is_file() else []
    events = [(number, text) for number, text in enumerate(texts, 1) if ':::ML' in text]
    first = {
        key: key
        and next((number for number, text in events if re.search(rf'\b{key}\b', text)), None)
        for key in (*usual['lines'], *(key for _, key in usual['sources'].values()))
    }
    return usual | {
        'path': path,
        'lines': {key: first[key] for key in usual['lines'] if first[key]},
        'sources': {
            name: [basis, first[key]]
            for name, (basis, key) in usual['sources'].items()
            if first[key] or key is None
        },
    }


def difference(usual: dict, facts: dict) -> dict:
    """Return what changes usual facts into others; None stands for a missing fact."""
    return {
        k: difference(usual[k], v) if isinstance(v, dict) and isinstance(usual.get(k), dict) else v
        for k, v in (dict.fromkeys(usual) | facts).items()
        if v != usual.get(k)
    }


def unusual_facts(case: Path, sets: list) -> list:
    """Return what is not usual in the facts of each set and run."""
    return [
        difference(BASE['set'], {k: v for k, v in s.items() if k != 'runs'})
        | {
            'runs': [
                difference(usual_facts(case / s['folder'], k, r), r)
                for k, r in enumerate(s['runs'])
            ]
        }
        for s in sets
    ]


@pytest.mark.parametrize('case', CASES, ids=lambda p: p.name)
def test_facts_of_a_log(case, request):
    facts, path = facts_of(case), case / 'expected.json'
    unusual = facts if isinstance(facts, dict) else unusual_facts(case, facts)
    if request.config.getoption('--update'):  # a list of values is on one line
        text = re.sub(
            r'\[\n[^][{}]+\]', lambda m: re.sub(r'\n *', ' ', m[0]), json.dumps(unusual, indent=1)
        )
        path.write_text(text + '\n')
    assert unusual == json.loads(path.read_text())


def test_findings_of_a_log_and_size_of_a_description_are_bounded(tmp_path):
    findings = Findings()
    for k in range(60):
        findings.flag('not_imagenet', k, k)
        findings.flag('unreadable', k, k)
    found = findings.in_file(tmp_path)
    kinds = ['unreadable'] * 50 + ['omitted'] + ['not_imagenet'] * 50 + ['omitted']
    assert [f.kind for f in found] == kinds and {f.file for f in found} == {tmp_path}
    assert [f.grade for f in found] == ['error'] * 51 + ['note'] * 51
    (tmp_path / 'env.json').write_text(' ' * (1 << 20) + '{}')
    with pytest.raises(ValueError, match='is larger than 1048576 bytes'):
        load_object(tmp_path / 'env.json')


@pytest.mark.parametrize('value', [' 8.0 ', 8.0, '1' * 9, 10**9 - 1])
def test_count_in_a_description_is_a_whole_number_of_nine_digits(value):
    assert count_in_description(value) == int(float(value))


@pytest.mark.parametrize('value', ['1' * 10, 10**9, 2.5, True, '8 x'])
def test_other_count_in_a_description_is_not_used(value):
    assert count_in_description(value) is None


def count_in_description(value):
    entry = {'nodes': [{'num_nodes': value, 'num_accelerators': 1}]}
    nodes = describe_entry(entry, lambda key: FactSource('described', key)).nodes
    return nodes and nodes.number
