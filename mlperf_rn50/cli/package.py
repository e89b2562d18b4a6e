"""Build a submission tree from five runs and validate it with the official checkers.

examples:
  mlperf-rn50 package logs/c4140/4x4 --org us --system c4140_n4 --out submission --round v3.1
  mlperf-rn50 package --check submission/us --round v4.0

Results are copied byte for byte. If a rule refuses the run set, the rule is printed and nothing is
written.

exit codes: 0 accepted, even if the description of a new tree is still incomplete, 1 refused by a
rule or a checker, 2 invalid arguments
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_rn50.cli.parsers import command_parser
from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK, ConfigError, UserError
from mlperf_rn50.mllog.rulesets import PACKAGED, ROUNDS, parse_round
from mlperf_rn50.parser import Parser

if TYPE_CHECKING:
    from mlperf_rn50.analysis.sets.run_set import RunSet
    from mlperf_rn50.mllog.package.submission import Package

_OPEN = 'NOT ready for submission'


def make_parser() -> Parser:
    parser = command_parser('package', __doc__)
    add = parser.add_argument
    add('runs', nargs='*', metavar='RUNS', help='folder of result_<k>.txt, or the five logs')
    add('--org', help='name of the submitting organisation')
    add('--system', help='system name')
    add('--out', metavar='DIR', help="parent folder of the organisation's tree")
    add(
        '--round',
        type=parse_round,
        choices=PACKAGED,
        metavar='ROUND',
        default='v4.0',
        help=f'round whose layout and rules apply: {", ".join(PACKAGED)} (default: v4.0)',
    )
    add(
        '--code',
        metavar='DIR',
        type=Path,
        help='checkout of mlperf_rn50 to submit (default: the running one)',
    )
    add(
        '--check',
        metavar='TREE',
        type=Path,
        help='validate a finished tree, such as submission/us, instead of building one',
    )
    add('--format', choices=['text', 'json'], default='text', help='output format (default: text)')
    return parser


def run(argv: Sequence[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)
    needed = {
        'RUNS': options.runs,
        '--org': options.org,
        '--system': options.system,
        '--out': options.out,
    }
    given = [name for name, value in {**needed, '--code': options.code}.items() if value]
    missing = [name for name, value in needed.items() if value is None or value == []]
    if options.check and given:
        raise ConfigError(f'--check: got {", ".join(given)} too, expected only a finished tree')
    if missing and not options.check:
        parser.error(f'the following arguments are required: {", ".join(missing)}')
    from mlperf_rn50.analysis.sets.load import Rules, describe_others, load_logs
    from mlperf_rn50.mllog.package import submission

    folder = options.check and options.check / 'results'
    if folder and not folder.is_dir():
        raise UserError(
            f'--check: {options.check} contains no results folder; expected the tree of an '
            'organisation, such as submission/us'
        )
    rules = Rules([ROUNDS[options.round]])
    run_sets, others = load_logs([folder] if folder else [Path(p) for p in options.runs], rules)
    if others:
        print(f'mlperf-rn50: {describe_others(others)}', file=sys.stderr)
    result, heading = (_check if options.check else _build)(options, run_sets)
    minutes = run_sets[0].score_minutes if len(run_sets) == 1 else None
    if options.format == 'json':
        print(json.dumps(submission.package_as_json(result, minutes), indent=1))
    else:
        print(submission.render_package(result, heading, minutes))
    return EXIT_FAILED if result.refusals else EXIT_OK


def _build(options: Namespace, run_sets: Sequence[RunSet]) -> tuple[Package, str]:
    """Build a package. Return it and the heading of the printed text."""
    from mlperf_rn50.mllog.package import submission

    if len(run_sets) != 1:
        raise UserError(
            f'RUNS: got {len(run_sets)} sets ({", ".join(s.name for s in run_sets)}), expected one'
        )
    order = submission.Order(
        options.org, options.system, options.round, Path(options.out), options.code
    )
    result = submission.make_package(run_sets[0].runs, run_sets[0].judgement, order)
    heading = (
        f'{result.home}: {order.system}, {order.round}' + f', {_OPEN}' * result.is_open
        if result.home
        else f'refused by the rules of {order.round} (--round ROUND selects another); nothing was '
        'written:'
    )
    return result, heading


def _check(options: Namespace, run_sets: Sequence[RunSet]) -> tuple[Package, str]:
    from mlperf_rn50.mllog.package.submission import check_finished

    result = check_finished(
        options.check, options.round, {s.name: (s.runs, s.judgement) for s in run_sets}
    )
    return (
        result,
        f'{options.check}: {options.round}, {_OPEN if result.is_open else "no errors found"}',
    )
