"""Counts, lists, times, shares and amounts as words of a message or a table. Pure."""
from collections.abc import Sequence
from typing import TypeVar

_T = TypeVar('_T')


def are(count: int) -> str:
    """Return the verb for a count."""
    return 'is' if count == 1 else 'are'


def plural(count: int, name: str) -> str:
    """Return a count with a name that is given in the singular."""
    return f'{count} {name}{"" if count == 1 else "s"}'


def some(names: Sequence[object], most: int) -> str:
    """Return the first names, and how many more there are."""
    more = f' and {len(names) - most} more' if len(names) > most else ''
    return ', '.join(map(str, names[:most])) + more


def thin(values: Sequence[_T], most: int) -> Sequence[_T]:
    """Return at most this many values, evenly, the first and the last among them."""
    if len(values) <= most:
        return values
    return [values[round(k * (len(values) - 1) / (most - 1))] for k in range(most)]


def short(text: str, most: int) -> str:
    """Return a text of at most this many characters."""
    return text if len(text) <= most else text[:most - 1] + '…'


def duration(seconds: float) -> str:
    """Return a time for people: 45 s, 12 min, 3 h 20 min, 2 d 3 h."""
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
    """Return two times for people, or one where they read alike."""
    first, last = duration(first_s), duration(last_s)
    return last if first == last else f'{first} to {last}'


def percent(fraction: float, form: str = '.2f') -> str:
    """Return a fraction as per cent."""
    return f'{100 * fraction:{form}} %'


def money(value: float) -> str:
    """Return an amount with two decimals, or three figures of a small one."""
    return f'{value:,.2f}' if value >= 1 else f'{value:.3g}'


def data_name(dataset: str | None) -> str:
    """Return the name of a data set, None for ImageNet; of another one, that it is not ImageNet."""
    return f'{dataset} (not ImageNet)' if dataset else 'ImageNet'
