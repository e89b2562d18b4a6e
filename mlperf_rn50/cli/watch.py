"""Follow runs live: accuracy, throughput and time left, in the terminal or on an HTML page.

examples:
  mlperf-rn50 watch logs/digits_cpu
  mlperf-rn50 watch logs/a logs/b logs/c --every 10
  mlperf-rn50 watch logs/c4140 --html --price-per-node-hour 24.5
  mlperf-rn50 watch logs/c4140 --once --format json

A folder selects its newest run, which may start later. If only folders below it have runs, the
newest run of each is printed once, and watch ends. No file is locked, and only --html writes files,
so a run on other machines can be followed through a shared folder. Output to a pipe has one line
per event of a run.

exit codes: 0 all runs are over, or Ctrl-C was pressed, 1 a log or the set of its folder is refused,
as by check, 2 invalid arguments
"""

from __future__ import annotations

import re
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_rn50.cli.output import add_format_option, print_answer
from mlperf_rn50.cli.parsers import add_price_option, command_parser
from mlperf_rn50.cli.terminal import has_colour
from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK, ConfigError, UserError
from mlperf_rn50.parser import Parser, option_adder

if TYPE_CHECKING:
    from rich.console import Console

    from mlperf_rn50.analysis.watch.follower import Follower
    from mlperf_rn50.analysis.watch.run_state import LiveRun

_LEAST_S, _LINE_PERIOD_S, _RESIZE_S, _PIPE_COLUMNS = 0.2, 30.0, 0.2, 100


def make_parser() -> Parser:
    parser = command_parser('watch', __doc__)
    add = option_adder(parser)
    add('folders RUN_FOLDER', 'run folder, or result_<k>.txt in one', nargs='+')
    add('--every SECONDS', 'update period in s (default: 5)', type=float, default=5.0)
    add('--html', 'keep watch.html, a page that reloads itself, current in each run folder')
    add('--once', 'print the current state and exit')
    add_format_option(parser)
    add_price_option(parser)
    return parser


def run(argv: Sequence[str]) -> int:
    options = make_parser().parse_args(argv)
    if options.format != 'text' and not options.once:
        raise ConfigError(f'--format {options.format}: got no --once, expected both; add --once')
    if not _LEAST_S <= options.every <= 86400:
        raise ConfigError(f'--every: got {options.every:g}, expected {_LEAST_S:g} to 86400 seconds')
    from mlperf_rn50.analysis.watch.follower import Follower
    from mlperf_rn50.runfolder.names import find_run_folders

    given = [Path(p) for p in options.folders]
    paths = [path for folder in given for path in find_run_folders(folder)]
    followers = [Follower(p) for p in paths]
    pages = [f.folder for f in followers]
    if options.html and len(set(pages)) < len(pages):
        raise ConfigError('--html: got two runs of one folder, expected one per page; omit one')
    states, price = _states(followers, options), options.price_per_node_hour
    if options.once or paths != given:  # a tree may have runs that were killed and never end
        return _print_once(_of_resnet(next(states)), options)
    try:
        if sys.stdout.isatty() and _console().is_terminal and not _console().is_dumb_terminal:
            return _exit_code(_show_live(states, options.every, price))
        return _exit_code(_print_lines(states, options.every))
    except KeyboardInterrupt:  # the normal way to end watch
        return EXIT_OK


def _of_resnet(runs: Sequence[LiveRun]) -> list[LiveRun]:
    """Return the runs without those of other benchmarks, which are counted. Raise UserError if
    there are no others."""
    from mlperf_rn50.text import plural

    others = [r for r in runs if r.other_benchmark]
    if others and len(others) == len(runs):
        raise UserError(others[0].note)
    if others:
        names = ', '.join(dict.fromkeys(r.other_benchmark for r in others))
        print(
            f'mlperf-rn50: skipped {plural(len(others), "log")} of other benchmarks: {names}',
            file=sys.stderr,
        )
    return [r for r in runs if not r.other_benchmark]


def _exit_code(runs: Sequence[LiveRun]) -> int:
    return EXIT_FAILED if any(r.violations for r in runs) else EXIT_OK


