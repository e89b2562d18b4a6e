"""Makes the pictures of the report's page for the documentation: light and dark, on a desk and on a phone.

Needs the extra `test` and Debian's chromium.

Usage: python docs/make_pictures.py [FOLDER], which is docs/pictures
"""
import io
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from mlperf_rn50.cli import main

_HERE = Path(__file__).parent
_LOGS = _HERE.parent / 'logs/digits_sweep'
# By the name of the picture: the screen, and how many pixels of the page's height are shown.
_SCREENS = {'report': ({'viewport': {'width': 1400, 'height': 900}}, 1250),
            'report_phone': ({'viewport': {'width': 400, 'height': 860}, 'device_scale_factor': 1.5, 'is_mobile': True,
                              'has_touch': True}, 1250)}


def make_pictures(folder: Path) -> None:
    """Writes the pictures, in 256 colours."""
    with tempfile.TemporaryDirectory() as out, sync_playwright() as playwright:
        if main(['report', str(_LOGS), '--out', out, '--format', 'html']):
            sys.exit(1)
        # Its sandbox wants namespaces, which root in a container has not.
        browser = playwright.chromium.launch(executable_path=shutil.which('chromium'), args=['--no-sandbox'])
        for name, (screen, height) in _SCREENS.items():
            for scheme in ('light', 'dark'):
                page = browser.new_page(color_scheme=scheme, **screen)
                page.goto((Path(out) / 'report.html').as_uri())
                clip = {'x': 0, 'y': 0, 'width': screen['viewport']['width'], 'height': height}
                picture = Image.open(io.BytesIO(page.screenshot(full_page=True, clip=clip))).convert('RGB')
                picture.quantize(256).save(folder / f'{name}{"_dark" if scheme == "dark" else ""}.png', optimize=True)
                page.close()
        browser.close()


if __name__ == '__main__':
    make_pictures(Path(sys.argv[1]) if len(sys.argv) > 1 else _HERE / 'pictures')
