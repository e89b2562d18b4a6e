"""Explain where the time of a run goes, or what changed between two runs.

examples:
  mlperf-rn50 why logs/digits_cpu
  mlperf-rn50 why logs/digits_cpu/result_3.txt --format json
  mlperf-rn50 why logs/before logs/after

RUN is a run folder, of which the newest run is explained, or result_<k>.txt in one. The first line says what limits the
run, its share of the time and the largest possible gain; then come the evidence and the next thing to try.

exit codes: 0 explained, 2 invalid arguments, or no run with times of its ranks
"""
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mlperf_rn50.cli.parsers import command_parser
from mlperf_rn50.cli.terminal import width_of
from mlperf_rn50.errors import EXIT_OK, ConfigError
from mlperf_rn50.parser import Parser


def make_parser() -> Parser:
    parser = command_parser('why', __doc__)
    parser.add_argument('runs', nargs='+', metavar='RUN', help='run folder, or result_<k>.txt in one; two to compare')
    parser.add_argument('--format', choices=['text', 'json'], default='text', help='output format (default: text)')
    return parser


def run(argv: Sequence[str]) -> int:
    options = make_parser().parse_args(argv)
    if len(options.runs) > 2:
        raise ConfigError(f'RUN: got {len(options.runs)} runs, expected one or two')
    from mlperf_rn50.analysis.why.answer import answer_object, render_answer
    from mlperf_rn50.analysis.why.limit import times_of
    from mlperf_rn50.analysis.why.load import load_run, run_folder_at
    from mlperf_rn50.analysis.why.text import compare_times, explain_time
    runs = [load_run(run_folder_at(Path(path))) for path in options.runs]
    answer = compare_times(*map(times_of, runs)) if len(runs) > 1 else explain_time(runs[0])
    print(json.dumps(answer_object(answer), indent=2) if options.format == 'json' else
          render_answer(answer, width_of(sys.stdout)))
    return EXIT_OK
