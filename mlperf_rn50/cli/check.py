"""Run the official checkers on logs and say what each log can claim."""
import sys
from collections.abc import Sequence
from pathlib import Path

from mlperf_rn50.cli._colour import paint_statuses
from mlperf_rn50.cli._parsers import Parser
from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK
from mlperf_rn50.mlperf.rulesets import DIVISIONS, RULESETS

EPILOG = """examples:
  mlperf-rn50 check logs/digits_cpu/result_0.txt
  mlperf-rn50 check result_*.txt --ruleset v0.5
  mlperf-rn50 check result_0.txt --ruleset 4.0.0 --division open"""


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser('check', __doc__, EPILOG)
    parser.add_argument('files', nargs='+', metavar='FILE', help='result_<k>.txt')
    parser.add_argument('--ruleset', choices=RULESETS, help='default: every round whose lines the log holds')
    parser.add_argument('--division', choices=DIVISIONS, help='default: the one the log names')
    return parser


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    options = make_parser().parse_args(argv)
    from mlperf_rn50.mlperf import check
    all_passed = True
    for path in map(Path, options.files):
        facts = check.find_facts(path)
        rulesets = (options.ruleset,) if options.ruleset else check.applicable_rulesets(facts)
        verdicts = check.check_log(path, rulesets, options.division)
        all_passed &= all(v.passed for v in verdicts)
        print(paint_statuses(check.render_verdicts(path, facts, verdicts), sys.stdout))
    return EXIT_OK if all_passed else EXIT_FAILED
