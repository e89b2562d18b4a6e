"""The errors a person can do something about, and their words; anything else is a bug and keeps its traceback."""
import difflib
import re
from argparse import ArgumentParser
from collections.abc import Sequence

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_RESUMABLE = 75  # EX_TEMPFAIL of sysexits.h: run it again with --resume
EXIT_AT_ONCE = 130  # asked twice to stop, or a command that has nothing to finish: as shells say of Ctrl-C


class UserError(Exception):
    """A mistake in what was asked for: one line saying what, got, expected and fix."""

    exit_code = EXIT_USAGE
    where = ''  # the rank, host, step and phase it happened at, once the run has started


class ConfigError(UserError):
    """A key, value or combination of values that cannot be run."""


class DataError(UserError):
    """A data set that is missing, incomplete or damaged."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or made by another run."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint whose content is not what was written; one before it may be whole."""


class RunFailed(UserError):
    """A run that started and cannot end well, such as one whose loss is no longer finite."""

    exit_code = EXIT_FAILED


class StorageError(UserError):
    """A disk that takes nothing more; what was written before is whole."""

    exit_code = EXIT_FAILED


class RankLost(UserError):
    """Another rank, its host or its network is gone."""

    exit_code = EXIT_FAILED


def nearest(word: str, known: Sequence[str]) -> str:
    """The hint for a misspelt word: '; did you mean X?', or nothing where none is close."""
    match = difflib.get_close_matches(word, known, n=1)
    return f'; did you mean {match[0]}?' if match else ''


def option_error(message: str, parser: ArgumentParser) -> ConfigError:
    """A parser's complaint in one line: the nearest option for a misspelt one, what is missing as it is typed."""
    text, help_ = ' '.join(message.split()), f'; see {parser.prog} --help'
    if m := re.search(r'[Uu]nrecognized arguments: (\S+)', text):
        known = list(parser._option_string_actions)
        return ConfigError(f'{m[1]}: unknown option{nearest(m[1].partition("=")[0], known) or help_}')
    if m := re.search(r'the following arguments are required: (.+)', text):
        return ConfigError(f'{", ".join(_typed(name, parser) for name in m[1].split(", "))}: missing{help_}')
    return ConfigError(text + help_)


def _typed(name: str, parser: ArgumentParser) -> str:
    """An argument that a parser names, as the usage has it: an option with its value, or the value alone."""
    action = next((a for a in parser._actions if name in (*a.option_strings, a.metavar, a.dest)), None)
    if not action:
        return name
    value = parser._get_formatter()._metavar_formatter(action, action.dest.upper())(1)[0]
    return f'{name} {value}' if action.option_strings else value
