"""Stop signals. The first makes a run write a checkpoint and end; a later Ctrl-C ends it at once.

Handlers are always set, because the first process of a container has no default actions and a non-interactive shell
starts background processes with SIGINT ignored.
"""
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from mlperf_rn50.errors import EXIT_AT_ONCE

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# Signals that end a program without state to save; SIGUSR1 of a launcher is only for programs with a checkpoint.
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SAME_S = 1.0  # as one Ctrl-C may arrive twice, from the terminal for the process group and from the launcher


class StopRequests:
    """Counter of the stop requests to this process."""

    def __init__(self) -> None:
        self._first_at: float | None = None

    def is_forced(self, number: int, now_s: float) -> bool:
        """Count a signal; return whether it is a Ctrl-C some time after an earlier request."""
        # Slurm or a closing terminal may repeat the other signals while a checkpoint is written.
        if self._first_at is None:
            self._first_at = now_s
        return number == signal.SIGINT and now_s - self._first_at >= _SAME_S


def catch(handler: Callable[[int, Any], Any], numbers: Sequence[signal.Signals] = STOP_SIGNALS,
          unblock: bool = True) -> None:
    """Set the handler of stop signals, except of a SIGHUP ignored by nohup, and unblock them."""
    for number in numbers:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)
    if unblock:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def end_at_once(code: int = EXIT_AT_ONCE) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


@contextmanager
def handle_in_thread(request_stop: Callable[[], object] | None) -> Iterator[None]:
    """Handle the signals of a process without a watcher, in a thread because native calls delay Python handlers."""
    requests, (reader, writer) = StopRequests(), os.pipe()
    os.set_blocking(writer, False)

    def read_signals() -> None:
        while byte := os.read(reader, 1):
            if byte[0] not in STOP_SIGNALS:
                continue
            if requests.is_forced(byte[0], time.monotonic()):
                end_at_once()
            if request_stop:
                request_stop()
            elif byte[0] in END_SIGNALS:  # the main thread is interrupted; end the program if that takes long
                time.sleep(2 * _SAME_S)
                end_at_once()
        os.close(reader)
    threading.Thread(target=read_signals, name='signals', daemon=True).start()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if request_stop:
        catch(lambda *_: None)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
