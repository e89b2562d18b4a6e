"""Options of launchers, and the command lines and environment of their ranks."""

import io
import json
import os
import re
import signal
from types import SimpleNamespace

import pytest
from helpers import (
    ROOT,
    argv,
    assert_one_line,
    begin_run,
    call,
    json_table,
    keep_checkpoint,
    launch_options,
    write_programs,
)

from mlperf_rn50.cli import launch
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.launch import engines
from mlperf_rn50.launch.engines import ENGINES, environment, nodes_of_slurm_job, plain_output
from mlperf_rn50.runfolder.names import RunFolder


def test_unknown_options_go_to_train():
    words = '--config=c.yaml --seeds 2 --train.max_epochs -1 --hosts h1,h2 --clear-caches'
    o = launch_options(words)
    assert (o.config, o.seeds, [h.name for h in o.hosts]) == ('c.yaml', 2, ['h1', 'h2'])
    assert o.train == '--train.max_epochs -1 --run.clear_caches true'.split()
    assert not o.only_prints
    assert launch_options('--dry-run').only_prints
    assert launch_options('--print=run.dir').only_prints
    assert launch_options('--hosts', 'h1', script='local').hosts == []
    o = launch_options('--container x --mount /a --mount /b', script='slurm')
    assert o.mounts == ['/a', '/b']


@pytest.mark.parametrize(
    'words, ranks, batch',
    json_table("""
"local"                                                                          | 1 | 32
"local --nodes 2 --ranks-per-node 2"                                             | 4 | 128
"mpirun --hosts h1,h2"                                                           | 2 | 64
"mpirun --hosts h1:3,h2:3"                                                       | 6 | 192
"mpirun --hosts h1,h2,h3 --nodes 2 --ranks-per-node 2"                           | 4 | 128
"slurm --nodes 2 --ranks-per-node 4"                                             | 8 | 256
"kubernetes --image x --volume a:/b --run-dir /b/r --nodes 3 --ranks-per-node 2" | 6 | 192
"""),
)
def test_dry_run_of_a_launcher_has_its_ranks(tmp_path, monkeypatch, words, ranks, batch):
    monkeypatch.delenv('SLURM_JOB_NODELIST', raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'c.yaml').write_text('train: {local_batch_size: 32}\ndata: {synthetic: true}\n')
    done = call('launch', *words.split(), '--config', tmp_path / 'c.yaml', '--dry-run')
    assert done.returncode == 0 and os.listdir() == ['c.yaml'], done.stderr
    assert re.search(rf'^ranks +{ranks}$', done.stdout, re.MULTILINE), done.stdout
    assert f'global batch          {batch}' in done.stdout


def test_dry_run_of_a_launcher_checks_its_hosts():
    config = ROOT / 'launch/configs/c4140_v100_4node.yaml'
    done = call(*argv('launch mpirun --hosts h1,h2 --config {} --dry-run', config))
    assert_one_line(done, 'got 4 with 2 hosts')


