"""mlperf-rn50 watch: facts of runs, terminal output, lines, JSON and page."""

import json
import os
import re
from dataclasses import replace
from datetime import datetime, timezone
from io import BytesIO, TextIOWrapper

import pytest
from helpers import call, table, values
from live_runs import NOW_S, course, evaluation, rank, reference, times, train, write_live
from rich.console import Console

from mlperf_rn50.analysis.watch.follower import Follower
from mlperf_rn50.analysis.watch.live_page import render_page
from mlperf_rn50.analysis.watch.run_facts import facts_of, status_text
from mlperf_rn50.analysis.watch.run_state import Checkpoints, LiveRun, UsedEnergy
from mlperf_rn50.analysis.watch.screen import draw_curves, render
from mlperf_rn50.text import duration

WRITTEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
HOSTILE = '\x1b[31m<script>alert(1)</script>[red]&'


@pytest.fixture
def folder(tmp_path):
    """Folder of a run with a reference, ranks and three evaluations; a fourth has more correct
    answers than images."""
    return write_live(
        tmp_path / 'run',
        reference(*range(1, 11)),
        train(10),
        *(evaluation(e, 15 * e) for e in (1, 2, 3)),
        evaluation(4, 101),
        course(3),
        times(rank(0, 1.0), rank(1, 1.5, 'n2'), stragglers=['rank 1 is slow: 50 % above']),
        train(70),
    )


@pytest.fixture
def run(folder):
    return Follower(folder).look(NOW_S)


def text_of(runs, width=80, rows=24, encoding='utf-8', price=None):
    stream = TextIOWrapper(BytesIO(), encoding)
    console = Console(file=stream, width=width, height=rows, force_terminal=False)
    console.print(render(runs, console, price, rows))
    stream.seek(0)
    return re.sub('(?m) +$', '', stream.read())


def test_durations_are_short():
    texts = map(duration, (0, 99, 99.6, 720, 5990, 12000, 183_600))
    assert ', '.join(texts) == '0 s, 99 s, 2 min, 12 min, 1 h 40 min, 3 h 20 min, 2 d 3 h'


def test_facts_of_running_run(run):
    rows = facts_of(run, 3.0).rows
    assert [[name.text, text.text] for name, text in rows] == table("""
status | running, last written 3 s ago
run | digits (not ImageNet), 2 nodes, 2 ranks, batch 64, sgd, seed 1
epoch | 3.50 of 10, 38 s since the start
Top-1 | 45.00 % at epoch 3, target 74.90 %
reference | at epoch 3: on course: 5 of 5 reference runs
speed | 128 images/s, 10 s/epoch, loss 2, learning rate 0.1
limit | 92 % of the time is outside steps, evaluations and checkpoints
rank skew | 20.0 % above the median: rank 1 on n2 takes 0.15 s per step; \
ranks wait 0.05 s per step on average
left | 62 s to epoch 10, the end of the schedule
target in | 2 s to 22 s, if reached at epoch 4 to 6, as in the reference runs
checkpoints | none
node-hours | 0.0211 so far (cost 0.0633), 0.0556 at epoch 10 (cost 0.167)
energy | not measured: no telemetry of the run
""")
    levels = {name.text: text.level for name, text in rows if text.level}
    assert levels == {'status': 'good', 'rank skew': 'warn'}


def test_node_hours_are_unknown_if_a_resume_has_changed_the_nodes(run):
    changed = replace(run, has_changed_nodes=True)
    texts = {name.text: text.text for name, text in facts_of(changed, 3.0).rows}
    assert texts['node-hours'].startswith('unknown') and changed.node_hours() is None


def test_energy_to_the_end_grows_with_the_time_left_and_not_with_a_pause(run):
    """1 kWh in an hour on the clock, after 11 h with a pause, and one more hour left."""
    hour = 3600.0
    used = UsedEnergy(hour, cpu_kwh=1.0, gpu_kwh=None, reason='')
    facts = facts_of(replace(run, time_s=11 * hour, left_s=hour, energy=used), None)
    texts = {name.text: text.text for name, text in facts.rows}
    assert texts['energy'] == '1 kWh in 60 min (CPU 1, GPU not measured), 2 kWh at epoch 10'


@pytest.mark.parametrize(
    'changes, step, text',
    table("""
note="waiting" | | waiting
status="failed" quiet_s=720.0 | 40 | killed: the log has no end, and nothing was \
written for 12 min; resumable from step 40
status="failed" has_end=true time_s=60.0 | | failed, 60 s since the start
status="interrupted" has_end=true | 40 | interrupted; resumable from step 40
status="running" | | running
"""),
)
def test_status_text_of_every_state(changes, step, text):
    kept = {'checkpoints': Checkpoints(1, int(step), 9.0)} if step else {}
    assert status_text(LiveRun('x', **kept, **values(changes))) == text


def test_output_fits_terminal_and_is_ascii_without_unicode(run):
    for columns, rows in ((80, 24), (200, 50), (130, 24)):
        lines = text_of([run], columns, rows).splitlines()
        assert max(map(len, lines)) <= columns
        assert len(lines) <= rows and any('│' in line for line in lines)
    for columns in (20, 40, 80):
        for runs in ([run], [run, run]):  # also texts that are cut off
            assert text_of(runs, columns, 50, encoding='ascii').isascii()


