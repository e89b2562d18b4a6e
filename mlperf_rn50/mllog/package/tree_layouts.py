"""Files of a submission tree in each round, as listed in layouts.ini."""

from dataclasses import asdict, dataclass
from pathlib import Path

from mlperf_rn50.files import load_ini

PROGRAM = 'mlperf_rn50'
_TABLE = load_ini(Path(__file__).with_name('layouts.ini'))


@dataclass(frozen=True)
class TreeLayout:
    """Paths in a tree, with the meanings in layouts.ini."""

    root: str
    contact: str
    description: str
    results: str
    code: str
    folder: str
    readme: str
    setup: str
    data: str
    run: str
    uses: str

    def of(self, system: str, code: str) -> 'TreeLayout':
        """Return the layout with the names of a system and its program."""
        paths = asdict(self).items()
        return TreeLayout(**{k: v.format(system=system, code=code) for k, v in paths})


def layout_of(round_name: str) -> TreeLayout:
    return TreeLayout(**(_TABLE[round_name] if round_name in _TABLE else _TABLE.defaults()))


def rule_files(layout: TreeLayout, system: str, implementation: str) -> list[str]:
    """Return the paths of the files that the rules require for a system."""
    paths = layout.of(system, implementation)
    names = (paths.readme, paths.setup, paths.data, paths.run, paths.uses)
    found = [f'{paths.folder}/{name}' for name in names if name]
    return [path for path in (paths.contact, paths.description) if path] + found
