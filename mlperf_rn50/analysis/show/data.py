"""Render the data of an answer as JSON, and rows of values as CSV.

Text is yielded in parts, because that of 10,000 runs takes more memory than the runs.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, takewhile
from typing import Any

from mlperf_rn50.text import printable


def render_json(value: Any, depth: int = 0) -> Iterator[str]:
    """Yield the parts of a value as JSON. An iterator, also in an object, is written as a list,
    item by item.

    Args:
        depth: number of objects and lists around the value.
    """
    line = '\n' + ' ' * depth
    plain: dict[str, Any] = {}  # the keys before the first iterator, which are written at once
    items: Iterable[tuple[str, Any]]
    if isinstance(value, Iterator):
        brackets = '[]'
        items = (('', item) for item in value)
    elif isinstance(value, Mapping) and any(isinstance(v, Iterator) for v in value.values()):
        brackets = '{}'
        plain = dict(takewhile(lambda item: not isinstance(item[1], Iterator), value.items()))
        items = [(f'{json.dumps(k)}: ', v) for k, v in value.items() if k not in plain]
    else:
        yield _dumps(value).replace('\n', line)
        return
    yield brackets[0]
    if plain:
        yield _dumps(plain)[1:-2].replace('\n', line)
    for number, (name, item) in enumerate(items):
        yield f'{"," if number or plain else ""}{line} {name}'
        yield from render_json(item, depth + 1)
    yield f'{line}{brackets[1]}'


def _dumps(value: Any) -> str:
    return json.dumps(value, indent=1, allow_nan=False)


def _spreadsheet(value: Any) -> Any:
    """Return a value for CSV. A leading apostrophe keeps spreadsheets from running text as a
    formula."""
    if not isinstance(value, str):
        return '' if value is None else value
    return f"'{printable(value)}" if value[:1] in ('=', '+', '-', '@') else printable(value)


def render_csv(head: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of CSV: the head, then the values of each row, empty where it has none."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator='\n')
    for values in chain([head], ([row.get(name) for name in head] for row in rows)):
        writer.writerow(map(_spreadsheet, values))
        yield out.getvalue()
        out.seek(out.truncate(0))
