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

import mlperf_rn50
from mlperf_rn50.answer import Answer, Cell, Table
from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK, UserError
from mlperf_rn50.files import dump_json, refuse_existing, writing_folder
from mlperf_rn50.mllog.check.judge import Judgement
from mlperf_rn50.mllog.check.official import (
    NEEDED,
    CheckResult,
    NotInstalled,
    judge_tree,
)
from mlperf_rn50.mllog.findings import Finding
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
                f'{option}: got {name!r:.100}, expected a letter or digit, then letters, digits, . '
                '_ -'
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
            f'package --check {order.home} --round {order.round}'
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
    refusals = refusals_of(judgement, runs) or [f for run in runs for f in find_flaws(run)]
    if refusals:
        return Package(None, list(dict.fromkeys(refusals)))
    remarks = find_remarks(runs, judgement)
    with (
        writing_folder(order.out),
        folder_lock(order.out, '--out', OUTPUT_LOCK),
        tempfile.TemporaryDirectory(dir=order.out, prefix='.package-') as place,
    ):
        new = Path(place) / order.org
        notes = _write_tree(new, runs, order)
        checked = judge_tree(new, ROUNDS[order.round])
        if checked.problems:
            return Package(None, checked.problems, remarks, notes=notes)
        refuse_existing(
            path
            for p in Path(place).rglob('*')
            if p.is_dir() and not (path := order.out / p.relative_to(place)).is_dir()
        )
        if (order.home / CODE_FOLDER / 'code').exists():
            notes.append(f'{CODE_FOLDER}/code exists and is not changed')
        _merge(new, order.home)
    score = checked.scores.get(order.system)
    summary = 'no score' if score is None else f'{score:.2f} min'
    summarizer = 'result_summarizer', checked.crash or summary
    findings = [_summary(runs, judgement), *checked.results, summarizer]
    flaws, _ = _check_description(order.home, order.system, runs)
    return Package(
        home=order.home,
        remarks=remarks,
        findings=findings,
        notes=notes,
        official_score_minutes=score,
        flaws=flaws,
    )


def _check_description(home: Path, system: str, runs: Sequence[Run]) -> tuple[list[str], list[str]]:
    return system_desc.check_description(home, system, {r.division for r in runs})


def refusals_of(judgement: Judgement, runs: Sequence[Run]) -> list[str]:
    """Return the reasons why a judged set cannot be submitted; a set of other data can, in the open
    division."""
    if judgement.is_unchecked:
        raise NotInstalled(NEEDED)
    data = {r.other_dataset for r in runs}
    return [*judgement.violations, *(text for text in judgement.obstacles if text not in data)]


def _summary(runs: Sequence[Run], judgement: Judgement) -> CheckResult:
    text = (
        f'{len(runs) - len(judgement.misses)} of {len(runs)} pass the rules of '
        f'{ROUND_OF[judgement.ruleset or V05]}'
    )
    return 'logs', f'{text}; one may fail' if judgement.misses else text


def find_remarks(runs: Sequence[Run], judgement: Judgement) -> list[Remark]:
    """Return remarks about an accepted set: a failed run, and the findings of any grade about its
    logs."""

    def remark(finding: Finding, text: str) -> Remark:
        return 'note' if finding.grade == 'note' else 'warning', text

    result = [
        (
            'warning',
            f'1 of {len(runs)} runs did not converge ({path.name}: {reason}) and counts as the '
            'slowest',
        )
        for path, reason in judgement.misses.items()
    ]
    findings = {w.text: w for r in runs for w in r.findings}
    counts = Counter(text for r in runs for text in {w.text for w in r.findings})
    shared = [text for text in findings if counts[text] == len(runs) > 1]
    result += [remark(findings[text], f'all {len(runs)} logs: {text}') for text in shared]
    for run in runs:
        rest = [w for w in run.findings if w.text not in shared]
        for w in rest[:_MAX_WARNINGS]:
            place = run.path.name if w.line is None else f'{run.path.name}:{w.line}'
            result.append(remark(findings[w.text], f'{place}: {w.text}'))
        if len(rest) > _MAX_WARNINGS:
            text = (
                f'{run.path.name}: {len(rest) - _MAX_WARNINGS} more findings; mlperf-rn50 report '
                '--findings shows them'
            )
            result.append(('note', text))
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
        refusals = refusals_of(judgement, runs)
        flaws, gaps = _check_description(home, system, runs)
        problems += [*(f'{system}: {refusal}' for refusal in refusals), *flaws]
        remarks += [(grade, f'{system}: {text}') for grade, text in find_remarks(runs, judgement)]
        checker, text = _summary(runs, judgement)
        findings.append((checker, f'{system}: {text}'))
        notes += gaps
    code = home / CODE_FOLDER / 'code'  # written by copy_code; other code is not checked
    if code.is_dir() and (missing := missing_code(code)):
        problems.append(f'{CODE_FOLDER}/code lacks {", ".join(missing)}, which its scripts call')
    score = None
    if not problems:
        checked = judge_tree(home, ROUNDS[round_name])
        problems += checked.problems
        findings += checked.results
        summaries = [f'{name}: {minutes:.2f} min' for name, minutes in checked.scores.items()]
        if checked.crash:
            summaries = [checked.crash, *summaries]
        findings += [('result_summarizer', text) for text in summaries]
        if len(summaries) == len(checked.scores) == 1:
            [score] = checked.scores.values()
    return Package(
        home=home,
        refusals=problems,
        remarks=remarks,
        findings=findings,
        notes=notes,
        official_score_minutes=score,
    )


def package_answer(package: Package, heading: str, score_minutes: float | None) -> Answer:
    """Return a package as an answer. score_minutes is the score that `report` computes."""
    rows: list[tuple[str, str]] = [*package.remarks]
    rows += [('error', text) for text in (*package.refusals, *package.flaws)]
    rows += package.findings
    if not package.refusals and score_minutes is not None:
        rows.append(('report score', f'{score_minutes:.2f} min'))
    doubts = _compare(package, score_minutes)
    rows += [('warning', text) for text in doubts]
    rows += [('note', text) for text in package.notes]
    return Answer(
        sentences=[heading],
        tables=[Table('', (), tuple((Cell(name), Cell(text)) for name, text in rows))],
        data={
            'passed': not package.refusals,
            'tree': str(package.home) if package.home else None,
            'refusals': package.refusals,
            'flaws': package.flaws,
            'oddities': [text for _, text in package.remarks],
            'findings': [{'checker': name, 'text': text} for name, text in package.findings],
            'notes': (*doubts, *package.notes),
            'score_minutes': score_minutes,
            'official_score_minutes': package.official_score_minutes,
        },
        exit_code=EXIT_FAILED if package.refusals else EXIT_OK,
    )


def _compare(package: Package, score_minutes: float | None) -> list[str]:
    """Return a warning if the scores of result_summarizer and report differ although no score was
    scaled."""
    official = package.official_score_minutes
    is_scaled = any(name == 'scaling' for name, _ in package.findings)
    if official is None or score_minutes is None or is_scaled:
        return []
    if abs(official - score_minutes) < _SAME_SCORE_MINUTES:
        return []
    hint = '; see the warnings above' if package.remarks else ''
    return [
        f'the scores differ: {official:.2f} min from result_summarizer, {score_minutes:.2f} min '
        f'from report; the former is official{hint}'
    ]
