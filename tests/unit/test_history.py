"""Agreement of the report with published logs."""

import history
import pytest
from helpers import HISTORY


@pytest.mark.needs_history
def test_history_agrees():
    results = history.compare(history.load_systems(HISTORY), HISTORY)
    assert results['agrees'] and not results['differs'] and not results['missing']
