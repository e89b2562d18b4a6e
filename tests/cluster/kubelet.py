"""Pods of manifests as containers of podman on the cluster's hosts: what a kubelet makes of a pod template.

It knows the fields that the manifests use, and refuses others, so that none goes untested.
"""
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster.hosts import Host
from helpers import HANG_LIMIT_S, run

POD_FIELDS = {'restartPolicy', 'containers', 'terminationGracePeriodSeconds', 'enableServiceLinks',
              'automountServiceAccountToken', 'securityContext', 'volumes', 'topologySpreadConstraints'}
CONTAINER_FIELDS = {'name', 'image', 'imagePullPolicy', 'command', 'args', 'env', 'resources', 'workingDir', 'ports',
                    'readinessProbe', 'securityContext', 'volumeMounts'}


def expand(text: str, variables: Mapping[str, str]) -> str:
    """A word of a command, or a variable, as the container gets it: $(NAME) is its value if there is one, $$ is $."""
    return re.sub(r'\$(?:(\$)|\(([^)]*)\))', lambda m: m[1] or variables.get(m[2], m[0]), text)


@dataclass
class Cluster:
    """What a namespace of a cluster holds beside the pods.

    Args:
        folder: for the files of Secrets and ConfigMaps.
        objects: all other manifests.
        claims: the folders of the PersistentVolumeClaims.
        names: what DNS says: name -> address.
    """

    folder: Path
    objects: Sequence[dict]
    claims: Mapping[str, Path]
    names: Mapping[str, str]

    def texts(self, kind: str, name: str) -> dict[str, str]:
        """The texts in a Secret or ConfigMap."""
        [found] = [o for o in self.objects if o['kind'] == kind and o['metadata']['name'] == name]
        return found['stringData' if kind == 'Secret' else 'data']

    def write(self, kind: str, name: str) -> Path:
        """The same as a folder that root owns and all may read."""
        folder = self.folder / f'{kind}-{name}'
        folder.mkdir(exist_ok=True)
        for key, text in self.texts(kind, name).items():
            (folder / key).write_text(text)
        return folder


@dataclass
class Pod:
    """A pod on a host. Its process is that of podman run; its exit code is that of the container."""

    host: Host
    name: str
    output_path: Path
    process: subprocess.Popen = field(repr=False)

    @property
    def output(self) -> str:
        return self.output_path.read_text()

    def wait(self) -> int:
        """The exit code, when it has ended."""
        try:
            return self.process.wait(HANG_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f'{self.name} goes on: {self.output}') from None

    def signal(self, name: str) -> None:
        """Sends a signal to the container's first process; KILL ends all of them."""
        done = run(['podman', 'kill', '--signal', name, self.name])
        assert done.returncode == 0, done.stderr

    def wait_for_port(self, port: int) -> None:
        """Waits as a readiness probe does."""
        probe = self.host.inside(['bash', '-c', f'</dev/tcp/{self.host.address}/{port}'])
        deadline = time.monotonic() + HANG_LIMIT_S
        while run(probe).returncode:
            assert self.process.poll() is None and time.monotonic() < deadline, self.output
            time.sleep(0.1)


def start_pod(cluster: Cluster, template: dict, host: Host, name: str, *, variables: Mapping[str, str],
              mounts: Mapping[str, Path]) -> Pod:
    """Starts the pod of a template.

    Args:
        cluster: whose objects it may use.
        template: of the pod.
        host: whose network it has.
        name: of the pod and its host.
        variables: what the controller adds to the environment.
        mounts: what the controller mounts: path -> folder or file.
    """
    output_path = cluster.folder / f'{name}.out'
    command = podman_command(cluster, template['spec'], host, name, variables, mounts)
    with open(output_path, 'a') as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=dict(os.environ))
    return Pod(host, name, output_path, process)


def podman_command(cluster: Cluster, spec: dict, host: Host, name: str, variables: Mapping[str, str],
                   mounts: Mapping[str, Path]) -> list[str]:
    """The command that runs a pod's only container."""
    [container] = spec['containers']
    unknown = (spec.keys() - POD_FIELDS) | (container.keys() - CONTAINER_FIELDS)
    assert not unknown, f'fields that no test has seen: {unknown}'
    env = _environment(cluster, container) | dict(variables)
    hosts_file = cluster.folder / f'{name}.hosts'
    own_names = f'{host.address} {name}\n'  # of itself alone is the short name known
    hosts_file.write_text('127.0.0.1 localhost\n' + own_names + ''.join(f'{a} {n}\n' for n, a in cluster.names.items()))
    words = ['podman', 'run', '--rm', '--replace', '--pull', 'never', '--passwd=false', '--name', name,
             '--hostname', name, '--network', f'ns:/proc/{host.keeper.pid}/ns/net', '--no-hosts',
             '--volume', f'{hosts_file}:/etc/hosts:ro',
             '--stop-timeout', str(spec['terminationGracePeriodSeconds']), '--workdir', container['workingDir'],
             *_security(spec['securityContext'], container)]
    for key, value in env.items():
        words += ['--env', f'{key}={value}']
    sources = {v['name']: v for v in spec['volumes']}
    for mount in container['volumeMounts']:
        words += _mount(cluster, sources.pop(mount['name']), mount['mountPath'])
    assert not sources, f'not mounted: {sources}'
    for path, source in mounts.items():
        words += ['--volume', f'{source}:{path}:ro']
    command = [expand(word, env) for word in [*container['command'], *container.get('args', [])]]
    return [*words, '--entrypoint', command[0], container['image'], *command[1:]]


def _environment(cluster: Cluster, container: dict) -> dict[str, str]:
    env: dict[str, str] = {}
    for variable in container.get('env', []):
        env[variable['name']] = expand(variable['value'], env)
    return env


def _security(pod: dict, container: dict) -> list[str]:
    """Who runs it, with which rights."""
    own = container['securityContext']
    assert own == {'allowPrivilegeEscalation': False, 'capabilities': {'drop': ['ALL']}}
    assert pod['runAsNonRoot'] and pod['seccompProfile'] == {'type': 'RuntimeDefault'}
    words = ['--security-opt', 'no-new-privileges', '--cap-drop', 'ALL']
    user = str(pod.get('runAsUser', ''))
    if not user:  # a name could be anybody's
        user = run(['podman', 'image', 'inspect', '--format', '{{.Config.User}}', container['image']]).stdout.strip()
        assert user.isdecimal() and user != '0', f'cannot verify that {user!r} is not root'
    else:
        words += ['--user', f'{user}:{pod.get("runAsGroup", 0)}']
    return [*words, *(['--group-add', str(pod['fsGroup'])] if 'fsGroup' in pod else [])]


def _mount(cluster: Cluster, source: dict, path: str) -> list[str]:
    """The options of podman that mount a volume."""
    [(kind, volume)] = [(k, v) for k, v in source.items() if k != 'name']
    match kind:
        case 'persistentVolumeClaim':
            return ['--volume', f'{cluster.claims[volume["claimName"]]}:{path}']
        case 'configMap':
            return ['--volume', f'{cluster.write("ConfigMap", volume["name"])}:{path}:ro']
        case 'emptyDir' if volume['medium'] == 'Memory':
            size = volume['sizeLimit'].replace('Gi', 'g').replace('Mi', 'm')
            return ['--mount', f'type=tmpfs,destination={path},tmpfs-size={size},tmpfs-mode=1777']
    raise AssertionError(f'a volume that no test has seen: {source}')
