"""Argument parser of all commands and launch scripts."""

import os
import re
import textwrap
from argparse import Action, ArgumentParser, ArgumentTypeError, HelpFormatter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from mlperf_rn50.errors import ConfigError, option_error


def expand(text: str, name: str = '') -> str:
    """Expand ~ at the start of an argument or of the value in --option=value; refuse a variable
    such as $HOME.

    A value that is the path of an existing file remains unchanged. name: start of the message.
    """
    option = re.match(r'--[^=]*=', text)
    head = option[0] if option else ''
    value = text.removeprefix(head)
    if os.path.lexists(value):
        return text
    if m := re.search(r'\$(\{)?[A-Za-z_]\w*(?(1)\})', value, re.ASCII):
        raise ConfigError(
            f'{name}{text}: got the variable {m[0]}, expected its value; a shell replaces '
            'variables, but not within single quotes or in a file'
        )
    return head + expand_home(value)


def expand_home(path: str) -> str:
    with suppress(ValueError):  # characters that no user has, which are refused later
        return os.path.expanduser(path)
    return path


def filled(text: str) -> str:
    """Return an option's text. Refuse an empty one, such as that of an unset variable in a
    script."""
    if not text:
        raise ArgumentTypeError('got an empty string, expected a value')
    return text


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return the type of an option that takes a whole number, by default of at most six digits."""
    limit = 999_999 if most is None else most
    expected = f', {least} or more' if most is None else f' from {least} to {most}'

    def parse(text: str) -> int:
        text = str(text)  # jsonargparse parses a parsed value again
        if not re.fullmatch(r'[0-9]{1,19}', text) or not least <= int(text) <= limit:
            raise ArgumentTypeError(f'got {text:.20}, expected a whole number{expected}')
        return int(text)

    return parse


DRILLS = ('kill', 'stop', 'hang', 'link', 'full-disk')
DRILL_FORM = 'KIND:rank<R>@step<S>'


@dataclass(frozen=True)
class Drill:
    """A fault that a user requests, to test a site before a long job: of a rank, after a step
    (counted from 1)."""

    kind: str
    rank: int
    step: int

    def __str__(self) -> str:
        return f'{self.kind}:rank{self.rank}@step{self.step}'


def parse_drill(text: str) -> Drill:
    """Return the fault of --drill, such as kill:rank3@step200; raise ConfigError."""
    m = re.fullmatch(f'({"|".join(DRILLS)}):rank([0-9]{{1,6}})@step([1-9][0-9]{{0,11}})', text)
    if not m:
        raise ConfigError(
            f'--drill: got {text}, expected {DRILL_FORM}, such as kill:rank3@step200, where KIND '
            f'is {", ".join(DRILLS[:-1])} or {DRILLS[-1]}'
        )
    return Drill(m[1], rank=int(m[2]), step=int(m[3]))


class _HelpFormatter(HelpFormatter):
    """Wrap paragraphs, and the lines of lists and examples, which begin with a space."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        wrap = partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False)
        blocks = []
        for block in text.split('\n\n'):
            lines = block.splitlines() if '\n ' in block else [block]
            indents = [14 * ' ' if line.startswith(' ') else '' for line in lines]
            wrapped = [wrap(x, subsequent_indent=i) for x, i in zip(lines, indents)]
            blocks.append('\n'.join(wrapped))
        return '\n\n'.join(blocks)


class Parser(ArgumentParser):
    """A parser that raises ConfigError, accepts no abbreviations and wraps its help."""

    def __init__(self, prog: str, description: str, epilog: str = '', **more: Any):
        super().__init__(
            prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=_HelpFormatter,
            **more,
        )

    def error(self, message: str) -> NoReturn:
        raise option_error(message.removeprefix('argument '), self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args([expand(word) for word in args], namespace)


def add_option(parser: Any, form: str, text: str, **keys: Any) -> Action:
    """Add an argument with its help, such as '--nodes N' or 'files FILE', to a parser or a group.

    An option without a value and choices is a flag. The other arguments are those of add_argument.
    """
    name, _, value = form.partition(' ')
    if value:
        keys['metavar'] = value
    elif name.startswith('-') and 'choices' not in keys:
        keys.setdefault('action', 'store_true')
    return parser.add_argument(name, help=text, **keys)


def option_adder(parser: Any) -> Callable[..., Action]:
    """Return add_option for one parser or group."""
    return partial(add_option, parser)
