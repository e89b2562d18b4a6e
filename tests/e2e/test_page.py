"""Report page in headless Chromium, with desktop and phone viewports."""

import pytest
from helpers import call, shipped_logs
from lines import write_set
from made_systems import changed, refused

from mlperf_rn50.analysis.report.sections import make_page, page_texts
from mlperf_rn50.analysis.sets.load import load_run_sets
from mlperf_rn50.analysis.sets.scaling import make_studies
from mlperf_rn50.analysis.show.page import render_html

pytestmark = pytest.mark.browser
DESK = {'viewport': {'width': 1400, 'height': 900}}
PHONE = {'viewport': {'width': 400, 'height': 860}, 'has_touch': True, 'is_mobile': True}
SCREENS = pytest.mark.parametrize('screen', [DESK, PHONE], ids=['desk', 'phone'])


def write_rounds(folder, most):
    """Write a page of two studies with two accelerator models, a refused system, and one that did
    not converge."""
    for name, nodes, accuracy in [
        ('a-rather-long-name_of_a_system_v100', 1, 0.8),
        ('b', 2, 0.8),
        ('c', 4, 0.1),
        ('d', 8, 0.8),
    ]:
        write_set(
            folder / 'old' / name,
            1,
            epoch_s=60.0 / nodes,
            nodes=nodes,
            ranks=4 * nodes,
            accuracies=(0.1, accuracy),
            status='success' if accuracy > 0.5 else 'aborted',
        )
    write_set(folder / 'new/e10', 5, epoch_s=20.0)
    write_set(folder / 'new/e9', 5, epoch_s=10.0)
    models = {
        'a-rather-long-name_of_a_system_v100': 'V100',
        'b': 'V100',
        'c': 'V100',
        'e10': 'A100',
        'e9': 'A100',
    }
    systems = [
        changed(
            s,
            accelerator=models.get(s.name),
            framework='MXNet 1.9.1',
            round='v0.7' if s.name[0] < 'e' else 'v1.0',
        )
        for s in load_run_sets([folder])
    ]
    studies = make_studies([refused(s, 'seeds are lost') if s.name == 'd' else s for s in systems])
    path = folder / 'report.html'
    page = make_page(studies, most=most)
    linked = folder if most > 1 else None
    path.write_text(render_html(page, folder=linked, **page_texts(studies)))
    return path


@pytest.fixture(scope='module')
def paths(tmp_path_factory):
    """Pages of the committed sweep, of two rounds, and of these rounds as a large tree."""
    out = tmp_path_factory.mktemp('report')
    done = call('report', shipped_logs() / 'digits_sweep', '--out', out, '--format', 'html')
    assert (done.returncode, done.stdout) == (0, ''), done.stderr
    return {
        'sweep': out / 'report.html',
        'rounds': write_rounds(tmp_path_factory.mktemp('rounds'), most=8),
        'tree': write_rounds(tmp_path_factory.mktemp('tree'), most=1),
    }


