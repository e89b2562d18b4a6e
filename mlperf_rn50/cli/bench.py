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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from mlperf_rn50.bounds import MAX_THREADS
from mlperf_rn50.cli.output import add_format_option, print_answer
from mlperf_rn50.cli.parsers import (
    add_config_option,
    add_wide_option,
    config_parser,
    positive,
    with_batch,
)
from mlperf_rn50.errors import EXIT_OK, ConfigError, option_error
from mlperf_rn50.parser import option_adder

if TYPE_CHECKING:
    from jsonargparse import Namespace

    from mlperf_rn50.bench.measure import BenchSession, ResultTable
    from mlperf_rn50.config import Config
    from mlperf_rn50.train.watchdog.heartbeat import Heartbeat


_KINDS_OF = {
    '--models': ('train',),
    '--precisions': ('train', 'ops'),
    '--inputs': ('train',),
    '--ranks': ('train',),
    '--threads': ('data',),
    '--caches': ('data',),
    '--node-images-per-s': ('data',),
}
_WITH_ONE_SIZE = ('allreduce', 'ops')


def add_options(parser: Any) -> None:
    add_config_option(parser)
    add = option_adder(parser)
    # Optional for the parser, which also reads YAML files; run() requires it.
    add('kind', 'benchmark to run', nargs='?', choices=['train', 'data', 'allreduce', 'ops'])
    for form, text in (
        ('--models A,B', 'train: networks (default: model.name)'),
        ('--precisions A,B', 'train, ops: precisions (default: train.precision)'),
        ('--inputs A,B', 'train: input images: synthetic (default), real or both'),
        (
            '--batch-sizes N,M',
            'images per rank and step (default: train.local_batch_size, or 32 without it)',
        ),
        ('--ranks N,M', 'train: numbers of ranks (default: all started ranks)'),
        ('--threads N,M', 'data: numbers of DALI threads (default: data.num_threads)'),
        ('--caches A,B', 'data: page cache: cold, warm or both (default)'),
    ):
        add(form, text, type=str)
    add(
        '--node-images-per-s X',
        'data: training speed of a node, to compute the required storage bandwidth (default: '
        'the pipeline speed)',
        type=partial(positive, most=1e9, expected='a number above 0 and at most 1e9'),
    )
    add('--warmup-steps N', 'number of steps before the measurement', type=int, default=10)
    add('--steps N', 'number of measured steps, batches or repetitions', type=int, default=100)
    add_format_option(parser)
    add_wide_option(parser)


def run(argv: Sequence[str]) -> int:
    from mlperf_rn50.cli.ranks import in_rank
    from mlperf_rn50.config_file import parse_config_options, resolve_config
    from mlperf_rn50.system.processor import check_precision, find_processor

    parser = config_parser('bench', add_options)
    options = parse_config_options(parser, argv)
    if not options.kind:
        raise option_error('the following arguments are required: kind', parser)
    for name, least in (('warmup-steps', 0), ('steps', 1)):
        number = options[name.replace('-', '_')]
        if number < least:
            raise ConfigError(f'--{name}: got {number}, expected {least} or more')
    for name, kinds in _KINDS_OF.items():
        if options.kind not in kinds and options[name[2:].replace('-', '_')] is not None:
            raise ConfigError(
                f'{name}: got bench {options.kind}, expected bench {" or ".join(kinds)}; remove it'
            )
    if options.kind in _WITH_ONE_SIZE and ',' in (options.batch_sizes or ''):
        raise ConfigError(
            f'--batch-sizes: got {options.batch_sizes}, expected one number for bench '
            f'{options.kind}; run it once for each'
        )
    argv = with_batch(argv, options.config, 32)
    config = resolve_config(Path(options.config) if options.config else None, argv, parser)
    if not options.config and config.train.global_batch_size:
        raise ConfigError(
            f'train.global_batch_size: got {config.train.global_batch_size}, expected '
            '--batch-sizes, the images per rank'
        )
    option, precisions = 'train.precision', config.train.precision
    if options.precisions:
        option, precisions = '--precisions', options.precisions
    for precision in precisions.split(','):
        check_precision(option, precision.strip(), find_processor())
    return in_rank(lambda heartbeat: _bench(config, options, heartbeat), config)


