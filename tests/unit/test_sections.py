"""Reports on several studies: plots of all systems, brief pages and texts, and filters."""

import io
import json
import os
import re
from dataclasses import replace
from html import unescape

import pytest
from helpers import Terminal, call
from lines import write_set
from made_systems import made_set, page_of, refused, studies_of, write_layouts

from mlperf_rn50.analysis.report.plots import draw_overview
from mlperf_rn50.analysis.report.sections import make_page, make_report, page_texts
from mlperf_rn50.analysis.sets.load import filter_sets, load_run_sets
from mlperf_rn50.analysis.sets.rcp import reference_points
from mlperf_rn50.analysis.sets.scaling import make_studies
from mlperf_rn50.analysis.sets.settings import Recipe
from mlperf_rn50.analysis.show import bar
from mlperf_rn50.analysis.show.page import dump_answer
from mlperf_rn50.analysis.show.text import MARKDOWN, render_text

RECIPE = Recipe(
    'lars', 4096, 10.0, 2.0, 'poly', 37.0, None, None, None, 1e-4, 0.9, None, 0.759, 4, 2
)


def make_system(name, round_, accelerator, batch, epochs, **facts):
    recipe, run = replace(RECIPE, global_batch_size=batch), ('converged', 1200.0, [(epochs, 0.76)])
    facts = {'num_accelerators': 8, 'target_accuracy': 0.759, 'accelerator': accelerator} | facts
    return made_set(name, recipe, [run], round=round_, **facts)


def test_overview_shows_comparable_systems_of_two_rounds():
    systems = [
        make_system('a', 'v0.7', 'Tesla V100', 1024, 60),
        make_system('b', 'v1.0', 'NVIDIA A100', 4096, 36),
        make_system('c', 'v1.0', 'TPU', 8192, 46),
        make_system('d', 'v1.0', 'TPU', 8192, 30, division='open'),
        make_system('e', 'v0.5', 'TPU', 8192, 40, target_accuracy=0.749),
    ]
    times, epochs = draw_overview(systems)
    assert [t.partition(',')[0] for x in times.tips.values() for t in x] == ['us a', 'us b', 'us c']
    assert 'us a, v0.7: 20.00 minutes, 8 accelerators' in next(iter(times.tips.values()))
    assert '3 closed-division systems of v0.7 to v1.0' in times.caption
    line = next(x for x in epochs.figure.axes[0].lines if x.get_label() == 'fewest epochs')
    assert [*zip(*line.get_data())] == [(4096, 36), (8192, 46)]
    assert [n for n, _ in reference_points()] == [1632, 3264, 32768, 49152, 67840]
    assert sum(t.startswith('reference') for texts in epochs.tips.values() for t in texts) == 5
    assert draw_overview(systems[1:]) == []


@pytest.fixture
def tree(tmp_path):
    for org, first in (('a', 10), ('b', 20)):
        for nodes, seed in ((1, first), (2, first + 5)):
            write_layouts(
                tmp_path / f"v0.7/{org}'s/results",
                {f'{nodes}x4/resnet': 60.0 / nodes},
                5,
                batch=9984 * nodes,
                seed=lambda k, seed=seed: seed + k,
            )
    return tmp_path / 'v0.7'


def test_large_tree_has_a_brief_page_and_few_files(tree, tmp_path):
    studies = studies_of(tree)
    report = make_report(studies)

    def dump(name, most):
        page, keys = make_page(studies, most=most), page_texts(studies)
        out = tmp_path / name
        path = dump_answer(report, out, 'report', page=page, has_sources=most > 1, **keys)
        return path.read_text(), {p.name for p in out.iterdir()}

    (whole, files), (brief, few) = dump('whole', 2), dump('brief', 1)
    series = {'v0.7_a_s_1x4.svg', 'v0.7_b_s_1x4.svg'}
    assert {name for name in few if name.endswith('svg')} == {'series.svg', *series}
    assert 'v0.7_a_s_epochs.png' in files
    assert len(brief) < len(whole) / 3 and brief.count('<figure') == 3
    assert re.findall('<(?:section|details) id="(study-.)"', brief) == ['study-1', 'study-2']
    for text in ('#source-', '>Runs<', '>Time to train<'):
        assert text in whole and text not in brief
    command = f"mlperf-rn50 report '{tree}/a'\"'\"'s' --out DIR"
    assert command in unescape(brief) and ' --out DIR' not in whole


