"""Doctor facts that several ranks gather."""
import os
import platform
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mlperf_rn50.doctor.facts import _run_folder_problem


class Rank:
    """One of two ranks in threads, with the methods of Comm that the doctor uses."""

    def __init__(self, rank, meeting, values):
        self.rank, self.meeting, self.values = rank, meeting, values

    def gather_object(self, value):
        self.values[self.rank] = value
        self.meeting.wait(60)
        gathered = list(self.values)
        self.meeting.wait(60)
        return gathered

    def barrier(self):
        self.meeting.wait(60)


@pytest.fixture
def problems(monkeypatch):
    """Function that returns the run folder problems of two ranks on the given hosts."""
    names = threading.local()
    monkeypatch.setattr(platform, 'node', lambda: names.own)

    def find(folders, hosts=('h1', 'h2')):
        meeting, values = threading.Barrier(2), [None, None]

        def check(rank):
            names.own = hosts[rank]
            return _run_folder_problem(folders[rank], Rank(rank, meeting, values))
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(check, range(2)))
    return find


def test_shared_run_folder_is_found_and_left_unchanged(problems, tmp_path):
    assert problems([tmp_path / 'logs/run'] * 2) == ['', '']
    assert not list(tmp_path.iterdir())  # the run creates it, not the doctor
    (tmp_path / 'logs').mkdir()
    (tmp_path / 'logs/result_0.txt').touch()
    assert problems([tmp_path / 'logs'] * 2) == ['', '']
    assert [p.name for p in (tmp_path / 'logs').iterdir()] == ['result_0.txt']


def test_unshared_run_folder_is_reported(problems, tmp_path):
    (tmp_path / 'h2/run').mkdir(parents=True)
    problem_0, problem_1 = problems([tmp_path / 'h1/run', tmp_path / 'h2/run'])
    assert problem_0 == '' and problem_1.startswith(f'no {tmp_path}/h2/run/.doctor-')
    assert not (tmp_path / 'h1').exists()


def test_only_rank_0_reports_unwritable_run_folder(problems, tmp_path):
    (tmp_path / 'file').touch()
    problem_0, problem_1 = problems([tmp_path / 'file/run'] * 2)
    assert problem_0 == f'{tmp_path}/file/run: {os.strerror(20)}' and problem_1 == ''


def test_single_host_is_not_checked(problems, tmp_path):
    assert problems([tmp_path / 'run'] * 2, hosts=('h1', 'h1')) == [None, None]
