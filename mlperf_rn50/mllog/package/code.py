"""The program of a submission, which is that of the commit of all runs, and the configuration of
each run."""

import ast
import re
import subprocess
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from mlperf_rn50.config_file import load_tree
from mlperf_rn50.errors import ConfigError, UserError
from mlperf_rn50.git import git
from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.mllog.package.tree_layouts import PROGRAM
from mlperf_rn50.mllog.read.description import JsonObject, system_path, value_at
from mlperf_rn50.runfolder.names import run_of
from mlperf_rn50.text import grouped, some

# Files and folders of the checkout that are submitted.
_CODE = (
    'mlperf_rn50',
    'launch',
    'setup.cfg',
    'pyproject.toml',
    'Dockerfile',
    'README.md',
    'CHANGELOG.md',
    'LICENSE',
)
# Files that the scripts of a submission need.
_CALLED = (
    'mlperf_rn50/__main__.py',
    'setup.cfg',
    'launch/setup.sh',
    'launch/requirements.lock',
    'launch/local.sh',
    'launch/mpirun.sh',
)
_DIRTY = '-dirty'
_MAX_NAMED = 5


def code_name(commit: str) -> str:
    """Return the name of the folder with the program of a commit."""
    return f'{PROGRAM}-{commit[:8]}'


def find_commit(envs: Mapping[str, JsonObject]) -> tuple[str, str]:
    """Return the commit of runs from their env.json by name, or '' and why there is none."""
    used = grouped(envs, lambda name: str(value_at(envs[name], 'git_commit')))
    if len(used) > 1:
        names = [
            f'{commit[:50] or "unknown"} in {some(those, _MAX_NAMED)}'
            for commit, those in used.items()
        ]
        return '', f'got runs of the commits {"; ".join(names)}, expected one; repeat the others'
    [commit] = used
    if commit.endswith(_DIRTY):
        return '', (
            f'the runs used commit {commit[:8]} with changed files, expected a commit; commit the '
            'changes and repeat the runs'
        )
    if not re.fullmatch('[0-9a-f]{40}', commit):
        return '', (
            f'got commit {commit[:50] or "unknown"} in env.json of the runs, expected 40 '
            'hexadecimal digits; run from a git checkout, or in an image that was built with '
            '--build-arg COMMIT'
        )
    return commit, ''


def check_commit(home: Path, commit: str) -> list[str]:
    """Return why the program of a commit cannot be copied from a checkout."""
    try:
        git(home, 'merge-base', '--is-ancestor', commit, 'HEAD')
        names = git(home, 'ls-tree', '-r', '--name-only', commit).decode('utf-8', 'replace')
    except ValueError as e:
        return [
            f'{home}: its history lacks commit {commit[:8]} of the runs ({e}); name a checkout of '
            'that commit with --code DIR'
        ]
    missing = set(_CALLED) - set(names.splitlines())
    return [f'commit {commit[:8]} lacks {name}, which the scripts call' for name in sorted(missing)]


def copy_code(folder: Path, home: Path, commit: str) -> None:
    """Copy the program at a commit of a checkout."""
    tops = git(home, 'ls-tree', '--name-only', commit).decode('utf-8', 'replace').splitlines()
    code = [name for name in _CODE if name in tops]
    tar = git(home, 'archive', '--format=tar', commit, '--', *code)
    folder.mkdir(parents=True, exist_ok=True)
    extract = ['tar', '--extract', '--directory', str(folder)]
    try:
        subprocess.run(extract, input=tar, check=True, timeout=60, capture_output=True)
    except (subprocess.SubprocessError, OSError) as e:
        raise UserError(f'cannot extract commit {commit[:8]} of {home}: {str(e)[:200]}') from e


def sources_of(code: Path) -> dict[str, str]:
    """Return the Python files of a program by their paths, without links."""
    paths = sorted((code / PROGRAM).rglob('*.py'))
    return {
        str(path.relative_to(code)): path.read_text('utf-8', 'replace')
        for path in paths
        if path.is_file() and not path.is_symlink()
    }


def accepted_keys(sources: Mapping[str, str]) -> dict[str, Set[str]]:
    """Return the keys in each section of the configuration of a program, which is only parsed."""
    classes = {
        node.name: {
            field.target.id: ast.unparse(field.annotation)
            for field in node.body
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        }
        for text in sources.values()
        if re.search(r'^class \w*Config\b', text, re.MULTILINE)
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef)
    }
    sections = classes.get('Config', {})
    return {section: set(classes.get(kind, ())) for section, kind in sections.items()}


def check_configs(runs: Sequence[Run], accepted: Mapping[str, Set[str]]) -> list[str]:
    """Return the keys in the configurations of runs that a program does not accept."""
    unknown: dict[str, list[str]] = {}
    for path in (run_of(run.path).config for run in runs):
        for section, values in load_tree(path).items():
            known = accepted.get(section, ())
            keys = [k for k in values if k not in known] if isinstance(values, dict) else ['']
            for key in keys:
                unknown.setdefault(f'{section}.{key}', []).append(path.name)
    return [
        f'{some(names, _MAX_NAMED)}: {key:.80}: a key that the commit of the runs does not accept'
        for key, names in unknown.items()
    ]


def find_flaws(run: Run) -> list[str]:
    """Return why files of a run are not packaged: links, which may lead to private files, or no
    configuration."""
    config = run_of(run.path).config
    files = (run.path, config, run_of(run.path).env, system_path(run.path))
    flaws = []
    for p in files:
        if p.is_symlink() or p.exists() and not p.is_file():
            got = 'a symbolic link' if p.is_symlink() else 'no regular file'
            flaws.append(f'{p.name}: got {got}, expected a file; replace it with a copy')
    try:
        tree = load_tree(config) if config.is_file() and not flaws else {}
    except ConfigError as e:
        return [str(e)]
    if not (flaws or tree and isinstance(tree, dict)):
        flaws.append(
            f'{run.path.name}: got no configuration in {config.name}, expected that of the run; '
            'run_and_time.sh needs it'
        )
    return flaws
