"""Manifests of launch/kubernetes.sh, with each pod as a container of the real image on a separate
host.

The simulated kubelet accepts only the fields that it implements, so every field of the manifests is
tested.
"""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from cluster.conftest import QUICK, run_metrics
from cluster.hosts import Host
from helpers import HANG_LIMIT_S, ROOT, argv, run, wait_for
from property.test_kubernetes import expand

NAMESPACE = 'lab'
USER_ID = 12345  # unknown to the image
POD_FIELDS = set(
    """restartPolicy containers terminationGracePeriodSeconds enableServiceLinks securityContext
    automountServiceAccountToken volumes topologySpreadConstraints""".split()
)
CONTAINER_FIELDS = set(
    """name image imagePullPolicy command args env resources workingDir ports readinessProbe
    securityContext volumeMounts""".split()
)


class Pod:
    """Pod on a host, with the process of podman run."""

    def __init__(self, host: Host, name: str, command: Sequence[str], output_path: Path):
        self.host, self.name, self._output_path = host, name, output_path
        with open(output_path, 'a') as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    @property
    def output(self) -> str:
        return self._output_path.read_text()

    def wait(self) -> int:
        """Wait for the end of the container; return the exit code."""
        return self.process.wait(HANG_LIMIT_S)

    def wait_for_port(self, port: int) -> None:
        """Wait until the pod accepts connections at a port, like a readiness probe."""
        probe = self.host.inside(['bash', '-c', f'</dev/tcp/{self.host.address}/{port}'])
        wait_for(
            lambda: run(probe).returncode == 0,
            lambda: self.process.poll() is None,
            lambda: self.output,
        )


@dataclass
class Namespace:
    """Contents of a namespace, except the pods.

    Args:
        folder: location of ConfigMap files.
        objects: all manifests.
        claims: folders by PersistentVolumeClaim name.
        names: addresses by DNS name.
    """

    folder: Path
    objects: Sequence[dict]
    claims: Mapping[str, Path]
    names: Mapping[str, str]

    def start(
        self,
        template: dict,
        host: Host,
        name: str,
        variables: Mapping[str, str],
        mounts: Mapping[str, Path],
    ) -> Pod:
        """Start the pod of a template on a host, with variables and mounts of the controller."""
        spec = template['spec']
        [container] = spec['containers']
        unknown = (spec.keys() - POD_FIELDS) | (container.keys() - CONTAINER_FIELDS)
        assert not unknown, f'untested fields: {unknown}'
        assert container['securityContext'] == {
            'allowPrivilegeEscalation': False,
            'capabilities': {'drop': ['ALL']},
        }
        env: dict[str, str] = {}
        for variable in container.get('env', []):
            env[variable['name']] = expand(variable['value'], env)
        env |= variables
        hosts_file = self.folder / f'{name}.hosts'  # the short name resolves only on the host
        addresses = {'localhost': '127.0.0.1', name: host.address, **self.names}
        hosts_file.write_text(''.join(f'{a} {n}\n' for n, a in addresses.items()))
        words = f"""podman run --rm --replace --pull never --passwd=false --name {name}
            --hostname {name} --network ns:/proc/{host.keeper.pid}/ns/net --no-hosts
            --stop-timeout {spec['terminationGracePeriodSeconds']} --cap-drop ALL
            --workdir {container['workingDir']} --security-opt no-new-privileges""".split()
        words += _user(spec['securityContext'])
        for key, value in env.items():
            words += ['--env', f'{key}={value}']
        paths = {m['name']: m['mountPath'] for m in container['volumeMounts']}
        assert paths.keys() == {v['name'] for v in spec['volumes']}, 'not mounted'
        for volume in spec['volumes']:
            words += self._mount(volume, paths[volume['name']])
        for path, source in {**mounts, '/etc/hosts': hosts_file}.items():
            words += ['--volume', f'{source}:{path}:ro']
        command = [*container['command'], *container.get('args', [])]
        first, *others = (expand(word, env) for word in command)
        words += ['--entrypoint', first, container['image'], *others]
        return Pod(host, name, words, self.folder / f'{name}.out')

    def _mount(self, source: dict, path: str) -> list[str]:
        """Return the options of podman that mount a volume."""
        [(kind, volume)] = [(k, v) for k, v in source.items() if k != 'name']
        match kind:
            case 'persistentVolumeClaim':
                return ['--volume', f'{self.claims[volume["claimName"]]}:{path}']
            case 'configMap':
                wanted = 'ConfigMap', volume['name']
                [files] = [
                    o['data'] for o in self.objects if (o['kind'], o['metadata']['name']) == wanted
                ]
                folder = self.folder / f'ConfigMap-{volume["name"]}'
                folder.mkdir(exist_ok=True)
                for key, text in files.items():
                    (folder / key).write_text(text)
                return ['--volume', f'{folder}:{path}:ro']
            case 'emptyDir' if volume['medium'] == 'Memory':
                size = volume['sizeLimit'].replace('Gi', 'g').replace('Mi', 'm')
                tmpfs = f'type=tmpfs,destination={path},tmpfs-size={size},tmpfs-mode=1777'
                return ['--mount', tmpfs]
        raise AssertionError(f'untested volume: {source}')


