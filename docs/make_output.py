"""Print docs/output.md: the keys of JSON, CSV and metrics.jsonl. A test compares them.

Keys come from the outputs of the commands and from runfolder/records.py, and the meanings of the
former from output_keys.yaml. A key without a meaning, or a meaning without its key, is an error.

Usage: python docs/make_output.py > docs/output.md
"""

import ast
import json
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / 'mlperf_rn50/runfolder/records.py'
SHOWN_RECORDS = {
    'RanksRecord': 'The event `ranks`',
    'RankSteps': 'A rank of the event `ranks`',
    'NetworkRecord': 'The event `network`',
    'StepSpans': 'A line of a trace',
}
HEAD = """# Keys of output files

Keys of `--format json`, of `--format csv` and of two events of `metrics.jsonl`, by command. Units
are in the names; unknown values are null, or empty in CSV. `python docs/make_output.py` prints
this page and checks that it names every key.
"""
CSV = """## CSV of report

Columns are keys of the JSON report with one value. Cells that a spreadsheet would take for a
formula begin with `'`.

| `--rows` | a row per | columns |
|---|---|---|
| `runs` (default) | run | those of a system, then {runs} |
| `systems` | system | those of a system; use these rows for sums over systems |
| `evaluations` | evaluation | {evaluations} |

`--out` writes the rows of runs and evaluations as `report.csv` and `report_evaluations.csv`, which
`file` joins:

```python
import pandas as pd

runs = pd.read_csv('report/report.csv')
print(runs[runs.status == 'converged'].groupby('system').time_to_train_s.describe())
pd.read_csv('report/report_evaluations.csv').pivot(
    index='epoch', columns='file', values='accuracy'
).plot()
```
"""
METRICS = """## Times of a step

Each rank measures the phases of every step without delaying it. At each evaluation, a line of
`metrics.jsonl` with the event `ranks` has their sums since the last one. The exchange during the
backward pass, and the update of a single rank, are measured on one of 16 steps.
"""


@cache
def output(*words):
    """Return what a command prints."""
    with tempfile.TemporaryDirectory() as folder:
        words = [w.replace('OUT', f'{folder}/out') for w in words]
        done = subprocess.run(
            [sys.executable, '-m', 'mlperf_rn50', *words], capture_output=True, text=True, cwd=ROOT
        )
    if done.returncode and not done.stdout:
        raise SystemExit(f'{words}: {done.stderr}')
    return done.stdout


def keys_at(value, path):
    """Return the keys of the first object at a path; lists on the way have their first element."""
    for name in filter(None, path.split('.')):
        value = value[name][0]
    return set(value)


def render_keys(section):
    value = json.loads(output(*section['command'].split(), '--format', 'json'))
    rows = {tuple(keys.split(', ')): text for keys, text in section['rows'].items()}
    described = {key for keys in rows for key in keys} | {'format', 'version'}
    found = keys_at(value, section['path']) | {'format', 'version'}
    if described != found:
        raise SystemExit(f'output_keys.yaml: {section["title"]}: {sorted(described ^ found)}')
    lines = [f'- {", ".join(f"`{k}`" for k in keys)}: {text}' for keys, text in rows.items()]
    intro = [section['text'], ''] if 'text' in section else []
    return '\n'.join([f'## {section["title"]}', '', *intro, *lines, ''])


def render_csv():
    def columns(rows):
        text = output('report', 'logs/digits_five', '--format', 'csv', '--rows', rows)
        return text.splitlines()[0].split(',')

    systems = columns('systems')
    of_runs = [f'`{c}`' for c in columns('runs') if c not in systems]
    of_evaluations = [f'`{c}`' for c in columns('evaluations')]
    return CSV.format(runs=', '.join(of_runs), evaluations=', '.join(of_evaluations))


def render_record(node, lines):
    """Return a list of a record's fields that have a comment, from its source."""
    rows = []
    for field in (n for n in node.body if isinstance(n, ast.AnnAssign)):
        before, number = [], field.lineno - 2
        while lines[number].strip().startswith('#'):
            before.insert(0, lines[number].strip(' #'))
            number -= 1
        comment = ' '.join(before) or lines[field.end_lineno - 1].partition('  # ')[2]
        if comment:
            text = comment.replace('**', '^')
            rows.append(f'- `{field.target.id}`: {text.rstrip(".")}')
    summary = re.sub(r'\s+', ' ', ast.get_docstring(node))
    title = f'### {SHOWN_RECORDS[node.name]}'
    return '\n'.join([title, '', summary, '', *rows, ''])


def render_records():
    source = RECORDS.read_text(encoding='utf-8')
    classes = {n.name: n for n in ast.parse(source).body if isinstance(n, ast.ClassDef)}
    return [render_record(classes[name], source.splitlines()) for name in SHOWN_RECORDS]


def main():
    sections = yaml.safe_load((ROOT / 'docs/output_keys.yaml').read_text(encoding='utf-8'))
    parts = [HEAD, *map(render_keys, sections), render_csv(), METRICS, *render_records()]
    print('\n'.join(parts), end='')


if __name__ == '__main__':
    main()
