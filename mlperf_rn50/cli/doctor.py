"""Check every rank: program, packages, processor, GPUs, data, disk, clocks, threads, network.

examples:
  mlperf-rn50 doctor
  mpirun -np 2 mlperf-rn50 doctor --config launch/configs/digits_cpu.yaml
  mlperf-rn50 doctor --config launch/configs/c4140_v100_1node.yaml --format json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mlperf_rn50.cli.parsers import add_run_options, config_parser
from mlperf_rn50.cli.terminal import paint_statuses
from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK, RunFailed

if TYPE_CHECKING:
    from jsonargparse import Namespace

    from mlperf_rn50.config import Config
    from mlperf_rn50.train.watchdog.heartbeat import Heartbeat


def add_options(parser: Any) -> None:
    add_run_options(parser)
    parser.add_argument(
        '--format', choices=['table', 'json'], default='table', help='output format'
    )
    parser.add_argument(
        '--quiet', action='store_true', help='print only warnings, failures and the totals'
    )


def run(argv: Sequence[str]) -> int:
    from mlperf_rn50.cli.ranks import in_rank, load_config
    from mlperf_rn50.config_file import parse_config_options

    parser = config_parser('doctor', add_options)
    options = parse_config_options(parser, argv)
    # local_batch_size has no default; any value works without training
    if not (options.config or options.resume):
        argv = ['--train.local_batch_size=1', *argv]
    config, _ = load_config(options, argv, parser)
    return in_rank(lambda heartbeat: _examine(config, options, heartbeat), config)


def _examine(config: Config, options: Namespace, heartbeat: Heartbeat) -> int:
    from mlperf_rn50.doctor.checks import has_failed, render_checks
    from mlperf_rn50.system.launcher_env import rank_name

    try:
        from mlperf_rn50.cli.ranks import open_ranks
        from mlperf_rn50.doctor.facts import examine

        comm = open_ranks(config, heartbeat)
    except ModuleNotFoundError:  # main() explains how to install the missing package
        raise
    except (ImportError, OSError) as e:
        raise RunFailed(
            f'{rank_name()}: cannot import MXNet, DALI or Horovod: {e}; run launch/setup.sh '
            '--check on this host'
        ) from e
    rows, checks = examine(config, bool(options.config or options.resume), comm)
    if comm.rank == 0 and options.format == 'json':
        print(
            json.dumps(
                {
                    'passed': not has_failed(checks),
                    'checks': [asdict(c) for c in checks],
                    'ranks': rows,
                },
                indent=1,
            ),
            flush=True,
        )
    elif comm.rank == 0:
        out = sys.stderr if options.quiet else sys.stdout
        print(paint_statuses(render_checks(checks, options.quiet), out), file=out, flush=True)
    return EXIT_FAILED if comm.sum([has_failed(checks)])[0] else EXIT_OK
