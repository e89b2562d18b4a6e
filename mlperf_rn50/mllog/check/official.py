"""The official compliance checker for a log.

It runs in this process, and its messages are reworded. Logged values and line lengths are checked
first, because the checker evaluates files that the values name, and its time is quadratic in the
length of a line.
Source: mlperf_logging.
"""

import importlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlperf_rn50.errors import UserError
from mlperf_rn50.files import regular_file
from mlperf_rn50.mllog import keys
from mlperf_rn50.mllog.rulesets import DIVISIONS, ROUND_OF, V05

MAX_LINE = 8192  # characters; the longest published log line has 1256
_MAX_PART = 1 << 21  # characters of a line that are read at once
_MARK = ':::ML'
NEEDED = "needs mlperf-logging: pip install '.[check]' in the checkout"
# Keys whose values the official checker puts into file names, and the permitted values. In the open
# division, which has other optimizers, it does not use opt_name; any plain name is permitted.
_ENQUEUED = {
    'submission_benchmark': ('resnet',),
    'submission_division': DIVISIONS,
    'opt_name': ('sgd', 'lars'),
}


class NotInstalled(UserError):
    """A package that the command needs is missing."""


def import_official(module: str) -> Any:
    """Import a module of mlperf-logging, which is large and optional; raise NotInstalled if it is
    missing."""
    try:
        return importlib.import_module(f'mlperf_logging.{module}')
    except ImportError as e:
        raise NotInstalled(NEEDED) from e


