"""The HTML page and the pictures: whole in themselves, and safe whatever a log says."""
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from lines import write_set
from made_systems import changed, refused, with_age

from mlperf_rn50.errors import UserError
from mlperf_rn50.study.report_folder import dump_report
from mlperf_rn50.study.report_page import render_html
from mlperf_rn50.study.report_picture import render_svg
from mlperf_rn50.study.report_plots import draw_study
from mlperf_rn50.study.report_tables import answer_table, overview_table, runs_table
from mlperf_rn50.study.report_text import render_markdown, render_table
from mlperf_rn50.study.scaling import make_studies
from mlperf_rn50.study.systems import load_systems

HOSTILE = '</title><script>alert(1)</script><img src=x onerror=alert(1)>$x^{$ "\'&'
PICTURES = ['accuracy_epochs', 'accuracy_time', 'efficiency', 'epochs', 'speedup', 'throughput', 'time_parts',
            'time_to_train']


def studies_of(folder):
    return make_studies(load_systems([folder]))


def page_of(studies, folder='.'):
    return render_html(studies, [draw_study(s) for s in studies], Path(folder))


def bare_page_of(studies):
    """The page without its pictures, which take longest."""
    return render_html(studies, [[] for _ in studies], Path('.'))


class Elements(HTMLParser):
    """Every element's name with its attributes, and the text that is outside of script and style."""

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


@pytest.fixture
def sweep(tmp_path):
    write_set(tmp_path / 'sweep/1x4', 5, epoch_s=60.0)
    write_set(tmp_path / 'sweep/2x4', 5, nodes=2, ranks=8, batch=128, epoch_s=35.0,
              status=lambda k: 'aborted' if k == 3 else 'success')
    return tmp_path / 'sweep'


def test_the_answer_comes_first(sweep):
    text = Elements(page_of(studies_of(sweep))).text
    assert text.index('2x4 (2 nodes): 2.0 epochs, 1.20 min (MLPerf score), 1.7 times as fast as 1x4, efficiency 85 %'
                      ) < text.index('Pictures')
    assert '1 of 5 runs did not converge' in text


def texts_of(table):
    return {row[0].text: dict(zip(table.head, (cell.text for cell in row))) for row in table.whole_rows}


def test_accelerator_and_framework_are_columns_where_they_are_known(sweep):
    systems = load_systems([sweep])
    assert not {'accelerator', 'framework'} & set(answer_table(make_studies(systems)[0]).head)
    named = [changed(systems[0], accelerator='V100', framework='MXNet 1.5'), systems[1]]
    found = texts_of(answer_table(make_studies(named)[0]))
    assert [(found[n]['accelerator'], found[n]['framework'], found[n]['accelerators']) for n in ('1x4', '2x4')] == [
        ('V100', 'MXNet 1.5', '4'), ('-', '-', '8')]


def test_ranks_on_processors_are_not_counted_as_accelerators(tmp_path):
    write_set(tmp_path / 'cpu', 1, accelerators=False, ranks=16)
    write_set(tmp_path / 'gpu', 1, ranks=4)
    found = texts_of(answer_table(studies_of(tmp_path)[0]))
    assert (found['cpu']['accelerators'], found['gpu']['accelerators']) == ('0', '4')


def test_an_efficiency_that_is_left_out_is_explained(sweep):
    systems = load_systems([sweep])
    study = make_studies([changed(s, accelerator=name) for s, name in zip(systems, ('V100', 'A100'))])[0]
    alike = replace(study, comparisons=tuple(replace(c, efficiency=None) for c in study.comparisons))
    table = answer_table(alike)
    assert texts_of(table)['2x4']['efficiency'] == '-'
    assert 'There is no efficiency between different accelerators.' in table.note
    assert 'different accelerators' not in answer_table(studies_of(sweep)[0]).note


def test_a_system_alone_has_no_speedup(tmp_path):
    write_set(tmp_path / 'box', 5)
    write_set(tmp_path / 'failed', 5, status='aborted', accuracies=(0.1,))
    for paths in ([tmp_path / 'box'], [tmp_path]):
        study, = make_studies(load_systems(paths))
        table = answer_table(study)
        assert not {'speed-up', 'efficiency'} & set(table.head) and 'Speed-up' not in table.note
        assert 'times as fast' not in Elements(bare_page_of([study])).text


