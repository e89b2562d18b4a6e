"""Configuration changes of a resumed run: keys that may always differ, and keys that need --allow-changed."""
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlperf_rn50.config import SECTIONS, Config, field_names, render_value, to_tree
from mlperf_rn50.errors import CheckpointError, ConfigError, nearest

# Keys that may always differ because they do not change the computation: paths, speed, checkpoints, reports and the end
# of training. Batch sizes and run.seed are also included, because resume.py compares them separately.
FREE = frozenset((
    *(f'run.{key}' for key in field_names(SECTIONS['run'])),
    *(f'checkpoint.{key}' for key in field_names(SECTIONS['checkpoint'])),
    'data.dir', 'data.num_threads', 'data.read_threads', 'data.prefetch_depth', 'data.record_cache_mib',
    'data.hw_decoder_load', 'data.hybrid_huffman_threshold', 'data.preallocate_width_hint',
    'data.preallocate_height_hint', 'data.device_memory_padding_mib', 'data.host_memory_padding_mib',
    'data.decoded_bytes_hint', 'data.input_batch_multiplier',
    'comm.num_buckets', 'comm.stall_limit_s', 'comm.start_limit_s', 'comm.eval_limit_s', 'comm.checkpoint_limit_s',
    'train.local_batch_size', 'train.global_batch_size', 'train.eval_batch_size', 'train.num_warmup_steps',
    'train.max_epochs', 'train.target_accuracy'))

# The default of fused_bn_relu changed from false to null when fused_bn_add_relu was added, which old checkpoints lack.
_FORMER_DEFAULT, _ADDED_WITH_IT = ('model.fused_bn_relu', False, None), 'fused_bn_add_relu'


@dataclass(frozen=True)
class Change:
    """A configuration key, such as schedule.base_lr, whose value differs after a resume."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f'{self.key} {render_value(self.before)} -> {render_value(self.now)}'


def find_changes(before: Mapping[str, Mapping[str, Any]], config: Config) -> list[Change]:
    """Return the changes since an earlier configuration; a key that it lacks counts as having its default."""
    now, default = to_tree(config), to_tree(Config())
    whole = {section: {**default.get(section, {}), **keys} for section, keys in before.items()}
    changes = [Change(f'{section}.{key}', value, now.get(section, {}).get(key)) for section, keys in whole.items()
               for key, value in keys.items()
               if (section, key) != ('run', 'seed') and value != now.get(section, {}).get(key)]
    is_former = _ADDED_WITH_IT not in before.get('model', {})
    return [c for c in changes if not is_former or (c.key, c.before, c.now) != _FORMER_DEFAULT]


def check_changes(changes: Sequence[Change], allowed: Sequence[str], where: str) -> None:
    """Raise CheckpointError for changes in neither FREE nor allowed; where: path of the checkpoint."""
    refused = [c for c in changes if c.key not in FREE and c.key not in allowed]
    if refused:
        raise CheckpointError(f'{where}: the configuration differs from the earlier one: '
                              f'{", ".join(map(str, refused))}; restore it, or accept these changes with '
                              f'--allow-changed {",".join([*allowed, *(c.key for c in refused)])}')


def parse_allowed(text: str | None) -> tuple[str, ...]:
    """Return the keys of --allow-changed; raise ConfigError for unknown keys."""
    known = [f'{name}.{key}' for name, section in SECTIONS.items() for key in field_names(section)]
    keys = tuple(text.split(',')) if text else ()
    for key in keys:
        if key not in known:
            raise ConfigError(f'--allow-changed: got {key}, expected keys such as schedule.base_lr'
                              f'{nearest(key, known)}')
    return keys
