"""Fixtures: a data set of 200 digits, short trainings on it, and a browser."""

import shutil

import pytest
from e2e.thin import CHANNELS
from e2e.training import arguments, pack_tiny, thin_ranks
from helpers import run, skip_for


@pytest.fixture(scope='session')
def tiny(tmp_path_factory):
    """Data set of 200 digits: 5 steps per epoch, the last one padded."""
    return pack_tiny(tmp_path_factory.mktemp('tiny'))


@pytest.fixture(scope='module')
def thin():
    """Build ResNets in this process with a quarter of the channels, which takes a sixteenth of the
    memory and time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('mlperf_rn50.model.resnet.STAGE_CHANNELS', CHANNELS)
        yield


@pytest.fixture(scope='session')
def whole_run(tiny, tmp_path_factory):
    """Folder and result of an uninterrupted run of two ranks up to the last epoch."""
    run_dir = tmp_path_factory.mktemp('whole')
    return run_dir, run(thin_ranks(2, *arguments(run_dir, tiny)))


@pytest.fixture(scope='module')
def browser():
    from playwright.sync_api import sync_playwright  # only a few tests use it

    path = shutil.which('chromium')
    skip_for('' if path else 'chromium is missing; tests/install.sh installs it')
    with sync_playwright() as playwright:
        # The sandbox requires namespaces, which root in a container does not have.
        browser = playwright.chromium.launch(executable_path=path, args=['--no-sandbox'])
        yield browser
        browser.close()
