"""A submission tree: built of a set of runs that keeps the rules, and judged when it is finished.

Source: MLPerf training submission rules; the layout of v1.0 and later rounds.
"""
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlperf_rn50.errors import UserError
from mlperf_rn50.files import dump_json, writing_folder
from mlperf_rn50.mlperf.describe_system import (
    check_description,
    data_note,
    describe_system,
    find_base,
    find_gaps,
    merge_description,
)
from mlperf_rn50.mlperf.description import load_env
from mlperf_rn50.mlperf.events import printable
from mlperf_rn50.mlperf.official import Finding, judge_tree
from mlperf_rn50.mlperf.rulesets import ROUNDS
from mlperf_rn50.mlperf.run import Run
from mlperf_rn50.mlperf.set_rules import check_results, check_set, find_oddities
from mlperf_rn50.mlperf.submitted_code import copy_code, missing_code, own_code, write_runs, write_scripts

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
        return self.code or own_code()

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

    Raises:
        UserError: a name is taken or cannot be a folder's, or the folder cannot be written.
    """
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


def judge_runs(runs: Sequence[Run], ruleset: str) -> tuple[list[str], Finding]:
    """The rules against a set and its logs, and how many logs pass."""
    refusals = check_set(runs)
    return (refusals, ('logs', 'not checked')) if refusals else check_results(runs, ruleset)


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
