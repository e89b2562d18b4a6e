"""What the person at the terminal sees: rank 0 speaks, the others are quiet.

On a terminal, a bar per epoch; otherwise plain lines. Everything that is a line also goes to train.log.
"""
import logging
import sys
import time
from pathlib import Path

from tqdm import tqdm

# Without a terminal, a line at most this often.
_PLAIN_PERIOD_S = 30.0


def open_console(log_path: Path | None) -> logging.Logger:
    """A logger that writes to stderr and to train.log; a silent one for log_path None (ranks other than 0)."""
    logger = logging.getLogger('mlperf_rn50.train')
    logger.handlers[:] = []
    logger.propagate = False
    logger.setLevel(logging.INFO)
    if log_path is None:
        logger.addHandler(logging.NullHandler())
        return logger
    formatter = logging.Formatter('%(asctime)s %(message)s', '%H:%M:%S')
    for handler in (logging.StreamHandler(sys.stderr), logging.FileHandler(log_path)):
        handler.setFormatter(formatter)
        logger.addHandler(handler)
    return logger


class EpochProgress:
    """The progress of one epoch on rank 0.

    Args:
        console: for plain lines.
        epoch: from 0; shown from 1.
        num_steps: steps of the epoch.
        first_step: steps of it already done (after a resume).
        is_shown: rank 0.
    """

    def __init__(self, console: logging.Logger, epoch: int, num_steps: int, first_step: int, is_shown: bool):
        self._console, self._epoch, self._num_steps = console, epoch, num_steps
        self._is_plain = is_shown and not sys.stderr.isatty()
        self._done, self._first = first_step, first_step
        self._start = self._last_line = time.monotonic()
        self._bar = tqdm(total=num_steps, initial=first_step, desc=f'epoch {epoch + 1}', unit='step', leave=False,
                         dynamic_ncols=True, disable=not is_shown or self._is_plain)

    def update(self, loss: float, lr: float, images_per_s: float) -> None:
        """One more step is done."""
        self._done += 1
        self._bar.set_postfix_str(f'{images_per_s:.0f} img/s, loss {loss:.3f}, lr {lr:.4g}', refresh=False)
        self._bar.update()
        now = time.monotonic()
        if self._is_plain and now - self._last_line >= _PLAIN_PERIOD_S and self._done < self._num_steps:
            self._last_line = now
            left_s = (now - self._start) / (self._done - self._first) * (self._num_steps - self._done)
            self._console.info('epoch %d  step %d/%d  %.0f img/s  loss %.3f  lr %.4g  %.0f s left in the epoch',
                               self._epoch + 1, self._done, self._num_steps, images_per_s, loss, lr, left_s)

    def close(self) -> None:
        self._bar.close()
