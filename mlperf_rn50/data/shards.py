"""Assignment of samples to ranks, and the number of steps per epoch. Pure arithmetic: no files, no
frameworks.

An epoch is a permutation of all training samples that depends only on (seed, epoch), cut into
global batches. A global batch is cut into micro-batches of world_size * local_batch_size positions,
one for each forward pass. Of each micro-batch, rank r takes position r and every world_size-th
position after it. The last global batch is padded at its end with samples from the start of the
permutation, which have no weight in the loss unless is_wrapped. All ranks take the same number of
steps, each sample counts once per epoch, and a step's samples do not depend on the number of ranks.

With shuffle=node, positions and steps are the same, but each node has its own part of the samples,
one sample for each unpadded position of its ranks. Every epoch, each part is shuffled and placed at
the positions of its node. Every few epochs, the parts rotate over the nodes.
"""

from dataclasses import dataclass

import numpy as np

# Keys of the random streams; different keys make the streams of one seed independent.
_ORDER_STREAM, _AUGMENT_STREAM, _PART_STREAM, _MIRROR_STREAM = 1, 2, 3, 4
# Constants of SplitMix64. Sources: Steele, Lea, Flood: Fast Splittable Pseudorandom Number
# Generators (OOPSLA 2014) for the increment; Stafford: Better Bit Mixing (2011), variant 13, for
# the mix. NumPy converts them when it combines them with arrays of uint64.
_INCREMENT, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Shard:
    """One rank's share of a data set."""

    num_samples: int
    rank: int
    world_size: int
    local_batch_size: int  # samples per rank and forward pass
    num_micro: int = 1  # forward passes per step (gradient accumulation)
    nodes: tuple[int, ...] = ()  # each rank's node number, counted from 0; empty for a single node
    # epochs for which a node keeps its part; None shuffles over all nodes
    rotation_epochs: int | None = None
    is_wrapped: bool = False  # True if padding counts in the loss

    @property
    def micro_batch_size(self) -> int:
        """Number of samples in one forward pass, over all ranks."""
        return self.local_batch_size * self.world_size

    @property
    def global_batch_size(self) -> int:
        """Number of samples in one step, over all ranks."""
        return self.micro_batch_size * self.num_micro

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps that use every sample once. The last step is padded if necessary."""
        return -(-self.num_samples // self.global_batch_size)

    @property
    def num_positions(self) -> int:
        """Number of positions in an epoch, padded ones included, over all ranks."""
        return self.steps_per_epoch * self.global_batch_size

    @property
    def num_padded(self) -> int:
        """Number of padded positions in an epoch, over all ranks."""
        return self.num_positions - self.num_samples

    @property
    def num_counted(self) -> int:
        """Number of positions in an epoch that count in the loss, over all ranks."""
        return self.num_positions if self.is_wrapped else self.num_samples

    def num_valid_global(self, step: int) -> int:
        """Number of positions in a step that count, over all ranks. Steps count from 0 within an
        epoch."""
        return min(self.global_batch_size, self.num_counted - step * self.global_batch_size)

    def positions(self, step: int, micro: int = 0) -> np.ndarray:
        """Positions of the epoch that this rank reads in a forward pass. int64, shape
        (local_batch_size,)."""
        first = step * self.global_batch_size + micro * self.micro_batch_size + self.rank
        return first + self.world_size * np.arange(self.local_batch_size, dtype=np.int64)

    def num_valid(self, step: int, micro: int = 0) -> int:
        """Number of positions(step, micro) that count in the loss. They precede those that do
        not."""
        return int(np.count_nonzero(self.positions(step, micro) < self.num_counted))

    def select(self, values: np.ndarray, step: int, micro: int = 0) -> np.ndarray:
        """Select what this rank reads in a forward pass from a value for each position of an epoch,
        such as the samples of epoch_order."""
        return values[self.positions(step, micro)]

    def ranks_of_nodes(self) -> list[np.ndarray]:
        """Ranks of every node, in ascending order."""
        nodes = np.array(self.nodes or (0,) * self.world_size)
        return [np.flatnonzero(nodes == node) for node in range(nodes.max() + 1)]

    def positions_of(self, ranks: np.ndarray) -> np.ndarray:
        """Positions of these ranks in an epoch, padded ones included. Ranks and positions are
        ascending. int64."""
        return np.add.outer(np.arange(0, self.num_positions, self.world_size), ranks).ravel()


def _generator(stream: int, *key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((stream, *key))))


def epoch_order(shard: Shard, seed: int, epoch: int) -> np.ndarray:
    """Return the sample at each position of an epoch, padding included; equal on all ranks. int64,
    (num_positions,)."""
    random = _generator(_ORDER_STREAM, seed, epoch)
    if shard.rotation_epochs is None:
        return np.resize(random.permutation(shard.num_samples), shard.num_positions)
    ranks = shard.ranks_of_nodes()
    order = np.empty(shard.num_positions, np.int64)
    start = 0
    # The parts are the same in all runs, to reuse the page cache, and shuffled, because files are
    # sorted by class.
    dealt = _generator(_PART_STREAM).permutation(shard.num_samples)
    for part in range(len(ranks)):
        node = (part - epoch // shard.rotation_epochs) % len(ranks)
        positions = shard.positions_of(ranks[node])
        stop = start + int(np.searchsorted(positions, shard.num_samples))
        shuffled = random.permutation(np.sort(dealt[start:stop]))
        # A node with only padded positions has an empty part; np.resize then fills its positions
        # with sample 0.
        order[positions] = np.resize(shuffled, len(positions))
        start = stop
    return order


def first_reads(
    shard: Shard, order: np.ndarray, is_known: np.ndarray, start: int = 0
) -> np.ndarray:
    """Return a mask of the epoch's positions, from start on, where this rank's node reads a sample
    for the first time.

    is_known: mask of the samples that the node has read before, (num_samples,). This epoch's
    samples are added to it.
    """
    positions = shard.positions_of(
        shard.ranks_of_nodes()[shard.nodes[shard.rank] if shard.nodes else 0]
    )
    positions = positions[positions >= start]
    samples, first = np.unique(order[positions], return_index=True)
    is_first = np.zeros(shard.num_positions, bool)
    is_first[positions[first[~is_known[samples]]]] = True
    is_known[samples] = True
    return is_first


def _mix(x: np.ndarray) -> np.ndarray:
    """Return SplitMix64's mix of 64-bit numbers, uint64."""
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


