"""Make the screenshots of report and watch for the documentation.

The watched run trains scikit-learn's digits with 2 ranks and is compared with five earlier runs.
Needs the extra `test`, Debian's chromium, and for the run the training packages and data/digits.

Usage: python docs/make_pictures.py [--only report|watch] [FOLDER], by default docs/pictures
"""

import io
import os
import shutil
import signal
import subprocess
import tempfile
import time
from argparse import ArgumentParser
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright
from rich.console import Console
from rich.terminal_theme import MONOKAI

from mlperf_rn50.analysis.watch.follower import Follower
from mlperf_rn50.analysis.watch.live_page import dump_page
from mlperf_rn50.analysis.watch.screen import render
from mlperf_rn50.cli import main

_HERE = Path(__file__).parent
_TOP = _HERE.parent
_STUDY = 'published/v2.0/Dell'  # of the packaged table, so the figures need no logs
_RUN = Path('logs/digits_cpu/now')
_TRAIN = [
    'launch/local.sh',
    '--ranks-per-node',
    '2',
    '--config',
    'launch/configs/digits_cpu.yaml',
    '--run-dir',
    _RUN,
    '--run.reference',
    '[logs/digits_five]',
    '--checkpoint.period_epochs',
    '1',
]
_SHOWN_EPOCH = 2.2  # the run takes three or four
# Screen, and maximum height of the screenshot in pixels.
_DESK = {'viewport': {'width': 1400, 'height': 900}}, 1250
_REPORT = _DESK[0], 865  # the sentences, and the tables of the first series
_PHONE = (
    {
        'viewport': {'width': 400, 'height': 860},
        'device_scale_factor': 1.5,
        'is_mobile': True,
        'has_touch': True,
    },
    1250,
)
_TERMINAL = """<body style="margin:0;background:{background};color:{foreground}">
<pre style="margin:0;padding:14px;font:14px/17px 'DejaVu Sans Mono',monospace">{code}</pre>
</body>"""


def _shoot(
    browser: Browser, page_path: Path, target: Path, screen: dict, most_px: int, scheme: str
) -> None:
    """Write a screenshot of a page in 256 colours."""
    page = browser.new_page(color_scheme=scheme, **screen)
    page.goto(page_path.as_uri())
    height = min(most_px, page.evaluate('document.documentElement.scrollHeight'))
    clip = {'x': 0, 'y': 0, 'width': screen['viewport']['width'], 'height': height}
    picture = Image.open(io.BytesIO(page.screenshot(full_page=True, clip=clip))).convert('RGB')
    picture.quantize(256).save(target, optimize=True)
    page.close()


def make_report_pictures(browser: Browser, folder: Path) -> None:
    """Make screenshots of the report on a published study in light and dark mode, on a desktop and
    on a phone."""
    with tempfile.TemporaryDirectory() as out:
        if main(['report', _STUDY, '--out', out, '--format', 'html']):
            raise SystemExit(1)
        for name, screen, scheme in (
            ('report', _REPORT, 'light'),
            ('report_dark', _REPORT, 'dark'),
            ('report_phone', _PHONE, 'light'),
        ):
            _shoot(browser, Path(out) / 'report.html', folder / f'{name}.png', *screen, scheme)


def make_watch_pictures(browser: Browser, folder: Path) -> None:
    """Make screenshots of a live run in a terminal of 100 columns, on a desktop, and in dark mode
    on a phone."""
    shutil.rmtree(_RUN, ignore_errors=True)
    training = subprocess.Popen(list(map(str, _TRAIN)), start_new_session=True)
    try:
        follower = Follower(_RUN)
        while ((run := follower.look()).epoch or 0.0) < _SHOWN_EPOCH:
            if training.poll() is not None:
                raise SystemExit(
                    f'training ended with exit code {training.returncode} before the screenshot'
                )
            time.sleep(0.5)
    finally:
        if training.poll() is None:
            os.killpg(training.pid, signal.SIGTERM)
            training.wait()
    dump_page(run, _RUN, 5.0)
    console = Console(
        record=True, width=100, file=io.StringIO(), force_terminal=True, highlight=False
    )
    console.print(render([run], console, None, 34))
    terminal = _RUN / 'terminal.html'
    terminal.write_text(
        console.export_html(theme=MONOKAI, inline_styles=True, code_format=_TERMINAL)
    )
    window = {'viewport': {'width': 880, 'height': 100}}
    _shoot(browser, terminal.absolute(), folder / 'watch_terminal.png', window, 900, 'dark')
    _shoot(browser, (_RUN / 'watch.html').absolute(), folder / 'watch.png', *_DESK, 'light')
    _shoot(browser, (_RUN / 'watch.html').absolute(), folder / 'watch_phone.png', *_PHONE, 'dark')


def make_pictures(folder: Path, only: str | None) -> None:
    """Make all screenshots, or only those of one page."""
    with sync_playwright() as playwright:
        # The sandbox needs namespaces, which root in a container does not have.
        browser = playwright.chromium.launch(
            executable_path=shutil.which('chromium'), args=['--no-sandbox']
        )
        if only != 'watch':
            make_report_pictures(browser, folder)
        if only != 'report':
            make_watch_pictures(browser, folder)
        browser.close()


if __name__ == '__main__':
    parser = ArgumentParser(description=__doc__)
    parser.add_argument('--only', choices=['report', 'watch'])
    parser.add_argument('folder', nargs='?', type=Path, default=_HERE / 'pictures')
    given = parser.parse_args()
    os.chdir(_TOP)
    make_pictures(given.folder.absolute(), given.only)
