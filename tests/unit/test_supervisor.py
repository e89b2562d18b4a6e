"""Choice of failing hosts; attempts and restarts are in tests/property/test_supervisor.py."""

from mlperf_rn50.launch.supervisor import bad_hosts
from mlperf_rn50.runfolder.records import Failure, note_failure, read_failures


def test_host_that_failed_twice_without_progress_is_bad(tmp_path):
    for job, host, cause in [
        ('a', 'h1', 'does not answer'),
        ('b', 'h2', 'killed'),
        ('c', 'h2', 'does not answer'),
        ('c', 'h2', 'killed'),
        ('c', 'h3', 'killed'),
    ]:
        note_failure(tmp_path, Failure(job, host, cause, 0 if cause == 'killed' else None))
    failures = read_failures(tmp_path)
    assert bad_hosts(failures, ['h1', 'h2', 'h3']) == {'h2': 'killed'}
    # two failures in one attempt count once
    assert bad_hosts(failures[2:], ['h1', 'h2', 'h3']) == {}
    assert bad_hosts(failures, ['h2']) == {}  # the last host is kept
    cut = [Failure(job, host, 'had no contact') for job in ('1', '2') for host in ('h2', 'h3')]
    assert bad_hosts(cut, ['h1', 'h2', 'h3']) == {}  # the launcher's own link was cut
    assert bad_hosts(cut, 'h1 h2 h3 h4'.split()) == {
        'h2': 'had no contact',
        'h3': 'had no contact',
    }
    assert bad_hosts([f for f in cut if f.host == 'h2'], ['h1', 'h2']) == {'h2': 'had no contact'}
