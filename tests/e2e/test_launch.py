"""Launch scripts: start and stop of ranks, dry runs, and sweeps over layouts of local ranks."""
import os
import re
import signal

import pytest
from e2e.training import pack_tiny
from helpers import ROOT, own_signals, run, write_files

from mlperf_rn50.launch.__main__ import main
from mlperf_rn50.mllog.read.reader import read_run


@pytest.mark.parametrize('arguments', [['2'], ['0', 'true'], []])
def test_ranks_sh_usage(arguments, capsys):
    with own_signals():
        assert main([str(ROOT / 'launch/ranks.sh'), *arguments]) == 2
    assert 'Usage: launch/ranks.sh RANKS' in capsys.readouterr().err


def test_ranks_inside_a_slurm_job_have_numbers_and_cores_and_return_their_exit_code():
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


def test_bound_ranks_block_the_stop_signal_until_training():
    def blocked(word):  # without a shell, which would unblock the signal
        shown = run([ROOT / 'launch/bind.sh', 'grep', '-s', 'SigBlk', '/proc/self/status', word]).stdout
        return int(shown.split()[-1], 16)
    assert blocked('train') == 1 << (signal.SIGUSR1 - 1)
    assert blocked('other') == 0  # other programs do not handle the signal, so it must terminate them


def test_dry_run_prints_the_plan_and_starts_nothing(tmp_path):
    config = ROOT / 'launch/configs/digits_cpu.yaml'
    done = run([ROOT / 'launch/local.sh', f'--config={config}', '--ranks-per-node', 4, '--dry-run', '--run-dir',
                tmp_path / 'run'])
    assert done.returncode == 0, done.stderr
    assert 'ranks_per_node: 4' in done.stdout and not (tmp_path / 'run').exists()


@pytest.mark.slow
def test_sweep_skips_complete_runs_and_reports_failures(tmp_path):
    pack_tiny(tmp_path / 'data', 60)
    tiny = ('data: {dir: data, dataset: tiny-digits, num_train: 60, num_val: 50, num_classes: 10, image_size: 32,\n'
            '       resize_shorter: 32, crop: none, num_threads: 1}\n'
            'model: {name: resnet18}\nschedule: {base_lr: 0.02, warmup_epochs: 1, decay_epochs: 9}\n'
            'train: {global_batch_size: 20, eval_period: 1, target_accuracy: 0.01}\n')
    write_files(tmp_path, {'tiny.yaml': tiny, 'wild.yaml': tiny.replace('base_lr: 0.02', 'base_lr: 1e30')})

    def sweep(name, *options):
        return run([ROOT / 'launch/sweep.sh', '--study', name, '--layouts', '1x1 2x1', '--config', f'{name}.yaml',
                    '--weak', '--no-doctor', *options], cwd=tmp_path)

    def row(output, name):
        return next(line.split() for line in output.splitlines() if line.startswith(name))
    failed = sweep('wild', '--train.target_accuracy', '1')
    assert failed.returncode == 1, failed.stderr
    assert failed.stderr.count('this run did not converge') == 2  # the second layout also ran
    assert row(failed.stdout, '1x1')[1:8] == ['1', '1', '20', '0', '/', '1', '-']
    assert '1x1, 2x1: warning: 1 of 1 runs did not converge' in failed.stdout

    done = sweep('tiny', '--seeds', 2)
    assert done.returncode == 0, done.stderr
    assert row(done.stdout, '1x1')[1:7] == ['1', '1', '20', '2', '/', '2']
    assert row(done.stdout, '2x1')[1:7] == ['1', '2', '40', '2', '/', '2']  # one host according to the log
    runs = [read_run(tmp_path / f'logs/tiny/2x1/result_{k}.txt') for k in (0, 1)]
    assert len({r.seed for r in runs}) == 2
    assert [r.optimizer['sgd_opt_base_learning_rate'] for r in runs] == [pytest.approx(0.04)] * 2
    assert all(re.match('2 nodes of 1 ranks, simulated by local ranks of ', r.platform) for r in runs)

    before = sorted(tmp_path.rglob('result_*'))
    again = sweep('tiny', '--seeds', 2)
    assert again.returncode == 0 and again.stderr.count('complete, skipped') == 2
    assert sorted(tmp_path.rglob('result_*')) == before
