"""Ranks that share a GPU: who sums with whom, and that NCCL is never asked for two ranks of one GPU.

What the sums come to is shown by real ranks, in tests/parallel.
"""
import sys
from collections import Counter
from types import SimpleNamespace

import mxnet as mx
import pytest

from mlperf_rn50.config import Config, RunConfig
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.train.comm import horovod as comm_module
from mlperf_rn50.train.comm import sharing as sharing_module
from mlperf_rn50.train.comm.horovod import HorovodComm, open_comm
from mlperf_rn50.train.comm.sharing import (
    check_places,
    decide_sharing,
    describe_exchange,
    find_sets,
    find_stages,
    sharing_of,
)
from mlperf_rn50.train.options import TrainConfig


class Array:
    """As much of an MXNet array as an exchange uses, on any device; of its values, whether they were set to nothing."""

    shape, dtype, is_nothing = (1,), 'float32', False

    def __init__(self, context):
        self.context = context

    def __setitem__(self, key, value):
        self.is_nothing = value == 0

    def __imul__(self, _):
        return self

    __itruediv__ = __imul__

    def copy(self):
        return Array(self.context)

    def copyto(self, other):
        assert other is not self
        other.is_nothing = self.is_nothing


class Horovod:
    """One rank's Horovod, which notes each exchange and exchanges nothing."""

    Sum = 'sum'

    def __init__(self, rank, num_ranks):
        self.rank, self.size, self.local_rank, self.local_size = (lambda n=n: n for n in (rank, num_ranks, 0, 1))
        self.global_process_set, self.calls = self.ProcessSet(range(num_ranks)), []
        self.nccl_built = self.mpi_built = self.gloo_built = lambda: True

    def ProcessSet(self, ranks):
        return SimpleNamespace(ranks=tuple(ranks))

    def init(self, process_sets):
        self.sets = [self.global_process_set, *process_sets]

    def grouped_allreduce_(self, arrays, op, process_set, name):
        assert process_set in self.sets and self.rank() in process_set.ranks
        [device] = {a.context.device_type for a in arrays}
        self.calls.append((process_set.ranks, name, device, arrays[0].is_nothing))


def install(monkeypatch, hvd):
    monkeypatch.setitem(sys.modules, 'horovod', SimpleNamespace(mxnet=hvd))
    monkeypatch.setitem(sys.modules, 'horovod.mxnet', hvd)


@pytest.fixture
def calls_of(monkeypatch):
    """Calls a function of a rank's Comm on each rank of a world; the exchanges that every rank asked for, by rank."""
    def calls_of(function, num_ranks, num_sharing, places, subset_sizes=()):
        monkeypatch.setattr(comm_module, 'launched_size', lambda: num_ranks)
        monkeypatch.setattr(HorovodComm, 'gather_object', lambda comm, value: places)
        monkeypatch.setattr(comm_module, 'mx', SimpleNamespace(
            cpu=mx.cpu, cpu_pinned=mx.cpu_pinned,
            nd=SimpleNamespace(empty=lambda shape, context, dtype: Array(context))))
        worlds = [Horovod(rank, num_ranks) for rank in range(num_ranks)]
        for world in worlds:
            install(monkeypatch, world)
            function(open_comm('none', subset_sizes, num_sharing=num_sharing))
        return [world.calls for world in worlds]
    return calls_of


def exchange_all(comm):
    """Every exchange of arrays of a GPU."""
    comm.sum_gradients([Array(mx.gpu()), Array(mx.gpu())], 1)
    comm.broadcast({'a': Array(mx.gpu())})
    comm.average([Array(mx.gpu())])
    comm.sum_in_background(Array(mx.gpu()))


def assert_fits(calls, leaders):
    """The ranks of a set ask for the same exchanges, GPUs meet in the sets of leaders, and no sum counts twice."""
    for ranks in {c[0] for own in calls for c in own}:
        asked = [[c[:3] for c in own if c[0] == ranks] for own in calls]
        assert tuple(r for r, own in enumerate(asked) if own) == ranks
        assert all(asked[r] == asked[ranks[0]] for r in ranks)
    assert {c[0] for own in calls for c in own if c[2] == 'gpu'} == leaders
    counting = Counter((c[0], c[1]) for own in calls for c in own if c[1].endswith('/back') and not c[3])
    assert set(counting.values()) <= {1}  # what the leader brings


