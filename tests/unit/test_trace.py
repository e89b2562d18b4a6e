"""Traced steps: clocks of ranks, untrusted files, and the Chrome trace format."""

import json
from itertools import pairwise

import numpy as np
import pytest
from made_traces import dump, ranks_of, step, steps

from mlperf_rn50.analysis.run_data import RunData
from mlperf_rn50.analysis.why import trace as why_trace
from mlperf_rn50.analysis.why.trace import PHASES, align, read_traces, write_perfetto
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.text import grouped


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path, 0)


def test_planted_offsets_of_clocks_are_removed():
    aligned, error_s = align({0: steps(at=7.0), 3: steps(at=1007.0), 4: steps(at=5.0)})
    assert error_s == pytest.approx(0, abs=1e-9)
    for rank in (3, 4):
        assert [s.times for s in aligned[rank]] == [pytest.approx(s.times) for s in aligned[0]]


def test_error_is_the_95th_percentile_of_the_worst_rank():
    # 95 of 100 residuals are at most 4 ms
    jitter = [0.0] * 81 + [1e-3, -1e-3] * 5 + [4e-3, -4e-3] * 4 + [9.0]
    late = [
        step(k, 50.0 + k, exchanged_s=50.09 + k + j, updated_s=70.0 + k)
        for k, j in enumerate(jitter)
    ]
    exact = ([step(k, at + k) for k in range(100)] for at in (0.0, 9.0))
    aligned, error_s = align(dict(enumerate([*exact, late])))
    assert error_s == pytest.approx(4e-3, rel=1e-6)
    assert aligned[2][0].times[0] == pytest.approx(0)  # the median jitter is 0


def test_rank_without_a_common_step_is_omitted():
    assert list(align({0: steps(3), 1: [step(9)], 2: steps(3)})[0]) == [0, 2]


def test_waiting_lasts_until_the_slowest_rank_has_computed():
    aligned, _ = align({0: steps(2), 1: steps(2, at=400.0, slow=0.02)})
    for rank, waiting in ((0, 0.02), (1, 0.0)):
        times = aligned[rank][0].times
        assert len(times) == len(PHASES) + 1
        assert np.diff(times[3:6]) == pytest.approx([waiting, 0.01])
    # a bucket is sent when the last rank has it ready
    assert np.array(aligned[0][0].buckets) == pytest.approx(
        np.array([(0.04, 0.06, 0.085), (0.06, 0.08, 0.09)])
    )


def test_file_is_read_as_it_was_written(run):
    for rank in (0, 10, 2):
        dump(run, rank, steps(3))
    dump(RunFolder(run.dir, 1), 5, steps(3))  # of another run
    aligned = read_traces(run).steps
    assert list(aligned) == [0, 2, 10]
    assert [s.step for s in aligned[10]] == [1, 2, 3]


@pytest.mark.parametrize(
    'changes',
    f"""
"asked_s": 0.5
"updated_s": 0.05
"start_s": 1e9
"start_s": -1.0
"updated_s": NaN
"updated_s": 1e300
"step": -1
"step": 2.5
"buckets": [[0.3, 0.25]]
"buckets": [[0.0, 0.25]]
"buckets": [[0.25, 9.0]]
"buckets": {[[0.24, 0.25]] * 1000}
"buckets": [[0.25]]
"start_s": "0"
""".strip().split('\n'),
    ids=lambda changes: changes[:20],
)
def test_step_with_impossible_values_is_skipped(run, changes):
    wrong = step(3, 0.2, **json.loads(f'{{{changes}}}'))
    dump(run, 0, [step(1), step(2, 0.1), wrong, step(4, 0.3)])
    assert [s.step for s in read_traces(run)[0][0]] == [1, 2, 4]


