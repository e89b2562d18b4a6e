"""Show published hyper-parameters that converged at a batch size, write them, or compare a
configuration with them.

examples:
  mlperf-rn50 recipe 1664
  mlperf-rn50 recipe --global-batch-size 1664 --nodes 2 --ranks-per-node 4 --out recipe.yaml
  mlperf-rn50 recipe --global-batch-size 2500 --optimizer sgd --target 0.749 --format json
  mlperf-rn50 recipe --compare launch/configs/c4140_v100_2node.yaml

The recipes come from submissions that trained ResNet-50 with MXNet on ImageNet, in MLPerf Training
v0.5 to v4.0 (the last round with ResNet). Of the recipes at a batch, the one with the fewest epochs
is shown first. Between two published batch sizes the recipe is interpolated and marked as such;
outside their range there is no recipe.

exit codes: 0 a recipe was shown or written, 2 invalid arguments, or no recipe at this batch size
"""

import json
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from mlperf_rn50.cli.parsers import (
    add_wide_option,
    command_parser,
    config_parser,
    count,
    filled,
    fraction,
)
from mlperf_rn50.cli.terminal import width_of
from mlperf_rn50.errors import EXIT_OK, ConfigError
from mlperf_rn50.files import refuse_existing, write_atomically
from mlperf_rn50.parser import Parser

_MAX_BATCH = 1_281_167


def make_parser() -> Parser:
    parser = command_parser('recipe', __doc__)
    add = parser.add_argument
    add(
        'batch',
        nargs='?',
        type=count(_MAX_BATCH),
        metavar='N',
        help='same as --global-batch-size N',
    )
    add(
        '--global-batch-size',
        type=count(_MAX_BATCH),
        metavar='N',
        help='images per optimizer step over all ranks (default: as in the --compare '
        'configuration)',
    )
    add('--optimizer', choices=['sgd', 'lars'], help='optimizer of the recipes (default: both)')
    add(
        '--target',
        type=fraction,
        metavar='TOP1',
        help='lowest Top-1 target of the recipes, as a fraction; 0.749 and 0.759 are published '
        '(default: all)',
    )
    add(
        '--division',
        choices=['closed', 'open'],
        default='closed',
        help='open also shows sets of the open division, which may skip rules (default: closed)',
    )
    add(
        '--nodes',
        type=count(_MAX_BATCH),
        metavar='N',
        help='nodes of the written or compared configuration',
    )
    add(
        '--ranks-per-node',
        type=count(_MAX_BATCH),
        metavar='N',
        help='ranks (GPUs) per node of that configuration',
    )
    add(
        '--out',
        metavar='FILE',
        type=filled,
        help='new file for the recipe, written as a configuration for train',
    )
    add(
        '--compare', metavar='CONFIG', type=filled, help='configuration to compare with the recipes'
    )
    add(
        '--format',
        choices=['table', 'json'],
        default='table',
        help='output format (default: table)',
    )
    add_wide_option(parser)
    return parser


def run(argv: Sequence[str]) -> int:
    options = make_parser().parse_args(argv)
    if None not in (options.batch, options.global_batch_size):
        raise ConfigError('N, --global-batch-size: got both, expected one of them')
    options.global_batch_size = options.global_batch_size or options.batch
    if (options.nodes is None) != (options.ranks_per_node is None):
        raise ConfigError('--nodes, --ranks-per-node: got one of them, expected both or neither')
    if options.compare and options.out:
        raise ConfigError('--compare, --out: got both, expected one of them')
    refuse_existing([Path(options.out)] if options.out else [])
    from mlperf_rn50.analysis.recipe import choose, tables

    if options.compare:
        recipes = tables.find_recipes(*_compared(options))
    elif options.global_batch_size is None:
        raise ConfigError(
            'N: missing; for example: mlperf-rn50 recipe 1664; see mlperf-rn50 recipe --help'
        )
    else:
        choose.check_shares(
            options.global_batch_size, (options.nodes or 1) * (options.ranks_per_node or 1)
        )
        recipes = tables.find_recipes(
            options.global_batch_size, options.optimizer, options.target, division=options.division
        )
    if options.out and recipes.choice:
        layout = options.nodes, options.ranks_per_node
        comments = tables.comments_of(
            recipes.choice, shlex.join(['mlperf-rn50', 'recipe', *argv]), *layout
        )
        try:
            config = choose.make_config(recipes.choice, *layout)
            write_atomically(Path(options.out), tables.render_config(config, comments))
        except OSError as e:
            raise ConfigError(f'--out: cannot write {options.out}: {e.strerror}') from e
    print(
        json.dumps(tables.recipes_object(recipes), indent=2)
        if options.format == 'json'
        else tables.render_recipes(recipes, width_of(sys.stdout, options.wide))
    )
    return EXIT_OK


def _compared(options: Namespace) -> tuple:
    """Return the arguments of find_recipes for the --compare configuration."""
    from mlperf_rn50.config_file import resolve_config
    from mlperf_rn50.train.plan import config_world_size

    config = resolve_config(Path(options.compare), [], config_parser('train'))
    num_ranks = (
        options.nodes * options.ranks_per_node if options.nodes else config_world_size(config)
    )
    configured = config.global_batch_size(num_ranks)
    batch = options.global_batch_size or configured
    if batch is None:
        raise ConfigError(
            f'{options.compare}: train.local_batch_size is {config.train.local_batch_size} per '
            'rank, but '
            'the number of ranks is unknown; give --nodes and --ranks-per-node, or '
            '--global-batch-size'
        )
    if configured not in (None, batch):
        raise ConfigError(
            f'--global-batch-size: got {batch}, but {options.compare} has {configured}; omit the '
            'option'
        )
    target = config.train.target_accuracy if options.target is None else options.target
    return batch, options.optimizer, target, config, num_ranks, options.division
