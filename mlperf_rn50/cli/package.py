"""Build a submission tree from five runs and validate it with the official checkers.

examples:
  mlperf-rn50 package logs/c4140/4x4 --org us --system c4140_n4 --out submission --round v3.1
  mlperf-rn50 package --check submission/us --round v4.0

Results are copied byte for byte. If a rule refuses the run set, the rule is printed and nothing is
written.

exit codes: 0 ready for submission, 1 refused or not ready, 2 invalid arguments
"""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_rn50.cli.output import add_format_option, print_answer
from mlperf_rn50.cli.parsers import add_wide_option, command_parser, given_arguments
from mlperf_rn50.errors import ConfigError, UserError
from mlperf_rn50.files import check_exists
from mlperf_rn50.mllog.rulesets import ROUNDS, parse_round
from mlperf_rn50.parser import Parser, option_adder

if TYPE_CHECKING:
    from mlperf_rn50.analysis.sets.run_set import RunSet
    from mlperf_rn50.mllog.package.submission import Order, Package

_PACKED_SINCE = 'v1.0'  # first round that is delivered as an archive


def make_parser() -> Parser:
    parser = command_parser('package', __doc__)
    add = option_adder(parser)
    add('runs RUNS', 'folder of result_<k>.txt, or the five logs', nargs='*')
    add('--org ORG', 'name of the submitting organisation')
    add('--system SYSTEM', 'system name')
    add('--out DIR', "parent folder of the organisation's tree")
    add(
        '--round ROUND',
        'round whose layout and rules apply, from v0.5 to v4.0 (default: v4.0)',
        type=parse_round,
        choices=tuple(ROUNDS),
        default='v4.0',
    )
    add(
        '--code DIR',
        'checkout of mlperf_rn50 with the commit of the runs (default: the running one)',
        type=Path,
    )
    add('--name NAME', 'name of the system in its description (default: that of --system)')
    add(
        '--describe FILE',
        'JSON file with fields of the system description that the machine does not tell',
        type=Path,
    )
    add('--poc-email ADDRESS', 'v0.5: address of the contact person', default='')
    add(
        '--rcp-bypass REASON',
        'submit runs that took too few epochs for their batch; the results chair audits them',
        default='',
    )
    add('--replace', 'replace the files of this system in the tree')
    add(
        '--check TREE',
        'validate a finished tree, such as submission/us, instead of building one',
        type=Path,
    )
    add('--pack', 'write the encrypted archive of the tree and its SHA-1 beside it, if it is ready')
    add_format_option(parser)
    add_wide_option(parser)
    return parser


