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

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlperf_rn50.cli.parsers import command_parser
from mlperf_rn50.cli.terminal import width_of
from mlperf_rn50.errors import EXIT_OK, ConfigError, UserError
from mlperf_rn50.files import refuse_existing
from mlperf_rn50.parser import Parser


def make_parser() -> Parser:
    parser = command_parser('why', __doc__)
    parser.add_argument(
        'runs',
        nargs='+',
        metavar='RUN',
        help='run folder, or result_<k>.txt in one; two to compare',
    )
    parser.add_argument(
        '--probe',
        action='store_true',
        help='look for causes of a missed accuracy in the weights '
        'and the images of a run, which takes minutes and needs MXNet',
    )
    parser.add_argument(
        '--format', choices=['text', 'json'], default='text', help='output format (default: text)'
    )
    parser.add_argument(
        '--out',
        metavar='DIR',
        help='folder for a picture (SVG, PNG) of the run and its traced steps',
    )
    parser.add_argument(
        '--perfetto',
        metavar='FILE',
        help='new file for the traced steps of all ranks, for Perfetto',
    )
    return parser


def run(argv: Sequence[str]) -> int:
    options = make_parser().parse_args(argv)
    most = 1 if options.probe or options.out or options.perfetto else 2
    if len(options.runs) > most:
        raise ConfigError(f'RUN: got {len(options.runs)} runs, expected at most {most}')
    refuse_existing([Path(options.perfetto)] if options.perfetto else [], '--perfetto')
    from mlperf_rn50.analysis.why.accuracy import explain_accuracy
    from mlperf_rn50.analysis.why.answer import answer_object, render_answer
    from mlperf_rn50.analysis.why.limit import times_of
    from mlperf_rn50.analysis.why.load import load_run, run_folder_at
    from mlperf_rn50.analysis.why.text import compare_times, explain_time
    from mlperf_rn50.analysis.why.unfinished import unfinished_sentence
    from mlperf_rn50.text import printable, wrap_line

    first, *others = (load_run(run_folder_at(Path(path))) for path in options.runs)
    answer = None
    probed: tuple[Any, ...] = ()
    if options.probe:
        from mlperf_rn50.bench.probe import probe

        probed = probe(first)
    accuracy = None if others else explain_accuracy(first, *probed)
    course = '' if others else printable(unfinished_sentence(first))
    try:
        answer = (
            compare_times(times_of(first), times_of(others[0])) if others else explain_time(first)
        )
    except UserError:
        if not accuracy and not course:  # otherwise the run has not yet recorded times
            raise
    # already stated as a cause
    if accuracy and course.rstrip('.').lower() in accuracy.sentence.lower():
        course = ''
    width = width_of(sys.stdout)
    found = {
        'course': course,
        **(answer_object(answer) if answer else {}),
        'accuracy': accuracy and answer_object(accuracy),
    }
    print(
        json.dumps(found, indent=2)
        if options.format == 'json'
        else '\n\n'.join(
            filter(
                None,
                [
                    wrap_line(course, width),
                    *(render_answer(a, width) for a in (accuracy, answer) if a),
                ],
            )
        )
    )
    if options.out:
        from mlperf_rn50.analysis.why.picture import dump_times

        dump_times(first, Path(options.out))
    if options.perfetto:
        from mlperf_rn50.analysis.why.trace import write_perfetto

        print(printable(write_perfetto(first, Path(options.perfetto))), file=sys.stderr)
    return EXIT_OK
