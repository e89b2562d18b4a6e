"""Exchanges of ranks that share a GPU; NCCL must never get two ranks of one GPU.

tests/parallel checks the values of the sums on real ranks.
"""

import signal
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import mxnet as mx
import pytest
from helpers import json_table, variables

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

    def wait_to_read(self):
        pass

    asnumpy = wait_to_read

    def reshape(self, _):
        return self

    __getitem__ = reshape


class Horovod:
    """Horovod of a rank; it records exchanges without transferring data."""

    Sum = 'sum'

    def __init__(self, rank, num_ranks):
        self.rank, self.size = lambda: rank, lambda: num_ranks
        self.local_rank, self.local_size = lambda: 0, lambda: 1
        self.mpi_built = self.gloo_built = lambda: True
        self.global_process_set, self.calls = self.ProcessSet(range(num_ranks)), []

    def ProcessSet(self, ranks):
        return SimpleNamespace(ranks=tuple(ranks))

    def init(self, process_sets):
        self.sets = [self.global_process_set, *process_sets]

    def grouped_allreduce_(self, arrays, op, process_set, name, prescale_factor):
        assert process_set in self.sets and self.rank() in process_set.ranks
        [device] = {a.context.device_type for a in arrays}
        self.calls.append((process_set.ranks, name, device, arrays[0].is_zero, prescale_factor))


@pytest.fixture
def open_with(monkeypatch):
    """Function that opens the Comm of a rank of a Horovod, which may be None."""

    def open_with(hvd, num_ranks, *arguments, **keys):
        monkeypatch.setattr(comm_module, 'launched_size', lambda: num_ranks)
        monkeypatch.setitem(sys.modules, 'horovod', SimpleNamespace(mxnet=hvd))
        monkeypatch.setitem(sys.modules, 'horovod.mxnet', hvd)
        return open_comm('none', *arguments, **keys)

    return open_with


@pytest.fixture
def calls_of(monkeypatch, open_with):
    """Function that runs every kind of exchange of GPU arrays on ranks, and on a subset of them;
    returns the requested exchanges by rank."""

    def calls_of(num_ranks, ranks_per_node, num_sharing, subset):
        places = [[f'h{r // ranks_per_node}', r % ranks_per_node] for r in range(num_ranks)]
        monkeypatch.setattr(HorovodComm, 'gather_object', lambda comm, value: places)
        empty = SimpleNamespace(empty=lambda shape, context, dtype: Array(context))
        stand_in = SimpleNamespace(cpu=mx.cpu, cpu_pinned=mx.cpu_pinned, nd=empty)
        monkeypatch.setattr(comm_module, 'mx', stand_in)
        worlds = [Horovod(rank, num_ranks) for rank in range(num_ranks)]
        for world in worlds:
            whole = open_with(world, num_ranks, [subset], num_sharing=num_sharing)
            for comm in filter(None, dict.fromkeys([whole, whole.subset(subset)])):
                comm.average_gradients([Array(mx.gpu()), Array(mx.gpu())], 1)
                comm.broadcast({'a': Array(mx.gpu())})
                comm.average([Array(mx.gpu())])
                comm.sum_in_background(Array(mx.gpu()))
        return [world.calls for world in worlds]

    return calls_of


def test_only_several_ranks_need_horovod(open_with):
    for num_ranks in (None, 1):
        comm = open_with(None, num_ranks)
        assert (comm.rank, comm.world_size, comm.sum([3])) == (0, 1, [3])
    with pytest.raises(
        ConfigError, match='expected Horovod built with MXNet for 2 ranks; start one rank, or run'
    ):
        open_with(None, 2)


def test_counts_and_texts_are_exchanged_on_the_cpu_by_names_for_each_length(open_with):
    """NCCL would refuse arrays of two ranks that share a GPU. Horovod's response cache drops a name
    whose shape changes, and then all ranks negotiate again."""
    calls, world = [], Horovod(0, 2)

    def record(array, name, **keys):
        calls.append((name, array))
        return array

    world.allreduce = world.allgather = record
    comm = open_with(world, 2)
    with mx.cpu(1):  # stands for a GPU as current context
        for counts in ([1, 2**40], [1], [0, 0, 0], [4, 5]):
            assert comm.sum(counts) == counts
        comm.barrier()
        sums = {(name, array.shape) for name, array in calls}
        assert len(sums) == len(dict(sums)) == 3
        assert comm.gather_object('ü') == ['ü']
    assert [array.context for _, array in calls] == [mx.cpu(0)] * 6