def run(argv: Sequence[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)

    allowed = '--check', '--round', '--pack', '--format', '--wide'
    given = given_arguments(parser, options, *allowed)
    if options.check and given:
        raise ConfigError(f'--check: got {", ".join(given)} too, expected only a finished tree')
    missing = [name for name in ('RUNS', '--org', '--system', '--out') if name not in given]
    if missing and not options.check:
        parser.error(f'the following arguments are required: {", ".join(missing)}')
    if options.pack and options.round < _PACKED_SINCE:
        raise ConfigError(f'--pack: got {options.round}, expected {_PACKED_SINCE} or later')
    from mlperf_rn50.mllog.package.submission import package_answer

    if options.check:
        heading = str(options.check)
        result, minutes = _check(options.check, options.round)
    else:
        result, heading, minutes = _build(options)
    if options.pack:
        result = _pack(result)
    return print_answer(package_answer(result, heading, minutes), options)


def _load(paths: Sequence[Path], round_name: str) -> list[RunSet]:
    """Return the sets of logs, judged by the rules of a round."""
    from mlperf_rn50.analysis.sets.load import Rules, describe_others, load_logs

    run_sets, others = load_logs(paths, Rules([ROUNDS[round_name]]))
    if others:
        print(f'mlperf-rn50: {describe_others(others)}', file=sys.stderr)
    return run_sets


def _logs_of(path: Path, round_name: str) -> list[Path]:
    """Return a path or, for v0.6, the logs in a folder that were written in its format."""
    logs = sorted(path.glob('result_*_v0.6.txt')) if round_name == 'v0.6' else []
    return logs or [path]


def _check(tree: Path, round_name: str) -> tuple[Package, float | None]:
    """Check a finished tree. Return also the score of a single system."""
    from mlperf_rn50.mllog.check.faults import Fault
    from mlperf_rn50.mllog.package.submission import Package
    from mlperf_rn50.mllog.package.tree_verdict import JudgedRuns, judge_package

    expected = 'the tree of an organisation, such as submission/us'
    if round_name == 'v0.5':
        expected = 'the tree of a system, such as submission/us/box'
    check_exists(tree, expected)
    if not (tree / 'results').is_dir():
        raise UserError(f'--check: {tree} contains no results folder; expected {expected}')
    run_sets = _load([tree / 'results'], round_name)
    sets, strays = dict[str, JudgedRuns](), list[Fault]()
    for s in run_sets:
        if s.folder == tree / 'results' / s.name / 'resnet':
            sets[s.name] = s.runs, s.judgement
        else:
            text = 'got logs, expected them only in results/SYSTEM/resnet; move or remove them'
            if s.refusal and all(r.status == 'unreadable' for r in s.runs):
                text = s.refusal
            strays.append(
                Fault(str(s.folder.relative_to(tree)), '', text, 'SR Directory structure')
            )
    minutes = run_sets[0].score_minutes if len(run_sets) == 1 else None
    verdict = judge_package(tree, round_name, sets)
    verdict = replace(verdict, faults=[*strays, *verdict.faults])
    return Package(round_name, tree, verdict=verdict), minutes


def _pack(result: Package) -> Package:
    """Pack the whole tree of an organisation if it is ready. Return the result with a note."""
    from mlperf_rn50.mllog.package.archive import pack_tree

    if result.home and result.ready:  # other systems may be in the tree of a new one
        whole, _ = _check(result.home, result.round)
        result = replace(result, verdict=whole.verdict)
    if not (result.home and result.ready):
        return replace(result, notes=[*result.notes, '--pack: nothing was packed'])
    archive, digest = pack_tree(result.home.resolve())
    return replace(result, notes=[*result.notes, f'packed as {archive}, SHA-1 in {digest.name}'])


def _build(options: Namespace) -> tuple[Package, str, float | None]:
    """Build a package. Return it, the heading of the printed text, and the score of its runs."""
    from mlperf_rn50.mllog.package import submission
    from mlperf_rn50.mllog.package.system_desc import load_described

    given = load_described(options.describe) if options.describe else {}
    paths = [log for p in options.runs for log in _logs_of(Path(p), options.round)]
    run_sets = _load(paths, options.round)
    if len(run_sets) != 1:
        raise UserError(
            f'RUNS: got {len(run_sets)} sets ({", ".join(s.name for s in run_sets)}), expected one'
        )
    order = submission.Order(
        org=options.org,
        system=options.system,
        round=options.round,
        out=Path(options.out),
        code=options.code or submission.CHECKOUT,
        poc_email=options.poc_email,
        is_replacing=options.replace,
        rcp_bypass=options.rcp_bypass,
        given=given | ({'system_name': options.name} if options.name else {}),
    )
    run_set, window_notes = _choose_runs(run_sets[0], order)
    result = submission.make_package(run_set.runs, run_set.judgement, order)
    result = replace(result, notes=[*window_notes, *result.notes])
    heading = f'{result.home}: {order.system}, {order.round}'
    if not result.home:
        heading = (
            f'refused by the rules of {order.round} (--round ROUND selects another); nothing was '
            'written:'
        )
    return result, heading, run_set.score_minutes


def _choose_runs(run_set: RunSet, order: Order) -> tuple[RunSet, list[str]]:
    """Return the set of the five runs that count, and the scores of all windows of five if there
    are more runs."""
    from mlperf_rn50.analysis.sets.load import make_run_set
    from mlperf_rn50.analysis.sets.run_set import RUNS_OF_A_SCORE
    from mlperf_rn50.mllog.package import windows
    from mlperf_rn50.mllog.package.tree_verdict import refusals_of

    runs = run_set.runs
    is_whole = len(runs) <= RUNS_OF_A_SCORE or order.round < windows.WINDOWS_SINCE
    if is_whole or run_set.refusal or run_set.duplicates or {'running'} & {r.status for r in runs}:
        return run_set, []
    logs = {log.path: log for log in run_set.logs}
    judged_sets = {}
    for part in windows.split_windows(runs, RUNS_OF_A_SCORE):
        judged = make_run_set(run_set.folder, [logs[r.path] for r in part])
        is_refused = refusals_of(judged.judgement, judged.runs, bool(order.rcp_bypass))
        minutes = None if is_refused else judged.olympic_minutes
        judged_sets[windows.Window(part, minutes or math.inf)] = judged
    chosen = windows.median_window([*judged_sets])
    return judged_sets[chosen], windows.render_windows([*judged_sets], chosen)
