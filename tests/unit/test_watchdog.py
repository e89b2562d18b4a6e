"""Watcher of a rank: reports of dead and stalled ranks, and no leftover processes."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from types import SimpleNamespace

import psutil
import pytest
from helpers import HANG_LIMIT_S, table, untimed, values

from mlperf_rn50.errors import RankLost
from mlperf_rn50.runfolder.jsonl import read_lines
from mlperf_rn50.runfolder.records import Failure, StepSpans, read_failures
from mlperf_rn50.system import cgroup
from mlperf_rn50.train.watchdog import heartbeat as heartbeats
from mlperf_rn50.train.watchdog import stall_report
from mlperf_rn50.train.watchdog import watcher as watchers
from mlperf_rn50.train.watchdog.heartbeat import PHASES, Heartbeat, Pauses, RankState
from mlperf_rn50.train.watchdog.stall_report import (
    explain,
    find_late,
    full_folders,
    read_states,
    stalled_folder,
)
from mlperf_rn50.train.watchdog.watcher import Action, Health, Watcher, assess, run_rank

PROGRAM = """
import os, signal, sys, time
from mlperf_rn50.train.watchdog.watcher import PHASES, run_watched
def rest(heartbeat):
    while not heartbeat.is_stop_requested:
        time.sleep(0.1)
def rank(heartbeat):
    heartbeat.beat('training', 41)
    heartbeat.beat('training', 42)
    {body}
    return 7
sys.exit(run_watched(rank, dict.fromkeys(PHASES, 0) | {limits_s}, {folder}, True))
"""


def program(body, limits_s='{}', folder=None):
    return PROGRAM.format(
        body=body, limits_s=limits_s, folder=folder and f'__import__("pathlib").Path("{folder}")'
    )


def start(body, limits_s='{}', folder=None, command=(), **variables):
    code = program(body, limits_s, folder)
    return subprocess.Popen(
        [*command, sys.executable, '-c', code],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, 'HOROVOD_RANK': '0', **variables},
    )


def error_of(process):
    return process.communicate(timeout=HANG_LIMIT_S)[1]


def start_ready(body, **keys):
    """Start a rank; return the watcher and the rank process."""
    process = start(f'print(os.getpid(), flush=True); {body}', **keys)
    return process, psutil.Process(int(process.stdout.readline()))


def assert_ends(process):
    psutil.wait_procs([process], timeout=HANG_LIMIT_S)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


# --- decisions
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'changes, now, action, reason',
    table("""
 | 1299.9 | WAIT |
 | 1300.0 | RECORD |
