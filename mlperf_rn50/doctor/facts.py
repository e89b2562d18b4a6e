"""Gather facts about each rank's machine, data and network before a run, for doctor/checks.py."""

import hashlib
import os
import platform
import secrets
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mxnet as mx

import mlperf_rn50
from mlperf_rn50.config import Config, render_yaml
from mlperf_rn50.data.batches import device_context, synthetic_batches, train_batches
from mlperf_rn50.data.pipeline import synthetic_inputs
from mlperf_rn50.data.records import MANIFEST_NAME, Record, data_digest, find_split, load_manifest
from mlperf_rn50.data.verify import check_sample, is_edited
from mlperf_rn50.doctor.checks import Check, Facts, check_facts
from mlperf_rn50.doctor.gpu_stack import (
    cuda_libraries,
    cuda_major,
    environment_facts,
    has_code,
    mxnet_facts,
    one_line,
)
from mlperf_rn50.doctor.machine import limit_facts, use_of_cores
from mlperf_rn50.errors import ConfigError, DataError, UserError
from mlperf_rn50.model.fused import fusion_text, layout_warnings, with_layout
from mlperf_rn50.model.zoo import build_model, count_parameters
from mlperf_rn50.system.environment import package_versions
from mlperf_rn50.system.gpus import VISIBLE, find_visible_gpus
from mlperf_rn50.system.power import energy_facts, find_gpus
from mlperf_rn50.system.processor import find_processor
from mlperf_rn50.train.comm.device import device_id_of, wait_for
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.comm.sharing import describe_exchange
from mlperf_rn50.train.plan import make_plan
from mlperf_rn50.train.trainer import Trainer

_NUM_PROBED = 64
_NUM_CLOCK_READINGS = 5
_ALL_REDUCE_FLOATS = 4 << 20
_BYTES_PER_PARAMETER = 8  # a float32 weight and its float32 momentum


def code_digest() -> str:
    folder = Path(mlperf_rn50.__file__).parent
    files = [
        f'{path.relative_to(folder)}\0'.encode() + path.read_bytes()
        for path in sorted(folder.rglob('*.py'))
    ]
    return hashlib.sha256(b''.join(files)).hexdigest()[:12]


def own_facts(run_dir: Path, mxnet: Mapping[str, Any]) -> Facts:
    """Gather those facts about this rank that do not depend on other ranks."""
    run_dir = run_dir.absolute()
    existing = next(f for f in (run_dir, *run_dir.parents) if f.exists())
    return {
        'host': platform.node(),
        'python': sys.version.split()[0],
        'packages': package_versions(),
        'code': code_digest(),
        'processor': asdict(find_processor()),
        'mxnet': dict(mxnet),
        'gpus': [asdict(g) for g in find_visible_gpus()],
        'visible': os.environ.get(VISIBLE),
        'num_open_gpus': len(find_gpus()[1]),  # not limited by CUDA_VISIBLE_DEVICES
        'cuda_libraries': cuda_libraries(cuda_major(mxnet)),
        'gpu_environment': environment_facts(os.environ, mxnet['kind'] == 'container'),
        'disk_free_bytes': shutil.disk_usage(existing).free,
        'energy': energy_facts(),
        **limit_facts(),
    }


def _data_facts(config: Config, rank: int) -> dict:
    """Describe the data set that this rank reads, and check some of its records, different ones on
    each rank."""
    folder = Path(config.data.dir)
    try:
        manifest = load_manifest(folder, config.data.dataset)
        if is_edited(manifest):
            raise DataError(f'{folder / MANIFEST_NAME}: does not match its own SHA-256')
        num_probed = 0
        for split, entry in manifest['splits'].items():
            records = find_split(config.data, split)()
            num_probed += check_sample(records, entry, _NUM_PROBED, rank)
            records.close()
    except DataError as e:
        return {'problem': str(e)}
    return {
        'problem': '',
        'dataset': manifest['dataset'],
        'num_probed': num_probed,
        'has_checksums': all('crc_sha256' in entry for entry in manifest['splits'].values()),
        'manifest': data_digest(config.data)[:12],
        'num_images': sum(s['num_images'] for s in manifest['splits'].values()),
    }