def test_stages_and_sets():
    assert [find_stages(r, 5, 2) for r in (0, 3, 4)] == [((0, 1), (0, 2, 4)), ((2, 3), (0, 2, 4)), ((4,), (0, 2, 4))]
    assert find_stages(2, 4, 1) == ((2,), (0, 1, 2, 3))
    assert find_sets(5, 2) == [(0, 1, 2, 3, 4), (0, 1), (0, 2, 4), (2, 3)]
    assert find_sets(4, 1) == [(0, 1, 2, 3)] and find_sets(2, 2) == [(0, 1)] and find_sets(1, 4) == [(0,)]


def places_of(num_ranks, ranks_per_node):
    return [[f'h{r // ranks_per_node}', r % ranks_per_node] for r in range(num_ranks)]


@pytest.mark.parametrize('num_ranks, ranks_per_node, num_sharing, leaders', [
    (4, 4, 1, {(0, 1, 2, 3)}), (2, 2, 2, set()), (3, 3, 2, {(0, 2)}), (8, 4, 2, {(0, 2, 4, 6)}), (6, 3, 3, {(0, 3)})])
def test_only_the_leaders_of_gpus_meet_in_nccl(calls_of, num_ranks, ranks_per_node, num_sharing, leaders):
    assert_fits(calls_of(exchange_all, num_ranks, num_sharing, places_of(num_ranks, ranks_per_node)), leaders)


@pytest.mark.parametrize('size, leaders', [(1, set()), (2, set()), (5, {(0, 2, 4)})])
def test_a_subset_may_cut_through_the_ranks_of_a_gpu(calls_of, size, leaders):
    def in_part(comm):
        if part := comm.subset(size):
            exchange_all(part)
    assert_fits(calls_of(in_part, 7, 2, places_of(7, 7), [size]), leaders)


def test_all_and_a_part_of_them_may_have_sums_under_way_at_once(calls_of):
    def both(comm):
        for ranks in filter(None, (comm, comm.subset(3))):
            ranks.sum_gradients([Array(mx.gpu())], 0)
    for own in calls_of(both, 4, 2, places_of(4, 4), [3]):
        assert len({c[:2] for c in own}) == len(own)  # Horovod refuses a name that is under way in a set


def test_ranks_are_looked_at_before_they_share(calls_of):
    with pytest.raises(ConfigError, match='which are to share a GPU'):
        calls_of(exchange_all, 2, 2, places_of(2, 1))


def test_ranks_of_a_gpu_must_be_neighbours():
    for counts in ([4], [3], [4, 2], [2, 3]):
        check_places([(f'h{i}', r) for i, n in enumerate(counts) for r in range(n)], 2)
    with pytest.raises(ConfigError, match='^run.ranks_per_device: got 2, and ranks 2 and 3, which are to share a GPU, '
                                          'are number 2 on h0 and number 0 on h1; start a multiple of 2 ranks'):
        check_places([('h0', 0), ('h0', 1), ('h0', 2), ('h1', 0)], 2)
    with pytest.raises(ConfigError, match='number 0 on h0 and number 2 on h0'):
        check_places([('h0', 0), ('h0', 2)], 2)


@pytest.mark.parametrize('device, per_device, has_nccl, sharing', [
    ('gpu', 1, True, 1), ('gpu', 3, True, 3), ('gpu', 3, False, 1), ('cpu', 3, True, 1)])
def test_sharers_sum_first_only_where_nccl_would_refuse(monkeypatch, device, per_device, has_nccl, sharing):
    assert decide_sharing(device, per_device, has_nccl) == sharing
    install(monkeypatch, SimpleNamespace(nccl_built=lambda: has_nccl))
    config = Config(train=TrainConfig(device=device), run=RunConfig(ranks_per_device=per_device))
    monkeypatch.setattr(sharing_module, 'launched_size', lambda: 6)
    assert sharing_of(config) == sharing
    monkeypatch.setattr(sharing_module, 'launched_size', lambda: None)
    assert sharing_of(config) == 1


def test_the_doctor_says_which_way_gradients_travel():
    assert describe_exchange('MPI', 'gpu', 7, 2, True).endswith(
        'gradients of 2 ranks of a GPU through host memory and MPI, then those of 4 GPUs through NCCL')
