"""Execution of a bench on every rank, from command-line options to the printed text."""
from pathlib import Path
from typing import Any

from mlperf_rn50.bench import measure
from mlperf_rn50.bench.exchange import bench_exchange
from mlperf_rn50.bench.measure import BenchSession, ResultTable, parse_list, parse_numbers
from mlperf_rn50.bench.operators import bench_operators
from mlperf_rn50.bench.pipeline import CACHES, bench_pipeline
from mlperf_rn50.bench.steps import Case, bench_steps, make_cases
from mlperf_rn50.config import Config, choices_of
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.runfolder.names import RunFolder, new_run
from mlperf_rn50.system.launcher_env import launched_size
from mlperf_rn50.system.processor import leave_openmp_to_engine
from mlperf_rn50.system.telemetry import Telemetry
from mlperf_rn50.train.comm.device import device_id_of
from mlperf_rn50.train.comm.horovod import open_comm
from mlperf_rn50.train.comm.sharing import sharing_of
from mlperf_rn50.train.run import open_telemetry
from mlperf_rn50.train.watchdog.heartbeat import Heartbeat


def run_bench(config: Config, options: Any, heartbeat: Heartbeat) -> str:
    """Run a bench on all ranks. Return the text to print on rank 0, and '' on the other ranks."""
    counts = parse_numbers('--ranks', options.ranks) if options.ranks else [launched_size() or 1]
    comm = open_comm(config.comm.compression, counts, heartbeat.exchange, sharing_of(config))
    telemetry = Telemetry(None)
    if config.run.telemetry:
        index = comm.from_rank_0(lambda: new_run(Path(config.run.dir)).index)
        telemetry = open_telemetry(config, comm, RunFolder(Path(config.run.dir), index))
    try:
        telemetry.run_start(0.0)
        session = BenchSession(config, comm, device_id_of(config, comm), heartbeat, options.warmup_steps, options.steps)
        tables = _measure(session, options, counts)
    finally:
        telemetry.close()
    num_hosts = comm.sum([comm.local_rank == 0])[0]
    if comm.rank:
        return ''
    machine = measure.describe_machine(num_hosts)
    if options.format == 'json':
        return measure.render_results_json(options.kind, machine, tables)
    return measure.render_tables(machine, tables)


def _measure(session: BenchSession, options: Any, counts: list[int]) -> list[ResultTable]:
    config, num_ranks = session.config, session.comm.world_size
    leave_openmp_to_engine()
    sizes = parse_numbers('--batch-sizes', options.batch_sizes or str(config.train.local_batch_size or 32))
    precisions = parse_list('--precisions', options.precisions or config.train.precision,
                            choices_of('train', 'precision'))
    models = parse_list('--models', options.models or config.model.name, choices_of('model', 'name'))
    if options.kind == 'train':
        sources = parse_list('--inputs', options.inputs, ['synthetic', 'real'])
        return bench_steps(session, make_cases(models, precisions, sources, sizes, counts))
    if options.kind == 'allreduce':
        return bench_exchange(session, Case(models[0], precisions[0], 'synthetic', sizes[0], num_ranks))
    if num_ranks > 1:
        raise ConfigError(f'ranks: got {num_ranks}, expected 1 for bench {options.kind}; start it without a launcher')
    if options.kind == 'data':
        threads = parse_numbers('--threads', options.threads or str(config.data.num_threads))
        caches = parse_list('--caches', options.caches, CACHES)
        return bench_pipeline(session, threads, sizes, caches, options.node_images_per_s)
    if not config.model.name.startswith('resnet'):
        raise ConfigError(f'model.name: got {config.model.name}, expected a ResNet for bench ops')
    return bench_operators(session, precisions, sizes[0])