def _horovod_facts(config: Config, comm: Comm) -> dict:
    try:
        import horovod.mxnet as hvd
    except ImportError as e:  # open_comm has refused more than one rank
        return {
            'controllers': [],
            'in_use': f'one rank, without Horovod ({one_line(str(e))})',
            'has_gloo': False,
            'operations': [],
        }
    built = {'MPI': hvd.mpi_built(), 'Gloo': hvd.gloo_built()}
    in_use = 'no Horovod (one process)'
    if comm.world_size > 1:
        in_use = describe_exchange(
            'MPI' if hvd.mpi_enabled() else 'Gloo',
            config.train.device,
            comm.world_size,
            config.run.ranks_per_device,
            bool(hvd.nccl_built()),
        )
    return {
        'controllers': [k for k, v in built.items() if v],
        'in_use': in_use,
        'has_gloo': bool(hvd.gloo_enabled()),
        'operations': [k for k, v in {**built, 'NCCL': hvd.nccl_built()}.items() if v],
    }


def _clock_offset_s(comm: Comm) -> float:
    """Measure this rank's wall clock minus rank 0's. Both are read after a barrier, which limits
    the precision."""
    offsets = []
    for _ in range(_NUM_CLOCK_READINGS):
        comm.barrier()
        now = time.time()
        offsets.append(now - comm.gather_object(now)[0])
    return min(offsets, key=abs)


def _all_reduce_s(comm: Comm, context: mx.Context) -> float:
    """Measure the median time of three all-reduces, after one for warm-up."""
    array, times = mx.nd.zeros((_ALL_REDUCE_FLOATS,), context), []
    for _ in range(4):
        comm.barrier()
        start = time.monotonic()
        comm.average_gradients([array])
        wait_for(array)
        times.append(time.monotonic() - start)
    return sorted(times[1:])[1]


def _run_folder_problem(folder: Path, comm: Comm) -> str | None:
    """Return why rank 0's test file in the run folder is not visible here ('' if it is), or None on
    a single host.

    Rank 0 removes the file. Call this before anything looks for the folder, because NFS caches
    failed lookups.
    """
    if len(set(comm.gather_object(platform.node()))) == 1:
        return None
    folder = folder.absolute()
    token, problem = f'.doctor-{secrets.token_hex(8)}', ''
    made: list[Path] = []
    if comm.rank == 0:
        made = [f for f in (folder, *folder.parents) if not f.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / token).touch()
        except OSError as e:
            problem = f'{e.filename or folder}: {e.strerror}'
    token, problem_of_0 = comm.gather_object([token, problem])[0]
    if comm.rank and not problem_of_0:
        for opened in (folder.parent, folder):  # opening a folder makes NFS look it up again
            with suppress(OSError):
                os.close(os.open(opened, os.O_RDONLY))
        problem = '' if (folder / token).exists() else f'no {folder / token}'
    comm.barrier()
    if comm.rank == 0:
        for remove in ((folder / token).unlink, *(f.rmdir for f in made)):
            with suppress(OSError):  # the file was never created, or a folder is no longer empty
                remove()
    return problem


