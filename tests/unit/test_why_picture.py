"""Plot of a run's time: choice of ranks, parts of the clock, order and widths of blocks."""

import re
from xml.etree import ElementTree

import pytest
from made_traces import dump, step

from mlperf_rn50.analysis.show.figure import COLOURS, dump_plot, figure_of
from mlperf_rn50.analysis.why.picture import bar_of, choose_ranks, draw_times
from mlperf_rn50.analysis.why.trace import PHASES, align
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.runfolder.records import RanksRecord, RankSteps

SVG = '{http://www.w3.org/2000/svg}'


def record(*ranks, **keys):
    return RanksRecord(
        ranks=[RankSteps(rank=k, host=f'h{k}', num_steps=10, **r) for k, r in enumerate(ranks)],
        **keys,
    )


RECORDS = [
    record(
        {
            'data_s': 1,
            'python_s': 2,
            'compute_s': 50,
            'wait_s': 10,
            'slow_rank_s': 8,
            'update_s': 2,
        },
        {'data_s': 3, 'python_s': 2, 'compute_s': 58, 'wait_s': 2, 'update_s': 0},
        eval_s=5,
        checkpoint_s=1,
    ),
    record({'data_s': 2, 'compute_s': 20, 'wait_s': 0}, eval_s=4),
]
PARTS = {
    'read': 1,
    'decode': 2,
    'prepare': 1,
    'python': 2,
    'compute': 78,
    'exchange': 2,
    'update': 1,
    'evaluation': 9,
    'checkpoints': 1,
    'rest': 13,
}
BAR = bar_of(PARTS)
NOTHING = bar_of(dict.fromkeys(PARTS, 0.0))


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path, 0)


def blocks_of(picture):
    """Return the (x, y, width, height) in points of each block with a tooltip, by its tooltip
    without the figures."""
    blocks = {}
    for group in ElementTree.fromstring(picture.svg).iter(f'{SVG}g'):
        if group.get('id', '').startswith('tip'):
            text = re.sub(r'( |: )[\d.,]+ (ms|s).*', '', group.find(f'{SVG}title').text)
            for path in group.iter(f'{SVG}path'):
                numbers = [float(n) for n in re.findall(r'-?[\d.]+', path.get('d'))]
                (left, right), (top, low) = (
                    (min(v), max(v)) for v in (numbers[::2], numbers[1::2])
                )
                blocks.setdefault(text, []).append((left, top, right - left, low - top))
    return blocks


def test_bar_joins_the_parts_of_input_and_keeps_the_others():
    assert BAR == {
        'Python': 2,
        'input': 4,
        'forward and backward': 78,
        'waiting for the slowest rank': 0,
        'exchange': 2,
        'update': 1,
        'evaluation': 9,
        'checkpoints': 1,
        'rest': 13,
    }


def test_beyond_16_ranks_the_slowest_and_the_fastest_are_chosen():
    slow = {7: 0.025, 31: 0.001}
    steps, _ = align({rank: [step(1, slow=slow.get(rank, 0.01))] for rank in range(40)})
    chosen = choose_ranks(steps)
    assert (len(chosen), len(set(chosen)), chosen[0], chosen[-1]) == (16, 16, 31, 7)


def test_rank_that_waits_longest_is_the_fastest():
    assert choose_ranks(align({0: [step(1, slow=0.02)], 1: [step(1)]})[0]) == [1, 0]


def test_phases_follow_each_other_with_widths_of_their_times_and_buckets_below(run):
    dump(run, 0, [step(1), step(2, 0.1)])
    dump(run, 1, [step(1, slow=0.02), step(2, 0.1, slow=0.02)])
    blocks = blocks_of(draw_times(run, RECORDS, BAR, 'made up'))
    own = {name: blocks[f'rank 0, h0, fastest: {name}'] for name in PHASES}
    ms = own['update'][0][2] / 10  # points per millisecond
    for name, width in zip(PHASES, (10, 20, 30, 20, 10, 10)):
        assert own[name][0][2] == pytest.approx(width * ms, abs=0.01)
    first = [own[name][0] for name in PHASES]
    for (x, _, width, _), (following, *_) in zip(first, first[1:]):
        assert x + width == pytest.approx(following, abs=0.01)
    buckets = own['waiting for the slowest rank'][2:]  # after those of the two steps
    assert [b[2] for b in buckets] == pytest.approx([20 * ms] * 4, abs=0.01)
    x, y, width, height = first[2]
    assert all(b[1] >= y + height for b in buckets) and x < buckets[0][0] < x + width


def test_bar_of_the_whole_run_has_the_colours_of_the_phases(run):
    svg = draw_times(run, RECORDS, BAR, 'made up').svg
    widths = {
        name: b[0][2] for name, b in blocks_of(draw_times(run, RECORDS, BAR, 'made up')).items()
    }
    assert list(widths) == [*PHASES, 'evaluation', 'checkpoints', 'rest']
    assert widths['forward and backward'] / sum(widths.values()) == pytest.approx(
        78 / 110, abs=1e-3
    )
    # in the bar and in the legend
    assert all(svg.count(f'fill: {colour}') >= 2 for colour in COLOURS)


def test_picture_without_a_trace_shows_the_option_that_traces(run):
    picture = draw_times(run, RECORDS, BAR, '9 % of the time is evaluation')
    assert '--run.trace 20@100' in picture.svg and '9 % of the time is evaluation' in picture.svg
    assert len(picture.figure.axes) == 1


def test_picture_of_a_run_without_records_is_drawn(run):
    assert list(blocks_of(draw_times(run, [], NOTHING, 'nothing is known')))


def test_only_the_last_steps_are_drawn(run):
    dump(run, 0, [step(k + 1, 0.1 * k, buckets=[]) for k in range(20)])
    picture = draw_times(run, [], NOTHING, 'made up')
    assert len(blocks_of(picture)['rank 0, unknown host: update']) == 8
    assert 'ms since the start of step 13' in picture.svg


def test_hostile_names_and_times_are_drawn_as_text(run):
    records = [
        RanksRecord(
            ranks=[
                RankSteps(
                    rank=0,
                    host='<script>$x$\x1b' + 'y' * 9999,
                    num_steps=1,
                    data_s=1e9,
                    compute_s=1e9,
                    wait_s=0,
                    slow_rank_s=1e9,
                )
            ],
            eval_s=1e9,
        )
    ]
    dump(run, 0, [step(10**12, start_s=0.0, updated_s=1e9, buckets=[(0.0, 1e9)])])
    dump_plot(
        draw_times(run, records, {**NOTHING, 'forward and backward': 1e9}, '<b>$\\frac'),
        run.dir,
        'why',
    )
    assert '<script' not in (run.dir / 'why.svg').read_text()
    assert (run.dir / 'why.png').read_bytes()[16:20] == (1275).to_bytes(4, 'big')  # pixels


def test_page_replaces_the_colours_of_text_and_paper(run):
    svg = figure_of(draw_times(run, RECORDS, BAR, 'made up'), 'why-')['svg']
    assert '#1b1e23' not in svg and '#ffffff' not in svg and 'currentColor' in svg
