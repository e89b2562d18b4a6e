"""What the tests share."""
import os
from pathlib import Path

import pytest
from helpers import CLI, run
from hypothesis import HealthCheck, settings

# MXNet reads it at import; without it every process spins as many threads as there are cores.
os.environ.setdefault('OMP_NUM_THREADS', '1')

# A slow machine is no failure.
settings.register_profile('untimed', deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile('untimed')


@pytest.fixture(scope='session')
def digits(tmp_path_factory) -> Path:
    """A folder with the prepared digits."""
    out = tmp_path_factory.mktemp('data') / 'digits'
    done = run([*CLI, 'prepare', 'digits', '--out', out])
    assert done.returncode == 0, done.stderr
    return out
