"""A submission tree: built of a set of runs that keeps the rules, and judged when it is finished.

The rules on a set hold whatever the layout of its tree: which sets are refused, and what is odd about one.
Source: MLPerf training submission rules; the layout of v1.0 and later rounds.
"""
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlperf_rn50
from mlperf_rn50.errors import UserError
from mlperf_rn50.files import dump_json, writing_folder
from mlperf_rn50.mllog.check.check import check_log
from mlperf_rn50.mllog.check.official import Finding, find_danger, judge_tree
from mlperf_rn50.mllog.events import printable
from mlperf_rn50.mllog.package.code import copy_code, missing_code, write_runs, write_scripts
from mlperf_rn50.mllog.package.duplicates import find_copies
from mlperf_rn50.mllog.package.system_desc import (
    check_description,
    data_note,
    describe_system,
    find_base,
    find_gaps,
    merge_description,
)
from mlperf_rn50.mllog.read.description import load_env
from mlperf_rn50.mllog.rulesets import ROUNDS
from mlperf_rn50.mllog.run import Run

_NUM_RESULTS = 5
_MAX_WARNINGS = 3  # of a log that are said here; report says all
_SAME_SCORE_MINUTES = 0.005  # scores that differ by less are written alike, or are rounded
CODE_FOLDER = 'benchmarks/resnet/implementations/mlperf_rn50'  # in a tree
_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]{0,99}')


@dataclass(frozen=True)
class Order:
    """What is to be packaged."""

    org: str
    system: str
    round: str
    out: Path  # holds the tree of the organisation
    code: Path | None = None  # a checkout of the program that is submitted; None for the one that runs

    @property
    def checkout(self) -> Path:
        return self.code or Path(mlperf_rn50.__file__).parent.parent

    @property
    def ruleset(self) -> str:
        return ROUNDS[self.round]

    @property
    def home(self) -> Path:
        return self.out / self.org


@dataclass(frozen=True)
class Package:
    """What became of an order; texts are a sentence each."""

    home: Path | None  # the tree; None where a rule refused it and nothing was written
    refusals: Sequence[str] = ()  # the rules against it
    oddities: Sequence[str] = ()  # of the runs; said before all else
    findings: Sequence[Finding] = ()  # what the checkers say of an accepted one
    notes: Sequence[str] = ()
    official_score_minutes: float | None = None  # of result_summarizer; None where it gives none
    # What is still wrong with the description of a tree that was built; of a finished tree it is a refusal.
    flaws: Sequence[str] = ()

    @property
    def is_open(self) -> bool:
        """Whether something is to be done before it can be handed in."""
        return bool(self.refusals or self.flaws)


def check_order(order: Order) -> None:
    """Raise UserError unless the names can become folders and are not taken, and the code is whole."""
    for option, name in (('--org', order.org), ('--system', order.system)):
        if not _NAME.fullmatch(name):
            raise UserError(f'{option}: got {name!r:.100}, expected letters, digits, ., _ and -, and no . or - first')
    taken = order.home / 'results' / order.system
    if taken.exists():
        raise UserError(f'{taken}: is there already and is not overwritten; choose another --system or --out')
    if missing := missing_code(order.checkout):
        raise UserError(f'--code: {order.checkout} lacks {", ".join(missing)}; name a checkout of mlperf_rn50 with '
                        '--code DIR')


def _write_tree(home: Path, runs: Sequence[Run], order: Order) -> list[str]:
    """The tree of one system; returns notes."""
    env = next((env for r in runs if (env := load_env(r.path))), {})
    base = next((base for r in runs if (base := find_base(r.path))), None)
    description, logged = (describe_system(runs, known, order.org, order.system, order.round, base)
                           for known in (env, {}))
    notes = ['the system description is made of the logs' + (' and env.json' if env else ' alone')]
    if base:
        description, notes = merge_description(base, description, logged)
    results = home / 'results' / order.system / 'resnet'
    results.mkdir(parents=True)
    for k, run in enumerate(runs):
        shutil.copyfile(run.path, results / f'result_{k}.txt')
    dump_json(home / 'systems' / f'{order.system}.json', description)
    code = home / CODE_FOLDER
    code.mkdir(parents=True)
    write_scripts(code, runs, order.system)
    write_runs(code / f'runs_{order.system}', runs)
    notes += [copy_code(code / 'code', env, order.checkout), data_note(runs)]
    if gaps := find_gaps(description):
        notes.append(f'the system description says nothing of {", ".join(gaps)}; fill in what you know, then: '
                     f'mlperf-rn50 package --check {order.home} --round {order.round}')
    orgs = sorted({str(r.org) for r in runs if r.org} - {order.org})
    if orgs:
        notes.append(f'the logs say submission_org {", ".join(orgs)}, not {order.org}; results are never changed')
    return [n for n in notes if n]