def test_lines_that_are_no_steps_are_skipped(run):
    lines = b'[' * 100_000, b'\xff', b'{}', b'null', b'{"step": 1}', b'x' * (1 << 22), b''
    run.trace(0).write_bytes(b'\n'.join(lines))
    assert read_traces(run) == ({}, 0.0, '')
    dump(run, 0, [step(1)])
    assert [s.step for s in read_traces(run)[0][0]] == [1]


@pytest.mark.parametrize('most, expected', [(120, [2] * 6), (119, [1] * 6), (49, [1] * 4)])
def test_total_of_all_ranks_is_bounded_and_stated(run, monkeypatch, most, expected):
    """A step has 10 blocks."""
    for rank in range(6):
        dump(run, rank, steps(3))
    assert read_traces(run).note == ''
    monkeypatch.setattr(why_trace, 'MAX_BLOCKS', most)
    traces = read_traces(run)
    assert list(map(len, traces.steps.values())) == expected
    assert '6 traced ranks' in traces.note and f'{most:,}' in traces.note


def test_only_the_newest_attempt_with_traces_is_read_and_others_are_named(run):
    # 0: of an earlier version
    for rank, attempt_s in enumerate((200.0, 200.0, 100.0, 0.0)):
        dump(run, rank, [step(k, attempt_s=attempt_s) for k in (1, 2)])
    traces = read_traces(run)
    assert list(traces.steps) == [0, 1]
    assert 'earlier attempt' in traces.note and 'rank 2, 3' in traces.note
    assert traces.note in write_perfetto(RunData(run), run.dir / 'out.json')


def test_folders_and_links_in_the_place_of_traces_are_skipped(run):
    run.trace(0).mkdir()
    run.trace(1).symlink_to('/dev/zero')
    (run.dir / 'trace_0_002.jsonl').write_text('')
    dump(run, 3, steps(1))
    assert list(read_traces(run)[0]) == [3]


def test_perfetto_file_has_a_process_per_host_and_a_thread_per_rank_and_bucket(run):
    for rank in range(3):
        dump(run, rank, steps(2, at=900.0 * rank, slow=0.01 * rank))
    data = RunData(run, records=[ranks_of('h1', 'h2\x1b', 'h2\x1b')])
    sentence = write_perfetto(data, run.dir / 'out.json')
    assert 'out.json: 2 steps of 3 ranks' in sentence and '0.00 ms' in sentence
    events = json.loads((run.dir / 'out.json').read_text())['traceEvents']
    names = grouped((e for e in events if e['ph'] == 'M'), lambda e: e['name'])
    processes, threads = (
        [e['args']['name'] for e in names[kind]] for kind in ('process_name', 'thread_name')
    )
    assert {*processes} == {'h1', 'h2?'}
    assert threads == [
        f'rank {r}{bucket}' for r in range(3) for bucket in ('', ' bucket 0', ' bucket 1')
    ]
    # Blocks of a thread, which has one process, follow each other in microseconds.
    by_thread = grouped((e for e in events if e['ph'] == 'X'), lambda e: e['tid'])
    for blocks in by_thread.values():
        assert len({e['pid'] for e in blocks}) == 1
        own = [e for e in blocks if not e['name'].startswith('step ')]
        assert all(a['ts'] + a['dur'] <= b['ts'] + 1e-4 for a, b in pairwise(own))
    computing = [(e['ts'], e['dur']) for e in events if e['name'] == 'forward and backward']
    assert computing == [
        pytest.approx((1e5 * k + 3e4, length)) for length in (3e4, 4e4, 5e4) for k in range(2)
    ]


def test_perfetto_file_without_a_trace_or_folder_is_refused(run):
    with pytest.raises(ConfigError, match='run.trace 20@100'):
        write_perfetto(RunData(run), run.dir / 'out.json')
    assert not list(run.dir.iterdir())
    dump(run, 0, steps(1))
    with pytest.raises(ConfigError, match='--perfetto'):
        write_perfetto(RunData(run), run.dir / 'missing/out.json')
