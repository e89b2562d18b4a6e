"""Run the official checkers on logs and say what each log can claim."""
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mlperf_rn50.cli.parsers import command_parser
from mlperf_rn50.cli.terminal import paint_statuses
from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK
from mlperf_rn50.mllog.rulesets import DIVISIONS, RULESETS, WRITTEN, parse_ruleset
from mlperf_rn50.parser import Parser

EPILOG = """examples:
  mlperf-rn50 check logs/digits_cpu/result_0.txt
  mlperf-rn50 check logs/digits_five --ruleset v4.0
  mlperf-rn50 check result_*.txt --ruleset v0.5 --format json
  mlperf-rn50 check result_0.txt --ruleset 4.0.0 --division open

exit codes: 0 every log passes all that was asked for, 1 one does not, 2 a mistake in what was asked for, such as a log
that cannot be read; among several such a log counts as one that fails"""


def make_parser() -> Parser:
    parser = command_parser('check', __doc__, EPILOG)
    parser.add_argument('files', nargs='+', metavar='FILE', help='result_<k>.txt, or a folder with such in or below it')
    parser.add_argument('--ruleset', type=parse_ruleset, choices=RULESETS, metavar='RULESET',
                        help=f'{WRITTEN} (default: every round whose lines the log holds)')
    parser.add_argument('--division', choices=DIVISIONS, help='default: the one the log names')
    parser.add_argument('--format', choices=['text', 'json'], default='text', help='how to print (default: text)')
    return parser


def run(argv: Sequence[str]) -> int:
    options = make_parser().parse_args(argv)
    from mlperf_rn50.mllog.check import check
    rulesets = (options.ruleset,) if options.ruleset else None
    paths = check.find_logs([Path(name) for name in options.files])
    logs = []
    for log in check.check_logs(paths, rulesets, options.division):
        logs.append(log)
        if options.format == 'text':
            print(paint_statuses(check.render_log(log), sys.stdout))
    if options.format == 'json':
        print(json.dumps(check.logs_as_json(logs), indent=1))
    elif len(logs) > 1:
        print(check.render_sum(logs))
    return EXIT_OK if all(log.passed for log in logs) else EXIT_FAILED