limit_s=0 | 1e9 | WAIT |
stacks="x" | 1309.9 | WAIT |
stacks="" rank=2 | 1311.9 | WAIT |
stacks="x" | 1310.0 | END_AND_EXPLAIN | no progress for 310 s (comm.stall_limit_s)
stacks="" rank=500 | 1320.0 | END_AND_EXPLAIN | no progress for 320 s (comm.stall_limit_s)
stacks="" is_stopped=true | 1300.0 | END | stopped (SIGSTOP) for 300 s
is_stopped=true | 1299.0 | WAIT |
stacks="" phase="evaluation" | 1310 | END_AND_EXPLAIN | no progress for 310 s (comm.eval_limit_s)
orphaned_at=1000.0 | 1015.0 | WAIT |
orphaned_at=1000.0 limit_s=0 | 1015.1 | END | the launcher has ended
"""),
)
def test_action_for_health_of_rank(changes, now, action, reason):
    usual = {'rank': 0, 'phase': 'training', 'limit_s': 300.0, 'beat_at': 1000.0}
    found = assess(Health(**{**usual, **values(changes)}), float(now))
    assert found == (Action[action], reason)


def watcher_of(heartbeat, **limits_s):
    limits_s = {**dict.fromkeys(PHASES, 5), **limits_s}
    own, parent = os.getpid(), os.getppid()
    return Watcher(own, heartbeat, limits_s, folder=None, can_stop=False, stacks=-1, parent=parent)


def test_heartbeat_restarts_clock_with_limit_of_phase():
    heartbeat = Heartbeat()
    watcher = watcher_of(heartbeat, evaluation=9)
    watcher.refresh()
    before = watcher.health
    watcher.refresh()
    assert watcher.health == before and before.limit_s == 5
    heartbeat.beat('evaluation')
    watcher.health = replace(before, stacks='of an earlier stall')
    watcher.refresh()
    after = watcher.health
    assert after.beat_at > before.beat_at
    assert (after.phase, after.limit_s, after.stacks) == ('evaluation', 9, None)


@pytest.mark.parametrize(
    'training_s, evaluation_s, limit_s',
    [(5, 300, 15), (0, 300, 300), (900, 300, 300), (5, 0, 15), (0, 0, 0)],
)
def test_stopped_rank_is_ended_before_the_ranks_that_wait_for_it(
    monkeypatch, training_s, evaluation_s, limit_s
):
    """It may be in an evaluation while others wait in the next step; its beat is 10 s older than
    its stop."""
    now_s, states = [100.0], iter([True, *[False] * 4, True])
    monkeypatch.setattr(
        watchers, 'time', SimpleNamespace(monotonic=lambda: now_s[0], time=time.time)
    )
    monkeypatch.setattr(stall_report, 'is_stopped', lambda _: next(states))
    heartbeat = Heartbeat()
    limits_s = {'start-up': 900, 'training': training_s, 'evaluation': evaluation_s}
    watcher = watcher_of(heartbeat, **limits_s)
    watcher.refresh()
    assert watcher.health.limit_s == 900
    heartbeat.beat('evaluation')
    watcher.health = replace(watcher.health, num_beats=heartbeat.num_beats)
    for now_s[0] in (102.5, 105.0, 107.5, 110.0, 112.0):
        watcher.refresh()
    assert watcher.health.limit_s == limit_s


@pytest.mark.parametrize('times_s, silent_s', [(range(1, 61), 60.0), ((1, 61), 1.5)])
def test_time_in_which_the_watcher_was_suspended_is_no_silence(monkeypatch, times_s, silent_s):
    """The rank was suspended with it, as by scontrol suspend."""
    now_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0], time=time.time)
    monkeypatch.setattr(watchers, 'time', clock)
    watcher = watcher_of(Heartbeat())
    for now_s[0] in times_s:
        watcher.refresh()
    assert now_s[0] - watcher.health.beat_at == silent_s


@pytest.mark.parametrize(
    'fixed_s, pauses, expected',
    table("""
300 | 19 x 0.5        | 300
300 | 20 x 0.5        | 20
300 | 30 x 10         | 50
300 | 90 x 10, 10 x 1 | 50
300 | 1 x 10, 199 x 1 | 20
300 | 1 x 30, 199 x 1 | 60
300 | 30 x 100        | 300
5   | 30 x 0.5        | 5
0   | 30 x 0.5        | 0
"""),
)
def test_limit_is_learned_from_the_pauses_of_a_phase(fixed_s, pauses, expected):
    """Five times the 99th percentile or twice the longest pause, from 20 s to the fixed limit."""
    counts = Pauses()
    for number, seconds in (group.split(' x ') for group in pauses.split(', ')):
        for _ in range(int(number)):
            counts.add(float(seconds))
    # pauses are counted in classes
    assert float(expected) <= counts.limit_s(float(fixed_s)) <= 1.2 * float(expected)


def test_watcher_learns_the_limits_of_training_and_evaluation_only(monkeypatch):
    now = iter(range(1000))
    monkeypatch.setattr(heartbeats, 'time', SimpleNamespace(monotonic=lambda: float(next(now))))
    heartbeat = Heartbeat()
    watcher = watcher_of(heartbeat, **dict.fromkeys(PHASES, 300))
    found = {}
    for phase in PHASES:
        heartbeat.beat(phase)
        watcher.refresh()
        assert (watcher.health.limit_s, watcher.health.is_learned) == (300, False)
        for _ in range(20):
            heartbeat.beat()
        watcher.refresh()
        found[phase] = watcher.health.limit_s, watcher.health.is_learned
    learned = ['training', 'evaluation']
    assert found == {phase: (20, True) if phase in learned else (300, False) for phase in PHASES}


def test_wait_for_a_slower_rank_has_the_configured_limit():
    heartbeat = Heartbeat()
    for _ in range(25):
        heartbeat.beat('evaluation')
    assert heartbeat.limit_s(300) == 20
    with heartbeat.exchange():
        assert heartbeat.limit_s(300) == 300


def test_limit_is_learned_anew_for_steps_of_another_size():
    heartbeat = Heartbeat()
    heartbeat.beat('training')
    for _ in range(30):
        heartbeat.beat()
    limits = [heartbeat.limit_s(300)]
    heartbeat.forget('training')
    assert [*limits, heartbeat.limit_s(300)] == [20, 300]


def test_learned_limit_is_named_in_the_reason():
    health = Health(3, 'training', limit_s=20.0, beat_at=0.0, is_learned=True, stacks='x')
    _, reason = assess(health, 40.0)
    assert 'no progress for 40 s' in reason and 'learned' in reason and 'stall_limit_s' in reason


def test_oom_kill_counted_during_exit_is_attributed_to_rank(tmp_path, monkeypatch, capsys):
    (tmp_path / 'memory.events').write_text('oom_kill 3\n')
    monkeypatch.setattr(cgroup, 'memory_cgroup', lambda: tmp_path)
    watcher = watcher_of(Heartbeat())
    for number, cause in ((3, 'SIGKILL)\n'), (4, 'SIGKILL): out of memory: ')):
        (tmp_path / 'memory.events').write_text(f'oom_kill {number}\n')
        watcher.refresh()
        assert watcher.exit_code(signal.SIGKILL) == 1 and cause in capsys.readouterr().err


# --- explanation of a stall
# -------------------------------------------------------------------------


def state(rank, num_reached, doing='waiting', phase='training', time_s=0.0):
    return RankState(rank, f'h{rank + 1}', 11, phase, doing, num_reached, time_s)


STEP_12 = 'waiting in the exchange of step 12'


@pytest.mark.parametrize(
    'rank, size, states, message',
    table("""
