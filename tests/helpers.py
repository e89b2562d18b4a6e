"""Programs as the tests start them."""
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PUBLISHED = ROOT.parent / 'shared/published'  # real logs; tests that need them are skipped without
CLI = [sys.executable, '-m', 'mlperf_rn50']


def run(command, *, timeout=300, **keys) -> subprocess.CompletedProcess:
    """Runs a command to its end; output as text."""
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=timeout, **keys)


def under_ranks(num_ranks: int, command) -> list:
    """The command that starts another one with a number of ranks; as it is for 0 ranks."""
    return [ROOT / 'launch/ranks.sh', num_ranks, *command] if num_ranks else list(command)