def test_the_official_score_stands_beside_the_unscaled_one_where_they_differ(sweep):
    systems = load_systems([sweep])
    scaled = [changed(systems[0], official=systems[0].score_minutes * 1.0044),
              changed(systems[1], official=systems[1].score_minutes)]
    found = texts_of(answer_table(make_studies(scaled)[0]))
    assert [(found[n]['time, min'], found[n]['official score, min']) for n in ('1x4', '2x4')] == [
        ('2.03', '2.04'), ('1.20', '1.20')]
    assert '2.03 min (MLPerf score), official score 2.04 min' in Elements(bare_page_of(make_studies(scaled))).text
    same = [changed(s, official=s.score_minutes) for s in systems]
    assert 'official score, min' not in answer_table(make_studies(same)[0]).head


def test_a_refused_set_is_a_row_with_its_reason_and_no_number(sweep):
    systems = load_systems([sweep])
    studies = make_studies([systems[0], refused(systems[1], 'num_nodes is 1 in <a>|and 2 in b')])
    row = answer_table(studies[0]).rows[1]
    assert [c.text for c in row] == ['2x4', 'refused: num_nodes is 1 in <a>|and 2 in b']
    assert sum(c.span for c in row) == len(answer_table(studies[0]).head)
    assert '2x4: refused, num_nodes is 1 in <a>|and 2 in b' in Elements(bare_page_of(studies)).text
    assert '2x4: refused: num_nodes is 1 in &lt;a>\\|and 2 in b' in render_markdown(studies)
    lines = [line for line in render_table(studies).splitlines() if line.startswith('2x4')]
    assert set(lines[0].split()) == {'2x4', '-'} and lines[1].startswith('2x4: refused: num_nodes')


def test_a_run_that_goes_on_says_how_far_it_is(sweep):
    systems = load_systems([sweep])
    system = changed(systems[0], status='running', epochs_to_converge=None, time_to_train_s=None)
    with_age(system.runs[0], 200.0)
    study, = make_studies([system])
    states = [row[2].text for row in runs_table(study).rows]
    assert states[:2] == ['running, epoch 2, best 76.00 %, written 3 min ago', 'running, epoch 2, best 76.00 %']
    assert texts_of(answer_table(study))['1x4']['converged'] == '0 / 5, 5 running'
    assert 'none of 5 runs reached the target, 5 still running' in Elements(bare_page_of([study])).text


def test_all_systems_stand_in_one_table_before_their_studies(sweep, tmp_path):
    write_set(tmp_path / 'other/box', 5, target=0.749)
    studies = studies_of(tmp_path)
    assert [(n, row['organisation'], row['target'], row['study']) for n, row in
            texts_of(overview_table(studies)).items()] == [
        ('box', 'us', '74.90 %', 'other'), ('1x4', 'us', '75.90 %', 'sweep'), ('2x4', 'us', '75.90 %', 'sweep')]
    page = bare_page_of(studies)
    assert page.index('>All systems<') < page.index('id="study-1"')
    assert re.search(r'<a href="#study-2">2x4</a>', page)
    assert render_table(studies).startswith('All systems\n===========\n\nsystem')
    assert render_markdown(studies).startswith('## All systems\n\n| system')
    alone = studies_of(sweep)
    assert overview_table(alone) is None
    assert 'All systems' not in bare_page_of(alone) + render_table(alone) + render_markdown(alone)


@pytest.mark.parametrize('num_studies', [1, 2])
def test_headings_stand_once(sweep, tmp_path, num_studies):
    if num_studies == 2:
        write_set(tmp_path / 'other/box', 5)
    page = page_of(studies_of(tmp_path))
    headings = re.findall(r'<h([1-6])[^>]*>(.*?)</h', page)
    assert [level for level, _ in headings].count('1') == 1
    for study in page.split('<section')[1:]:
        names = [text for _, text in re.findall(r'<h([1-6])[^>]*>(.*?)</h', study)]
        names += re.findall(r'<figcaption[^>]*><b>(.*?)</b>', study) + [headings[0][1]]
        assert len(names) == len(set(names)), names
    levels = [int(level) for level, _ in headings]
    assert all(b <= a + 1 for a, b in zip(levels, levels[1:]))  # none is left out


