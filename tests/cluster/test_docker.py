"""The image built and run by a real docker daemon."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from cluster.conftest import BUILD_LIMIT_S, HOST_SETTINGS, QUICK, base_image, run_metrics
from helpers import ROOT, argv, run, wait_for

CONFIG = '/opt/mlperf_rn50/launch/configs/digits_cpu.yaml'
# Debian's client, because another one in /usr/local/bin may be unable to build.
CLIENT = '/usr/bin/docker'


@pytest.fixture(scope='module')
def daemon(tmp_path_factory):
    """Environment for clients of a separate daemon; bridge and firewall require modules that a
    machine may lack."""
    folder = tmp_path_factory.mktemp('docker')
    socket = f'unix://{folder}/socket'
    with open(folder / 'log', 'w') as log:
        process = subprocess.Popen(
            # dockerd leaves a mount behind.
            argv(
                'unshare --mount dockerd --bridge=none --iptables=false --ip6tables=false '
                '--data-root {} --exec-root {} --pidfile {} --host {}',
                folder / 'data',
                folder / 'exec',
                folder / 'pid',
                socket,
            ),
            stdout=log,
            stderr=log,
            env={**os.environ, 'PATH': f'{os.environ["PATH"]}:/usr/sbin:/sbin'},
        )
    environment = {
        **os.environ,
        'DOCKER_HOST': socket,
        'DOCKER_BUILDKIT': '1',
        'MLPERF_RN50_DOCKER': CLIENT,
        'OMP_NUM_THREADS': '1',
    }
    wait_for(
        lambda: run([CLIENT, 'info'], env=environment).returncode == 0,
        lambda: process.poll() is None,
        (folder / 'log').read_text,
    )
    yield environment
    process.terminate()
    process.wait()
    shutil.rmtree(folder)  # gigabytes


@pytest.fixture(scope='module')
def docker(daemon, tmp_path_factory):
    """Function that runs the client and returns its output, with the image built as users build
    it."""

    def call(*arguments):
        done = run([CLIENT, *arguments], timeout=BUILD_LIMIT_S, env=daemon)
        assert done.returncode == 0, f'{arguments}: {done.stdout[-3000:]}{done.stderr[-3000:]}'
        return done.stdout

    folder = tmp_path_factory.mktemp('base')
    base = base_image(folder)
    run(argv('podman save --quiet --output {} {}', folder / 'base.tar', base))
    call('load', '--quiet', '--input', folder / 'base.tar')
    lines = [f'FROM {base}']
    for path in HOST_SETTINGS:  # docker cannot mount them during a build
        name = Path(path).name
        run(['cp', '--recursive', '--dereference', path, folder / name])
        lines.append(f'COPY {name} {path}')
    (folder / 'Dockerfile').write_text('\n'.join(lines))
    call(*argv('build --quiet --tag base {}', folder))
    call(
        *argv('build --quiet --network host --build-arg BASE=base --tag mlperf_rn50:cpu {}', ROOT),
    )
    return call


@pytest.fixture
def folder(docker, tmp_path):
    """Folder with digits, prepared in a container; its name contains a colon."""
    path = tmp_path / '12:30'
    (path / 'data').mkdir(parents=True)
    docker(
        *argv(
            'run --rm --user {} --mount {} mlperf_rn50:cpu prepare digits --out /data/digits',
            f'{os.getuid()}:0',
            f'type=bind,source={path}/data,target=/data',
        ),
    )
    return path


def command(*options):
    return [
        ROOT / 'launch/docker.sh',
        '--config',
        CONFIG,
        *'--run-dir run --data.dir data/digits --ranks-per-node 2'.split(),
        *QUICK,
        *options,
    ]


def test_docker_sh_trains(folder, daemon):
    done = run(command(), cwd=folder, env=daemon)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'status              converged' in done.stdout
    assert '"OMP_NUM_THREADS": "1"' in (folder / 'run/env.json').read_text()
    assert (
        run(
            [
                ROOT / '.venv/bin/mlperf-rn50',
                'check',
                folder / 'run/result_0.txt',
                '--ruleset',
                '4.0.0',
            ]
        ).returncode
        == 0
    )


def test_interrupted_docker_sh_writes_a_checkpoint(folder, daemon):
    job = subprocess.Popen(
        command('--train.target_accuracy=1'),
        cwd=folder,
        env=daemon,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    wait_for(
        lambda: run_metrics(folder / 'run', 'eval'),
        lambda: job.poll() is None,
        lambda: job.communicate()[0],
    )
    job.send_signal(signal.SIGINT)
    output = job.communicate()[0]
    assert (job.returncode, 'interrupted; resume with: ' in output) == (75, True), output
    assert list((folder / 'run/checkpoints').glob('step_*'))
