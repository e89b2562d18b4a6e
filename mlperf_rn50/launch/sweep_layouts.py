"""Choose the batch and learning rate of each layout (nodes x ranks) of a sweep. Pure functions."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlperf_rn50.errors import ConfigError


@dataclass(frozen=True)
class SweepLayout:
    num_nodes: int
    ranks_per_node: int
    global_batch_size: int
    base_lr: float
    warmup_epochs: float

    @property
    def name(self) -> str:
        return f'{self.num_nodes}x{self.ranks_per_node}'


def parse_layouts(text: str, per_node: int | None = None) -> list[tuple[int, int]]:
    """Parse layouts such as '1x4,2x4 16' into (nodes, ranks per node). per_node: ranks for words
    such as 16.

    Raise ConfigError for other texts, for no layout and, if per_node is None, for a layout that
    lacks its ranks.
    """
    form = (
        'nodes x ranks, such as 2x4'
        if per_node is None
        else 'nodes, or nodes x accelerators, such as 16 or 2x8'
    )
    result = []
    for word in text.replace(',', ' ').split():
        m = re.fullmatch(r'([1-9]\d{0,8})(?:x([1-9]\d{0,8}))?', word, re.ASCII)
        if not m or m[2] is per_node is None:
            raise ConfigError(f'--layouts: got {word:.20}, expected {form}')
        result.append((int(m[1]), int(m[2] or per_node or 0)))
    if not result:
        raise ConfigError(f'--layouts: got nothing, expected {form}')
    return list(dict.fromkeys(result))


def parse_lr_table(text: str) -> dict[int, tuple[float, float]]:
    """Parse lines 'global_batch base_lr warmup_epochs' into (base_lr, warmup_epochs) by global
    batch."""
    table = {}
    for line in text.splitlines():
        words = line.partition('#')[0].split()
        try:
            if words:
                batch, lr, warmup = words
                table[int(batch)] = (float(lr), float(warmup))
        except ValueError as e:
            raise ConfigError(
                f'--lr-table: got {line!r}, expected: global_batch base_lr warmup_epochs'
            ) from e
    return table


def plan_layouts(
    splits: Sequence[tuple[int, int]],
    batch_size: int,
    num_passes: int,
    is_weak: bool,
    base_lr: float,
    warmup_epochs: float,
    lr_table: Mapping[int, tuple[float, float]] | None,
) -> list[SweepLayout]:
    """Return batch, learning rate and warm-up of each layout.

    The configured batch and learning rate apply to the first layout. Weak scaling keeps the images
    per rank, strong scaling the images per step. The learning rate scales with the global batch,
    and the warm-up epochs stay the same.

    Args:
        splits: pairs of nodes and ranks per node; at least one.
        batch_size: images per step of the first layout.
        num_passes: train.gradient_accumulation_steps.
        lr_table: (base_lr, warmup_epochs) by global batch size, instead of the scaled values; None
            for these.

    Raises:
        ConfigError: the batch is not divisible by the ranks and their passes, or lr_table does not
            contain it.
    """
    first = splits[0][0] * splits[0][1]
    result = []
    for num_nodes, ranks_per_node in splits:
        world_size = num_nodes * ranks_per_node
        if is_weak and batch_size % first:
            raise ConfigError(
                f'train.global_batch_size: got {batch_size}, expected a multiple of the {first} '
                'ranks of the first layout'
            )
        global_batch_size = batch_size // first * world_size if is_weak else batch_size
        if global_batch_size % (world_size * num_passes):
            passes = f' and {num_passes} passes of each' if num_passes > 1 else ''
            other = '' if is_weak else ', or --weak'
            raise ConfigError(
                f'train.global_batch_size: got {global_batch_size}, expected a multiple of '
                f'{num_nodes}x{ranks_per_node} = {world_size} ranks{passes}{other}'
            )
        if lr_table is None:
            lr = base_lr * global_batch_size / batch_size
            warmup = warmup_epochs
        elif global_batch_size in lr_table:
            lr, warmup = lr_table[global_batch_size]
        else:
            raise ConfigError(
                f'--lr-table: no line for a global batch of {global_batch_size} '
                f'({num_nodes}x{ranks_per_node})'
            )
        result.append(
            SweepLayout(
                num_nodes, ranks_per_node, global_batch_size, base_lr=lr, warmup_epochs=warmup
            )
        )
    return result
