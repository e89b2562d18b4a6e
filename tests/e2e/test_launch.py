"""The launch scripts: how they start ranks, and how they are stopped."""
import os
import signal

import pytest
from helpers import ROOT, run


@pytest.mark.parametrize('arguments', [['2'], ['0', 'true'], []])
def test_usage_of_ranks(arguments):
    done = run([ROOT / 'launch/ranks.sh', *arguments])
    assert done.returncode == 2 and 'Usage: launch/ranks.sh RANKS' in done.stderr


@pytest.mark.parametrize('code', [0, 1, 75])
def test_ranks_hand_on_the_exit_code(code):
    assert run([ROOT / 'launch/ranks.sh', 2, 'sh', '-c', f'exit {code}']).returncode == code


def test_ranks_have_their_number_and_their_cores():
    said = run([ROOT / 'launch/ranks.sh', 2, 'sh', '-c',
                'echo $OMPI_COMM_WORLD_RANK $OMP_NUM_THREADS $DALI_AFFINITY_MASK']).stdout.splitlines()
    ranks = sorted(line.split() for line in said)
    assert [rank for rank, _, _ in ranks] == ['0', '1']
    assert all(int(num_threads) >= 1 for _, num_threads, _ in ranks)
    first, second = ({int(cpu) for cpu in cpus.split(',')} for _, _, cpus in ranks)
    assert first | second <= os.sched_getaffinity(0)
    assert not first & second or len(os.sched_getaffinity(0)) == 1


def test_bound_ranks_hold_back_the_word_to_stop_until_they_train():
    done = run([ROOT / 'launch/bind.sh', 'grep', 'SigBlk', '/proc/self/status'])
    assert int(done.stdout.split()[1], 16) == 1 << (signal.SIGUSR1 - 1), done.stderr
