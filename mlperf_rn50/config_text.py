"""Texts about the keys of the configuration, for --help, --print-config and docs/configuration.md."""
import dataclasses
import inspect
import math
import re
import textwrap
from typing import Any, Literal, get_args, get_origin

from mlperf_rn50.config import SECTIONS, Config, dump_yaml, render_value, to_tree

_WIDTH = 110  # of a comment


def summary_of(section: type) -> str:
    return (section.__doc__ or '').partition('\n')[0]


def meanings_of(section: type) -> dict[str, str]:
    """Return the meaning of each key, from the docstring of its section."""
    args = inspect.cleandoc(section.__doc__ or '').partition('Args:\n')[2]
    return {name: ' '.join(text.split()) for name, text in re.findall(r'^ {4}(\w+): (.*(?:\n {8}.*)*)', args, re.M)}


def type_text(type_: Any) -> str:
    """Describe a type in YAML terms."""
    if get_origin(type_) is Literal:
        return ', '.join(map(str, get_args(type_)))
    if get_origin(type_) is tuple:
        return f'list of {type_text(get_args(type_)[0])}s'
    args = [a for a in get_args(type_) if a is not type(None)]
    return f'{type_text(args[0]).replace(" or ", ", ")} or null' if args else {
        bool: 'true or false', int: 'whole number', float: 'number', str: 'text'}[type_]


def takes_text(key: dataclasses.Field) -> str:
    """Describe the valid values of a key by its type and bounds."""
    bounds = key.metadata.get('bounds')
    return type_text(key.type) + (f', {bounds.text.removeprefix("a number ")}' if bounds else '')


def default_text(value: Any) -> str:
    """Return a default in YAML syntax, numbers with at most six digits."""
    if isinstance(value, tuple):
        return f'[{", ".join(f"{v:g}" for v in value)}]'
    return f'{value:.6g}' if isinstance(value, float) else render_value(value)


def help_of(section: type) -> dict[str, str]:
    """Return the meaning of each key with its default, valid values and unit."""
    meanings = meanings_of(section)
    return {f.name: f'{meanings[f.name].rstrip(".")} (default {default_text(f.default)}; {takes_text(f)}'
            f'{", in " + unit if (unit := f.metadata.get("unit", "")) not in ("", "fraction") else ""})'
            for f in dataclasses.fields(section)}


def render_commented(config: Config) -> str:
    """Return all values as YAML text that load_yaml accepts, with a comment for each key."""
    lines = []
    for name, values in to_tree(config).items():
        lines += [f'# {summary_of(SECTIONS[name])}', f'{name}:']
        for key, text in help_of(SECTIONS[name]).items():
            lines += textwrap.wrap(text, _WIDTH, initial_indent='  # ', subsequent_indent='  # ')
            lines.append(f'  {key}: {dump_yaml(values[key], math.inf)}')
    return '\n'.join(lines)
