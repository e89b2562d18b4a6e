"""Programs as the tests start them."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PUBLISHED = ROOT.parent / 'shared/published'  # real logs; tests that need them are skipped without
CLI = [sys.executable, '-m', 'mlperf_rn50']


def run(command, *, timeout=300, **keys) -> subprocess.CompletedProcess:
    """Runs a command to its end; output as text."""
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=timeout, **keys)


def skip_for(reason: str) -> None:
    """Skips a test for a reason, if there is one; fails it where none may be skipped."""
    if reason and os.environ.get('MLPERF_RN50_NEED_ALL'):
        pytest.fail(f'this test must run here: {reason}')
    if reason:
        pytest.skip(reason)


def under_ranks(num_ranks: int, command) -> list:
    """The command that starts another one with a number of ranks; as it is for 0 ranks."""
    return [ROOT / 'launch/ranks.sh', num_ranks, *command] if num_ranks else list(command)
