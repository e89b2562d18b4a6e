"""Agreement of the report with published logs, where ../shared/history is present."""

import history
from helpers import ROOT

FOLDER = ROOT.parent / 'shared/history'


def test_history_agrees():
    if FOLDER.is_dir():
        results = history.compare(history.load_systems(FOLDER), FOLDER)
        assert results['agrees'] and not results['differs'] and not results['missing']
