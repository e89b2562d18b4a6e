"""Doctor facts that several ranks gather."""

import os
from types import SimpleNamespace

from mlperf_rn50.doctor.facts import _run_folder_problem


def problems(folders, hosts=('h1', 'h2')):
    """Return the run folder problems of two ranks on these hosts; rank 1 looks while rank 0 waits
    for it."""
    sent, found = [], []

    def gather(own):
        sent.append(own)
        return hosts if len(sent) == 1 else [own]

    def look():
        gathered = iter((hosts, [sent[-1]]))
        rank_1 = SimpleNamespace(
            rank=1, gather_object=lambda own: next(gathered), barrier=lambda: None
        )
        found.append(_run_folder_problem(folders[1], rank_1))

    found.insert(
        0,
        _run_folder_problem(
            folders[0], SimpleNamespace(rank=0, gather_object=gather, barrier=look)
        ),
    )
    return found


def test_shared_run_folder_is_found_and_left_unchanged(tmp_path):
    assert problems([tmp_path / 'logs/run'] * 2) == ['', '']
    assert not list(tmp_path.iterdir())  # the run creates it, not the doctor
    (tmp_path / 'logs').mkdir()
    (tmp_path / 'logs/result_0.txt').touch()
    assert problems([tmp_path / 'logs'] * 2) == ['', '']
    assert [p.name for p in (tmp_path / 'logs').iterdir()] == ['result_0.txt']


def test_unshared_run_folder_is_reported(tmp_path):
    (tmp_path / 'h2/run').mkdir(parents=True)
    problem_0, problem_1 = problems([tmp_path / 'h1/run', tmp_path / 'h2/run'])
    assert problem_0 == '' and problem_1.startswith(f'no {tmp_path}/h2/run/.doctor-')
    assert not (tmp_path / 'h1').exists()


def test_only_rank_0_reports_unwritable_run_folder(tmp_path):
    (tmp_path / 'file').touch()
    problem_0, problem_1 = problems([tmp_path / 'file/run'] * 2)
    assert problem_0 == f'{tmp_path}/file/run: {os.strerror(20)}' and problem_1 == ''


def test_single_host_is_not_checked(tmp_path):
    assert problems([tmp_path / 'run'] * 2, hosts=('h1', 'h1')) == [None]
