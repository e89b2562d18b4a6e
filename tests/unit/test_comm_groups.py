"""Ranks that share a GPU: who sums with whom, and that NCCL is never asked for two ranks of one GPU.

A world of ranks is as many threads here, with a Horovod that refuses what NCCL refuses.
"""
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
from helpers import HANG_LIMIT_S

from mlperf_rn50.config import Config, RunConfig, TrainConfig
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.train import comm as comm_module
from mlperf_rn50.train.comm import (
    check_places,
    decide_sharing,
    describe_exchange,
    find_sets,
    find_stages,
    open_comm,
    sharing_of,
)


class Array:
    """As much of an MXNet array as the exchange uses, anywhere."""

    def __init__(self, values, context):
        self.values, self.context = np.array(values, np.float32), context
        self.shape, self.dtype = self.values.shape, np.float32

    def __setitem__(self, key, value):
        self.values[key] = value

    def __imul__(self, factor):
        self.values *= factor
        return self

    def __itruediv__(self, divisor):
        self.values /= divisor
        return self

    def copy(self):
        return Array(self.values, self.context)

    def copyto(self, other):
        assert other is not self
        other[:] = self.values

    def asnumpy(self):
        return self.values


def on_gpu(values, number):
    return Array(values, mx.gpu(number))


class ProcessSet:
    def __init__(self, ranks):
        self.ranks = ranks


class World:
    """A Horovod whose ranks are threads, on nodes of so many ranks."""

    Sum = 'sum'
    ProcessSet = ProcessSet

    def __init__(self, num_ranks, ranks_per_node, num_sharing):
        self.num_ranks, self.ranks_per_node, self.num_sharing = num_ranks, ranks_per_node, num_sharing
        self.global_process_set = ProcessSet(list(range(num_ranks)))
        self.own, self.lock, self.arrived, self.on_gpus = threading.local(), threading.Lock(), {}, set()
        self.is_broken = False

    def init(self, process_sets):
        self.own.sets = [self.global_process_set, *process_sets]
        self.registered = [s.ranks for s in process_sets]

    def shut_down(self):
        """Nobody waits any longer for a rank that has failed."""
        with self.lock:
            self.is_broken = True
            for _, barrier in self.arrived.values():
                barrier.abort()

    def rank(self):
        return self.own.rank

    def size(self):
        return self.num_ranks

    def local_rank(self):
        return self.own.rank % self.ranks_per_node

    def local_size(self):
        return self.ranks_per_node

    def nccl_built(self):
        return True

    mpi_built = gloo_built = nccl_built

    def gpu_of(self, rank):
        return rank // self.ranks_per_node, rank % self.ranks_per_node // self.num_sharing

    def _refuse(self, arrays, process_set, name):
        """Raise RuntimeError where Horovod or NCCL would refuse."""
        assert process_set in self.own.sets and self.own.rank in process_set.ranks
        kinds = {a.context.device_type for a in arrays}
        assert len(kinds) == 1
        if kinds == {'gpu'}:
            gpus = [self.gpu_of(rank) for rank in process_set.ranks]
            self.on_gpus.add(tuple(process_set.ranks))
            if len(set(gpus)) < len(gpus):
                raise RuntimeError(f'NCCL: duplicate GPU detected in {name}')

    def _meet(self, value, process_set, name):
        """The values of all ranks of a set, by rank."""
        ranks = tuple(process_set.ranks)
        turn = self.own.turns[ranks, name] = self.own.turns.get((ranks, name), 0) + 1
        with self.lock:
            assert not self.is_broken
            values, barrier = self.arrived.setdefault((ranks, name, turn), ({}, threading.Barrier(len(ranks))))
            values[self.own.rank] = value
        barrier.wait(HANG_LIMIT_S)
        return [values[rank] for rank in ranks]

    def grouped_allreduce_(self, arrays, op, process_set, name):
        self._refuse(arrays, process_set, name)
        each = self._meet([a.asnumpy().copy() for a in arrays], process_set, name)
        for array, *own in zip(arrays, *each):
            array[:] = sum(own[1:], own[0])

    def allreduce(self, array, op, process_set, name):
        self._refuse([array], process_set, name)
        return mx.nd.array(sum(self._meet(array.asnumpy(), process_set, name)), dtype=array.dtype)

    def allgather(self, array, name, process_set):
        self._refuse([array], process_set, name)
        return mx.nd.array(np.concatenate(self._meet(array.asnumpy(), process_set, name)), dtype=array.dtype)


def install(monkeypatch, hvd):
    monkeypatch.setitem(sys.modules, 'horovod', SimpleNamespace(mxnet=hvd))
    monkeypatch.setitem(sys.modules, 'horovod.mxnet', hvd)


@pytest.fixture
def on_ranks(monkeypatch):
    """Calls a function of a rank's Comm and its GPU on every rank of a world; the results by rank, and the world."""
    def on_ranks(function, num_ranks, ranks_per_node, num_sharing, opened_with=None, subset_sizes=()):
        world, failures = World(num_ranks, ranks_per_node, num_sharing), []
        install(monkeypatch, world)
        monkeypatch.setattr(comm_module, 'launched_size', lambda: num_ranks)
        nd = SimpleNamespace(array=mx.nd.array, empty=lambda shape, where, dtype: Array(np.full(shape, np.nan), where))
        monkeypatch.setattr(comm_module, 'mx', SimpleNamespace(nd=nd, cpu=mx.cpu, cpu_pinned=mx.cpu_pinned))
        monkeypatch.setattr(comm_module, 'platform', SimpleNamespace(node=lambda: f'h{world.gpu_of(world.rank())[0]}'))

        def one(rank):
            world.own.rank, world.own.turns = rank, {}
            try:
                comm = open_comm('none', subset_sizes, num_sharing=opened_with or num_sharing)
                return function(comm, world.gpu_of(rank)[1])
            except Exception as e:
                failures.append(e)
                world.shut_down()
        with ThreadPoolExecutor(num_ranks) as pool:
            results = [f.result(HANG_LIMIT_S) for f in [pool.submit(one, rank) for rank in range(num_ranks)]]
        if failures:
            raise failures[0]
        return results, world
    return on_ranks


