"""Shards of any size: every sample once per epoch, equal steps per rank, and random numbers."""

import zlib
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

SIZES = dict(
    num_samples=st.integers(1, 300),
    world_size=st.integers(1, 9),
    local=st.integers(1, 20),
    num_micro=st.integers(1, 4),
)
LAYOUTS = st.lists(st.integers(1, 4), min_size=1, max_size=7)  # ranks per node, also unequal


def shards(
    num_samples, world_size, local, num_micro, nodes=(), rotation_epochs=None, is_wrapped=False
):
    return [
        Shard(num_samples, r, world_size, local, num_micro, nodes, rotation_epochs, is_wrapped)
        for r in range(world_size)
    ]


def nodes_of(layout):
    """Return the node of every rank, with adjacent ranks on a node."""
    return tuple(np.repeat(range(len(layout)), layout).tolist())


def node_positions(shard, node):
    return shard.positions_of(shard.ranks_of_nodes()[node])


def read(group, order, is_counted=True):
    """Return the samples that a group of ranks reads in an epoch, either counted samples or
    padding."""
    chosen = []
    for shard in group:
        for step in range(shard.steps_per_epoch):
            for micro in range(shard.num_micro):
                samples, valid = shard.samples(order, step, micro), shard.num_valid(step, micro)
                assert len(samples) == shard.local_batch_size
                chosen.extend(samples[:valid] if is_counted else samples[valid:])
    return chosen


@given(**SIZES)
def test_epoch_covers_every_sample_once_in_equal_steps_per_rank(
    num_samples, world_size, local, num_micro
):
    group = shards(num_samples, world_size, local, num_micro)
    order = epoch_order(group[0], seed=3, epoch=2)
    assert sorted(read(group, order)) == list(range(num_samples))
    assert len(read(group, order, is_counted=False)) == group[0].num_padded
    assert len({s.steps_per_epoch for s in group}) == 1
    for step in range(group[0].steps_per_epoch):
        valid = sum(s.num_valid(step, m) for s in group for m in range(num_micro))
        assert valid == group[0].num_valid_global(step) > 0


@given(**SIZES)
def test_wrapped_epoch_has_only_full_steps_and_repeats_its_first_samples(
    num_samples, world_size, local, num_micro
):
    group = shards(num_samples, world_size, local, num_micro, is_wrapped=True)
    order, batch = epoch_order(group[0], 3, 2), local * world_size * num_micro
    assert group[0].num_counted == len(order) == group[0].steps_per_epoch * batch
    assert sorted(read(group, order)) == sorted(np.resize(order[:num_samples], len(order)))
    assert len(order) - num_samples == group[0].num_padded < batch and set(order) == set(
        range(num_samples)
    )
    for step in range(group[0].steps_per_epoch):
        valid = sum(s.num_valid(step, m) for s in group for m in range(num_micro))
        assert valid == group[0].num_valid_global(step) == batch
    # The default reads the same samples at the same positions.
    np.testing.assert_array_equal(
        order, epoch_order(shards(num_samples, world_size, local, num_micro)[0], 3, 2)
    )


@given(num_samples=st.integers(1, 200), world_size=st.integers(1, 6), local=st.integers(1, 8))
def test_samples_of_step_do_not_depend_on_number_of_ranks(num_samples, world_size, local):
    single = Shard(num_samples, 0, 1, local * world_size)
    order = epoch_order(single, 0, 0)
    for step in range(single.steps_per_epoch):
        together = np.stack(
            [s.samples(order, step) for s in shards(num_samples, world_size, local, 1)], axis=1
        )
        np.testing.assert_array_equal(together.ravel(), single.samples(order, step))


@given(seed=st.integers(0, 2**31), epoch=st.integers(0, 100))
def test_epoch_orders_are_permutations_by_seed_and_epoch(seed, epoch):
    shard = Shard(100, 0, 1, 10)
    order = epoch_order(shard, seed, epoch)
    assert sorted(order) == list(range(100))
    assert (order == epoch_order(shard, seed, epoch)).all()
    assert (order != epoch_order(shard, seed, epoch + 1)).any()
    assert (order != epoch_order(shard, seed + 1, epoch)).any()


# --- nodes with parts of the samples


@given(
    num_samples=st.integers(1, 300),
    layout=LAYOUTS,
    local=st.integers(1, 8),
    num_micro=st.integers(1, 3),
    rotation_epochs=st.integers(1, 4),
    epoch=st.integers(0, 20),
    data=st.data(),
)
def test_parts_of_nodes_cover_epoch_exactly(
    num_samples, layout, local, num_micro, rotation_epochs, epoch, data
):
    nodes = tuple(data.draw(st.permutations(nodes_of(layout))))  # ranks need not be adjacent
    group = shards(num_samples, len(nodes), local, num_micro, nodes, rotation_epochs)
    order = epoch_order(group[0], 3, epoch)
    assert sorted(read(group, order)) == list(range(num_samples))
    for node in range(len(layout)):
        peers = [s for s in group if nodes[s.rank] == node]
        assert set(read(peers, order, is_counted=False)) <= (set(read(peers, order)) or {0})


@given(
    num_samples=st.integers(1, 300),
    nodes=st.lists(st.integers(0, 6), min_size=1, max_size=20),
    local=st.integers(1, 8),
    num_micro=st.integers(1, 3),
)
def test_positions_of_a_node_are_those_of_its_ranks(num_samples, nodes, local, num_micro):
    shard = Shard(num_samples, 0, len(nodes), local, num_micro, tuple(nodes), 1)
    for node in range(max(nodes) + 1):  # also numbers without ranks
        expected = [p for p in range(shard.num_positions) if nodes[p % len(nodes)] == node]
        assert node_positions(shard, node).tolist() == expected


