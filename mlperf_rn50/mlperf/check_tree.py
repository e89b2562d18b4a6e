"""The official tools run over a submission tree: package_checker and result_summarizer.

Source: mlperf_logging; the layouts of v0.6 and later rounds.
"""
import contextlib
import csv
import importlib
import io
import logging
import re
import sys
import tempfile
import traceback
from pathlib import Path

from mlperf_rn50.mlperf import check

Finding = tuple[str, str]  # a checker, and what it says


def _official(tool: str, *arguments: str) -> str:
    """What an official tool prints and logs, its traceback too: run as its command is, but in this process.

    Importing pandas and scipy takes longer than all that the tools do. For this time the process has the arguments,
    the output and the root logger of the command; so does every thread of it.
    """
    from mlperf_logging.compliance_checker import mlp_compliance
    mlp_compliance.enqueued_configs.clear()  # a crash may have left some
    said, root, argv = io.StringIO(), logging.getLogger(), sys.argv
    handlers, level = root.handlers, root.level
    root.handlers, sys.argv = [], [tool, *arguments]
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            importlib.import_module(f'mlperf_logging.{tool}.{tool}').main()
    except (Exception, SystemExit):
        said.write(traceback.format_exc())
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers, sys.argv = handlers, argv
        root.setLevel(level)
    return said.getvalue()


def check_tree(home: Path, ruleset: str) -> tuple[list[str], list[Finding]]:
    """What the official package_checker finds wrong with a tree, and what it finds right; there is none for v0.5.

    The logs must have passed check_results first: the official checker builds file names from values of the log.
    """
    if ruleset == check.V05:
        return [], []
    with tempfile.TemporaryDirectory() as place:
        text = _official('package_checker', str(home.absolute()), 'training', ruleset, '--log_output', f'{place}/log')
    lines = [' '.join(line.replace(f'{home.absolute()}/', '').split()) for line in text.splitlines()]
    if 'PACKAGE CHECKER FOUND NO ERRORS' not in text:
        errors = [line.removeprefix('ERROR - ') for line in lines if line.startswith('ERROR - ')]
        return [f'package_checker: {e}' for e in errors] or [f'package_checker: {text[-500:]}'], []
    described = [('system description', 'passed') for line in lines if 'System description checker passed' in line]
    converged = [('convergence', m[1]) for line in lines if (m := re.search(r'RCP Test Passed: (.*)', line))]
    return [], [*described, *converged, ('package_checker', f'found no errors ({ruleset})')]


def summarize(home: Path, system: str, ruleset: str) -> float | None:
    """The score in minutes that the official result_summarizer computes; None where it has none."""
    if ruleset == check.V05:
        return None
    with tempfile.TemporaryDirectory() as place:
        _official('result_summarizer', str(home.absolute()), 'training', ruleset, '--csv', f'{place}/summary.csv')
        path = Path(place) / 'summary.csv'
        rows = path.read_text().splitlines() if path.is_file() else []
    if len(rows) < 2:
        return None
    value = next((r.get('resnet') for r in csv.DictReader(rows) if r.get('system') == system), None)
    return float(value) if value else None
