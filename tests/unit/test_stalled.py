"""Whom a rank that stands still waits for, from what the others say."""
import json
import time
from dataclasses import asdict

import pytest

from mlperf_rn50.train.stalled import State, explain, read_states, stalled_folder, within


def state(rank, num_reached, doing='waiting', phase='training', time_s=0.0):
    return State(rank, f'h{rank + 1}', 11, phase, doing, num_reached, time_s)


@pytest.mark.parametrize('own, states, size, said', [
    (0, [state(0, 20), state(1, 20), state(2, 19, 'reading data'), state(3, 20)], 4,
     'waiting in the exchange of step 12 for rank 2 on h3, which has not reached it (busy: reading data); ranks 0, 1 '
     'and 3 have'),
    (2, [state(0, 20), state(1, 20), state(2, 19, 'computing'), state(3, 20)], 4,
     'busy: computing; ranks 0, 1 and 3 wait for it in the exchange of step 12'),
    (0, [state(0, 20), state(1, 18, 'computing')], 3,
     'waiting in the exchange of step 12 for rank 1 on h2, which has not reached it (busy: computing); rank 0 has; '
     'nothing is known of rank 2'),
    (0, [state(0, 20), state(1, 20)], 3,
     'waiting in the exchange of step 12, which ranks 0 and 1 have reached; nothing is known of rank 2'),
    (0, [state(0, 20), state(1, 20)], 2, 'waiting in the exchange of step 12, which all ranks have reached and which '
     'does not end; look at the network between them'),
    (1, [state(0, 20, 'reading data'), state(1, 20, 'reading data')], 2,
     'busy: reading data, as far as ranks 0 and 1'),
    (0, [state(0, 5, phase='start-up'), state(1, 0, 'start-up', 'start-up')], 2,
     'waiting in an exchange (start-up) for rank 1 on h2, which has not reached it (busy: start-up); rank 0 has'),
    (0, [state(0, 3, 'computing')], 1, 'busy: computing')])
def test_whom_a_rank_waits_for(own, states, size, said):
    assert explain(own, states, size) == said


def test_only_this_stall_is_believed(tmp_path):
    now = time.time()
    for rank, time_s in ((0, now), (1, now - 7200)):
        (tmp_path / f'rank_{rank}.json').write_text(json.dumps(asdict(state(rank, 1, time_s=time_s))))
    (tmp_path / 'rank_2.json').write_text('{"rank": 2}')
    (tmp_path / 'rank_3.json').write_text('half')
    assert [s.rank for s in read_states(tmp_path, now - 600)] == [0]


def test_each_start_has_a_folder_of_its_own(tmp_path):
    first, second = (stalled_folder(tmp_path, {'MLPERF_RN50_JOB': job, 'SLURM_JOB_ID': '7'}) for job in ('1-2', '1-3'))
    assert first == tmp_path / 'stalled/1-2-7' and first != second
    assert stalled_folder(tmp_path, {'PMIX_NAMESPACE': '../x'}).parent == tmp_path / 'stalled'


def test_work_that_hangs_is_left():
    assert within(60, lambda: 'done') == 'done'
    assert within(0.2, lambda: time.sleep(600) or '') is None
    assert within(60, lambda: 1 / 0) is None
