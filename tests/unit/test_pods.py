"""Pods of an Indexed Job: who belongs together, whether the job gets on, what Kubernetes is told, how ranks end."""
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import pytest
from helpers import HANG_LIMIT_S, ROOT
from hypothesis import given
from hypothesis import strategies as st

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.launch import pod, pod_door, pod_progress
from mlperf_rn50.launch.attempts import MAX_STUCK
from mlperf_rn50.launch.pod_door import LOST_S, Answer, Door, Gathering, Orders, Report
from mlperf_rn50.launch.pod_progress import Attempt, exit_code, next_attempt
from mlperf_rn50.system import meeting
from mlperf_rn50.train.run_folder import new_run

SECRET = 'abcdefgh' * 4
ORDERS = Orders(4711, 'of-the-ranks', None)


def gather(num_pods=2, now=0.0):
    """A gathering in which pods named p0, p1 and so on run."""
    made = Gathering(num_pods)
    for index in range(num_pods):
        made.report(Report(index, f'p{index}'), f'10.0.0.{index}', now)
    assert made.is_complete
    made.let_in(ORDERS)
    return made


def test_pods_are_let_in_together():
    made = Gathering(3)
    assert made.report(Report(2, 'c'), '10.0.0.2', 0.0).why == 'pod 0, 1 is not there'
    assert made.report(Report(0, 'a'), '127.0.0.1', 1.0).state == 'wait' and not made.is_complete
    assert made.report(Report(1, 'b'), '10.0.0.1', 2.0).state == 'wait' and made.is_complete
    made.let_in(ORDERS)
    assert made.report(Report(2, 'c'), '10.0.0.2', 3.0) == Answer(made.generation, 'run', '', ORDERS)
    assert made.first_address in ('10.0.0.1', '10.0.0.2')


def test_a_pod_that_went_while_the_others_gathered_is_waited_for_again():
    made = Gathering(2)
    made.report(Report(1, 'b'), '', 0.0)
    assert made.report(Report(0, 'a'), '', LOST_S + 1).why == 'pod 1 is not there'
    made.report(Report(1, 'its replacement'), '', LOST_S + 2)
    assert made.is_complete


@pytest.mark.parametrize('report, why', [
    (Report(1, 'another'), 'pod 1 was replaced'), (Report(1, 'p1', code=1), 'a rank of pod 1 ended with exit code 1'),
    (Report(1, 'p1', code=-9), 'a rank of pod 1 ended with exit code -9')])
def test_a_lost_pod_ends_the_generation_for_all(report, why):
    made = gather()
    made.report(report, '', 1.0)
    for index in range(2):
        answer = made.report(Report(index, f'p{index}', made.generation), '', 2.0)
        assert (answer.state, answer.why, answer.orders) == ('over', why, None)
    made.report(Report(0, 'p0', made.generation, 1), '', 3.0)  # as a consequence
    assert made.look(4.0).why == why


def test_a_silent_pod_ends_the_generation():
    made = gather()
    made.report(Report(0, 'p0', made.generation), '', LOST_S)
    assert made.look(LOST_S).state == 'run'
    assert made.look(LOST_S + 0.1).why == 'pod 1 has been silent for 20 s'


@pytest.mark.parametrize('code', [0, 75])
def test_a_pod_whose_ranks_ended_in_order_may_be_silent_or_replaced(code):
    made = gather()
    assert not made.is_left(0.0) and made.is_left(7.0)
    made.report(Report(1, 'p1', made.generation, code), '', 1.0)
    for now in (LOST_S, 2 * LOST_S):
        made.report(Report(0, 'p0', made.generation), '', now)
    assert made.report(Report(1, 'another'), '', 2 * LOST_S).state == 'over'
    assert made.look(2 * LOST_S).state == 'run' and made.is_left(1.0)


def test_pods_of_another_generation_change_nothing():
    made = Gathering(2)
    made.report(Report(0, 'a'), '', 0.0)
    assert made.report(Report(1, 'b', 'the one before'), '', 0.0).state == 'over' and not made.is_complete
    assert made.report(Report(2, 'c'), '', 0.0).state == 'over'


EVENTS = st.lists(st.tuples(st.floats(0, 15), st.integers(-1, 3), st.sampled_from('xyz'), st.booleans(),
                            st.sampled_from([None, None, None, 0, 75, 1, 2, -9])))


@given(st.integers(1, 3), EVENTS)
def test_whatever_happens_only_one_set_of_pods_runs_and_what_is_over_stays_over(num_pods, events):
    made, now, runs, is_over = Gathering(num_pods), 0.0, {}, False
    for delay, index, name, is_stale, code in events:
        now += delay
        answer = made.report(Report(index, name, 'stale' if is_stale else '', code), '', now)
        if made.is_complete:
            made.let_in(ORDERS)
        if answer.state == 'run':
            assert not is_over and not is_stale and made.is_complete
            assert runs.setdefault(index, name) == name and 0 <= index < num_pods
        is_running_over = made.look(now).state == 'over'
        assert is_running_over >= is_over
        is_over = is_running_over
        assert made.look(now).orders is None or not is_over


