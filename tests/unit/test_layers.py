"""Structure of the package: direction and cycles of imports, sizes of folders and modules, unique
names."""

import ast
import sys
import tokenize
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from closure import closure, imports
from helpers import ROOT

PACKAGE = ROOT / 'mlperf_rn50'
# Rooms from top to bottom; a module may import from its room and from lower rooms.
ROOMS = [
    {'__main__'},
    {'cli'},
    {'bench', 'doctor', 'launch'},
    {'train'},
    {'analysis'},
    {'mllog', 'data', 'model'},
    {'system'},
    {'config_file'},
    {'config', 'config_text'},
    # declared in components and combined by config
    {'data.options', 'model.options', 'train.options'},
    {'answer', 'bounds', 'parser', 'runfolder'},
    {'files', 'git', 'npz', 'text'},
    {'errors'},
]
HEAVY = {'mxnet', 'nvidia', 'horovod', 'pandas', 'scipy', 'matplotlib', 'jinja2', 'sklearn', 'rich'}
LIGHT_ROOMS = ('cli', 'mllog', 'analysis/sets', 'analysis/recipe')
LIGHT = [
    'config',
    'config_file',
    'launch.launcher',
    'model.weights',
    'analysis.predict.prediction_answer',
    'analysis.report.report_data',
    'analysis.report.tables',
    'analysis.report.sections',
    'analysis.show.plain',
    'analysis.watch.run_facts',
    'analysis.watch.run_state',
    'doctor.checks',
    'system.environment',
    'system.topology',
    'train.plan',
    'train.watchdog.watcher',
]
# Names that modules of several folders share, because they mean the same: options of a component,
# and a command with the module that it calls.
SHARED_NAMES = {'options', 'evaluate', 'export'}
MAX_MODULES, MAX_TOKENS, MIN_LINES = 12, 3200, 40
LAYOUT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
)


def modules() -> dict[str, Path]:
    """Return the file of every module except __init__.py by its dotted name in the package."""
    return {
        '.'.join(p.relative_to(PACKAGE).with_suffix('').parts): p
        for p in PACKAGE.rglob('*.py')
        if p.name != '__init__.py'
    }


def import_graph(paths: dict[str, Path]) -> dict[str, set[str]]:
    """Return the imports of each module among the given modules."""
    return {
        name: {m.removeprefix('mlperf_rn50.') for m in imports(path)} & set(paths)
        for name, path in paths.items()
    }


def num_tokens(path: Path) -> int:
    """Return the number of tokens of a module, which does not depend on the layout of its lines."""
    with path.open('rb') as f:
        return sum(t.type not in LAYOUT for t in tokenize.tokenize(f.readline))


def level(name: str) -> int:
    return next((i for i, rooms in enumerate(ROOMS) if name in rooms), None) or next(
        i for i, rooms in enumerate(ROOMS) if name.partition('.')[0] in rooms
    )


def cycle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        return e.args[1]
    return []


def folder_graph(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the imports between folders; modules directly in a room count as folders."""

    def place(name: str) -> str:
        return name.rpartition('.')[0] if name.count('.') > 1 else name

    folders: dict[str, set[str]] = {}
    for name, imported in graph.items():
        folders.setdefault(place(name), set()).update(
            place(i) for i in imported if place(i) != place(name)
        )
    return folders


def test_imports_point_down():
    assert [
        f'{name} imports {i}'
        for name, imported in import_graph(modules()).items()
        for i in imported
        if name.partition('.')[0] != i.partition('.')[0] and level(i) <= level(name)
    ] == []


def test_imports_of_modules_and_folders_have_no_cycles():
    graph = import_graph(modules())
    assert cycle(graph) == cycle(folder_graph(graph)) == []


def test_one_module_of_training_imports_the_analysis():
    assert [
        name
        for name, imported in import_graph(modules()).items()
        if name.startswith('train.') and any(i.startswith('analysis.') for i in imported)
    ] == ['train.compare']


def test_launcher_does_not_import_training():
    assert [
        f'{name} imports {i}'
        for name, imported in import_graph(modules()).items()
        for i in imported
        if name.startswith('launch.') and i.startswith('train.')
    ] == []


def test_folders_and_modules_are_small():
    paths = modules()
    folders = Counter(str(path.parent.relative_to(PACKAGE)) for path in paths.values())
    assert {f: n for f, n in folders.items() if n > MAX_MODULES and f != 'cli'} == {}
    num_lines = {name: len(path.read_text().splitlines()) for name, path in paths.items()}
    assert {name: n for name, path in paths.items() if (n := num_tokens(path)) > MAX_TOKENS} == {}
    users = Counter(i for imported in import_graph(paths).values() for i in imported)
    assert {name: n for name, n in num_lines.items() if n < MIN_LINES and users[name] == 1} == {}


def test_modules_of_one_name_mean_the_same():
    names = Counter(name.rpartition('.')[2] for name in modules())
    assert {name for name, count in names.items() if count > 1} == SHARED_NAMES


def test_classes_and_public_functions_have_different_names():
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob('*.py')]
    names = Counter(
        node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )
    names += Counter(
        node.name
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and node.name[0] != '_'
        and node.name not in ('make_parser', 'add_options', 'run', 'main')
    )
    assert [name for name, n in names.items() if n > 1] == []


def test_unit_tests_are_named_after_a_module_folder_or_script():
    """The name may continue with the aspect that is tested, as in test_predict_cli.py."""
    tested = [*PACKAGE.rglob('*'), *ROOT.glob('launch/*.sh'), *ROOT.glob('tests/gpu/*.py')]
    # all modules, and the logs in tests/logs
    names = {path.stem for path in tested} | {'layers', 'log_corpus'}
    tests = [path.stem.removeprefix('test_') for path in (ROOT / 'tests/unit').glob('test_*.py')]
    assert [t for t in tests if not any(f'{t}_'.startswith(f'{name}_') for name in names)] == []


@pytest.mark.parametrize(
    'module',
    LIGHT
    + [
        f'{room.replace("/", ".")}.{p.relative_to(PACKAGE / room).with_suffix("")}'.replace(
            '/', '.'
        )
        for room in LIGHT_ROOMS
        for p in sorted((PACKAGE / room).rglob('[a-z]*.py'))
    ],
)
def test_light_modules_import_nothing_heavy(module):
    assert {
        m for m in closure(frozenset({f'mlperf_rn50.{module}'})) if m.split('.')[0] in HEAVY
    } == set()


def test_parsers_of_launchers_need_only_the_standard_library():
    used = closure(frozenset({'mlperf_rn50.cli.launch', 'mlperf_rn50.cli.sweep'}))
    assert {m.split('.')[0] for m in used} - sys.stdlib_module_names == {'mlperf_rn50'}
