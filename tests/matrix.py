"""Writes tests/cluster/README.md: every fault in every phase of a run, what must happen, its test and its time.

  python tests/matrix.py                 from the marks of the tests: @pytest.mark.fault(FAULT, PHASE, PHASE...)
  python tests/matrix.py --times FILE    with the times of a run: pytest --junitxml FILE
"""
import argparse
import ast
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).parent
PAGE, TIMES = TESTS / 'cluster/README.md', TESTS / 'cluster/times.json'
PHASES = ('start-up', 'training', 'evaluation', 'checkpoint')
FAULTS = {
    'kill': ('a rank or its watcher gets SIGKILL', 'rank, host, step and phase are named; the run ends everywhere with '
             '1, or goes on with `--restarts`'),
    'stop': ('a rank gets SIGSTOP, or hangs', 'ended at the limit of the phase, with its stacks in the run folder and '
             'who is waited for; then as above'),
    'term': ('SIGTERM to the launcher', 'a checkpoint, 75; before there is one, 1'),
    'int': ('Ctrl-C', 'the same; the second one ends it at once with 130'),
    'hup': ('the terminal is closed', 'as SIGTERM'),
    'cut link': ('the network of a host', 'the host is named, the run ends everywhere with 1; a link that heals within '
                 'seconds does no harm'),
    'full disk': ('of the run folder', 'one line names the file and the disk; nothing is torn, the last checkpoint is '
                  'whole'),
    'full tmp': ('TMPDIR and /dev/shm', 'at the start one line, 2; later the run goes on'),
    'oom': ('the kernel ends a rank for its memory', 'the limit is named, and the number that would fit'),
    'damaged data': ('a record file is cut short', 'rank, file and record are named, exit code 2'),
    'damaged checkpoint': ('the newest one', 'said, and the newest whole one is used; a run at work is not disturbed'),
    'changed configuration': ('config.yaml is edited', 'a run at work keeps its own; a resume names the keys and is '
                              'refused without --allow-changed'),
    'clock jump': ('the wall clock, by an hour', 'durations and the course of the run are the same'),
    'dead ssh': ('sshd of a host and its connections are gone', 'as a cut link'),
    'lost shared folder': ('the run folder vanishes', 'one line names it, and the run ends'),
    'second launcher': ('in the same run folder', 'refused with 2, in one line with who is there; the first goes on'),
}
# What no test of this machine can do, and how it was tried.
BY_HAND: dict[tuple[str, str], str] = {}
Cells = dict[tuple[str, str], list[str]]


def marks_of(path: Path) -> Iterator[tuple[str, list[str]]]:
    """(test, words of its mark) for all marks in a file; those of a pytest.param belong to the function below it."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                for call in ast.walk(decorator):
                    if isinstance(call, ast.Call) and ast.unparse(call.func) == 'pytest.mark.fault':
                        yield node.name, [ast.literal_eval(a) for a in call.args]


def collect() -> Cells:
    """The tests of each cell, as FILE::TEST."""
    cells: Cells = defaultdict(list)
    for path in sorted(TESTS.rglob('test_*.py')):
        for test, (fault, *phases) in marks_of(path):
            for phase in phases:
                if fault not in FAULTS or phase not in PHASES:
                    sys.exit(f'{path}::{test}: no such cell: {fault}, {phase}')
                name = f'{path.relative_to(TESTS)}::{test}'
                if name not in cells[fault, phase]:
                    cells[fault, phase].append(name)
    return cells


def load_times() -> dict[str, float]:
    """Seconds by FILE::TEST, all its parameters together."""
    return json.loads(TIMES.read_text()) if TIMES.exists() else {}


def read_times(junit: Path) -> dict[str, float]:
    """Seconds by FILE::TEST of a junit file."""
    times: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(junit).iter('testcase'):
        place = case.get('classname', '').removeprefix('tests.').replace('.', '/')
        times[f'{place}.py::{case.get("name", "").partition("[")[0]}'] += float(case.get('time', 0))
    return times


def render(cells: Cells, times: dict[str, float]) -> str:
    """The page."""
    numbers = {name: k for k, name in enumerate(sorted({n for names in cells.values() for n in names}), 1)}
    lines = ['# What can go wrong, and when', '',
             'Written by `python tests/matrix.py` from the marks of the tests. A number is a test of the list below; '
             f'phases are {", ".join(PHASES[:-1])} and while a checkpoint is written.', '',
             f'| fault | what must happen | {" | ".join(PHASES)} |', '|---|---|' + '---|' * len(PHASES)]
    for fault, (what, then) in FAULTS.items():
        found = [', '.join(str(numbers[n]) for n in cells.get((fault, p), [])) or BY_HAND.get((fault, p), '')
                 for p in PHASES]
        lines.append(f'| **{fault}**: {what} | {then} | {" | ".join(found)} |')
    lines += ['', '| number | test | seconds |', '|---|---|---|']
    for name, number in numbers.items():
        seconds = f'{times[name]:.0f}' if name in times else ''
        lines.append(f'| {number} | `{name}` | {seconds} |')
    return '\n'.join([*lines, '', 'Seconds: as measured once, all parameters of a test together; those of '
                      'tests/cluster on one core of two, while other work had the second. None of them is asserted.',
                      ''])


def empty_cells(cells: Cells) -> list[tuple[str, str]]:
    """The cells without a test and without a word how they were tried."""
    return [(f, p) for f in FAULTS for p in PHASES if not cells.get((f, p)) and (f, p) not in BY_HAND]


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--times', type=Path, metavar='FILE', help='a junit file')
    options = parser.parse_args()
    found_cells = collect()
    if options.times:
        named = {n for names in found_cells.values() for n in names}
        measured = {n: round(t, 1) for n, t in {**load_times(), **read_times(options.times)}.items() if n in named}
        TIMES.write_text(json.dumps(measured, indent=1, sort_keys=True) + '\n')
    PAGE.write_text(render(found_cells, load_times()))
    for cell in empty_cells(found_cells):
        print('empty:', *cell, sep='\t')
