"""Check every rank: program, packages, processor, GPUs, data, disk, clocks, threads, network.

examples:
  mlperf-rn50 doctor
  mpirun -np 2 mlperf-rn50 doctor --config launch/configs/digits_cpu.yaml
  mlperf-rn50 doctor --config launch/configs/c4140_v100_1node.yaml --format json
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from mlperf_rn50.answer import STATUS_LEVELS, Answer, Cell, Table
from mlperf_rn50.cli.output import add_format_option, print_answer
from mlperf_rn50.cli.parsers import add_run_options, add_wide_option, config_parser, with_batch
from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK, RunFailed
from mlperf_rn50.parser import add_option
from mlperf_rn50.text import plural

if TYPE_CHECKING:
    from jsonargparse import Namespace

    from mlperf_rn50.config import Config
    from mlperf_rn50.doctor.result import Check
    from mlperf_rn50.train.watchdog.heartbeat import Heartbeat


def add_options(parser: Any) -> None:
    add_run_options(parser)
    add_format_option(parser)
    add_wide_option(parser)
    add_option(parser, '--quiet', 'print only warnings, failures and the totals')


def run(argv: Sequence[str]) -> int:
    from mlperf_rn50.cli.ranks import in_rank, load_config
    from mlperf_rn50.config_file import parse_config_options
    from mlperf_rn50.runfolder.names import list_checkpoints

    parser = config_parser('doctor', add_options)
    options = parse_config_options(parser, argv)
    argv = with_batch(argv, options.config or options.resume, 1)  # any works without training
    config, resumed = load_config(options, argv, parser)
    num_kept = 0
    if resumed:
        folder = resumed[0]
        num_kept = len(list_checkpoints(folder.checkpoints))
        # the folder may have been moved since its configuration was written
        config = replace(config, run=replace(config.run, dir=str(folder.dir)))
    return in_rank(lambda heartbeat: _examine(config, num_kept, options, heartbeat), config)


def _examine(config: Config, num_kept: int, options: Namespace, heartbeat: Heartbeat) -> int:
    from mlperf_rn50.cli import explain_missing
    from mlperf_rn50.doctor.checks import has_failed
    from mlperf_rn50.system.launcher_env import rank_name

    try:
        from mlperf_rn50.cli.ranks import open_ranks
        from mlperf_rn50.doctor.facts import examine
        from mlperf_rn50.train.plan import fit_batch

        comm = open_ranks(config, heartbeat)
    except ModuleNotFoundError:  # main() explains how to install the missing package
        raise
    except (ImportError, OSError) as e:
        error = explain_missing(e) or RunFailed(
            f'cannot import MXNet, DALI or Horovod: {e}; run launch/setup.sh --check on this host'
        )
        error.where = f'{rank_name()}: '
        raise error from e
    if options.elastic:
        # any number of ranks is right
        run = replace(config.run, num_nodes=None, ranks_per_node=None)
        config = replace(fit_batch(config, comm.world_size), run=run)
    has_config = bool(options.config or options.resume)
    rows, checks = examine(config, has_config, comm, num_kept)
    is_failed = has_failed(checks)
    if comm.rank == 0:
        data = {'passed': not is_failed, 'checks': [asdict(c) for c in checks], 'ranks': rows}
        answer = checks_answer(checks, options.quiet, data)
        is_error = options.quiet and options.format != 'json'
        print_answer(answer, options, sys.stderr if is_error else sys.stdout)
    return EXIT_FAILED if comm.sum([is_failed])[0] else EXIT_OK


def checks_answer(checks: Sequence[Check], is_quiet: bool, data: Any = None) -> Answer:
    """Return the totals, and a line for each check with the fix of a warning or failure. is_quiet
    omits the other checks."""
    counts = Counter(c.status for c in checks)
    rows = []
    for check in checks:
        is_good = check.status in ('ok', 'not needed')
        fix = f'; fix: {check.fix}' if check.fix and not is_good else ''
        if not (is_good and is_quiet):
            name = Cell(f'{check.status:10}  {check.name}')
            level = STATUS_LEVELS.get(check.status, '')
            rows.append((name, Cell(check.found + fix, level='' if is_good else level)))
    totals = (
        f'doctor: {plural(counts["ok"], "check")} passed, {counts["failed"]} failed, '
        f'{plural(counts["warning"], "warning")}'
    )
    return Answer(sentences=[totals], tables=[Table('', (), rows)], data=data)
