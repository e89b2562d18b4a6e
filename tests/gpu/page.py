"""The one page that launch/test.sh --gpu leaves: python tests/gpu/page.py FOLDER, with nothing but Python.

FOLDER holds what the run wrote as it went: *.jsonl, a JSON object a line with its 'kind' (machine, tests, test,
figure), and doctor.json. So a run that crashed has its page, too. Names and texts in there are believed to be anything.
"""
import json
import math
import os
import re
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

FORMAT = 'mlperf-rn50 gpu result 1'
EXPECTATIONS = Path(__file__).with_name('expectations.json')
DRY_RUN = 'DRY RUN ON A CPU: this page shows that the tests of tests/gpu run. It says nothing about any GPU.'
_MAX_TEXT = 600
_OUTCOMES = ('passed', 'failed', 'error', 'not run')


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The records of a run, in the order of files and lines; a line that is torn or no object is left out."""
    found = []
    for path in sorted(p for p in folder.glob('*.jsonl') if p.is_file()):
        for line in path.read_text(encoding='utf-8', errors='replace').splitlines():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                found.append(record)
    return found


def read_doctor(folder: Path) -> list[dict[str, Any]] | None:
    """What doctor found, None where it said nothing that can be read."""
    try:
        checks = json.loads((folder / 'doctor.json').read_text(encoding='utf-8'))['checks']
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return [c for c in checks if isinstance(c, dict)] if isinstance(checks, list) else None


def kind_of(card: str) -> str | None:
    """The kind of a card, by the name that a log or nvidia-smi gives it; None for one that no published set has.

    An A100 without more words is of 2020, when there were those of 40 GB on SXM.
    """
    if 'V100' in card:
        return 'V100'
    if not re.search(r'A100\b', card):
        return None
    if re.search('pcie', card, re.IGNORECASE):
        return 'A100 PCIe'
    return 'A100 SXM 80GB' if re.search(r'80 ?GB', card) else 'A100 SXM 40GB'


def _number(value: Any) -> float | None:
    """A finite number as it is, None for anything else."""
    with suppress(OverflowError):  # an integer of hundreds of digits
        if isinstance(value, (int, float)) and math.isfinite(value):
            return value
    return None


def judge(value: Any, low: float | None, high: float | None) -> str:
    """Where a number lies: 'below', 'within' or 'above'; '' without a number or bounds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (low is None and high is None):
        return ''
    if _number(value) is None:
        return 'no number'
    return 'below' if low is not None and value < low else 'above' if high is not None and value > high else 'within'


def _bounds(figure: dict[str, Any], published: dict[str, Any] | None) -> tuple[float | None, float | None, str]:
    """What a figure is held against, and where that comes from."""
    if figure.get('expects') == 'published':
        if not published:
            return None, None, 'no published figure of this card'
        low, high = published['bench_train']
        return low, high, 'published systems of one node'
    return _number(figure.get('low')), _number(figure.get('high')), str(figure.get('source') or '')


