"""Shards of any size: every sample once per epoch, equal steps per rank, and random numbers."""

import zlib
from dataclasses import replace
from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlperf_rn50.data.shards import (
    Shard,
    alternating_mirrors,
    augmentation_uniforms,
    epoch_order,
    first_reads,
)

SHARDS = st.builds(
    lambda nodes, rank, **keys: Shard(
        rank=rank % len(nodes), nodes=tuple(nodes), world_size=len(nodes), **keys
    ),
    num_samples=st.integers(1, 300),
    nodes=st.lists(st.integers(0, 6), min_size=1, max_size=12),  # also numbers without ranks
    rank=st.integers(0, 11),
    local_batch_size=st.integers(1, 20),
    num_micro=st.integers(1, 4),
    rotation_epochs=st.none() | st.integers(1, 4),
    is_wrapped=st.booleans(),
)
EPOCHS, SEEDS = st.integers(0, 20), st.integers(0, 2**40)


def group_of(shard):
    return [replace(shard, rank=rank) for rank in range(shard.world_size)]


def passes_of(shard):
    return product(range(shard.steps_per_epoch), range(shard.num_micro))


def node_positions(shard, node):
    return shard.positions_of(shard.ranks_of_nodes()[node])


@given(SHARDS, EPOCHS)
def test_epoch_covers_every_sample_once_in_equal_steps_per_rank(shard, epoch):
    group, order = group_of(shard), epoch_order(shard, 3, epoch)
    positions = [np.stack([s.positions(*p) for s in group], axis=1) for p in passes_of(shard)]
    assert np.concatenate(positions).ravel().tolist() == list(range(len(order)))
    assert sorted(order[: shard.num_samples]) == list(range(shard.num_samples))
    batch = shard.local_batch_size * shard.world_size * shard.num_micro
    assert len(order) == shard.num_samples + shard.num_padded and shard.num_padded < batch
    assert shard.num_counted == (len(order) if shard.is_wrapped else shard.num_samples)
    for s, (step, micro) in product(group, passes_of(shard)):
        number = (step, micro) if micro else (step,)  # the first pass is the default
        places, valid = s.positions(*number), s.num_valid(*number)
        np.testing.assert_array_equal(s.select(order, *number), order[places])
        assert len(places) == shard.local_batch_size
        assert [p < shard.num_counted for p in places] == [i < valid for i in range(len(places))]
    for step in range(shard.steps_per_epoch):
        valid = sum(s.num_valid(step, m) for s in group for m in range(shard.num_micro))
        assert batch >= valid == shard.num_valid_global(step) > 0
    # The padding has the same samples if it counts.
    other = replace(shard, is_wrapped=not shard.is_wrapped)
    np.testing.assert_array_equal(order, epoch_order(other, 3, epoch))


@given(SHARDS, EPOCHS)
def test_padding_repeats_samples_of_the_epoch_or_of_the_same_node(shard, epoch):
    order = epoch_order(shard, 3, epoch)
    if shard.rotation_epochs is None:
        np.testing.assert_array_equal(order, np.resize(order[: shard.num_samples], len(order)))
        return
    for node in shard.nodes:
        positions = node_positions(shard, node)
        counted, padding = np.split(order[positions], [sum(positions < shard.num_samples)])
        assert {*padding} <= ({*counted} or {0})


@given(SEEDS, EPOCHS)
def test_epoch_orders_depend_on_seed_and_epoch(seed, epoch):
    shard = Shard(100, 0, 1, 10)
    order = epoch_order(shard, seed, epoch)
    assert (order == epoch_order(shard, seed, epoch)).all()
    assert (order != epoch_order(shard, seed, epoch + 1)).any()
    assert (order != epoch_order(shard, seed + 1, epoch)).any()


# --- nodes with parts of the samples


@given(SHARDS)
def test_positions_of_a_node_are_those_of_its_ranks(shard):
    for node in range(max(shard.nodes) + 1):
        expected = [
            p for p in range(shard.num_positions) if shard.nodes[p % shard.world_size] == node
        ]
        assert node_positions(shard, node).tolist() == expected


def test_orders_by_node_are_stable():
    shard = Shard(22, 0, 6, 2, 1, (1, 0, 2, 2, 0, 1), 2)
    orders = [epoch_order(shard, 7, epoch) for epoch in (0, 5)]
    assert [zlib.crc32(order.tobytes()) for order in orders] == [166699912, 729041237]


