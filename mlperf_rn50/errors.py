"""Errors that a user can act on, and their exit codes. Any other exception is a bug and keeps its
traceback."""

import difflib
import re
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
EXIT_RESUMABLE = 75  # EX_TEMPFAIL of sysexits.h; the run can continue with --resume
# as in shells; after a second stop request, or Ctrl-C in a command with nothing to finish
EXIT_AT_ONCE = 130
# Exit code of a run by the status in its last record, which the launcher returns whatever code the
# ranks ended with.
EXIT_CODES = {
    'converged': EXIT_OK,
    'aborted': EXIT_FAILED,
    'failed': EXIT_FAILED,
    'interrupted': EXIT_RESUMABLE,
}


class UserError(Exception):
    """An error described in one line: the name of the value, the value found, the value expected,
    and what to do."""

    exit_code = EXIT_USAGE
    where = ''  # prefix of the message: rank, host, step and phase, once the run has started


class ConfigError(UserError):
    """An invalid key, value or combination of values."""


class DataError(UserError):
    """A missing, incomplete or damaged data set."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, cannot be written or read, or does not fit the run."""


class NonFiniteState(CheckpointError):
    """A state of training with values that are not finite, which no checkpoint may have."""

    exit_code = EXIT_FAILED


class DamagedCheckpoint(CheckpointError):
    """A checkpoint with damaged content. An earlier one may be intact."""


class RunFailed(UserError):
    """A run that failed after its start, for example because its loss was not finite."""

    exit_code = EXIT_FAILED


class StorageError(UserError):
    """A disk that is full or failing. Earlier files are intact."""

    exit_code = EXIT_FAILED


class FullDisk(StorageError):
    """A disk without free space, or an exceeded quota. A restart would fail again."""

    exit_code = EXIT_USAGE


class RankLost(UserError):
    """The loss of another rank, its host or its network."""

    exit_code = EXIT_FAILED


def nearest(word: str, known: Sequence[str]) -> str:
    """Return the hint '; did you mean X?' for a misspelt or cut word, or '' if no known word is
    similar."""
    words = {k.casefold(): k for k in reversed(known)}
    start = word.casefold().lstrip('-') or '-'
    matches = [k for k in reversed(words) if k.lstrip('-').startswith(start)]
    matches += difflib.get_close_matches(word.casefold(), words, n=1)
    return f'; did you mean {words[matches[0]]}?' if matches else ''


def option_error(message: str, parser: ArgumentParser, more: Iterable[str] = ()) -> ConfigError:
    """Convert a parser's message to a one-line error with the nearest option, also of `more`, or an
    example."""
    text = ' '.join(message.split())
    help_ = f'; see {parser.prog} --help'
    if m := re.search(r'[Uu]nrecognized arguments: (\S+)', text):
        known = [*parser._option_string_actions, *more]
        if m[1].endswith(('.yaml', '.yml')) and '--config' in known:
            return ConfigError(f'{m[1]}: unexpected argument; did you mean --config {m[1]}?')
        hint = nearest(m[1].partition('=')[0], known)
        return ConfigError(f'{m[1]}: unknown option{hint or help_}')
    if m := re.search(r'the following arguments are required: (.+)', text):
        missing = ', '.join(_usage_of(name, parser) for name in m[1].split(', '))
        example = re.search(r'^  (\S+(?: \S+)*(?:\n {6}.+)*)', parser.epilog or '', re.MULTILINE)
        hint = f'; for example: {" ".join(example[1].split())}' if example else ''
        return ConfigError(f'{missing}: missing{hint}{help_}')
    return ConfigError(text + help_)


def _usage_of(name: str, parser: ArgumentParser) -> str:
    """Return an argument as a usage line shows it: an option with its value, or only the value."""
    for action in parser._actions:
        if name in (*action.option_strings, action.metavar, action.dest):
            value = parser._get_formatter()._metavar_formatter(action, action.dest.upper())(1)[0]
            return f'{name} {value}' if action.option_strings else value
    return name
