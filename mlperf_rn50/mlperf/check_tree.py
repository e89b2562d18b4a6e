"""The official tools run over a submission tree: package_checker and result_summarizer.

They leave files in the tree, take some signs of its path for patterns, and open whatever is there: so they are given
a copy of its regular files. Source: mlperf_logging; the layouts of v0.6 and later rounds.
"""
import contextlib
import csv
import io
import json
import logging
import re
import shutil
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

from mlperf_rn50.mlperf.official import import_official
from mlperf_rn50.mlperf.rulesets import V05

Finding = tuple[str, str]  # a checker, and what it says
# Crashes that are known: how the last line begins, and what led to it.
_KNOWN_CRASHES = {
    "NameError: name 'system_file'": 'a fault of the tool: its message about a field that a system description lacks '
                                     'is broken; fill in all 33 fields',
    'ValueError: invalid literal for int()': 'it expects numbers for number_of_nodes, host_processors_per_node and '
                                             'accelerators_per_node in a system description; fill them in',
    'KeyError: None': 'a fault of the tool: it wants one global_batch_size and submission_benchmark in all logs, that '
                      'of the run which may fail included'}


@dataclass(frozen=True)
class TreeVerdict:
    """What the official tools say of a tree.

    Args:
        problems: what package_checker finds wrong, a sentence each.
        findings: what it finds right, and what result_summarizer says.
        scores: minutes by the system_name of the description, scaled where the reference convergence asks for it.
        crash: of result_summarizer; None where it went through.
    """

    problems: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    scores: dict[str, float] | None = None
    crash: str | None = None


def _official(tool: str, *arguments: str) -> tuple[str, str | None]:
    """What an official tool prints and logs, and the last line of its crash: run as its command is, in this process.

    Importing pandas and scipy takes longer than all that the tools do. For this time the process has the arguments,
    the output and the root logger of the command; so does every thread of it.
    """
    main = import_official(f'{tool}.{tool}').main
    import_official('compliance_checker.mlp_compliance').enqueued_configs.clear()  # a crash may have left some
    said, root, argv, crash = io.StringIO(), logging.getLogger(), sys.argv, None
    handlers, level = root.handlers, root.level
    root.handlers, sys.argv = [], [tool, *arguments]
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            main()
    except (Exception, SystemExit) as e:
        crash = ' '.join(''.join(traceback.format_exception_only(e)).split())[-300:]
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers, sys.argv = handlers, argv
        root.setLevel(level)
    return said.getvalue(), crash


def _explain_crash(crash: str) -> str:
    why = next((why for start, why in _KNOWN_CRASHES.items() if crash.startswith(start)), None)
    return f'crashed: {crash}' + (f'; {why}' if why else '')


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
    """What the official tools say of a tree; there are none for v0.5.

    The logs must have passed check_results first: the official checker builds file names from values of the log.

    Raises:
        NotInstalled: mlperf-logging is not there.
    """
    if ruleset == V05:
        return TreeVerdict()
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
    text, crash = _official('package_checker', str(tree), 'training', ruleset, '--log_output', str(log))
    lines = [' '.join(line.replace(f'{tree}/', '').split()) for line in text.splitlines()]
    if crash:
        return [f'package_checker {_explain_crash(crash)}'], []
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
    _, crash = _official('result_summarizer', str(tree), 'training', ruleset, '--csv', str(path))
    rows = csv.DictReader(path.read_text().splitlines()) if path.is_file() else []
    unit = 1000 if ruleset == '0.6.0' else 1  # whose times are seconds, which it takes for milliseconds
    scores = {row['system']: float(row['resnet']) * unit for row in rows if row.get('resnet')}
    return scores, _explain_crash(crash) if crash else None