def exchange_all(comm, gpu):
    """Every exchange of arrays of a GPU."""
    grads = [on_gpu([1.0 + comm.rank, 2.0], gpu), on_gpu([[comm.rank]], gpu)]
    comm.sum_gradients(grads, 1)
    shared = {'a': on_gpu([-0.0, 7.0] if comm.rank == 0 else [np.nan, 8.0], gpu)}
    comm.broadcast(shared)
    means = [on_gpu([comm.rank], gpu)]
    comm.average(means)
    pulse = on_gpu([comm.rank, 1.0], gpu)
    total = comm.sum_in_background(pulse)
    comm.barrier()
    return {'sums': [g.values.ravel().tolist() for g in grads], 'shared': shared['a'].values.tobytes(),
            'mean': means[0].values.tolist(), 'pulse': total.values.tolist(), 'kept': pulse.values.tolist(),
            'count': comm.sum([1])}


def expected_of(rank, num_ranks):
    total = sum(range(num_ranks))
    return {'sums': [[num_ranks + total, 2.0 * num_ranks], [total]], 'shared': np.float32([-0.0, 7.0]).tobytes(),
            'mean': [np.float32(total / num_ranks)], 'pulse': [total, num_ranks], 'kept': [rank, 1.0],
            'count': [num_ranks]}


def test_stages_and_sets():
    assert [find_stages(r, 5, 2) for r in (0, 3, 4)] == [((0, 1), (0, 2, 4)), ((2, 3), (0, 2, 4)), ((4,), (0, 2, 4))]
    assert find_stages(2, 4, 1) == ((2,), (0, 1, 2, 3))
    assert find_sets(5, 2) == [(0, 1, 2, 3, 4), (0, 1), (0, 2, 4), (2, 3)]
    assert find_sets(4, 1) == [(0, 1, 2, 3)] and find_sets(2, 2) == [(0, 1)] and find_sets(1, 4) == [(0,)]


@pytest.mark.parametrize('num_ranks, ranks_per_node, num_sharing, leaders', [
    (4, 4, 1, {(0, 1, 2, 3)}), (2, 2, 2, set()), (3, 3, 2, {(0, 2)}), (8, 4, 2, {(0, 2, 4, 6)}), (6, 3, 3, {(0, 3)})])
def test_only_the_leaders_of_gpus_meet_in_nccl(on_ranks, num_ranks, ranks_per_node, num_sharing, leaders):
    results, world = on_ranks(exchange_all, num_ranks, ranks_per_node, num_sharing)
    assert results == [expected_of(rank, num_ranks) for rank in range(num_ranks)]
    assert world.on_gpus == leaders


@pytest.mark.parametrize('size, leaders', [(1, set()), (2, set()), (5, {(0, 2, 4)})])
def test_a_subset_may_cut_through_the_ranks_of_a_gpu(on_ranks, size, leaders):
    def in_part(comm, gpu):
        part = comm.subset(size)
        result = exchange_all(part, gpu) if part else None
        comm.barrier()
        return result
    results, world = on_ranks(in_part, 7, 7, 2, subset_sizes=[size])
    assert results == [expected_of(r, size) if r < size else None for r in range(7)]
    assert world.on_gpus == leaders


def test_all_and_a_part_of_them_may_have_sums_under_way_at_once(on_ranks):
    def both(comm, gpu):
        for ranks in (comm, comm.subset(3)):
            if ranks:
                ranks.sum_gradients([on_gpu([1.0], gpu)], 0)
        comm.barrier()
    _, world = on_ranks(both, 4, 4, 2, subset_sizes=[3])
    sums = [key for key in world.arrived if 'gradients' in key[1]]
    assert {(0, 1), (0, 2)} < {ranks for ranks, _, _ in sums}  # in which both exchange
    assert {turn for _, _, turn in sums} == {1}  # Horovod refuses a name that is under way in a set


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
    monkeypatch.setattr(comm_module, 'launched_size', lambda: 6)
    assert sharing_of(config) == sharing
    monkeypatch.setattr(comm_module, 'launched_size', lambda: None)
    assert sharing_of(config) == 1


@pytest.mark.parametrize('facts, text', [
    (('MPI', 'cpu', 4, 2, False), 'MPI controller'),
    (('Gloo', 'gpu', 4, 2, False), 'Gloo controller, gradients through host memory and Gloo'),
    (('MPI', 'gpu', 4, 1, True), 'MPI controller, gradients of 4 GPUs through NCCL'),
    (('MPI', 'gpu', 7, 2, True), 'MPI controller, gradients of 2 ranks of a GPU through host memory and MPI, then '
                                 'those of 4 GPUs through NCCL')])
def test_the_doctor_says_which_way_gradients_travel(facts, text):
    assert describe_exchange(*facts) == text