def _merge(source: Path, target: Path) -> None:
    """Moves the tree of one system into that of its organisation, results last; what is there stays as it is."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir(), key=lambda p: (p.name == 'results', p.name)):
        place = target / path.name
        if not place.exists():
            path.rename(place)
        elif path.is_dir():
            _merge(path, place)


def make_package(runs: Sequence[Run], order: Order) -> Package:
    """Builds the tree and has it checked; a set that a rule refuses leaves nothing behind.

    UserError where a name is taken or cannot be a folder's, or the folder cannot be written."""
    check_order(order)
    refusals, of_logs = judge_runs(runs, order.ruleset)
    if refusals:
        return Package(None, refusals)
    oddities = find_oddities(runs)
    with writing_folder(order.out):
        order.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=order.out, prefix='.package-') as place:
            new = Path(place) / order.org
            notes = _write_tree(new, runs, order)
            verdict = judge_tree(new, order.ruleset)
            if verdict.problems:
                return Package(None, verdict.problems, oddities, notes=notes)
            if (order.home / CODE_FOLDER / 'code').exists():
                notes.append(f'{CODE_FOLDER}/code is there already and stays as it is')
            _merge(new, order.home)
    score = verdict.scores.get(order.system)
    summary = verdict.crash or ('gives no score' if score is None else f'{score:.2f} min')
    findings = [of_logs, *verdict.findings, ('result_summarizer', summary)]
    flaws, _ = check_description(order.home, order.system, {r.division for r in runs} - {None})
    return Package(order.home, (), oddities, findings, notes, score, flaws)


def _check_set(runs: Sequence[Run]) -> list[str]:
    """The rules that a set breaks, whatever its single logs say; a sentence each."""
    refusals = []
    if len(runs) != _NUM_RESULTS:
        refusals.append(f'a ResNet result is {_NUM_RESULTS} runs; here are {len(runs)}')
    failed = [r for r in runs if r.status != 'converged']
    if len(failed) > 1:
        refusals.append(f'one run of five may fail; here {len(failed)} did: '
                        + ', '.join(f'{r.path.name} ({r.status})' for r in failed))
    refusals += [f'{r.path.name}: is still being written' for r in runs if r.status == 'running']
    refusals += [f'{r.path.name}: a log that spans a resume is not that of one timed run'
                 for r in runs if r.num_resumes]
    refusals += [copy.text for copy in find_copies(runs)]
    divisions = sorted({str(r.division) for r in runs if r.status != 'unreadable'})
    if len(divisions) > 1:
        refusals.append(f'a set has one division; the logs name {", ".join(divisions)}')
    if 'closed' in divisions and not all(r.is_imagenet for r in runs):
        refusals.append('the closed division trains on ImageNet; these logs are of other data')
    seeds = [r.seed for r in runs if r.seed is not None]
    if len(set(seeds)) < len(seeds):
        refusals.append('every run has a seed of its own; here some share one')
    return refusals + [f'{r.path.name}: is no file' for r in runs if not r.path.is_file()]


def judge_runs(runs: Sequence[Run], ruleset: str) -> tuple[list[str], Finding]:
    """Return the rules against a set, else what a ruleset has against more of its logs than the one that may fail; and
    how many logs pass.

    A log that could steer, stall or crash the official tools is refused whatever the others are.
    """
    if refusals := _check_set(runs) or [f'{r.path.name}: {danger}' for r in runs
                                        if (danger := find_danger(r.path, ruleset))]:
        return refusals, ('logs', 'not checked')
    verdicts = [(r, check_log(r.path, [ruleset]).verdicts[0]) for r in runs if r.status != 'unreadable']
    violations = [f'{r.path.name}: {text}' for r, v in verdicts for text in v.violations]
    violations += [f'{r.path.name}: did not converge ({r.status})' for r, v in verdicts
                   if v.passed and r.status != 'converged']
    good = sum(v.passed for _, v in verdicts)
    num_failed = len(runs) - sum(v.passed and r.status == 'converged' for r, v in verdicts)
    tolerated = '; one may fail' if good < len(runs) else ''
    finding = 'logs', f'{good} of {len(runs)} pass the rules of {ruleset}{tolerated}'
    return violations if num_failed > 1 else [], finding