@pytest.fixture
def door():
    made = Door(Gathering(1), SECRET, 0, True)
    made.start()
    yield made
    made.shutdown()
    made.server_close()


def test_the_door_answers_reports_and_only_those(door):
    report = pod_door.report_to('127.0.0.1', door.port, SECRET)
    assert report(Report(0, 'a')).state == 'wait'
    door.gathering.let_in(ORDERS)
    assert report(Report(0, 'a')).orders == ORDERS
    assert pod_door.report_to('127.0.0.1', door.port, 'another')(Report(0, 'a')) is None
    for body in (b'', b'1', b'[]', b'{}', b'\xff', b'{"index": "0", "pod": "a"}', b'{"index": 0, "pod": "a", "x": 1}',
                 b'{"index": true, "pod": "a"}', json.dumps(asdict(Report(0, 'a', '', 'x'))).encode()):
        assert meeting.ask('127.0.0.1', door.port, 'PUT', '/pod', SECRET, body)[0] == 400
    assert pod_door.report_to('127.0.0.1', 1, SECRET)(Report(0, 'a')) is None


# What pod 0's ranks and the run say, and what the job is told.
@pytest.mark.parametrize('codes, end, is_asked, num_stuck, expected', [
    ([0, 0], 'converged', False, 0, 0), ([-9, 0], 'converged', False, 3, 0), ([1, 1], 'aborted', False, 0, 1),
    ([1, -9], 'failed', True, 0, 1), ([75, 75], 'interrupted', True, 3, 75), ([75, 75], 'interrupted', False, 3, 75),
    ([2, -15], None, False, 1, 2), ([1, -9], None, False, 0, 75), ([1, -9], None, False, 2, 75),
    ([1, -9], None, False, 3, 1), ([1, -9], None, True, 3, 75), ([], None, True, 1, 75), ([0], None, False, 1, 75)])
def test_pod_0_says_what_becomes_of_the_job(codes, end, is_asked, num_stuck, expected):
    assert exit_code(0, codes, end, is_asked, num_stuck) == expected


CODES = st.lists(st.sampled_from([0, 1, 2, 75, -9, -15]))
ENDS = st.sampled_from([None, 'converged', 'aborted', 'failed', 'interrupted'])


@given(st.integers(1, 9), CODES, ENDS, st.booleans(), st.integers(0, 9))
def test_other_pods_never_fail_the_job_but_for_a_mistake(index, codes, end, is_asked, num_stuck):
    got = exit_code(index, codes, end, is_asked, num_stuck)
    assert got == (2 if 2 in codes else 0 if codes and set(codes) == {0} else 75)


@given(CODES, ENDS, st.booleans(), st.integers(0, 9))
def test_only_a_run_at_its_target_is_done(codes, end, is_asked, num_stuck):
    got = exit_code(0, codes, end, is_asked, num_stuck)
    assert got in (0, 1, 2, 75) and (got == 0) == (end == 'converged')


@given(st.lists(st.integers(-1, 4), min_size=1))
def test_attempts_are_counted_until_a_newer_checkpoint(steps):
    last, expected, before = None, 0, -2
    for step in steps:
        last = next_attempt(last, 'job', 0, (0, step))
        expected, before = 1 if step > before else expected + 1, step
        assert last.number == expected
    assert next_attempt(last, 'another job', 0, (0, steps[-1])).number == 1


def append(run, **values):
    with open(run.metrics, 'a') as f:
        f.write(json.dumps(values) + '\n')


def make_run(folder, number, *ends, steps=()):
    run = pod_progress.RunFolder(folder, number)
    run.result.write_text('')
    for status in ends:
        append(run, event='end', status=status, epochs_to_converge=None)
    append(run, event='train', step=5)
    for step in steps:
        (run.checkpoints / f'step_{step:08d}').mkdir(parents=True)
    return run


@pytest.mark.parametrize('ends, steps, expected', [
    ([], [], None), ([], [5, 10], 0), (['interrupted'], [5], 0), (['interrupted', 'converged'], [5], None),
    (['aborted'], [5], None), (['failed'], [5], None)])
def test_an_unfinished_newest_run_is_gone_on_with(tmp_path, ends, steps, expected):
    make_run(tmp_path, 0, *ends, steps=steps)
    attempt, resume = pod_progress.plan_attempt(tmp_path, 'job')
    assert resume == expected and attempt == Attempt('job', 1 if resume is None else 0, 1, (0, steps[-1]) if steps
                                                     else (-1, -1))
    (tmp_path / 'result_1_v0.6.txt').touch()  # no run's own log
    assert pod_progress.resumable_run(tmp_path) == expected
    make_run(tmp_path, 1)
    assert pod_progress.resumable_run(tmp_path) is None


