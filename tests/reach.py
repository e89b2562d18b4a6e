"""Which test files a change can reach; as a program it prints them, for what is not committed or else the last commit.

pytest-testmon follows what runs in the process of the tests, and most of ours start programs. So a test file reaches
what it imports and what the commands it names import, however deep, imports inside functions included; a file that is
no Python is reached by the tests that name it, or what stands in its folder.
"""
import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE, TESTS = ROOT / 'mlperf_rn50', ROOT / 'tests'
COMMANDS = {p.stem for p in (PACKAGE / 'cli').glob('[a-z]*.py')}
# A change of these reaches everything.
EVERYTHING = ('setup.cfg', 'pyproject.toml', 'launch/requirements.lock', 'launch/setup.sh', 'tests/conftest.py')


@cache
def imports(path: Path) -> frozenset[str]:
    """The modules that a file imports anywhere in it; for 'from a import b' both a and a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update([node.module, *(f'{node.module}.{a.name}' for a in node.names)])
    return frozenset(found)


def file_of(module: str) -> Path | None:
    """The file of a module of the package or of the tests' own; None for another."""
    for base in (ROOT, TESTS):
        place = base.joinpath(*module.split('.'))
        for path in (place.with_suffix('.py'), place / '__init__.py'):
            if path.is_file() and (base == TESTS or place.is_relative_to(PACKAGE)):
                return path
    return None


def strings(path: Path) -> set[str]:
    """The strings in a Python file."""
    return {n.value for n in ast.walk(ast.parse(path.read_text()))
            if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def started_by(path: Path) -> Iterator[Path]:
    """The commands that a test file starts; launchers start these two."""
    said = strings(path)
    names = COMMANDS & said | ({'train', 'doctor'} if any('launch/' in s for s in said) else set())
    yield from (PACKAGE / 'cli' / f'{name}.py' for name in names)
    if any('launch/' in s for s in said):
        yield PACKAGE / 'launch/__main__.py'


def reached_by(test: Path) -> set[Path]:
    """The Python files that a test file reaches; those of the tests also by their names, as it may start them."""
    found: set[Path] = set()
    left = [test, *test.parent.glob('conftest.py')]
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            left += [f for m in imports(path) if (f := file_of(m))]
            if path.is_relative_to(TESTS):
                left += started_by(path)
                left += [p for s in strings(path) for p in (TESTS / s.removeprefix('tests/'), path.parent / s)
                         if s.endswith('.py') and p.is_file()]
    return found


def is_reached(changed: Path, test: Path) -> bool:
    """Whether a change of a file can reach a test file."""
    name = changed.relative_to(ROOT)
    if str(name) in EVERYTHING:
        return True
    reached = reached_by(test)
    if changed.suffix == '.py' and (changed.is_relative_to(PACKAGE) or changed.is_relative_to(TESTS)):
        return changed in reached
    words = [s for path in reached if path.is_relative_to(TESTS) for s in strings(path)]
    return any(name.name in s or s.startswith(name.parts[0]) for s in words)


def changed_files() -> list[Path]:
    """What differs from the last commit, or what the last commit changed."""
    def git(*words: str) -> list[str]:
        done = subprocess.run(['git', '-C', str(ROOT), *words, '-z'], capture_output=True, text=True, check=True)
        return [name for name in done.stdout.split('\0') if name]
    names = git('diff', '--name-only', 'HEAD') + git('ls-files', '--others', '--exclude-standard')
    return [ROOT / name for name in names or git('show', '--name-only', '--format=', '-m', '--first-parent', 'HEAD')]


if __name__ == '__main__':
    changes = changed_files()
    for candidate in sorted(TESTS.glob('*/test_*.py')):
        if any(is_reached(path, candidate) for path in changes):
            print(candidate.relative_to(ROOT))
