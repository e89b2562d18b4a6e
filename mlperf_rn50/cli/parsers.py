"""Parsers of commands: a mistake is one line, examples are shown as they are written."""
from __future__ import annotations

import math
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable
from typing import TYPE_CHECKING

from mlperf_rn50.parser import Parser

if TYPE_CHECKING:
    import jsonargparse


def command_parser(name: str, doc: str | None, epilog: str) -> Parser:
    """Return the parser of a command without a configuration; the first paragraph of doc describes it."""
    return Parser(f'mlperf-rn50 {name}', _describe(doc), epilog)


def config_parser(name: str, doc: str | None, epilog: str) -> jsonargparse.ArgumentParser:
    """The parser of a command that takes a configuration: --config, and an option for every key."""
    from jsonargparse import ArgumentParser, DefaultHelpFormatter  # takes longer to import than most answers

    from mlperf_rn50.options import add_config_options

    class HelpFormatter(DefaultHelpFormatter, RawDescriptionHelpFormatter):
        """Defaults beside the options, examples left as they are written."""
    parser = ArgumentParser(f'mlperf-rn50 {name}', description=_describe(doc), epilog=epilog, allow_abbrev=False,
                            exit_on_error=False, formatter_class=HelpFormatter)
    add_config_options(parser)
    return parser


def add_price_option(parser: ArgumentParser) -> None:
    """Adds --price-per-node-hour, a number above 0 or None."""
    parser.add_argument('--price-per-node-hour', metavar='PRICE',
                        type=lambda text: _above_0(text, 1e9, 'a number above 0, such as 3.5'),
                        help='what a node costs an hour, in any currency: adds node-hours and cost')


def _above_0(text: str, most: float, expected: str) -> float:
    """A number of an option; what else it is, or beyond its bounds, is told with what was expected."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= most:  # NaN too
        raise ArgumentTypeError(f'got {text:.20}, expected {expected}')
    return value


def fraction(text: str) -> float:
    """A type of an option: a Top-1 above 0, up to 1."""
    return _above_0(text, 1, 'a fraction such as 0.759, not per cent')


def count(most: int) -> Callable[[str], int]:
    """A type of an option: a whole number from 1 to one."""
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 20 and 1 <= int(text) <= most):
            raise ArgumentTypeError(f'got {text:.20}, expected a whole number from 1 to {most}')
        return int(text)
    return parse


def _describe(doc: str | None) -> str:
    return (doc or '').partition('\n\n')[0].strip()
