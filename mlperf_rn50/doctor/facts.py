"""Gather facts about each rank's machine, data and network before a run, for doctor/checks.py."""

import hashlib
import os
import platform
import secrets
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import mxnet as mx

import mlperf_rn50
from mlperf_rn50.config import Config, render_yaml
from mlperf_rn50.data.batches import device_context, synthetic_batches, train_batches
from mlperf_rn50.data.pipeline import synthetic_inputs
from mlperf_rn50.data.recordio import MANIFEST_NAME, Record, data_digest, find_split, load_manifest
from mlperf_rn50.data.verify import check_sample, is_edited
from mlperf_rn50.doctor.checks import check_facts
from mlperf_rn50.doctor.fault_cost import (
    check_fault_cost,
    checkpoint_bytes,
    start_s,
    try_writing,
)
from mlperf_rn50.doctor.gpu_stack import (
    cuda_libraries,
    environment_facts,
    has_code,
    mxnet_facts,
    one_line,
)
from mlperf_rn50.doctor.machine import limit_facts, use_of_cores
from mlperf_rn50.doctor.result import (
    Check,
    DataFacts,
    HorovodFacts,
    RankFacts,
    Trial,
    gpus_in_use,
    parse_facts,
)
from mlperf_rn50.errors import ConfigError, DataError, StorageError, UserError
from mlperf_rn50.model.fused import fusion_text, layout_warnings, with_layout
from mlperf_rn50.system.environment import package_versions
from mlperf_rn50.system.gpus import VISIBLE, find_visible_gpus
from mlperf_rn50.system.power import energy_facts, find_gpus
from mlperf_rn50.system.processor import find_processor
from mlperf_rn50.train.comm.device import device_id_of
from mlperf_rn50.train.comm.horovod import Comm, wait_for
from mlperf_rn50.train.comm.sharing import describe_exchange
from mlperf_rn50.train.plan import make_plan
from mlperf_rn50.train.trainer import Trainer

_NUM_PROBED = 64
_NUM_CLOCK_READINGS = 5
_ALL_REDUCE_FLOATS = 4 << 20


def code_digest() -> str:
    """Return a digest of the program's files and their names, tables included."""
    folder = Path(mlperf_rn50.__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*folder.rglob('*.py'), *folder.rglob('*.ini')]):
        digest.update(f'{path.relative_to(folder)}\0'.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def data_facts(config: Config, rank: int) -> DataFacts:
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
    except (DataError, StorageError) as e:
        return DataFacts(str(e))
    splits = manifest['splits'].values()
    return DataFacts(
        problem='',
        dataset=manifest['dataset'],
        num_probed=num_probed,
        has_checksums=all('crc_sha256' in entry for entry in splits),
        manifest=data_digest(config.data)[:12],
        num_images=sum(entry['num_images'] for entry in splits),
    )


def _horovod_facts(config: Config, comm: Comm) -> HorovodFacts:
    try:
        import horovod.mxnet as hvd
    except ImportError as e:  # open_comm has refused more than one rank
        in_use = f'one rank, without Horovod ({one_line(str(e))})'
        return HorovodFacts(controllers=[], in_use=in_use, has_gloo=False, operations=[])
    built = {'MPI': hvd.mpi_built(), 'Gloo': hvd.gloo_built(), 'NCCL': hvd.nccl_built()}
    operations = [name for name, is_built in built.items() if is_built]
    in_use = 'no Horovod (one process)'
    if comm.world_size > 1:
        in_use = describe_exchange(
            'MPI' if hvd.mpi_enabled() else 'Gloo',
            device=config.train.device,
            num_ranks=comm.world_size,
            num_sharing=config.run.ranks_per_device,
            has_nccl=bool(hvd.nccl_built()),
        )
    return HorovodFacts(
        controllers=[name for name in operations if name != 'NCCL'],
        in_use=in_use,
        has_gloo=bool(hvd.gloo_enabled()),
        operations=operations,
    )


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
    array = mx.nd.zeros((_ALL_REDUCE_FLOATS,), context)
    times = []
    for _ in range(4):
        comm.barrier()
        start = time.monotonic()
        comm.average_gradients([array])
        wait_for(array)
        times.append(time.monotonic() - start)
    return sorted(times[1:])[1]


def run_folder_problem(folder: Path, comm: Comm) -> str | None:
    """Return why rank 0's test file in the run folder is not visible here ('' if it is), or None on
    a single host.

    Rank 0 removes the file. Call this before anything looks for the folder, because NFS caches
    failed lookups.
    """
    if len(set(comm.gather_object(platform.node()))) == 1:
        return None
    folder = folder.absolute()
    problem = ''
    made: list[Path] = []
    token = f'.doctor-{secrets.token_hex(8)}'
    # Rank 0 writes a file.
    if comm.rank == 0:
        made = [f for f in (folder, *folder.parents) if not os.path.exists(f)]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / token).touch()
        except OSError as e:
            problem = f'{e.filename or folder}: {e.strerror}'
    # The others look for it.
    token, problem_of_0 = comm.gather_object([token, problem])[0]
    file = folder / token
    if comm.rank and not problem_of_0:
        for opened in (folder.parent, folder):  # opening a folder makes NFS look it up again
            with suppress(OSError):
                os.close(os.open(opened, os.O_RDONLY))
        problem = '' if os.path.exists(file) else f'no {file}'
    comm.barrier()
    # Rank 0 leaves no trace.
    if comm.rank == 0:
        for remove in (file.unlink, *(f.rmdir for f in made)):
            with suppress(OSError):  # the file was never created, or a folder is no longer empty
                remove()
    return problem