def test_large_tree_has_a_brief_text(tree):
    write_set(tree / 'a/results/other/resnet', 2, seed=99)  # the seed causes a warning
    write_set(tree / "a's/results/odd/resnet", 1, seed=9)
    reason = 'batches differ'
    studies = make_studies(
        [refused(s, reason) if s.name == 'odd' else s for s in load_run_sets([tree])]
    )
    whole, brief, findings = (
        render_text(make_report(studies, **keys))
        for keys in ({}, {'most': 1}, {'most': 1, 'has_all_findings': True})
    )
    lines = brief.splitlines()
    assert lines[0] == 'ResNet-50 in MLPerf logs: 6 systems in 3 studies'
    assert len(lines) < len(whole.splitlines()) / 3
    assert lines[4] == f"- Refused: 1 of 6 systems: v0.7/a's/odd ({reason})."
    assert lines[7:9] == [
        '- 22 of 23 runs of 6 systems converged.',
        '- 1 error, 1 warning, 7 notes: --findings',
    ]
    assert lines[9].endswith(f"""mlperf-rn50 report '{tree}/a'"'"'s'""")
    assert lines[-2] == f'odd: refused: {reason}' and brief.count(reason) == 2
    assert f"- v0.7/a's/odd: error: {reason}" in findings
    markdown = render_text(make_report(studies, most=1), MARKDOWN)
    assert markdown.startswith(f'## {lines[0]}\n\n- On 2')
    priced = [replace(s, price_per_node_hour=36.0) for s in studies]
    assert '  cost  ' in render_text(make_report(priced, most=1)) and '  cost  ' not in brief


@pytest.mark.parametrize(
    'options, names',
    [
        ({'round': 'v0.7'}, 'ac'),
        ({'round': 'v1.0'}, 'bc'),
        ({'org': 'nvid'}, 'ab'),
        ({'org': 'US'}, 'c'),
        ({'accelerator': 'v100', 'batch': None}, 'ac'),
        ({'batch': 4096, 'org': 'us'}, 'c'),
        ({}, 'abc'),
    ],
)
def test_filters_select_systems(options, names):
    a = make_system('a', 'v0.7', 'Tesla V100', 1024, 60, org='NVIDIA')
    b = make_system('b', 'v1.0', None, 4096, 36, org='NVIDIA')
    c = replace(make_system('c', 'v0.7', 'Tesla V100', 4096, 60), later=(b,))
    assert ''.join(s.name for s in filter_sets([a, b, c], options)) == names


def test_filter_applies_before_comparisons_in_every_format(tree, tmp_path):
    words = ['report', tree, '--batch', 19968, '--org', "A'", '--out', tmp_path / 'out']
    done = call(*words, '--format', 'json')
    (system,) = json.loads(done.stdout)['systems']
    assert (system['org'], system['num_nodes'], system['speedup']) == ("a's", 2, None)
    page = (tmp_path / 'out/report.html').read_text()
    for text in (page, call(*words[:4]).stdout):
        assert '2x4' in text and '1x4' not in text


@pytest.mark.parametrize(
    'path, options, message',
    [
        ('', '--batch 64', '--batch: got 64, expected one of: 9984, 19968'),
        ('', '--nodes 3', '--nodes: got 3, expected one of: 1, 2'),
        ('', '--org b --round 2.0', '--round: got v2.0, expected one of: v0.7'),
        ('', '--accelerator x', '--accelerator: got x, but no log has a value; omit it'),
        ('published/v2.0', '--org delle', '--org: got delle, expected one of: ASUSTeK, Azure, CA'),
    ],
)
def test_filter_without_systems_names_the_option_and_the_values(tree, path, options, message):
    done = call('report', path or tree, *options.split())
    assert (done.returncode, done.stdout, done.stderr.count('\n')) == (2, '', 1)
    assert message in done.stderr


def test_folder_names_may_not_be_utf8(tmp_path):
    name = os.fsdecode(b'caf\xe9')
    folder = tmp_path / name
    for seed, org in ((10, 'a'), (40, name)):
        logs = folder / f'v0.7/{org}/results/{name}/resnet'
        write_set(logs, 2, True, seed=lambda k, seed=seed: seed + k)
    done = call('report', folder, '--format', 'json', '--out', folder / 'out')
    assert (done.returncode, done.stderr.count('\n')) == (0, 1)
    assert [s['system'] for s in json.loads(done.stdout)['systems']] == [name, name]
    texts = {p.suffix: p.read_text() for p in (folder / 'out').glob('report.*')}
    for text in (call('report', folder, '--findings').stdout, *texts.values()):
        assert 'caf?' in text or 'caf\\udce9' in text
    assert 'v0.7/caf%E9/results/caf%E9/resnet/result_0.txt' in texts['.html']


def test_lists_of_the_filter_are_in_numeric_order(tree):
    batches = re.search('<label>batch (.*)</label>', page_of(studies_of(tree)))[1]
    assert re.findall('<option>(.*?)</option>', batches) == ['9,984', '19,968']


@pytest.mark.parametrize('stream, is_shown', [(Terminal(), True), (io.StringIO(), False)])
def test_progress_bar_is_shown_only_on_a_terminal(stream, is_shown, monkeypatch):
    monkeypatch.setenv('TERM', 'xterm')
    monkeypatch.setattr('sys.stderr', stream)
    assert [*bar.track(iter('abc'), 3, 'read logs')] == ['a', 'b', 'c']
    text = stream.getvalue()
    assert ('read logs' in text) == bool(text) == is_shown
