"""The watch command in a pseudo-terminal, and its page in headless Chromium."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from datetime import datetime, timezone

import pytest
from helpers import CLI, ROOT
from lines import complete, run_lines, write_lines
from live_runs import (
    NOW_S,
    course,
    evaluation,
    rank,
    reference,
    times,
    train,
    write_live,
    write_metrics,
)

from mlperf_rn50.analysis.watch.follower import Follower
from mlperf_rn50.analysis.watch.live_page import dump_page, render_page

DESK = {'viewport': {'width': 1400, 'height': 900}}
PHONE = {'viewport': {'width': 400, 'height': 860}, 'has_touch': True, 'is_mobile': True}
HANG_LIMIT_S = 120  # only guards against hangs, because the screen is redrawn indefinitely
LONG = 'a-rather-long-name-of-a-host-that-fills-every-column-' * 3


class Terminal:
    """Program in a pseudo-terminal of a given size."""

    def __init__(self, *words, columns=80, rows=24, **env):
        self.master, slave = pty.openpty()
        self.resize(columns, rows, is_new=True)
        self.text = ''
        self.program = subprocess.Popen(
            [*CLI, *map(str, words)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            cwd=ROOT,
            env={
                **os.environ,
                **dict.fromkeys(('NO_COLOR', 'COLUMNS', 'LINES'), ''),
                'TERM': 'xterm-256color',
                'PYTHONPATH': str(ROOT),
                **env,
            },
        )
        os.close(slave)

    def resize(self, columns, rows, is_new=False):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack('HHHH', rows, columns, 0, 0))
        if not is_new:
            self.program.send_signal(signal.SIGWINCH)

    def read(self):
        """Read available output; return False at the end."""
        ready, _, _ = select.select([self.master], [], [], HANG_LIMIT_S)
        assert ready, f'no output within {HANG_LIMIT_S} s; before: {self.text[-2000:]}'
        try:
            part = os.read(self.master, 65536)
        except OSError:  # on Linux, when the other end is closed
            part = b''
        self.text += part.decode('utf-8', 'replace')
        return bool(part)

    def until(self, pattern):
        """Read until unread output matches a pattern; return the output up to the end of the
        match."""
        until_s = time.monotonic() + HANG_LIMIT_S
        while not (match := re.search(pattern, self.text, re.DOTALL)):
            assert time.monotonic() < until_s and self.read(), (
                f'{pattern}: not in {self.text[-2000:]}'
            )
        before, self.text = self.text[: match.end()], self.text[match.end() :]
        return before

    def rest(self):
        """Return the remaining output and the exit code."""
        while self.read():
            pass
        return self.text, self.program.wait(HANG_LIMIT_S)


@pytest.fixture
def terminal():
    """Function that starts watch in a terminal."""
    started = []

    def start(*words, **keys):
        started.append(Terminal('watch', *words, '--every', '0.2', **keys))
        return started[-1]

    yield start
    for t in started:
        if t.program.poll() is None:
            t.program.kill()
            t.program.wait()
        os.close(t.master)


def test_run_is_followed_from_before_its_start_to_its_end(terminal, tmp_path):
    folder = tmp_path / 'run'
    screen = terminal(folder)
    screen.until('not started yet: no such folder; waiting')
    write_live(tmp_path / 'made', train(10))
    with open(tmp_path / 'made/.run_0.lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as the training program does
        (tmp_path / 'made').rename(folder)
        screen.until(r'running, last written .*20\.00 % at epoch 1')
        write_metrics(folder / 'metrics.jsonl', evaluation(1, 33), mode='a')
        screen.until(r'33\.00 % at epoch 1.*●')
        screen.resize(150, 30)
        wide = screen.until(r'at epoch 1, target[^\n]*│')  # the curve is to the right of the values
        assert '\x1b[?1049l' not in wide
    screen.until('killed: the log has no end')  # the lock is released
    write_lines(
        folder / 'result_0.txt', complete(run_lines((0.33, 0.8), target=0.749, division='open'))
    )
    rest, code = screen.rest()
    end = rest.rpartition('\x1b[?1049l')[2]
    # the text that remains on the terminal
    assert code == 0 and 'converged after' in end and '\x1b[?1049h' not in end


def test_ctrl_c_restores_the_terminal(terminal, tmp_path):
    screen = terminal(tmp_path, NO_COLOR='1')
    before = screen.until('waiting')
    os.write(screen.master, b'\x03')  # a controlling terminal would send the signal
    # the terminal discards pending output when it handles the character
    before += screen.until(r'\^C')
    screen.program.send_signal(signal.SIGINT)
    rest, code = screen.rest()
    assert code == 0 and '\x1b[?1049l' in rest and 'Traceback' not in rest and 'Error' not in rest
    assert not re.search(r'\x1b\[[\d;]*3[0-7]m', before + rest)


def test_sigterm_leaves_no_temporary_page(terminal, tmp_path):
    folder = write_live(tmp_path / 'run', train(10), evaluation(1, 20))
    screen = terminal(folder, '--html', TERM='dumb')  # a dumb terminal gets lines
    line = screen.until('run 0: killed[^\n]*\n')
    assert '\x1b[?1049h' not in line
    screen.program.send_signal(signal.SIGTERM)
    assert screen.rest()[1] == 0
    assert {p.name for p in folder.iterdir()} == {
        'result_0.txt',
        'metrics.jsonl',
        'config.yaml',
        'watch.html',
    }


def running(folder, hits=20):
    """Return the state of a run with everything that a page shows."""
    ranks = [rank(k, 1.0 + k / 10, LONG) for k in range(20)]
    write_live(
        folder,
        reference(*range(1, 11)),
        train(10),
        *(evaluation(e, hits) for e in (1, 2, 3)),
        course(3, behind=True, text='behind: 25 points below the reference runs'),
        times(*ranks, stragglers=[f'rank 3 on {LONG} is slow']),
        train(70),
    )
    return Follower(folder).look(NOW_S)


@pytest.mark.browser
@pytest.mark.parametrize('screen', [DESK, PHONE], ids=['desk', 'phone'])
def test_page_fits_the_screen_without_errors_or_requests(browser, tmp_path, screen):
    requests, messages = [], []
    path = tmp_path / 'page.html'
    path.write_text(render_page(running(tmp_path / 'run'), datetime.now(timezone.utc), 3600))
    with browser.new_context(**screen) as context:
        page = context.new_page()
        page.on('request', lambda r: requests.append(r.url))
        page.on('console', lambda m: messages.append(m.text))
        page.goto(path.as_uri())
        width = page.evaluate('innerWidth')
        assert (
            width == screen['viewport']['width']
            and page.evaluate('document.documentElement.scrollWidth') <= width
        )
        for box in (f.bounding_box() for f in page.locator('figure, table, dl').all()):
            assert box['x'] >= 0 and box['x'] + box['width'] <= width
        sizes = page.evaluate("""[...document.querySelectorAll("svg text")].map(t => {
            const {a, b} = t.getScreenCTM();  // b is not 0 for rotated text
            return parseFloat(getComputedStyle(t).fontSize) * Math.hypot(a, b);
        })""")
        assert min(sizes) >= 9  # CSS pixels
    assert len(requests) == 1 and messages == []


@pytest.mark.browser
@pytest.mark.parametrize('has_script', [True, False], ids=['script', 'no script'])
def test_page_updates_and_is_final_after_the_run(browser, tmp_path, has_script):
    folder = tmp_path / 'run'
    run = running(folder)
    dump_page(run, folder, 1.0)
    with browser.new_context(java_script_enabled=has_script) as context:
        page = context.new_page()
        page.goto((folder / 'watch.html').as_uri())
        # the page reloads itself periodically
        page.get_by_text('20.00 % at epoch 3').first.wait_for()
        dump_page(running(folder, hits=30), folder, 1.0)
        page.get_by_text('30.00 % at epoch 3').first.wait_for()
        write_lines(folder / 'result_0.txt', run_lines((0.3, 0.8), target=0.749))
        dump_page(Follower(folder).look(NOW_S), folder, 1.0)
        page.get_by_text('The run is over and this page is final.').wait_for()
        assert page.locator('meta[http-equiv=refresh]').count() == 0
