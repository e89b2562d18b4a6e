"""The official tools run over a submission tree: package_checker and result_summarizer.

They leave files in the tree, take some signs of its path for patterns, and open whatever is there: so they are given
a copy of its regular files. Source: mlperf_logging; the layouts of v1.0 and later rounds.
"""
import csv
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mlperf_rn50.mlperf.official import NEEDED, NotInstalled

Finding = tuple[str, str]  # a checker, and what it says
_MAX_S = 600  # for one tool, which takes seconds


@dataclass(frozen=True)
class TreeVerdict:
    """What the official tools say of a tree; scores are scaled where the reference convergence asks for it."""

    problems: tuple[str, ...] = ()  # that package_checker finds, a sentence each
    findings: tuple[Finding, ...] = ()  # what it finds right
    scores: Mapping[str, float] = field(default_factory=dict)  # minutes by the system_name of the description
    crash: str | None = None  # of result_summarizer


def _official(tool: str, *arguments: str, place: Path) -> tuple[str, str | None]:
    """Return what an official tool prints and logs, and the last line of its crash: it runs as its command does."""
    with tempfile.TemporaryDirectory(dir=place) as here:
        try:
            done = subprocess.run([sys.executable, '-m', f'mlperf_logging.{tool}', *arguments], cwd=here, text=True,
                                  errors='replace', capture_output=True, stdin=subprocess.DEVNULL, timeout=_MAX_S)
        except subprocess.TimeoutExpired:
            return '', f'no answer after {_MAX_S} s'
    last = ' '.join((done.stderr.strip().splitlines() or [f'exit code {done.returncode}'])[-1].split())[-300:]
    if last.startswith('ModuleNotFoundError'):
        raise NotInstalled(NEEDED)
    return done.stdout + done.stderr, last if 'Traceback (most recent' in done.stderr or done.returncode < 0 else None


def _copy(home: Path, place: Path) -> Path:
    """What the tools read of a tree: regular files, and no folder that a link leads to; no scaling but their own."""
    def ignore(folder: str, names: list[str]) -> list[str]:
        paths = [Path(folder, name) for name in names]
        return [p.name for p in paths if p.name == 'scaling.json' or not (
            p.is_file() or p.is_dir() and not p.is_symlink())]
    for name in ('results', 'systems'):
        if (home / name).is_dir():
            shutil.copytree(home / name, place / name, ignore=ignore)
    return place


def judge_tree(home: Path, ruleset: str) -> TreeVerdict:
    """Return what the official tools say of a tree.

    The logs must have passed check_results first: the official checker builds file names from values of the log.

    Raises:
        NotInstalled: mlperf-logging is not there.
    """
    with tempfile.TemporaryDirectory() as place:
        tree = _copy(home, Path(place, 'tree'))
        problems, findings = _check_package(tree, ruleset, Path(place, 'log'))
        if problems:
            return TreeVerdict(tuple(problems))
        scores, crash = _summarize(tree, ruleset, Path(place, 'summary.csv'))
        findings += _scaled(tree)
        return TreeVerdict((), tuple(findings), scores, crash)


def _check_package(tree: Path, ruleset: str, log: Path) -> tuple[list[str], list[Finding]]:
    """What package_checker finds wrong, and what it finds right."""
    text, crash = _official('package_checker', str(tree), 'training', ruleset, '--log_output', str(log),
                            place=log.parent)
    lines = [' '.join(line.replace(f'{tree}/', '').split()) for line in text.splitlines()]
    if crash:
        return [f'package_checker crashed: {crash}'], []
    if 'PACKAGE CHECKER FOUND NO ERRORS' not in text:
        errors = [line.removeprefix('ERROR - ') for line in lines if line.startswith('ERROR - ')]
        return [f'package_checker: {e}' for e in errors] or [f'package_checker: {text[-500:]}'], []
    described = [('system description', 'passed') for line in lines if 'System description checker passed' in line]
    converged = [('convergence', m[1]) for line in lines if (m := re.search(r'RCP Test Passed: (.*)', line))]
    return [], [*described, *converged, ('package_checker', f'found no errors ({ruleset})')]


def _scaled(tree: Path) -> list[Finding]:
    """The factors that package_checker left for result_summarizer."""
    factors = [(p.parent.parent.name, json.loads(p.read_text())['scaling_factor'])
               for p in sorted(tree.glob('results/*/resnet/scaling.json'))]
    return [('scaling', f'{factor:.4f} for {system}: faster than the reference, within its bounds')
            for system, factor in factors]


def _summarize(tree: Path, ruleset: str, path: Path) -> tuple[dict[str, float], str | None]:
    """The scores in minutes that result_summarizer computes, and its crash."""
    _, crash = _official('result_summarizer', str(tree), 'training', ruleset, '--csv', str(path), place=path.parent)
    rows = csv.DictReader(path.read_text().splitlines()) if path.is_file() else []
    scores = {row['system']: float(row['resnet']) for row in rows if row.get('resnet')}
    return scores, f'crashed: {crash}' if crash else None
