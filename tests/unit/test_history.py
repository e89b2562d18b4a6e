"""Agreement of the report with published logs, where ../shared/history is present."""

from pathlib import Path

import history
from helpers import ROOT

FOLDER = ROOT.parent / 'shared/history'


def system_of(folder, **values):
    run = {
        'file': f'{folder}/result_0.txt',
        'status': 'converged',
        'time_to_train_s': 90.0,
        'evaluations': [{'epoch': 4}],
    }
    return {
        'folders': [str(folder)],
        'runs': [run],
        'refusal': None,
        'violations': [],
        'findings': [],
        'num_nodes': 2,
        'num_accelerators': 8,
        'score_minutes': None,
        **values,
    }


def test_rows_are_compared_by_value(tmp_path):
    (tmp_path / 'truth.csv').write_text(
        'round,org,system,nodes,accelerators,runs,succeeded,minutes,last_epochs,score_minutes\n'
        + ''.join(
            f'v1.0,us,{name},2,,1,1,1.500,3,\n'
            for name in ('same', 'nodes', 'copy', 'refused', 'gone')
        )
    )
    place = Path('/logs/v1.0/us/results')
    found = history.compare(
        [
            system_of(place / 'same/resnet'),
            system_of(place / 'nodes/resnet', num_nodes=3),
            system_of(place / 'copy/resnet', runs=[], violations=['result_1.txt is a duplicate']),
            system_of(place / 'refused/resnet', refusal='two batches', violations=['two batches']),
        ],
        tmp_path,
    )
    assert found == {
        'agrees': ['v1.0/us/same'],
        'differs': ['v1.0/us/nodes: nodes: got 3, expected 2.0'],
        'refused': ['v1.0/us/copy: result_1.txt is a duplicate', 'v1.0/us/refused: two batches'],
        'missing': ['v1.0/us/gone'],
    }


def test_history_agrees():
    if FOLDER.is_dir():
        results = history.compare(history.load_systems(FOLDER), FOLDER)
        assert results['agrees'] and not results['differs'] and not results['missing']