def _bench(config: Config, options: Namespace, heartbeat: Heartbeat) -> int:
    """Run a bench on all ranks and print its results on rank 0."""
    from mlperf_rn50.bench.measure import BenchSession, count_hosts, make_answer, parse_numbers
    from mlperf_rn50.cli.ranks import open_ranks
    from mlperf_rn50.runfolder.names import RunFolder, new_run
    from mlperf_rn50.system.launcher_env import launched_size
    from mlperf_rn50.system.telemetry import Telemetry
    from mlperf_rn50.train.comm.device import device_id_of
    from mlperf_rn50.train.run import open_telemetry

    counts = [launched_size() or 1]
    if options.ranks:
        counts = parse_numbers('--ranks', options.ranks)
    comm = open_ranks(config, heartbeat, counts)
    telemetry = Telemetry(None)
    if config.run.telemetry:
        folder = Path(config.run.dir)
        index = comm.from_rank_0(lambda: new_run(folder).index)
        telemetry = open_telemetry(config, comm, RunFolder(folder, index))
    try:
        telemetry.run_start(0.0)
        session = BenchSession(
            config=config,
            comm=comm,
            device_id=device_id_of(config, comm),
            heartbeat=heartbeat,
            num_warmup=options.warmup_steps,
            num=options.steps,
        )
        tables = _measure(session, options, counts)
    finally:
        telemetry.close()
    num_hosts = count_hosts(comm)
    if comm.rank:
        return EXIT_OK
    answer = make_answer(options.kind, num_hosts, tables, config.train.device)
    return print_answer(answer, options)


def _measure(session: BenchSession, options: Namespace, counts: list[int]) -> list[ResultTable]:
    from mlperf_rn50.bench import input_speed, operators, steps
    from mlperf_rn50.bench.measure import parse_list, parse_numbers
    from mlperf_rn50.config import KEYS
    from mlperf_rn50.system.processor import leave_openmp_to_engine

    config, num_ranks = session.config, session.comm.world_size
    leave_openmp_to_engine()
    batch_sizes = options.batch_sizes or str(config.train.local_batch_size or 32)
    sizes = parse_numbers('--batch-sizes', batch_sizes)
    precisions = options.precisions or config.train.precision
    precisions = parse_list('--precisions', precisions, get_args(KEYS['train.precision'].type))
    models = options.models or config.model.name
    models = parse_list('--models', models, get_args(KEYS['model.name'].type))
    if options.kind == 'train':
        sources = parse_list('--inputs', options.inputs or 'synthetic', ['synthetic', 'real'])
        cases = steps.make_cases(models, precisions, sources, batch_sizes=sizes, rank_counts=counts)
        return steps.bench_steps(session, cases)
    if options.kind == 'allreduce':
        case = steps.Case(
            model=config.model.name,
            precision=config.train.precision,
            source='synthetic',
            local_batch_size=sizes[0],
            num_ranks=num_ranks,
        )
        return steps.bench_exchange(session, case)
    if num_ranks > 1:
        raise ConfigError(
            f'ranks: got {num_ranks}, expected 1 for bench {options.kind}; start it without a '
            'launcher'
        )
    if options.kind == 'data':
        threads = parse_numbers(
            '--threads', options.threads or str(config.data.num_threads), MAX_THREADS
        )
        caches = parse_list('--caches', options.caches or 'cold,warm', input_speed.CACHES)
        return input_speed.bench_input(session, threads, sizes, caches, options.node_images_per_s)
    if 'float16' in precisions and config.train.device == 'cpu':
        raise ConfigError('--precisions: got float16 on a CPU, expected float32 or bfloat16')
    if 'bfloat16' in precisions and config.train.device == 'gpu':
        raise ConfigError('--precisions: got bfloat16 on a GPU, expected float32 or float16')
    if not config.model.is_resnet:
        raise ConfigError(f'model.name: got {config.model.name}, expected a ResNet for bench ops')
    return operators.bench_operators(session, precisions, sizes[0])
