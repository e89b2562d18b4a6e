"""Train each layout (nodes x ranks) of a list with several seeds, and print the report.

examples:
  mlperf-rn50 sweep --study c4140 --layouts '1x4 2x4 4x4 8x4' --seeds 5 --weak --hostfile hosts
      --config launch/configs/c4140_v100_1node.yaml

The logs are logs/<study>/<layout>/result_<k>.txt. Complete layouts are skipped. A failed run is
reported, and the sweep continues. All other options are passed to the launcher, such as
--ranks-per-device K, or to: mlperf-rn50 train
"""

from __future__ import annotations

import math
import platform
import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_rn50.cli import launch
from mlperf_rn50.cli.parsers import command_parser
from mlperf_rn50.errors import (
    EXIT_AT_ONCE,
    EXIT_FAILED,
    EXIT_OK,
    EXIT_RESUMABLE,
    ConfigError,
    UserError,
)
from mlperf_rn50.files import read_text
from mlperf_rn50.launch.engines import COUNT, PRINTING, announce
from mlperf_rn50.launch.helpers import LAUNCHER_SIGNALS
from mlperf_rn50.launch.hosts import check_ranks, load_hostfile, parse_hosts
from mlperf_rn50.launch.sweep_layouts import (
    SweepLayout,
    parse_layouts,
    parse_lr_table,
    plan_layouts,
)
from mlperf_rn50.parser import Parser, filled, option_adder
from mlperf_rn50.system.signals import END_SIGNALS, STOPPING, SignalQueue, catch, interrupt
from mlperf_rn50.text import plural

if TYPE_CHECKING:
    from mlperf_rn50.config import Config

_LAYOUT_OPTIONS = (
    '--train.gradient_accumulation_steps',
    '--train.local_batch_size',
    '--train.global_batch_size',
    '--schedule.base_lr',
    '--schedule.warmup_epochs',
)
_MAX_BYTES = 1 << 20  # of --lr-table
_SWEEP_OPTIONS = (
    '--run-dir',
    '--run.dir',
    '--nodes',
    '--run.num_nodes',
    '--ranks-per-node',
    '--run.ranks_per_node',
    '--resume',
)


def make_parser() -> Parser:
    parser = command_parser('sweep', __doc__)
    add = option_adder(parser)
    add('--study NAME', 'name of the folder in logs/ for the runs', required=True)
    add('--layouts LIST', "list of nodes x ranks per node, such as '1x4 2x4'", required=True)
    add('--config FILE', 'configuration, with the values of the first layout', required=True)
    add(
        '--seeds N',
        'runs of each layout, each with a fresh seed (default 1)',
        type=COUNT,
        default=1,
    )
    add('--weak', 'keep the number of images per rank', dest='is_weak')
    add(
        '--strong',
        'keep the number of images per step (default)',
        dest='is_weak',
        action='store_false',
    )
    add(
        '--lr-table FILE',
        'file with lines: global_batch base_lr warmup_epochs (default: the learning rate is '
        'proportional to the global batch, starting from the first layout, with the same warm-up '
        'epochs)',
        type=filled,
    )
    add(
        '--engine',
        'launcher for hosts (default mpirun); without hosts, the ranks of all nodes run on this '
        'machine, and the logs of several nodes record this',
        choices=('mpirun', 'horovodrun'),
        default='mpirun',
    )
    add('--hosts h1,h2,...', 'hosts reached with ssh', type=filled)
    add('--hostfile FILE', 'file with one host per line', type=filled)
    return parser


def run(argv: Sequence[str]) -> int:
    from mlperf_rn50.cli import report

    o, rest = make_parser().parse_known_args(argv)
    check_options(o, rest)
    config = launch.load_train_config(['--config', o.config])
    check_seed(o, rest, config)
    layouts = plan_sweep(o, config)
    check_hosts(o, layouts)
    worst = EXIT_OK
    signals = SignalQueue(LAUNCHER_SIGNALS, STOPPING)
    first = rf'^{layouts[0].num_nodes}(?= ?x)'
    for layout in layouts:
        platform_name = re.sub(first, str(layout.num_nodes), config.run.submission_platform)
        words = launch_words(o, layout, platform_name)
        worst = max(worst, run_layout(o, layout, [*words, *rest], signals))
        if signals.is_requested:
            announce('sweep', 'stopped; the same command makes the missing runs')
            return EXIT_AT_ONCE if signals.is_forced else EXIT_RESUMABLE
    if any(word.partition('=')[0] in PRINTING for word in rest):
        return worst
    catch(interrupt, END_SIGNALS)
    try:
        report.run([f'logs/{o.study}'])
    except UserError as e:  # such as no logs after failures, which determine the exit code
        announce('sweep', str(e))
    return worst


def check_options(o: Namespace, rest: Sequence[str]) -> None:
    """Raise ConfigError for the first invalid option."""
    for word in rest:
        name = word.partition('=')[0]
        if name in _SWEEP_OPTIONS:
            raise ConfigError(f'{name}: not allowed in a sweep; remove it')
        if name in _LAYOUT_OPTIONS:
            raise ConfigError(
                f'{name}: layouts have different values; configure that of the first layout'
            )
    if not re.fullmatch(r'[A-Za-z0-9][A-Za-z0-9._-]*', o.study):
        raise ConfigError(f'--study: got {o.study!r}, expected a name for the folder in logs/')


