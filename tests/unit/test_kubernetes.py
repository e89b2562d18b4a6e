"""Kubernetes manifests: API schemas, one-line errors, and agreement between their parts."""

import socket

import jsonschema
import kubernetes_validate
import pytest
import yaml
from helpers import MPIJOB_SCHEMA, ROOT, argv, assert_one_line, call, json_table, run

from mlperf_rn50.launch.kubernetes import (
    IMAGE_CONFIGS,
    plan_training,
    render_mpi_job,
    train_words,
)

CONFIG = ROOT / 'launch/configs/digits_cpu.yaml'
IN_IMAGE = f'{IMAGE_CONFIGS}digits_cpu.yaml'
RECORDED = ROOT / 'tests/answers/mpi_job.yaml'
WORDS = argv(
    '--image registry.example:5000/a/mlperf_rn50:cpu --volume work:/shared --config {}', CONFIG
)
# Every option.
ALL = [
    *WORDS,
    *"""--volume data.set-1:/data --nodes 3 --ranks-per-node 4 --train.device gpu
    --model.fused_bn_relu false --name rn50 --namespace lab --memory 64Gi --cpus 16
    --shm-size 500Mi --grace-seconds 300 --user 12345:678 --run-dir /shared/run
    --data.dir /data/digits""".split(),
]


def manifests_of(*words):
    return list(yaml.safe_load_all(render_mpi_job(plan_training(words)[0])))


def job_of(*words):
    return manifests_of(*words)[-1]


def templates_of(job):
    """Return the pod templates of the launcher and the workers."""
    return [job['spec']['mpiReplicaSpecs'][role]['template'] for role in ('Launcher', 'Worker')]


def launcher_of(job):
    """Return the container of the launcher."""
    return templates_of(job)[0]['spec']['containers'][0]


@pytest.mark.parametrize(
    'words, version',
    [(WORDS, kubernetes_validate.latest_version()), (ALL, '1.31')],
    ids=['least', 'all'],
)
def test_manifests_match_the_api_schemas(words, version):
    config_map, job = manifests_of(*words)
    pods = [{'apiVersion': 'v1', 'kind': 'Pod', **template} for template in templates_of(job)]
    for manifest in (config_map, *pods):
        kubernetes_validate.validate(manifest, version, strict=True)


