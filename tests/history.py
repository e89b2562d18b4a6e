"""Comparison of the report with the results of published logs that another program read.

    .venv/bin/python tests/history.py ../shared/history

prints agreements, refusals with reasons, and differences. The exit code is 1 if any set differs.
The folder contains truth.csv, and either archives v*.tar.xz or the same logs unpacked.
"""

import csv
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

_MINUTES = 0.0101  # truth.csv has three decimals
_NAMES = ('round', 'org', 'system')
_COLUMNS = {
    'nodes': 'num_nodes',
    'accelerators': 'num_accelerators',
    'score_minutes': 'score_minutes',
}


def load_systems(folder: Path) -> list[dict]:
    """Return the systems of the JSON report on a folder; its archives are unpacked into a temporary
    folder."""
    with tempfile.TemporaryDirectory() as unpacked:
        archives = sorted(folder.glob('v*.tar.xz'))
        for archive in archives:
            with tarfile.open(archive) as tar:
                tar.extractall(unpacked, filter='data')
        command = [
            Path(sys.executable).with_name('mlperf-rn50'),
            'report',
            '--format',
            'json',
            unpacked if archives else folder,
        ]
        return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout)[
            'systems'
        ]


def names_of(system: dict) -> set[tuple[str, ...]]:
    """Return round, organisation and system of each folder:
    <round>/<org>/results/<system>/resnet."""
    parts = [Path(folder).parts for folder in system['folders']]
    return {(p[-5], p[-4], p[-2]) for p in parts if len(p) > 5}


def _number(text: str) -> float | None:
    return float(text) if text else None


def _difference(
    name: str, got: float | None, expected: float | None, tolerance: float
) -> str | None:
    is_equal = expected is None or got is not None and abs(got - expected) <= tolerance
    return None if is_equal else f'{name}: got {got}, expected {expected}'


def differences(system: dict, row: dict[str, str]) -> list[str]:
    """Return the values of a system that differ from its row in truth.csv."""
    runs = sorted(system['runs'], key=lambda run: run['file'])
    # truth.csv has it as one
    is_pod = any('the number of nodes is unknown' in f['text'] for f in system['findings'])
    columns = {
        column: key for column, key in _COLUMNS.items() if not (is_pod and column == 'nodes')
    }
    found = [
        _difference(column, system[key], _number(row[column]), _MINUTES)
        for column, key in columns.items()
    ]
    found += [
        _difference('runs', len(runs), int(row['runs']), 0),
        _difference(
            'succeeded', sum(r['status'] == 'converged' for r in runs), int(row['succeeded']), 0
        ),
    ]
    for run, minutes, epoch in zip(runs, row['minutes'].split(';'), row['last_epochs'].split(';')):
        name, last = (
            Path(run['file']).name,
            run['evaluations'][-1]['epoch'] if run['evaluations'] else None,
        )
        time = run['time_to_train_s'] and run['time_to_train_s'] / 60
        found += [
            _difference(f'minutes of {name}', time, _number(minutes), _MINUTES),
            # some logs count from 0, or in fractions
            _difference(f'epochs of {name}', last, _number(epoch), 1),
        ]
    return [text for text in found if text]


def compare(systems: list[dict], folder: Path) -> dict[str, list[str]]:
    """Return a line per row of truth.csv, by result; sets that break a rule, as by check, are
    refused."""
    by_name = {name: system for system in systems for name in names_of(system)}
    found: dict[str, list[str]] = {
        result: [] for result in ('agrees', 'refused', 'differs', 'missing')
    }
    for row in csv.DictReader((folder / 'truth.csv').read_text(encoding='utf-8').splitlines()):
        system = by_name.get(tuple(map(row.get, _NAMES)))
        texts: list[str] = []
        result = 'missing'
        if system:
            texts = [system['refusal']] if system['refusal'] else differences(system, row)
            result = 'differs' if texts else 'agrees'
            if texts and system['violations']:
                result, texts = 'refused', system['violations']
        found[result].append(': '.join(['/'.join(map(row.get, _NAMES)), *texts]))
    return found


if __name__ == '__main__':
    report = load_systems(Path(sys.argv[1]))
    results = compare(report, Path(sys.argv[1]))
    for result, lines in results.items():
        print(f'{result}: {len(lines)}', *(lines if result != 'agrees' else ()), sep='\n  ')
    sys.exit(1 if results['differs'] or results['missing'] else 0)
