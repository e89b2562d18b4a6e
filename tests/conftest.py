"""Shared fixtures, selection of tests, and the summary of time, memory and tests left out."""

import functools
import os
import resource
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from closure import needs_training_packages
from helpers import CLI, HISTORY, MPIJOB_SCHEMA, PUBLISHED, cpuinfo, return_memory, run
from hypothesis import HealthCheck, settings

from mlperf_rn50.system.processor import find_processor

# MXNet reads this at import; without it every process has a spinning thread per core.
os.environ.setdefault('OMP_NUM_THREADS', '1')
# A script's background job ignores SIGINT, and so would every program that the tests start and
# interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Some continuous integration systems colour all output.
os.environ.pop('FORCE_COLOR', None)
# Messages of git and others are compared in English.
os.environ['LANGUAGE'] = 'en'

# A slow machine must not fail a test. Continuous integration repeats the same examples, so that
# only the tested change can cause a failure. Other runs try new examples.
settings.register_profile(
    'untimed',
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize='MLPERF_RN50_NEED_ALL' in os.environ,
)
settings.load_profile('untimed')

# Marks of tests that a run may leave out, and the reasons.
LEFT_OUT = {
    'needs_avx512': f'need AVX-512, and this processor may use {find_processor().uses}',
    'needs_mpijob_schema': 'need the MPIJob schema, ../shared/reference/mpijob-crd.yaml',
    'needs_published': 'need the published MLPerf logs in ../shared/published',
    'needs_history': 'need the lists of all published rounds in ../shared/history',
    'cluster': 'need root, for hosts, Slurm and containers: launch/test.sh --all',
    'browser': 'need headless Chromium: launch/test.sh --all',
    'slow': 'take longer: launch/test.sh --all',
}
# Tests in tests/gpu run only with launch/test.sh --gpu, and are reported as not run otherwise.
NO_GPU = 'needs a GPU'
_COUNTS = pytest.StashKey[Counter]()
_PEAKS_KB = pytest.StashKey[list[int]]()
_START = time.monotonic()


def pytest_addoption(parser):
    parser.addoption(
        '--packages',
        choices=['light', 'training'],
        help='only the test files that import MXNet, DALI or Horovod (training), or only the '
        'others',
    )
    parser.addoption(
        '--update',
        action='store_true',
        help='rewrite the expected.json of every case in tests/logs',
    )


def pytest_ignore_collect(collection_path, config):
    """Ignore test files that --packages excludes before they are imported."""
    if (kind := config.getoption('--packages')) and collection_path.name.startswith('test_'):
        return True if needs_training_packages(collection_path) != (kind == 'training') else None
    return None


def pytest_configure(config):
    config.stash[_COUNTS] = Counter()
    config.stash[_PEAKS_KB] = []
    config.addinivalue_line('markers', 'engine: one test of each real engine, which .ci/run runs')
    config.addinivalue_line('markers', f'gpu: {NO_GPU}: launch/test.sh --gpu')
    for mark, why in LEFT_OUT.items():
        config.addinivalue_line('markers', f'{mark}: {why}')


@functools.cache
def _missing() -> set[str]:
    """Return the marks whose requirements this machine or checkout lacks."""
    has = {
        'needs_avx512': find_processor().has_avx512,
        'needs_published': PUBLISHED.is_dir(),
        'needs_history': HISTORY.is_dir(),
        'needs_mpijob_schema': MPIJOB_SCHEMA.is_file(),
    }
    return {mark for mark, is_there in has.items() if not is_there}


def pytest_collection_modifyitems(config, items):
    """Mark tests by folder, and deselect those that cannot run here."""
    for item in items:
        if Path(item.path).parent.name == 'cluster':
            item.add_marker('cluster')
        if Path(item.path).parent.name == 'gpu':
            item.add_marker('gpu')
            if not os.environ.get('MLPERF_RN50_TEST_GPU'):
                item.add_marker(pytest.mark.skip(reason=NO_GPU))
    impossible = [i for i in items if any(i.get_closest_marker(m) for m in _missing())]
    items[:] = [i for i in items if i not in impossible]
    config.hook.pytest_deselected(items=impossible)


def pytest_deselected(items):
    for item in items:
        why = {m.name for m in item.iter_markers()} & (_missing() | {'cluster', 'browser', 'slow'})
        item.config.stash[_COUNTS].update([m for m in LEFT_OUT if m in why][:1])


def _peak_kb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def pytest_sessionfinish(session):
    """Send the counts, equal in all workers, and the peak memory of this worker to the reporting
    process."""
    if hasattr(session.config, 'workeroutput'):
        session.config.workeroutput.update(
            left_out=dict(session.config.stash[_COUNTS]), peak_kb=_peak_kb()
        )


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    output = getattr(node, 'workeroutput', {})
    node.config.stash[_COUNTS] = Counter(output.get('left_out', {}))
    node.config.stash[_PEAKS_KB].append(output.get('peak_kb', 0))


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    skipped = [str(r.longrepr) for r in terminalreporter.stats.get('skipped', [])]
    if without := sum(NO_GPU in why for why in skipped):
        terminalreporter.write_line(
            f'not run: {without} tests that need a GPU: launch/test.sh --gpu'
        )
    for mark, number in sorted(config.stash[_COUNTS].items()):
        terminalreporter.write_line(f'left out: {number} tests that {LEFT_OUT[mark]}')
    minutes, seconds = divmod(round(time.monotonic() - _START), 60)
    peak_gb = max(config.stash[_PEAKS_KB] or [_peak_kb()]) * 1024 / 1e9
    terminalreporter.write_line(f'time {minutes}:{seconds:02d}, largest worker {peak_gb:.1f} GB')
    # set by launch/test.sh, which calls pytest several times
    if peaks := os.environ.get('MLPERF_RN50_PEAKS'):
        with open(peaks, 'a') as file:
            file.write(f'{peak_gb:.1f}\n')


@pytest.fixture(scope='module', autouse=True)
def returned_memory():
    """Return freed memory to the system after each file."""
    yield
    return_memory()


@pytest.fixture
def fake_processor(tmp_path_factory, monkeypatch):
    """Function that replaces the processor in this process, whatever machine runs the tests;
    kernels do not change."""

    def fake(flags: str, limit: str = '') -> None:
        path = tmp_path_factory.mktemp('proc') / 'cpuinfo'
        path.write_text(cpuinfo(flags))
        monkeypatch.setattr('mlperf_rn50.system.processor.CPUINFO', path)
        monkeypatch.setenv('DNNL_MAX_CPU_ISA', limit)

    return fake


@pytest.fixture(scope='session')
def digits(tmp_path_factory) -> Path:
    """Prepared digits data set."""
    out = tmp_path_factory.mktemp('data') / 'digits'
    done = run([*CLI, 'prepare', 'digits', '--out', out])
    assert done.returncode == 0, done.stderr
    return out