def closed(schema):
    """Return a copy of a custom resource schema that refuses unknown keys."""
    if isinstance(schema, list):
        return [closed(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: closed(value) for key, value in schema.items()}
    is_object = isinstance(schema.get('properties'), dict) and schema.get('type') == 'object'
    if is_object and not schema.get('x-kubernetes-preserve-unknown-fields'):
        strict.setdefault('additionalProperties', False)
    return strict


@pytest.mark.needs_mpijob_schema
def test_mpijob_matches_the_schema_of_the_operator():
    definition = yaml.load(MPIJOB_SCHEMA.read_text(), getattr(yaml, 'CSafeLoader', yaml.SafeLoader))
    schemas = {v['name']: v['schema'] for v in definition['spec']['versions']}
    check = jsonschema.Draft7Validator(closed(schemas['v2beta1']['openAPIV3Schema']))
    for words in (WORDS, ALL):
        check.validate(job_of(*words))


def test_manifest_with_every_option_is_the_recorded_one(request):
    """pytest --update records it."""
    text = render_mpi_job(plan_training([*ALL, '--config', IN_IMAGE])[0])
    if request.config.getoption('--update'):
        RECORDED.write_text(text)
    assert text == RECORDED.read_text()


def test_parts_of_an_mpijob_and_the_image_agree():
    config_map, job = manifests_of(*ALL)
    assert config_map['metadata'] == job['metadata']
    for pod in templates_of(job):
        [container] = pod['spec']['containers']
        for word in container['command']:
            assert word.startswith('/opt/mlperf_rn50/launch/')
            assert (ROOT / word.removeprefix('/opt/mlperf_rn50/')).stat().st_mode & 0o111, word
        mounted = {m['name'] for m in container['volumeMounts']}
        assert mounted == {v['name'] for v in pod['spec']['volumes']}
    # The launcher uses the port and key of the workers.
    folder = job['spec']['sshAuthMountPath']
    lines = (ROOT / 'launch/kubernetes/ssh_config').read_text().splitlines()
    client = dict(line.split(None, 1) for line in lines if not line.lstrip().startswith('#'))
    _, port, _, keys = container['args'][:4]
    assert client['Port'] == port == str(container['readinessProbe']['tcpSocket']['port'])
    assert client['IdentityFile'] == f'{folder}/id_rsa' and keys == f'{folder}/authorized_keys'


def test_configuration_is_in_a_config_map_unless_in_the_image(tmp_path):
    path = tmp_path / 'c.yaml'
    for end in ('', '\n'):  # with an empty line at its end
        path.write_text(CONFIG.read_text() + end)
        config_map, job = manifests_of(*WORDS, '--config', str(path))
        assert config_map['data'] == {'config.yaml': path.read_text()}
        assert launcher_of(job)['args'][-2:] == ['--config', '/etc/mlperf_rn50/config/config.yaml']
    [job] = manifests_of(*WORDS, '--config', IN_IMAGE)
    assert launcher_of(job)['args'][-2:] == ['--config', IN_IMAGE]


def test_missing_options_come_from_the_configuration(tmp_path):
    path = tmp_path / 'config.yaml'
    path.write_text("""run: {num_nodes: 5, ranks_per_node: 6, ranks_per_device: 3}
train: {device: gpu, local_batch_size: 8}""")
    words = [*WORDS, '--config', str(path)]
    training, warning = plan_training(words)
    found = training.num_nodes, training.ranks_per_node, training.gpus_per_node, warning
    assert found == (5, 6, 2, '')
    assert plan_training([*words, '--gpus-per-node', '8'])[0].gpus_per_node == 8
    passed = ('--elastic', '--allow-changed', 'data.dir', '--data.dir', '/x')
    assert plan_training([*words, *passed])[0].options == passed
    assert {*passed} < {*train_words([*words, *passed])}
    # the longest name
    assert plan_training([*words, '--nodes', '1', '--name', 'x' * 54])[0].num_nodes == 1
    assert 'in none of the volumes' in plan_training([*words, '--data.dir', '/data'])[1]


GPU = '--train.device gpu --model.fused_bn_relu false'


@pytest.mark.parametrize(
    'words, message',
    json_table("""
"--name Rn50"                | "--name: got 'Rn50', expected lower-case letters"
"--name {xs}x"               | "got 55 characters, expected at most 54; pods are called NAME-"
"--name {xs} --nodes 11"     | "at most 53; pods are called NAME-worker-10"
"--image -x"                 | "--image"
"--nodes 0"                  | "--nodes: got 0, expected a whole number, 1 or more"
"--volume work"              | "expected CLAIM:/PATH"
"--volume a:/x/../y"         | "without . .. // and :"
"--volume A:/x"              | "the name of a PersistentVolumeClaim"
"--volume a:/shared"         | "got two at /shared"
"--volume a:/opt"            | "would hide /opt/mlperf_rn50"
"--volume a:/x\\ny"           | "an absolute path"
"--memory 64"                | "a size such as 64Gi"
"--cpus 0"                   | "a number of cores"
"--user 0"                   | "UID or UID:GID, not root"
"--user 300"                 | "expected a UID from 500"
"--user 1000:3000000000"     | "and ids up to 2147483647"
"--namespace A"              | "--namespace"
"--gpus-per-node 2"          | "train.device=cpu and --ranks-per-node 1, expected 0"
"{gpu} --ranks-per-node 4 --gpus-per-node 2" | "expected 4"
"--run-dir /results"         | "--run-dir: got /results, expected a folder in a volume: /shared"
"--run-dir ../run"           | "expected a folder in a volume"
"--run.dir /tmp"             | "in a volume"
"--config {configs}../kubernetes/pod.yaml" | "expected a file in launch/configs"
"--train.max_epoch 3"        | "did you mean --train.max_epochs?"
"--run.submission_org \\udcff" | "expected UTF-8"
"word"                       | "word: unknown option"
"""),
)
def test_errors_are_one_line(words, message):
    words = words.format(xs='x' * 54, gpu=GPU, configs=IMAGE_CONFIGS)
    done = call('launch', 'kubernetes', *WORDS, *words.split(' '))
    assert not done.stdout
    assert_one_line(done, 'mlperf-rn50: ', message)


def assert_port_refused(port, text):
    done = run([ROOT / 'launch/sshd.sh', '--port', port, '--authorized-keys', '/dev/null'])
    assert_one_line(done, f'launch/sshd.sh: --port: {text}')


def test_ssh_server_refuses_a_port_that_another_server_uses():
    with socket.create_server(('127.0.0.1', 0)) as server:
        port = server.getsockname()[1]
        assert_port_refused(port, f'{port} is in use on {socket.gethostname()}; stop its server')


@pytest.mark.parametrize('port', ['', '0', '65536', '22;id', '-1'])
def test_ssh_server_refuses_an_invalid_port(port):
    assert_port_refused(port, f'got {port or "nothing"}, expected 1 to 65535')
