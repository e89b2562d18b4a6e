"""What launch/kubernetes.sh prints, run: each pod as a container of the real image on a host of its own."""
import pytest
import yaml
from cluster import kubelet
from cluster.conftest import run_metrics
from cluster.images import QUICK
from helpers import ROOT, run

NAMESPACE = 'lab'
SOMEBODY = 12345  # whom the image does not know


@pytest.fixture
def pods(podman_settings):
    """A list of started pods, which are gone afterwards."""
    started: list[kubelet.Pod] = []
    yield started
    for pod in started:
        run(['podman', 'rm', '--force', '--time', '0', pod.name])
        pod.process.wait()


def test_an_mpijob_trains(cluster, image, digits, pods, tmp_path):
    (tmp_path / 'work').mkdir()
    (tmp_path / 'work').chmod(0o777)
    done = run([ROOT / 'launch/kubernetes.sh', '--image', image, '--nodes', '2', '--ranks-per-node', '1', '--config',
                ROOT / 'launch/configs/digits_cpu.yaml', '--volume', 'work:/work', '--volume', 'digits:/data/digits',
                '--namespace', NAMESPACE, '--data.dir', '/data/digits', '--run-dir', 'run', '--user', SOMEBODY, *QUICK])
    assert (done.returncode, done.stderr) == (0, '')
    manifests = list(yaml.safe_load_all(done.stdout))
    [job] = [m for m in manifests if m['kind'] == 'MPIJob']
    spec, name = job['spec'], job['metadata']['name']
    # What the operator makes: names of the workers, the Secret with a key, and the files of the launcher.
    workers = [f'{name}-worker-{i}' for i in range(spec['mpiReplicaSpecs']['Worker']['replicas'])]
    full_names = [f'{w}.{name}.{NAMESPACE}.svc' for w in workers]
    names = dict(zip(full_names, [h.address for h in cluster.hosts[1:]]))
    node = kubelet.Cluster(tmp_path, manifests, {'work': tmp_path / 'work', 'digits': digits}, names)
    secret, mpi = tmp_path / 'ssh', tmp_path / 'mpi'
    secret.mkdir()
    mpi.mkdir()
    made = run(['ssh-keygen', '-q', '-t', 'ecdsa', '-b', '521', '-m', 'PEM', '-N', '', '-f', secret / 'id_rsa'])
    assert made.returncode == 0, made.stderr
    (secret / 'authorized_keys').write_text((secret / 'id_rsa.pub').read_text())
    (secret / 'id_rsa').chmod(0o644)  # of root, and read by whoever the pods run as
    (mpi / 'hostfile').write_text(''.join(f'{w} slots={spec["slotsPerWorker"]}\n' for w in full_names))
    keys = {spec['sshAuthMountPath']: secret}

    template = spec['mpiReplicaSpecs']['Worker']['template']
    for worker, host in zip(workers, cluster.hosts[1:]):
        pods.append(node.start(template, host, worker, {'K_MPI_JOB_ROLE': 'worker'}, keys))
    probe = template['spec']['containers'][0]['readinessProbe']
    for pod in pods:
        pod.wait_for_port(probe['tcpSocket']['port'])
    assert spec['launcherCreationPolicy'] == 'WaitForWorkersReady'
    variables = {
        'K_MPI_JOB_ROLE': 'launcher', 'OMPI_MCA_orte_keep_fqdn_hostnames': 'true',
        'OMPI_MCA_orte_default_hostfile': '/etc/mpi/hostfile', 'OMPI_MCA_plm_rsh_args': '-o ConnectionAttempts=10',
        'OMPI_MCA_orte_set_default_slots': str(spec['slotsPerWorker']), 'NVIDIA_VISIBLE_DEVICES': '',
        'NVIDIA_DRIVER_CAPABILITIES': ''}
    launcher = node.start(spec['mpiReplicaSpecs']['Launcher']['template'], cluster.hosts[0], f'{name}-launcher',
                          variables, {**keys, '/etc/mpi': mpi})
    pods.append(launcher)
    assert launcher.wait() == 0, launcher.output + ''.join(p.output for p in pods)
    assert 'status              converged' in launcher.output
    for rank, worker in enumerate(workers):
        assert f'rank {rank} on {worker}' in launcher.output
    result = tmp_path / 'work/run/result_0.txt'
    assert result.stat().st_uid == SOMEBODY and run_metrics(result.parent, 'end')[-1]['status'] == 'converged'
    # Asked to go, a worker goes.
    for pod in pods[:2]:
        assert run(['podman', 'kill', '--signal', 'TERM', pod.name]).returncode == 0
        pod.wait()
