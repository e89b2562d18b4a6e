"""Bounds of configuration values, and functions to declare and check options."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mlperf_rn50.errors import ConfigError


@dataclass(frozen=True)
class Bounds:
    """The valid range of an option, as text and as a predicate."""

    text: str
    holds: Callable[[float], bool]


MAX_SIDE = 8192  # of images for a network, in pixels; one has 805 MB in float32
FINITE = Bounds('a finite number', lambda v: True)
ABOVE_0 = Bounds('a number above 0', lambda v: v > 0)
MAX_THREADS = 1024
THREADS = Bounds(f'1 to {MAX_THREADS:,}', lambda v: 1 <= v <= MAX_THREADS)
EPOCHS = Bounds('a number above 0, up to 100,000', lambda v: 0 < v <= 100_000)
FROM_0 = Bounds('0 or more', lambda v: v >= 0)
FROM_2 = Bounds('2 or more', lambda v: v >= 2)
FRACTION = Bounds('a fraction from 0 to 1', lambda v: 0 <= v <= 1)
FRACTION_ABOVE_0 = Bounds('a fraction above 0, up to 1', lambda v: 0 < v <= 1)
FRACTION_BELOW_1 = Bounds('a fraction from 0 to below 1', lambda v: 0 <= v < 1)
# width or height of the largest JPEG, in pixels
UP_TO_65535 = Bounds('0 to 65,535', lambda v: 0 <= v <= 65_535)
SIDE = Bounds('1 to 8,192', lambda v: 1 <= v <= MAX_SIDE)
MARGIN = Bounds('0 to 8,192', lambda v: 0 <= v <= MAX_SIDE)
INT32_FROM_0 = Bounds('0 to 2,147,483,647', lambda v: 0 <= v < 2**31)
ACCURACY = Bounds('a fraction such as 0.749, not a percentage', lambda v: 0 < v <= 1)


def option(
    default: Any, bounds: Bounds | None = None, unit: str = '', is_free: bool = False
) -> Any:
    """Declare an option with its default; numbers have bounds and a unit. is_free: see
    free_option."""
    return field(default=default, metadata={'bounds': bounds, 'unit': unit, 'is_free': is_free})


# Declares an option that may always differ in a resumed run, because it does not change the
# computation (paths, speed, checkpoints, reports, end of training) or because resume.py compares it
# separately (batch sizes, run.seed).
free_option = partial(option, is_free=True)


def refuse(condition: bool | None, message: str) -> None:
    """Raise ConfigError with this message if a condition holds."""
    if condition:
        raise ConfigError(message)
