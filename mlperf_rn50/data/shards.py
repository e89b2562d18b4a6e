"""Who reads which sample, and how many steps an epoch has. Pure arithmetic: no files, no frameworks.

The rule. An epoch is a permutation of all training samples, drawn from (seed, epoch) alone, cut into
global batches. A global batch is cut into micro-batches of world_size * local_batch_size positions
(one, unless gradients are accumulated), and rank r takes every world_size-th position from r on. The
last global batch is filled up with samples from the front of the same permutation; those padded
positions are the last of the batch, are counted, and weigh nothing in the loss. So every rank takes
the same number of steps, each sample counts exactly once an epoch, and the samples of a step do not
depend on the number of ranks that share it.
"""
from dataclasses import dataclass

import numpy as np

# Domain separation of the random streams drawn from one seed.
_ORDER_STREAM, _AUGMENT_STREAM = 1, 2


@dataclass(frozen=True)
class Shard:
    """One rank's share of a data set.

    Args:
        num_samples: samples in the data set.
        rank: of this process.
        world_size: number of ranks.
        local_batch_size: samples per rank and forward pass.
        num_micro: forward passes per step (gradient accumulation).
    """

    num_samples: int
    rank: int
    world_size: int
    local_batch_size: int
    num_micro: int = 1

    @property
    def micro_batch_size(self) -> int:
        """Samples of one forward pass over all ranks."""
        return self.local_batch_size * self.world_size

    @property
    def global_batch_size(self) -> int:
        """Samples of one step over all ranks."""
        return self.micro_batch_size * self.num_micro

    @property
    def steps_per_epoch(self) -> int:
        """Steps that visit every sample once, the last one padded."""
        return -(-self.num_samples // self.global_batch_size)

    @property
    def num_padded(self) -> int:
        """Padded positions of an epoch, over all ranks."""
        return self.steps_per_epoch * self.global_batch_size - self.num_samples

    def num_valid_global(self, step: int) -> int:
        """Unpadded samples of a step of an epoch (step counts from 0 within the epoch), over all ranks."""
        return min(self.global_batch_size, self.num_samples - step * self.global_batch_size)

    def positions(self, step: int, micro: int = 0) -> np.ndarray:
        """Positions in the padded epoch order that this rank reads. int64, shape (local_batch_size,)."""
        first = step * self.global_batch_size + micro * self.micro_batch_size + self.rank
        return first + self.world_size * np.arange(self.local_batch_size, dtype=np.int64)

    def num_valid(self, step: int, micro: int = 0) -> int:
        """How many of positions(step, micro) are not padding; they come first."""
        return int(np.count_nonzero(self.positions(step, micro) < self.num_samples))

    def samples(self, order: np.ndarray, step: int, micro: int = 0) -> np.ndarray:
        """The samples this rank reads: positions(step, micro) looked up in the epoch's order, wrapped around."""
        return order[self.positions(step, micro) % self.num_samples]


def _generator(stream: int, *key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((stream, *key))))


def epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """The global order of an epoch: a permutation of range(num_samples), int64, the same on every rank."""
    return _generator(_ORDER_STREAM, seed, epoch).permutation(num_samples)


def augmentation_uniforms(shard: Shard, seed: int, epoch: int, step: int, micro: int, num_draws: int) -> np.ndarray:
    """Random numbers for the augmentation of this rank's samples of one forward pass.

    They are drawn for the whole global batch and then cut, so an image is augmented in the same way
    whatever the number of ranks and passes, and a resumed run needs no random state.

    Returns:
        float64 in [0, 1), shape (local_batch_size, num_draws).
    """
    draws = _generator(_AUGMENT_STREAM, seed, epoch, step).random((shard.global_batch_size, num_draws))
    return draws[shard.positions(0, micro)]
