"""Imports of a file, determined without importing it."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from helpers import ROOT

TRAINING = {'mxnet', 'nvidia', 'horovod'}
# Commands that import MXNet, DALI or Horovod if a test runs them in the test process
# (helpers.call).
_COMMANDS = {'bench', 'classify', 'evaluate', 'export', 'prepare', 'train'}


def _nodes(node: ast.AST, is_whole: bool) -> Iterator[ast.AST]:
    """Yield all nodes below a node, or only nodes that run on import (outside functions and `if
    TYPE_CHECKING`)."""
    for child in ast.iter_child_nodes(node):
        is_left_out = (
            isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            or isinstance(child, ast.If)
            and 'TYPE_CHECKING' in ast.unparse(child.test)
        )
        if is_whole or not is_left_out:
            yield child
            yield from _nodes(child, is_whole)


@cache
def imports(path: Path, is_whole: bool = True) -> frozenset[str]:
    """Return the modules imported anywhere in a file, or when it is imported; `from a import b`
    gives a and a.b."""
    modules: set[str] = set()
    for node in _nodes(ast.parse(path.read_text()), is_whole):
        if isinstance(node, ast.Import):
            modules.update(a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.update([node.module, *(f'{node.module}.{a.name}' for a in node.names)])
    return frozenset(modules)


def files_of(module: str) -> Iterator[Path]:
    """Yield the files that run when a module of this checkout is imported, parent packages
    included."""
    parts = module.split('.')
    for base in (ROOT, ROOT / 'tests'):
        for length in range(1, len(parts) + 1):
            place = base.joinpath(*parts[:length])
            yield from (p for p in (place.with_suffix('.py'), place / '__init__.py') if p.is_file())


def closure(modules: frozenset[str]) -> set[str]:
    """Return the given modules and all modules that they import, directly or indirectly."""
    imported: set[str] = set()
    left = set(modules)
    while left:
        module = left.pop()
        if module not in imported:
            imported.add(module)
            left |= {m for path in files_of(module) for m in imports(path, is_whole=False)}
    return imported


@cache
def needs_training_packages(path: Path) -> bool:
    """Return True if a test file may import MXNet, DALI or Horovod into the test process."""
    strings = {
        n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)
    }
    if 'helpers.call' in imports(path) and strings & _COMMANDS:
        return True
    # Imports within fixtures do not count; the tests that use such a fixture import the same
    # modules.
    modules = imports(path).union(
        *(imports(p, is_whole=False) for p in path.parent.glob('conftest.py'))
    )
    return any(m.split('.')[0] in TRAINING for m in closure(modules))
