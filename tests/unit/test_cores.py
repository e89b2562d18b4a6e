"""Use of the cores of a rank, from given counters of the kernel and from this process."""

import os
import threading

import pytest
from helpers import HANG_LIMIT_S

from mlperf_rn50.train.comm import cores
from mlperf_rn50.train.comm.cores import CoreMeter, count_others, longest_waits


def test_busy_thread_that_waited_most_counts_for_its_kind():
    before = {'1': ('compute', 1.0, 1.0), '2': ('exchange', 0.0, 0.0)}
    now = {
        '1': ('compute', 5.0, 2.0),
        '3': ('compute', 2.0, 3.0),
        '4': ('compute', 0.1, 1.0),
        '2': ('exchange', 1.0, 9.0),
    }
    assert longest_waits(before, now) == {'compute': (2.0, 3.0), 'exchange': (1.0, 9.0)}
    other = {'1': ('compute', 2.0, 1.0)}  # of another thread with this number
    assert longest_waits({'1': ('compute', 9.0, 9.0)}, other) == {'compute': (2.0, 1.0)}


def rank(cpus, cpu_s, machine='a', **others):
    return {'cores': cpus, 'cpu_s': cpu_s, 'machine': machine, **others}


def test_unknown_use_of_the_cores_remains_unknown():
    assert count_others([rank('0', 2)]) == [{'cores': '0', 'cpu_s': 2, 'num_sharing': 1}]


def test_counters_of_the_cores_of_a_rank(tmp_path):
    stat, ticks = tmp_path / 'stat', os.sysconf('SC_CLK_TCK')
    stat.write_text(
        'cpu 9 9 9 9 9 9 9 9\ncpu0 1 2 4 800 900 8 16 32 5 5\ncpu1 7 7 7 7 7 7 7 7 7 7\n'
    )
    assert cores.read_cores([0], stat) == pytest.approx((31 / ticks, 32 / ticks))
    assert cores.read_cores([0, 7], stat) is None  # a container with numbers of its own


def test_threads_that_exchange_are_told_apart():
    is_over = threading.Event()
    before = set(cores.thread_ids())
    thread = threading.Thread(target=is_over.wait, args=(HANG_LIMIT_S,))
    thread.start()
    own = set(cores.thread_ids()) - before
    kinds = {thread_id: kind for thread_id, (kind, *_) in cores.read_threads(own).items()}
    is_over.set()
    thread.join()
    if kinds:  # a kernel may not count them
        assert {kinds.pop(thread_id) for thread_id in own} == {'exchange'}
        assert kinds.pop(str(os.getpid())) == 'compute'
        assert 'exchange' not in kinds.values()


def test_changed_cores_are_read_again(monkeypatch):
    places = iter([{0}, {0, 1}, {0, 1}])
    monkeypatch.setattr(cores.os, 'sched_getaffinity', lambda _: next(places))
    monkeypatch.setattr(cores, 'read_cores', lambda cpus: (5.0 * len(cpus), 0.0))
    meter = CoreMeter()
    first, second = meter.take(), meter.take()
    assert (first['cores'], second['cores']) == ('0-1', '0-1')
    assert 'cores_s' not in first and second['cores_s'] == 0
