"""Check whether logs, or the set of logs in a folder, are valid for their round of MLPerf.

examples:
  mlperf-rn50 check logs/digits_cpu/result_0.txt
  mlperf-rn50 check logs/digits_five --ruleset v4.0 --division open
  mlperf-rn50 check result_*.txt --ruleset v0.5 --format json

The round of a log is the one in the name of a folder, such as v0.7, or the oldest one whose rules
the log passes. The official checkers judge the logs. One of the five logs of a set may fail, unless
it contradicts itself. Logs of other benchmarks are skipped and counted.

exit codes: 0 all logs pass the rules of their round, even if they cannot be submitted, such as a
run on digits, 1 a log or set fails or one of several logs is unreadable, 2 usage error, no log, or
one unreadable log
"""

from collections.abc import Sequence
from pathlib import Path

from mlperf_rn50.cli.output import add_format_option, print_answer
from mlperf_rn50.cli.parsers import add_wide_option, command_parser
from mlperf_rn50.mllog.rulesets import DIVISIONS, ROUNDS, parse_round
from mlperf_rn50.parser import Parser, add_option


def make_parser() -> Parser:
    parser = command_parser('check', __doc__)
    add_option(parser, 'files FILE', 'result_<k>.txt, or folder that contains such logs', nargs='+')
    add_option(
        parser,
        '--ruleset ROUND',
        f'{", ".join(ROUNDS)} (default: all rounds whose line format the log contains)',
        type=parse_round,
        choices=ROUNDS,
    )
    add_option(
        parser,
        '--division',
        'division whose rules apply (default: that of the log)',
        choices=DIVISIONS,
    )
    add_format_option(parser)
    add_wide_option(parser)
    return parser


def run(argv: Sequence[str]) -> int:
    options = make_parser().parse_args(argv)
    from mlperf_rn50.analysis.sets.load import Rules, load_logs
    from mlperf_rn50.analysis.sets.verdict import make_check

    rules = Rules([ROUNDS[options.ruleset]] if options.ruleset else None, options.division)
    run_sets, others = load_logs([Path(f) for f in options.files], rules)
    return print_answer(make_check(run_sets, others), options)
