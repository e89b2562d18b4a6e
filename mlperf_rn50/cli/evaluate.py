"""Evaluate saved weights exactly, on any number of ranks, and list the most frequent class
confusions.

examples:
  mlperf-rn50 evaluate logs/digits_cpu
  launch/ranks.sh 2 mlperf-rn50 evaluate logs/digits_cpu --which last --confusions 20
  mlperf-rn50 evaluate weights/best.npz --data.dir data/digits --format json

The configuration is stored with the weights; options override its keys. The exit code is 1 if Top-1
differs from the log of the run; on a GPU, a difference of 0.1 % or one image is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mlperf_rn50.answer import Answer, Cell, Table, columns, number_cell, percent_cell
from mlperf_rn50.cli.output import add_format_option, print_answer
from mlperf_rn50.cli.parsers import add_wide_option, config_parser
from mlperf_rn50.cli.saved_weights import SavedWeights, load_saved
from mlperf_rn50.config import Config, for_evaluation, to_tree
from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK, ConfigError, DataError, RunFailed, option_error
from mlperf_rn50.parser import option_adder

if TYPE_CHECKING:
    from jsonargparse import Namespace

    from mlperf_rn50.train.evaluate import Accuracy, Confusion
    from mlperf_rn50.train.watchdog.heartbeat import Heartbeat


_GPU_ROUNDING = 1e-3  # largest difference of Top-1 that is none, or that of one image


def add_options(parser: Any) -> None:
    add = option_adder(parser)
    # Optional here, because the parser also reads the configuration of the weights; run() requires
    # it.
    add(
        'path RUN|WEIGHTS',
        'run folder (its newest run), weights folder, or .npz',
        nargs='?',
        type=str,
    )
    add('--which', 'saved network of the run', choices=['best', 'last'], default='best')
    add('--confusions N', 'number of confusions in the list', type=int, default=10)
    add_format_option(parser)
    add_wide_option(parser)


def run(argv: Sequence[str]) -> int:
    from mlperf_rn50.cli.ranks import in_rank
    from mlperf_rn50.config_file import parse_config_options
    from mlperf_rn50.system.processor import check_precision, find_processor

    parser = config_parser('evaluate', add_options)
    options = parse_config_options(parser, argv)
    if not options.path:
        raise option_error('the following arguments are required: path', parser)
    if options.confusions < 0:
        raise ConfigError(f'--confusions: got {options.confusions}, expected 0 or more')
    weights = load_saved(options.path, options.which)
    config = weights.config(argv, parser)
    check_precision('train.precision', config.train.precision, find_processor())
    return in_rank(lambda heartbeat: _evaluate(config, weights, options, heartbeat), config)


def _evaluate(
    config: Config, weights: SavedWeights, options: Namespace, heartbeat: Heartbeat
) -> int:
    from mlperf_rn50.cli.ranks import open_ranks
    from mlperf_rn50.data.batches import device_context, eval_batches
    from mlperf_rn50.data.recordio import class_names
    from mlperf_rn50.data.shards import Shard
    from mlperf_rn50.model.resnet import eval_network
    from mlperf_rn50.model.zoo import restore_model
    from mlperf_rn50.system.processor import leave_openmp_to_engine
    from mlperf_rn50.train.comm.device import device_id_of
    from mlperf_rn50.train.comm.rank_checks import digest_of_all_hosts
    from mlperf_rn50.train.evaluate import ConfusionMatrix, evaluate, with_mirror

    heartbeat.beat('start-up')
    comm = open_ranks(config, heartbeat)
    data = config.data
    device_id = device_id_of(config, comm)
    context = device_context(device_id)
    leave_openmp_to_engine()
    size = min(config.train.eval_batch_size or 1, -(-data.num_val // comm.world_size))
    batches = eval_batches(config, Shard(data.num_val, comm.rank, comm.world_size, size), device_id)
    digest_of_all_hosts(data, comm)
    if not data.synthetic and class_names(data) != list(weights.description.classes):
        raise DataError(
            f'data.dir: got other classes in {data.dir} than those of {weights.path}; set data.dir'
        )
    trained = restore_model(config, context, weights.arrays, str(weights.path))
    net = with_mirror(eval_network(config, context, trained), config)
    matrix = ConfusionMatrix(data.num_classes)
    heartbeat.beat('evaluation')
    accuracy = evaluate(
        net,
        batches(),
        num_images=data.num_val,
        comm=comm,
        on_batch=heartbeat.beat,
        on_logits=matrix.add,
    )
    matrix.sum(comm)
    num_correct = matrix.counts.trace()
    if num_correct != accuracy.num_top1:
        raise RunFailed(
            f'evaluation: the confusion matrix has {num_correct} correct images, expected '
            f'{accuracy.num_top1} as counted for Top-1'
        )
    logged = _logged_top1(weights) if _is_as_trained(config, weights) else None
    confusions = matrix.largest(options.confusions, weights.description.classes)
    answer = _answer(config, weights, accuracy, logged=logged, confusions=confusions)
    if comm.rank == 0:
        print_answer(answer, options)
    comm.barrier()
    return answer.exit_code


def _is_as_trained(config: Config, weights: SavedWeights) -> bool:
    """Return whether the run's own evaluations used the same images and arithmetic."""
    from mlperf_rn50.data.recordio import data_digest

    tree = to_tree(for_evaluation(config))
    description = weights.description
    # Synthetic images depend on the number of ranks.
    if config.data.synthetic or description.data_sha256 not in ('', data_digest(config.data)):
        return False
    # 0.6.0 had no eval_flip
    saved = {**description.tree(), 'data': {'eval_flip': False, **description.data}}
    keys = {
        'model': set(saved['model']),
        'data': set(saved['data']) - {'dir'},
        'train': {'precision', 'device'},
    }
    return all(tree[s][k] == saved[s][k] for s, names in keys.items() for k in names)


