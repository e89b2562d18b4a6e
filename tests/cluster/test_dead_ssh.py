"""The network of a host, or its sshd alone, dies while a run is in each of its phases."""
from contextlib import nullcontext

from cluster.conftest import run_metrics
from cluster.test_faults import BARE, assert_ended, assert_nothing_lost

SILENT = 'host h2 (with rank 1) does not answer; last recorded: step '


def test_a_link_is_cut_while_a_checkpoint_is_written(start, cluster):
    job = start(*BARE, '--comm.stall_limit_s', 0)
    with job.held_in('checkpoint'):
        cluster.set_link(cluster.hosts[1], False)
    assert_ended(job, r'host h2 \(with rank 1\) does not answer; last recorded: step \d+, (training|evaluation)',
                 code=1)
    assert_nothing_lost(job.run_dir)


def test_sshd_dies_in_each_phase_and_the_run_reaches_its_target(start, cluster):
    job, host = start(*BARE, '--restarts', 3, '--train.target_accuracy', 0.8), cluster.hosts[1]
    for number, phase in enumerate(('training', 'evaluation', 'checkpoint'), 1):
        # Phases that take a moment are held; in the other one, the rest of the run takes its course.
        with nullcontext(job.wait_for_phase(phase)) if phase == 'training' else job.held_in(phase):
            cluster.kill_sshd(host)
        job.wait_for(lambda number=number: job.output.count(SILENT) == number, 'the message')
        cluster.start_sshd(host)
        job.wait_for_restart(number)
    code, output = job.end()
    assert code == 0, output
    steps = [m['step'] for m in run_metrics(job.run_dir, 'resumed')]
    assert len(steps) == 3 and steps == sorted(steps)  # nothing is lost in between
