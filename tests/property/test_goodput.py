"""Parts of the elapsed time of made-up runs with faults and stops, compared with the history from
which their records were made."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlperf_rn50.mllog.elapsed import make_resume
from mlperf_rn50.mllog.goodput import PARTS, find_goodput
from mlperf_rn50.runfolder.records import PartRecord

SECONDS = st.integers(1, 500).map(lambda n: n / 10)
# work of an attempt by part, up to its last checkpoint, and after it
WORK = st.fixed_dictionaries({name: SECONDS for name in ('reading', 'training', 'evaluation')})
LOST = st.fixed_dictionaries({name: SECONDS for name in ('training', 'evaluation', 'stall')})
# Each attempt but the last: its work, its checkpoint, lost work (None: a requested stop, which
# follows the checkpoint at once), the wait for its next start, and the start-up of that.
ATTEMPTS = st.lists(st.tuples(WORK, SECONDS, st.none() | LOST, SECONDS, SECONDS), max_size=5)
RECORD_OF = {'evaluation': 'evaluation', 'reading': 'reading', 'stall': 'stall'}
LOST_PART = {
    'training': 'steps_repeated',
    'evaluation': 'evaluation_repeated',
    'stall': 'stalled',
}


class History:
    """A run, made of one piece of time after the other."""

    def __init__(self, start_up_s):
        self.now = 0.0
        self.parts = {**dict.fromkeys(PARTS, 0.0), 'start_up': start_up_s}
        self.records = [PartRecord('start_up', 0.0, start_up_s)]
        self.resumes = []

    def spend(self, part, seconds, record=None):
        self.now += seconds
        self.parts[part] += seconds
        if record:
            self.records.append(PartRecord(record, self.now, seconds))

    def attempt(self, work):
        for name, seconds in work.items():
            self.spend(name, seconds, RECORD_OF.get(name))

    def fail(self, checkpoint_s, lost, wait_s, start_up_s, clock_s):
        self.spend('checkpoints', checkpoint_s, 'checkpoint')
        for name, seconds in (lost or {}).items():
            self.spend(LOST_PART[name], seconds, RECORD_OF.get(name))
        stopped_s = self.now
        self.spend('waiting' if lost else 'paused', wait_s)
        self.spend('start_up', start_up_s, 'start_up')
        self.resumes.append(
            make_resume(
                self.resumes,
                clock_s,
                resumed_s=self.now,
                stopped_s=stopped_s,
                is_pause=lost is None,
            )
        )


@given(first_s=SECONDS, attempts=ATTEMPTS, last=WORK)
def test_parts_are_those_of_the_history_and_add_up(first_s, attempts, last):
    history = History(first_s)
    kept = [sum(work.values()) + checkpoint_s for work, checkpoint_s, *_ in attempts]
    for (work, checkpoint_s, *rest), clock_s in zip(attempts, accumulate(kept)):
        history.attempt(work)
        history.fail(checkpoint_s, *rest, clock_s)
    history.attempt(last)
    goodput = find_goodput(history.resumes, history.records, history.now)
    assert goodput.parts == pytest.approx(history.parts)
    assert sum(goodput.parts.values()) == pytest.approx(first_s + history.now)
    progress_s = history.parts['training'] + history.parts['evaluation']
    assert goodput.share == pytest.approx(progress_s / (first_s + history.now))


def test_run_that_did_not_record_its_start_has_no_goodput():
    records = [PartRecord('start_up', 90.0, 5.0), PartRecord('checkpoint', 95.0, 1.0)]
    assert find_goodput([], records, 100.0) is None
    assert find_goodput([], [], 100.0) is None
    assert find_goodput([], [PartRecord('start_up', 0.0, 5.0)], None) is None


def test_run_that_lost_the_record_of_a_later_start_has_no_goodput():
    resumes = [make_resume([], 30.0, resumed_s=60.0, stopped_s=40.0, is_pause=False)]
    starts = [PartRecord('start_up', 0.0, 5.0), PartRecord('start_up', 60.0, 5.0)]
    assert find_goodput(resumes, starts, 100.0) and find_goodput(resumes, starts[:1], 100.0) is None


@given(
    parts=st.lists(
        st.tuples(
            st.sampled_from(['start_up', 'reading', 'evaluation', 'checkpoint', 'stall', 'x']),
            st.floats(0, 1e9),
            st.floats(0, 1e9),
        ),
        max_size=20,
    )
)
def test_parts_of_any_records_add_up(parts):
    starts = [PartRecord('start_up', time_s, 5.0) for time_s in (0.0, 60.0)]
    records = [*starts, *(PartRecord(*part) for part in parts)]
    resumes = [make_resume([], 30.0, resumed_s=60.0, stopped_s=40.0, is_pause=False)]
    goodput = find_goodput(resumes, records, 100.0)
    assert goodput.elapsed_s == pytest.approx(105.0)
    assert min(goodput.parts.values()) >= 0