@pytest.mark.parametrize('name', ['broadcast', 'average'])
def test_exchange_is_marked_until_its_sums_are_made(monkeypatch, open_with, name):
    """A report of a stalled rank then names the ranks that it waits for."""
    events = []

    @contextmanager
    def mark():
        events.append('begin')
        yield
        events.append('end')

    monkeypatch.setattr(Array, 'wait_to_read', lambda array: events.append(array))
    comm = open_with(Horovod(0, 2), 2, exchange=mark)
    events.clear()  # of the start
    array = Array(mx.cpu())
    if name == 'broadcast':
        comm.broadcast({'a': array})
    else:
        comm.average([array])
    assert events == ['begin', array, 'end']


@pytest.mark.parametrize(
    'num_ranks, ranks_per_node, num_sharing, subset, leaders',
    json_table("""
4 | 4 | 1 | 4 | [[0, 1, 2, 3]]
2 | 2 | 2 | 1 | []
3 | 3 | 2 | 2 | [[0, 2]]
8 | 4 | 2 | 8 | [[0, 2, 4, 6]]
6 | 3 | 3 | 3 | [[0, 3]]
4 | 4 | 2 | 3 | [[0, 2]]
7 | 7 | 2 | 5 | [[0, 2, 4], [0, 2, 4, 6]]
"""),
)
def test_only_leaders_of_gpus_use_nccl(
    calls_of, num_ranks, ranks_per_node, num_sharing, subset, leaders
):
    calls = calls_of(num_ranks, ranks_per_node, num_sharing, subset)
    every = [call for rank_calls in calls for call in rank_calls]
    found = {ranks for ranks, _, device, *_ in every if device == 'gpu'}
    assert sorted(map(list, found)) == leaders
    for ranks in {call[0] for call in every}:
        requested = [[c[:3] for c in rank_calls if c[0] == ranks] for rank_calls in calls]
        assert tuple(r for r, rank_calls in enumerate(requested) if rank_calls) == ranks
        assert all(requested[r] == requested[ranks[0]] for r in ranks)
        # Horovod refuses a name that is in use in a set
        assert len(set(requested[ranks[0]])) == len(requested[ranks[0]])
    back = [c[:2] for c in every if c[1].endswith('/back') and not c[3]]
    assert len(back) == len(set(back))  # only the values from the leader


def test_places_of_ranks_are_checked_before_sharing(calls_of):
    with pytest.raises(ConfigError, match='which are to share a GPU'):
        calls_of(2, 1, 2, 2)


GLOO, MPI = 'HOROVOD_CONTROLLER=gloo', 'OMPI_COMM_WORLD_SIZE=2 PMIX_NAMESPACE=1'


@pytest.mark.parametrize(
    'env, has_mpi, has_gloo, message',
    json_table(f"""
"{GLOO}" | true  | false | "built without Gloo; start the ranks with launch/mpirun.sh"
"{MPI}"  | false | true  | "built without MPI; use launch/horovodrun.sh"
# the number of ranks that an earlier launcher left
"OMPI_COMM_WORLD_SIZE=2" | true | true | "SIZE: got '2' in the environment without a launcher"
"HOROVOD_SIZE=2"         | true | true | "SIZE: got '2' in the environment without a launcher"
"{GLOO}" | false | true  | ""
"{MPI}"  | true  | false | ""
"HOROVOD_SIZE=2 HOROVOD_GLOO_RENDEZVOUS_ADDR=h1" | false | true | ""
""       | false | false | ""  # a single process uses neither
"""),
)
def test_missing_controller_of_horovod_is_named(env, has_mpi, has_gloo, message):
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        check_controller(variables(env), has_mpi, has_gloo)


@pytest.mark.parametrize(
    'body, last, code',
    [
        ('time.sleep(1.5)', 'time.sleep(600)', -signal.SIGABRT),
        ('time.sleep(600)', 'time.sleep(0.5)', 0),
        (
            'threading.main_thread().join()',
            'threading.Thread(target=time.sleep, args=(4,)).start()',
            0,
        ),
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
        watched = (str(thread.native_id),)
        threading.Thread(target=horovod.end_without, args=watched, daemon=True).start()
        {last}"""
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True)
    assert done.returncode == code
    assert ('thread of Horovod that exchanges gradients has ended' in done.stderr) == bool(code)
