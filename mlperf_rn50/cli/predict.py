"""Predict time to train, throughput and cost of other layouts from measurements of one layout.

examples:
  mlperf-rn50 predict v2.0/NVIDIA/dgxa100_ngc22.04_mxnet
  mlperf-rn50 predict dgxa100_ngc22.04_mxnet --layouts 16 --price-per-node-hour 20
  mlperf-rn50 predict logs/digits_sweep --layouts 1x1,2x1,4x1,8x1 --link-gbit-s 1 --out prediction
  mlperf-rn50 predict step.json exchange.json --layouts '1x4 2x4 4x4 8x4'    (files of bench)
  mlperf-rn50 predict --validate training_results_v0.7

SOURCE is a run folder, a study, a tree of published logs, a JSON file of bench train, or the name
of a published system as round/organisation/system (mlperf-rn50 report published lists these names).
Add a JSON file of bench allreduce to any SOURCE to set the interconnect speed.

Each layout has the batch with the least time, and so the least cost, among published and
interpolated recipes, unless an option fixes the batch. Logs that mlperf-rn50 check refuses are no
SOURCE. A layout that cannot be predicted is refused, with a reason. The knee is the layout with the
smallest product of time and node-hours; a faster layout multiplies the node-hours by more than it
divides the time.

exit codes: 0 at least one layout was predicted, 1 all layouts were refused, 2 invalid arguments
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mlperf_rn50.cli.output import add_format_option, print_answer
from mlperf_rn50.cli.parsers import (
    add_price_option,
    add_wide_option,
    command_parser,
    count,
    fraction,
    given_arguments,
    positive,
)
from mlperf_rn50.parser import Parser, filled, option_adder
from mlperf_rn50.text import printable

_MAX_BATCH = 10_000_000


def make_parser() -> Parser:
    parser = command_parser('predict', __doc__)
    add = option_adder(parser)
    add('sources SOURCE', 'measurements: folder, file, or round/organisation/system', nargs='*')
    add(
        '--layouts LAYOUT',
        'layouts to predict, as nodes or nodes x accelerators (or ranks) per node, such as 16 '
        'or 1x8,2x8 (default: 1, 2, 4, 8 and 16 nodes like those of the source)',
        nargs='+',
        default=['1 2 4 8 16'],
    )
    batch = option_adder(parser.add_mutually_exclusive_group())
    batch('--global-batch-size N', 'images per step', type=count(_MAX_BATCH))
    batch('--local-batch-size N', 'images per accelerator or rank', type=count(_MAX_BATCH))
    batch('--weak', 'keep the images per accelerator of the source')
    batch('--strong', 'keep the images per step of the source')
    add(
        '--link-gbit-s X',
        'rate of all ports of a node together, in Gbit/s per direction (default: as measured '
        'by bench allreduce or described with the logs)',
        type=partial(positive, least=1e-3, most=1e6, expected='a number from 0.001 to 1000000'),
    )
    add(
        '--what-if CHANGES',
        'predict a changed machine; any of link=GBIT_S (of a port), ports=N (per node), '
        'generation=NAME (of the accelerators), local=IMAGES (per accelerator), pixels=FRACTION '
        "(of the measured), epochs=N, tcp, hierarchical, such as 'link=25 tcp hierarchical'",
        type=filled,
    )
    add_price_option(parser)
    add('--optimizer', 'optimizer of the recipes (default: any)', choices=['sgd', 'lars'])
    add('--target TOP1', 'Top-1 target as a fraction (default: as in the source)', type=fraction)
    add(
        '--system NAME',
        'system in a SOURCE of several (default: with the fewest nodes)',
        type=filled,
    )
    add_format_option(parser)
    add_wide_option(parser)
    add('--out DIR', 'folder for prediction.json, prediction.md and a plot (SVG, PNG)', type=filled)
    add(
        '--validate TREE',
        'print the prediction errors for the systems in TREE, a tree of logs (default: the '
        'published systems)',
        nargs='?',
        const=True,
        type=filled,
    )
    return parser


def run(argv: Sequence[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.validate is not None:
        return _validate(options, parser)
    from mlperf_rn50.analysis.predict.layouts import PredictionRequest, predict_layouts
    from mlperf_rn50.analysis.predict.prediction_answer import prediction_answer
    from mlperf_rn50.analysis.predict.source import load_source, parse_what_if
    from mlperf_rn50.launch.sweep_layouts import parse_layouts

    if not options.sources:
        parser.error('the following arguments are required: SOURCE')
    layouts = parse_layouts(' '.join(options.layouts), 0)
    what_if = parse_what_if(options.what_if) if options.what_if else None
    source = load_source(
        options.sources,
        system=options.system,
        per_node=layouts[0][1],
        local_batch_size=options.local_batch_size,
        gbit_s=options.link_gbit_s,
    )
    base = source.base
    splits = [(n, per_node or base.layout.units_per_node) for n, per_node in layouts]
    request = PredictionRequest(
        splits=list(dict.fromkeys(splits)),
        global_batch_size=base.global_batch_size if options.strong else options.global_batch_size,
        local_batch_size=base.local_batch_size if options.weak else options.local_batch_size,
        optimizer=options.optimizer,
        target=options.target,
        price=options.price_per_node_hour,
        what_if=what_if,
    )
    answer = prediction_answer(predict_layouts(request, source))
    if options.out:
        from mlperf_rn50.analysis.predict.plot import dump_prediction

        dump_prediction(answer, Path(options.out))
        print(f'mlperf-rn50: wrote {printable(options.out)}', file=sys.stderr)
    return print_answer(answer, options)


def _validate(options: Namespace, parser: Parser) -> int:
    if given := given_arguments(parser, options, '--validate', '--format', '--wide'):
        parser.error(f'--validate: also got {", ".join(given)}, expected at most a TREE')
    from mlperf_rn50.analysis.predict.costs import validate, validate_published
    from mlperf_rn50.analysis.predict.prediction_answer import validation_answer
    from mlperf_rn50.analysis.sets.load import Rules, load_run_sets

    if options.validate is True:
        return print_answer(validation_answer(validate_published()), options)
    run_sets = load_run_sets([Path(options.validate)], Rules())
    return print_answer(validation_answer(validate(run_sets)), options)
