"""Sweep over layouts with several seeds each; skip complete layouts, report failed runs, and print a table."""
import os
import platform
import re
import secrets
import signal
import subprocess
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from mlperf_rn50.analysis.recipe.sweep_layouts import SweepLayout, parse_layouts, parse_lr_table, plan_layouts
from mlperf_rn50.errors import EXIT_AT_ONCE, EXIT_RESUMABLE, ConfigError
from mlperf_rn50.launch.attempts import end_of, read_metrics
from mlperf_rn50.launch.options import count, join_values, say, script_parser, values_of
from mlperf_rn50.launch.process import as_child, run_engine
from mlperf_rn50.parser import Parser
from mlperf_rn50.runfolder.names import RunFolder, run_numbers
from mlperf_rn50.system.signals import SignalQueue

_LAYOUT_OPTIONS = ('--train.local_batch_size', '--train.global_batch_size', '--schedule.base_lr',
                   '--schedule.warmup_epochs')
_SWEEP_OPTIONS = ('--run-dir', '--nodes', '--ranks-per-node', '--resume')


def make_parser(script: Path) -> Parser:
    """Return the parser of launch/sweep.sh."""
    parser = script_parser(script)
    add = parser.add_argument_group('options of the sweep').add_argument
    add('--study', metavar='NAME', default='', help='name of the folder in logs/ for the runs')
    add('--layouts', metavar='LIST', default='', help="list of nodes x ranks per node, such as '1x4 2x4'")
    add('--config', metavar='FILE', help='configuration, with the batch and learning rate of the first layout')
    add('--seeds', metavar='N', type=count, default=1, help='runs of each layout, each with a fresh seed (default 1)')
    add('--weak', dest='is_weak', action='store_true', help='keep the number of images per rank')
    add('--strong', dest='is_weak', action='store_false', help='keep the number of images per step (default)')
    add('--lr-table', metavar='FILE', help='file with lines: global_batch base_lr warmup_epochs (default: the learning '
        'rate is proportional to the global batch, starting from the first layout, with the same warm-up epochs)')
    add('--engine', metavar='NAME', default='mpirun', help='launcher for hosts: mpirun (default) or horovodrun; '
        'without hosts, the ranks of all nodes run on this machine, and the log records this')
    add('--hosts', metavar='h1,h2,…', help='hosts reached with ssh')
    add('--hostfile', metavar='FILE', help='file with one host per line')
    parser.epilog = ('All other options are passed to the launcher, such as --ranks-per-device K, or to: mlperf-rn50 '
                     'train')
    return parser


def check_options(o: Namespace, rest: Sequence[str]) -> None:
    """Raise ConfigError for the first invalid option."""
    for word in rest:
        name = word.partition('=')[0]
        if name in _SWEEP_OPTIONS:
            raise ConfigError(f'{name}: the sweep sets this option; remove it')
        if name in _LAYOUT_OPTIONS:
            raise ConfigError(f"{name}: layouts have different values; configure that of the first layout")
    if not re.fullmatch(r'[A-Za-z0-9][A-Za-z0-9._-]*', o.study):
        raise ConfigError(f'--study: got {o.study!r}, expected a name for the folder in logs/')
    if not o.layouts.strip():
        raise ConfigError("--layouts: got nothing, expected a list such as '1x4 2x4'")
    if not o.config:
        raise ConfigError('--config: got nothing, expected a file from launch/configs')
    if o.engine not in ('mpirun', 'horovodrun'):
        raise ConfigError(f'--engine: got {o.engine}, expected mpirun or horovodrun')


def plan_sweep(o: Namespace, values: Sequence[str]) -> list[SweepLayout]:
    """Return the batch size and learning rate of each layout, given the configured values of _LAYOUT_OPTIONS."""
    local_batch, global_batch, base_lr, warmup_epochs = values
    try:
        table = parse_lr_table(Path(o.lr_table).read_text()) if o.lr_table else None
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f'--lr-table: {o.lr_table}: {getattr(e, "strerror", None) or "not a text file"}') from e
    return plan_layouts(parse_layouts(o.layouts.replace(',', ' ').split()), int(local_batch or global_batch),
                        bool(local_batch), o.is_weak, float(base_lr), float(warmup_epochs), table)


def launch_command(here: Path, o: Namespace, layout: SweepLayout, folder: Path) -> list[str]:
    """Return the command that starts a run of a layout, without the user's other options."""
    if o.hosts or o.hostfile:
        words = [f'{here}/launch/{o.engine}.sh', '--nodes', str(layout.num_nodes), '--ranks-per-node',
                 str(layout.ranks_per_node), *(['--hosts', o.hosts] if o.hosts else []),
                 *(['--hostfile', o.hostfile] if o.hostfile else [])]
    else:
        words = [f'{here}/launch/local.sh', '--ranks-per-node', str(layout.num_nodes * layout.ranks_per_node),
                 '--run.submission_platform', f'{layout.num_nodes} nodes of {layout.ranks_per_node} ranks, simulated '
                                              f'by local ranks of {platform.node()}']
    return [*words, '--config', o.config, '--run-dir', str(folder), f'--train.global_batch_size='
            f'{layout.global_batch_size}', '--train.local_batch_size=null', f'--schedule.base_lr={layout.base_lr:.10g}',
            f'--schedule.warmup_epochs={layout.warmup_epochs:.10g}']


def run_layout(o: Namespace, layout: SweepLayout, folder: Path, command: Sequence[str], signals: SignalQueue,
               report: Callable[[str], None]) -> int:
    """Make the missing runs of a layout; return the worst exit code."""
    num_complete = sum(end_of(read_metrics(RunFolder(folder, number))) in ('converged', 'aborted')
                       for number in run_numbers(folder))
    missing, worst = o.seeds - num_complete, 0
    if missing <= 0:
        report(f'{layout.name}: complete, skipped')
    for number in range(o.seeds - missing, o.seeds):
        if signals.is_requested:
            return worst
        report(f'{layout.name}: run {number + 1} of {o.seeds}')
        # With SIGINT as the end signal, a second Ctrl-C also ends the launcher at once.
        code = run_engine(command, os.environ, signals, f'{os.getpid()}-{secrets.token_hex(4)}',
                          end_signal=signal.SIGINT)
        worst = max(worst, code)
        if code and not signals.is_requested:
            report(f'{layout.name}: this run {"did not converge" if code == 1 else f"failed with exit code {code}"}')
    return worst


def run(here: Path, script: Path, argv: Sequence[str], signals: SignalQueue) -> int:
    """Run launch/sweep.sh; return its exit code. Raise ConfigError for invalid options."""
    o, rest = (parser := make_parser(script)).parse_known_args(join_values(parser, argv))
    check_options(o, rest)
    values = values_of(here, o.config, [], [name.removeprefix('--') for name in _LAYOUT_OPTIONS])
    worst = 0
    for layout in plan_sweep(o, values):
        folder = Path('logs', o.study, layout.name)
        command = [*launch_command(here, o, layout, folder), *rest]
        worst = max(worst, run_layout(o, layout, folder, command, signals, partial(say, script)))
        if signals.is_requested:
            return EXIT_AT_ONCE if signals.is_forced else EXIT_RESUMABLE
    subprocess.run([here / '.venv/bin/mlperf-rn50', 'report', f'logs/{o.study}'], preexec_fn=as_child)
    return worst
