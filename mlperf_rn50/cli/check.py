"""Check logs with the official checkers and list what each log can claim.

examples:
  mlperf-rn50 check logs/digits_cpu/result_0.txt
  mlperf-rn50 check logs/digits_five --ruleset v4.0 --division open
  mlperf-rn50 check result_*.txt --ruleset v0.5 --format json

exit codes: 0 all logs pass, 1 a log fails or one of several is unreadable, 2 usage error, no log, or one unreadable log
"""
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mlperf_rn50.cli.parsers import command_parser
from mlperf_rn50.cli.terminal import paint_statuses
from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK
from mlperf_rn50.mllog.rulesets import DIVISIONS, RULESETS, WRITTEN, parse_ruleset
from mlperf_rn50.parser import Parser


def make_parser() -> Parser:
    parser = command_parser('check', __doc__)
    parser.add_argument('files', nargs='+', metavar='FILE', help='result_<k>.txt, or folder that contains such logs')
    parser.add_argument('--ruleset', type=parse_ruleset, choices=RULESETS, metavar='RULESET',
                        help=f'{WRITTEN} (default: all rounds whose line format the log contains)')
    parser.add_argument('--division', choices=DIVISIONS, help='division whose rules apply (default: that of the log)')
    parser.add_argument('--format', choices=['text', 'json'], default='text', help='output format (default: text)')
    return parser


def run(argv: Sequence[str]) -> int:
    options = make_parser().parse_args(argv)
    from mlperf_rn50.mllog.check import judge
    rulesets = (options.ruleset,) if options.ruleset else None
    logs = []
    for log in judge.check_logs(judge.list_logs([Path(f) for f in options.files]), rulesets, options.division):
        logs.append(log)
        if options.format == 'text':
            print(paint_statuses(judge.render_log(log), sys.stdout))
    if options.format == 'json':
        print(json.dumps(judge.logs_as_json(logs), indent=1))
    elif len(logs) > 1:
        print(judge.render_sum(logs))
    return EXIT_OK if all(log.passed for log in logs) else EXIT_FAILED