def find_oddities(runs: Sequence[Run]) -> list[str]:
    """What to know of an accepted set before anything else: a run that failed, and what is odd about the logs."""
    result = [f'one of {len(runs)} did not converge ({r.path.name}: {r.status}): it counts as the slowest'
              for r in runs if r.status != 'converged']
    counts = Counter(text for r in runs for text in dict.fromkeys(w.text for w in r.warnings))
    shared = [text for text, count in counts.items() if count == len(runs) > 1]
    result += [f'all {len(runs)} logs: {text}' for text in shared]
    for run in runs:
        own = [w for w in run.warnings if w.text not in shared]
        result += [f'{run.path.name}{"" if w.line is None else f":{w.line}"}: {w.text}' for w in own[:_MAX_WARNINGS]]
        if len(own) > _MAX_WARNINGS:
            result.append(f'{run.path.name}: {len(own) - _MAX_WARNINGS} more of this kind, which report says')
    return result


def check_finished(home: Path, round_name: str, sets: Mapping[str, Sequence[Run]]) -> Package:
    """Judge a finished tree as a whole, given the runs by the name of their folder in results.

    The official tools are given what has passed all else.

    Raises:
        UserError: a log cannot be read.
        NotInstalled: mlperf-logging is not there.
    """
    problems: list[str] = []
    oddities: list[str] = []
    notes: list[str] = []
    findings: list[Finding] = []
    for system, runs in sets.items():
        refusals, (checker, text) = judge_runs(runs, ROUNDS[round_name])
        flaws, gaps = check_description(home, system, {r.division for r in runs} - {None})
        problems += [*(f'{system}: {refusal}' for refusal in refusals), *flaws]
        oddities += [f'{system}: {odd}' for odd in find_oddities(runs)]
        findings.append((checker, f'{system}: {text}'))
        notes += gaps
    code = home / CODE_FOLDER / 'code'  # which package wrote; other code is not judged
    if missing := missing_code(code) if code.is_dir() else []:
        problems.append(f'{CODE_FOLDER}/code lacks {", ".join(missing)}, which its scripts call')
    scores: Mapping[str, float] = {}
    if not problems:
        verdict = judge_tree(home, ROUNDS[round_name])
        problems += verdict.problems
        scores = verdict.scores
        findings += [*verdict.findings, *([('result_summarizer', verdict.crash)] if verdict.crash else []),
                     *(('result_summarizer', f'{name}: {minutes:.2f} min') for name, minutes in scores.items())]
    score = next(iter(scores.values())) if len(scores) == 1 else None
    return Package(home, problems, oddities, findings, notes, score)


def render_package(package: Package, heading: str, score_minutes: float | None = None) -> str:
    """Render what was made, what the official tools and report (score_minutes) say of it; or why it was refused."""
    lines = [heading]
    lines += [f'  mind: {text}' for text in package.oddities]
    lines += [f'  - {text}' for text in (*package.refusals, *package.flaws)]
    lines += [f'  {name:19s} {text}' for name, text in package.findings]
    if not package.refusals and score_minutes is not None:
        lines.append(f'  {"score here":19s} {score_minutes:.2f} min')
    lines += [f'  mind: {text}' for text in (*_compare(package, score_minutes), *package.notes)]
    return '\n'.join(map(printable, lines))


def _compare(package: Package, score_minutes: float | None) -> list[str]:
    """What to know where result_summarizer gives another score than report, and has not scaled it."""
    official = package.official_score_minutes
    if official is None or score_minutes is None or any(name == 'scaling' for name, _ in package.findings):
        return []
    if abs(official - score_minutes) < _SAME_SCORE_MINUTES:
        return []
    why = '; what is said of the logs above tells why' if package.oddities else ''
    return [f'the scores differ: result_summarizer gives {official:.2f} min, the logs as they are read here '
            f'{score_minutes:.2f} min; a round takes that of result_summarizer{why}']


def package_as_json(package: Package, score_minutes: float | None) -> dict[str, Any]:
    """The same for programs; the keys are those of docs/results.md."""
    return {'passed': not package.refusals, 'tree': str(package.home) if package.home else None,
            'refusals': package.refusals, 'flaws': package.flaws, 'oddities': package.oddities,
            'findings': [{'checker': name, 'text': text} for name, text in package.findings],
            'notes': (*_compare(package, score_minutes), *package.notes), 'score_minutes': score_minutes,
            'official_score_minutes': package.official_score_minutes}
