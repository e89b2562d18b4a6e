"""Files of a submission tree in each round.

Source: MLCommons' submission rules, section "Directory structure", from v0.7 on; before, published
trees.
"""

from dataclasses import dataclass, fields, replace

PROGRAM = 'mlperf_rn50'


@dataclass(frozen=True)
class TreeLayout:
    """Paths in a tree; {system} stands for a system, {code} for the folder of its program."""

    root: str = ''  # of the tree, in the folder of the organisation
    contact: str = ''  # file with the organisation and an address
    description: str = 'systems/{system}.json'
    results: str = 'results/{system}/resnet'
    code: str = 'benchmarks/resnet/implementations/{code}'
    folder: str = 'benchmarks/resnet/implementations/{system}'  # of the files below
    readme: str = 'README.md'
    setup: str = 'setup.sh'
    data: str = 'init_datasets.sh'
    run: str = 'run_and_time.sh'
    uses: str = '{system}_{code}.json'  # names the program that the system uses

    def of(self, system: str, code: str) -> 'TreeLayout':
        """Return the layout with the names of a system and its program."""
        texts = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v.format(system=system, code=code) for k, v in texts.items()})


_LATER = TreeLayout()
_EARLY = {
    'v0.5': TreeLayout(
        root='{system}',
        contact='submission.json',
        description='results/{system}/entry.json',
        code='code/resnet/{code}',
        folder='code/resnet',
        setup='setup_{system}.sh',
        data='preproc_dataset.sh',
        run='run_and_time_{system}.sh',
        uses='',
    ),
    'v0.6': TreeLayout(
        folder='benchmarks/resnet/{system}',
        data='preproc_dataset.sh',
        uses='uses_{code}',
    ),
}


def layout_of(round_name: str) -> TreeLayout:
    return _EARLY.get(round_name, _LATER)


def rule_files(layout: TreeLayout, system: str, implementation: str) -> list[str]:
    """Return the paths of the files that the rules require for a system."""
    paths = layout.of(system, implementation)
    names = (paths.readme, paths.setup, paths.data, paths.run, paths.uses)
    found = [f'{paths.folder}/{name}' for name in names if name]
    return [path for path in (paths.contact, paths.description) if path] + found
