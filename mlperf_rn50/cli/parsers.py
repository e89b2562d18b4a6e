"""Parsers and option types of the commands. The docstring of a command is its help."""

from __future__ import annotations

import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mlperf_rn50.parser import Parser, add_option, filled, whole_number

if TYPE_CHECKING:
    import jsonargparse


def command_parser(name: str, doc: str | None) -> Parser:
    """Return the parser of a command that takes no configuration."""
    description, _, epilog = (doc or '').partition('\n\n')
    return Parser(f'mlperf-rn50 {name}', description.strip(), epilog.strip())


def config_parser(
    name: str = '', add_options: Callable[[Any], None] = lambda parser: None
) -> jsonargparse.ArgumentParser:
    """Return the parser of a command that takes a configuration, with --config and an option for
    each key."""
    from jsonargparse import ArgumentParser  # slow to import

    from mlperf_rn50.config_file import add_config_options

    parser = ArgumentParser(f'mlperf-rn50 {name}', allow_abbrev=False, exit_on_error=False)
    add_config_options(parser)
    add_options(parser)
    return parser


def config_help(name: str, command: ModuleType, words: Sequence[str]) -> str:
    """Return the help of a command that takes a configuration, or of the group of keys named after
    --help."""
    from mlperf_rn50.config import SECTIONS
    from mlperf_rn50.config_text import section_text, summary_of

    for flag, group in pairwise(words):
        if flag in ('-h', '--help') and group in SECTIONS:
            head = f'# For a configuration file, or as options: --{group}.KEY VALUE'
            return f'{head}\n{section_text(group, SECTIONS[group]())}\n'
    parser = command_parser(name, command.__doc__)
    command.add_options(parser)
    arguments = parser._get_positional_actions()
    values = [action.metavar or '|'.join(action.choices or ()) for action in arguments]
    parser.usage = ' '.join([parser.prog, *map(str, values), '[OPTIONS] [--KEY VALUE ...]'])
    rows = ''.join(f'  {section:12}{summary_of(type_)}\n' for section, type_ in SECTIONS.items())
    parser.epilog = (
        f'groups of keys (mlperf-rn50 {name} --help schedule lists one):\n{rows}\n{parser.epilog}'
    )
    return parser.format_help()


def add_config_option(parser: ArgumentParser) -> None:
    add_option(
        parser, '--config FILE', 'YAML file with values that override the defaults', type=filled
    )


def add_run_options(parser: ArgumentParser) -> None:
    """Add the options that select the configuration: --config, or a run to resume."""
    add_config_option(parser)
    add_option(parser, '--resume DIR', 'run folder of the run to resume', type=filled)
    add_option(
        parser, '--elastic', 'allow a number of ranks that differs from --resume or --config'
    )
    add_option(
        parser,
        '--allow-changed KEYS',
        'keys that may differ in the resumed run, such as schedule.base_lr,data.crop',
        type=str,
    )


def add_price_option(parser: ArgumentParser) -> None:
    add_option(
        parser,
        '--price-per-node-hour PRICE',
        'price of a node-hour in any currency; adds node-hours and cost to the output',
        type=partial(positive, most=1e9, expected='a number above 0 and at most 1e9, such as 3.5'),
    )


def add_wide_option(parser: ArgumentParser) -> None:
    add_option(
        parser,
        '--wide',
        'on a terminal, print tables with all columns (default: as '
        'many as fit, the most important first)',
    )


def positive(text: str, most: float, expected: str, least: float = 0.0) -> float:
    """Convert an option's text to a number above 0, not below `least` and not above `most`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and least <= value <= most):  # also refuses NaN
        raise ArgumentTypeError(f'got {text:.20}, expected {expected}')
    return value


def given_arguments(parser: Parser, options: Namespace, *allowed: str) -> list[str]:
    """Return the arguments with a value other than their default, without the allowed ones."""
    names = {a: (*a.option_strings, str(a.metavar or a.dest))[0] for a in parser._actions}
    return [
        name
        for action, name in names.items()
        if getattr(options, action.dest, None) not in (action.default, None, '', [])
        and name not in allowed
    ]


def with_batch(argv: Sequence[str], config: object, size: int) -> Sequence[str]:
    """Return arguments with a local batch size, which has no default, unless a configuration or an
    option has one."""
    names = '--train.local_batch_size', '--train.global_batch_size'
    if config or any(word.startswith(names) for word in argv):
        return argv
    return [f'--train.local_batch_size={size}', *argv]


# type of --target
fraction = partial(positive, most=1, expected='a fraction such as 0.759, not a percentage')
# type of an option that takes a whole number from 1 to a limit
count = partial(whole_number, 1)
