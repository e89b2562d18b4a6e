"""What a resumed run does otherwise than before: which keys may differ freely, and which only when it is asked for."""
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlperf_rn50.config import SECTIONS, Config, field_names, to_tree
from mlperf_rn50.errors import CheckpointError, ConfigError, nearest

# Keys that may differ freely, because they do not say what is computed: where the run lies, how fast it goes, what is
# kept and told of it, and how long it goes on. Batches are here as the plan compares what they come to. run.seed is
# not among what is compared: a run keeps its seed.
FREE = frozenset((
    *(f'run.{key}' for key in field_names(SECTIONS['run'])),
    *(f'checkpoint.{key}' for key in field_names(SECTIONS['checkpoint'])),
    'data.dir', 'data.num_threads', 'data.read_threads', 'data.prefetch_depth', 'data.record_cache_mib',
    'data.hw_decoder_load', 'data.hybrid_huffman_threshold', 'data.preallocate_width_hint',
    'data.preallocate_height_hint', 'data.device_memory_padding_mib', 'data.host_memory_padding_mib',
    'data.decoded_bytes_hint',
    'comm.num_buckets', 'comm.stall_limit_s', 'comm.start_limit_s', 'comm.eval_limit_s', 'comm.checkpoint_limit_s',
    'train.local_batch_size', 'train.global_batch_size', 'train.eval_batch_size', 'train.num_warmup_steps',
    'train.max_epochs', 'train.target_accuracy'))


# A key that had false for its default before it had null: the checkpoints of then, which lack a key that came with it.
_FORMER_DEFAULT, _CAME_WITH_IT = ('model.fused_bn_relu', False, None), 'fused_bn_add_relu'


@dataclass(frozen=True)
class Change:
    """A key of the configuration, such as schedule.base_lr, that a resumed run has another value for."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f'{self.key} {_shown(self.before)} -> {_shown(self.now)}'


def find_changes(before: Mapping[str, Mapping[str, Any]], config: Config) -> list[Change]:
    """What a configuration has otherwise than the tree of one before; a key that is newer had its default then."""
    now, default = to_tree(config), to_tree(Config())
    whole = {section: {**default.get(section, {}), **keys} for section, keys in before.items()}
    changes = [Change(f'{section}.{key}', value, now.get(section, {}).get(key)) for section, keys in whole.items()
               for key, value in keys.items()
               if (section, key) != ('run', 'seed') and value != now.get(section, {}).get(key)]
    is_former = _CAME_WITH_IT not in before.get('model', {})
    return [c for c in changes if not is_former or (c.key, c.before, c.now) != _FORMER_DEFAULT]


def check_changes(changes: Sequence[Change], allowed: Sequence[str], where: str) -> None:
    """Raise CheckpointError for changes that are neither free nor allowed; where: the checkpoint."""
    refused = [c for c in changes if c.key not in FREE and c.key not in allowed]
    if refused:
        raise CheckpointError(f'{where}: the configuration is not that of the run before: '
                              f'{", ".join(map(str, refused))}; leave it as it was, or accept just this with '
                              f'--allow-changed {",".join([*allowed, *(c.key for c in refused)])}')


def parse_allowed(text: str | None) -> tuple[str, ...]:
    """The keys of --allow-changed; raises ConfigError for one that does not exist."""
    known = [f'{name}.{key}' for name, section in SECTIONS.items() for key in field_names(section)]
    keys = tuple(text.split(',')) if text else ()
    for key in keys:
        if key not in known:
            raise ConfigError(f'--allow-changed: got {key}, expected keys such as schedule.base_lr'
                              f'{nearest(key, known)}')
    return keys


def _shown(value: Any) -> str:
    return 'null' if value is None else str(value).lower() if isinstance(value, bool) else str(value)
