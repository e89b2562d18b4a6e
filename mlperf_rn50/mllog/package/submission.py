"""Submission trees: rules for a run set, construction of the tree, and checks of a finished tree.

Source: MLPerf training submission rules. The layout is that of v1.0 and later rounds.
"""

import os
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
from mlperf_rn50.files import dump_json, refuse_existing, writing_folder
from mlperf_rn50.mllog.check.judge import Judgement
from mlperf_rn50.mllog.check.official import (
    NEEDED,
    CheckResult,
    NotInstalled,
    TreeVerdict,
    judge_tree,
)
from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.mllog.package import system_desc
from mlperf_rn50.mllog.package.code import (
    copy_code,
    find_flaws,
    missing_code,
    write_runs,
    write_scripts,
)
from mlperf_rn50.mllog.read.description import load_env
from mlperf_rn50.mllog.rulesets import ROUND_OF, ROUNDS, V05
from mlperf_rn50.runfolder.locks import OUTPUT_LOCK, folder_lock
from mlperf_rn50.text import printable

_MAX_WARNINGS = 3  # maximum number of warnings shown per log; `report` shows all
_SAME_SCORE_MINUTES = 0.005  # a smaller difference disappears in rounding
CODE_FOLDER = 'benchmarks/resnet/implementations/mlperf_rn50'  # in a submission tree
_CHECKOUT = Path(mlperf_rn50.__file__).parent.parent
_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]{0,99}')


@dataclass(frozen=True)
class Order:
    org: str
    system: str
    round: str
    out: Path  # parent of the organisation's tree
    code: Path | None = None  # checkout to submit; None for that of the running program

    @property
    def home(self) -> Path:
        return self.out / self.org


Remark = tuple[str, str]  # 'warning' or 'note', and a text


@dataclass(frozen=True)
class Package:
    """Result of building the tree of an Order, or of checking a finished tree."""

    home: Path | None  # the tree; None if it was refused and not written
    refusals: Sequence[str] = ()  # violated rules
    remarks: Sequence[Remark] = ()  # about the runs
    findings: Sequence[CheckResult] = ()  # results of the checkers for an accepted run set
    notes: Sequence[str] = ()
    official_score_minutes: float | None = None  # from result_summarizer
    # flaws in a new tree's descriptions; in a finished tree, they are refusals
    flaws: Sequence[str] = ()

    @property
    def is_open(self) -> bool:
        """True if the tree needs changes before it can be submitted."""
        return bool(self.refusals or self.flaws)


def _check_order(order: Order) -> None:
    """Raise UserError unless the names are valid and unused, and the code is complete."""
    for option, name in (('--org', order.org), ('--system', order.system)):
        if not _NAME.fullmatch(name):
            raise UserError(
                f'{option}: got {name!r:.100}, expected a letter or digit, then letters, digits, '
                '. _ -'
            )
    taken = order.home / 'results' / order.system
    if taken.exists():
        raise UserError(f'{taken}: exists and is not overwritten; change --system or --out')
    if missing := missing_code(order.code or _CHECKOUT):
        raise UserError(
            f'--code: {order.code or _CHECKOUT} lacks {", ".join(missing)}; name a checkout of '
            'mlperf_rn50 with --code DIR'
        )


def _write_tree(home: Path, runs: Sequence[Run], order: Order) -> list[str]:
    """Write the submission tree of a system. Return notes for the user."""
    env = next((env for r in runs if (env := load_env(r.path))), {})
    base = next((base for r in runs if (base := system_desc.find_base(r.path))), None)
    description, logged = (
        system_desc.describe_system(runs, known, order.org, order.system, order.round, base)
        for known in (env, {})
    )
    notes = ['the system description comes from the logs' + (' and env.json' if env else ' only')]
    if base:
        description, notes = system_desc.merge_description(base, description, logged)
    results = home / 'results' / order.system / 'resnet'
    results.mkdir(parents=True)
    for k, run in enumerate(runs):
        shutil.copyfile(run.path, results / f'result_{k}.txt')
    dump_json(home / 'systems' / f'{order.system}.json', description)
    code = home / CODE_FOLDER
    code.mkdir(parents=True)
    write_scripts(code, runs, order.system)
    write_runs(code / f'runs_{order.system}', runs)
    notes += [copy_code(code / 'code', env, order.code or _CHECKOUT), system_desc.data_note(runs)]
    if gaps := system_desc.find_gaps(description):
        notes.append(
            f'the system description lacks {", ".join(gaps)}; complete it, then run mlperf-rn50 '
            'package '
            f'--check {order.home} --round {order.round}'
        )
    if orgs := sorted({str(r.org) for r in runs if r.org} - {order.org}):
        notes.append(
            f'submission_org is {", ".join(orgs)} in the logs, not {order.org}; logs are never '
            'changed'
        )
    return [n for n in notes if n]


