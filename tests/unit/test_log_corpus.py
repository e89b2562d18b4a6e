"""Log corpus: each folder of tests/logs is a tree of logs, and its expected.json has the facts that
are not usual.

The expected facts are those of base.json, which are the most frequent ones, changed by
expected.json, where null is a fact that the log does not have. To add a case, add a folder. `pytest
--update tests/unit/test_log_corpus.py` writes every expected.json. If most logs have a new fact,
add it to base.json by hand.
"""

import dataclasses
import fcntl
import json
import os
import platform
import re
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from lines import START_S, mllog, run_lines, write_lines

from mlperf_rn50.analysis.sets.defects import set_findings
from mlperf_rn50.analysis.sets.load import load_run_sets
from mlperf_rn50.errors import UserError
from mlperf_rn50.mllog.findings import Findings
from mlperf_rn50.mllog.read.description import _count, load_object
from mlperf_rn50.mllog.read.reader import read_run
from mlperf_rn50.mllog.run import Run

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


def changed(usual: dict, changes: dict) -> dict:
    """Return usual facts with changes; the inverse of `difference`."""
    merged = usual | {
        k: changed(usual[k], v) if isinstance(v, dict) and isinstance(usual.get(k), dict) else v
        for k, v in changes.items()
    }
    return {k: v for k, v in merged.items() if v is not None}


def each_set(case: Path, sets: list, change: Callable) -> list:
    """Return the results of a function of usual facts and those of each set and run."""
    return [
        change(BASE['set'], {k: v for k, v in s.items() if k != 'runs'})
        | {
            'runs': [
                change(usual_facts(case / s.get('folder', '.'), k, r), r)
                for k, r in enumerate(s['runs'])
            ]
        }
        for s in sets
    ]


@pytest.mark.parametrize('case', CASES, ids=lambda p: p.name)
def test_facts_of_a_log(case, request):
    facts, path = facts_of(case), case / 'expected.json'
    if request.config.getoption('--update'):  # a list of values is on one line
        stored = facts if isinstance(facts, dict) else each_set(case, facts, difference)
        text = re.sub(
            r'\[\n[^][{}]+\]', lambda m: re.sub(r'\n *', ' ', m[0]), json.dumps(stored, indent=1)
        )
        path.write_text(text + '\n')
    expected = json.loads(path.read_text())
    assert facts == (expected if isinstance(expected, dict) else each_set(case, expected, changed))


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
    assert len(run.evaluations) == 10_000 and len(run.findings) < 200 and len(run.optimizer) == 64
    assert run.evaluations[0].line == 2
    assert peak < 12_000_000


def test_findings_of_a_log_and_size_of_a_description_are_bounded(tmp_path):
    findings = Findings()
    for k in range(60):
        findings.flag('not_imagenet', k, k)
        findings.flag('unreadable', k, k)
    found = findings.in_file(tmp_path)
    assert [f.kind for f in found] == ['unreadable'] * 50 + ['omitted'] + ['not_imagenet'] * 50 + [
        'omitted'
    ]
    assert [f.grade for f in found] == ['error'] * 51 + ['note'] * 51 and {
        f.file for f in found
    } == {tmp_path}
    (tmp_path / 'env.json').write_text(' ' * (1 << 20) + '{}')
    with pytest.raises(ValueError, match='is larger than 1048576 bytes'):
        load_object(tmp_path / 'env.json')


@pytest.mark.parametrize(
    'value, count',
    [
        (' 8.0 ', 8),
        (8.0, 8),
        ('1' * 9, 111_111_111),
        ('1' * 10, None),
        (10**9 - 1, 10**9 - 1),
        (10**9, None),
        (2.5, None),
        (-1, None),
        (True, None),
        ('8 x', None),
    ],
)
def test_count_in_a_description_is_a_whole_number_of_nine_digits(value, count):
    assert _count(value) == count


# A log without an end belongs to a running or a killed run.
@pytest.fixture
def unended(tmp_path):
    """Function that writes a log with its last event at 22 s and its modification time `written_s`
    later."""

    def unended(written_s=0.0, **keys):
        path = write_lines(tmp_path / 'result_0.txt', run_lines(status=None, **keys))
        os.utime(path, (START_S + 22 + written_s,) * 2)
        return path

    return unended


SLOW = {'accuracies': (0.5,), 'epoch_s': 1000, 'eval_s': 12}


@pytest.mark.parametrize(
    'written_s, keys, now_s, status',
    [
        (0, {}, 82, 'running'),
        (0, {}, 22 + 601, 'failed'),
        (990, SLOW, 1012 + 2900, 'running'),
        (990, SLOW, 1012 + 3100, 'failed'),
        # a checkout sets the modification time to the present
        (2 * 86400, {}, 22 + 2 * 86400, 'failed'),
    ],
    ids=['just written', 'quiet', 'slow', 'slow and quiet', 'a copy of an old log'],
)
def test_quiet_log_belongs_to_a_failed_run(unended, written_s, keys, now_s, status):
    assert read_run(unended(written_s, **keys), now_s=START_S + now_s).status == status


def test_only_a_running_run_has_an_age(unended, tmp_path):
    run = read_run(unended(accuracies=(0.5, 0.4)), now_s=START_S + 82)
    assert (run.age_s, run.last_epoch, run.best_accuracy) == (60.0, 2, 0.5)
    assert (run.epochs_to_converge, run.time_to_train_s, run.findings) == (None, None, ())
    run = read_run(unended(), now_s=START_S + 22 + 601)
    assert run.age_s is None
    assert [f.kind for f in run.findings] == ['no_run_stop']
    run = read_run(write_lines(tmp_path / 'result_0.txt', run_lines()), now_s=START_S + 22)
    assert (run.status, run.age_s) == ('converged', None)


@pytest.mark.parametrize('k, lock', [(0, '.run_0.lock'), (3, '.run_3.lock')])
def test_lock_of_a_run_decides_the_status(unended, k, lock):
    log = unended()
    log = log.rename(log.with_name(f'result_{k}.txt'))
    path = log.with_name(lock)
    path.write_text(f'process 7 on {platform.node()}\n')
    with open(path, 'rb') as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        run = read_run(log, now_s=START_S + 10**7)
        assert run.status == 'running' and run.age_s > 10**6
    assert read_run(log, now_s=START_S + 23).status == 'failed'  # released on this machine
    path.write_text('process 7 on other-machine\n')
    assert read_run(log, now_s=START_S + 23).status == 'running'
    assert read_run(log, now_s=START_S + 10**7).status == 'failed'


def test_lock_that_is_not_a_file_does_not_block_and_reading_leaves_a_lock_free(unended):
    path = unended().with_name('.run_0.lock')
    os.mkfifo(path)
    assert read_run(path.with_name('result_0.txt'), now_s=START_S + 30).status == 'running'
    path.unlink()
    path.touch()
    read_run(path.with_name('result_0.txt'))
    with open(path, 'a+b') as f:
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize('encoding', ['utf-16', 'utf-16-be'])
def test_utf16_is_refused(tmp_path, encoding):
    path = tmp_path / 'result_0.txt'
    path.write_bytes(
        (b'\xfe\xff' if encoding.endswith('be') else b'') + '\n'.join(run_lines()).encode(encoding)
    )
    with pytest.raises(Exception, match='the file is UTF-16; convert it to UTF-8'):
        read_run(path)
