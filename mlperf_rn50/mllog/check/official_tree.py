"""The official tools for a submission tree, called as verify_for_v*_training.sh calls them.

Their exit codes are 0 for most errors, so their text is read. package_checker and
result_summarizer work on a copy of the regular ResNet files, because they leave files in the tree,
interpret characters of its path as patterns, and open special files; repo_checker only lists the
tree. v0.5 has no tools for a tree.
Source: mlcommons/logging, scripts and mlperf_logging.
"""

import csv
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

from mlperf_rn50.files import read_text
from mlperf_rn50.mllog.check.faults import Fault
from mlperf_rn50.mllog.check.official import NEEDED, NotInstalled
from mlperf_rn50.mllog.rulesets import ROUND_OF, V05
from mlperf_rn50.runfolder.names import run_number
from mlperf_rn50.text import some

PARAMS = 'package_checker_params'  # a file that contains options of package_checker, one a line
RCP_BYPASS = 'rcp-bypass'
_OPTIONS = (RCP_BYPASS, 'seed-checker-bypass')
# the first rulesets whose scripts call result_summarizer, call repo_checker, and read PARAMS
_SUMMARIZER_SINCE, _REPO_CHECKER_SINCE, _PARAMS_SINCE = '0.7.0', '2.0.0', '2.0.0'
_MAX_PARAMS = 1 << 16  # bytes
_MAX_S = 600  # time limit for one tool, which usually takes seconds
_MAX_NAMES = 3  # maximum number of files named in an error
_LEVEL = re.compile(r'(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) - ')
# errors that only repeat the one before
_REPEATED = ('System description file checker failed', 'Seed checker failed')

CheckResult = tuple[str, str]  # name of a checker, and its message
Remark = tuple[str, str]  # 'warning' or 'note', and a text


@dataclass(frozen=True)
class TreeVerdict:
    """What is wrong with a submission tree, and what the checkers say about it."""

    faults: Sequence[Fault] = ()
    results: Sequence[CheckResult] = ()
    # official minutes by system, multiplied by the scaling factor
    scores: Mapping[str, float] = field(default_factory=dict)
    remarks: Sequence[Remark] = ()  # about the runs
    missing: Sequence[str] = ()  # empty fields of descriptions that the round requires


def read_params(home: Path, ruleset: str, system: str) -> tuple[set[str], list[Fault]]:
    """Return the options of package_checker that the files of a tree set for a system, and the
    lines without effect. system: '' for the file in the root only.

    From v2.0 on, the official script passes on whole lines of the file in the root.
    package_checker reads the files in results/<system> and below; there a line must equal an
    option, so only a last line without a newline counts.
    """
    options, faults = set[str](), list[Fault]()
    results = home / 'results' / system
    for folder in (home, results, results / 'resnet') if system else (home,):
        path = folder / PARAMS
        if not path.is_file() or path.is_symlink():
            continue
        name = str(path.relative_to(home))
        try:
            lines = read_text(path, _MAX_PARAMS, 'replace').split('\n')
        except ValueError as e:
            faults.append(Fault(name, '', f'{e}, expected options of package_checker', PARAMS))
            continue
        read, where = lines[-1:], 'in a last line without a newline'
        if folder == home and ruleset < _PARAMS_SINCE:
            read, where = [], 'below results, because the official script reads no other file'
        elif folder == home:
            read, where = lines[:-1], 'in lines that end with a newline'
        found = set(read) & set(_OPTIONS)
        expected = f'{" or ".join(_OPTIONS)} {where}; others have no effect or stop the script'
        options |= found
        faults += [
            Fault(name, '', f'got {line!r:.80}, expected {expected}', PARAMS)
            for line in lines
            if line not in found | {''}
        ]
    return options, faults


