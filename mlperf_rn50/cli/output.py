"""Output of all commands: the option --format, and an answer in that format."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

from mlperf_rn50.cli.terminal import has_colour, paint, width_of
from mlperf_rn50.parser import add_option

if TYPE_CHECKING:
    from mlperf_rn50.answer import Answer


def _format_name(text: str) -> str:
    """Return the name of a format; table is the former name of text."""
    return 'text' if text == 'table' else text


def add_format_option(parser: Any, more: Sequence[str] = ()) -> None:
    """Add --format text|markdown|json, and the further formats of a command."""
    add_option(
        parser,
        '--format',
        'output format (default: text)',
        type=_format_name,
        choices=['text', 'markdown', 'json', *more],
        default='text',
    )


def print_answer(answer: Answer, options: Namespace, out: TextIO | None = None) -> int:
    """Print an answer to stdout, or to another stream, as --format and --wide select. Return its
    exit code."""
    from mlperf_rn50.analysis.show.data import render_json
    from mlperf_rn50.analysis.show.plain import MARKDOWN, Style, render_text

    out = out or sys.stdout
    if options.format == 'json':
        parts = render_json(answer.data)
    elif options.format == 'markdown':
        parts = iter([render_text(answer, MARKDOWN)])
    else:
        style = Style(width=width_of(out, getattr(options, 'wide', False)))
        if has_colour(out):
            style = replace(style, paint=paint)
        parts = iter([render_text(answer, style)])
    for part in parts:
        print(part, end='', file=out)
    print(file=out, flush=True)
    return answer.exit_code
