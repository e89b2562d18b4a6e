"""Explain where the time of a run goes and why it misses its accuracy, or what changed between two
runs.

examples:
  mlperf-rn50 why logs/digits_cpu
  mlperf-rn50 why logs/digits_cpu/result_3.txt --probe
  mlperf-rn50 why logs/before logs/after
  mlperf-rn50 why logs/digits_cpu --out pictures --perfetto trace.json

RUN is a run folder, of which the newest run is explained, or result_<k>.txt in one. The first line
says what limits the run, its share of the time and the largest possible gain; then come the
evidence and the next thing to try. A line before it says how far a run is that has not trained to
the end of its schedule, and how to resume it.

exit codes: 0 explained, 2 invalid arguments, or a finished run without times of its ranks
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlperf_rn50 import __version__
from mlperf_rn50.cli.output import add_format_option, print_answer
from mlperf_rn50.cli.parsers import add_wide_option, command_parser
from mlperf_rn50.errors import ConfigError, UserError
from mlperf_rn50.files import refuse_existing
from mlperf_rn50.parser import Parser, add_option
from mlperf_rn50.text import printable

if TYPE_CHECKING:
    from mlperf_rn50.analysis.run_data import RunData
    from mlperf_rn50.answer import Answer


def make_parser() -> Parser:
    parser = command_parser('why', __doc__)
    add_option(
        parser, 'runs RUN', 'run folder, or result_<k>.txt in one; two to compare', nargs='+'
    )
    add_option(
        parser,
        '--probe',
        'look for causes of a missed accuracy in the weights '
        'and the images of a run, which takes minutes and needs MXNet',
    )
    add_format_option(parser)
    add_wide_option(parser)
    add_option(
        parser,
        '--out DIR',
        'folder for the answer (HTML, Markdown, JSON) with a figure (SVG, PNG) of the run and '
        'its traced steps',
    )
    add_option(
        parser, '--perfetto FILE', 'new file for the traced steps of all ranks, for Perfetto'
    )
    return parser


def run(argv: Sequence[str]) -> int:
    options = make_parser().parse_args(argv)
    most = 1 if options.probe or options.out or options.perfetto else 2
    if len(options.runs) > most:
        raise ConfigError(f'RUN: got {len(options.runs)} runs, expected at most {most}')
    refuse_existing([Path(options.perfetto)] if options.perfetto else [], '--perfetto')
    from mlperf_rn50.analysis.run_data import load_run
    from mlperf_rn50.analysis.why.bottleneck import times_of
    from mlperf_rn50.analysis.why.time_answer import UNKNOWN, compare_times
    from mlperf_rn50.runfolder.names import run_at

    runs = [load_run(run_at(Path(path))) for path in options.runs]
    if len(runs) == 2:
        time = compare_times(*map(times_of, runs))
        answer = replace(time, data={'course': '', **UNKNOWN, **time.data, 'accuracy': None})
    else:
        answer = _explain(runs[0], options.probe)
    code = print_answer(answer, options)
    if options.out:
        from mlperf_rn50.analysis.show.page import dump_answer
        from mlperf_rn50.analysis.why.time_answer import bottleneck_sentence
        from mlperf_rn50.analysis.why.time_figure import plot_of

        timed = [r for r in runs if bottleneck_sentence(r)]
        dump_answer(
            replace(answer, title=options.runs[0], figures=lambda: map(plot_of, timed)),
            Path(options.out),
            'why',
            command='why',
            footer=f'Written by mlperf-rn50 {__version__}.',
            has_sources=False,
        )
    if options.perfetto:
        from mlperf_rn50.analysis.why.trace import write_perfetto

        print(printable(write_perfetto(runs[0], Path(options.perfetto))), file=sys.stderr)
    return code


def _explain(run: RunData, is_probed: bool) -> Answer:
    """Return how far a run is, why it misses its accuracy, and where its time goes."""
    from mlperf_rn50.analysis.why.accuracy import explain_accuracy
    from mlperf_rn50.analysis.why.time_answer import UNKNOWN, explain_time
    from mlperf_rn50.analysis.why.unfinished import unfinished_sentence
    from mlperf_rn50.answer import Answer

    probed: tuple[Any, ...] = ()
    if is_probed:
        from mlperf_rn50.bench.probe import probe

        probed = probe(run)
    course = printable(unfinished_sentence(run))
    accuracy, time = explain_accuracy(run, *probed), None
    try:
        time = explain_time(run)
    except UserError:
        if not accuracy and not course:  # otherwise the run has not yet recorded times
            raise
    # already stated as a cause
    if accuracy and course.rstrip('.').lower() in accuracy.data['sentence'].lower():
        course = ''
    return Answer(
        sentences=[course] if course else [],
        parts=[part for part in (accuracy, time) if part],
        data={
            'course': course,
            **(time.data if time else UNKNOWN),
            'accuracy': accuracy.data if accuracy else None,
        },
    )
