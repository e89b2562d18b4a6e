"""Parsers and option types of the commands. The docstring of a command is its help."""
from __future__ import annotations

import math
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from mlperf_rn50.parser import Parser

if TYPE_CHECKING:
    import jsonargparse


def command_parser(name: str, doc: str | None) -> Parser:
    """Return the parser of a command that takes no configuration."""
    return Parser(f'mlperf-rn50 {name}', *_split(doc))


def config_parser(name: str = '', doc: str | None = None) -> jsonargparse.ArgumentParser:
    """Return the parser of a command that takes a configuration, with --config and an option for each key."""
    from jsonargparse import ArgumentParser, DefaultHelpFormatter  # slow to import

    from mlperf_rn50.config_file import add_config_options

    class HelpFormatter(DefaultHelpFormatter, RawDescriptionHelpFormatter):
        """Show the defaults of options, and the examples verbatim."""
    description, epilog = _split(doc)
    parser = ArgumentParser(f'mlperf-rn50 {name}', description=description, epilog=epilog, allow_abbrev=False,
                            exit_on_error=False, formatter_class=HelpFormatter)
    add_config_options(parser)
    return parser


def _split(doc: str | None) -> tuple[str, str]:  # (description, epilog), split at the first empty line
    description, _, epilog = (doc or '').partition('\n\n')
    return description.strip(), epilog.strip()


def add_price_option(parser: ArgumentParser) -> None:
    parser.add_argument('--price-per-node-hour', metavar='PRICE',
                        type=partial(positive, most=1e9, expected='a number above 0 and at most 1e9, such as 3.5'),
                        help='price of a node-hour in any currency; adds node-hours and cost to the output')


def positive(text: str, most: float, expected: str, least: float = 0.0) -> float:
    """Convert an option's text to a number above 0, not below `least` and not above `most`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and least <= value <= most):  # also refuses NaN
        raise ArgumentTypeError(f'got {text:.20}, expected {expected}')
    return value


def filled(text: str) -> str:
    """Return an option's text. Refuse an empty one, such as that of an unset variable in a script."""
    if not text:
        raise ArgumentTypeError('got an empty string, expected a value')
    return text


fraction = partial(positive, most=1, expected='a fraction such as 0.759, not a percentage')  # type of --target


def count(most: int) -> Callable[[str], int]:
    """Return the type of an option that takes a whole number from 1 to most."""
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 20 and 1 <= int(text) <= most):
            raise ArgumentTypeError(f'got {text:.20}, expected a whole number from 1 to {most}')
        return int(text)
    return parse
