"""Numbers in the environment: as OpenMP and the launchers write them, or refused in one line."""
import os
import platform
import socket
import subprocess
import sys

import pytest
from helpers import call, run

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.system import launched
from mlperf_rn50.system.launched import launched_local, launched_rank, launched_size, omp_threads, rank_name


@pytest.mark.parametrize('text, threads', [('4', 4), (' 3 , 2,1', 3), ('', None), ('0', None), (',2', None),
                                           ('²', None), ('9' * 5000, None)])
def test_threads_of_nested_levels_count_by_the_first(text, threads):
    assert omp_threads(text) == threads


@pytest.mark.parametrize('text', ['', '1,2', '٣', '9' * 5000])
def test_a_launcher_that_says_no_number_is_named(monkeypatch, text):
    for name, ask in (('OMPI_COMM_WORLD_RANK', launched_rank), ('PMI_SIZE', launched_size),
                      ('OMPI_COMM_WORLD_LOCAL_RANK', launched_local)):
        with monkeypatch.context() as m:
            m.setenv(name, text)
            with pytest.raises(ConfigError, match=f'{name}: got .* in the environment, expected a whole number'):
                ask()


def test_the_program_says_it_in_one_line(monkeypatch):
    monkeypatch.delitem(sys.modules, 'horovod.mxnet', raising=False)  # ranks that have it end this process at once
    monkeypatch.setenv('OMPI_COMM_WORLD_SIZE', '1')
    monkeypatch.setenv('OMPI_COMM_WORLD_RANK', 'x')
    done = call('doctor')
    assert done.returncode == 2 and done.stderr.count('\n') == 1, done.stderr
    assert "OMPI_COMM_WORLD_RANK: got 'x'" in done.stderr


def test_binding_understands_nested_threads_and_names_a_wrong_number():
    command = [sys.executable, '-m', 'mlperf_rn50.system.topology', 'true', 'train']
    done = run(command, env={**os.environ, 'OMP_NUM_THREADS': '2,1'})
    assert done.returncode == 0 and ' 2 threads' in done.stderr, done.stderr
    done = run(command, env={**os.environ, 'MLPERF_RN50_RANKS_PER_DEVICE': 'x'})
    assert done.returncode == 2 and "MLPERF_RN50_RANKS_PER_DEVICE: got 'x'" in done.stderr
    assert done.stderr.count('\n') == 1


def test_a_line_of_a_rank_is_written_in_one_piece_where_python_buffers_nothing():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # in which every write is its own message
    code = 'from mlperf_rn50.system.launched import say; say("rank 0"); say("rank 1")'
    assert subprocess.run([sys.executable, '-u', '-c', code], stderr=theirs).returncode == 0
    assert [ours.recv(100), ours.recv(100)] == [b'rank 0\n', b'rank 1\n']


def test_without_stderr_an_error_keeps_its_exit_code():
    code = 'import sys; from mlperf_rn50.cli import main; sys.stderr = None; sys.exit(main(["report", "/nonexistent"]))'
    assert subprocess.run([sys.executable, '-c', code]).returncode == 2


SRUN = {'SLURM_STEP_NUM_TASKS': '8', 'SLURM_STEP_NUM_NODES': '2', 'SLURM_LOCALID': '3'}


@pytest.mark.parametrize('variables, expected', [
    ({}, (0, None, (0, 1))),
    ({'OMPI_COMM_WORLD_RANK': ' 3 ', 'OMPI_COMM_WORLD_SIZE': '8', 'OMPI_COMM_WORLD_LOCAL_RANK': '1',
      'OMPI_COMM_WORLD_LOCAL_SIZE': '2'}, (3, 8, (1, 2))),
    ({'HOROVOD_RANK': '6', 'HOROVOD_SIZE': '8', 'HOROVOD_LOCAL_RANK': '0', 'HOROVOD_LOCAL_SIZE': '4'}, (6, 8, (0, 4))),
    (SRUN, (0, None, (0, 1))),  # a program started by hand within a job
    ({**SRUN, 'PMIX_RANK': '7'}, (7, 8, (3, 4)))])
def test_launchers_tell_a_rank_its_place(monkeypatch, variables, expected):
    for name in (*launched._RANK, *launched._SIZE, *launched._LOCAL_RANK, *launched._LOCAL_SIZE):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (launched_rank(), launched_size(), launched_local()) == expected
    assert rank_name() == f'rank {expected[0]} on {platform.node()}'