def check_seed(o: Namespace, rest: Sequence[str], config: Config) -> None:
    """Raise ConfigError if several runs would have the same seed."""
    given: int | str | None = config.run.seed
    for word, following in zip(rest, [*rest[1:], '']):
        name, _, value = word.partition('=')
        if name == '--run.seed':
            given = value or following
    if o.seeds > 1 and given not in (None, 'null'):
        raise ConfigError(
            f'run.seed: got {given} with --seeds {o.seeds}, expected null; remove it, '
            'so that each run draws its own seed'
        )


def check_hosts(o: Namespace, layouts: Sequence[SweepLayout]) -> None:
    """Raise ConfigError if a layout needs more hosts, or more ranks of a host, than are given,
    before the first run."""
    if o.hostfile is None and o.hosts is None:
        return
    hosts = load_hostfile(o.hostfile) if o.hostfile else parse_hosts(o.hosts)
    most = max(layouts, key=lambda layout: layout.num_nodes)
    if len(hosts) < most.num_nodes:
        raise ConfigError(
            f'--layouts: got {most.name} with {plural(len(hosts), "host")}, expected at '
            'least as many hosts as nodes; add hosts or remove the layout'
        )
    for layout in layouts:
        check_ranks(hosts[: layout.num_nodes], layout.ranks_per_node, '--layouts')


def plan_sweep(o: Namespace, config: Config) -> list[SweepLayout]:
    """Return the batch size and learning rate of each layout; those of the configuration are for
    the first one."""
    table = None
    if o.lr_table:
        try:
            table = parse_lr_table(read_text(Path(o.lr_table), _MAX_BYTES))
        except (OSError, ValueError) as e:
            reason = getattr(e, 'strerror', None) or e
            raise ConfigError(f'--lr-table: {o.lr_table}: {reason}') from e
    splits = parse_layouts(o.layouts)
    return plan_layouts(
        splits,
        batch_size=config.global_batch_size(math.prod(splits[0])) or 0,
        num_passes=config.train.gradient_accumulation_steps,
        is_weak=o.is_weak,
        base_lr=config.schedule.base_lr,
        warmup_epochs=config.schedule.warmup_epochs,
        lr_table=table,
    )


def folder_of(o: Namespace, layout: SweepLayout) -> Path:
    return Path('logs', o.study, layout.name)


def launch_words(o: Namespace, layout: SweepLayout, platform_name: str) -> list[str]:
    """Return the name of the launcher and its options for a run of a layout, without the user's
    other options.

    platform_name: run.submission_platform of real nodes.
    """
    nodes, ranks = layout.num_nodes, layout.ranks_per_node
    if o.hosts or o.hostfile:
        words = [o.engine, '--nodes', str(nodes), '--ranks-per-node', str(ranks)]
        if o.hosts:
            words += ['--hosts', o.hosts]
        if o.hostfile:
            words += ['--hostfile', o.hostfile]
    else:
        if nodes > 1:
            platform_name = (
                f'{nodes} nodes of {plural(ranks, "rank")}, simulated by local ranks of '
                f'{platform.node()}'
            )
        words = ['local', '--nodes', '1', '--ranks-per-node', str(nodes * ranks)]
    return [
        *words,
        '--run.submission_platform',
        platform_name,
        '--config',
        o.config,
        '--run-dir',
        str(folder_of(o, layout)),
        f'--train.global_batch_size={layout.global_batch_size}',
        '--train.local_batch_size=null',
        f'--schedule.base_lr={layout.base_lr:.10g}',
        f'--schedule.warmup_epochs={layout.warmup_epochs:.10g}',
    ]


def run_layout(
    o: Namespace, layout: SweepLayout, words: Sequence[str], signals: SignalQueue
) -> int:
    """Make the missing runs of a layout; return the worst exit code. words: launcher and its
    options."""
    from mlperf_rn50.launch.attempts import ends_of, patient

    def report(text: str) -> None:
        announce('sweep', f'{layout.name}: {text}')

    folder = folder_of(o, layout)
    try:
        ends = patient(ends_of)(folder, 0)
    except UserError as e:
        report(str(e))
        return e.exit_code
    num_complete = sum(end in ('converged', 'aborted') for end in ends)
    if num_complete >= o.seeds:
        report(f'complete, skipped; {folder} has {plural(num_complete, "run")}')
    name, *options = words
    worst = EXIT_OK
    for number in range(num_complete, o.seeds):
        if signals.is_requested:
            break
        report(f'run {number + 1} of {o.seeds}')
        try:
            code = launch.start_launcher(name, options, signals)
        except UserError as e:
            report(str(e))
            code = e.exit_code
        worst = max(worst, code)
        if code and not signals.is_requested:
            end = 'did not converge' if code == EXIT_FAILED else f'failed with exit code {code}'
            report(f'this run {end}')
    return worst
