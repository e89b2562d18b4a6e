"""HTML page and plots: self-contained, and safe from hostile log contents."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from helpers import call
from lines import write_set
from made_systems import changed, load_set, page_of, studies_of, study_of, write_layouts

from mlperf_rn50.analysis.report.detail_tables import runs_table
from mlperf_rn50.analysis.report.plots import draw_study
from mlperf_rn50.analysis.report.sections import make_report
from mlperf_rn50.analysis.report.tables import (
    answer_table,
    finding_lines,
    overview_table,
    series_table,
)
from mlperf_rn50.analysis.sets import rcp
from mlperf_rn50.analysis.sets.published import sets_under
from mlperf_rn50.analysis.sets.scaling import make_studies
from mlperf_rn50.analysis.show.figure import render_svg
from mlperf_rn50.analysis.show.plain import MARKDOWN, render_text
from mlperf_rn50.runfolder.outputs import LISTING

HOSTILE = '</title><script>alert(1)</script><img src=x onerror=alert(1)>$x^{$ "\'&'
PICTURES = """accuracy_epochs accuracy_time epochs sweep_1x4 throughput time_parts
    time_to_train""".split()


class Elements(HTMLParser):
    """Elements with their attributes, and the text outside script and style."""

    def __init__(self, page):
        super().__init__()
        self.found, self.text, self._open = [], '', []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag):
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    def handle_data(self, data):
        if not {'script', 'style'} & set(self._open):
            self.text += data


@pytest.fixture(scope='module')
def sweep(tmp_path_factory):
    folder = write_layouts(tmp_path_factory.mktemp('logs') / 'sweep', {'1x4': 60.0}, 5)
    aborted = lambda k: 'aborted' if k == 3 else 'success'  # noqa: E731
    return write_layouts(folder, {'2x4': 35.0}, 5, batch=128, status=aborted)


def texts_of(table):
    return {
        row[0].text: dict(zip(table.head, (cell.text for cell in row))) for row in table.whole_rows
    }


def test_official_score_has_a_column_only_if_it_differs(sweep, monkeypatch):
    study = study_of(sweep)
    factors = {'1x4': 1.0044, '2x4': 1.0}
    monkeypatch.setattr(rcp, 'official_score_minutes', lambda s: s.score_minutes * factors[s.name])
    texts = texts_of(series_table(study, study.series[0]))
    assert [texts[n]['scaled score, min'] for n in ('1', '2')] == ['2.04', '1.20']
    factors['1x4'] = 1.0
    assert 'scaled score, min' not in series_table(study, study.series[0]).head


def test_shared_finding_names_all_its_systems(tmp_path):
    for name, more_s in (('a', 0.0), ('b', 3.7)):
        write_set(tmp_path / name, 2, seed=9, epoch_s=lambda k, more_s=more_s: 10.0 + k + more_s)
    assert 'a, b: warning: 2 runs have the same seed 9' in finding_lines(study_of(tmp_path))


def check_headings(page):
    """Assert that headings are nested and that the heading of the sweep appears once."""
    headings = re.findall(r'<h([1-6])[^>]*>(.*?)</h', page)
    levels = [int(level) for level, _ in headings]
    assert levels.count(1) == 1 and all(b <= a + 1 for a, b in zip(levels, levels[1:]))
    assert len([text for _, text in headings if text.startswith('sweep: ')]) == 1


def test_running_run_shows_its_progress(sweep):
    facts = {'status': 'running', 'epochs_to_converge': None, 'time_to_train_s': None}
    system = changed(load_set(sweep / '1x4'), age_s=200.0, **facts)
    (study,) = make_studies([system])
    for row in runs_table(study).rows:
        assert row[2].text == 'running, epoch 2, best 76.00 %, written 3 min ago'
    assert texts_of(answer_table(study))['1x4']['converged'] == '0 / 5, 5 running'
    assert '0 / 5, 5 running' in Elements(page_of([study])).text


def test_table_of_all_systems_precedes_the_studies(sweep, tmp_path):
    write_set(tmp_path / 'other/box', 5, target=0.749)
    studies, single = studies_of(sweep, tmp_path), studies_of(sweep)
    rows = texts_of(overview_table(studies)).items()  # sorted by path
    assert [(n, row['organisation'], row['target'], row['study']) for n, row in rows] == [
        ('1x4', 'us', '75.90 %', 'sweep'),
        ('2x4', 'us', '75.90 %', 'sweep'),
        ('box', 'us', '74.90 %', 'other'),
    ]

    def shown(found):
        report = make_report(found)
        return page_of(found), render_text(report), render_text(report, MARKDOWN)

    page, text, markdown = shown(studies)
    check_headings(page)
    assert page.index('>All systems<') < page.index('id="study-1"')
    assert '<a href="#study-2">box</a>' in page
    assert '\n\nAll systems\nsystem' in text
    assert '\n\n### All systems\n\n| system' in markdown
    assert overview_table(single) is None and 'All systems' not in ''.join(shown(single))


def test_page_begins_with_results_and_numbers_link_to_log_lines(sweep):
    page = page_of(studies_of(sweep), sweep, has_plots=True)
    check_headings(page)
    found = Elements(page)
    elements = found.found
    texts = '1x4 on 1, 2 nodes, 4 accelerators per node', 'Plots', '1 of 5 runs did not converge'
    places = [found.text.index(text) for text in texts]
    assert places == sorted(places)
    shown = re.findall('<th scope="col" class="([^"]*)">', page.partition('</thead>')[0])
    assert ['minor' in c for c in shown] == [False, True, False, False, False, False] + [True] * 6
    ids = [a['id'] for _, a in elements if 'id' in a]
    assert len(ids) == len({*ids})
    links = [a['href'] for tag, a in elements if tag == 'a']
    files = {f'{name}/result_{k}.txt' for name in ('1x4', '2x4') for k in range(5)}
    assert {*links} <= files | {f'#{name}' for name in ids} and files <= {*links}
    assert sum(href.startswith('#source-') for href in links) > 60
    assert page.count(' data-key="') > 20  # sort keys of numbers
    [policy] = [a['content'] for _, a in elements if a.get('http-equiv')]
    assert policy.startswith("default-src 'none'") and not [a for _, a in elements if 'src' in a]
    path = '1x4/result_0.txt'
    number, code = re.search(
        f'<a href="{path}">{path}</a>:(\\d+) <code>(.*?)</code>', page
    ).groups()
    line = (sweep / path).read_text().splitlines()[int(number) - 1]
    assert code[:60] == line.replace('"', '&#34;')[:60]


def test_log_and_folder_cannot_inject_html(tmp_path):
    hostile = dict.fromkeys(('org', 'seed', 'dataset'), HOSTILE)
    folder = tmp_path / HOSTILE.replace('/', '_')
    write_set(folder, 1, optimizer={'opt_x': HOSTILE}, accuracies=(0.4, 0.5), **hostile)
    elements = Elements(page_of(studies_of(tmp_path), has_plots=True))
    tags = [tag for tag, _ in elements.found]
    assert not {*tags} & {'link', 'img', 'iframe', 'object', 'source'} and tags.count('script') == 1
    assert not [k for _, a in elements.found for k in a if k.startswith('on')]
    assert '<script>alert(1)' in elements.text.replace('<_', '</')


def test_file_names_do_not_come_from_logs_and_reports_are_reproducible(tmp_path):
    for nodes in (1, 2):
        keys = {'epoch_s': 9.0 / nodes, 'platform': '../../evil', 'org': '/etc/evil'}
        write_set(tmp_path / f'logs/{nodes}$(y)', 2, nodes=nodes, **keys)
    a, b = (tmp_path / name for name in 'ab')
    for out in (a, b):
        call('report', tmp_path / 'logs', '--out', out)
    files = {p.name: p.read_bytes() for p in a.iterdir()}
    reports = 'report.html report.json report.csv report.md report_evaluations.csv'.split()
    plots = {f'{p}.{s}' for p in PICTURES if p != 'sweep_1x4' for s in ('svg', 'png')}
    assert {*files} == {*reports, LISTING, *plots}
    assert files == {p.name: p.read_bytes() for p in b.iterdir()}
    assert sorted(p.name for p in tmp_path.iterdir()) == ['a', 'b', 'logs']


def test_footer_names_the_source(sweep):
    packaged = make_studies(sets_under(Path('published/v2.0/HPE')))
    assert 'from the logs named above.</p></footer>' in page_of(studies_of(sweep))
    assert 'from the packaged table of published sets.</p></footer>' in page_of(packaged)


def test_unwritable_folder_is_an_error(sweep, tmp_path):
    (tmp_path / 'file').write_text('')
    done = call('report', sweep, '--out', tmp_path / 'file/out')
    assert done.returncode == 2 and '--out: ' in done.stderr and 'choose a writable' in done.stderr


def test_marks_in_plots_have_titles_with_values(sweep):
    titles = {
        p.name: re.findall('<title>(.*?)</title>', render_svg(p))
        for p in draw_study(study_of(sweep))
    }
    assert sorted(titles) == PICTURES
    assert '2x4/result_3.txt: 1.20 minutes, aborted' in titles['time_to_train']
    assert titles['sweep_1x4'] == [
        '1x4: 2.03 min',
        '2x4: 1.20 min',
        '1x4: hardware 100.0%',
        '2x4: hardware 85.7%',
        '1x4: efficiency 100.0%',
        '2x4: efficiency 84.7%',
        '1x4: 2.0 epochs',
        '2x4: 2.0 epochs',
    ]
    # 10 runs of two evaluations.
    assert len(titles['accuracy_time']) == len(titles['accuracy_epochs']) == 20
    assert '1x4/result_0.txt: 76.00 % after 2 epochs, 2.03 min' in titles['accuracy_epochs']


def test_runs_without_evaluations_or_ends_have_a_page(tmp_path):
    write_set(tmp_path / '1x1', 2, accuracies=(), status=None)
    assert '0 / 2' in page_of(studies_of(tmp_path), has_plots=True)