def marked_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of each log line, split as in the official parser; UserError for an
    unreadable file.

    A line that is far longer than MAX_LINE is yielded in parts, each longer than MAX_LINE.
    """
    number, is_new, rest = 0, True, ''
    try:
        with open(path, encoding='latin-1', newline='\n', opener=regular_file) as f:
            while part := f.readline(_MAX_PART):
                number += is_new
                is_new = part.endswith('\n')
                *lines, rest = f'{rest}{part}'.split('\r')
                if is_new or len(rest) > _MAX_PART:
                    lines.append(rest)
                    rest = '' if is_new else rest[-MAX_LINE - 1 :]
                yield from ((number, line) for line in lines if _MARK in line)
            yield from ((number, line) for line in [rest] if _MARK in line)
    except OSError as e:
        raise UserError(f'{path}: cannot read the log: {e.strerror}') from e


def find_long_lines(path: Path) -> list[str]:
    """Return a message for each log line that is too long."""
    return [
        f'line {number} is longer than {MAX_LINE} characters, the limit for a log line; the '
        'official checker was not run'
        for number, line in marked_lines(path)
        if len(line) > MAX_LINE
    ]


def _parse(path: Path, ruleset: str) -> tuple[list[Any], list[tuple[str, Exception]]]:
    """Return the parsed lines, like mlp_parser.parse_file, and the other lines with their
    errors."""
    parser = import_official(f'compliance_checker.mlp_parser.ruleset_{ruleset.replace(".", "")}')
    lines, errors = [], []
    for number, line in marked_lines(path):
        if parser.TOKEN not in line:
            continue
        text = (parser.TOKEN + line.rpartition(parser.TOKEN)[2]).strip()
        try:
            lines.append(parser.string_to_logline(number, text))
        except Exception as e:  # the parser assumes a JSON object with four keys
            errors.append((text, e))
    return lines, errors


def _find_danger(lines: list[Any], division: str | None = None) -> str | None:
    """Return a violation that would let a log control the official checker; None if there is
    none. division: replaces that of the log."""
    logged = [x.value for x in lines if x.key == 'submission_division']
    named = [division or (v.get('value') if isinstance(v, dict) else None) for v in logged]
    is_open = bool(named) and all(name == keys.OPEN for name in named)
    for line in lines:
        if not isinstance(line.key, str):
            return f'a key is {line.key!r:.80}, expected a string'
        if not isinstance(line.value, dict) or not isinstance(line.value.get('metadata'), dict):
            return f'{line.key:.80}: its value or metadata is missing'
        allowed = _ENQUEUED.get(line.key)
        value = line.value.get('value')
        if is_open and line.key == 'opt_name' and re.fullmatch(r'[\w +-]{1,80}', str(value)):
            continue
        if allowed and value not in allowed:
            return f'{line.key}: got {value!r:.200}, expected {" or ".join(allowed)}'
    return None


def find_danger(path: Path, ruleset: str) -> str | None:
    """Return a violation that would let a log control, delay or crash an official tool; None if
    there is none."""
    if long := find_long_lines(path):
        return long[0]
    # the v0.5 rules have no official checker
    lines, errors = _parse(path, ruleset) if ruleset != V05 else ([], [])
    for text, error in errors:
        if not isinstance(error, ValueError):
            return f'the official tools crash on a line ({_short(error)}): {text[:80]}'
    return _find_danger(lines)


def _short(error: Exception) -> str:
    return f'{type(error).__name__}: {str(error)[:100]}'


def check_official(path: Path, ruleset: str, division: str | None) -> tuple[str, ...]:
    """Return the violations that a ruleset's official checker (0.6.0 to 4.0.0) finds in a log
    without long lines."""
    lines, errors = _parse(path, ruleset)
    if not lines and not errors:
        return (f'no {":::MLL" if ruleset == "0.6.0" else ":::MLLOG"} line',)
    if errors:
        return tuple(
            f'not a log line of {ROUND_OF[ruleset]} ({_short(e)}): {line[:80]}'
            for line, e in errors
        )
    if danger := _find_danger(lines, division):
        return (danger,)
    for line in lines:
        if line.key == 'submission_division' and division:
            line.value['value'] = division
    mlp_compliance = import_official('compliance_checker.mlp_compliance')
    # It parses its rules anew for each log, which took over half of the time; the loader in C is
    # equivalent.
    mlp_compliance.yaml.BaseLoader = getattr(
        mlp_compliance.yaml, 'CBaseLoader', mlp_compliance.yaml.BaseLoader
    )
    logging.disable(logging.CRITICAL)
    try:
        checker = mlp_compliance.make_checker('training', ruleset, quiet=True, werror=False)
        mlp_compliance.enqueued_configs.clear()
        checker.check_loglines(lines, f'training_{ruleset}/common.yaml')
        messages = [str(m) for m in (*checker.overwritable.values(), *checker.not_overwritable)]
    except Exception as e:  # the checker compares and divides logged values of any type
        return (f'the official checker crashes on the log ({_short(e)})',)
    finally:
        logging.disable(logging.NOTSET)
    return tuple(_explain(m, lines)[:500] for m in messages)


def _explain(message: str, lines: list) -> str:
    """Return an official message in plain English."""
    message = re.sub(r"v\['(value|metadata)'\]", r'\1', message)
    if m := re.match(r"Required EXACTLY_ONE occurrence of '(\w+)' but found (\d+)", message):
        return f'{m[1]} appears {m[2]} times, expected once' if int(m[2]) else f'{m[1]} is missing'
    if m := re.match(r'Required AT_LEAST_ONE occurrence of (.+?)(?: but found 0)?$', message):
        return f'{m[1]} is missing'.replace("'", '')
    if m := re.match(r"CHECK for '(\w+)' failed in line \d+:\n(.*)\nfailed test: (.+)", message):
        values = [line.value for line in lines if line.full_string == m[2]]
        got = f'{values[0]["value"]!r}, {values[0]["metadata"]}' if values else m[2][:80]
        return f'{m[1]}: got {got}, expected {m[3].strip()}'
    if m := re.match(r'Failed checks for (\w+) : (.+)', message):
        best = [a for line in lines if line.key == m[1] and (a := line.value['value']) is not None]
        hint = ''
        if best and all(isinstance(a, (int, float)) for a in best):
            hint = f'the best value is {max(best)}, '
        return f'{m[1]}: {hint}expected {m[2].strip()} in at least one line'
    if m := re.match(r'Failed executing .*code:\n(.+)\ntriggered by line:\n(.*)\n', message):
        values = [f'{x.key}: got {x.value["value"]!r}' for x in lines if x.full_string == m[2]]
        return f'{values[0] if values else m[2][:80]}, for which {m[1].strip()} has no answer'
    if "s['sgd_decay']" in message:
        return (
            'optimizer keys: expected opt_learning_rate_decay_boundary_epochs for sgd, or the '
            'decay steps, decay power, weight decay and epsilon of lars, and no key of the other '
            'optimizer'
        )
    if 'initialized_tensors' in message:
        return (
            'weights_initialization: expected exactly the tensors of ResNet-50 under the names '
            'in the rules'
        )
    return ' '.join(message.split('\ncurrent context')[0].split())[:200]
