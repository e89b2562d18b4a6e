"""Every sample once an epoch, the same steps on every rank: for any sizes."""
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlperf_rn50.data.shards import Shard, augmentation_uniforms, epoch_order

SIZES = dict(num_samples=st.integers(1, 300), world_size=st.integers(1, 9), local=st.integers(1, 20),
             num_micro=st.integers(1, 4))


def shards(num_samples, world_size, local, num_micro):
    return [Shard(num_samples, r, world_size, local, num_micro) for r in range(world_size)]


@given(**SIZES)
def test_every_sample_counts_exactly_once(num_samples, world_size, local, num_micro):
    group = shards(num_samples, world_size, local, num_micro)
    order = epoch_order(num_samples, seed=3, epoch=2)
    counted, padded = [], 0
    for shard in group:
        for step in range(shard.steps_per_epoch):
            for micro in range(num_micro):
                samples, valid = shard.samples(order, step, micro), shard.num_valid(step, micro)
                assert len(samples) == local
                counted.extend(samples[:valid])
                padded += local - valid
    assert sorted(counted) == list(range(num_samples))
    assert padded == group[0].num_padded


@given(**SIZES)
def test_every_rank_takes_the_same_steps_and_agrees_on_the_valid_ones(num_samples, world_size, local, num_micro):
    group = shards(num_samples, world_size, local, num_micro)
    assert len({s.steps_per_epoch for s in group}) == 1
    for step in range(group[0].steps_per_epoch):
        valid = sum(s.num_valid(step, m) for s in group for m in range(num_micro))
        assert valid == group[0].num_valid_global(step) > 0


@given(num_samples=st.integers(1, 200), world_size=st.integers(1, 6), local=st.integers(1, 8))
def test_a_step_has_the_same_samples_whatever_the_number_of_ranks(num_samples, world_size, local):
    one = Shard(num_samples, 0, 1, local * world_size)
    order = epoch_order(num_samples, 0, 0)
    for step in range(one.steps_per_epoch):
        together = np.stack([s.samples(order, step) for s in shards(num_samples, world_size, local, 1)], axis=1)
        np.testing.assert_array_equal(together.ravel(), one.samples(order, step))


@given(seed=st.integers(0, 2**31), epoch=st.integers(0, 100))
def test_orders_are_permutations_that_change_with_seed_and_epoch(seed, epoch):
    order = epoch_order(100, seed, epoch)
    assert sorted(order) == list(range(100))
    assert (order == epoch_order(100, seed, epoch)).all()
    assert (order != epoch_order(100, seed, epoch + 1)).any()
    assert (order != epoch_order(100, seed + 1, epoch)).any()


@given(world_size=st.integers(1, 5), local=st.integers(1, 6), step=st.integers(0, 5))
def test_an_image_is_augmented_the_same_whatever_the_number_of_ranks_and_passes(world_size, local, step):
    whole = augmentation_uniforms(Shard(1000, 0, 1, local * world_size), 5, 1, step, 0, 7)
    for shard in shards(1000, world_size, local, 1):
        mine = augmentation_uniforms(shard, 5, 1, step, 0, 7)
        np.testing.assert_array_equal(mine, whole[shard.rank::world_size])
    for shard in shards(1000, 1, world_size, local):  # the same batch in `local` passes of world_size images
        parts = [augmentation_uniforms(shard, 5, 1, step, m, 7) for m in range(local)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert ((whole >= 0) & (whole < 1)).all()


def test_padding_comes_from_the_front_of_the_same_epoch():
    order = epoch_order(10, 1, 0)
    filled = np.stack([s.samples(order, 2) for s in shards(10, 2, 2, 1)], axis=1).ravel()
    np.testing.assert_array_equal(filled, [*order[8:], *order[:2]])


def test_order_and_augmentation_are_different_streams():
    shard = Shard(100, 0, 1, 10)
    first = augmentation_uniforms(shard, 0, 0, 0, 0, 3)
    assert (first != augmentation_uniforms(shard, 0, 0, 1, 0, 3)).all()
    assert (first != augmentation_uniforms(shard, 0, 1, 0, 0, 3)).all()
