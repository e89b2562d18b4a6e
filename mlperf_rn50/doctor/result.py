"""Facts about a rank, which the doctor gathers, and results of its checks.

Ranks send facts as JSON. parse_facts() validates them where they arrive.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from mlperf_rn50.errors import UserError
from mlperf_rn50.system.cgroup import GroupLimits
from mlperf_rn50.system.gpus import Gpu
from mlperf_rn50.system.processor import Processor
from mlperf_rn50.text import grouped

Status = Literal['ok', 'warning', 'failed', 'not needed']


@dataclass(frozen=True)
class Check:
    """Result of a check: its name, its status, what it found, and how to fix a problem."""

    name: str
    status: Status
    found: str
    fix: str = ''


@dataclass(frozen=True)
class MxnetFacts:
    """MXNet of a rank. Its kind is container for NVIDIA's build, wherever it runs."""

    kind: Literal['cpu', 'wheels', 'container', 'other']
    release: str  # of the container, or the name of the wheel
    libraries: dict[str, str]  # versions of the CUDA libraries that it has loaded
    compatibility: str  # status of CUDA's compatibility package in the container

    @property
    def cuda_major(self) -> int:
        """CUDA major version of the build. If unknown, 12 for NVIDIA's container, else 11."""
        version = self.libraries.get('libcudart', '12.' if self.kind == 'container' else '')
        return 12 if version.startswith('12.') else 11


@dataclass(frozen=True)
class HorovodFacts:
    controllers: list[str]
    in_use: str
    has_gloo: bool
    operations: list[str]


class DataFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Data set as a rank reads it; only the problem if there is one."""

    problem: str
    dataset: str | None = None
    num_probed: int | None = None
    has_checksums: bool | None = None
    manifest: str | None = None
    num_images: int | None = None


@dataclass(frozen=True)
class Trial:
    """Trial of batches on a GPU: the last part that was tried, and its problem or ''."""

    what: str
    problem: str
    warnings: list[str]
    seconds: float
    used_bytes: int


@dataclass(frozen=True)
class WriteTrial:
    """Trial of writing a checkpoint of num_bytes; written_bytes, in seconds, or a problem."""

    num_bytes: int
    written_bytes: int
    seconds: float
    problem: str


@dataclass(frozen=True)
class RankFacts:
    host: str
    python: str
    packages: dict[str, str]
    code: str  # digest of the program
    processor: Processor
    mxnet: MxnetFacts
    gpus: list[Gpu]  # visible in CUDA
    visible: str | None  # value of CUDA_VISIBLE_DEVICES
    num_open_gpus: int  # not limited by CUDA_VISIBLE_DEVICES
    cuda_libraries: dict[str, str | None]  # versions: '' if unknown, None if not loadable
    # value of each setting, None if it is not set, and its source: program or user
    gpu_environment: dict[str, tuple[str | None, str]]
    disk_free_bytes: int
    energy: dict[str, int]  # number of devices with measurable energy, by kind
    cpus: list[int]
    num_machine_cpus: int
    omp_num_threads: str
    cgroup: GroupLimits
    memory_available_bytes: int
    shared_memory_free_bytes: int | None  # None without /dev/shm
    tmp_dir: str
    tmp_dir_problem: str
    free_processes: tuple[int, str] | None  # and the limit; None without a limit
    ulimits: dict[str, int | None]  # None: unlimited
    device: int | None  # number of the GPU among the visible ones
    device_problem: str
    trial: Trial | None
    layers: str
    rank: int
    local_rank: int
    local_size: int
    config: str  # digest of the configuration
    dali: str
    horovod: HorovodFacts
    run_folder_problem: str | None  # None on a single host
    data: DataFacts | None  # None for synthetic images, or without a configuration
    use: dict[str, Any]  # of CoreMeter, while no rank works
    clock_offset_s: float  # to rank 0
    all_reduce_s: float
    all_reduce_bytes: int
    start_s: float | None  # from the launcher's start until all ranks had started; None: unknown
    checkpoint: WriteTrial | None  # of rank 0, with a configuration

    @property
    def used_gpus(self) -> list[Gpu]:
        """The GPU that the rank uses. If that is unknown, all GPUs that it sees."""
        return gpus_in_use(self.gpus, self.device)


def gpus_in_use(visible: Sequence[Gpu], device: int | None) -> list[Gpu]:
    return [g for i, g in enumerate(visible) if i == device] or list(visible)


def parse_facts(value: Any) -> RankFacts:
    """Return the facts of a rank from their JSON value, which another version may have sent."""
    try:
        return msgspec.convert(value, RankFacts)
    except msgspec.ValidationError as e:
        raise UserError(
            f'facts of a rank for the doctor: {e}; check out the same commit on all hosts'
        ) from e


def hosts_of(rows: Sequence[RankFacts]) -> str:
    """Return the host names of ranks, joined by commas, for a message."""
    return ', '.join(dict.fromkeys(r.host for r in rows))


def by_node(rows: Sequence[RankFacts]) -> list[list[RankFacts]]:
    return list(grouped(rows, lambda r: r.host).values())
