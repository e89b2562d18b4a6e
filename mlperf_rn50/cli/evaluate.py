"""Evaluate kept weights exactly, over any number of ranks, and say which classes they confuse."""
from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from mlperf_rn50.cli.parsers import config_parser
from mlperf_rn50.cli.weights import SavedWeights, load_kept
from mlperf_rn50.config import Config, to_tree
from mlperf_rn50.data.options import IMAGENET
from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK, ConfigError, RunFailed, option_error

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

    from mlperf_rn50.model.weights import WeightsDescription
    from mlperf_rn50.train.evaluate import Accuracy, Confusion
    from mlperf_rn50.train.watchdog.position import Position

EPILOG = """examples:
  mlperf-rn50 evaluate logs/digits_cpu
  launch/ranks.sh 2 mlperf-rn50 evaluate logs/digits_cpu --which last --confusions 20
  mlperf-rn50 evaluate weights/best.npz --data.dir data/digits --train.eval_batch_size 100 --format json

Weights bring their configuration along; options named like its keys go before it. The exit code is 1 where the run's
log says another Top-1."""


def make_parser() -> ArgumentParser:
    parser = config_parser('evaluate', __doc__, EPILOG)
    # Not required by the parser, which also reads the weights' configuration.
    parser.add_argument('path', nargs='?', metavar='RUN|WEIGHTS', type=str,
                        help='run folder (its newest run), weights folder, or .npz')
    parser.add_argument('--which', choices=['best', 'last'], default='best', help='network of a run')
    parser.add_argument('--confusions', metavar='N', type=int, default=10, help='how many confusions are listed')
    parser.add_argument('--format', choices=['table', 'json'], default='table', help='how to print the result')
    return parser


def run(argv: Sequence[str]) -> int:
    from mlperf_rn50.cli.ranks import in_rank
    from mlperf_rn50.options import parse_options
    from mlperf_rn50.system.processor import check_precision, find_processor
    parser = make_parser()
    options = parse_options(parser, argv)
    if not options.path:
        raise option_error('the following arguments are required: path', parser)
    if options.config:
        raise ConfigError('--config: weights have their own configuration; set single keys with options')
    if options.confusions < 0:
        raise ConfigError(f'--confusions: got {options.confusions}, expected 0 or more')
    kept = load_kept(options.path, options.which)
    config = kept.config(argv, parser)
    check_precision('train.precision', config.train.precision, find_processor())
    return in_rank(lambda position: _evaluate(config, kept, options, position), config)


