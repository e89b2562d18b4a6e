"""Benchmark training steps, the input pipeline, the all-reduce or single operators.

examples:
  mlperf-rn50 bench train --models alexnet,resnet50 --batch-sizes 8,16 --steps 20
  launch/ranks.sh 2 mlperf-rn50 bench train --ranks 1,2 --precisions float32,bfloat16
  mlperf-rn50 bench data --config launch/configs/cifar10_cpu.yaml --threads 1,2 --batch-sizes 128
  launch/ranks.sh 2 mlperf-rn50 bench allreduce --batch-sizes 8
  mlperf-rn50 bench ops --batch-sizes 32 --precisions float32,bfloat16

bench takes every configuration option of train, because it runs the training code with that
configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from mlperf_rn50.cli.parsers import add_config_option, config_parser
from mlperf_rn50.errors import EXIT_OK, ConfigError, option_error

if TYPE_CHECKING:
    from jsonargparse import Namespace

    from mlperf_rn50.bench.measure import BenchSession, ResultTable
    from mlperf_rn50.config import Config
    from mlperf_rn50.train.watchdog.heartbeat import Heartbeat


def add_options(parser: Any) -> None:
    add_config_option(parser)
    add = parser.add_argument
    # Optional for the parser, which also reads YAML files; run() requires it.
    add('kind', nargs='?', choices=['train', 'data', 'allreduce', 'ops'], help='benchmark to run')
    add('--models', metavar='A,B', type=str, help='train: networks (default: model.name)')
    add(
        '--precisions',
        metavar='A,B',
        type=str,
        help='train, ops: precisions (default: train.precision)',
    )
    add(
        '--inputs',
        metavar='A,B',
        type=str,
        default='synthetic',
        help='train: input images: synthetic, real or both',
    )
    add(
        '--batch-sizes',
        metavar='N,M',
        type=str,
        help='images per rank and step (default: train.local_batch_size, or 32 without --config)',
    )
    add(
        '--ranks',
        metavar='N,M',
        type=str,
        help='train: numbers of ranks (default: all started ranks)',
    )
    add(
        '--threads',
        metavar='N,M',
        type=str,
        help='data: numbers of DALI threads (default: data.num_threads)',
    )
    add(
        '--caches',
        metavar='A,B',
        type=str,
        default='cold,warm',
        help='data: page cache: cold, warm or both',
    )
    add(
        '--node-images-per-s',
        metavar='X',
        type=float,
        help='data: training speed of a node, to compute the required storage bandwidth (default: the '
        'pipeline speed)',
    )
    add(
        '--warmup-steps',
        metavar='N',
        type=int,
        default=10,
        help='number of steps before the measurement',
    )
    add(
        '--steps',
        metavar='N',
        type=int,
        default=100,
        help='number of measured steps, batches or repetitions',
    )
    add('--format', choices=['table', 'json'], default='table', help='output format')


def run(argv: Sequence[str]) -> int:
    from mlperf_rn50.cli.ranks import in_rank
    from mlperf_rn50.config_file import parse_config_options, resolve_config
    from mlperf_rn50.system.processor import check_precision, find_processor

    parser = config_parser('bench', add_options)
    options = parse_config_options(parser, argv)
    if not options.kind:
        raise option_error('the following arguments are required: kind', parser)
    for name, least in (('warmup_steps', 0), ('steps', 1)):
        if options[name] < least:
            raise ConfigError(
                f'--{name.replace("_", "-")}: got {options[name]}, expected {least} or more'
            )
    if not options.config:  # train.local_batch_size has no default
        argv = [*argv, '--train.local_batch_size=32']
    config = resolve_config(Path(options.config) if options.config else None, argv, parser)
    if options.kind in ('train', 'ops') and options.precisions:
        for precision in options.precisions.split(','):
            check_precision('--precisions', precision.strip(), find_processor())
    else:
        check_precision('train.precision', config.train.precision, find_processor())
    return in_rank(lambda heartbeat: _bench(config, options, heartbeat), config)


def _bench(config: Config, options: Namespace, heartbeat: Heartbeat) -> int:
    """Run a bench on all ranks and print its results on rank 0."""
    from mlperf_rn50.bench import measure
    from mlperf_rn50.cli.ranks import open_ranks
    from mlperf_rn50.runfolder.names import RunFolder, new_run
    from mlperf_rn50.system.launcher_env import launched_size
    from mlperf_rn50.system.telemetry import Telemetry
    from mlperf_rn50.train.comm.device import device_id_of
    from mlperf_rn50.train.run import open_telemetry

    counts = (
        measure.parse_numbers('--ranks', options.ranks) if options.ranks else [launched_size() or 1]
    )
    comm = open_ranks(config, heartbeat, counts)
    telemetry = Telemetry(None)
    if config.run.telemetry:
        folder = Path(config.run.dir)
        index = comm.from_rank_0(lambda: new_run(folder).index)
        telemetry = open_telemetry(config, comm, RunFolder(folder, index))
    try:
        telemetry.run_start(0.0)
        tables = _measure(
            measure.BenchSession(
                config,
                comm,
                device_id_of(config, comm),
                heartbeat,
                options.warmup_steps,
                options.steps,
            ),
            options,
            counts,
        )
    finally:
        telemetry.close()
    num_hosts = comm.sum([comm.local_rank == 0])[0]
    if comm.rank == 0:
        machine = measure.describe_machine(num_hosts)
        print(
            measure.render_results_json(options.kind, machine, tables)
            if options.format == 'json'
            else measure.render_tables(machine, tables),
            flush=True,
        )
    return EXIT_OK


def _measure(session: BenchSession, options: Namespace, counts: list[int]) -> list[ResultTable]:
    from mlperf_rn50.bench import operators, pipeline, steps
    from mlperf_rn50.bench.measure import parse_list, parse_numbers
    from mlperf_rn50.config import KEYS
    from mlperf_rn50.system.processor import leave_openmp_to_engine

    config, num_ranks = session.config, session.comm.world_size
    model = config.model.name
    leave_openmp_to_engine()
    sizes = parse_numbers(
        '--batch-sizes', options.batch_sizes or str(config.train.local_batch_size or 32)
    )
    precisions = parse_list(
        '--precisions',
        options.precisions or config.train.precision,
        get_args(KEYS['train.precision'].type),
    )
    models = parse_list('--models', options.models or model, get_args(KEYS['model.name'].type))
    if options.kind == 'train':
        sources = parse_list('--inputs', options.inputs, ['synthetic', 'real'])
        return steps.bench_steps(
            session, steps.make_cases(models, precisions, sources, sizes, counts)
        )
    if options.kind == 'allreduce':
        return steps.bench_exchange(
            session, steps.Case(models[0], precisions[0], 'synthetic', sizes[0], num_ranks)
        )
    if num_ranks > 1:
        raise ConfigError(
            f'ranks: got {num_ranks}, expected 1 for bench {options.kind}; start it without a '
            'launcher'
        )
    if options.kind == 'data':
        threads = parse_numbers('--threads', options.threads or str(config.data.num_threads))
        caches = parse_list('--caches', options.caches, pipeline.CACHES)
        return pipeline.bench_pipeline(session, threads, sizes, caches, options.node_images_per_s)
    if not config.model.is_resnet:
        raise ConfigError(f'model.name: got {model}, expected a ResNet for bench ops')
    return operators.bench_operators(session, precisions, sizes[0])