0 | 4 | 20 20 19:reading 20 | STEP_12 for rank 2 on h3 (busy: reading)
2 | 4 | 20 20 19:x 20 | busy: x; ranks 0, 1, 3 waiting for it in the exchange of step 12
0 | 3 | 20 18:x | STEP_12 for rank 1 on h2 (busy: x); no report from rank 2
0 | 3 | 20 20 | STEP_12; no report from rank 2
0 | 2 | 20 20 | STEP_12, which all ranks have reached; check the network
0 | 2 | 5:waiting:init 0:x:init | waiting in an exchange (init) for rank 1 on h2 (busy: x)
0 | 99 | 3:x | busy: x; no report from ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ... 98 (98)
0 | 12 | 9 8:x 8:x 8:x 8:x 8:x 8:x 8:x 8:x 8:x 8:x 8:x | STEP_12 for TEN_RANKS...
"""),
)
def test_explanation_of_stalled_rank(rank, size, states, message):
    """states: of each rank, the number of exchanges that it reached, what it does and its phase."""
    known = [
        state(k, int(n), *doing)
        for k, (n, *doing) in enumerate(text.split(':') for text in states.split())
    ]
    own = known.pop(int(rank))
    ten = ''.join(f'rank {k} on h{k + 1} (busy: x), ' for k in range(1, 11))
    message = message.replace('TEN_RANKS', ten).replace('STEP_12', STEP_12)
    assert explain(own, known, int(size)) == message


@pytest.mark.parametrize('reached, late', [((9, 9), ''), ((9, 8), '1'), ((9, 8, 8), '')])
def test_late_rank_is_known_if_it_is_of_one_host(reached, late):
    assert find_late([state(k, n) for k, n in enumerate(reached)]) == late


def test_outdated_and_invalid_states_are_ignored(tmp_path):
    now = time.time()
    known = [asdict(state(rank, 1, time_s=now - 7200 * rank)) for rank in range(2)]
    for rank, text in enumerate([*map(json.dumps, known), '{"rank": 2}', 'half']):
        (tmp_path / f'rank_{rank}.json').write_text(text)
    assert [s.rank for s in read_states(tmp_path, now - 600)] == [0]


def test_each_start_has_its_own_folder(tmp_path):
    first, second = (
        stalled_folder(tmp_path, {'MLPERF_RN50_JOB': job, 'SLURM_JOB_ID': '7'})
        for job in ('1-2', '1-3')
    )
    assert first == tmp_path / 'stalled/1-2' and first != second
    assert stalled_folder(tmp_path, {'PMIX_NAMESPACE': '../x'}).parent == tmp_path / 'stalled'


def test_activity_of_rank():
    heartbeat = Heartbeat()
    heartbeat.beat('training', 3)

    def now():
        return heartbeat.state().doing, heartbeat.state().num_reached

    reading = heartbeat.track_reading(now() for _ in range(2))
    assert next(reading) == ('reading data', 0) and now() == ('computing', 0)
    heartbeat.mark_exchange(True)
    assert now() == ('waiting', 1)
    heartbeat.mark_exchange(False)
    with heartbeat.exchange():
        assert now() == ('waiting', 2)
    assert now() == ('computing', 2) and next(reading)[0] == 'reading data'


def test_heartbeat_keeps_the_last_64_steps_in_order():
    heartbeat = Heartbeat()
    assert heartbeat.last_steps() == []
    spans = [StepSpans(step, *(step + k / 8 for k in range(6))) for step in range(1, 71)]
    for each in spans:
        heartbeat.record_step(each)
    assert heartbeat.last_steps() == spans[6:]


def test_hanging_work_is_abandoned():
    assert stall_report.run_limited(60, lambda: 'done') == 'done'
    assert stall_report.run_limited(0.1, lambda: time.sleep(600) or '') == ''
    assert stall_report.run_limited(60, lambda: 1 / 0) == ''


def test_full_folder_is_named(monkeypatch):
    monkeypatch.setattr(
        'shutil.disk_usage',
        lambda p: SimpleNamespace(free=0 if p == '/dev/shm' else 10**9, total=64 * 10**6),
    )
    assert full_folders() == '/dev/shm is full (0 bytes free of 64 MB)'


def test_truncated_index_of_the_data_is_named_as_a_cause(tmp_path):
    path = tmp_path / 'train.index.npy'
    path.write_bytes(bytes(1 << 16))
    body = (
        f'import numpy as np; index = np.memmap({str(path)!r}, "u1"); '
        f'os.truncate({str(path)!r}, 0); index.sum()'
    )
    cause = 'a file mapped into memory, such as <split>.index.npy of the data, was truncated'
    error = error_of(start(body, TMPDIR=str(tmp_path)))
    assert f'training: killed by signal 7 (SIGBUS): {cause}' in error


# --- with processes
# ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'status, code, message',  # status as returned by waitpid
    [
        (7 << 8, 7, ''),
        (75 << 8, 75, ''),
        (signal.SIGTERM, 1, ''),
        (signal.SIGKILL, 1, 'killed by signal 9 (SIGKILL)'),
        (137 << 8, 1, 'killed by signal 9 (SIGKILL)'),
        (signal.SIGSEGV, 1, 'killed by signal 11 (SIGSEGV)'),
        (40, 1, 'killed by signal 40 (signal 40)'),
    ],
)
def test_exit_code_and_message_of_rank(status, code, message, capsys):
    assert watcher_of(Heartbeat()).exit_code(status) == code
    text = f'mlperf-rn50: rank 0 on {os.uname().nodename}, step 0, start-up: {message}\n'
    assert capsys.readouterr().err == (text if message else '')


def test_stacks_and_state_of_stalled_rank_are_written(tmp_path):
    body = (
        'import ctypes; from mlperf_rn50.runfolder.records import StepSpans; '
        'heartbeat.record_step(StepSpans(42, *range(6))); heartbeat.beat(); '
        'list(heartbeat.track_reading(ctypes.PyDLL(None).sleep(1000) or 1 for _ in range(9)))'
    )
    process = start(
        body,
        '{"training": 0.5}',
        tmp_path / 'stalled/4-2',
        HOROVOD_RANK='2',
        HOROVOD_SIZE='4',
        MLPERF_RN50_JOB='4-2',
    )
    path = tmp_path / 'stalled/4-2/rank_2.txt'
    err = error_of(process)
    assert f'busy: reading data; no report from ranks 0, 1, 3; stacks: {path}\n' in err
    assert 'step 42, training: no progress for ' in err and process.returncode == 1
    text = path.read_text()
    assert text.startswith(f'rank 2 on {os.uname().nodename}, step 42, training, reading data; ')
    assert 'File "<string>", line 10 in rank' in text
    assert json.loads(path.with_suffix('.json').read_text())['doing'] == 'reading data'
    steps = read_lines(path.with_name('rank_2_steps.jsonl'), StepSpans)
    assert [s for _, s in steps] == [StepSpans(42, *range(6))]
    [failure] = map(json.loads, (tmp_path / 'failures.jsonl').read_text().splitlines())
    assert (failure['job'], failure['rank']) == ('4-2', 2)


def test_stopped_rank_is_ended_if_report_cannot_be_written(tmp_path):
    (tmp_path / 'file').touch()
    process = start('os.kill(os.getpid(), signal.SIGSTOP)', '{"training": 0.5}', tmp_path / 'file')
    err = error_of(process)
    assert process.returncode == 1 and err.endswith(' s\n')
    assert 'step 42, training: stopped (SIGSTOP) for ' in err


def test_time_for_which_a_rank_was_stopped_is_recorded():
    # The watcher records a stop when it has noticed its end, and on a busy machine it may not
    # notice a short one.
    body = 'taken = []; [os.kill(os.getpid(), signal.SIGSTOP) or time.sleep(0.2) or '
    body += 'taken.append(heartbeat.take_stopped_s()) for _ in range(99) if not any(taken)]; '
    body += 'print(sum(taken), heartbeat.take_stopped_s(), flush=True)'
    process, rank = start_ready(body)
    while process.poll() is None:
        time.sleep(0.2)
        with suppress(psutil.NoSuchProcess):
            rank.resume()
    out, _ = process.communicate(timeout=HANG_LIMIT_S)
    stopped_s, again_s = map(float, out.split())
    assert stopped_s > 0 and again_s == 0


def test_early_signal_is_a_stop_request():
    # so early that the watcher may not have installed its handlers
    process = start('os.kill(os.getppid(), signal.SIGUSR1); rest(heartbeat)')
    error_of(process)
    assert process.returncode == 7


def test_rank_gets_stop_request_if_launcher_dies_which_is_recorded(tmp_path):
    body = f'print(os.getppid(), flush=True); rest(heartbeat); os.mkdir("{tmp_path}/requested")'
    launcher = start(
        body,
        folder=tmp_path / 'stalled/4-2',
        command=['sh', '-c', '"$@" & wait', 'sh'],
        MLPERF_RN50_JOB='4-2',
    )
    watcher = psutil.Process(int(launcher.stdout.readline()))
    assert watcher.ppid() == launcher.pid
    launcher.kill()
    assert_ends(watcher)
    assert (tmp_path / 'requested').exists()
    [failure] = read_failures(tmp_path)
    assert failure.is_outside and failure.cause.endswith('on this host has ended')


@pytest.mark.parametrize('is_stop_requested', [False, True])
def test_rank_ends_with_killed_watcher_and_reports_unless_stop_requested(is_stop_requested):
    process, rank = start_ready(
        'rest(heartbeat); print("requested", flush=True); time.sleep(600)', HOROVOD_RANK='1'
    )
    if is_stop_requested:  # like mpirun: SIGTERM, then SIGKILL a second later
        process.terminate()
        assert process.stdout.readline() == 'requested\n'
    process.kill()
    place = f'mlperf-rn50: rank 1 on {os.uname().nodename}, step 42, training: '
    text = f'{place}the watcher was killed (SIGKILL, or out of memory); the rank ends with it\n'
    assert error_of(process) == ('' if is_stop_requested else text)
    assert_ends(rank)


@pytest.mark.parametrize(
    'body, cause, is_outside',
    table(r"""
