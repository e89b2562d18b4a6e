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

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_rn50.cli.output import add_format_option, print_answer
from mlperf_rn50.cli.parsers import command_parser
from mlperf_rn50.errors import ConfigError, UserError
from mlperf_rn50.mllog.rulesets import ROUNDS, parse_round
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
        choices=tuple(ROUNDS),
        metavar='ROUND',
        default='v4.0',
        help='round whose layout and rules apply, from v0.5 to v4.0 (default: v4.0)',
    )
    add(
        '--code',
        metavar='DIR',
        type=Path,
        help='checkout of mlperf_rn50 with the commit of the runs (default: the running one)',
    )
    add('--name', help='name of the system in its description (default: that of --system)')
    add(
        '--describe',
        metavar='FILE',
        type=Path,
        help='JSON file with fields of the system description that the machine does not tell',
    )
    add('--poc-email', metavar='ADDRESS', default='', help='v0.5: address of the contact person')
    add('--replace', action='store_true', help='replace the files of this system in the tree')
    add(
        '--check',
        metavar='TREE',
        type=Path,
        help='validate a finished tree, such as submission/us, instead of building one',
    )
    add_format_option(parser)
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
    others = {
        '--code': options.code,
        '--name': options.name,
        '--describe': options.describe,
        '--poc-email': options.poc_email,
        '--replace': options.replace,
    }
    given = [name for name, value in {**needed, **others}.items() if value]
    missing = [name for name, value in needed.items() if value is None or value == []]
    if options.check and given:
        raise ConfigError(f'--check: got {", ".join(given)} too, expected only a finished tree')
    if missing and not options.check:
        parser.error(f'the following arguments are required: {", ".join(missing)}')
    from mlperf_rn50.analysis.sets.load import Rules, describe_others, load_logs
    from mlperf_rn50.mllog.package.submission import package_answer

    paths = [Path(p) for p in options.runs]
    if options.check:
        paths = [options.check / 'results']
        if not paths[0].is_dir():
            raise UserError(
                f'--check: {options.check} contains no results folder; expected the tree of an '
                'organisation, such as submission/us'
            )
    run_sets, foreign = load_logs(paths, Rules([ROUNDS[options.round]]))
    if foreign:
        print(f'mlperf-rn50: {describe_others(foreign)}', file=sys.stderr)
    result, heading = (_check if options.check else _build)(options, run_sets)
    minutes = run_sets[0].score_minutes if len(run_sets) == 1 else None
    return print_answer(package_answer(result, heading, minutes), options)


def _build(options: Namespace, run_sets: Sequence[RunSet]) -> tuple[Package, str]:
    """Build a package. Return it and the heading of the printed text."""
    from mlperf_rn50.mllog.package import submission
    from mlperf_rn50.mllog.package.system_desc import load_described

    given = load_described(options.describe) if options.describe else {}
    if len(run_sets) != 1:
        raise UserError(
            f'RUNS: got {len(run_sets)} sets ({", ".join(s.name for s in run_sets)}), expected one'
        )
    order = submission.Order(
        org=options.org,
        system=options.system,
        round=options.round,
        out=Path(options.out),
        code=options.code,
        poc_email=options.poc_email,
        is_replacing=options.replace,
        given=given | ({'system_name': options.name} if options.name else {}),
    )
    result = submission.make_package(run_sets[0].runs, run_sets[0].judgement, order)
    heading = f'{result.home}: {order.system}, {order.round}'
    if not result.home:
        heading = (
            f'refused by the rules of {order.round} (--round ROUND selects another); nothing was '
            'written:'
        )
    elif result.is_open:
        heading += f', {_OPEN}'
    return result, heading


def _check(options: Namespace, run_sets: Sequence[RunSet]) -> tuple[Package, str]:
    from mlperf_rn50.mllog.package.submission import check_finished

    sets = {s.name: (s.runs, s.judgement) for s in run_sets}
    result = check_finished(options.check, options.round, sets)
    state = _OPEN if result.is_open else 'no errors found'
    return result, f'{options.check}: {options.round}, {state}'