def test_orders_by_node_are_stable():
    shard = Shard(22, 0, 6, 2, 1, (1, 0, 2, 2, 0, 1), 2)
    orders = [epoch_order(shard, 7, epoch) for epoch in (0, 5)]
    assert [zlib.crc32(order.tobytes()) for order in orders] == [166699912, 729041237]


@given(
    num_samples=st.integers(1, 300),
    world_size=st.integers(1, 9),
    local=st.integers(1, 8),
    seed=st.integers(0, 99),
    epoch=st.integers(0, 20),
    rotation_epochs=st.integers(1, 4),
)
def test_single_node_has_the_global_order(
    num_samples, world_size, local, seed, epoch, rotation_epochs
):
    shard = Shard(num_samples, 0, world_size, local)
    by_node = Shard(num_samples, 0, world_size, local, 1, (0,) * world_size, rotation_epochs)
    np.testing.assert_array_equal(
        epoch_order(by_node, seed, epoch), epoch_order(shard, seed, epoch)
    )


@given(layout=LAYOUTS, rotation_epochs=st.integers(1, 4), num_each=st.integers(2, 9))
def test_node_keeps_its_part_until_rotation(layout, rotation_epochs, num_each):
    num_nodes = len(layout)
    nodes = nodes_of([2] * num_nodes)  # equal nodes, so all parts have the same size in every turn
    shard = Shard(2 * num_nodes * num_each, 0, 2 * num_nodes, 3, 1, nodes, rotation_epochs)

    def part(node, epoch):
        positions = node_positions(shard, node)
        return frozenset(
            epoch_order(shard, 3, epoch)[positions[positions < shard.num_samples]].tolist()
        )

    turns = [part(0, turn * rotation_epochs) for turn in range(num_nodes)]
    assert part(0, rotation_epochs - 1) == turns[0]
    assert len(set(turns)) == num_nodes and set().union(*turns) == set(range(shard.num_samples))
    assert part(0, num_nodes * rotation_epochs) == turns[0]
    orders = [epoch_order(shard, 3, epoch) for epoch in (0, 1)]
    assert num_each < 5 or (orders[0] != orders[1]).any()


def test_part_of_node_is_spread_over_the_file():
    nodes = nodes_of([4, 4, 4, 4])
    shard = Shard(16_000, 0, 16, 8, 1, nodes, 10)
    order = epoch_order(shard, 3, 0)
    for node in range(4):
        # 1000 samples per class
        counts = np.bincount(order[node_positions(shard, node)] // 1000, minlength=16)
        assert counts.min() > 150 and counts.max() < 350


@given(
    num_samples=st.integers(1, 200),
    layout=LAYOUTS,
    local=st.integers(1, 8),
    data=st.data(),
    rotation_epochs=st.sampled_from([None, 1, 2]),
)
def test_first_reads_are_samples_new_to_the_node(num_samples, layout, local, data, rotation_epochs):
    nodes = nodes_of(layout)
    group = shards(num_samples, len(nodes), local, 1, nodes, rotation_epochs)
    shard = group[data.draw(st.integers(0, len(nodes) - 1))]
    peers = [s for s in group if nodes[s.rank] == nodes[shard.rank]]
    is_known, seen = np.zeros(num_samples, bool), set[int]()
    for epoch in range(3):
        order = epoch_order(shard, 3, epoch)
        is_first = first_reads(shard, order, is_known)
        samples = {*read(peers, order), *read(peers, order, is_counted=False)}
        assert sorted(order[is_first]) == sorted(samples - seen)
        assert set(np.flatnonzero(is_first)) <= set(node_positions(shard, nodes[shard.rank]))
        seen |= samples
        assert set(np.flatnonzero(is_known)) == seen


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


@given(
    local=st.integers(1, 20),
    world_size=st.integers(1, 9),
    num_micro=st.integers(1, 3),
    epoch=st.integers(0, 90),
    seed=st.integers(0, 2**40),
)
def test_augmentation_depends_on_neither_batch_nor_ranks_nor_passes(
    local, world_size, num_micro, epoch, seed
):
    whole = augmentation_uniforms(Shard(300, 0, 1, 300), seed, epoch, 0, 0, 5)
    assert ((whole >= 0) & (whole < 1)).all()
    for shard in shards(300, world_size, local, num_micro):
        for step, micro in product(range(shard.steps_per_epoch), range(num_micro)):
            valid = shard.num_valid(step, micro)
            part = augmentation_uniforms(shard, seed, epoch, step, micro, 5)[:valid]
            np.testing.assert_array_equal(part, whole[shard.positions(step, micro)[:valid]])


@given(st.integers(0, 2**63), st.integers(0, 1000))
def test_mirrors_alternate_between_halves_of_the_samples(seed, epoch):
    samples = np.arange(2000)
    first, second = (alternating_mirrors(samples, seed, e) for e in (epoch, epoch + 1))
    np.testing.assert_array_equal(first, ~second)
    assert 850 < first.sum() < 1150  # 6.7 standard deviations
    np.testing.assert_array_equal(alternating_mirrors(samples[::-7], seed, epoch), first[::-7])
    assert 850 < (first != alternating_mirrors(samples, seed + 1, epoch)).sum() < 1150
