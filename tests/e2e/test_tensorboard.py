"""TensorBoard itself, in headless Chromium, shows a run."""
import re
import shutil
import subprocess
import sys

import pytest
from e2e.training import arguments
from helpers import call, skip_for
from playwright.sync_api import expect, sync_playwright

pytestmark = pytest.mark.browser


@pytest.fixture(scope='module')
def address(tiny, tmp_path_factory):
    """Where TensorBoard shows a run of two epochs."""
    run_dir = tmp_path_factory.mktemp('shown')
    assert call(*arguments(run_dir, tiny, '--train.max_epochs=2', '--run.tensorboard=true')).returncode == 1
    server = subprocess.Popen([sys.executable, '-m', 'tensorboard.main', '--logdir', run_dir, '--host', '127.0.0.1',
                               '--port', '0', '--load_fast=false'], stderr=subprocess.PIPE, text=True)
    yield next(m[0] for line in server.stderr if (m := re.search(r'http://127\.0\.0\.1:\d+/', line)))
    server.kill()
    server.wait()


def test_its_scalars_are_there(address):
    path = shutil.which('chromium')
    skip_for('' if path else 'chromium missing; tests/install.sh installs it')
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=['--no-sandbox'])
        page = browser.new_page(viewport={'width': 1400, 'height': 1000})
        page.goto(f'{address}?darkMode=false#timeseries')
        for name in ('accuracy', 'train'):
            expect(page.get_by_text(re.compile(rf'^{name}$')).first).to_be_visible(timeout=60_000)
        page.get_by_role('combobox', name='Filter tags').fill('train/')
        for tag in ('loss', 'learning_rate', 'gradient_norm'):
            expect(page.get_by_title(f'train/{tag}').first).to_be_visible(timeout=60_000)
        browser.close()
