"""Reading of the git checkout that contains a folder, also if it belongs to another user."""

import os
import subprocess
from pathlib import Path

# With these settings, git runs no programs of the checkout, uses no network, and converts no line
# ends.
_SETTINGS = (
    '-c core.fsmonitor=false -c core.hooksPath=/dev/null -c protocol.allow=never '
    '-c core.autocrlf=false'
).split()


def git(folder: Path, *arguments: str) -> bytes:
    """Return the output of a git command in a folder. Raise ValueError with the reason if there is
    none.

    Git refuses the checkout of another user, because its configuration may name programs; with
    GIT_DIR, git accepts it. Here, .git must belong to this user, to root or to the owner of the
    folder, whose code runs or is copied anyway.
    """
    top = next((p for p in (folder, *folder.parents) if (p / '.git').exists()), None)
    if not top:
        raise ValueError(f'{folder} is not in a git checkout')
    if (top / '.git').lstat().st_uid not in (folder.stat().st_uid, os.geteuid(), 0):
        raise ValueError(f'{top}/.git belongs to a different user than {folder}')
    # which may name another checkout
    env = {k: v for k, v in os.environ.items() if not k.startswith('GIT_')}
    env |= {'GIT_DIR': str(top / '.git'), 'GIT_WORK_TREE': str(top), 'GIT_OPTIONAL_LOCKS': '0'}
    command = ['git', '-C', str(folder), *_SETTINGS, *arguments]
    try:
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise ValueError(f'git: {getattr(e, "strerror", None) or "no answer"}') from e
    if done.returncode:
        first = done.stderr.decode('utf-8', 'replace').partition('\n')[0]
        raise ValueError(f'git: {first[:200]}')
    return done.stdout
