"""Reports on several studies: plots of all systems, brief pages and texts, and filters."""

import io
import json
import os
import re
from dataclasses import replace

import pytest
from helpers import Terminal, call, table
from lines import write_set
from made_systems import made_set, page_of, refused, studies_of

from mlperf_rn50.analysis.report.plots import draw_overview
from mlperf_rn50.analysis.report.sections import make_page, make_report, page_texts
from mlperf_rn50.analysis.sets.load import load_run_sets
from mlperf_rn50.analysis.sets.rcp import reference_points
from mlperf_rn50.analysis.sets.scaling import make_studies
from mlperf_rn50.analysis.sets.settings import Recipe
from mlperf_rn50.analysis.show import bar
from mlperf_rn50.analysis.show.page import dump_answer
from mlperf_rn50.analysis.show.plain import MARKDOWN, render_text


def make_system(name, round_, accelerator, batch, epochs, **facts):
    facts = {
        'num_accelerators': 8,
        'target_accuracy': 0.759,
        'accelerator': accelerator,
        'round': round_,
    } | facts
    recipe = Recipe(
        'lars',
        batch,
        10.0,
        2.0,
        'poly',
        37.0,
        weight_decay=1e-4,
        momentum=0.9,
        target_accuracy=0.759,
        eval_period=4,
        first_eval_epoch=2,
    )
    return made_set(name, recipe, [('converged', 1200.0, [(epochs, 0.76)])], **facts)


def test_overview_shows_comparable_systems_of_two_rounds():
    systems = [
        make_system('a', 'v0.7', 'Tesla V100', 1024, 60),
        make_system('b', 'v1.0', 'NVIDIA A100', 4096, 36),
        make_system('c', 'v1.0', 'TPU', 8192, 46),
        make_system('d', 'v1.0', 'TPU', 8192, 30, division='open'),
        make_system('e', 'v0.5', 'TPU', 8192, 40, target_accuracy=0.749),
    ]
    times, epochs = draw_overview(systems)
    assert [t for texts in times.tips.values() for t in texts] == [
        'us a, v0.7: 20.00 minutes, 8 accelerators',
        'us b, v1.0: 20.00 minutes, 8 accelerators',
        'us c, v1.0: 20.00 minutes, 8 accelerators',
    ]
    assert '3 closed-division systems of v0.7 to v1.0' in times.caption
    line = next(x for x in epochs.figure.axes[0].lines if x.get_label() == 'fewest epochs')
    assert [*zip(*line.get_data())] == [(4096, 36), (8192, 46)]
    assert [n for n, _ in reference_points()] == [1632, 3264, 32768, 49152, 67840]
    assert sum(t.startswith('reference') for texts in epochs.tips.values() for t in texts) == 5
    assert draw_overview(systems[1:]) == []


@pytest.fixture
def tree(tmp_path):
    for org in ('a', 'b'):
        for nodes in (1, 2):
            write_set(
                tmp_path / f"v0.7/{org}'s/results/{nodes}x4/resnet",
                5,
                nodes=nodes,
                ranks=4 * nodes,
                batch=9984 * nodes,
                epoch_s=60.0 / nodes,
                seed=lambda k, org=org, nodes=nodes: 10 * ord(org) + 5 * nodes + k,
            )
    return tmp_path / 'v0.7'


def test_large_tree_has_a_brief_page_and_few_files(tree, tmp_path):
    studies = studies_of(tree)
    whole, brief = (
        dump_answer(
            make_report(studies),
            tmp_path / name,
            'report',
            page=make_page(studies, most=most),
            has_sources=most > 1,
            **page_texts(studies),
        ).read_text()
        for name, most in (('whole', 2), ('brief', 1))
    )
    assert sorted(p.name for p in (tmp_path / 'brief').glob('*.svg')) == [
        'series.svg',
        'v0.7_a_s_1x4.svg',
        'v0.7_b_s_1x4.svg',
    ]
    assert 'v0.7_a_s_epochs.png' in {p.name for p in (tmp_path / 'whole').iterdir()}
    assert len(brief) < len(whole) / 3 and brief.count('<figure') == 3
    assert re.findall('<(?:section|details) id="(study-.)"', brief) == ['study-1', 'study-2']
    for text in ('#source-', '>Runs<', '>Time to train<'):
        assert text in whole and text not in brief
    command = f"mlperf-rn50 report '{tree}/a'\"'\"'s' --out DIR"
    assert (
        command in brief.replace('&#39;', "'").replace('&#34;', '"') and ' --out DIR' not in whole
    )