def try_batches(config: Config, world_size: int, rank: int, device_id: int | None) -> dict:
    """Run a training pass (without an update), an evaluation, and DALI on synthetic batches, to
    find problems early."""
    start, what, problem = time.monotonic(), 'a training pass', ''
    try:
        plan = make_plan(config, world_size)
        trainer = Trainer(plan, Comm(), 0, device_id)
        trainer.forward(
            next(synthetic_batches(config, plan.train_shard(rank), device_id))
        ).backward()
        mx.nd.waitall()
        what = 'an evaluation'
        with trainer.evaluating() as net:
            wait_for(net(next(synthetic_batches(config, plan.eval_shard(rank), device_id)).images))
        if not config.data.synthetic:
            what, record = (
                f'DALI with data.decoder={config.data.decoder}',
                Record(synthetic_inputs(1).images[0], 0, 0),
            )
            records: Any = SimpleNamespace(
                describe='synthetic record {}'.format, read=lambda _: record, num_bytes=len
            )
            wait_for(
                next(
                    train_batches(config, plan.train_shard(rank), 0, 0, device_id, lambda: records)
                ).images
            )
    except (RuntimeError, UserError) as e:  # MXNet and DALI raise RuntimeError
        problem = one_line(str(e))
    free, total = (0, 0) if device_id is None or problem else mx.context.gpu_memory_info(device_id)
    return {
        'what': what,
        'problem': problem,
        'warnings': layout_warnings(config),
        'seconds': time.monotonic() - start,
        'used_bytes': total - free,
    }


def _layers(config: Config) -> str:
    """Describe how this rank computes a ResNet's layers."""
    try:
        return fusion_text(config, os.environ, find_processor())
    except ConfigError as e:
        return str(e)


def gather_facts(config: Config, has_config: bool, comm: Comm) -> list[Facts]:
    """Return the facts of all ranks on rank 0, an empty list on other ranks. All ranks must call
    this."""
    import nvidia.dali

    comm.barrier()  # so that the other ranks do not work either
    use = use_of_cores()
    device_id, device_problem = None, ''
    try:
        device_id = device_id_of(config, comm)
    except ConfigError as e:
        device_problem = str(e)
    run_folder_problem = _run_folder_problem(Path(config.run.dir), comm) if has_config else None
    mxnet = mxnet_facts(
        package_versions(),
        os.environ,
        Path('/proc/self/maps').read_text(),
        mx.runtime.Features().is_enabled('CUDA'),
        hasattr(mx.nd, 'BatchNormAddRelu'),
    )
    facts = own_facts(Path(config.run.dir), mxnet) | {
        'device': device_id,
        'device_problem': device_problem,
    }
    # An operator on a GPU for which MXNet has no code may end the process.
    if comm.sum([not has_code(facts)])[0]:
        device_id = None
    facts |= {
        'trial': None
        if device_id is None
        else try_batches(config, comm.world_size, comm.rank, device_id),
        'layers': _layers(config) if config.model.is_resnet else 'no choice for this network',
        'rank': comm.rank,
        'local_rank': comm.local_rank,
        'local_size': comm.local_size,
        'config': hashlib.sha256(render_yaml(config).encode()).hexdigest()[:12],
        'dali': nvidia.dali.__version__,
        'horovod': _horovod_facts(config, comm),
        'run_folder_problem': run_folder_problem,
        'data': _data_facts(config, comm.rank)
        if has_config and not config.data.synthetic
        else None,
        'use': use,
        'clock_offset_s': _clock_offset_s(comm),
        'all_reduce_s': _all_reduce_s(comm, device_context(device_id)),
        'all_reduce_bytes': 4 * _ALL_REDUCE_FLOATS,
    }
    return comm.gather_object(facts, only_on_rank_0=True)


def examine(config: Config, has_config: bool, comm: Comm) -> tuple[list[Facts], list[Check]]:
    """Gather the facts of all ranks and check them, on rank 0. Both results are empty on other
    ranks.

    Without has_config, only device and precision of config count.
    """
    config = with_layout(config)
    rows = gather_facts(config, has_config, comm)
    if comm.rank:
        return [], []
    if not has_config:
        return rows, check_facts(rows, config.train.device, config.train.precision)
    num_parameters = count_parameters(build_model(config, mx.cpu(), 0))
    return rows, check_facts(
        rows,
        config.train.device,
        config.train.precision,
        config.run.num_nodes,
        config.run.ranks_per_node,
        _BYTES_PER_PARAMETER * num_parameters * (config.checkpoint.keep + 1),
    )
