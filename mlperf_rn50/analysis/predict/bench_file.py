"""Load JSON files of bench train and bench allreduce, and check types and bounds, because the files are untrusted."""
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, MsgspecError, Struct, convert, field
from msgspec.json import decode

from mlperf_rn50.errors import UserError
from mlperf_rn50.files import regular_file
from mlperf_rn50.mllog.events import printable

_MAX_ERROR = 200  # maximum characters of a decoder error quoted in a message
_MAX_FILE_BYTES = 4 * 2**20
_Text = Annotated[str, Meta(pattern=r'\A[\w .,/+-]{1,40}\Z')]
_Count = Annotated[int, Meta(ge=1, le=10**6)]
_Bytes = Annotated[int, Meta(ge=1, le=10**12)]
_Ms = Annotated[float, Meta(ge=0, le=1e8)]


class _Measured(Struct, frozen=True):
    model: _Text
    local_batch_size: _Count
    num_ranks: _Count
    num_hosts: _Count

    def __post_init__(self) -> None:
        if self.num_hosts > self.num_ranks:
            raise ValueError(f'num_hosts: got {self.num_hosts}, expected at most the {self.num_ranks} ranks')


class MeasuredStep(_Measured, frozen=True):
    """A row of bench train: times of a step on all ranks and of its parts, each measured alone."""

    precision: _Text
    input: _Text
    image_size: _Count
    num_parameters: _Bytes
    step_ms: Annotated[float, Meta(ge=1e-3, le=1e8)]
    data_ms: _Ms
    forward_ms: _Ms
    backward_ms: _Ms
    update_ms: _Ms
    all_reduce_ms: _Ms

    @property
    def step_s(self) -> float:
        return self.step_ms / 1000

    @property
    def exchange_s(self) -> float:
        """Time of the exchange that does not overlap with computing: the step less its other parts."""
        parts = self.data_ms, self.forward_ms, self.backward_ms, self.update_ms
        shown_s = self.step_s - sum(ms / 1000 for ms in parts)
        return min(max(shown_s, 0.0), self.all_reduce_ms / 1000) if self.num_ranks > 1 else 0.0

    @property
    def gradients(self) -> tuple[int, str]:
        """Size of the gradients in bytes, and their type and network."""
        bits = 16 if self.precision == 'float16' else 32
        return bits // 8 * self.num_parameters, f'float{bits} gradients of {self.model}'

    @property
    def kind(self) -> tuple[str, str, str, int]:
        return self.model, self.precision, self.input, self.image_size

    @property
    def name(self) -> str:
        return (f'{self.model}, {self.precision}, {self.input} images of {self.image_size} pixels, '
                f'{self.local_batch_size} per rank')


class MeasuredExchange(_Measured, frozen=True):
    """Exchange of a step's gradients in bench allreduce; step_ms: a step with the exchange, None if not measured."""

    time_ms: Annotated[float, Meta(ge=1e-6, le=1e8)]
    num_bytes: _Bytes = field(name='bytes')
    step_ms: Annotated[float, Meta(ge=1e-3, le=1e8)] | None = None

    @property
    def gbit_s(self) -> float:
        """Rate of each link in a ring of all ranks."""
        return 2 * (self.num_ranks - 1) / self.num_ranks * self.num_bytes * 8 / (self.time_ms / 1000) / 1e9


class _Machine(Struct):
    gpus: list[Any]
    num_hosts: int


class _Table(Struct):
    title: str
    rows: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=1000)]


class _File(Struct):
    format: Literal['mlperf-rn50 bench train 1', 'mlperf-rn50 bench allreduce 1']
    machine: _Machine
    tables: Annotated[list[_Table], Meta(min_length=1)]


@dataclass(frozen=True)
class Bench:
    """A JSON file of bench train (steps) or bench allreduce (exchange)."""

    path: Path
    has_accelerators: bool
    accelerator: str | None = None
    steps: tuple[MeasuredStep, ...] = ()
    exchange: MeasuredExchange | None = None


def load_bench(path: Path) -> Bench | None:
    """Load a JSON file of bench train or bench allreduce; None for a folder and for a file that is not JSON.

    Raises:
        UserError: the file is unreadable, or is not JSON of these commands.
    """
    if not path.is_file():
        return None
    try:
        with open(path, 'rb', opener=regular_file) as f:
            content = f.read(_MAX_FILE_BYTES + 1)
    except OSError as e:
        raise UserError(f'{path}: cannot be read: {e.strerror}') from e
    if path.suffix != '.json' and content.lstrip()[:1] != b'{':
        return None
    if len(content) > _MAX_FILE_BYTES:
        raise UserError(f'{path}: file is larger than {_MAX_FILE_BYTES} bytes, expected a JSON file of bench')
    try:
        found = decode(content, type=_File)
        gpus = found.machine.gpus
        gpu = gpus[0][:_MAX_ERROR] if gpus and isinstance(gpus[0], str) else None
        if found.format == 'mlperf-rn50 bench train 1':
            return Bench(path, bool(gpus), gpu, convert(tuple(found.tables[0].rows), tuple[MeasuredStep, ...]))
        return Bench(path, bool(gpus), gpu, exchange=_exchange(path, found))
    except (MsgspecError, UnicodeError, RecursionError) as e:
        raise UserError(f'{path}: {printable(str(e))[:_MAX_ERROR]}; expected output of mlperf-rn50 bench train or '
                        'bench allreduce with --format json') from e


def _exchange(path: Path, file: _File) -> MeasuredExchange:
    tables = {t.title: t.rows[0] for t in file.tables}
    num_ranks = next((int(m[1]) for t in tables if (m := re.fullmatch(r'All-reduce over (\d{1,6}) ranks', t))), 0)
    row = tables.get('The gradients of a step')
    if row is None or num_ranks < 2:
        raise UserError(f'{path}: no tables of an all-reduce over 2 or more ranks and of the gradients of a step; '
                        'create the file with mlperf-rn50 bench allreduce --format json')
    return convert({**row, 'num_ranks': num_ranks, 'num_hosts': file.machine.num_hosts}, MeasuredExchange)
