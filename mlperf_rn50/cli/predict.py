"""Predict the time to train, the throughput and the cost of other layouts, from what was measured on one."""
import math
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mlperf_rn50.cli.parsers import add_price_option, command_parser, count, fraction
from mlperf_rn50.cli.terminal import has_colour, paint
from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK, ConfigError, option_error
from mlperf_rn50.parser import Parser

EPILOG = """examples:
  mlperf-rn50 predict v0.7/NVIDIA/dgxa100_ngc20.06_mxnet --layouts '1x8 2x8 8x8 96x8'
  mlperf-rn50 predict dgxa100_ngc20.06_mxnet --layouts '1x8 2x8 4x8' --strong --price-per-node-hour 20
  mlperf-rn50 predict logs/digits_sweep --layouts '1x1 2x1 4x1 8x1' --link-gbit-s 1 --out prediction
  mlperf-rn50 predict step.json exchange.json --layouts '1x4 2x4 4x4 8x4'    (of bench train and bench allreduce)
  mlperf-rn50 predict --validate ../shared/published

SOURCE is a run folder, a study or a tree of published logs; a JSON file of bench train or bench allreduce; or the name
of a published system, as round/organisation/system (recipe shows them by batch). A bench allreduce beside another
SOURCE says what joins the nodes.

Without an option of the batch each accelerator keeps its images (--weak). What is not known is refused, and why.
The knee is the layout from which on one per cent less time costs more than one per cent more node-hours.

exit codes: 0 a layout was predicted, 1 all were refused, 2 a mistake in what was asked for"""
_PACKAGED = 'packaged'  # what --validate has without a TREE: compared by identity, as a folder may be called so
_MAX_UNITS, _MAX_BATCH, _MAX_LAYOUTS = 1_000_000, 10_000_000, 1000


def rate(text: str) -> float:
    """Type of an option: Gbit/s of a link."""
    value = float(text)
    if not 1e-3 <= value <= 1e6:  # NaN too
        raise ArgumentTypeError(f'got {text:.20}, expected a number from 0.001 to 1000000')
    return value


def make_parser() -> Parser:
    parser = command_parser('predict', __doc__, EPILOG)
    parser.add_argument('sources', nargs='*', metavar='SOURCE',
                        help='what was measured: a folder, a file, or round/organisation/system')
    parser.add_argument('--layouts', nargs='+', metavar='NxM', help='nodes x accelerators (or ranks) on each')
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument('--global-batch-size', metavar='N', type=count(_MAX_BATCH), help='images per step')
    batch.add_argument('--local-batch-size', metavar='N', type=count(_MAX_BATCH),
                       help='images per step of each accelerator')
    batch.add_argument('--weak', action='store_true', help='keep the images of each accelerator (default)')
    batch.add_argument('--strong', action='store_true', help='keep the images per step')
    parser.add_argument('--link-gbit-s', metavar='X', type=rate,
                        help='rate of the slowest link between nodes, in Gbit/s and direction (default: as bench '
                             'allreduce measured it, or one port of 100 Gbit/s between accelerators)')
    add_price_option(parser)
    parser.add_argument('--optimizer', choices=['sgd', 'lars'], help='of the recipes (default: any)')
    parser.add_argument('--target', metavar='TOP1', type=fraction,
                        help='Top-1 as a fraction (default: that of the source)')
    parser.add_argument('--system', metavar='NAME',
                        help='of a folder with several systems, the one to start from (default: the fewest nodes)')
    parser.add_argument('--format', choices=['table', 'markdown', 'json'], default='table',
                        help='what goes to the standard output (default: table)')
    parser.add_argument('--out', metavar='DIR',
                        help='write prediction.json, prediction.md and the picture (SVG, PNG; light, dark) there')
    parser.add_argument('--validate', nargs='?', const=_PACKAGED, metavar='TREE',
                        help='predict every published system of several nodes from one of one node, and print the '
                             'errors; of the packaged table, or of a tree of published logs')
    return parser


def run(argv: Sequence[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)
    for name, expected in (('out', 'a folder'), ('system', 'a name'), ('validate', 'a TREE, or no word at all')):
        if getattr(options, name) == '':
            raise option_error(f'--{name}: got an empty text, expected {expected}', parser)
    if options.validate is not None:
        return _validate(options, parser)
    if not options.sources or not options.layouts:
        missing = [name for name, value in (('SOURCE', options.sources), ('--layouts', options.layouts)) if not value]
        raise option_error(f'the following arguments are required: {", ".join(missing)}', parser)
    return _predict(options)


def _predict(options: Namespace) -> int:
    """Predict what is asked for, write and print it; fail where all layouts are refused."""
    from mlperf_rn50.analysis.predict.answer import PredictionRequest, make_answer
    from mlperf_rn50.analysis.predict.source import load_source
    from mlperf_rn50.analysis.predict.tables import render_json, render_tables
    splits = _splits(options.layouts)
    source = load_source(options.sources, options.system, splits[0][1], options.local_batch_size, options.link_gbit_s)
    answer = make_answer(PredictionRequest(
        tuple(splits), options.global_batch_size, options.local_batch_size, options.strong, options.optimizer,
        options.target, options.price_per_node_hour), source)
    if options.out:
        from mlperf_rn50.analysis.predict.plot import dump_prediction
        print(f'mlperf-rn50: wrote {dump_prediction(answer, Path(options.out))}', file=sys.stderr)
    if options.format == 'json':
        print(render_json(answer))
    else:
        title = partial(paint, colour='bold') if options.format == 'table' and has_colour(sys.stdout) else str
        print(render_tables(answer, options.format == 'markdown', title))
    return EXIT_OK if answer.predicted else EXIT_FAILED


def _splits(words: Sequence[str]) -> list[tuple[int, int]]:
    """Return nodes, and accelerators or ranks on each, of '1x4 2x4', as one word or as several.

    Raises:
        ConfigError: a word is something else, comes twice, or is too large.
    """
    from mlperf_rn50.analysis.recipe.sweep_layouts import parse_layouts
    each = [word for text in words for word in text.split()]
    if len(each) > _MAX_LAYOUTS:
        raise ConfigError(f'--layouts: got {len(each):,}, expected at most {_MAX_LAYOUTS:,}')
    splits = parse_layouts(each)
    if not splits:
        raise ConfigError('--layouts: got nothing, expected nodes x ranks, such as 2x4')
    if many := next((s for s in splits if math.prod(s) > _MAX_UNITS), None):
        raise ConfigError(f'--layouts: got {many[0]}x{many[1]}, expected at most {_MAX_UNITS:,} accelerators')
    return splits


def _validate(options: Namespace, parser: Parser) -> int:
    """Predict what was measured, and print the errors; fail where nothing could be predicted."""
    beside = {'SOURCE': options.sources, '--layouts': options.layouts, '--out': options.out, '--system': options.system,
              '--format json': options.format == 'json'}
    if asked := [name for name, value in beside.items() if value]:
        raise option_error(f'--validate: got {", ".join(asked)} beside it, expected a TREE or nothing', parser)
    from mlperf_rn50.analysis.predict.validation import render_validation, validate_published, validate_systems
    from mlperf_rn50.analysis.sets.load import load_systems
    validation = (validate_published() if options.validate is _PACKAGED else
                  validate_systems(load_systems([Path(options.validate)])))
    print(render_validation(validation, options.format == 'markdown'))
    return EXIT_OK if validation.predicted else EXIT_FAILED
