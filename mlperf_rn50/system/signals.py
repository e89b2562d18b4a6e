"""Stop signals. The first makes a run write a checkpoint and end; a later Ctrl-C ends it at once.

Handlers are always set, because the first process of a container has no default actions and a
non-interactive shell starts background processes with SIGINT ignored.
"""

import ctypes
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from mlperf_rn50.errors import EXIT_AT_ONCE
from mlperf_rn50.system.launcher_env import launched_size, print_stderr

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# Signals that end a program without state to save. SIGUSR1, a launcher's stop request, is for
# programs with state.
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STOPPING = (
    'mlperf-rn50: stopping; a run that has trained writes a checkpoint first; Ctrl-C '
    'again: at once, without one'
)
# One Ctrl-C may arrive twice, from the terminal for the process group and from the launcher. Only a
# later one counts.
_SECOND_CTRL_C_S = 1.0
_END_LIMIT_S = 2.0  # time for a program without state to end after a stop request
# Functions in which an exception is lost: packages catch it during their imports, the interpreter
# in finalisers.
_DEAF, _AGAIN_S = {'_find_and_load', '__del__'}, 0.05


class StopRequests:
    """Stop requests to this process: is_requested after the first, is_forced after a later
    Ctrl-C."""

    is_requested = is_forced = False
    _first_at = 0.0

    def add(self, number: int, now_s: float) -> None:
        # Slurm or a closing terminal may repeat the other signals while a checkpoint is written.
        if not self.is_requested:
            self.is_requested, self._first_at = True, now_s
        self.is_forced |= number == signal.SIGINT and now_s - self._first_at >= _SECOND_CTRL_C_S


class SignalQueue(StopRequests):
    """Queue of received signals, in order of arrival. Their only effect is a notice at the first
    stop request.

    A stop request counts when it arrives, also while the program waits for something else than
    next(). With in_thread, it counts when next() returns it, because a native call of the main
    thread delays handlers.
    """

    def __init__(
        self, numbers: Sequence[signal.Signals], notice: str = '', in_thread: bool = False
    ) -> None:
        # Python writes the number of each signal into the pipe. sigtimedwait would need less code,
        # but if SIGCONT interrupts it just when its timeout has expired, it returns a signal that
        # was never sent.
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # File objects close the ends of the pipe when this object is deleted.
        self._reader = open(reader, 'rb', buffering=0)
        self._writer = open(writer, 'wb', buffering=0)
        self._poll = select.poll()
        self._poll.register(reader, select.POLLIN)
        self._notice = notice
        self._in_thread = in_thread
        self._before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        catch(lambda number, _: None if in_thread else self._count(number), numbers)

    def _count(self, number: int) -> None:
        if number not in STOP_SIGNALS:
            return
        is_first = not self.is_requested
        self.add(number, time.monotonic())
        if self._notice and is_first:
            # this handler has interrupted another message, or the terminal is gone
            with suppress(RuntimeError, OSError):
                print_stderr(self._notice)

    def next(self, timeout_s: float | None = None) -> int | None:
        """Wait up to timeout_s for a signal, by default until close(); return its number, or
        None."""
        self._poll.poll(None if timeout_s is None else max(0.0, 1000 * timeout_s))
        byte = self._reader.read(1)
        if byte and self._in_thread:
            self._count(byte[0])
        return byte[0] if byte else None

    def discard(self, number: int) -> None:
        """Discard pending signals with this number; other signals keep their order."""
        if waiting := self._reader.read(select.PIPE_BUF):
            self._writer.write(waiting.replace(bytes([number]), b''))

    def pause(self, seconds: float) -> None:
        """Wait for a number of seconds, or until a stop request."""
        end = time.monotonic() + seconds
        while not self.is_requested and time.monotonic() < end:
            self.next(end - time.monotonic())

    def close(self) -> None:
        signal.set_wakeup_fd(self._before)
        self._writer.close()


def catch(
    handler: Callable[[int, Any], Any],
    numbers: Sequence[signal.Signals] = STOP_SIGNALS,
    unblock: bool = True,
) -> None:
    """Set the handler of these signals, except SIGHUP if nohup has disabled it; unblock them by
    default."""
    for number in numbers:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)
    if unblock:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def is_interrupted() -> bool:
    """Return whether interrupt() waits for the end of an import or finaliser."""
    return bool(signal.getitimer(signal.ITIMER_REAL)[0])


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handle a signal by KeyboardInterrupt, at the end of an import or finaliser; end at once after
    a second one."""
    if sys.is_finalizing() or number != signal.SIGALRM and is_interrupted():
        end_at_once()
    if not _DEAF & {f.f_code.co_name for f, _ in traceback.walk_stack(frame)}:
        raise KeyboardInterrupt
    _interrupt_again()


def _interrupt_again() -> None:
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)


def report_lost(lost: Any) -> None:
    """Handle an exception that the interpreter cannot raise, such as one in a callback of a weak
    reference.

    Serves as sys.unraisablehook.
    """
    if isinstance(lost.exc_value, KeyboardInterrupt):
        _interrupt_again()
    else:
        sys.__unraisablehook__(lost)


def has_interrupt(error: BaseException | None) -> bool:
    """Return whether an exception is KeyboardInterrupt, or was raised while that was handled."""
    return error is not None and (
        isinstance(error, KeyboardInterrupt) or has_interrupt(error.__context__)
    )


def end_at_once(code: int = EXIT_AT_ONCE) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def end_with_parent(number: signal.Signals) -> None:
    """Let the kernel send this signal to this process when its parent ends; only Linux does so."""
    if sys.platform == 'linux':
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


@contextmanager
def handle_in_thread(request_stop: Callable[[], object] | None) -> Iterator[None]:
    """Handle signals in a thread, because native calls delay Python's handlers; with request_stop,
    unblock STOP_SIGNALS."""
    signals = SignalQueue(
        STOP_SIGNALS if request_stop else (),
        STOPPING if launched_size() is None else '',
        in_thread=True,
    )

    def read_signals() -> None:
        while number := signals.next():  # None after close()
            if signals.is_forced:
                end_at_once()
            if request_stop and number in STOP_SIGNALS:
                request_stop()
            # the main thread is ending the program; do it here if that takes long
            elif number in END_SIGNALS:
                time.sleep(_END_LIMIT_S)
                end_at_once()

    try:
        threading.Thread(target=read_signals, name='signals', daemon=True).start()
        yield
    finally:
        signals.close()