def try_batches(config: Config, world_size: int, rank: int, device_id: int | None) -> Trial:
    """Run a training pass (without an update), an evaluation, and DALI on synthetic batches, to
    find problems early."""
    start = time.monotonic()
    what = 'a training pass'
    problem = ''
    used_bytes = 0
    try:
        plan = make_plan(config, world_size)
        trainer = Trainer(plan, Comm(), 0, device_id)
        batch = next(synthetic_batches(config, plan.train_shard(rank), device_id))
        trainer.forward(batch).backward()
        mx.nd.waitall()

        what = 'an evaluation'
        batch = next(synthetic_batches(config, plan.eval_shard(rank), device_id))
        with trainer.evaluating() as net:
            wait_for(net(batch.images))

        if not config.data.synthetic:
            what = f'DALI with data.decoder={config.data.decoder}'
            record = Record(synthetic_inputs(1).images[0], 0, 0)
            records: Any = SimpleNamespace(
                describe='synthetic record {}'.format, read=lambda _: record, num_bytes=len
            )
            batches = train_batches(
                config,
                plan.train_shard(rank),
                seed=0,
                first_step=0,
                device_id=device_id,
                open_records=lambda: records,
            )
            wait_for(next(batches).images)
    except (RuntimeError, UserError) as e:  # MXNet and DALI raise RuntimeError
        problem = one_line(str(e))
    if device_id is not None and not problem:
        free, total = mx.context.gpu_memory_info(device_id)
        used_bytes = total - free
    seconds = time.monotonic() - start
    return Trial(
        what=what,
        problem=problem,
        warnings=layout_warnings(config),
        seconds=seconds,
        used_bytes=used_bytes,
    )


def _layers(config: Config) -> str:
    """Describe how this rank computes a ResNet's layers."""
    if not config.model.is_resnet:
        return 'no choice for this network'
    try:
        return fusion_text(config, os.environ, find_processor())
    except ConfigError as e:
        return str(e)