@given(SHARDS, SEEDS, EPOCHS)
def test_single_node_has_the_order_of_all_ranks(shard, seed, epoch):
    by_node = replace(shard, nodes=(0,) * shard.world_size, rotation_epochs=2)
    whole = replace(shard, nodes=(), rotation_epochs=None)
    np.testing.assert_array_equal(
        epoch_order(by_node, seed, epoch), epoch_order(whole, seed, epoch)
    )


@given(num_nodes=st.integers(1, 7), rotation_epochs=st.integers(1, 4), num_each=st.integers(2, 9))
def test_node_keeps_its_part_until_rotation(num_nodes, rotation_epochs, num_each):
    """On equal nodes, so that all parts have the same size in every turn."""
    nodes = (*range(num_nodes),) * 2
    shard = Shard(len(nodes) * num_each, 0, len(nodes), 3, 1, nodes, rotation_epochs)
    places = node_positions(shard, 0)
    places = places[places < shard.num_samples]

    def part(epoch):
        return frozenset(epoch_order(shard, 3, epoch)[places].tolist())

    turns = [part(turn * rotation_epochs) for turn in range(num_nodes)]
    assert part(rotation_epochs - 1) == part(num_nodes * rotation_epochs) == turns[0]
    assert len(set(turns)) == num_nodes and set().union(*turns) == set(range(shard.num_samples))
    orders = [epoch_order(shard, 3, epoch) for epoch in (0, 1)]
    assert num_each < 5 or (orders[0] != orders[1]).any()


def test_part_of_node_is_spread_over_the_file():
    shard = Shard(16_000, 0, 16, 8, 1, (0, 1, 2, 3) * 4, 10)
    order = epoch_order(shard, 3, 0)
    for node in range(4):
        # 1000 samples per class
        counts = np.bincount(order[node_positions(shard, node)] // 1000, minlength=16)
        assert counts.min() > 150 and counts.max() < 350


@given(SHARDS)
def test_first_reads_are_samples_new_to_the_node(shard):
    positions = node_positions(shard, shard.nodes[shard.rank])
    is_known, seen = np.zeros(shard.num_samples, bool), set[int]()
    for epoch in range(3):
        order = epoch_order(shard, 3, epoch)
        is_first = first_reads(shard, order, is_known)
        assert sorted(order[is_first]) == sorted({*order[positions]} - seen)
        assert {*np.flatnonzero(is_first)} <= {*positions}
        seen.update(order[positions])
        assert {*np.flatnonzero(is_known)} == seen


# --- random numbers


def splitmix64(state, index):
    """Return the index-th number of the generator from a state, computed with Python integers."""
    x = (state + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def test_random_numbers_are_those_of_splitmix64():
    assert splitmix64(0, 0) == 0xE220A8397B1DCDAF  # as published
    drawn = augmentation_uniforms(Shard(100, 1, 2, 3), 7, 2, 4, 0, 2)
    for position, row in zip((25, 27, 29), drawn):
        state = splitmix64(splitmix64(splitmix64(2, 7), 2), position)
        assert row.tolist() == [(splitmix64(state, draw) >> 11) / 2**53 for draw in (0, 1)]


@given(SHARDS, SEEDS, EPOCHS)
def test_augmentation_depends_on_neither_batch_nor_ranks_nor_passes(shard, seed, epoch):
    num = shard.num_positions
    whole = augmentation_uniforms(Shard(num, 0, 1, num), seed, epoch, 0, 0, 5)
    assert ((whole >= 0) & (whole < 1)).all()
    for step, micro in passes_of(shard):
        part = augmentation_uniforms(shard, seed, epoch, step, micro, 5)
        np.testing.assert_array_equal(part, whole[shard.positions(step, micro)])


@given(SEEDS, EPOCHS)
def test_mirrors_alternate_between_halves_of_the_samples(seed, epoch):
    samples = np.arange(2000)
    first, second = (alternating_mirrors(samples, seed, e) for e in (epoch, epoch + 1))
    np.testing.assert_array_equal(first, ~second)
    assert 850 < first.sum() < 1150  # 6.7 standard deviations
    np.testing.assert_array_equal(alternating_mirrors(samples[::-7], seed, epoch), first[::-7])
    assert 850 < (first != alternating_mirrors(samples, seed + 1, epoch)).sum() < 1150