def test_curve_shows_band_target_and_every_evaluation(run):
    head, *lines, axis = str(draw_curves([run], 60, 12)).splitlines()
    assert len(lines) == 10 and all(len(line) <= 60 for line in lines)
    assert head == '● Top-1  ░ 5 reference runs  ╌ target 74.90 %'
    assert sum(line.count('●') for line in lines) == 3 and '╌' in ''.join(lines)
    assert [k for k, line in enumerate(lines) if '░' in line] == [3, 4]  # 45 to 55 % of 80
    assert axis.startswith('epoch 0') and axis.endswith('10')
    for width in range(1, 12):  # a window that is almost closed
        assert '●' in str(draw_curves([run], width, 12))


def test_each_of_several_runs_has_a_row_and_a_marker(run, tmp_path):
    other = write_live(
        tmp_path / 'other', evaluation(1, 70), status='success', accuracies=(0.7, 0.8)
    )
    late = LiveRun(str(tmp_path / 'late'), note='not started yet')
    runs = [run, Follower(other).look(NOW_S), late]
    text = text_of(runs, 100, 40)
    assert re.search(r'run +running +3\.50 of 10 +45\.00 % +128 +20\.0 % +62 s', text)
    assert re.search('other +converged', text)
    assert 'late: not started yet' in text and '● run  ◆ other  ╌ target' in text
    assert '░' not in text and 'cost' not in text
    assert str(draw_curves(runs, 60, 12)).count('◆') == 2  # the legend and one evaluation
    assert re.search(r' cost\n(.*\n)*?.* 0\.0633\n', text_of(runs, 120, 40, price=3.0))


def test_texts_of_run_are_escaped_in_terminal_and_page(tmp_path):
    ranks = times(rank(0, 1.0, HOSTILE), rank(1, 2.0, HOSTILE), stragglers=[HOSTILE])
    folder = write_live(tmp_path / 'x[red]', course(1, text=HOSTILE), evaluation(1, 20), ranks)
    run = Follower(folder).look(NOW_S)
    text = text_of([run], 200, 50)
    assert '\x1b' not in text and 'x[red], run 0' in text
    assert '?[31m<script>alert(1)</script>[red]&' in text
    page = render_page(run, WRITTEN, 5.0)
    assert page.count('<script') == 1 and '\x1b' not in page and '&lt;script&gt;' in page


def test_page_shows_curve_speed_and_ranks_and_refreshes_until_the_end(run):
    page = render_page(run, WRITTEN, 4.2)
    for text in (
        '<noscript><meta http-equiv="refresh" content="5"></noscript>',
        '}, 5000);',
        'Written 2026-01-02 03:04:05 UTC',
        '<title>30.00 % at epoch 2</title>',
        'band of 5 reference runs; dashed line: their mean',
        '<title>rank 1 on n2: compute 150.0 ms per step</title>',
    ):
        assert text in page
    assert page.count('<figure ') == 3 and page.count('<title>rank ') == 6
    assert len(re.findall('stroke-dasharray: [1-9]', page)) == 2  # the mean and the target
    cells = re.findall(r'<td [^>]*><span>([^<]*)</span></td>', page)
    assert cells[:4] == ['3', '45.00 %', '50.00 %', '45.00 to 55.00']
    over = render_page(replace(run, status='converged', has_end=True), WRITTEN, 4.2)
    assert 'http-equiv="refresh"' not in over and 'location.reload' not in over


def test_state_in_other_formats(folder):
    words = 'watch', folder, folder / 'result_0.txt', '--once', '--price-per-node-hour', '2'
    first, second = json.loads(call(*words, '--format', 'json').stdout)['runs']
    assert first['evaluations'][-1] == {'epoch': 3, 'accuracy': 0.45, 'time_s': 30.0}
    assert len(first['band']) == 10 and first['is_over'] is False
    assert first['cost'] == pytest.approx(2 * first['node_hours'])
    assert second['path'].endswith('result_0.txt') and second['number'] == 0
    text = call(*words, '--format', 'markdown').stdout
    assert '- Top-1: 45.00 %' in text and '| 45.00 % |' in text
    assert 'got no --once' in call('watch', folder, '--format', 'markdown').stderr


def test_pipe_gets_lines_until_all_runs_are_over(tmp_path):
    a = write_live(tmp_path / 'a', evaluation(1, 20), status='success', accuracies=(0.8,))
    b = write_live(tmp_path / 'b', evaluation(1, 20), status='aborted')
    done = call('watch', a, b)
    first, second = done.stdout.splitlines()
    assert done.returncode == 0 and 'a, run 0: converged after 1 epochs' in first
    assert 'b, run 0: aborted' in second


def test_tree_of_runs_is_shown_once(tmp_path):
    for name in ('1', '2'):
        write_live(tmp_path / 'a' / name, train(10))  # killed long ago, so it will never end
    done = call('watch', tmp_path)
    assert (done.returncode, done.stdout.count(': killed: the log has no end')) == (1, 2)


def test_page_is_written_into_run_folder_only_on_request(folder, tmp_path):
    before = set(os.listdir(folder))
    call('watch', folder, '--once')
    assert set(os.listdir(folder)) == before
    assert call('watch', folder, tmp_path / 'later', '--once', '--html').returncode == 1  # killed
    assert set(os.listdir(folder)) == before | {'watch.html'} and not (tmp_path / 'later').exists()
    assert '<dd>45.00 % at epoch 3, target 74.90 %</dd>' in (folder / 'watch.html').read_text()
    logs = [folder / f'result_{k}.txt' for k in (0, 1)]
    done = call('watch', *logs, '--once', '--html')  # one page would replace the other
    assert done.returncode == 2 and '--html: got two runs of one folder' in done.stderr
