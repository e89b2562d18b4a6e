"""Texts about the keys of the configuration, for --help, --print-config and
docs/configuration.md."""

import dataclasses
import inspect
import json
import re
import textwrap
from typing import Any, Literal, get_args, get_origin

from mlperf_rn50.text import first_paragraph

_WIDTH = 79  # of a comment


def summary_of(section: type) -> str:
    return first_paragraph(section.__doc__)


def meanings_of(section: type) -> dict[str, str]:
    """Return the meaning of each key, from the docstring of its section."""
    args = inspect.cleandoc(section.__doc__ or '').partition('Args:\n')[2]
    return {
        name: ' '.join(text.split())
        for name, text in re.findall(r'^ {4}(\w+): (.*(?:\n {8}.*)*)', args, re.M)
    }


def type_text(type_: Any) -> str:
    """Describe a type in YAML terms."""
    if get_origin(type_) is Literal:
        return ' or '.join(', '.join(map(str, get_args(type_))).rsplit(', ', 1))
    if get_origin(type_) is tuple:
        parts = get_args(type_)
        return f'list of {"" if ... in parts else f"{len(parts)} "}{type_text(parts[0])}s'
    if args := get_args(type_):
        *first, last = (type_text(a).replace(' or ', ', ') for a in args)
        return f'{", ".join(first)} or {last}'
    names = {bool: 'true or false', int: 'whole number', float: 'number', str: 'text'}
    return names.get(type_, 'null')


def takes_text(key: dataclasses.Field) -> str:
    """Describe the valid values of a key by its type and bounds."""
    text, bounds = type_text(key.type), key.metadata.get('bounds')
    return f'{text}, {bounds.text.removeprefix("a number ")}' if bounds else text


def section_text(name: str, section: Any) -> str:
    """Return the values of a section as YAML text that load_yaml accepts, with a comment for each
    key."""
    meanings, lines = meanings_of(type(section)), [f'# {summary_of(type(section))}', f'{name}:']
    for key in dataclasses.fields(section):
        values, unit = takes_text(key), key.metadata.get('unit', '')
        if unit not in ('', 'fraction'):
            values += f', in {unit}'
        comment = textwrap.wrap(f'{meanings[key.name].rstrip(".")} ({values})', _WIDTH - 4)
        lines += [f'  # {line}' for line in comment]
        value = json.dumps(getattr(section, key.name), ensure_ascii=False)
        lines.append(f'  {key.name}: {value}')
    return '\n'.join(lines)
