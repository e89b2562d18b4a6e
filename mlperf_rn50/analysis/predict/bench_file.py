"""Load JSON files of bench train and bench allreduce, and check types and bounds, because the files are untrusted."""
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, MsgspecError, Struct, convert, field
from msgspec.json import decode

from mlperf_rn50.errors import UserError
from mlperf_rn50.files import read_text
from mlperf_rn50.text import printable

_MAX_TEXT = 200  # maximum characters of a decoder's error in a message, and of an accelerator's name
_MAX_FILE_BYTES = 4 * 2**20
_Text = Annotated[str, Meta(pattern=r'\A[\w .,/+-]{1,40}\Z')]
_Count = Annotated[int, Meta(ge=1, le=10**6)]
_Bytes = Annotated[int, Meta(ge=1, le=10**12)]
_Ms = Annotated[float, Meta(ge=1e-3, le=1e8)]


class _Measured(Struct, frozen=True):
    model: _Text
    local_batch_size: _Count
    num_ranks: _Count
    num_hosts: _Count

    def __post_init__(self) -> None:
        if self.num_ranks % self.num_hosts:
            raise ValueError(f'num_hosts: got {self.num_hosts}, expected a divisor of the {self.num_ranks} ranks')


class MeasuredStep(_Measured, frozen=True):
    """A row of bench train: a step on all ranks."""

    precision: _Text
    input: _Text
    image_size: _Count
    num_parameters: _Bytes
    step_ms: _Ms

    @property
    def kind(self) -> str:
        layout = f'{self.num_hosts}x{self.num_ranks // self.num_hosts}'
        return f'{self.model}, {self.precision}, {self.input} images of {self.image_size} pixels, {layout}'


class MeasuredExchange(_Measured, frozen=True):
    """Exchange of a step's gradients between hosts. step_ms is the time of a step with the exchange."""

    num_hosts: Annotated[int, Meta(ge=2, le=10**6)]
    time_ms: Annotated[float, Meta(ge=1e-6, le=1e8)]
    num_bytes: _Bytes = field(name='bytes')
    step_ms: _Ms


class _Machine(Struct):
    gpus: list[str]


class _Table(Struct):
    rows: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=1000)]


class _File(Struct):
    format: Literal['mlperf-rn50 bench train 1', 'mlperf-rn50 bench allreduce 1']
    machine: _Machine
    tables: Annotated[list[_Table], Meta(min_length=1)]


@dataclass(frozen=True)
class Bench:
    """A JSON file of bench train (steps) or bench allreduce (exchange)."""

    path: Path
    accelerator: str | None  # None for ranks on CPUs
    steps: tuple[MeasuredStep, ...] = ()
    exchange: MeasuredExchange | None = None


def load_bench(path: Path) -> Bench | None:
    """Load a JSON file of bench train or bench allreduce. Return None unless the path is a file with suffix .json."""
    if path.suffix != '.json' or not path.is_file():
        return None
    try:
        found = decode(read_text(path, _MAX_FILE_BYTES), type=_File)
        accelerator = found.machine.gpus[0][:_MAX_TEXT] if found.machine.gpus else None
        if found.format == 'mlperf-rn50 bench train 1':  # further tables compare numbers of ranks
            return Bench(path, accelerator, tuple(convert(found.tables[0].rows, list[MeasuredStep])))
        return Bench(path, accelerator, exchange=convert(found.tables[-1].rows[0], MeasuredExchange))
    except (OSError, MsgspecError, ValueError, RecursionError) as e:
        raise UserError(f'{path}: {printable(str(e))[:_MAX_TEXT]}; expected output of mlperf-rn50 bench train, '
                        'or of bench allreduce over several hosts, with --format json') from e
