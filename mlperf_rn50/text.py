"""Formatting of counts, lists, times, shares and amounts for messages and tables. Pure."""

import textwrap
import unicodedata
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import TypeVar

_T = TypeVar('_T')
_K = TypeVar('_K', bound=Hashable)


def plural(count: int, name: str) -> str:
    """Return a count and its noun, which is given in the singular."""
    return f'{count:,} {name}{"" if count == 1 else "s"}'


def apart(names: Sequence[object]) -> list[str]:
    """Return names as text. Those that look alike, because only their Unicode normalisation
    differs, have escapes."""
    look = partial(unicodedata.normalize, 'NFC')
    counts = Counter(map(look, {*map(str, names)}))
    return [ascii(name)[1:-1] if counts[look(name)] > 1 else name for name in map(str, names)]


def first_paragraph(docstring: str | None) -> str:
    """Return the first paragraph of a docstring as one line."""
    return ' '.join((docstring or '').partition('\n\n')[0].split())


def some(names: Sequence[object], most: int) -> str:
    """Return the first names, shown apart, followed by the number of omitted ones."""
    more = f' and {len(names) - most} more' if len(names) > most else ''
    return ', '.join(apart(names[:most])) + more


def thin(values: Sequence[_T], most: int) -> Sequence[_T]:
    """Return at most `most` values, evenly spaced, including the first and the last."""
    if len(values) <= most:
        return values
    return [values[round(k * (len(values) - 1) / (most - 1))] for k in range(most)]


def grouped(items: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    """Group items by a value. The groups are in the order of their first items."""
    groups: dict[_K, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def short(text: str, most: int) -> str:
    """Truncate a text to at most `most` characters."""
    return text if len(text) <= most else text[: most - 1] + '…'


def cut_names(names: Sequence[str], most: int) -> list[str]:
    """Cut names in their middle to at most `most` characters, or to as many more as keep different
    names different."""

    def cut(name: str) -> str:
        half = most // 2
        return name if len(name) <= most else f'{name[:half]}…{name[half + 1 - most :]}'

    while len({cut(name) for name in names}) < len(set(names)):
        most += 1
    return [cut(name) for name in names]


def printable(text: str) -> str:
    """Replace control characters in text of a log, because a log is not trusted and must not
    control a terminal."""
    if text.isprintable():
        return text
    return ''.join(c if c.isprintable() else '?' for c in text)


def wrap_line(text: str, width: int | None, indent: str) -> str:
    """Wrap a line to a width in characters, or return it unchanged if width is None.

    Args:
        indent: start of each further line.
    """
    if width is None:
        return text
    return textwrap.fill(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def duration(seconds: float) -> str:
    """Return a duration such as 45 s, 12 min, 3 h 20 min or 2 d 3 h."""
    if seconds < 99.5:
        return f'{seconds:.0f} s'
    minutes = round(seconds / 60)
    if minutes < 100:
        return f'{minutes} min'
    if minutes < 2880:
        return f'{minutes // 60} h {minutes % 60} min'
    hours = round(seconds / 3600)
    return f'{hours // 24} d {hours % 24} h'


def span(first_s: float, last_s: float) -> str:
    """Return a range of durations, or a single one if both are formatted alike."""
    first = duration(first_s)
    last = duration(last_s)
    return last if first == last else f'{first} to {last}'


def percent(fraction: float, form: str = '.2f') -> str:
    """Return a fraction as a percentage; a rounded zero has no minus."""
    text = f'{100 * fraction:{form}}'
    if not text.strip('-.0'):
        text = text.replace('-', '+' if '+' in form else '')
    return f'{text} %'


def minutes(seconds: float | None) -> str:
    """Return a duration in minutes without the unit, or '-' for None."""
    return '-' if seconds is None else f'{seconds / 60:.2f}'


def significant(value: float, sign: str = '') -> str:
    """Return a number with three significant digits and with all digits before the point.

    Args:
        sign: + for a sign also before positive numbers.
    """
    return f'{value:{sign},.0f}' if abs(value) >= 999.5 else f'{value:{sign}.3g}'


def money(value: float) -> str:
    """Return an amount with two decimals, or with three significant digits below 1."""
    return f'{value:,.2f}' if value >= 1 else f'{value:.3g}'


def data_name(dataset: str | None) -> str:
    """Return the name of a data set (None for ImageNet), marked if it is not ImageNet."""
    return f'{dataset} (not ImageNet)' if dataset else 'ImageNet'
