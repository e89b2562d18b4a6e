"""Build a submission tree from five runs and have the official checkers look at it."""
from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_rn50.cli.parsers import command_parser
from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK, ConfigError, UserError
from mlperf_rn50.mllog.rulesets import PACKAGED, parse_round
from mlperf_rn50.parser import Parser

if TYPE_CHECKING:
    from mlperf_rn50.mllog.package.package import Package

EPILOG = """examples:
  mlperf-rn50 package logs/c4140/4x4 --org us --system c4140_n4 --out submission
  mlperf-rn50 package logs/c4140/4x4 --org us --system c4140_n4 --out submission --round v3.1
  mlperf-rn50 package --check submission/us --round v4.0

Results are copied byte for byte. A set that a rule refuses is refused, with the rule, and nothing is written.
exit codes: 0 accepted and built, even if the description is not yet whole, which is said; 1 refused by a rule or a
checker, for --check also where it is not yet to be handed in; 2 a mistake in what was asked for"""
_OPEN = 'NOT yet to be handed in'


def make_parser() -> Parser:
    parser = command_parser('package', __doc__, EPILOG)
    parser.add_argument('runs', nargs='*', metavar='RUNS', help='folder of result_<k>.txt, or the five logs')
    parser.add_argument('--org', help='who submits')
    parser.add_argument('--system', help='name of the system')
    parser.add_argument('--out', metavar='DIR', help='where the tree of the organisation goes')
    parser.add_argument('--round', type=parse_round, choices=PACKAGED, metavar='ROUND', default='v4.0',
                        help=f'whose layout and rules: {", ".join(PACKAGED)} (default: v4.0)')
    parser.add_argument('--code', metavar='DIR', type=Path,
                        help='the checkout of mlperf_rn50 that is submitted (default: the one that runs)')
    parser.add_argument('--check', metavar='TREE', type=Path,
                        help='look at a finished tree, such as submission/us, instead of building one')
    parser.add_argument('--format', choices=['text', 'json'], default='text', help='how to print (default: text)')
    return parser


def run(argv: Sequence[str]) -> int:
    options = make_parser().parse_args(argv)
    _check_options(options)
    from mlperf_rn50.mllog.package import package
    made, heading, minutes = _check(options) if options.check else _build(options)
    if options.format == 'json':
        print(json.dumps(package.package_as_json(made, minutes), indent=1))
    else:
        print(package.render_package(made, heading, minutes))
    return EXIT_FAILED if made.refusals else EXIT_OK


def _check_options(options: Namespace) -> None:
    """Raise ConfigError unless the options are those of building a tree, or of looking at one."""
    needed = {'RUNS': options.runs, '--org': options.org, '--system': options.system, '--out': options.out}
    if options.check:
        given = [name for name, value in {**needed, '--code': options.code}.items() if value]
        if given:
            raise ConfigError(f'--check: looks at a finished tree and builds none; got {", ".join(given)} too')
    elif missing := [name for name, value in needed.items() if value is None or value == []]:
        make_parser().error(f'the following arguments are required: {", ".join(missing)}')


def _build(options: Namespace) -> tuple[Package, str, float | None]:
    """The package, the first line of what is said of it, and the score that report gives."""
    from mlperf_rn50.analysis.sets.load import load_systems
    from mlperf_rn50.mllog.package import package
    systems = load_systems([Path(p) for p in options.runs])
    if len(systems) != 1:
        raise UserError(f'RUNS: got {len(systems)} sets ({", ".join(s.name for s in systems)}), expected one')
    if systems[0].refusal:
        raise UserError(f'{systems[0].folder}: {systems[0].refusal}')
    order = package.Order(options.org, options.system, options.round, Path(options.out), options.code)
    made = package.make_package(systems[0].runs, order)
    heading = (f'{made.home}: {order.system}, {order.round}' + f', {_OPEN}' * made.is_open if made.home else
               f'refused by the rules of {order.round}; nothing was written:')
    return made, heading, systems[0].score_minutes


def _check(options: Namespace) -> tuple[Package, str, float | None]:
    """The same for a finished tree."""
    from mlperf_rn50.analysis.sets.load import load_systems
    from mlperf_rn50.mllog.package.package import check_finished
    results = options.check / 'results'
    if not results.is_dir():
        raise UserError(f'--check: {options.check} has no folder results; expected the tree of an organisation, such '
                        'as submission/us')
    systems = load_systems([results])
    made = check_finished(options.check, options.round, {s.name: s.runs for s in systems})
    heading = f'{options.check}: {options.round}, {_OPEN if made.is_open else "no errors found"}'
    return made, heading, systems[0].score_minutes if len(systems) == 1 else None
