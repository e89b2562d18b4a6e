"""The benches as programs: from the options of the command line to a text, on every rank."""
from pathlib import Path
from typing import Any

from mlperf_rn50.bench.exchange import bench_exchange
from mlperf_rn50.bench.measure import Shown, describe_machine, parse_list, parse_numbers, render_json, render_tables
from mlperf_rn50.bench.operators import bench_operators
from mlperf_rn50.bench.pipeline import CACHES, bench_pipeline
from mlperf_rn50.bench.steps import Case, bench_steps, make_cases
from mlperf_rn50.config import Config, choices_of
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.system.launched import launched_size
from mlperf_rn50.system.telemetry import Telemetry
from mlperf_rn50.system.topology import leave_openmp_to_engine
from mlperf_rn50.train.comm import Comm, open_comm, sharing_of
from mlperf_rn50.train.device import device_id_of
from mlperf_rn50.train.run_folder import RunFolder, new_run
from mlperf_rn50.train.start import from_rank_0, open_telemetry
from mlperf_rn50.train.watch import Position


def _words(option: str, given: str | None, default: str, known: list[str]) -> list[str]:
    return parse_list(option, given or default, known)


def _batch_sizes(config: Config, options: Any) -> list[int]:
    return parse_numbers('--batch-sizes', options.batch_sizes or str(config.train.local_batch_size or 32))


def run_bench(config: Config, options: Any, position: Position) -> str:
    """Measures what was asked for; called by all ranks.

    Returns:
        The text to print on rank 0, '' on the others.

    Raises:
        ConfigError: an option or the number of ranks does not fit.
    """
    counts = parse_numbers('--ranks', options.ranks) if options.ranks else [launched_size() or 1]
    comm = open_comm(config.comm.compression, counts, position.exchange, sharing_of(config))
    telemetry = _open_telemetry(config, comm)
    try:
        telemetry.run_start(0.0)
        shown = _measure(config, options, counts, comm, position)
    finally:
        telemetry.close()
    num_hosts = comm.sum([comm.local_rank == 0])[0]
    if comm.rank:
        return ''
    machine = describe_machine(num_hosts)
    if options.format == 'json':
        return render_json(options.kind, machine, shown)
    return render_tables(machine, shown)


def _open_telemetry(config: Config, comm: Comm) -> Telemetry:
    if not config.run.telemetry:
        return Telemetry(None)
    index = from_rank_0(comm, lambda: new_run(Path(config.run.dir)).index)
    return open_telemetry(config, comm, RunFolder(Path(config.run.dir), index))


def _measure(config: Config, options: Any, counts: list[int], comm: Comm,
             position: Position) -> list[Shown]:
    device_id = device_id_of(config, comm)
    leave_openmp_to_engine()
    sizes, num_warmup, num = _batch_sizes(config, options), options.warmup_steps, options.steps
    precisions = _words('--precisions', options.precisions, config.train.precision, choices_of('train', 'precision'))
    models = _words('--models', options.models, config.model.name, choices_of('model', 'name'))
    if options.kind == 'train':
        sources = parse_list('--inputs', options.inputs, ['synthetic', 'real'])
        cases = make_cases(models, precisions, sources, sizes, counts)
        return bench_steps(config, cases, comm, device_id, num_warmup, num, position)
    if options.kind == 'allreduce':
        case = Case(models[0], precisions[0], 'synthetic', sizes[0], comm.world_size)
        return bench_exchange(config, case, comm, device_id, num_warmup, num, position)
    if comm.world_size > 1:
        raise ConfigError(f'ranks: got {comm.world_size}, expected 1: bench {options.kind} measures one rank; '
                          'start it without a launcher')
    if options.kind == 'data':
        threads = parse_numbers('--threads', options.threads or str(config.data.num_threads))
        caches = parse_list('--caches', options.caches, CACHES)
        return bench_pipeline(config, threads, sizes, caches, options.node_images_per_s, device_id, num_warmup, num)
    if not config.model.name.startswith('resnet'):
        raise ConfigError(f'model.name: got {config.model.name}, expected a ResNet: bench ops knows their convolutions')
    return bench_operators(config, precisions, sizes[0], device_id, num_warmup, num)