@pytest.fixture
def open_page(browser, paths):
    """Function that opens a page; requests for other files, console messages and errors fail the
    test."""
    requests, messages, contexts = [], [], []

    def open_page(name='sweep', **options):
        contexts.append(browser.new_context(**{**DESK, **options}))
        page = contexts[-1].new_page()
        page.on('request', lambda r: requests.append(r.url))
        page.on('console', lambda m: messages.append(m.text))
        page.on('pageerror', lambda e: messages.append(str(e)))
        page.goto(paths[name].as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert messages == [] and set(requests) <= {p.as_uri() for p in paths.values()}
    assert len(requests) == len(contexts)


def column(table, head):
    """Return the visible texts of a column in row order."""
    number = [text.strip() for text in table.locator('th').all_inner_texts()].index(head) + 1
    cells = table.locator(f'tbody tr:not([hidden]) td:nth-child({number}):not([colspan])')
    return [cell.inner_text() for cell in cells.all()]


def frame(page, title):
    """Return the first table with a title, including its controls."""
    return page.locator('.frame', has=page.get_by_role('heading', name=title, exact=True)).first


RESULTS, ALL = '1x1 on 1, 2, 4, 8 nodes, 1 rank per node', 'All systems'


@pytest.mark.engine
def test_numeric_columns_and_names_sort_numerically(open_page):
    table = frame(open_page(), RESULTS).locator('table')
    batch = table.get_by_role('button', name='batch')
    assert column(table, 'batch') == ['16', '32', '64', '128']
    batch.click()
    batch.click()
    assert column(table, 'batch') == ['128', '64', '32', '16']
    assert table.locator('th[aria-sort]').evaluate_all(
        'l => l.map(h => [h.textContent, h.ariaSort])'
    ) == [['batch', 'descending']]
    assert table.page.locator('#announcement').inner_text() == 'sorted by batch, descending'
    table.get_by_role('button', name='nodes').press('Enter')
    assert column(table, 'nodes') == ['1', '2', '4', '8']
    names = frame(open_page('rounds'), ALL).locator('table')
    names.get_by_role('button', name='system').click()
    assert column(names, 'system')[-2:] == ['e9', 'e10']
    for _ in range(2):  # missing values are last in either order
        names.get_by_role('button', name='time, min').click()
        assert column(names, 'system')[-2:] == ['c', 'd']


def test_arrow_keys_move_within_a_table(open_page):
    page = open_page('rounds')
    frame(page, ALL).locator('.columns input').check()
    table = frame(page, ALL).locator('table')
    table.get_by_role('button', name='system').focus()
    for key, text in [
        ('ArrowRight', 'nodes'),
        ('End', 'study'),
        ('ArrowLeft', 'data'),
        ('Home', 'system'),
        ('ArrowDown', column(table, 'system')[0]),
        ('ArrowRight', '1'),
        ('ArrowRight', '4'),
        ('ArrowRight', '0.70'),
        ('ArrowUp', 'time, min'),
    ]:
        page.keyboard.press(key)
        assert page.evaluate('document.activeElement.textContent') == text, key


def test_rows_are_filtered_by_text_and_lists(open_page):
    from playwright.sync_api import expect

    page = open_page('rounds')
    box = frame(page, ALL)
    form, table = box.get_by_role('search'), box.locator('table')
    count = form.locator('output')
    assert (
        count.inner_text() == '6 of 6 systems'
        and count.evaluate('o => o.role || o.localName') == 'output'
    )
    form.get_by_label('find').fill('MXNET v1.0')
    assert (
        sorted(column(table, 'system')) == ['e10', 'e9'] and count.inner_text() == '2 of 6 systems'
    )
    form.get_by_role('button', name='Show all').click()
    expect(count).to_have_text('6 of 6 systems')
    form.get_by_label('generation').select_option('V100')
    form.get_by_label('round').select_option('v0.7')
    assert count.inner_text() == '3 of 6 systems' and 'b' in column(table, 'system')
    form.get_by_label('nodes').select_option('2')
    assert column(table, 'system') == ['b']
    form.get_by_label('nodes').select_option('all')
    table.get_by_role('button', name='system').click()  # sorting keeps filtered rows hidden
    assert len(column(table, 'system')) == 3
    form.get_by_label('find').fill('zzz')
    assert count.inner_text() == '0 of 6 systems'
    form.get_by_label('find').press('Enter')
    assert page.evaluate('location.search') == ''


def test_filter_of_a_large_tree_hides_rows_series_and_studies(open_page):
    page = open_page('tree')
    studies = page.locator('details.study')
    assert (
        studies.evaluate_all('all => all.map(s => [s.open, s.checkVisibility()])')
        == [[False, True]] * 2
    )
    frame(page, ALL).get_by_role('link', name='a-rather-long').click()  # opens the study
    old = studies.filter(has_text='old: ')
    series, others = old.locator('.frame.whole'), frame(page, 'Other systems')
    assert series.locator('tbody tr:visible').count() == 2 and column(
        others.locator('table'), 'system'
    ) == ['c', 'd']
    page.get_by_label('find').fill('rather 100.0')  # not its series, which is relative to it
    assert series.locator('tbody tr:visible').count() == 1 and not others.is_visible()
    assert studies.evaluate_all('all => all.map(s => s.checkVisibility())') == [False, True]
    page.get_by_label('find').fill('v1.0')
    assert studies.evaluate_all('all => all.map(s => s.checkVisibility())') == [True, False]


@SCREENS
def test_sources_expand_when_a_number_is_clicked(open_page, screen):
    page = open_page(**screen)
    folded = page.evaluate('document.documentElement.scrollHeight')
    sources = page.locator('details.sources')
    assert not sources.evaluate('d => d.open') and not page.locator('#source-1').is_visible()
    link = frame(page, RESULTS).get_by_role('link', name='2.7', exact=True)
    link.click()
    entry = page.locator(':target')
    assert '"key": "eval_accuracy"' in entry.inner_text() and entry.is_visible()
    assert page.evaluate('document.documentElement.scrollHeight') > 2 * folded
    box = entry.bounding_box()
    assert 0 <= box['y'] < screen['viewport']['height']
    page.get_by_role('button', name='Back to the number').click()
    assert link.evaluate('a => a === document.activeElement')
    assert 0 < link.bounding_box()['y'] < screen['viewport']['height']
    sources.evaluate('d => { d.open = false; }')
    link.click()  # a repeated click on the same link
    assert entry.is_visible()


def test_plots_show_values_for_mouse_and_keyboard(open_page):
    page = open_page()
    tip = page.locator('#tip')
    figure = page.locator('figure', has_text=RESULTS).first
    mark = figure.locator('use:has(title)').first
    mark.scroll_into_view_if_needed()
    box = mark.bounding_box()
    page.mouse.move(box['x'] + box['width'] / 2, box['y'] + box['height'] / 2)
    assert tip.inner_text() == '1x1: 0.66 min'
    page.mouse.move(0, 0)
    assert tip.inner_text() == ''
    figure.focus()  # may scroll the page in the next frame, which hides a value
    page.evaluate('new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))')
    page.keyboard.press('ArrowRight')
    first = tip.inner_text()
    page.keyboard.press('ArrowRight')
    assert first and tip.inner_text() not in ('', first)
    page.keyboard.press('ArrowLeft')
    assert tip.inner_text() == first
    page.keyboard.press('Escape')
    assert tip.inner_text() == ''


@pytest.mark.parametrize('name', ['sweep', 'rounds', 'tree'])
@SCREENS
def test_page_fits_the_screen_width(open_page, name, screen):
    page = open_page(name, **screen)
    width = page.evaluate('innerWidth')
    assert (
        width == screen['viewport']['width']
        and page.evaluate('document.documentElement.scrollWidth') <= width
    )
    for box in (f.bounding_box() for f in page.locator('figure').all()):
        assert box['x'] >= 0 and box['x'] + box['width'] <= width


@SCREENS
def test_nodes_accelerators_and_time_of_all_systems_are_in_view(open_page, screen):
    page = open_page('rounds', **screen)
    box = frame(page, ALL).locator('.scroll').bounding_box()
    for head in ('nodes', 'accelerators', 'time, min'):
        place = frame(page, ALL).get_by_role('columnheader', name=head, exact=True).bounding_box()
        assert place['x'] + place['width'] <= box['x'] + box['width'], head


@SCREENS
def test_result_is_first_and_rows_have_one_line(open_page, screen):
    page = open_page(**screen)
    table = frame(page, RESULTS).locator('table')
    assert page.locator('.answers').bounding_box()['y'] < screen['viewport']['height'] / 6
    assert table.bounding_box()['y'] < screen['viewport']['height'] * 0.6
    heads, is_desk = table.get_by_role('columnheader'), screen is DESK
    assert heads.count() == (12 if is_desk else 5)
    heights = table.locator('tbody tr').evaluate_all('l => l.map(r => r.offsetHeight)')
    assert max(heights) < 45  # two lines need 52
    box = frame(page, RESULTS).locator('.columns input')
    assert box.is_visible() != is_desk  # which shows all columns
    if not is_desk:
        box.check()
        assert heads.count() == 12


@pytest.mark.parametrize('name', ['sweep', 'rounds', 'tree'])
def test_each_table_on_a_phone_shows_a_number_and_different_names(open_page, name):
    page = open_page(name, **PHONE)
    page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
    for table in page.locator('.scroll > table').all():
        first = table.locator('tbody tr').first.locator('td.number').first
        assert not first.count() or first.bounding_box()['x'] < PHONE['viewport']['width'] - 60, (
            table.inner_text()
        )
    names = page.locator('td:first-child > *').evaluate_all(
        'l => l.map(e => [e.textContent, e.dataset.cut])'
    )
    assert {cut for _, cut in names if cut} == ({'a-rather…em_v100'} if name != 'sweep' else set())


FONT_SIZES = """
    [...document.querySelectorAll('td, .note, li, summary + *')]
        .filter(e => e.checkVisibility() && !e.closest('.sources, h2'))
        .map(e => getComputedStyle(e).fontSize)"""
# for each column, whether it is printed if its rows differ, else named below the table
COLUMNS_THAT_DIFFER = """
    l => l.filter(t => !t.closest('.study:is(details)')).map(t =>
        [...t.tHead.rows[0].cells].map((head, k) => {
            const rows = [...t.tBodies[0].rows].filter(r => !r.querySelector('.refused'));
            const texts = new Set(rows.map(r => r.cells[k].textContent));
            const note = t.closest('.frame').querySelector('.shared');
            const text = note && note.checkVisibility() ? note.textContent : '';
            const isNamed = text.includes(`${head.innerText} `);
            const isSame = k > 0 && rows.length > 1 && texts.size === 1;
            const isShown = head.checkVisibility({contentVisibilityAuto: true});
            return isShown === !isSame && (!isSame || isNamed);
        }))"""
BROKEN_WORDS = """
    l => l.flatMap(b => [...b.textContent.matchAll(/[^ ]+/g)].filter(m => {
        const range = document.createRange();
        range.setStart(b.firstChild, m.index);
        range.setEnd(b.firstChild, m.index + m[0].length);
        return range.getClientRects().length > 1;
    }).map(m => m[0]))"""


@pytest.mark.parametrize('name', ['sweep', 'rounds', 'tree'])
def test_print_has_the_columns_that_differ_in_one_size(open_page, name):
    page = open_page(name, viewport={'width': 1032, 'height': 680})  # A4 without margins
    page.emulate_media(media='print')
    # else it is printed in a smaller size
    assert page.evaluate('document.documentElement.scrollWidth') <= 1032
    sizes = page.evaluate(FONT_SIZES)
    assert set(sizes) == {'12px'}  # 9 pt
    studies = page.locator('details.study')
    assert studies.evaluate_all('l => l.map(s => s.querySelector("table").checkVisibility())') == (
        [False, False] if name == 'tree' else []
    )
    tables = page.locator('table').evaluate_all(COLUMNS_THAT_DIFFER)
    assert tables and all(all(columns) for columns in tables)
    heads = page.locator('th:not(.same) button')
    assert heads.evaluate_all(BROKEN_WORDS) == []  # headings break only at spaces
    assert page.locator('.answers').is_visible() and not page.locator('.columns').first.is_visible()