def test_large_tree_has_a_brief_text(tree):
    write_set(tree / 'a/results/other/resnet', 2, seed=99)  # the seed causes a warning
    write_set(tree / "a's/results/odd/resnet", 1, seed=9)
    studies = make_studies(
        [refused(s, 'batches differ') if s.name == 'odd' else s for s in load_run_sets([tree])]
    )
    whole = render_text(make_report(studies))
    brief = render_text(make_report(studies, most=1))
    lines = brief.splitlines()
    assert (
        lines[0] == 'ResNet-50 in MLPerf logs: 6 systems in 3 studies'
        and len(lines) < len(whole.splitlines()) / 3
    )
    assert lines[4] == "- Refused: 1 of 6 systems: v0.7/a's/odd (batches differ)."
    assert lines[7:10] == [
        '- 22 of 23 runs of 6 systems converged.',
        '- 1 error, 1 warning, 7 notes: --findings',
        f"""- all tables: a report on fewer folders, such as mlperf-rn50 report '{tree}/a'"'"'s'""",
    ]
    assert lines[-2] == 'odd: refused: batches differ' and brief.count('batches differ') == 2
    assert "- v0.7/a's/odd: error: batches differ" in render_text(
        make_report(studies, has_all_findings=True, most=1)
    )
    assert render_text(make_report(studies, most=1), MARKDOWN).startswith(
        '## ResNet-50 in MLPerf logs: 6 systems in 3 studies\n\n- On 2'
    )
    priced = render_text(
        make_report([replace(s, price_per_node_hour=36.0) for s in studies], most=1)
    )
    assert '  cost  ' in priced and '  cost  ' not in brief


def test_filter_applies_before_comparisons_in_every_format(tree, tmp_path):
    done = call(
        'report',
        tree,
        '--batch',
        19968,
        '--org',
        "A'",
        '--format',
        'json',
        '--out',
        tmp_path / 'out',
    )
    (system,) = json.loads(done.stdout)['systems']
    assert (system['org'], system['num_nodes'], system['speedup']) == ("a's", 2, None)
    assert '2x4' in call('report', tree, '--batch', '19968').stdout
    page = (tmp_path / 'out/report.html').read_text()
    assert '2x4' in page and '1x4' not in page


@pytest.mark.parametrize(
    'path, options, message',
    table("""
         | --batch 64           | --batch: got 64, expected one of: 9984, 19968
         | --nodes 3            | --nodes: got 3, expected one of: 1, 2
         | --org b --round 2.0  | --round: got v2.0, expected one of: v0.7
         | --accelerator x      | --accelerator: got x, but no log has a value; omit it
published/v2.0 | --org delle    | --org: got delle, expected one of: ASUSTeK, Azure, CASIA, Dell,
"""),
)
def test_filter_without_systems_names_the_option_and_the_values(tree, path, options, message):
    done = call('report', path or tree, *options.split())
    assert (done.returncode, done.stdout, done.stderr.count('\n')) == (2, '', 1)
    assert message in done.stderr


def test_folder_names_may_not_be_utf8(tmp_path):
    name = os.fsdecode(b'caf\xe9')
    for org in ('a', name):
        write_set(
            tmp_path / name / f'v0.7/{org}/results/{name}/resnet',
            2,
            True,
            seed=lambda k, org=org: 10 * len(org) + k,
        )
    out = tmp_path / name / 'out'
    done = call('report', tmp_path / name, '--format', 'json', '--out', out)
    assert (done.returncode, done.stderr.count('\n')) == (0, 1)
    assert [s['system'] for s in json.loads(done.stdout)['systems']] == [name, name]
    for text in (
        call('report', tmp_path / name, '--findings').stdout,
        *(p.read_text() for p in out.glob('report.*')),
    ):
        assert 'caf?' in text or 'caf\\udce9' in text
    page = (out / 'report.html').read_text()
    assert 'v0.7/caf%E9/results/caf%E9/resnet/result_0.txt' in page


def test_lists_of_the_filter_are_in_numeric_order(tree):
    page = page_of(studies_of(tree))
    assert re.findall(
        '<option>(.*?)</option>', re.search('<label>batch (.*)</label>', page)[1]
    ) == ['9,984', '19,968']


@pytest.mark.parametrize('stream, is_shown', [(Terminal(), True), (io.StringIO(), False)])
def test_progress_bar_is_shown_only_on_a_terminal(stream, is_shown, monkeypatch):
    monkeypatch.setenv('TERM', 'xterm')
    monkeypatch.setattr(bar.sys, 'stderr', stream)
    assert [*bar.track(iter('abc'), 3, 'read logs')] == ['a', 'b', 'c']
    assert ('read logs' in stream.getvalue()) == is_shown and bool(stream.getvalue()) == is_shown
