"""Configuration changes of a resumed run: keys that may always differ, and keys that need
--allow-changed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlperf_rn50.config import KEYS, Config, render_value, to_tree
from mlperf_rn50.errors import CheckpointError, ConfigError, nearest
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.runfolder.records import ResumedRecord, read_records

# The default of pad_to_4_channels changed from false to null, which gives the same results up to
# rounding.
_EQUAL = ('data.pad_to_4_channels', False, None)


@dataclass(frozen=True)
class Change:
    """A configuration key, such as schedule.base_lr, whose value differs after a resume."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f'{self.key} {render_value(self.before)} -> {render_value(self.now)}'


def find_changes(before: Mapping[str, Mapping[str, Any]], config: Config) -> list[Change]:
    """Return the changes since an earlier configuration; a key that it lacks counts as having its
    default."""
    now, default = to_tree(config), to_tree(Config())
    changes = []
    for section, keys in before.items():
        for name, value in {**default.get(section, {}), **keys}.items():
            key, new = f'{section}.{name}', now.get(section, {}).get(name)
            if value != new and key != 'run.seed' and (key, value, new) != _EQUAL:
                changes.append(Change(key, value, new))
    return changes


def with_taken_back(changes: Sequence[Change], run: RunFolder, config: Config) -> list[Change]:
    """Add the changes that earlier resumes recorded and this one takes back, because a later resume
    and the reader of the log apply the last record of a key."""
    now, by_key = to_tree(config), {c.key: c for c in changes}
    last = {key: value for _, r in _resumes(run) for key, (_, value) in r.changed.items()}
    for key in last.keys() & KEYS.keys() - by_key.keys():
        section, name = key.split('.')
        if now[section][name] != last[key]:
            by_key[key] = Change(key, last[key], now[section][name])
    return [by_key[key] for key in sorted(by_key)]


def _resumes(run: RunFolder) -> Iterator[tuple[int, ResumedRecord]]:
    return read_records(run.metrics, ResumedRecord)


def free_keys() -> set[str]:
    """Return the keys that are declared with free_option."""
    return {key for key, field in KEYS.items() if field.metadata.get('is_free')}


def recorded_changes(run: RunFolder) -> dict[str, Any]:
    """Return the values of keys that earlier resumes were allowed to change; the files are
    untrusted."""
    return {
        key: value
        for _, record in _resumes(run)
        for key, (_, value) in record.changed.items()
        if key in KEYS.keys() - free_keys()
    }


def kept_changes(run: RunFolder, config: Config) -> list[str]:
    """Return the keys of recorded_changes that still have these values."""
    tree, changed = to_tree(config), recorded_changes(run)
    paths = {key: key.split('.') for key in KEYS if key in changed}
    return [key for key, (section, name) in paths.items() if tree[section][name] == changed[key]]


def check_changes(changes: Sequence[Change], allowed: Sequence[str], where: str) -> None:
    """Raise CheckpointError for changes of keys that are neither free nor allowed; where: path of
    the checkpoint."""
    refused = [c for c in changes if c.key not in {*free_keys(), *allowed}]
    if refused:
        raise CheckpointError(
            f'{where}: the configuration differs from the earlier one: '
            f'{", ".join(map(str, refused))}; restore it, or accept these changes with '
            f'--allow-changed {",".join([*allowed, *(c.key for c in refused)])}'
        )


def parse_allowed(text: str | None) -> tuple[str, ...]:
    """Return the keys of --allow-changed; raise ConfigError for unknown keys."""
    keys = tuple(text.split(',')) if text else ()
    for key in keys:
        if key not in KEYS:
            raise ConfigError(
                f'--allow-changed: got {key}, expected keys such as schedule.base_lr'
                f'{nearest(key, list(KEYS))}'
            )
    return keys