def test_the_ranks_get_the_number_that_was_planned(tmp_path):
    for lost in range(2):  # a run that was cut short before it wrote anything keeps its number
        attempt, _ = pod_progress.plan_attempt(tmp_path, 'job')
        assert new_run(tmp_path).index == attempt.run == lost


def test_a_job_that_does_not_get_on_gives_up(tmp_path):
    numbers = []
    for _ in range(MAX_STUCK + 1):
        attempt, _ = pod_progress.plan_attempt(tmp_path, 'job')
        pod_progress.write_attempt(tmp_path, attempt)
        numbers.append(attempt.number)
    assert numbers == [1, 2, 3, 4]
    make_run(tmp_path, 0, steps=[5])
    assert pod_progress.plan_attempt(tmp_path, 'job')[0].number == 1


@pytest.mark.parametrize('end, expected', [('converged', 0), ('aborted', 1), ('failed', 1), ('interrupted', None)])
def test_a_latecomer_finds_the_end_of_its_own_job_only(tmp_path, end, expected):
    make_run(tmp_path, 3, end)
    assert pod_progress.finished_code(tmp_path, 'job') is None
    pod_progress.write_attempt(tmp_path, Attempt('job', 3, 1, (-1, -1)))
    assert pod_progress.finished_code(tmp_path, 'job') == expected
    assert pod_progress.finished_code(tmp_path, 'another') is None
    (tmp_path / 'pods.json').write_text('[1]')
    assert pod_progress.read_attempt(tmp_path) is None


ENV = {'JOB_COMPLETION_INDEX': '1', 'MLPERF_RN50_NODES': '2', 'MLPERF_RN50_RANKS_PER_NODE': '4',
       'MLPERF_RN50_MEETING': 'job-0.service', 'MLPERF_RN50_SECRET': SECRET}


def test_settings_come_from_the_environment():
    got = pod.parse_settings(ENV)
    assert (got.index, got.num_pods, got.ranks_per_node, got.port, got.start_limit_s) == (1, 2, 4, 29400, 900)
    assert got.job not in SECRET and got.job == pod.parse_settings({**ENV, 'JOB_COMPLETION_INDEX': '0'}).job


@pytest.mark.parametrize('change, said', [
    ({'JOB_COMPLETION_INDEX': ''}, 'JOB_COMPLETION_INDEX: got nothing, expected a number from 0 to 1'),
    ({'JOB_COMPLETION_INDEX': '2'}, 'JOB_COMPLETION_INDEX: got 2, expected a number from 0 to 1'),
    ({'MLPERF_RN50_NODES': 'x'}, 'MLPERF_RN50_NODES: got x'), ({'MLPERF_RN50_RANKS_PER_NODE': '0'}, 'NODE: got 0'),
    ({'MLPERF_RN50_MEETING_PORT': '65536'}, 'PORT: got 65536'), ({'MLPERF_RN50_MEETING': ''}, 'MEETING: got nothing'),
    ({'MLPERF_RN50_SECRET': 'short'}, 'MLPERF_RN50_SECRET: got 5 characters, expected 16 or more')])
def test_mistakes_in_the_environment_are_said(change, said):
    with pytest.raises(ConfigError, match=said):
        pod.parse_settings({**ENV, **change})


def test_a_rank_knows_its_place_and_the_secret_of_its_generation_only():
    got = pod.rank_environment({**ENV, 'PATH': '/bin'}, pod.parse_settings(ENV), 2, '10.0.0.5', ORDERS)
    assert {k: v for k, v in got.items() if k.startswith('HOROVOD')} == {
        'HOROVOD_RANK': '6', 'HOROVOD_SIZE': '8', 'HOROVOD_LOCAL_RANK': '2', 'HOROVOD_LOCAL_SIZE': '4',
        'HOROVOD_CROSS_RANK': '1', 'HOROVOD_CROSS_SIZE': '2'}
    assert got['MLPERF_RN50_RENDEZVOUS'] == '10.0.0.5:4711' and got['PATH'] == '/bin'
    assert got['MLPERF_RN50_SECRET'] == 'of-the-ranks' and SECRET not in got.values()


def test_a_user_without_an_entry_gets_a_name_and_a_home():
    def writable(*folders):
        return folders.__contains__
    assert pod.user_variables({'HOME': '/'}, 1234, False, writable('/tmp'), '/tmp') == {
        'USER': 'uid1234', 'LOGNAME': 'uid1234', 'HOME': '/tmp'}
    assert pod.user_variables({'HOME': '/home/a'}, 1, True, writable('/tmp', '/home/a'), '/tmp') == {}
    assert pod.user_variables({'USER': 'a'}, 1, False, writable('/dev/shm'), '/dev/shm') == {
        'HOME': '/dev/shm', 'TMPDIR': '/dev/shm'}


