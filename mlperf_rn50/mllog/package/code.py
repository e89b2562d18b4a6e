"""The code folder of a submission: program, scripts required by the rules, and configuration of
each run."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlperf_rn50.config import SECTIONS
from mlperf_rn50.config_file import load_tree
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.files import dump_json
from mlperf_rn50.git import git
from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.mllog.package.system_desc import data_note
from mlperf_rn50.mllog.read.description import load_env, system_path, value_at
from mlperf_rn50.runfolder.names import run_of
from mlperf_rn50.text import printable

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
# Files that the scripts below need.
_CALLED = (
    'mlperf_rn50/__main__.py',
    'setup.cfg',
    'launch/setup.sh',
    'launch/requirements.lock',
    'launch/local.sh',
    'launch/mpirun.sh',
)
_PREPARE = """#!/usr/bin/env bash
# Prepares the data set of the runs.
# Usage: preproc_dataset.sh [OPTIONS of mlperf-rn50 prepare], such as --source DIR
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/code"
configs=(../runs_*/config_*.yaml)
mapfile -t data < <(
    .venv/bin/mlperf-rn50 train --config "${configs[0]}" --print data.dataset --print data.dir
)
exec .venv/bin/mlperf-rn50 prepare "${data[0]}" --out "${data[1]}" "$@"
"""
_SETUP = """#!/usr/bin/env bash
# Installs what the runs need.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/code/launch/setup.sh"
"""
# Placeholders are replaced by checked names and numbers only, never by text from a log.
_RUN = """#!/usr/bin/env bash
# Runs the benchmark five times. Takes the options of code/launch/LAUNCHER.sh, such as --hosts h1,h2
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/code"
exec launch/LAUNCHER.sh --config ../runs_SYSTEM/config_0.yaml --run-dir logs/SYSTEM \\
    --run.seed null --seeds 5 --ranks-per-node RANKS --clear-caches "$@"
"""


def write_scripts(folder: Path, runs: Sequence[Run], system: str) -> None:
    """Write the scripts and the README that the rules require."""
    nodes = next((r.num_nodes for r in runs if r.num_nodes), 1)
    ranks = next((r.num_ranks for r in runs if r.num_ranks), nodes)
    run = _RUN.replace('LAUNCHER', 'mpirun' if nodes > 1 else 'local')
    run = run.replace('RANKS', str(max(ranks // nodes, 1)))
    for name, text in {
        'preproc_dataset.sh': _PREPARE,
        f'setup_{system}.sh': _SETUP,
        f'run_and_time_{system}.sh': run.replace('SYSTEM', system),
    }.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    note = data_note(runs)
    (folder / 'README.md').write_text(
        '# ResNet-50 v1.5 on MXNet Gluon: mlperf_rn50\n\n'
        + (f'**{printable(note)}**\n\n' if note else '')
        + f'1. `setup_{system}.sh`\n2. `preproc_dataset.sh`\n3. '
        f'`run_and_time_{system}.sh`\n\n`code/` contains the program, `runs_<system>/` the '
        'configuration and environment of each run.\n'
    )


def missing_code(home: Path) -> list[str]:
    """Return the files that the scripts of a submission need and a checkout lacks."""
    return [name for name in _CALLED if not (home / name).is_file()]


def copy_code(folder: Path, env: dict[str, Any], home: Path) -> str:
    """Copy the program at the runs' commit and return ''. If that fails, copy the checkout and
    return a note."""
    commit = value_at(env, 'git_commit')
    with suppress(ValueError, subprocess.TimeoutExpired):  # such as for an unknown commit
        if isinstance(commit, str) and re.fullmatch(r'[0-9a-f]{40}', commit):
            listed = git(home, 'ls-tree', '-r', '--name-only', commit).decode('utf-8', 'replace')
            names = listed.splitlines()
            if set(_CALLED) <= set(names):
                tops = {name.partition('/')[0] for name in names}
                code = [name for name in _CODE if name in tops]
                tar = git(home, 'archive', '--format=tar', commit, '--', *code)
                folder.mkdir(parents=True, exist_ok=True)
                extract = ['tar', '--extract', '--directory', str(folder)]
                subprocess.run(extract, input=tar, check=True, timeout=60)
                return ''
    for name in _CODE:
        source, target = home / name, folder / name
        if source.is_dir():
            ignored = shutil.ignore_patterns('__pycache__')
            shutil.copytree(source, target, symlinks=True, ignore=ignored)
        elif source.is_file():
            shutil.copy2(source, target, follow_symlinks=False)
    return (
        'the code is the current checkout, but the runs used commit '
        f'{str(commit)[:50] or "unknown"}'
    )


def find_flaws(run: Run) -> list[str]:
    """Return why files of a run are not packaged: links, which may lead to private files, or no
    valid configuration."""
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
    if not (isinstance(tree, dict) and set(tree) <= set(SECTIONS)):  # older versions had other keys
        flaws.append(f'{config.name}: got no configuration of a run; correct or remove the file')
    return flaws


def write_runs(folder: Path, runs: Sequence[Run]) -> None:
    folder.mkdir()
    for k, run in enumerate(runs):
        config, env = run_of(run.path).config, load_env(run.path)
        if env:
            dump_json(folder / f'env_{k}.json', env)
        if config.is_file():
            (folder / f'config_{k}.yaml').write_text(config.read_text('utf-8', 'replace'))