def _states(followers: Sequence[Follower], options: Namespace) -> Iterator[list[LiveRun]]:
    """Yield the current state of the runs until all are over; with --html, first write the changed
    pages."""
    runs: list[LiveRun] = []
    written: list[LiveRun | None] = [None] * len(followers)
    while not runs or not all(r.is_over for r in runs):
        runs = [f.look() for f in followers]
        for k, (run, follower) in enumerate(zip(runs, followers)):
            if options.html and run != written[k]:
                _write_page(run, follower.folder, options)
                written[k] = run if run.is_over or follower.folder.is_dir() else None
        yield runs


def _write_page(run: LiveRun, folder: Path, options: Namespace) -> None:
    from mlperf_rn50.analysis.watch.live_page import dump_page

    try:
        dump_page(run, folder, options.every, options.price_per_node_hour)
    except FileNotFoundError:  # the folder was removed in the meantime
        pass
    except OSError as e:
        raise UserError(f'--html: cannot write to {folder}: {e.strerror}; omit --html') from e


def _console() -> Console:
    from rich.console import Console

    is_terminal, colour = sys.stdout.isatty(), has_colour(sys.stdout)
    return Console(
        file=sys.stdout,
        force_terminal=is_terminal or colour,
        no_color=not colour,
        highlight=False,
        markup=False,
        emoji=False,
        width=None if is_terminal else _PIPE_COLUMNS,
    )


def _print_once(runs: Sequence[LiveRun], options: Namespace) -> int:
    """Print the runs, in a terminal with their curves; return the exit code."""
    price, code = options.price_per_node_hour, _exit_code(runs)
    if options.format != 'text':
        from mlperf_rn50.analysis.watch.run_facts import answer_of
        from mlperf_rn50.answer import Answer

        parts = [answer_of(run, price) for run in runs]
        data = {'runs': [part.data for part in parts]}
        return print_answer(Answer(parts=parts, data=data, exit_code=code), options)
    from mlperf_rn50.analysis.watch.screen import render

    console = _console()
    with console.capture() as captured:
        console.print(render(runs, console, price))
    print(re.sub('(?m) +$', '', captured.get()), end='')
    return code


def _show_live(
    states: Iterator[list[LiveRun]], every_s: float, price: float | None
) -> list[LiveRun]:
    """Update the terminal screen until all runs are over. Leave their last state on it, and return
    it."""
    from rich.live import Live

    from mlperf_rn50.analysis.watch.screen import render

    console, runs = _console(), []
    with Live(
        console=console,
        screen=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as live:
        for runs in states:
            until, size = time.monotonic() + every_s, None
            is_over = all(r.is_over for r in runs)
            while size != console.size or (not is_over and time.monotonic() < until):
                if size != console.size:  # redraw at once after a resize
                    size = console.size
                    # Ctrl-C within an update would leave rich's buffer open, which then swallows
                    # the end of the screen.
                    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                    live.update(render(runs, console, price, size.height), refresh=True)
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                time.sleep(min(_RESIZE_S, every_s))
    console.print(render(runs, console, price))
    return runs


def _print_lines(states: Iterator[list[LiveRun]], every_s: float) -> list[LiveRun]:
    """Print a line for a run when something changes, or _LINE_PERIOD_S after the last; return the
    final states."""
    from mlperf_rn50.analysis.watch.run_facts import line_of

    printed: dict[int, tuple[tuple, int | None, float]] = {}
    runs: list[LiveRun] = []
    for runs in states:
        now = time.monotonic()
        for k, run in enumerate(runs):
            news = (
                run.warnings,
                run.number,
                run.status,
                run.has_end,
                len(run.evaluations),
                run.standing,
                run.attempts,
            )
            before, step, then = printed.get(k, ((None,), None, 0.0))
            if news != before or run.step != step and now - then >= _LINE_PERIOD_S:
                warnings = run.warnings if run.warnings != before[0] else ()
                print(line_of(run), *(f'  {text}' for text in warnings), sep='\n', flush=True)
                printed[k] = news, run.step, now
        if not all(r.is_over for r in runs):
            time.sleep(every_s)
    return runs