def _tests(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each test once, with how it ended: one that was collected and never ended has not run."""
    ends: dict[str, dict[str, Any]] = {}
    for record in records:
        if record.get('kind') == 'tests':
            names = record.get('names')
            for name in names if isinstance(names, list) else ():
                ends.setdefault(str(name), {'name': str(name), 'outcome': 'not run',
                                            'reason': 'the process that ran it ended before'})
    for record in records:
        if record.get('kind') == 'test' and record.get('outcome') in _OUTCOMES:
            name = str(record.get('name'))
            ends[name] = {'name': name, 'outcome': record['outcome'], 'reason': str(record.get('reason') or ''),
                          'seconds': record.get('seconds')}
    return list(ends.values())


def make_result(records: list[dict[str, Any]], doctor: list[dict[str, Any]] | None, expectations: dict[str, Any],
                now: float) -> dict[str, Any]:
    """Everything of the page.

    Args:
        records: of read_records.
        doctor: its checks.
        expectations: of expectations.json.
        now: seconds since 1970.
    """
    machine: dict[str, Any] = {}
    for record in records:
        if record.get('kind') == 'machine':
            machine.update({k: v for k, v in record.items() if k != 'kind'})
    found = machine.get('gpus')
    gpus = found if isinstance(found, list) else []
    card = str(gpus[0].get('name', 'unknown')) if gpus and isinstance(gpus[0], dict) else 'no GPU'
    kind, is_dry = kind_of(card), bool(machine.get('dry_run'))
    has_mig = any(str(g.get('mig.mode.current', '')).startswith('Enabled') for g in gpus if isinstance(g, dict))
    published = None if is_dry or has_mig or kind is None else expectations['kinds'].get(kind)
    figures = []
    for record in records:
        if record.get('kind') == 'figure':
            low, high, source = _bounds(record, published)
            value = record.get('value')
            figures.append({'test': str(record.get('test')), 'name': str(record.get('name')),
                            'value': value, 'unit': str(record.get('unit') or ''),
                            'low': low, 'high': high, 'source': source, 'verdict': judge(value, low, high)})
    tests = _tests(records)
    counts = {outcome: sum(t['outcome'] == outcome for t in tests) for outcome in _OUTCOMES}
    return {'format': FORMAT, 'date': time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(now)), 'dry_run': is_dry,
            'card': card, 'card_kind': kind, 'published': published, 'published_source': expectations['source'],
            'machine': machine, 'doctor': doctor, 'counts': counts, 'tests': tests, 'figures': figures}


def text_of(value: Any) -> str:
    """A value in a cell of a table: one line without control characters, in which nothing is markup."""
    if isinstance(value, float):
        value = f'{value:,.4g}' if abs(value) < 1000 else f'{value:,.0f}'
    text = ''.join(c if c.isprintable() else ' ' for c in str(value))
    text = text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + '…'
    text = text.replace('&', '&amp;').replace('<', '&lt;').replace('>', '&gt;')
    return re.sub(r'([\\`*_{}\[\]|~#!])', r'\\\1', text).replace('://', ':&#8203;//') or '–'


def _table(head: list[str], rows: list[list[Any]]) -> list[str]:
    lines = [head, ['---'] * len(head), *([text_of(cell) for cell in row] for row in rows)]
    return [f'| {" | ".join(line)} |' for line in lines]


def _expected(figure: dict[str, Any]) -> str:
    low, high = figure['low'], figure['high']
    bounds = f'{low:g} to {high:g}' if low is not None and high is not None else \
        f'{low:g} or more' if low is not None else f'{high:g} or less' if high is not None else ''
    return ', '.join(t for t in (bounds, figure['source']) if t)


def _machine_rows(machine: dict[str, Any]) -> list[list[Any]]:
    """Names and values, one level of objects spelled out."""
    rows: list[list[Any]] = []
    for name, value in machine.items():
        if isinstance(value, dict):
            rows += [[f'{name}: {key}', v] for key, v in value.items()]
        elif isinstance(value, list):
            rows += [[f'{name} {i}', ', '.join(f'{k} {v}' for k, v in item.items()) if isinstance(item, dict) else item]
                     for i, item in enumerate(value)]
        else:
            rows.append([name, value])
    return rows


def render_markdown(result: dict[str, Any]) -> str:
    """The page for people."""
    counts = ', '.join(f'{n} {outcome}' for outcome, n in result['counts'].items() if n) or 'no test'
    lines = [f'# GPU result: {text_of(result["card"])}, {result["date"][:10]}', '']
    if result['dry_run']:
        lines += [f'**{DRY_RUN}**', '']
    lines += [f'Tests: {counts}.', '', '## Figures', '', *_table(
        ['figure', 'value', 'unit', 'expected', 'lies'],
        [[f['name'], f['value'], f['unit'], _expected(f), f['verdict']] for f in result['figures']])]
    if result['published']:
        low, high = result['published']['full_speed']
        lines += ['', f'Published for this kind of card ({text_of(result["card_kind"])}, one node): {low:g} to '
                      f'{high:g} images/s per GPU. Source: {text_of(result["published_source"])}.']
    lines += ['', '## Tests', '', *_table(['test', 'outcome', 'seconds', 'why'],
                                          [[t['name'], t['outcome'], '' if t.get('seconds') is None else t['seconds'],
                                            t['reason']] for t in result['tests']])]
    lines += ['', '## Doctor', '']
    lines += ['It said nothing that can be read.'] if result['doctor'] is None else _table(
        ['check', 'status', 'found', 'fix'],
        [[c.get('name', ''), c.get('status', ''), c.get('found', ''), c.get('fix', '')] for c in result['doctor']])
    return '\n'.join([*lines, '', '## Machine', '', *_table(['what', 'value'], _machine_rows(result['machine'])), ''])


def write_atomically(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    with tempfile.NamedTemporaryFile('w', encoding='utf-8', dir=path.parent, delete=False) as f:
        try:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
            os.chmod(f.name, 0o644)
            os.replace(f.name, path)
        except BaseException:
            os.unlink(f.name)
            raise


def file_stem(result: dict[str, Any]) -> str:
    """gpu_CARD_DATE, of letters and digits, whatever the card is called; a dry run says so."""
    card = re.sub(r'[^A-Za-z0-9]+', '-', result['card']).strip('-')[:60] or 'unknown'
    card = 'dry_run' if result['dry_run'] else card
    return f'gpu_{card}_{result["date"][:10].replace("-", "")}'


def write_page(folder: Path, now: float) -> tuple[Path, Path]:
    """Makes both files of a folder from what is in it; where they are."""
    expectations = json.loads(EXPECTATIONS.read_text(encoding='utf-8'))
    result = make_result(read_records(folder), read_doctor(folder), expectations, now)
    result = json.loads(json.dumps(result, default=str), parse_constant=str)  # JSON has no numbers that are not finite
    paths = folder / f'{file_stem(result)}.json', folder / f'{file_stem(result)}.md'
    write_atomically(paths[0], json.dumps(result, indent=1, allow_nan=False) + '\n')
    write_atomically(paths[1], render_markdown(result))
    return paths


if __name__ == '__main__':
    made = write_page(Path(sys.argv[1]), time.time())
    print(made[1].read_text(encoding='utf-8'))
    print('to send back:', *made)
