"""What is said of a process that the kernel ended for want of memory."""
import signal

import pytest
from helpers import write_files

from mlperf_rn50.system import out_of_memory as oom
from mlperf_rn50.system.out_of_memory import Sample, explain_abort, explain_error, explain_kill

V2 = 'low 0\nhigh 0\nmax 812\noom 3\noom_kill 2\noom_group_kill 0\n'
V1 = 'oom_kill_disable 0\nunder_oom 0\noom_kill 2\n'
GB = 10**9


@pytest.mark.parametrize('name, text', [('memory.events', V2), ('memory.oom_control', V1)])
def test_kills_are_counted_in_both_versions(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert oom.oom_kills(tmp_path) == 2 and oom.oom_kills(tmp_path / 'none') is None


BEFORE, AFTER = Sample(int(1.5 * GB), 0, 1), Sample(int(1.5 * GB), 0, 2)


@pytest.mark.parametrize('after, limit, num_ranks, said', [
    (BEFORE, 4 * GB, 4, ''),
    (AFTER, 4 * GB, 4, 'out of memory: the memory limit of its cgroup is 4.0 GB, its 4 ranks used about 6.0 GB '
     'together, 1.5 GB each; 2 of this size fit: start at most 2 on a host, or lower train.local_batch_size'),
    (AFTER, 1 * GB, 1, 'out of memory: the memory limit of its cgroup is 1.0 GB, this rank used 1.5 GB; lower '
     'train.local_batch_size'),
    (AFTER, None, 50, 'out of memory: the host has 64.0 GB and ran out of it, its 50 ranks used about 75.0 GB '
     'together, 1.5 GB each; 42 of this size fit: start at most 42 on a host, or lower train.local_batch_size'),
    (AFTER, 64 * GB, 2, 'out of memory: the host has 64.0 GB and ran out of it, its 2 ranks used about 3.0 GB '
     'together, 1.5 GB each; lower train.local_batch_size, or start fewer ranks on a host')])
def test_what_a_kill_means(after, limit, num_ranks, said):
    assert explain_kill(BEFORE, after, limit, 64 * GB, num_ranks) == said


def test_what_an_abort_means():
    assert explain_abort(int(3.9 * GB), None) == explain_abort(GB, 4 * GB) == ''
    assert explain_abort(int(3.9 * GB), 4 * GB).startswith(
        'out of memory: its address space is limited to 4.0 GB (ulimit -v), of which it used 3.9 GB; raise the limit')
    assert oom.explain_death(signal.SIGTERM, BEFORE, AFTER, 1) == ''


@pytest.mark.parametrize('error', [MemoryError(), RuntimeError('std::bad_alloc'), OSError(12, 'Cannot allocate memory'),
                                   RuntimeError('[x] src/storage: Failed to allocate CPU Memory')])
def test_errors_for_want_of_memory(error):
    assert explain_error(error).startswith('out of memory: ')


def test_other_errors_are_none():
    assert explain_error(ValueError('no such memory cell')) == ''
    assert explain_error(RuntimeError("can't start new thread")) == ''  # without ulimit -v, of another limit


def test_a_sample_keeps_what_a_dead_process_no_longer_tells(tmp_path, monkeypatch):
    monkeypatch.setattr(oom, '_PROC', tmp_path)
    status = 'Name:\tx\nVmPeak:\t 2000 kB\nVmHWM:\t 1000 kB\n'
    write_files(tmp_path, {'7/status': status, 'vmstat': 'pgfault 9\noom_kill 3\n'})
    sample = oom.take_sample(7, None)
    assert sample == Sample(1024000, 2048000, 3)
    (tmp_path / '7/status').write_text('Name:\tx\nState:\tZ (zombie)\n')
    assert oom.take_sample(7, None, sample) == sample
