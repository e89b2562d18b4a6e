"""Show the hyper-parameters of published runs that converged at a batch, write them, compare a configuration.

At a batch that no published set has, but sets below and above it do, the recipe lies between those and says so;
outside of them there is none.
"""
import json
import os
import shlex
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_rn50.cli.parsers import command_parser, config_parser, count, fraction
from mlperf_rn50.errors import EXIT_OK, ConfigError
from mlperf_rn50.parser import Parser

if TYPE_CHECKING:
    from mlperf_rn50.analysis.recipe.choose import Choice

EPILOG = """examples:
  mlperf-rn50 recipe --global-batch-size 1664
  mlperf-rn50 recipe --global-batch-size 1664 --nodes 2 --ranks-per-node 4 --out recipe.yaml
  mlperf-rn50 recipe --global-batch-size 2500 --optimizer sgd --target 0.749 --format json
  mlperf-rn50 recipe --compare launch/configs/c4140_v100_2node.yaml

The recipes are those of MLPerf Training v0.5 to v1.0 that trained ResNet-50 with MXNet on ImageNet.

exit codes: 0 shown or written, 2 a mistake in what was asked for, or no recipe is known at the batch"""
_MAX_BATCH = 1_281_167


def make_parser() -> Parser:
    parser = command_parser('recipe', __doc__, EPILOG)
    parser.add_argument('--global-batch-size', type=count(_MAX_BATCH), metavar='N',
                        help='images per optimizer step over all ranks (default: of the --compare configuration)')
    parser.add_argument('--optimizer', choices=['sgd', 'lars'], help='only recipes of this optimizer (default: both)')
    parser.add_argument('--target', type=fraction, metavar='TOP1',
                        help='only recipes made for this Top-1 or a higher one, as a fraction; published are 0.749 and '
                             '0.759 (default: all, each with its own)')
    parser.add_argument('--nodes', type=count(_MAX_BATCH), metavar='N', help='nodes of the layout to write for')
    parser.add_argument('--ranks-per-node', type=count(_MAX_BATCH), metavar='N', help='ranks (GPUs) of each node')
    parser.add_argument('--out', metavar='FILE', help='write a configuration for train there; it must not exist')
    parser.add_argument('--compare', metavar='CONFIG',
                        help='show every value of this configuration beside those of the recipes')
    parser.add_argument('--format', choices=['table', 'json'], default='table',
                        help='what goes to the standard output (default: table)')
    return parser


def run(argv: Sequence[str]) -> int:
    options = make_parser().parse_args(argv)
    if (options.nodes is None) != (options.ranks_per_node is None):
        raise ConfigError('--nodes, --ranks-per-node: got one of them, expected both or neither')
    if options.compare and options.out:
        raise ConfigError('--compare, --out: got both, expected one: to compare, or to write')
    for name in ('out', 'compare'):
        if getattr(options, name) == '':
            raise ConfigError(f'--{name}: got an empty text, expected a file')
    if options.out and os.path.lexists(options.out):
        raise ConfigError(f'--out: {options.out} is there already, expected a new file; move it or name another')
    from mlperf_rn50.analysis.recipe.choose import check_shares
    from mlperf_rn50.analysis.recipe.tables import find_recipes, recipes_object, render_recipes
    if options.compare:
        found = find_recipes(*_compared(options))
    elif options.global_batch_size is None:
        raise ConfigError('--global-batch-size N: missing; see mlperf-rn50 recipe --help')
    else:
        check_shares(options.global_batch_size, (options.nodes or 1) * (options.ranks_per_node or 1))
        found = find_recipes(options.global_batch_size, options.optimizer, options.target)
    if options.out and found.choice:
        _write(found.choice, options, argv)
    print(json.dumps(recipes_object(found), indent=2) if options.format == 'json' else render_recipes(found))
    return EXIT_OK


def _compared(options: Namespace) -> tuple:
    """Return the arguments of find_recipes for a configuration: its batch, what is asked for, itself, its ranks."""
    from mlperf_rn50.analysis.recipe.differences import global_batch_size
    from mlperf_rn50.options import resolve_config
    from mlperf_rn50.train.plan import config_world_size
    config = resolve_config(Path(options.compare), [], config_parser('train', None, ''))
    num_ranks = options.nodes * options.ranks_per_node if options.nodes else config_world_size(config)
    own = global_batch_size(config, num_ranks)
    batch = options.global_batch_size or own
    if batch is None:
        raise ConfigError(f'{options.compare}: train.local_batch_size is {config.train.local_batch_size} for each of '
                          'an unknown number of ranks; give --nodes and --ranks-per-node, or --global-batch-size')
    if own not in (None, batch):
        raise ConfigError(f'--global-batch-size: got {batch}, {options.compare} has {own}; leave it out')
    target = config.train.target_accuracy if options.target is None else options.target
    return batch, options.optimizer, target, config, num_ranks


def _write(choice: 'Choice', options: Namespace, argv: Sequence[str]) -> None:
    """Write the configuration of a recipe."""
    from mlperf_rn50.analysis.recipe.choose import make_config
    from mlperf_rn50.analysis.recipe.tables import comments_of, render_config
    from mlperf_rn50.files import write_atomically
    config = make_config(choice, options.nodes, options.ranks_per_node)
    comments = comments_of(choice, shlex.join(['mlperf-rn50', 'recipe', *argv]), options.nodes, options.ranks_per_node)
    try:
        write_atomically(Path(options.out), render_config(config, comments))
    except OSError as e:
        raise ConfigError(f'--out: cannot write {options.out}: {e.strerror}') from e