@pytest.mark.parametrize('run', ['{}', '{num_nodes: 2, ranks_per_node: 1, seed: 7}'])
def test_dry_run_of_a_sweep_shows_each_layout_without_a_report(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    text = f'run: {run}\ntrain: {{global_batch_size: 32}}\ndata: {{synthetic: true}}\n'
    (tmp_path / 'c.yaml').write_text(text)
    words = 'sweep --study x --config c.yaml --seeds 2 --run.seed null --dry-run --layouts'
    done = call(*words.split(), '1x1 2x2')
    assert done.returncode == 0 and 'no such folder' not in done.stderr
    ranks = re.findall(r'^ranks +(\d+)$', done.stdout, re.MULTILINE)
    assert ranks == ['1', '1', '4', '4']


def test_dry_run_of_an_elastic_resume_rounds_the_batch_down(tmp_path):
    (tmp_path / 'run').mkdir()
    (tmp_path / 'c.yaml').write_text('train: {global_batch_size: 244}\ndata: {synthetic: true}\n')
    run = begin_run(tmp_path / 'run')
    keep_checkpoint(run, 8)
    (tmp_path / 'c.yaml').rename(run.config)
    words = ['launch', 'local', '--ranks-per-node', 3, '--elastic', '--dry-run']
    done = call(*words, '--run-dir', run.dir, '--resume')
    assert 'global batch          243' in done.stdout, done.stderr
    # a new run has all ranks
    assert_one_line(call(*words, '--config', run.config), 'got 244, expected a multiple of 3')


def test_runs_of_a_launcher_have_different_seeds(tmp_path):
    (tmp_path / 'c.yaml').write_text('run: {seed: 7}\ntrain: {local_batch_size: 32}\n')
    words = ['launch', 'local', '--config', tmp_path / 'c.yaml', '--seeds', 2, '--dry-run']
    assert_one_line(call(*words), 'run.seed: got 7 with --seeds 2')
    assert call(*words, '--run.seed', 'null', '--data.synthetic', 'true').returncode == 0


@pytest.mark.parametrize('given, expected', [('2xC4140', '4xC4140'), ('8xA100', '8xA100')])
def test_platform_of_a_sweep_has_the_nodes_of_the_layout(tmp_path, monkeypatch, given, expected):
    commands = []
    monkeypatch.setattr(
        launch, 'start_launcher', lambda _, words, queue: commands.append(words) or 0
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'c.yaml').write_text(
        f'run: {{submission_platform: {given}}}\ntrain: {{global_batch_size: 32}}\n'
    )
    words = 'sweep --study x --config c.yaml --hosts a,b,c,d --layouts'
    call(*words.split(), '2x1 4x1')
    last = commands[-1]
    assert last[last.index('--run.submission_platform') + 1] == expected


def write_ends(study, ends):
    """Write a run of a layout for each end; '' for a run without one."""
    folder = study / '1x1'
    folder.mkdir(parents=True)
    for k, end in enumerate(ends):
        run = RunFolder(folder, k)
        run.result.write_text('')
        run.metrics.write_text(json.dumps({'event': 'end', 'status': end}) + '\n' if end else '')


@pytest.mark.parametrize('word', ['--hostfile=hosts', '--ranks-per-device=2', '-np'])
def test_unknown_option_of_ranks_sh_is_refused(word):
    done = call('launch', 'ranks', word, 4, 'true', '--of-the-program')
    assert_one_line(done, word.partition('=')[0])


def test_ranks_sh_names_its_own_argument_for_other_numbers_of_the_hosts():
    done = call('launch', 'ranks', '--hosts', 'h1:4,h2:4', 2, 'true')
    assert_one_line(
        done, 'h1: got 2 ranks, expected 4 as given with the host; change that or RANKS'
    )


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Function that makes a sweep of one layout; returns its exit code and the calls of the
    launcher."""

    def make(ends, is_stopped=False):
        calls = []

        def start(name, options, queue):
            calls.append(name)
            if is_stopped:
                os.kill(os.getpid(), signal.SIGINT)
            return 0

        monkeypatch.setattr(launch, 'start_launcher', start)
        monkeypatch.chdir(tmp_path)
        write_ends(tmp_path / 'logs/x', ends)
        (tmp_path / 'c.yaml').write_text('train: {global_batch_size: 32}\n')
        words = 'sweep --study x --layouts 1x1 --config c.yaml --seeds 3'
        return call(*words.split()).returncode, len(calls)

    return make


@pytest.mark.parametrize(
    'ends, num_calls',
    [(['converged', 'aborted'], 1), (['interrupted', 'failed', ''], 3), (['converged'] * 3, 0)],
)
def test_sweep_repeats_runs_without_a_result(sweep, ends, num_calls):
    assert sweep(ends)[1] == num_calls


def test_stopped_sweep_starts_no_further_run(sweep):
    assert sweep([], is_stopped=True) == (75, 1)


@pytest.mark.parametrize('folder, is_bound', [('/scratch', True), ('/tmp/mine', False)])
def test_apptainer_binds_a_temporary_folder_outside_tmp(tmp_path, monkeypatch, folder, is_bound):
    monkeypatch.setenv('TMPDIR', folder)
    (tmp_path / 'x.sif').touch()
    options = launch_options('--image', tmp_path / 'x.sif', script='apptainer')
    assert (folder in ENGINES['apptainer'].program(options)) == is_bound


@pytest.mark.parametrize('hosts, has_driver', [('', False), ('--hosts h1,h2', True)])
def test_gpus_of_hosts_are_visible_in_apptainer(tmp_path, monkeypatch, hosts, has_driver):
    """Without a driver on this machine."""
    monkeypatch.setenv('PATH', str(tmp_path))
    (tmp_path / 'x.sif').touch()
    options = launch_options(f'--image {tmp_path}/x.sif {hosts}', script='apptainer')
    assert ('--nv' in ENGINES['apptainer'].program(options)) == has_driver


def test_folder_is_mounted_where_it_is_named(tmp_path):
    (tmp_path / 'real').mkdir()
    (tmp_path / 'data').symlink_to('real')
    options = launch_options(f'--container x --mount {tmp_path}/data', script='slurm')
    words = ENGINES['slurm'].program(options)
    assert words[words.index('--container-mounts') + 1].endswith(f'{tmp_path}/data:{tmp_path}/data')


def test_environment_of_ranks_and_of_redirected_output():
    before = {'GLIBC_TUNABLES': 'user', 'A': 'b', 'MLPERF_RN50_DEVICE': 'gpu'}
    assert environment(launch_options('--ranks-per-device', 4), before, '7-ab', 'cpu') == {
        'GLIBC_TUNABLES': 'user',
        'A': 'b',
        'MLPERF_RN50_RANKS_PER_DEVICE': '4',
        'MLPERF_RN50_JOB': '7-ab',
        'MLPERF_RN50_COMMAND': 'mlperf-rn50 launch mpirun --ranks-per-device 4',
        'MLPERF_RN50_DEVICE': 'cpu',
        'CUDA_MPS_ACTIVE_THREAD_PERCENTAGE': '50',
    }
    assert plain_output(io.StringIO(), {}) == {'NO_COLOR': '1'}
    assert plain_output(io.StringIO(), {'FORCE_COLOR': '1'}) == {}
    assert plain_output(SimpleNamespace(isatty=lambda: True), {}) == {}


@pytest.mark.parametrize(
    'script, num_ranks, reason',
    [('local', 2, '2 ranks need it; start one rank'), ('horovodrun', 1, 'horovodrun needs it')],
)
def test_several_ranks_need_horovod(monkeypatch, script, num_ranks, reason):
    monkeypatch.setattr(engines, 'find_spec', lambda name: None)
    ENGINES['local'].check_horovod(None, 1)
    ENGINES['apptainer'].check_horovod('a.sif', 8)  # the image has its own packages
    with pytest.raises(ConfigError, match=f'Horovod is not installed, but {reason}.*CUDA 11'):
        ENGINES[script].check_horovod(None, num_ranks)


@pytest.mark.parametrize(
    'scontrol, reason',
    [
        ('', 'No such file'),
        ('echo slurm_load_jobs error: down >&2; exit 1', 'slurm_load_jobs error: down'),
        ('exec /bin/sleep 600', 'no answer within 1 s'),
    ],
)
def test_slurm_without_an_answer_is_named(tmp_path, monkeypatch, scontrol, reason):
    if '1 s' in reason:  # a slow machine must not fail the others
        monkeypatch.setattr(engines, 'SCONTROL_S', 1)
    monkeypatch.setenv('PATH', str(tmp_path))
    if scontrol:
        write_programs(tmp_path, scontrol=scontrol)
    with pytest.raises(ConfigError, match=f'scontrol: {reason}'):
        nodes_of_slurm_job({'SLURM_JOB_NODELIST': 'n1'})


def test_deleted_current_folder_is_named(tmp_path, monkeypatch):
    (tmp_path / 'gone').mkdir()
    monkeypatch.chdir(tmp_path / 'gone')
    (tmp_path / 'gone').rmdir()
    done = call('launch', 'local', '--config', 'c.yaml')
    assert_one_line(done, 'the current folder has been deleted; change to another one')