def _evaluate(config: Config, kept: SavedWeights, options: Namespace, position: Position) -> int:
    """One rank's part of the evaluation."""
    from mlperf_rn50.data.batches import device_context, eval_batches
    from mlperf_rn50.data.records import class_names
    from mlperf_rn50.data.shards import Shard
    from mlperf_rn50.model.resnet import eval_network
    from mlperf_rn50.model.zoo import restore_model
    from mlperf_rn50.system.topology import leave_openmp_to_engine
    from mlperf_rn50.train.comm.device import device_id_of
    from mlperf_rn50.train.comm.horovod import open_comm
    from mlperf_rn50.train.comm.sharing import sharing_of
    from mlperf_rn50.train.evaluate import ConfusionMatrix, evaluate
    position.now('start-up')
    comm = open_comm(config.comm.compression, exchange=position.exchange, num_sharing=sharing_of(config))
    data, device_id = config.data, device_id_of(config, comm)
    context = device_context(device_id)
    leave_openmp_to_engine()
    size = min(config.train.eval_batch_size or 1, -(-data.num_val // comm.world_size))
    batches = eval_batches(config, Shard(data.num_val, comm.rank, comm.world_size, size), device_id)
    net = eval_network(config, context, restore_model(config, context, kept.arrays, str(kept.path)))
    matrix = ConfusionMatrix(data.num_classes)
    position.now('evaluation')
    accuracy = evaluate(net, batches(), data.num_val, comm, position.now, matrix.add)
    matrix.sum(comm)
    if matrix.counts.trace() != accuracy.num_top1:
        raise RunFailed(f'evaluation: {matrix.counts.trace()} images were taken for their own class, and '
                        f'{accuracy.num_top1} are right')
    logged = _logged_top1(kept) if _is_as_trained(config, kept.description) else None
    if comm.rank == 0:
        is_own = config.data.dataset == kept.description.data['dataset']
        classes = kept.description.classes if is_own else class_names(config.data)
        confusions = matrix.largest(options.confusions, classes)
        render = render_json if options.format == 'json' else render_table
        print(render(config, kept, accuracy, logged, confusions), flush=True)
    comm.barrier()
    return EXIT_OK if logged in (None, accuracy.top1) else EXIT_FAILED


def _is_as_trained(config: Config, description: WeightsDescription) -> bool:
    """Whether the run's own evaluation was of the same images in the same arithmetic."""
    if config.data.synthetic:  # other images for another number of ranks
        return False
    tree = to_tree(config)
    keys = {'model': set(description.model), 'data': set(description.data) - {'dir'}, 'train': {'precision', 'device'}}
    return all(tree[s][k] == getattr(description, s)[k] for s, names in keys.items() for k in names)


def _logged_top1(kept: SavedWeights) -> float | None:
    """Top-1 in the log of the run that left the weights; without one, what they say themselves."""
    from mlperf_rn50.mllog.read.reader import read_run
    from mlperf_rn50.model.weights import run_index
    from mlperf_rn50.train.checkpoint.run_folder import RunFolder
    folder = kept.path.absolute().parent
    log = RunFolder(folder.parent, run_index(folder)).result
    if folder.name.startswith('weights') and log.is_file():
        found = [e.accuracy for e in read_run(log).evaluations if e.epoch == kept.description.epoch]
        if found:
            return found[-1]
    return kept.description.top1


def render_table(config: Config, kept: SavedWeights, accuracy: Accuracy, logged: float | None,
                 confusions: list[Confusion]) -> str:
    """The result for a person."""
    from tabulate import tabulate

    from mlperf_rn50.mllog.events import printable
    from mlperf_rn50.train.evaluate import data_name
    name = printable(data_name(config.data))
    known = 'not compared: the run had no evaluation of them, or it was of other images or in another precision'
    if logged is not None:
        known = f'{100 * logged:.2f} %, ' + ('the same' if logged == accuracy.top1 else 'NOT THE SAME')
    of_all = f'of {accuracy.num_images:,} images of {name}'
    lines = [f'weights      {printable(str(kept))}',
             f'Top-1        {100 * accuracy.top1:.2f} %, {accuracy.num_top1:,} {of_all}',
             f'Top-5        {100 * accuracy.top5:.2f} %, {accuracy.num_top5:,} {of_all}',
             f'in the log   {known}']
    if confusions:
        rows = [[printable(c.true_class), printable(c.taken_for), c.num_images, f'{100 * c.share:.1f} %']
                for c in confusions]
        lines += ['', tabulate(rows, ['class', 'taken for', 'images', 'of the class'], disable_numparse=True,
                               colalign=('left', 'left', 'right', 'right'))]
    return '\n'.join(lines)


def render_json(config: Config, kept: SavedWeights, accuracy: Accuracy, logged: float | None,
                confusions: list[Confusion]) -> str:
    """The result for a program."""
    return json.dumps({
        'weights': str(kept.path), 'epoch': kept.description.epoch, 'dataset': config.data.dataset,
        'is_imagenet': config.data.dataset == IMAGENET, 'is_synthetic': config.data.synthetic, **asdict(accuracy),
        'top1': accuracy.top1, 'top5': accuracy.top5, 'logged_top1': logged,
        'is_as_logged': None if logged is None else logged == accuracy.top1,
        'confusions': [asdict(c) for c in confusions]}, indent=1)
