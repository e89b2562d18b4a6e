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

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_rn50.cli.output import add_format_option, print_answer
from mlperf_rn50.cli.parsers import (
    add_wide_option,
    command_parser,
    config_parser,
    count,
    fraction,
)
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.files import refuse_existing, write_atomically
from mlperf_rn50.parser import Parser, filled, option_adder

if TYPE_CHECKING:
    from mlperf_rn50.config import Config

_MAX_BATCH = 1_281_167


def make_parser() -> Parser:
    parser = command_parser('recipe', __doc__)
    add = option_adder(parser)
    add('batch N', 'same as --global-batch-size N', nargs='?', type=count(_MAX_BATCH))
    add(
        '--global-batch-size N',
        'images per optimizer step over all ranks (default: as in the --compare configuration)',
        type=count(_MAX_BATCH),
    )
    add('--optimizer', 'optimizer of the recipes (default: both)', choices=['sgd', 'lars'])
    add(
        '--target TOP1',
        'lowest Top-1 target of the recipes, as a fraction; 0.749 and 0.759 are published '
        '(default: all)',
        type=fraction,
    )
    add(
        '--division',
        'open also shows sets of the open division, which may skip rules (default: closed)',
        choices=['closed', 'open'],
        default='closed',
    )
    add('--nodes N', 'nodes of the written or compared configuration', type=count(_MAX_BATCH))
    add('--ranks-per-node N', 'ranks (GPUs) per node of that configuration', type=count(_MAX_BATCH))
    add('--out FILE', 'new file for the recipe, written as a configuration for train', type=filled)
    add('--compare CONFIG', 'configuration to compare with the recipes', type=filled)
    add_format_option(parser)
    add_wide_option(parser)
    return parser


def run(argv: Sequence[str]) -> int:
    options = make_parser().parse_args(argv)
    if None not in (options.batch, options.global_batch_size):
        raise ConfigError('N, --global-batch-size: got both, expected one of them')
    if (options.nodes is None) != (options.ranks_per_node is None):
        raise ConfigError('--nodes, --ranks-per-node: got one of them, expected both or neither')
    if options.compare and options.out:
        raise ConfigError('--compare, --out: got both, expected one of them')
    refuse_existing([Path(options.out)] if options.out else [])
    from mlperf_rn50.analysis.recipe import recipe_answer
    from mlperf_rn50.analysis.recipe.choose import check_shares

    batch, config, num_ranks = options.global_batch_size or options.batch, None, None
    target = options.target
    if options.compare:
        batch, config, num_ranks = _compared(options, batch)
        if target is None:
            target = config.train.target_accuracy
    elif batch is None:
        raise ConfigError(
            'N: missing; for example: mlperf-rn50 recipe 1664; see mlperf-rn50 recipe --help'
        )
    else:
        check_shares(batch, (options.nodes or 1) * (options.ranks_per_node or 1))
    found = recipe_answer.find_recipes(
        batch,
        options.optimizer,
        target,
        config=config,
        num_ranks=num_ranks,
        division=options.division,
    )
    if options.out and found.choice:
        command = shlex.join(['mlperf-rn50', 'recipe', *argv])
        text = recipe_answer.render_recipe(
            found.choice, command, options.nodes, options.ranks_per_node
        )
        try:
            write_atomically(Path(options.out), text)
        except OSError as e:
            raise ConfigError(f'--out: cannot write {options.out}: {e.strerror}') from e
    return print_answer(recipe_answer.recipe_answer(found), options)


def _compared(options: Namespace, batch: int | None) -> tuple[int, Config, int | None]:
    """Return the batch, the --compare configuration and its number of ranks."""
    from mlperf_rn50.config_file import resolve_config

    config = resolve_config(Path(options.compare), [], config_parser('train'))
    num_ranks = config.world_size
    if options.nodes:
        num_ranks = options.nodes * options.ranks_per_node
    configured = config.global_batch_size(num_ranks)
    found = batch or configured
    if found is None:
        raise ConfigError(
            f'{options.compare}: train.local_batch_size is {config.train.local_batch_size} per '
            'rank, but the number of ranks is unknown; give --nodes and --ranks-per-node, or '
            '--global-batch-size'
        )
    if configured not in (None, found):
        raise ConfigError(
            f'--global-batch-size: got {batch}, but {options.compare} has {configured}; omit the '
            'option'
        )
    if configured is None:  # images per rank without ranks: the given batch is compared
        train = replace(config.train, local_batch_size=None, global_batch_size=found)
        config = replace(config, train=train)
    return found, config, num_ranks