class Stop:
    is_set = False


def start_ranks(*programs):
    ranks = pod.Ranks()
    for number, program in enumerate(programs):
        ranks.start(number, [sys.executable, '-c', program], os.environ)
    return ranks


LISTENS = ('import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))\n'
           'signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])\ntime.sleep(900)')


def test_asked_to_stop_ranks_that_only_start_hear_of_it(monkeypatch):
    ranks, stop = start_ranks(LISTENS.format(code=75), LISTENS.format(code=75)), Stop()
    stop.is_set = True
    assert pod.watch(ranks, lambda code: Answer('g', 'run'), stop) == '' and ranks.codes == {0: 75, 1: 75}


def test_one_lost_rank_ends_the_others_and_is_told(monkeypatch):
    monkeypatch.setattr(pod, '_LAST_WORDS_S', 1.0)
    ranks, told = start_ranks('raise SystemExit(1)', 'import time; time.sleep(900)'), []
    assert pod.watch(ranks, lambda code: told.append(code) or Answer('g', 'run'), Stop()) == 'a rank was lost'
    assert ranks.codes == {0: 1, 1: -signal.SIGKILL} and told[-1] == 1


@pytest.mark.parametrize('answer, why', [(Answer('g', 'over', 'pod 1 was replaced'), 'pod 1 was replaced'),
                                         (None, 'pod 0 has been silent for 20 s')])
def test_what_happens_elsewhere_ends_the_ranks(monkeypatch, answer, why):
    monkeypatch.setattr(pod, '_LAST_WORDS_S', 0.5)
    monkeypatch.setattr(pod, 'REPORT_PERIOD_S', 0.1)
    assert pod._why_over(None, LOST_S) == ''
    monkeypatch.setattr(pod, '_why_over', lambda a, silent_s, real=pod._why_over: real(a, silent_s + LOST_S))
    ranks = start_ranks('import time; time.sleep(900)')
    assert pod.watch(ranks, lambda code: answer, Stop()) == why and ranks.codes == {0: -signal.SIGKILL}


def test_the_first_process_takes_in_strangers():
    """What ranks leave behind becomes a child of a container's first process."""
    stranger = os.posix_spawn('/bin/true', ['true'], {})
    ranks = start_ranks('import time; time.sleep(900)')
    while os.path.exists(f'/proc/{stranger}'):
        ranks.reap()
    assert ranks.codes == {} and not ranks.have_ended
    ranks.send(signal.SIGKILL)
    while not ranks.have_ended:
        ranks.reap()
    assert ranks.codes == {0: -signal.SIGKILL}


@pytest.mark.parametrize('change, arguments, code, said', [
    ({'JOB_COMPLETION_INDEX': 'x'}, ['--config', ROOT / 'launch/configs/digits_cpu.yaml'], 2, 'got x, expected'),
    ({}, [], 2, '--config'), ({}, ['--config', '/no/such.yaml'], 2, 'cannot read the configuration'),
    ({'MLPERF_RN50_START_LIMIT_S': '1', 'MLPERF_RN50_MEETING': 'no.such.host.'},
     ['--config', ROOT / 'launch/configs/digits_cpu.yaml'], 75, 'gave up after 1 s (MLPERF_RN50_START_LIMIT_S): '
     'no.such.host. has no address yet')])
def test_a_pod_that_cannot_start_says_why(change, arguments, code, said):
    done = subprocess.run([sys.executable, '-m', 'mlperf_rn50.launch.pod', *arguments], capture_output=True, text=True,
                          env={**os.environ, **ENV, **change}, timeout=HANG_LIMIT_S)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


def test_asked_to_go_while_it_waits_a_pod_goes_at_once():
    env = {**os.environ, **ENV, 'MLPERF_RN50_MEETING': 'no.such.host.'}
    waiting = subprocess.Popen([sys.executable, '-m', 'mlperf_rn50.launch.pod', '--config',
                                ROOT / 'launch/configs/digits_cpu.yaml'], env=env, stderr=subprocess.PIPE, text=True)
    while not _catches(waiting.pid, signal.SIGTERM):
        time.sleep(0.05)
    waiting.terminate()
    _, said = waiting.communicate(timeout=HANG_LIMIT_S)
    assert waiting.returncode == 75 and 'asked to stop before the ranks were started' in said


def _catches(pid, number):
    caught = next(line for line in open(f'/proc/{pid}/status') if line.startswith('SigCgt')).split()[1]
    return bool(int(caught, 16) >> number - 1 & 1)
