"""What keeps a submission tree from being ready."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A thing to edit in a submission tree, or in the next runs, because logs are never changed."""

    file: str  # path in the tree, a log such as 'result_2.txt', or 'all 5 logs'
    key: str  # field of a description or key of a log; '' for the file itself
    text: str  # found, expected, and what to do
    rule: str  # its source, such as 'SR Directory structure'

    def __str__(self) -> str:
        place = f'{self.file}: {self.key}' if self.key else self.file
        return f'{place}: {self.text}' + (f' ({self.rule})' if self.rule else '')