def test_an_entry_of_hundreds_of_runs_says_how_many_lines_it_leaves_out(tmp_path):
    write_set(tmp_path / 'box', 40)
    page = bare_page_of(studies_of(tmp_path))
    entries = re.findall(r'<li id="source-\d+">(.*?)</li>', page, re.DOTALL)
    assert max(entry.count('<code>') for entry in entries) == 24
    assert any('and 16 lines more, of the other runs' in entry for entry in entries)  # last evaluations of 40 runs


def test_many_systems_are_not_told_one_by_one(tmp_path):
    for k in range(9):
        write_set(tmp_path / f'box{k}', 1, epoch_s=60.0 - k, nodes=k + 1)
    text = Elements(bare_page_of(studies_of(tmp_path))).text
    said = [line for line in text.splitlines() if '(mean of 1 runs)' in line]
    assert len(said) == 1 and 'box0' in said[0] and 'box8' in said[0] and '9 systems: the smallest' in said[0]


def test_every_link_of_a_number_leads_to_its_line(sweep):
    page = page_of(studies_of(sweep), sweep)
    elements = Elements(page).found
    ids = [a['id'] for _, a in elements if 'id' in a]
    assert len(ids) == len(set(ids))
    links = [a['href'] for tag, a in elements if tag == 'a']
    assert all(href[1:] in ids for href in links if href.startswith('#'))
    assert sum(href.startswith('#source-') for href in links) > 80
    assert {href for href in links if not href.startswith('#')} == {
        f'{name}/result_{k}.txt' for name in ('1x4', '2x4') for k in range(5)}
    quoted = re.search(r'<a href="1x4/result_0.txt">1x4/result_0.txt</a>:(\d+) <code>(.*?)</code>', page)
    line = (sweep / '1x4/result_0.txt').read_text().splitlines()[int(quoted[1]) - 1]
    assert quoted[2][:60] == line.replace('"', '&#34;')[:60]


def test_nothing_is_fetched(sweep):
    elements = Elements(page_of(studies_of(sweep))).found
    assert not [a for tag, a in elements if tag in ('link', 'img', 'iframe', 'object', 'source')]
    assert not [a for _, a in elements if 'src' in a]
    policy = next(a['content'] for tag, a in elements if a.get('http-equiv') == 'Content-Security-Policy')
    assert policy.startswith("default-src 'none'")
    links = [v for _, a in elements for k, v in a.items() if k.endswith('href')]
    assert not [link for link in links if link.startswith(('http', '//', 'file'))]


def test_a_log_and_a_folder_cannot_write_html(tmp_path):
    write_set(tmp_path / HOSTILE.replace('/', '_'), 1, submission_org=HOSTILE, seed=HOSTILE, dataset=HOSTILE,
              optimizer={'opt_x': HOSTILE}, accuracies=(0.4, 0.5))
    elements = Elements(page_of(studies_of(tmp_path)))
    assert not [tag for tag, _ in elements.found if tag == 'img']
    assert sum(tag == 'script' for tag, _ in elements.found) == 1
    assert not [k for _, a in elements.found for k in a if k.startswith('on')]
    assert '<script>alert(1)' in elements.text.replace('<_', '</')


def test_no_name_of_a_log_becomes_a_file(tmp_path):
    write_set(tmp_path / 'logs/../logs/x$(y)', 2, submission_platform='../../evil', submission_org='/etc/evil')
    dump_report(studies_of(tmp_path / 'logs'), tmp_path / 'out')
    names = sorted(p.name for p in (tmp_path / 'out').iterdir())
    assert set(names) <= {f'report.{s}' for s in ('html', 'json', 'csv', 'md')} | {'report_evaluations.csv'} | {
        f'{p}.{s}' for p in [*PICTURES, 'learning_rate'] for s in ('svg', 'png')}
    assert sorted(p.name for p in tmp_path.iterdir()) == ['logs', 'out']


