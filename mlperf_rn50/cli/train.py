"""Train until the target accuracy is reached and write an MLPerf log.

examples:
  mlperf-rn50 train --config launch/configs/c4140_v100_4node.yaml --dry-run
  mpirun -np 2 mlperf-rn50 train --config launch/configs/digits_cpu.yaml --run.seed 1
  mpirun -np 2 mlperf-rn50 train --resume logs/digits_cpu

Options override the --config file, which overrides the defaults. A resumed run uses the
configuration in its folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlperf_rn50 import config as cfg
from mlperf_rn50.cli.parsers import add_run_options, config_parser
from mlperf_rn50.cli.terminal import width_of
from mlperf_rn50.errors import EXIT_CODES, EXIT_OK, ConfigError
from mlperf_rn50.parser import DRILL_FORM, option_adder, parse_drill, whole_number

if TYPE_CHECKING:
    from jsonargparse import Namespace

    from mlperf_rn50.data.options import DataConfig
    from mlperf_rn50.runfolder.names import RunFolder
    from mlperf_rn50.train.run_events import Ended
    from mlperf_rn50.train.watchdog.heartbeat import Heartbeat


def add_options(parser: Any) -> None:
    add_run_options(parser)
    add = option_adder(parser)
    add('--dry-run', 'print the plan, the expected time and the state of the data, and exit')
    add('--print-config', 'print all keys with comments, for a file for --config, and exit')
    add(
        '--print KEY',
        'print the value of a key, such as run.dir, and exit',
        action='append',
        type=str,
    )
    add('--ranks N', 'number of ranks for --dry-run', type=whole_number(1))
    add(
        f'--drill {DRILL_FORM}',
        'cause a fault of a rank (kill, stop, hang, link, full-disk) after a step, to test a site '
        'before a long job',
        type=str,
    )


def parse_command(argv: Sequence[str]) -> tuple[Namespace, cfg.Config, Any, Sequence[str]]:
    """Return options, configuration, (run folder, checkpoint) for --resume or else None, and keys
    that may differ."""
    from mlperf_rn50.cli.ranks import load_config
    from mlperf_rn50.config_file import parse_config_options
    from mlperf_rn50.train.checkpoint.changes import kept_changes, parse_allowed

    parser = config_parser('train', add_options)
    options = parse_config_options(parser, argv)
    if options.drill:
        options.drill = parse_drill(options.drill)
    allowed = parse_allowed(options.allow_changed)
    config, resume = load_config(options, argv, parser)
    kept = kept_changes(resume[0], config) if resume else []
    return options, config, resume, (*allowed, *kept)


def run(argv: Sequence[str]) -> int:
    from mlperf_rn50.cli.ranks import in_rank
    from mlperf_rn50.launch.attempts import describe_unfinished
    from mlperf_rn50.system.launcher_env import launched_rank, print_stderr
    from mlperf_rn50.system.processor import check_precision, find_processor

    options, config, resume, allowed = parse_command(argv)
    if options.dry_run:
        return _print_plan(config, options)
    if options.print_config:
        from mlperf_rn50.config_text import section_text

        print('\n'.join(section_text(name, section) for name, section in vars(config).items()))
        return EXIT_OK
    if options.print:
        print('\n'.join(str(_value_of(config, key)) for key in options.print))
        return EXIT_OK
    check_precision('train.precision', config.train.precision, find_processor())
    if not resume and not launched_rank() and (text := describe_unfinished(Path(config.run.dir))):
        print_stderr(f'mlperf-rn50: {text}')
    return in_rank(
        lambda heartbeat: _train(config, resume, options, allowed, heartbeat),
        config,
        can_stop=True,
        run_dir=resume[0].dir if resume else None,
    )


def _print_plan(config: cfg.Config, options: Namespace) -> int:
    """Print changed keys, derived numbers, expected time and state of the data; raise DataError for
    unusable data."""
    from mlperf_rn50.analysis.recipe.differences import expected_time, find_deviations
    from mlperf_rn50.system.environment import query_gpus
    from mlperf_rn50.train.plan import make_elastic_plan, make_plan, rate_world_size, render_plan

    ranks = options.ranks or config.world_size or 1
    configured = rate_world_size(config, ranks, options.elastic)
    if options.elastic and options.resume:
        batch = config.global_batch_size(configured) or configured
    else:  # refuses what a new run would refuse
        plan = make_plan(config, configured)
        batch = plan.global_batch_size
    if options.elastic:
        plan = make_elastic_plan(config, ranks, batch)
    gpus = query_gpus('name') if config.train.device == 'gpu' else []
    epochs, gpu = [*plan.eval_epochs, plan.max_epochs], gpus[0]['name'] if gpus else None
    time = expected_time(config, ranks, epochs, gpu)
    _print_lines(cfg.render_yaml(config, only_changed=True), 2)
    _print_lines(render_plan(plan))
    if time:
        _print_lines(f'time                  {time}')
    _print_lines('\n'.join(f'warning: {text}' for text in find_deviations(config, configured)), 2)
    _print_lines(f'data                  {_data_text(config.data)}')
    return EXIT_OK


def _print_lines(text: str, indent: int = 22) -> None:
    """Print lines, wrapped on a terminal."""
    from mlperf_rn50.text import wrap_line

    for line in text.splitlines():
        print(wrap_line(line, width_of(sys.stdout), ' ' * indent), flush=True)


def _data_text(data: DataConfig) -> str:
    """Return the state of the data; raise DataError for data with which a run would not start."""
    from mlperf_rn50.data.recordio import MANIFEST_NAME, find_split

    if data.synthetic:
        return 'synthetic images, no files'
    if not os.path.exists(Path(data.dir, MANIFEST_NAME)):
        return f'not checked, because {data.dir} on this machine has no {MANIFEST_NAME}'
    for split in ('train', 'validation'):
        find_split(data, split)
    return f'ok, {data.num_train:,} training and {data.num_val:,} validation images'


def _value_of(config: cfg.Config, key: str) -> Any:
    if key not in cfg.KEYS:
        raise ConfigError(f'--print: got {key}, expected a section and a key, such as run.dir')
    section, _, name = key.partition('.')
    value = getattr(getattr(config, section), name)
    return '' if value is None else value


def _train(
    config: cfg.Config,
    resume: Any,
    options: Namespace,
    allowed: Sequence[str],
    heartbeat: Heartbeat,
) -> int:
    from mlperf_rn50.analysis.recipe.differences import find_deviations
    from mlperf_rn50.cli.ranks import open_ranks
    from mlperf_rn50.train.plan import rate_world_size
    from mlperf_rn50.train.run import RunArguments, train

    comm = open_ranks(config, heartbeat)
    heartbeat.beat()  # the imports took a while, which must not count as a stall
    num_ranks = rate_world_size(config, comm.world_size, options.elastic)
    warnings = find_deviations(config, num_ranks) if comm.rank == 0 and not resume else []
    arguments = RunArguments(
        config,
        comm,
        heartbeat,
        resume=resume,
        is_elastic=options.elastic,
        allowed=allowed,
        warnings=warnings,
        drill=options.drill,
    )
    end, folder = train(arguments)
    if comm.rank == 0:
        with suppress(OSError):  # a closed terminal must not fail the run
            print(_render_end(end, folder, config), flush=True)
    # wait, because the launcher ends the other ranks when one exits with a code other than 0
    comm.barrier()
    return EXIT_CODES[end.status]


def _render_end(end: Ended, run: RunFolder, config: cfg.Config) -> str:
    from mlperf_rn50.system.launcher_env import resume_command
    from mlperf_rn50.train.evaluate import data_label

    status = {
        'converged': 'converged',
        'aborted': 'aborted: the target was not reached',
        'interrupted': f'interrupted; resume with: {resume_command(run.checkpoints)}',
    }[end.status]
    of_data = f'on {data_label(config.data)}, target {100 * config.train.target_accuracy:.2f} %'
    so_far = '' if end.epochs_to_converge else ' so far'
    others = ', '.join(p.name for p in (run.config, run.metrics, run.env, run.train_log))
    rows = {
        'status': status,
        'best Top-1': f'{end.best_text} {of_data}',
        'epochs to converge': end.epochs_to_converge or 'none',
        'time to train': f'{end.time_s:.1f} s{so_far}',
        'resumed': f'{end.parts.text}; no MLPerf score' if end.parts else None,
        'throughput': f'{end.images_per_s:.0f} images/s in training',
        'log': run.result,
        'other files': others,
    }
    return '\n'.join(f'{key:20}{text}' for key, text in rows.items() if text is not None)
