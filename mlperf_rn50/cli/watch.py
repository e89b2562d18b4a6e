"""Look at runs while they go on: accuracy, course, throughput, time left, in the terminal or on a page beside them."""
from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_rn50.cli.parsers import add_price_option, command_parser
from mlperf_rn50.cli.terminal import has_colour
from mlperf_rn50.errors import EXIT_OK, ConfigError, UserError
from mlperf_rn50.parser import Parser

if TYPE_CHECKING:
    from rich.console import Console

    from mlperf_rn50.analysis.watch.follower import Follower
    from mlperf_rn50.analysis.watch.run_state import LiveRun

EPILOG = """examples:
  mlperf-rn50 watch logs/digits_cpu
  mlperf-rn50 watch logs/a logs/b logs/c --every 10
  mlperf-rn50 watch logs/c4140 --html --price-per-node-hour 24.5
  mlperf-rn50 watch logs/c4140 --once --format json

A folder is shown with its newest run, a log, result_<k>.txt, as that run. A run need not have begun. Nothing is written
without --html, and nothing is locked: a run may go on on other machines that share the folder.

In a terminal the picture stays until all runs are over; what is piped gets a line where a run has got further.

exit codes: 0 the runs are over, or Ctrl-C, 2 a mistake in what was asked for"""
_LEAST_S, _PLAIN_PERIOD_S, _RESIZE_S = 0.2, 30.0, 0.2
_PIPE_COLUMNS = 100


def make_parser() -> Parser:
    parser = command_parser('watch', __doc__, EPILOG)
    parser.add_argument('paths', nargs='+', metavar='RUN_FOLDER', help='run folder, or result_<k>.txt in one')
    parser.add_argument('--every', type=float, default=5.0, metavar='SECONDS',
                        help='time between two looks (default: 5)')
    parser.add_argument('--html', action='store_true',
                        help='keep watch.html in each run folder fresh, a page that loads itself again')
    parser.add_argument('--once', action='store_true', help='say how the runs are now, and end')
    parser.add_argument('--format', choices=['text', 'json'], default='text', help='of --once (default: text)')
    add_price_option(parser)
    return parser


def run(argv: Sequence[str]) -> int:
    options = make_parser().parse_args(argv)
    if options.format == 'json' and not options.once:
        raise ConfigError('--format json: expected --once beside it')
    if not _LEAST_S <= options.every <= 86400:
        raise ConfigError(f'--every: got {options.every:g}, expected {_LEAST_S:g} to 86400 seconds')
    price = options.price_per_node_hour
    from mlperf_rn50.analysis.watch.follower import Follower
    followers = [Follower(Path(p)) for p in options.paths]
    pages = _Pages(followers, options.every, price) if options.html else None
    if options.once:
        runs = [f.look() for f in followers]
        if pages:
            pages.write(runs)
        _say(runs, price, options.format)
        return EXIT_OK
    looks = _looks(followers, pages)
    try:
        if sys.stdout.isatty() and _console().is_terminal and not _console().is_dumb_terminal:
            _show(looks, options.every, price)
        else:
            _log(looks, options.every)
    except KeyboardInterrupt:  # the way to end it: nothing was left undone
        if pages:
            pages.clear()
    return EXIT_OK


class _Pages:
    """The pages of some runs, each in its folder."""

    def __init__(self, followers: Sequence[Follower], every_s: float, price: float | None):
        self._folders, self._every_s, self._price = [f.folder for f in followers], every_s, price
        self._last: list[LiveRun | None] = [None] * len(self._folders)

    def write(self, runs: Sequence[LiveRun]) -> None:
        """Write each page whose run is not as it was; raise UserError where one cannot be written."""
        from mlperf_rn50.analysis.watch.page import dump_page
        for k, (run, folder) in enumerate(zip(runs, self._folders)):
            if run == self._last[k]:
                continue
            try:
                dump_page(run, folder, self._every_s, self._price)
            except FileNotFoundError:  # the folder went away meanwhile
                continue
            except OSError as e:
                raise UserError(f'--html: {folder}: {e.strerror}; watch without it where the folder cannot be written'
                                ) from e
            self._last[k] = run if run.is_over or folder.is_dir() else None

    def clear(self) -> None:
        """Removes what a page that was being written has left."""
        from mlperf_rn50.analysis.watch.page import NAME
        from mlperf_rn50.files import temporary_of
        for folder in self._folders:
            temporary_of(folder / NAME).unlink(missing_ok=True)


def _looks(followers: Sequence[Follower], pages: _Pages | None) -> Iterator[list[LiveRun]]:
    """The runs as they are at each look, until all are over; pages are written on the way."""
    runs: list[LiveRun] = []
    while not runs or not all(r.is_over for r in runs):
        runs = [f.look() for f in followers]
        if pages:
            pages.write(runs)
        yield runs


def _console() -> Console:
    """The standard output, with colour where that is wanted."""
    from rich.console import Console
    is_terminal = sys.stdout.isatty()
    colour = has_colour(sys.stdout)
    return Console(file=sys.stdout, force_terminal=is_terminal or colour, no_color=not colour, highlight=False,
                   markup=False, emoji=False, width=None if is_terminal else _PIPE_COLUMNS)


def _say(runs: Sequence[LiveRun], price: float | None, form: str) -> None:
    """Prints the runs as they are."""
    if form == 'json':
        from mlperf_rn50.analysis.watch.run_state import to_json
        print(json.dumps({'runs': [to_json(r, price) for r in runs]}, indent=2, allow_nan=False))
        return
    from mlperf_rn50.analysis.watch.terminal import render
    console = _console()
    with console.capture() as captured:
        console.print(render(runs, console, price))
    print(re.sub('(?m) +$', '', captured.get()), end='')


def _show(looks: Iterator[list[LiveRun]], every_s: float, price: float | None) -> None:
    """Keeps a terminal's screen as the runs are; leaves their last state on it when all are over."""
    from rich.live import Live

    from mlperf_rn50.analysis.watch.terminal import render
    console, runs = _console(), []
    with Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        for runs in looks:
            until, size = time.monotonic() + every_s, None
            while size != console.size or time.monotonic() < until:  # a window of another size is filled at once
                if size != console.size:
                    size = console.size
                    live.update(render(runs, console, price, size.height), refresh=True)
                time.sleep(min(_RESIZE_S, every_s))
    console.print(render(runs, console, price))


def _log(looks: Iterator[list[LiveRun]], every_s: float) -> None:
    """Prints a line for each run that has come to something, or after a while got further."""
    from mlperf_rn50.analysis.watch.facts import line_of
    said: dict[int, tuple[object, object, float]] = {}
    for runs in looks:
        now = time.monotonic()
        for k, run in enumerate(runs):
            news = (run.warnings, run.place.number, run.status, run.has_end, len(run.evaluations),
                    run.reference.verdict, run.place.attempts)
            before, step, then = said.get(k, (None, None, 0.0))
            if news != before or run.clock.step != step and now - then >= _PLAIN_PERIOD_S:
                print(line_of(run), flush=True)
                for text in run.warnings if before is None or news[0] != before[0] else ():  # type: ignore[index]
                    print(f'  {text}', flush=True)
                said[k] = news, run.clock.step, now
        if not all(r.is_over for r in runs):
            time.sleep(every_s)