os.kill(os.getpid(), signal.SIGKILL) | killed by signal 9 (SIGKILL) | outside
os.kill(os.getpid(), signal.SIGSEGV) | killed by signal 11 (SIGSEGV) |
os.kill(os.getppid(), signal.SIGKILL); rest(heartbeat) | the watcher was killed | outside
raise RuntimeError("Traceback:\n  no memory for 64 GB") | no memory for 64 GB |
raise MemoryError | out of memory: an allocation failed (MemoryError) |
from mlperf_rn50.errors import RankLost; raise RankLost("lost") | |
raise RuntimeError("Horovod has been shut down") | |
 | |
"""),
)
def test_cause_of_the_end_of_a_rank_is_recorded(tmp_path, body, cause, is_outside):
    """Not recorded are consequences of the end of another rank, and the end of a program."""
    process = start(body, folder=tmp_path / 'stalled/4-2', HOROVOD_RANK='2', MLPERF_RN50_JOB='4-2')
    error_of(process)  # until the rank, too, has closed its output
    expected = Failure('4-2', os.uname().nodename, cause, 2, bool(is_outside))
    assert untimed(read_failures(tmp_path)) == ([expected] if cause else [])


def test_horovod_that_has_been_shut_down_is_the_loss_of_another_rank():
    def program(heartbeat):
        heartbeat.beat('training', 7)
        raise RuntimeError('Check failed: Horovod has been shut down.')

    with pytest.raises(RankLost, match='connection to another rank') as raised:
        run_rank(program, Heartbeat(), can_stop=False)
    assert 'step 7, training' in raised.value.where


@pytest.mark.slow  # the alarm takes 12 s
def test_rank_holding_the_gil_ends_with_its_watcher():
    process, rank = start_ready('import ctypes; [ctypes.PyDLL(None).sleep(1000) for _ in range(9)]')
    process.kill()
    assert_ends(rank)