def test_a_folder_whose_name_is_not_utf8_has_every_form_of_report(tmp_path):
    for nodes, name in ((1, b'a\xff<b'), (2, b'c\xfe')):
        write_set(tmp_path / 'logs' / os.fsdecode(name), 2, nodes=nodes, ranks=4 * nodes, batch=64 * nodes)
    dump_report(studies_of(tmp_path / 'logs'), tmp_path / 'out')
    page = (tmp_path / 'out/report.html').read_text(encoding='utf-8')
    assert '../logs/a%FF%3Cb/result_0.txt' in page and 'a?&lt;b' in page
    assert {f'report.{s}' for s in ('html', 'json', 'csv', 'md')} < {p.name for p in (tmp_path / 'out').iterdir()}


def test_several_studies_have_pictures_of_their_own(sweep, tmp_path):
    write_set(tmp_path / 'other/1x1', 1)
    dump_report(studies_of(tmp_path), tmp_path / 'out')
    names = {p.name for p in (tmp_path / 'out').iterdir()}
    alone = {*PICTURES} - {'efficiency', 'speedup', 'throughput'}  # that compare
    assert {f'study{i}_accuracy_time.svg' for i in (1, 2)} <= names and {f'study2_{p}.png' for p in alone} <= names


def test_the_same_logs_give_the_same_report(sweep, tmp_path):
    for name in ('a', 'b'):
        dump_report(studies_of(sweep), tmp_path / name)
    for path in (tmp_path / 'a').iterdir():
        assert path.read_bytes() == (tmp_path / 'b' / path.name).read_bytes(), path.name


def test_a_folder_that_cannot_be_written_is_said(sweep, tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(UserError, match='--out: .*choose a folder that can be written'):
        dump_report(studies_of(sweep), tmp_path / 'file/out')


def test_pictures_tell_the_value_of_every_mark(sweep):
    pictures = {p.name: render_svg(p) for p in draw_study(studies_of(sweep)[0])}
    assert sorted(pictures) == PICTURES
    titles = {name: [t.text for t in ElementTree.fromstring(svg).iter('{http://www.w3.org/2000/svg}title')]
              for name, svg in pictures.items()}
    assert '2x4/result_3.txt: 1.20 minutes, aborted' in titles['time_to_train']
    assert titles['speedup'] == ['1 node: 1.00 times as fast on 4 accelerators, efficiency 100 %',
                                 '2 nodes: 1.69 times as fast on 8 accelerators, efficiency 85 %']
    # 10 runs of two evaluations.
    assert len(titles['accuracy_time']) == len(titles['accuracy_epochs']) == 20
    assert '1x4/result_0.txt: 76.00 % after 2 epochs, 2.03 min' in titles['accuracy_epochs']


def test_a_picture_stays_a_picture_whatever_a_folder_is_called(tmp_path):
    name = HOSTILE.replace('/', '_')
    write_set(tmp_path / name, 2, submission_org=HOSTILE, dataset=HOSTILE)
    for picture in draw_study(studies_of(tmp_path)[0]):
        elements = list(ElementTree.fromstring(render_svg(picture)).iter())
        assert not [e for e in elements if e.tag.endswith(('}script', '}img'))], picture.name
        if picture.name == 'accuracy_time':
            assert [e for e in elements if name in (e.text or '')]


def test_other_data_than_imagenet_is_named_in_every_picture(tmp_path):
    write_set(tmp_path / '1x1', 2, train_samples=1437, dataset='digits')
    for picture in draw_study(studies_of(tmp_path)[0]):
        text = ' '.join(' '.join(ElementTree.fromstring(picture.svg).itertext()).split())
        assert 'digits (not ImageNet)' in text, picture.name


def test_runs_without_evaluations_or_ends_still_have_a_page(tmp_path):
    write_set(tmp_path / '1x1', 2, accuracies=(), status=None)
    assert 'none of 2 runs reached the target' in page_of(studies_of(tmp_path))
