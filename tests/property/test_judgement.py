"""Agreement of all commands about logs: none accepts, or gives a score to, what another refuses.

`disagreements` damages a copy of a folder of logs at random, by a seed, and compares the commands.
To try many seeds:

    .venv/bin/python tests/property/test_judgement.py SEEDS FOLDER...
"""

import json
import os
import random
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from helpers import ROOT, call, git

from mlperf_rn50.analysis.sets.load import Rules, load_logs
from mlperf_rn50.errors import UserError
from mlperf_rn50.mllog.package.submission import refusals_of
from mlperf_rn50.mllog.rulesets import ROUNDS

LOGS = sorted(p for p in (ROOT / 'tests/logs').iterdir() if p.is_dir())
OLD = (1e9, 1e9)  # time of the last change of a log whose run is over
ROUND = 'v4.0'


def lose_line(dice, log, _):
    lines = log.read_bytes().split(b'\n')
    del lines[dice.randrange(len(lines))]
    log.write_bytes(b'\n'.join(lines))


NEW_VALUES = b'0 1 "success" "aborted" "open" 0.76 77 null'.split()


def change_value(dice, log, _):
    text = log.read_bytes()
    values = list(re.finditer(rb'"(?:value|status|epoch_num)": ("\w*"|[\d.]+)', text))
    if values:
        found = dice.choice(values)
        new = dice.choice([*NEW_VALUES, found[1][::-1]])
        log.write_bytes(text[: found.start(1)] + new + text[found.end(1) :])


def double_run(dice, log, logs):
    other = dice.choice([*logs, log.with_name('result_77.txt')])
    if other != log:
        shutil.copy(log, other)


def swap_lines(dice, log, _):
    lines = log.read_bytes().split(b'\n')
    i, j = (dice.randrange(len(lines)) for _ in range(2))
    lines[i], lines[j] = lines[j], lines[i]
    log.write_bytes(b'\n'.join(lines))


def cut_end(dice, log, _):
    text = log.read_bytes()
    log.write_bytes(text[: dice.randrange(len(text) + 1)])


DAMAGES = [lose_line, lose_line, change_value, change_value, double_run, swap_lines, cut_end]


def damage(folder, seed):
    """Damage up to three logs of a folder; seed 0 damages none."""
    dice = random.Random(seed)
    for _ in range(dice.randint(1, 3) if seed else 0):
        if logs := sorted(p for p in folder.rglob('result_*.txt') if p.is_file()):
            dice.choice(DAMAGES)(dice, dice.choice(logs), logs)
    for path in folder.rglob('*'):
        os.utime(path, OLD)


def judge_by_round(folder):
    """Return whether package would refuse each folder's set by the rules of ROUND, or None if it
    cannot be read."""
    try:
        run_sets, _ = load_logs([folder], Rules([ROUNDS[ROUND]]))
    except UserError:
        return None
    return {str(s.folder): bool(refusals_of(s.judgement, s.runs)) for s in run_sets}


def verdicts_of(*words):
    """Return exit code, and sets by folder, of check; passed_rounds and reasons are in the
    values."""
    done = call('check', *words, '--format', 'json')
    sets = {}
    for s in json.loads(done.stdout)['sets'] if done.stdout else []:
        place = Path(s['place'])
        sets[str(place.parent if place.suffix == '.txt' else place)] = s
    return done.returncode, sets


def compare(folder):
    """Return how commands disagree about the logs in a folder."""
    found = []
    code, sets = verdicts_of(folder)
    report = call('report', folder, '--format', 'json')
    listed = json.loads(report.stdout)['systems'] if report.stdout else []
    systems = {f: s for s in listed for f in s['folders']}
    if report.returncode != code:
        found.append(f'check {code}, report {report.returncode}')
    for place, s in sets.items():
        system, is_refused = systems[place], bool(s['violations'])
        shared = {k: system[k] for k in ('violations', 'obstacles', 'score_minutes')}
        watch, predict = call('watch', place, '--once', '--format', 'json'), call('predict', place)
        found += [
            f'check {s}, {text}'
            for text, is_wrong in (
                (f'report {shared}', shared != {k: s[k] for k in shared}),
                ('score of a refused set', is_refused and s['score_minutes'] is not None),
                (f'watch {watch}', watch.returncode != is_refused),
                (f'predict {predict}', is_refused and not predict.returncode),
            )
            if is_wrong
        ]
    by_round = judge_by_round(folder)
    _, sets = verdicts_of(folder, '--ruleset', ROUND)
    for place, is_refused in (by_round or {}).items():
        s = sets[place]
        others = [o for o in s['obstacles'] if o in ('resumed', 'running') or 'runs, expected' in o]
        if (s['violations'] or others) and not is_refused:
            found.append(f'check {s}, package accepts')
        if is_refused and s['is_valid']:
            found.append(f'check {s}, package refuses')
    return found


def disagreements(source, seed):
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, source.name)
        shutil.copytree(source, folder, symlinks=True)
        damage(folder, seed)
        return compare(folder)


@pytest.mark.parametrize('part', range(4))
def test_commands_agree_about_each_folder_of_logs_that_were_once_misread(part):
    found = {
        p.name: texts for k, p in enumerate(LOGS[part::4]) if (texts := disagreements(p, k % 3))
    }
    assert not found


def measured_sets():
    """Return the folders of logs under version control."""
    files = git(ROOT, '-c', 'safe.directory=*', 'ls-files', 'logs').splitlines()
    return sorted(
        {(ROOT / f).parent for f in files if re.fullmatch(r'result_\d+\.txt', Path(f).name)}
    )


@pytest.mark.parametrize('source', measured_sets(), ids=lambda p: p.name)
def test_commands_agree_about_damaged_measured_sets(source):
    assert [disagreements(source, seed) for seed in (0, 1)] == [[], []]


if __name__ == '__main__':
    for text in sys.argv[2:]:
        for number in range(int(sys.argv[1])):
            for line in disagreements(Path(text), number):
                print(text, number, line, flush=True)
