"""Figure of a run's time: choice of ranks, parts of the clock, order and widths of blocks."""

import json
import re
from functools import partial
from xml.etree import ElementTree

import pytest
from made_traces import dump, ranks_of, step

from mlperf_rn50.analysis.show.figure import COLOURS, dump_plot, figure_of
from mlperf_rn50.analysis.why.time_figure import bar_of, choose_ranks, draw_times
from mlperf_rn50.analysis.why.trace import PHASES, align
from mlperf_rn50.runfolder.names import RunFolder

SVG = '{http://www.w3.org/2000/svg}'
RECORDS = [ranks_of('h0', 'h1')]
PARTS = json.loads(
    '{"read": 1, "decode": 2, "prepare": 1, "python": 2, "compute": 78, "exchange": 2, '
    '"update": 1, "evaluation": 9, "checkpoints": 1, "rest": 13}'
)
BAR = bar_of(PARTS)
NOTHING = dict.fromkeys(BAR, 0.0)


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path, 0)


def blocks_of(plot):
    """Return the (x, y, width, height) in points of each block with a tooltip, by its tooltip
    without the figures."""
    blocks = {}
    for group in ElementTree.fromstring(plot.svg).iter(f'{SVG}g'):
        if group.get('id', '').startswith('tip'):
            text = re.sub(r'( |: )[\d.,]+ (ms|s).*', '', group.find(f'{SVG}title').text)
            for path in group.iter(f'{SVG}path'):
                numbers = [float(n) for n in re.findall(r'-?[\d.]+', path.get('d'))]
                x, y = numbers[::2], numbers[1::2]
                block = min(x), min(y), max(x) - min(x), max(y) - min(y)
                blocks.setdefault(text, []).append(block)
    return blocks


def test_bar_joins_the_parts_of_input_and_keeps_the_others():
    assert BAR == dict(
        zip((*PHASES, 'evaluation', 'checkpoints', 'rest'), (2, 4, 78, 0, 2, 1, 9, 1, 13))
    )


def test_ranks_are_chosen_from_the_fastest_which_waits_longest_to_the_slowest():
    slow = {7: 0.025, 31: 0.001}
    steps, _ = align({rank: [step(1, slow=slow.get(rank, 0.01))] for rank in range(40)})
    first, *between, last = choose_ranks(steps)
    assert (first, last, len({*between} - {first, last})) == (31, 7, 14)


def test_phases_follow_each_other_with_widths_of_their_times_and_buckets_below(run):
    dump(run, 0, [step(1), step(2, 0.1)])
    dump(run, 1, [step(1, slow=0.02), step(2, 0.1, slow=0.02)])
    blocks = blocks_of(draw_times(run, RECORDS, BAR, 'made up'))
    own = {name: blocks[f'rank 0, h0, fastest: {name}'] for name in PHASES}
    first = [own[name][0] for name in PHASES]
    ms = first[-1][2] / 10  # points per millisecond
    near = partial(pytest.approx, abs=0.01)
    assert [width for _, _, width, _ in first] == near([k * ms for k in (10, 20, 30, 20, 10, 10)])
    assert [x + width for x, _, width, _ in first[:-1]] == near([x for x, *_ in first[1:]])
    buckets = own['waiting for the slowest rank'][2:]  # after those of the two steps
    assert [b[2] for b in buckets] == near([20 * ms] * 4)
    x, y, width, height = first[2]
    assert all(b[1] >= y + height for b in buckets) and x < buckets[0][0] < x + width


def test_bar_of_the_whole_run_has_the_colours_of_the_phases(run):
    plot = draw_times(run, RECORDS, BAR, '9 % of the time is evaluation')
    widths = {name: b[0][2] for name, b in blocks_of(plot).items()}
    assert list(widths) == list(BAR)
    assert widths['forward and backward'] / sum(widths.values()) == pytest.approx(
        78 / 110, abs=1e-3
    )
    # in the bar and in the legend
    assert all(plot.svg.count(f'fill: {colour}') >= 2 for colour in COLOURS)
    # without a trace
    assert '--run.trace 20@100' in plot.svg and '9 % of the time is evaluation' in plot.svg
    assert len(plot.figure.axes) == 1
    page = figure_of(plot, 'why-')['svg']
    assert '#1b1e23' not in page and '#ffffff' not in page and 'currentColor' in page


def test_run_without_records_is_drawn(run):
    assert list(blocks_of(draw_times(run, [], NOTHING, 'nothing is known')))


def test_only_the_last_steps_are_drawn(run):
    dump(run, 0, [step(k + 1, 0.1 * k, buckets=[]) for k in range(20)])
    plot = draw_times(run, [], NOTHING, 'made up')
    assert len(blocks_of(plot)['rank 0, unknown host: update']) == 8
    assert 'ms since the start of step 13' in plot.svg


def test_hostile_names_and_times_are_drawn_as_text(run):
    records = [ranks_of('<script>$x$\x1b' + 'y' * 9999)]
    dump(run, 0, [step(10**12, start_s=0.0, updated_s=1e9, buckets=[(0.0, 1e9)])])
    bar = {**NOTHING, 'forward and backward': 1e9}
    dump_plot(draw_times(run, records, bar, '<b>$\\frac'), run.dir, 'why')
    assert '<script' not in (run.dir / 'why.svg').read_text()
    assert (run.dir / 'why.png').read_bytes()[16:20] == (1275).to_bytes(4, 'big')  # pixels