def _user(pod: dict) -> list[str]:
    """Return the options of podman for the user of a pod."""
    assert pod['runAsNonRoot'] and pod['seccompProfile'] == {'type': 'RuntimeDefault'}
    assert pod['runAsUser'] > 0  # the simulated kubelet does not read the user from the image
    return ['--user', f'{pod["runAsUser"]}:{pod["runAsGroup"]}']


@pytest.fixture
def pods(podman_settings):
    """List of started pods; they are removed at the end."""
    started: list[Pod] = []
    yield started
    for pod in started:
        run([*'podman rm --force --time 0'.split(), pod.name])
        pod.process.wait()


def test_mpijob_trains(cluster, image, digits, pods, tmp_path):
    work, secret, mpi = (tmp_path / name for name in ('work', 'ssh', 'mpi'))
    for folder in (work, secret, mpi):
        folder.mkdir()
    work.chmod(0o777)
    command = argv(
        f'{{}} --image {image} --nodes 2 --ranks-per-node 1 --volume work:/work --volume '
        f'digits:/data/digits --namespace {NAMESPACE} --data.dir /data/digits --run-dir run '
        f'--user {USER_ID} --config {{}}',
        ROOT / 'launch/kubernetes.sh',
        ROOT / 'launch/configs/digits_cpu.yaml',
    )
    done = run([*command, *QUICK])
    assert (done.returncode, done.stderr) == (0, '')
    manifests = list(yaml.safe_load_all(done.stdout))
    [job] = [m for m in manifests if m['kind'] == 'MPIJob']
    spec, name = job['spec'], job['metadata']['name']
    # The operator creates the worker names, the Secret with a key, and the files of the launcher.
    workers = [f'{name}-worker-{i}' for i in range(spec['mpiReplicaSpecs']['Worker']['replicas'])]
    full_names = [f'{w}.{name}.{NAMESPACE}.svc' for w in workers]
    names = dict(zip(full_names, [h.address for h in cluster.hosts[1:]]))
    node = Namespace(tmp_path, manifests, {'work': work, 'digits': digits}, names)
    keygen = run(argv('ssh-keygen -q -t ecdsa -b 521 -m PEM -N {} -f {}', '', secret / 'id_rsa'))
    assert keygen.returncode == 0, keygen.stderr
    (secret / 'authorized_keys').write_text((secret / 'id_rsa.pub').read_text())
    (secret / 'id_rsa').chmod(0o644)  # owned by root, and read by the user of the pods
    (mpi / 'hostfile').write_text(
        ''.join(f'{w} slots={spec["slotsPerWorker"]}\n' for w in full_names)
    )
    keys = {spec['sshAuthMountPath']: secret}

    template = spec['mpiReplicaSpecs']['Worker']['template']
    for worker, host in zip(workers, cluster.hosts[1:]):
        pods.append(node.start(template, host, worker, {'K_MPI_JOB_ROLE': 'worker'}, keys))
    probe = template['spec']['containers'][0]['readinessProbe']
    for pod in pods:
        pod.wait_for_port(probe['tcpSocket']['port'])
    assert spec['launcherCreationPolicy'] == 'WaitForWorkersReady'
    variables = {
        'K_MPI_JOB_ROLE': 'launcher',
        'OMPI_MCA_orte_keep_fqdn_hostnames': 'true',
        'OMPI_MCA_orte_default_hostfile': '/etc/mpi/hostfile',
        'OMPI_MCA_plm_rsh_args': '-o ConnectionAttempts=10',
        'OMPI_MCA_orte_set_default_slots': str(spec['slotsPerWorker']),
        'NVIDIA_VISIBLE_DEVICES': '',
        'NVIDIA_DRIVER_CAPABILITIES': '',
    }
    launcher = node.start(
        spec['mpiReplicaSpecs']['Launcher']['template'],
        cluster.hosts[0],
        f'{name}-launcher',
        variables,
        {**keys, '/etc/mpi': mpi},
    )
    pods.append(launcher)
    assert launcher.wait() == 0, launcher.output + ''.join(p.output for p in pods)
    assert 'status              converged' in launcher.output
    for rank, worker in enumerate(workers):
        assert f'rank {rank} on {worker}' in launcher.output
    assert (work / 'run/result_0.txt').stat().st_uid == USER_ID
    assert run_metrics(work / 'run', 'end')[-1]['status'] == 'converged'
    # Workers end on SIGTERM.
    for pod in pods[:2]:
        assert run(argv('podman kill --signal TERM {}', pod.name)).returncode == 0
        pod.wait()
