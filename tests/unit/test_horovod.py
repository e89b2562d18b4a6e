"""Exchanges of ranks that share a GPU; NCCL must never get two ranks of one GPU.

tests/parallel checks the values of the sums on real ranks.
"""

import signal
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import mxnet as mx
import pytest

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.train.comm import horovod as comm_module
from mlperf_rn50.train.comm.horovod import HorovodComm, check_controller, open_comm


class Array:
    """Stand-in for an MXNet array on any device, which stores only whether it was set to zero."""

    shape, dtype, is_zero = (1,), 'float32', False

    def __init__(self, context):
        self.context = context

    def __setitem__(self, key, value):
        self.is_zero = value == 0

    def __imul__(self, _):
        return self

    __itruediv__ = __imul__

    def copy(self):
        return Array(self.context)

    def copyto(self, other):
        assert other is not self
        other.is_zero = self.is_zero


class Horovod:
    """Horovod of a rank; it records exchanges without transferring data."""

    Sum = 'sum'

    def __init__(self, rank, num_ranks):
        self.rank, self.size, self.local_rank, self.local_size = (
            lambda n=n: n for n in (rank, num_ranks, 0, 1)
        )
        self.global_process_set, self.calls = self.ProcessSet(range(num_ranks)), []
        self.nccl_built = self.mpi_built = self.gloo_built = lambda: True

    def ProcessSet(self, ranks):
        return SimpleNamespace(ranks=tuple(ranks))

    def init(self, process_sets):
        self.sets = [self.global_process_set, *process_sets]

    def grouped_allreduce_(self, arrays, op, process_set, name, prescale_factor):
        assert process_set in self.sets and self.rank() in process_set.ranks
        [device] = {a.context.device_type for a in arrays}
        self.calls.append((process_set.ranks, name, device, arrays[0].is_zero, prescale_factor))


def install(monkeypatch, hvd):
    monkeypatch.setitem(sys.modules, 'horovod', SimpleNamespace(mxnet=hvd))
    monkeypatch.setitem(sys.modules, 'horovod.mxnet', hvd)


@pytest.fixture
def calls_of(monkeypatch):
    """Function that calls a function with the Comm of each rank; returns the requested exchanges by
    rank."""

    def calls_of(function, num_ranks, num_sharing, places, subset_sizes=()):
        monkeypatch.setattr(comm_module, 'launched_size', lambda: num_ranks)
        monkeypatch.setattr(HorovodComm, 'gather_object', lambda comm, value: places)
        monkeypatch.setattr(
            comm_module,
            'mx',
            SimpleNamespace(
                cpu=mx.cpu,
                cpu_pinned=mx.cpu_pinned,
                nd=SimpleNamespace(empty=lambda shape, context, dtype: Array(context)),
            ),
        )
        worlds = [Horovod(rank, num_ranks) for rank in range(num_ranks)]
        for world in worlds:
            install(monkeypatch, world)
            function(open_comm('none', subset_sizes, num_sharing=num_sharing))
        return [world.calls for world in worlds]

    return calls_of


def exchange_all(comm):
    """Run every kind of exchange on GPU arrays."""
    comm.average_gradients([Array(mx.gpu()), Array(mx.gpu())], 1)
    comm.broadcast({'a': Array(mx.gpu())})
    comm.average([Array(mx.gpu())])
    comm.sum_in_background(Array(mx.gpu()))


def assert_fits(calls, leaders):
    """Assert that ranks of a set request equal exchanges, only leaders use GPUs, and no sum counts
    twice."""
    for ranks in {c[0] for rank_calls in calls for c in rank_calls}:
        requested = [[c[:3] for c in rank_calls if c[0] == ranks] for rank_calls in calls]
        assert tuple(r for r, rank_calls in enumerate(requested) if rank_calls) == ranks
        assert all(requested[r] == requested[ranks[0]] for r in ranks)
    assert {c[0] for rank_calls in calls for c in rank_calls if c[2] == 'gpu'} == leaders
    counting = Counter(
        (c[0], c[1])
        for rank_calls in calls
        for c in rank_calls
        if c[1].endswith('/back') and not c[3]
    )
    assert set(counting.values()) <= {1}  # the value from the leader


@pytest.mark.parametrize('size', [None, 1, 2])
def test_only_several_ranks_need_horovod(monkeypatch, size):
    monkeypatch.setattr(comm_module, 'launched_size', lambda: size)
    monkeypatch.setitem(sys.modules, 'horovod.mxnet', None)
    if size != 2:
        comm = open_comm('none')
        assert (comm.rank, comm.world_size, comm.sum([3])) == (0, 1, [3])
        return
    with pytest.raises(
        ConfigError, match='expected Horovod built with MXNet for 2 ranks; start one rank, or run'
    ):
        open_comm('none')


@pytest.fixture
def counted(monkeypatch):
    """A Comm of two ranks that records the name and the array of each sum of counts and gathering
    of texts."""
    calls = []

    def record(array, name, **keys):
        calls.append((name, array))
        return array

    world = Horovod(0, 2)
    world.allreduce = world.allgather = record
    install(monkeypatch, world)
    monkeypatch.setattr(comm_module, 'launched_size', lambda: 2)
    return open_comm('none'), calls


