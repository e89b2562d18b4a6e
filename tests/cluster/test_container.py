"""The image built from the Dockerfile, run with buildah (no container engine) and podman."""

import os
import subprocess

import pytest
from cluster.conftest import QUICK, buildah
from helpers import HANG_LIMIT_S, ROOT, argv, run, variables


@pytest.fixture
def container(image):
    name = buildah('from', image)
    yield name
    buildah('rm', name)


def test_image_is_small_and_runs_as_user(image, container):
    size = int(run([*'podman image inspect --format {{.Size}}'.split(), image]).stdout)
    assert size < 2.5e9, size  # DALI alone is 1 GB
    config = run(
        ['podman', 'image', 'inspect', '--format', '{{.Config.User}} {{.Config.Entrypoint}}', image]
    ).stdout
    assert config.split() == ['1000', '[mlperf-rn50]']
    assert buildah(*argv('run {} -- id -un', container)) == 'rn50'
    assert buildah(*argv('run {} -- mlperf-rn50 --version', container)).startswith('mlperf-rn50 ')
    as_user = ('run', '--user', '12345:0', container, '--', '/opt/mlperf_rn50/launch/user.sh')
    # buildah can lose output that is written just before the end.
    home = buildah(
        *as_user,
        'bash',
        '-c',
        'whoami && echo ~ && touch ~/file && ssh -G host | grep ^port && sleep 1',
    )
    assert home.split() == 'user12345 /home/rn50 port 22'.split()
    assert not buildah(*argv('run {} -- find /etc/ssh -name ssh_host_*', container))
    output = buildah(*argv('run {} -- /opt/mlperf_rn50/launch/setup.sh --check', container))
    assert 'all libraries resolve' in output and 'with MPI+Gloo import' in output


@pytest.mark.engine
def test_image_prepares_data_trains_and_logs(container, tmp_path):
    tmp_path.chmod(0o777)
    mount = ('--volume', f'{tmp_path}:/data')
    buildah('run', *mount, *argv('{} -- mlperf-rn50 prepare digits --out /data/digits', container))
    output = buildah(
        'run',
        *mount,
        *argv(
            '{} -- /opt/mlperf_rn50/launch/local.sh --ranks-per-node 2 --config '
            '/opt/mlperf_rn50/launch/configs/digits_cpu.yaml --data.dir /data/digits '
            '--run-dir /data/run',
            container,
        ),
        *QUICK,
    )
    assert 'status              converged' in output
    checked = run(
        [
            ROOT / '.venv/bin/mlperf-rn50',
            'check',
            tmp_path / 'run/result_0.txt',
            '--ruleset',
            '4.0.0',
        ]
    )
    assert checked.returncode == 0, checked.stdout


def test_docker_sh_trains_with_podman(image, podman_settings, digits, tmp_path):
    done = subprocess.run(
        [
            *argv(
                '{} --image {} --mount {} --config '
                '/opt/mlperf_rn50/launch/configs/digits_cpu.yaml --ranks-per-node 2 '
                '--run-dir {} --data.dir {}',
                ROOT / 'launch/docker.sh',
                image,
                digits,
                tmp_path / 'run',
                digits,
            ),
            *QUICK,
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT_S,
        env=os.environ | variables('MLPERF_RN50_DOCKER=podman OMP_NUM_THREADS=1'),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'status              converged' in done.stdout
    assert (tmp_path / 'run/result_0.txt').exists()
    assert '"OMP_NUM_THREADS": "1"' in (tmp_path / 'run/env.json').read_text()
