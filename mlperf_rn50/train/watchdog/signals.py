"""Signals that ask to stop. Asked once, a run writes a checkpoint and can be resumed; by Ctrl-C again, it ends at once.

Handlers are always set: the first process of a container has no default actions, and a shell that is not interactive
starts what runs in its background with SIGINT ignored.
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
# What ends a program that has nothing to finish: a launcher's SIGUSR1 is for those that have.
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# One Ctrl-C may come twice: the terminal signals a whole process group, and a launcher hands it on as well.
_SAME_S = 1.0


class StopRequests:
    """How often this process was asked to stop."""

    def __init__(self) -> None:
        self._first_at: float | None = None

    def means_at_once(self, number: int, now_s: float) -> bool:
        """Counts a signal; whether it asks to end at once: Ctrl-C does when a word to stop came a while before.

        The others may be repeated by whoever sends them, Slurm or a closing terminal, and a checkpoint takes its time.
        """
        if self._first_at is None:
            self._first_at = now_s
        return number == signal.SIGINT and now_s - self._first_at >= _SAME_S


def catch(handler: Callable[[int, Any], Any], numbers: Sequence[signal.Signals] = STOP_SIGNALS,
          lets_in: bool = True) -> None:
    """Handles signals that ask to stop, and lets those in that wait; nohup keeps its word."""
    for number in numbers:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)
    if lets_in:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def end_at_once(code: int = EXIT_AT_ONCE) -> NoReturn:
    """Ends this process without waiting for anything."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


@contextmanager
def alone(ask: Callable[[], object] | None) -> Iterator[None]:
    """Handle the signals of a process without a watcher, in a thread: a handler waits for the end of a native call.

    Args:
        ask: requests a stop of a program that ends by itself; None for a program that has nothing to finish: it is
            interrupted, and ended if that takes long.
    """
    asked, (reader, writer) = StopRequests(), os.pipe()
    os.set_blocking(writer, False)

    def hear() -> None:
        while byte := os.read(reader, 1):
            if byte[0] not in STOP_SIGNALS:
                continue
            if asked.means_at_once(byte[0], time.monotonic()):
                end_at_once()
            if ask:
                ask()
            elif byte[0] in END_SIGNALS:
                time.sleep(2 * _SAME_S)
                end_at_once()
        os.close(reader)
    threading.Thread(target=hear, name='signals', daemon=True).start()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if ask:
        catch(lambda *_: None)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