def _run(tool: str, *arguments: object) -> tuple[str, list[Fault]]:
    """Run the command of an official tool in a folder of its own, where it leaves its log. Return
    what it logged, or its crash."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, '-m', f'mlperf_logging.{tool}', *map(str, arguments)],
                cwd=folder,
                text=True,
                errors='replace',
                capture_output=True,
                stdin=subprocess.DEVNULL,
                timeout=_MAX_S,
            )
        except subprocess.TimeoutExpired:
            return '', [_tool_fault(tool, f'crashed: no answer after {_MAX_S} s')]
    lines = done.stderr.strip().splitlines() or [f'exit code {done.returncode}']
    last = ' '.join(lines[-1].split())[-300:]
    if last.startswith('ModuleNotFoundError'):
        raise NotInstalled(NEEDED)
    if 'Traceback (most recent' in done.stderr or done.returncode < 0:
        return '', [_tool_fault(tool, f'crashed: {last}')]
    return done.stderr, []


def _tool_fault(tool: str, text: str, file: str = '') -> Fault:
    return Fault(file or 'the tree', '', text, tool)


def is_stray_log(path: Path) -> bool:
    """Return whether the official tools would take a file of a tree for a log that this program
    did not judge."""
    is_judged = path.parent.name == 'resnet' and run_number(path.name) is not None
    return path.match('result_*.txt') and not is_judged


def _copy(home: Path, place: Path, systems: Collection[str]) -> Path:
    """Copy the files that the tools read: regular files outside linked folders, except an old
    scaling.json and logs that were not judged, which could control the tools."""

    def is_ignored(path: Path) -> bool:
        is_usable = path.is_file() or path.is_dir() and not path.is_symlink()
        return path.name == 'scaling.json' or is_stray_log(path) or not is_usable

    def ignore(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if is_ignored(Path(folder, name))]

    of_systems = [Path('results', s, name) for s in systems for name in ('resnet', PARAMS)]
    for path in (Path('systems'), *of_systems):
        if (home / path).is_dir():
            shutil.copytree(home / path, place / path, ignore=ignore)
        elif (home / path).is_file():
            shutil.copyfile(home / path, place / path)
    return place


def judge_tree(home: Path, ruleset: str, systems: Collection[str]) -> TreeVerdict:
    """Run the official tools on systems of a tree whose logs were judged, and checked with
    find_danger."""
    if ruleset == V05:
        text = 'levels 1 and 2 of the v0.5 rules; no official tool for its trees can be installed'
        return TreeVerdict(results=[('logs', text)])
    faults = list(dict.fromkeys(f for s in systems for f in read_params(home, ruleset, s)[1]))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        tree = _copy(home, place / 'tree', systems)
        found, results = _check_package(tree, ruleset, read_params(home, ruleset, '')[0])
        faults += found
        results += _scalings(tree)
        scores = dict[str, float]()
        if ruleset >= _SUMMARIZER_SINCE:
            scores, crash = summarize_tree(tree, ruleset, place)
            results += [('result_summarizer', f'{s}: {m:.2f} min') for s, m in scores.items()]
            if unscored := [s for s in systems if s not in scores]:
                text = f'gives no score for {some(unscored, _MAX_NAMES)}{crash}'
                faults.append(_tool_fault('result_summarizer', text))
    if ruleset >= _REPO_CHECKER_SINCE:
        found = _check_repo(home.resolve(), ruleset)
        faults += found
        results += [] if found else [('repo_checker', 'found no errors')]
    return TreeVerdict(faults, results, scores)


def _log_errors(log: str) -> Iterator[tuple[str, str]]:
    """Yield (place, message) for each error in the log of a tool, without the repetitions.

    The place is a folder or a described system. A message continues up to the next line with a
    level.
    """
    folder = ''
    starts = [m.start() for m in re.finditer(f'^{_LEVEL.pattern}', log, re.MULTILINE)]
    for start, end in zip(starts, [*starts[1:], None]):
        level, _, text = log[start:end].partition(' - ')
        text = text.strip().strip('-').strip()
        if found := re.match(r'Running compliance checks in dir (.*)', text):
            folder = found[1]
        if level in ('ERROR', 'CRITICAL') and text not in _REPEATED:
            described = re.match(r'(System description checker failed) for (.*) : (.*)', text)
            if described:
                yield f'systems ({described[2]})', f'{described[1]}: {described[3]}'
            else:
                yield folder, text.replace(f'Result file {folder}/', '')


def _check_package(
    tree: Path, ruleset: str, options: Collection[str]
) -> tuple[list[Fault], list[CheckResult]]:
    """Return the errors of package_checker, and what it says about passed checks."""
    tool, words = 'package_checker', [f'--{name}' for name in sorted(options)]
    log, crash = _run(tool, tree, 'training', ruleset, *words)
    if crash:
        return crash, []
    text = log.replace(f'{tree}/', '')
    faults = [
        _tool_fault(tool, ' '.join(error.split())[:500], folder)
        for folder, error in _log_errors(text)
    ]
    is_clean = 'PACKAGE CHECKER FOUND NO ERRORS' in text
    if not is_clean and not faults:
        faults = [_tool_fault(tool, ' '.join(text[-500:].split()))]
    results = list[CheckResult]()
    if 'System description checker passed' in text and 'checker failed for' not in text:
        results = [('system description', 'passed')]
    converged = re.findall(r'in dir results/(.*)/resnet|RCP Test Passed: (.*)', text)
    systems = [system for system, _ in converged]
    results += [
        ('convergence', f'{systems[k - 1]}: {result}')
        for k, (_, result) in enumerate(converged)
        if result
    ]
    if is_clean:
        results.append((tool, f'found no errors ({ROUND_OF[ruleset]})'))
    return faults, results


def _scalings(tree: Path) -> list[CheckResult]:
    """Return the scaling factors that package_checker has written."""
    results = []
    for path in sorted(tree.glob('results/*/resnet/scaling.json')):
        factor = json.loads(path.read_text())['scaling_factor']
        text = f'{factor:.4f} for {path.parts[-3]}: faster than the reference, within its bounds'
        results.append(('scaling', text))
    return results


def summarize_tree(tree: Path, ruleset: str, place: Path) -> tuple[dict[str, float], str]:
    """Return the scores of result_summarizer in minutes by system, and ': crashed: ' with the
    reason, or ''.

    For v0.7 it prints the traceback of a missing RCP checker, but gives scores. Its system names
    are those in the descriptions, so the file name is taken from the address.
    """
    path = place / 'summary.csv'
    _, crash = _run('result_summarizer', tree, 'training', ruleset, '--csv', path)
    # newline: a field may contain characters that end a line elsewhere
    rows = csv.DictReader(StringIO(path.read_text(), newline='')) if path.is_file() else []
    scores = {
        Path(row['details_url']).stem: float(row['resnet']) for row in rows if row.get('resnet')
    }
    return scores, ''.join(f': {fault.text}' for fault in crash)


def _check_repo(home: Path, ruleset: str) -> list[Fault]:
    """Return the errors of repo_checker, each with the first of its files."""
    log, faults = _run('repo_checker', home, 'training', ruleset)
    for _, error in _log_errors(log):
        kind, colon, names = error.replace(f'{home}/', '').partition(': ')
        if colon:  # the other errors only say what to do
            faults.append(_tool_fault('repo_checker', kind, some(names.split('\n'), _MAX_NAMES)))
    return faults
