"""Facts of the doctor that ranks gather together."""
import os
import platform
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mlperf_rn50.doctor.facts import _run_folder_problem


class Rank:
    """One of two ranks as threads, which exchange what Comm does."""

    def __init__(self, rank, meeting, values):
        self.rank, self.meeting, self.values = rank, meeting, values

    def gather_object(self, value):
        self.values[self.rank] = value
        self.meeting.wait(60)
        found = list(self.values)
        self.meeting.wait(60)
        return found

    def barrier(self):
        self.meeting.wait(60)


@pytest.fixture
def problems(monkeypatch):
    """What two ranks, on hosts of some names, find of a folder each."""
    names = threading.local()
    monkeypatch.setattr(platform, 'node', lambda: names.own)

    def find(folders, hosts=('h1', 'h2')):
        meeting, values = threading.Barrier(2), [None, None]

        def one(rank):
            names.own = hosts[rank]
            return _run_folder_problem(folders[rank], Rank(rank, meeting, values))
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(one, range(2)))
    return find


def test_a_shared_run_folder_is_seen_and_left_as_it_was(problems, tmp_path):
    assert problems([tmp_path / 'logs/run'] * 2) == ['', '']
    assert not list(tmp_path.iterdir())  # it is made by the run, not by the doctor
    (tmp_path / 'logs').mkdir()
    (tmp_path / 'logs/result_0.txt').touch()
    assert problems([tmp_path / 'logs'] * 2) == ['', '']
    assert [p.name for p in (tmp_path / 'logs').iterdir()] == ['result_0.txt']


def test_a_host_with_a_run_folder_of_its_own_says_so(problems, tmp_path):
    (tmp_path / 'of_1/run').mkdir(parents=True)
    of_0, of_1 = problems([tmp_path / 'of_0/run', tmp_path / 'of_1/run'])
    assert of_0 == '' and of_1.startswith(f'no {tmp_path}/of_1/run/.doctor-')
    assert not (tmp_path / 'of_0').exists()


def test_a_run_folder_that_rank_0_cannot_write_is_its_problem_alone(problems, tmp_path):
    (tmp_path / 'file').touch()
    of_0, of_1 = problems([tmp_path / 'file/run'] * 2)
    assert of_0 == f'{tmp_path}/file/run: {os.strerror(20)}' and of_1 == ''


def test_one_host_asks_nothing(problems, tmp_path):
    assert problems([tmp_path / 'run'] * 2, hosts=('h1', 'h1')) == [None, None]