def _merge(source: Path, target: Path) -> None:
    """Merge a system's tree into its organisation's tree, results last. Existing files are not
    changed."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir(), key=lambda p: (p.name == 'results', p.name)):
        place = target / path.name
        if not os.path.lexists(place):
            path.rename(place)
        elif path.is_dir():
            _merge(path, place)


def make_package(runs: Sequence[Run], judgement: Judgement, order: Order) -> Package:
    """Build and check a tree. Discard it if it breaks a rule. Raise UserError for invalid names or
    folders."""
    _check_order(order)
    if refusals := refusals_of(judgement, runs) or [
        flaw for run in runs for flaw in find_flaws(run)
    ]:
        return Package(None, list(dict.fromkeys(refusals)))
    remarks = find_remarks(runs, judgement)
    with (
        writing_folder(order.out),
        folder_lock(order.out, '--out', OUTPUT_LOCK),
        tempfile.TemporaryDirectory(dir=order.out, prefix='.package-') as place,
    ):
        new = Path(place) / order.org
        notes = _write_tree(new, runs, order)
        verdict = judge_tree(new, ROUNDS[order.round])
        if verdict.problems:
            return Package(None, verdict.problems, remarks, notes=notes)
        refuse_existing(
            path
            for p in Path(place).rglob('*')
            if p.is_dir() and not (path := order.out / p.relative_to(place)).is_dir()
        )
        if (order.home / CODE_FOLDER / 'code').exists():
            notes.append(f'{CODE_FOLDER}/code exists and is not changed')
        _merge(new, order.home)
    score = verdict.scores.get(order.system)
    summary = verdict.crash or ('no score' if score is None else f'{score:.2f} min')
    findings = [_summary(runs, judgement), *verdict.results, ('result_summarizer', summary)]
    flaws, _ = system_desc.check_description(
        order.home, order.system, {r.division for r in runs} - {None}
    )
    return Package(order.home, (), remarks, findings, notes, score, flaws)


def refusals_of(judgement: Judgement, runs: Sequence[Run]) -> list[str]:
    """Return the reasons why a judged set cannot be submitted; a set of other data can, in the open
    division."""
    if judgement.is_unchecked:
        raise NotInstalled(NEEDED)
    data = {r.other_dataset for r in runs}
    return [*judgement.violations, *(text for text in judgement.obstacles if text not in data)]


def _summary(runs: Sequence[Run], judgement: Judgement) -> CheckResult:
    num_passed, name = len(runs) - len(judgement.misses), ROUND_OF[judgement.ruleset or V05]
    return (
        'logs',
        f'{num_passed} of {len(runs)} pass the rules of '
        f'{name}{"; one may fail" * bool(judgement.misses)}',
    )


def find_remarks(runs: Sequence[Run], judgement: Judgement) -> list[Remark]:
    """Return remarks about an accepted set: a failed run, and the findings of any grade about its
    logs."""
    result = [
        (
            'warning',
            f'1 of {len(runs)} runs did not converge ({path.name}: {reason}) and counts as the '
            'slowest',
        )
        for path, reason in judgement.misses.items()
    ]
    grades = {w.text: 'note' if w.grade == 'note' else 'warning' for r in runs for w in r.findings}
    counts = Counter(text for r in runs for text in dict.fromkeys(w.text for w in r.findings))
    shared = [text for text, count in counts.items() if count == len(runs) > 1]
    result += [(grades[text], f'all {len(runs)} logs: {text}') for text in shared]
    for run in runs:
        rest = [w for w in run.findings if w.text not in shared]
        result += [
            (grades[w.text], f'{run.path.name}{"" if w.line is None else f":{w.line}"}: {w.text}')
            for w in rest[:_MAX_WARNINGS]
        ]
        if len(rest) > _MAX_WARNINGS:
            result.append(
                (
                    'note',
                    f'{run.path.name}: {len(rest) - _MAX_WARNINGS} more findings; mlperf-rn50 '
                    'report '
                    '--findings shows them',
                )
            )
    return sorted(result, reverse=True, key=lambda remark: remark[0])  # warnings first


def check_finished(
    home: Path, round_name: str, sets: Mapping[str, tuple[Sequence[Run], Judgement]]
) -> Package:
    """Check a finished tree and, if it has no problems, run the official tools on it. sets: judged
    runs by system."""
    problems: list[str] = []
    remarks: list[Remark] = []
    notes: list[str] = []
    findings: list[CheckResult] = []
    for system, (runs, judgement) in sets.items():
        refusals, (checker, text) = refusals_of(judgement, runs), _summary(runs, judgement)
        flaws, gaps = system_desc.check_description(
            home, system, {r.division for r in runs} - {None}
        )
        problems += [*(f'{system}: {refusal}' for refusal in refusals), *flaws]
        remarks += [(grade, f'{system}: {text}') for grade, text in find_remarks(runs, judgement)]
        findings.append((checker, f'{system}: {text}'))
        notes += gaps
    code = home / CODE_FOLDER / 'code'  # written by copy_code; other code is not checked
    if missing := missing_code(code) if code.is_dir() else []:
        problems.append(f'{CODE_FOLDER}/code lacks {", ".join(missing)}, which its scripts call')
    verdict = TreeVerdict() if problems else judge_tree(home, ROUNDS[round_name])
    findings += [
        *verdict.results,
        *([('result_summarizer', verdict.crash)] if verdict.crash else []),
        *(
            ('result_summarizer', f'{name}: {minutes:.2f} min')
            for name, minutes in verdict.scores.items()
        ),
    ]
    score = next(iter(verdict.scores.values())) if len(verdict.scores) == 1 else None
    return Package(home, [*problems, *verdict.problems], remarks, findings, notes, score)


def render_package(package: Package, heading: str, score_minutes: float | None = None) -> str:
    """Return a package as text. score_minutes is the score that `report` computes."""
    lines = [heading, *(f'  {grade}: {text}' for grade, text in package.remarks)]
    lines += [f'  - {text}' for text in (*package.refusals, *package.flaws)]
    lines += [f'  {name:19s} {text}' for name, text in package.findings]
    if not package.refusals and score_minutes is not None:
        lines.append(f'  {"report score":19s} {score_minutes:.2f} min')
    lines += [f'  warning: {text}' for text in _compare(package, score_minutes)]
    lines += [f'  note: {text}' for text in package.notes]
    return '\n'.join(map(printable, lines))


def _compare(package: Package, score_minutes: float | None) -> list[str]:
    """Return a warning if the scores of result_summarizer and report differ although no score was
    scaled."""
    official = package.official_score_minutes
    if (
        official is None
        or score_minutes is None
        or abs(official - score_minutes) < _SAME_SCORE_MINUTES
        or any(name == 'scaling' for name, _ in package.findings)
    ):
        return []
    hint = '; see the warnings above' if package.remarks else ''
    return [
        f'the scores differ: {official:.2f} min from result_summarizer, {score_minutes:.2f} min '
        'from report; the '
        f'former is official{hint}'
    ]


def package_as_json(package: Package, score_minutes: float | None) -> dict[str, Any]:
    """Return a package as JSON with the keys of docs/results.md."""
    return {
        'passed': not package.refusals,
        'tree': str(package.home) if package.home else None,
        'refusals': package.refusals,
        'flaws': package.flaws,
        'oddities': [text for _, text in package.remarks],
        'findings': [{'checker': name, 'text': text} for name, text in package.findings],
        'notes': (*_compare(package, score_minutes), *package.notes),
        'score_minutes': score_minutes,
        'official_score_minutes': package.official_score_minutes,
    }
