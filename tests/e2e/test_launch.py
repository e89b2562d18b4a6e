"""The launch scripts: how they start ranks, and how they are stopped."""
import os
import signal

import pytest
from helpers import ROOT, own_signals, run

from mlperf_rn50.launch.__main__ import main


@pytest.mark.parametrize('arguments', [['2'], ['0', 'true'], []])
def test_usage_of_ranks(arguments, capsys):
    with own_signals():
        assert main([str(ROOT / 'launch/ranks.sh'), *arguments]) == 2
    assert 'Usage: launch/ranks.sh RANKS' in capsys.readouterr().err


def test_ranks_have_their_number_and_their_cores_also_inside_a_job_of_slurm_and_hand_on_their_exit_code():
    job = {'SLURM_JOB_ID': '1', 'SLURM_JOBID': '1', 'SLURM_NODELIST': 'n1', 'SLURM_JOB_NODELIST': 'n1',
           'SLURM_NNODES': '1', 'SLURM_TASKS_PER_NODE': '1', 'SLURM_PROCID': '0', 'SLURM_NTASKS': '1'}
    done = run([ROOT / 'launch/ranks.sh', 2, 'sh', '-c', 'echo $OMPI_COMM_WORLD_RANK $OMPI_COMM_WORLD_SIZE '
                '$OMP_NUM_THREADS $DALI_AFFINITY_MASK; exit 75'], env={**os.environ, **job})
    assert done.returncode == 75
    ranks = sorted(line.split() for line in done.stdout.splitlines())
    assert [rank[:2] for rank in ranks] == [['0', '2'], ['1', '2']], done.stderr
    assert all(int(num_threads) >= 1 for _, _, num_threads, _ in ranks)
    first, second = ({int(cpu) for cpu in cpus.split(',')} for *_, cpus in ranks)
    assert first | second <= os.sched_getaffinity(0)
    assert not first & second or len(os.sched_getaffinity(0)) == 1


def test_bound_ranks_hold_back_the_word_to_stop_until_they_train():
    def blocked(word):  # not with a shell in between, which would let it in
        shown = run([ROOT / 'launch/bind.sh', 'grep', '-s', 'SigBlk', '/proc/self/status', word]).stdout
        return int(shown.split()[-1], 16)
    assert blocked('train') == 1 << (signal.SIGUSR1 - 1)
    assert blocked('another') == 0  # a program that does not know the word is ended by it


def test_a_dry_run_prints_the_plan_of_the_layout_and_starts_nothing(tmp_path):
    config = ROOT / 'launch/configs/digits_cpu.yaml'
    done = run([ROOT / 'launch/local.sh', f'--config={config}', '--ranks-per-node', 4, '--dry-run', '--run-dir',
                tmp_path / 'run'])
    assert done.returncode == 0, done.stderr
    assert 'ranks_per_node: 4' in done.stdout and not (tmp_path / 'run').exists()
