"""What keeps a submission tree from being ready."""

from collections.abc import Sequence
from dataclasses import dataclass

from mlperf_rn50.mllog.logged_run import Run


@dataclass(frozen=True)
class Fault:
    """A thing to edit in a submission tree, or in the next runs, because logs are never changed."""

    file: str  # path in the tree, a log such as 'result_2.txt', or 'all 5 logs'
    key: str  # field of a description or key of a log; '' for the file itself
    text: str  # found, expected, and what to do
    rule: str  # its source, such as 'SR Directory structure', or an official tool

    def __str__(self) -> str:
        place = f'{self.file}: {self.key}' if self.key else self.file
        return f'{place}: {self.text}' + (f' ({self.rule})' if self.rule else '')


def name_logs(runs: Sequence[Run], affected: Sequence[Run]) -> str:
    """Return 'all 5 logs', or the names of the affected ones."""
    if len(affected) == len(runs) > 1:
        return f'all {len(runs)} logs'
    return ', '.join(run.path.name for run in affected)
