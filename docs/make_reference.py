"""Writes docs/configuration.md from the dataclasses of mlperf_rn50/config.py; a test holds the two together.

Usage: python docs/make_reference.py > docs/configuration.md
"""
import dataclasses
import html
from typing import Any, Literal, get_args, get_origin

from docstring_parser import parse

from mlperf_rn50.bounds import Bounds
from mlperf_rn50.config import SECTIONS

_HEAD = """# Configuration

Values come from the defaults below, then from the file given with `--config`, then from options named like the keys
(`--schedule.base_lr 0.4`). A file says only what differs from the defaults; an unknown key is refused, and the nearest
known one named. `mlperf-rn50 train --config FILE --dry-run` prints every value and what follows from them.

Written by `python docs/make_reference.py` from `mlperf_rn50/config.py`."""


def render_type(type_: Any) -> str:
    """A type as a reader of YAML would say it."""
    if get_origin(type_) is Literal:
        return ', '.join(f'`{value}`' for value in get_args(type_))
    if get_origin(type_) is tuple:
        return f'list of {render_type(get_args(type_)[0])}s'
    args = [a for a in get_args(type_) if a is not type(None)]
    if args:
        return f'{render_type(args[0])} or `null`'
    return {bool: '`true` or `false`', int: 'whole number', float: 'number', str: 'text'}[type_]


def render_default(value: Any) -> str:
    """A default as YAML writes it."""
    if isinstance(value, tuple):
        return f'`[{", ".join(f"{v:g}" for v in value)}]`'
    if value is None or isinstance(value, bool):
        return {None: '`null`', True: '`true`', False: '`false`'}[value]
    return f'`{value:.6g}`' if isinstance(value, float) else f'`{value}`'


def render_takes(key: dataclasses.Field) -> str:
    """What values a key takes: its type, or its bounds where it has some."""
    bounds: Bounds | None = key.metadata.get('bounds')
    if bounds is None:
        return render_type(key.type)
    kind = render_type(key.type)
    if kind.startswith('list'):
        return f'list of: {bounds.text}'
    text = bounds.text
    if kind.startswith('whole'):
        text = f'a whole number{text.removeprefix("a number") if text.startswith("a number") else ", " + text}'
    return text + (' or `null`' if kind.endswith('`null`') else '')


def render_section(name: str, section: type) -> str:
    """A heading, what the section is about, and a row per key."""
    doc = parse(section.__doc__ or '')
    meanings = {p.arg_name: ' '.join((p.description or '').split()) for p in doc.params}
    rows = [f'| `{f.name}` | {render_default(f.default)} | {f.metadata.get("unit", "")} | {render_takes(f)} | '
            f'{html.escape(meanings[f.name], quote=False)} |' for f in dataclasses.fields(section)]
    return '\n'.join([f'## {name}', '', doc.short_description or '', '',
                      '| key | default | unit | takes | meaning |', '|---|---|---|---|---|', *rows])


def render_reference() -> str:
    """The whole page."""
    return '\n\n'.join([_HEAD, *(render_section(name, section) for name, section in SECTIONS.items())]) + '\n'


if __name__ == '__main__':
    print(render_reference(), end='')