def test_counts_and_texts_are_exchanged_on_the_cpu(counted):
    """NCCL would refuse arrays of two ranks that share a GPU."""
    comm, calls = counted
    with mx.cpu(1):  # stands for a GPU as current context
        assert comm.sum([1, 2**40]) == [1, 2**40] and comm.gather_object('ü') == ['ü']
        comm.barrier()
    assert [array.context for _, array in calls] == [mx.cpu(0)] * 3


def test_sums_of_different_lengths_have_different_names(counted):
    """Horovod's response cache drops a name whose shape changes, and then all ranks negotiate
    again."""
    comm, calls = counted
    for counts in ([1], [1, 2], [0, 0, 0], [3], [4, 5]):
        comm.sum(counts)
    shapes = {(name, array.shape) for name, array in calls}
    assert len(shapes) == len(dict(shapes)) == 3


def places_of(num_ranks, ranks_per_node):
    return [[f'h{r // ranks_per_node}', r % ranks_per_node] for r in range(num_ranks)]


@pytest.mark.parametrize(
    'num_ranks, ranks_per_node, num_sharing, leaders',
    [
        (4, 4, 1, {(0, 1, 2, 3)}),
        (2, 2, 2, set()),
        (3, 3, 2, {(0, 2)}),
        (8, 4, 2, {(0, 2, 4, 6)}),
        (6, 3, 3, {(0, 3)}),
    ],
)
def test_only_leaders_of_gpus_use_nccl(calls_of, num_ranks, ranks_per_node, num_sharing, leaders):
    assert_fits(
        calls_of(exchange_all, num_ranks, num_sharing, places_of(num_ranks, ranks_per_node)),
        leaders,
    )


@pytest.mark.parametrize('size, leaders', [(1, set()), (2, set()), (5, {(0, 2, 4)})])
def test_subset_may_split_the_ranks_of_a_gpu(calls_of, size, leaders):
    def in_part(comm):
        if part := comm.subset(size):
            exchange_all(part)

    assert_fits(calls_of(in_part, 7, 2, places_of(7, 7), [size]), leaders)


def test_all_ranks_and_a_subset_may_sum_concurrently(calls_of):
    def both(comm):
        for ranks in filter(None, (comm, comm.subset(3))):
            ranks.average_gradients([Array(mx.gpu())], 0)

    for rank_calls in calls_of(both, 4, 2, places_of(4, 4), [3]):
        # Horovod refuses a name that is in use in a set
        assert len({c[:2] for c in rank_calls}) == len(rank_calls)


def test_places_of_ranks_are_checked_before_sharing(calls_of):
    with pytest.raises(ConfigError, match='which are to share a GPU'):
        calls_of(exchange_all, 2, 2, places_of(2, 1))


@pytest.mark.parametrize(
    'env, has_mpi, has_gloo, message',
    [
        (
            {'HOROVOD_CONTROLLER': 'gloo'},
            True,
            False,
            'built without Gloo; start the ranks with launch/mpirun.sh',
        ),
        (
            {'OMPI_COMM_WORLD_SIZE': '2', 'PMIX_NAMESPACE': '1'},
            False,
            True,
            'built without MPI; use launch/horovodrun.sh',
        ),
    ],
)
def test_missing_controller_of_horovod_is_named(env, has_mpi, has_gloo, message):
    with pytest.raises(ConfigError, match=message):
        check_controller(env, has_mpi, has_gloo)
    check_controller(env, True, True)
    check_controller({}, False, False)  # a single process uses neither
    check_controller({'HOROVOD_CONTROLLER': 'gloo'}, False, True)


@pytest.mark.parametrize(
    'name, others',
    [
        ('OMPI_COMM_WORLD_SIZE', {'PMIX_NAMESPACE': '1'}),
        ('HOROVOD_SIZE', {'HOROVOD_GLOO_RENDEZVOUS_ADDR': 'h1'}),
    ],
)
def test_number_of_ranks_that_an_earlier_launcher_left_is_refused(name, others):
    with pytest.raises(
        ConfigError, match=f"{name}: got '2' in the environment without a launcher; unset it"
    ):
        check_controller({name: '2'}, True, True)
    check_controller({name: '2', **others}, True, True)


@pytest.mark.parametrize(
    'body, last, code',
    [
        ('time.sleep(1.5)', 'time.sleep(600)', -signal.SIGABRT),
        ('time.sleep(600)', 'time.sleep(0.5)', 0),
        ('None', 'threading.Thread(target=time.sleep, args=(4,)).start()', 0),
    ],
)
def test_rank_ends_if_the_thread_of_horovod_has_ended(body, last, code):
    """Not if this process ends first, which ends the thread, too, also while another thread still
    writes."""
    program = f"""if True:
        import sys, threading, time
        from mlperf_rn50.train.comm import horovod
        horovod.LOST_S = 0.1
        thread = threading.Thread(target=lambda: {body}, daemon=True)
        thread.start()
        threading.Thread(target=horovod.end_without, args=(str(thread.native_id),), daemon=True).start()
        {last}"""
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True)
    assert done.returncode == code
    assert ('thread of Horovod that exchanges gradients has ended' in done.stderr) == bool(code)