def _own_facts(config: Config, has_config: bool, comm: Comm) -> RankFacts:
    """Return the facts of this rank. All ranks must call this."""
    import nvidia.dali

    comm.barrier()  # all have started, and do not work
    started_s = start_s()
    use = use_of_cores()
    run_dir = Path(config.run.dir).absolute()
    folder_problem = run_folder_problem(run_dir, comm) if has_config else None
    device_id = None
    device_problem = ''
    try:
        device_id = device_id_of(config, comm)
    except ConfigError as e:
        device_problem = str(e)
    packages = package_versions()
    mxnet = mxnet_facts(
        packages,
        os.environ,
        maps=Path('/proc/self/maps').read_text(),
        has_cuda=mx.runtime.Features().is_enabled('CUDA'),
        has_fused_norm=hasattr(mx.nd, 'BatchNormAddRelu'),
    )
    gpus = find_visible_gpus()
    usable_id = device_id
    # An operator on a GPU for which MXNet has no code may end the process.
    if comm.sum([not has_code(mxnet, gpus_in_use(gpus, device_id))])[0]:
        usable_id = None
    trial = None
    if usable_id is not None:
        trial = try_batches(config, comm.world_size, comm.rank, usable_id)

    has_data = has_config and not config.data.synthetic
    existing = next(f for f in (run_dir, *run_dir.parents) if os.path.exists(f))
    checkpoint = None
    if has_config and comm.rank == 0:
        checkpoint = try_writing(existing, checkpoint_bytes(config))
    return RankFacts(
        host=platform.node(),
        python=sys.version.split()[0],
        packages=packages,
        code=code_digest(),
        processor=find_processor(),
        mxnet=mxnet,
        gpus=gpus,
        visible=os.environ.get(VISIBLE),
        num_open_gpus=len(find_gpus()[1]),
        cuda_libraries=cuda_libraries(mxnet.cuda_major),
        gpu_environment=environment_facts(os.environ, mxnet.kind == 'container'),
        disk_free_bytes=shutil.disk_usage(existing).free,
        energy=energy_facts(),
        **limit_facts(),
        device=device_id,
        device_problem=device_problem,
        trial=trial,
        layers=_layers(config),
        rank=comm.rank,
        local_rank=comm.local_rank,
        local_size=comm.local_size,
        config=hashlib.sha256(render_yaml(config).encode()).hexdigest()[:12],
        dali=nvidia.dali.__version__,
        horovod=_horovod_facts(config, comm),
        run_folder_problem=folder_problem,
        data=data_facts(config, comm.rank) if has_data else None,
        use=use,
        clock_offset_s=_clock_offset_s(comm),
        all_reduce_s=_all_reduce_s(comm, device_context(usable_id)),
        all_reduce_bytes=4 * _ALL_REDUCE_FLOATS,
        start_s=started_s,
        checkpoint=checkpoint,
    )


def examine(
    config: Config, has_config: bool, comm: Comm, num_kept: int = 0
) -> tuple[list[dict[str, Any]], list[Check]]:
    """Gather the facts of all ranks, as JSON values, and check them, on rank 0. Both results are
    empty on other ranks.

    All ranks must call this.

    Args:
        has_config: if false, only device and precision of config count.
        num_kept: checkpoints that a resumed run already has on disk.
    """
    config = with_layout(config)
    facts = msgspec.to_builtins(_own_facts(config, has_config, comm))
    rows = comm.gather_object(facts, only_on_rank_0=True)
    if comm.rank:
        return [], []
    parsed = [parse_facts(row) for row in rows]
    train = config.train
    written = parsed[0].checkpoint
    if written is None:
        return rows, check_facts(parsed, train.device, train.precision)
    num_further = max(1, config.checkpoint.keep + 1 - num_kept)
    checks = check_facts(
        parsed,
        train.device,
        train.precision,
        num_nodes=config.run.num_nodes,
        ranks_per_node=config.run.ranks_per_node,
        needed_disk_bytes=written.num_bytes * num_further,
    )
    cost = check_fault_cost(parsed[0], written, config.checkpoint, len(parsed))
    return rows, [*checks, cost]
