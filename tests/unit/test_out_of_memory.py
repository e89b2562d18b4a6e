"""Explanations of out-of-memory errors, kills and aborts."""

import re
import signal

import pytest
from helpers import json_table, write_files

from mlperf_rn50.system import out_of_memory as oom
from mlperf_rn50.system.out_of_memory import MemorySample, explain_error, explain_kill

GB = 10**9


@pytest.mark.parametrize(
    'name, text',
    [
        ('memory.events', 'oom 3\noom_kill 2\noom_group_kill 0\n'),
        ('memory.oom_control', 'oom_kill_disable 0\nunder_oom 0\noom_kill 2\n'),
    ],
)
def test_kills_are_counted_in_both_versions(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert oom.oom_kills(tmp_path) == 2 and oom.oom_kills(tmp_path / 'none') is None


BEFORE, AFTER = MemorySample(int(1.5 * GB), 0, 1), MemorySample(int(1.5 * GB), 0, 2)


# in GB
@pytest.mark.parametrize(
    'limit, num_ranks, expected',
    json_table("""
4    | 4  | "the memory limit of the cgroup is 4.0 GB, 4 ranks used about 6.0 GB together, 1.5 GB \
each; start at most 2 ranks of this size on a host, or lower "
1    | 1  | "the memory limit of the cgroup is 1.0 GB, this rank used 1.5 GB; lower "
null | 50 | "the 64.0 GB of the host are exhausted, .* at most 42 ranks"
64   | 2  | "the 64.0 GB of the host .*; lower .*, or start fewer ranks on a host"
"""),
)
def test_explanation_of_a_kill(limit, num_ranks, expected):
    limit = limit and limit * GB
    assert re.match(
        f'out of memory: {expected}', explain_kill(BEFORE, AFTER, limit, 64 * GB, num_ranks)
    )
    assert explain_kill(BEFORE, BEFORE, limit, 64 * GB, num_ranks) == ''


def test_explanation_of_an_abort(monkeypatch):
    def explain(used: int, limit: int | None, number: int = signal.SIGABRT) -> str:
        monkeypatch.setattr(oom, 'soft_limit', lambda kind: limit)
        return oom.explain_death(number, MemorySample(0, used, 1), AFTER, 1)

    nearly = int(3.9 * GB)
    assert explain(nearly, None) == explain(GB, 4 * GB) == explain(GB, GB, signal.SIGTERM) == ''
    assert 'is limited to 4.0 GB (ulimit -v), 3.9 GB used; raise' in explain(nearly, 4 * GB)


@pytest.mark.parametrize(
    'error',
    [
        MemoryError(),
        RuntimeError('std::bad_alloc'),
        OSError(12, 'Cannot allocate memory'),
        RuntimeError('[x] src/storage: Failed to allocate CPU Memory'),
    ],
)
def test_explanation_of_out_of_memory_errors(error):
    assert explain_error(error).startswith('out of memory: ')
    assert explain_error(ValueError('no such memory cell')) == ''


@pytest.mark.parametrize(
    'error',
    [
        RuntimeError("can't start new thread"),
        BlockingIOError(11, 'Resource temporarily unavailable'),
        RuntimeError('Error in DALI: Resource temporarily unavailable'),
    ],
)
def test_explanation_of_too_few_processes(monkeypatch, error):
    monkeypatch.setattr(oom, 'free_processes', lambda: (3, 'ulimit -u is 40'))
    assert re.search('can be started .*; ulimit -u is 40; raise the limit', explain_error(error))


def test_exit_code_of_a_library_is_explained(monkeypatch):
    monkeypatch.setattr(oom, 'soft_limit', lambda kind: None)
    assert [oom.explain_exit(code) for code in (0, 1, 2, 75, 130, 137)] == [''] * 6
    assert 'of a library' in oom.explain_exit(17) and 'memory' not in oom.explain_exit(5)
    monkeypatch.setattr(oom, 'soft_limit', lambda kind: 3 * GB)
    assert 'probably out of memory, as ulimit -v is 3.0 GB' in oom.explain_exit(17)


def test_sample_of_a_dead_process_keeps_earlier_values(tmp_path, monkeypatch):
    monkeypatch.setattr(oom, 'PROC', tmp_path)
    status = 'Name:\tx\nVmPeak:\t 2000 kB\nVmHWM:\t 1000 kB\n'
    write_files(tmp_path, {'7/status': status, 'vmstat': 'pgfault 9\noom_kill 3\n'})
    sample = oom.take_sample(7, None)
    assert sample == MemorySample(1024000, 2048000, 3)
    (tmp_path / '7/status').write_text('Name:\tx\nState:\tZ (zombie)\n')
    assert oom.take_sample(7, None, sample) == sample
