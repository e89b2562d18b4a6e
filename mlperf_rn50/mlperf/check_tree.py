"""The official tools run over a submission tree: package_checker and result_summarizer.

Source: mlperf_logging; the layouts of v0.6 and later rounds.
"""
import csv
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from mlperf_rn50.mlperf import check

Finding = tuple[str, str]  # a checker, and what it says


def _official(*command: str) -> str:
    """What one of the official tools says; it writes its own log where it runs."""
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run([sys.executable, '-m', *command], cwd=place, capture_output=True, text=True)
    return done.stdout + done.stderr


def check_tree(home: Path, ruleset: str) -> tuple[list[str], list[Finding]]:
    """What the official package_checker finds wrong with a tree, and what it finds right; there is none for v0.5.

    The logs must have passed check_results first: the official checker builds file names from values of the log.
    """
    if ruleset == check.V05:
        return [], []
    text = _official('mlperf_logging.package_checker', str(home.absolute()), 'training', ruleset)
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
        _official('mlperf_logging.result_summarizer', str(home.absolute()), 'training', ruleset, '--csv',
                  f'{place}/summary.csv')
        path = Path(place) / 'summary.csv'
        rows = path.read_text().splitlines() if path.is_file() else []
    if len(rows) < 2:
        return None
    value = next((r.get('resnet') for r in csv.DictReader(rows) if r.get('system') == system), None)
    return float(value) if value else None
