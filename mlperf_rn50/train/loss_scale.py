"""The loss scale of float16: as large as the gradients bear. Pure.

Source: Micikevicius et al. 2017 (https://arxiv.org/abs/1710.03740), section 3.2.
"""
from dataclasses import dataclass

GROWTH_STEPS = 2000
_LEAST, _MOST = 1.0, 2.0**24


@dataclass
class LossScale:
    """Halved after a step that overflowed, doubled after GROWTH_STEPS in a row that did not.

    A step's outcome is read some steps later, by every rank at the same step, so all ranks decide alike and
    none waits. Overflows of steps that were under way with an older, larger scale change nothing.

    Args:
        value: what the loss of the next step is multiplied with.
        num_finite_steps: steps since the last change.
    """

    value: float
    num_finite_steps: int = 0

    def read(self, used: float, is_finite: bool) -> None:
        """The outcome of a step that used a scale."""
        if is_finite:
            self.num_finite_steps += 1
            if self.num_finite_steps == GROWTH_STEPS:
                self._change(self.value * 2)
        elif used <= self.value:
            self._change(used / 2)

    def _change(self, value: float) -> None:
        self.value, self.num_finite_steps = min(max(value, _LEAST), _MOST), 0
