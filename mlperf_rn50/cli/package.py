"""Build a submission tree from five runs and have the official checkers look at it."""
from collections.abc import Sequence
from pathlib import Path

from mlperf_rn50.cli._parsers import Parser
from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK, UserError
from mlperf_rn50.mlperf.rulesets import ROUNDS

EPILOG = """examples:
  mlperf-rn50 package logs/c4140/4x4 --org us --system c4140_n4 --out submission
  mlperf-rn50 package logs/c4140/4x4 --org us --system c4140_n4 --out submission --round v0.5 --poc-email us@example.com

Results are copied byte for byte. A set that a rule refuses is refused, with the rule, and nothing is written."""


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser('package', __doc__, EPILOG)
    parser.add_argument('runs', nargs='+', metavar='RUNS', help='folder of result_<k>.txt, or the five logs')
    parser.add_argument('--org', required=True, help='who submits')
    parser.add_argument('--system', required=True, help='name of the system')
    parser.add_argument('--out', metavar='DIR', required=True, help='where the tree of the organisation goes')
    parser.add_argument('--round', choices=list(ROUNDS), default='v4.0',
                        help='whose layout and rules (default: v4.0)')
    parser.add_argument('--poc-email', metavar='EMAIL', default='', help='v0.5: whom to ask')
    parser.add_argument('--redact', action='store_true',
                        help='leave host names and paths out of what is taken from env.json and config.yaml')
    return parser


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    options = make_parser().parse_args(argv)
    from mlperf_rn50.mlperf import package
    from mlperf_rn50.study.systems import load_systems
    systems = load_systems([Path(p) for p in options.runs])
    if len(systems) != 1:
        raise UserError(f'RUNS: got {len(systems)} sets ({", ".join(s.name for s in systems)}), expected one')
    if systems[0].refusal:
        raise UserError(f'{systems[0].folder}: {systems[0].refusal}')
    order = package.Order(options.org, options.system, options.round, Path(options.out), options.poc_email,
                          options.redact)
    made = package.make_package(systems[0].runs, order)
    print(package.render_package(made, order, systems[0].score_minutes))
    return EXIT_OK if made.home else EXIT_FAILED
