"""The report's page in a real browser: headless Chromium from Debian."""
import shutil

import pytest
from helpers import ROOT, call, skip_for
from playwright.sync_api import sync_playwright

pytestmark = pytest.mark.browser
PHONE, DESK = {'width': 390, 'height': 844}, {'width': 1280, 'height': 900}


@pytest.fixture(scope='module')
def browser():
    path = shutil.which('chromium')
    skip_for('' if path else 'chromium missing; tests/install.sh installs it')
    with sync_playwright() as playwright:
        # Its sandbox wants namespaces, which root in a container has not.
        browser = playwright.chromium.launch(executable_path=path, args=['--no-sandbox'])
        yield browser
        browser.close()


@pytest.fixture(scope='module')
def path(tmp_path_factory):
    """The page of the committed sweep."""
    out = tmp_path_factory.mktemp('report')
    done = call('report', ROOT / 'logs/digits_sweep', '--out', out, '--format', 'html')
    assert (done.returncode, done.stdout) == (0, ''), done.stderr
    return out / 'report.html'


@pytest.fixture
def open_page(browser, path):
    """Opens the page; fails if it asks for anything but itself or has anything to complain of."""
    requests, complaints, contexts = [], [], []

    def open_page(**options):
        contexts.append(browser.new_context(**{'viewport': DESK, **options}))
        page = contexts[-1].new_page()
        page.on('request', lambda r: requests.append(r.url))
        page.on('console', lambda m: complaints.append(m.text))
        page.on('pageerror', lambda e: complaints.append(str(e)))
        page.goto(path.as_uri())
        return page
    yield open_page
    for context in contexts:
        context.close()
    assert complaints == [] and requests == [path.as_uri()] * len(contexts)


def column(page, number):
    return page.locator(f'table >> nth=0 >> tbody tr td:nth-child({number})').all_inner_texts()


def test_tables_sort(open_page):
    page = open_page()
    heads = page.locator('table >> nth=0 >> th')
    assert column(page, 4) == ['16', '32', '64', '128']
    heads.nth(3).get_by_role('button').click()
    heads.nth(3).get_by_role('button').click()
    assert column(page, 4) == ['128', '64', '32', '16'] and heads.nth(3).get_attribute('aria-sort') == 'descending'
    heads.nth(0).get_by_role('button').focus()
    page.keyboard.press('Enter')  # with the keyboard, by name
    assert column(page, 1) == ['1x1', '2x1', '4x1', '8x1'] and heads.nth(3).get_attribute('aria-sort') is None


def test_pictures_tell_their_values_to_mouse_and_keyboard(open_page):
    page = open_page()
    tip = page.locator('#tip')
    mark = page.locator('figure >> nth=1 >> use:has(title)').first
    mark.scroll_into_view_if_needed()
    box = mark.bounding_box()
    page.mouse.move(box['x'] + box['width'] / 2, box['y'] + box['height'] / 2)
    assert tip.inner_text() == '1 node: 1.00 times as fast on 1 rank, efficiency 100 %'
    page.mouse.move(0, 0)
    assert tip.inner_text() == ''
    page.locator('figure >> nth=2').focus()
    page.keyboard.press('ArrowRight')
    page.keyboard.press('ArrowRight')
    assert tip.inner_text() == '1x1/result_0.txt: 60.56 % after 2 epochs, 0.50 min'
    page.keyboard.press('Escape')
    assert tip.inner_text() == ''


def test_a_number_leads_to_its_line(open_page):
    page = open_page()
    page.locator('table >> nth=0 >> tbody tr >> nth=0 >> td:nth-child(4) a').click()
    entry = page.locator(':target')
    assert '"key": "global_batch_size", "value": 16' in entry.inner_text()


@pytest.mark.parametrize('options', [{}, {'viewport': PHONE, 'has_touch': True, 'is_mobile': True}])
def test_nothing_is_wider_than_the_screen(open_page, options):
    page = open_page(**options)
    width = page.evaluate('innerWidth')
    assert page.evaluate('document.documentElement.scrollWidth') <= width
    for box in (f.bounding_box() for f in page.locator('figure').all()):
        assert box['x'] >= 0 and box['x'] + box['width'] <= width


def contrast(colours):
    """Contrast ratio of two CSS colours. Source: WCAG 2.2."""
    def luminance(colour):
        parts = [int(c) / 255 for c in colour[4:-1].split(',')]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear))
    high, low = sorted(map(luminance, colours), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_text_can_be_read_in_light_and_dark(open_page, scheme):
    page = open_page(color_scheme=scheme)
    paper = page.evaluate('getComputedStyle(document.body).backgroundColor')
    for place in ('body', 'td a', '.note', 'figcaption', '.sources code'):
        ink = page.evaluate(f"getComputedStyle(document.querySelector('{place}')).color")
        assert contrast((ink, paper)) >= 4.5, place  # AA
    text = page.locator('figure >> nth=0 >> svg text').first
    ink = text.evaluate('e => getComputedStyle(e).fill')
    assert contrast((ink, paper)) >= 4.5 and (paper == 'rgb(255, 255, 255)') == (scheme == 'light')


def test_a_screen_reader_finds_its_way(open_page):
    tree = open_page().locator('body').aria_snapshot()
    for text in ('heading "Epochs to converge and time to train" [level=1]', 'columnheader "batch"', 'cell "16"',
                 'region "Epochs to converge and time to train"', 'figure "Speed-up"', 'rowgroup'):
        assert text in tree, text


def test_it_prints(open_page, tmp_path):
    page = open_page()
    page.emulate_media(media='print')
    assert page.locator('.keys').is_hidden()
    page.pdf(path=tmp_path / 'report.pdf', format='A4')
    assert (tmp_path / 'report.pdf').read_bytes().startswith(b'%PDF')