def _hash(state: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return output `index`, counted from 0, of the SplitMix64 generators with these states
    (uint64, broadcast)."""
    return _mix(state + (index + 1) * _INCREMENT)


def _state(*keys: int) -> np.ndarray:
    """Return the generator state for some keys, uint64, (1,)."""
    state = np.array([keys[0]], np.uint64)
    for key in keys[1:]:
        state = _hash(state, np.array([key & _WORD], np.uint64))
    return state


def alternating_mirrors(samples: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Return a mask of mirrored samples: a half drawn from (seed, sample) in even epochs, the other
    half in odd ones.

    Source: Jordan, 94% on CIFAR-10 in 3.29 seconds on a single GPU (2024,
    https://arxiv.org/abs/2404.00498).
    """
    drawn = _hash(_state(_MIRROR_STREAM, seed), samples.astype(np.uint64)) >> 63
    return (drawn + epoch) % 2 == 1


def augmentation_uniforms(
    shard: Shard, seed: int, epoch: int, step: int, micro: int, num_draws: int
) -> np.ndarray:
    """Return the random numbers for augmentation in a forward pass: float64 in [0, 1),
    (local_batch_size, num_draws).

    Each number is a hash of (seed, epoch, position in the epoch, draw). An image's augmentation
    thus does not depend on the batch size or the numbers of ranks and passes, and a resumed run
    needs no random state.
    """
    images = _hash(
        _state(_AUGMENT_STREAM, seed, epoch), shard.positions(step, micro).astype(np.uint64)
    )
    draws = _hash(images[:, None], np.arange(num_draws, dtype=np.uint64))
    return (draws >> 11) * 2.0**-53