def _logged_top1(weights: SavedWeights) -> float | None:
    """Return Top-1 of the weights from the log of their run, or from their description if the log
    lacks it."""
    from mlperf_rn50.mllog.read.reader import read_run
    from mlperf_rn50.runfolder.names import RunFolder, folder_index

    folder = weights.path.absolute().parent
    description = weights.description
    log = RunFolder(folder.parent, folder_index(folder)).result
    top1 = description.top1
    if folder.name.startswith('weights') and log.is_file():
        for evaluation in read_run(log, is_own=True).evaluations:
            if evaluation.epoch == description.epoch:
                top1 = evaluation.accuracy
    return top1


def _answer(
    config: Config,
    weights: SavedWeights,
    accuracy: Accuracy,
    logged: float | None,
    confusions: list[Confusion],
) -> Answer:
    from mlperf_rn50.train.evaluate import data_label

    # on a GPU, algorithms are chosen by measured times, so rounding may decide near ties
    is_gpu = config.train.device == 'gpu'
    most = max(_GPU_ROUNDING, 1 / accuracy.num_images) + 1e-9 if is_gpu else 0.0
    is_as_logged = None if logged is None else abs(logged - accuracy.top1) <= most
    comparison = (
        'not compared: the run has no evaluation of these weights with these images and this '
        'precision'
    )
    if logged is not None:
        same = 'the same' if logged == accuracy.top1 else 'the same within the rounding of a GPU'
        comparison = f'{100 * logged:.2f} %, {same if is_as_logged else "NOT THE SAME"}'
    of_all = f'of {accuracy.num_images:,} images of {data_label(config.data)}'
    facts = {
        'weights': str(weights),
        'Top-1': f'{100 * accuracy.top1:.2f} %, {accuracy.num_top1:,} {of_all}',
        'Top-5': f'{100 * accuracy.top5:.2f} %, {accuracy.num_top5:,} {of_all}',
        'in the log': comparison,
    }
    rows = [
        (
            Cell(c.true_class),
            Cell(c.taken_for),
            number_cell(c.num_images, 'd'),
            percent_cell(c.share, '.1f'),
        )
        for c in confusions
    ]
    data = {
        'weights': str(weights.path),
        'epoch': weights.description.epoch,
        'dataset': config.data.dataset,
        'is_imagenet': config.data.is_imagenet,
        'is_synthetic': config.data.synthetic,
        **asdict(accuracy),
        'top1': accuracy.top1,
        'top5': accuracy.top5,
        'logged_top1': logged,
        'is_as_logged': is_as_logged,
        'confusions': [asdict(c) for c in confusions],
    }
    return Answer(
        tables=[
            Table('', (), [(Cell(name), Cell(text)) for name, text in facts.items()]),
            Table('', columns('class | taken for | images | of the class'), rows),
        ],
        data=data,
        exit_code=EXIT_FAILED if is_as_logged is False else EXIT_OK,
    )
