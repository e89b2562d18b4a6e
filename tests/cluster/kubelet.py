"""Pods of manifests as containers of podman on the cluster's hosts: what a kubelet makes of a pod template.

It knows the fields that the manifests use, and refuses others, so that none goes untested.
"""
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.hosts import Host
from helpers import HANG_LIMIT_S, run, wait_for

POD_FIELDS = {'restartPolicy', 'containers', 'terminationGracePeriodSeconds', 'enableServiceLinks',
              'automountServiceAccountToken', 'securityContext', 'volumes', 'topologySpreadConstraints'}
CONTAINER_FIELDS = {'name', 'image', 'imagePullPolicy', 'command', 'args', 'env', 'resources', 'workingDir', 'ports',
                    'readinessProbe', 'securityContext', 'volumeMounts'}


def expand(text: str, variables: Mapping[str, str]) -> str:
    """A word of a command, or a variable, as the container gets it: $(NAME) is its value if there is one, $$ is $."""
    return re.sub(r'\$(?:(\$)|\(([^)]*)\))', lambda m: m[1] or variables.get(m[2], m[0]), text)


class Pod:
    """A pod on a host; its process is that of podman run."""

    def __init__(self, host: Host, name: str, command: Sequence[str], output_path: Path):
        self.host, self.name, self._output_path = host, name, output_path
        with open(output_path, 'a') as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    @property
    def output(self) -> str:
        return self._output_path.read_text()

    def wait(self) -> int:
        """The exit code of the container, when it has ended."""
        return self.process.wait(HANG_LIMIT_S)

    def wait_for_port(self, port: int) -> None:
        """Waits as a readiness probe does."""
        probe = self.host.inside(['bash', '-c', f'</dev/tcp/{self.host.address}/{port}'])
        wait_for(lambda: run(probe).returncode == 0, lambda: self.process.poll() is None, lambda: self.output)


@dataclass
class Cluster:
    """What a namespace of a cluster holds beside the pods.

    Args:
        folder: for the files of ConfigMaps.
        objects: all manifests.
        claims: the folders of the PersistentVolumeClaims.
        names: what DNS says: name -> address.
    """

    folder: Path
    objects: Sequence[dict]
    claims: Mapping[str, Path]
    names: Mapping[str, str]

    def start(self, template: dict, host: Host, name: str, variables: Mapping[str, str],
              mounts: Mapping[str, Path]) -> Pod:
        """Starts the pod of a template on a host, with what the controller adds to the environment and mounts."""
        spec = template['spec']
        [container] = spec['containers']
        unknown = (spec.keys() - POD_FIELDS) | (container.keys() - CONTAINER_FIELDS)
        assert not unknown, f'fields that no test has seen: {unknown}'
        assert container['securityContext'] == {'allowPrivilegeEscalation': False, 'capabilities': {'drop': ['ALL']}}
        env: dict[str, str] = {}
        for variable in container.get('env', []):
            env[variable['name']] = expand(variable['value'], env)
        env |= variables
        hosts_file = self.folder / f'{name}.hosts'  # the short name is known on the host itself alone
        hosts_file.write_text(f'127.0.0.1 localhost\n{host.address} {name}\n'
                              + ''.join(f'{a} {n}\n' for n, a in self.names.items()))
        words = ['podman', 'run', '--rm', '--replace', '--pull', 'never', '--passwd=false', '--name', name,
                 '--hostname', name, '--network', f'ns:/proc/{host.keeper.pid}/ns/net', '--no-hosts',
                 '--stop-timeout', str(spec['terminationGracePeriodSeconds']), '--workdir', container['workingDir'],
                 '--security-opt', 'no-new-privileges', '--cap-drop', 'ALL', *_user(spec['securityContext'])]
        for key, value in env.items():
            words += ['--env', f'{key}={value}']
        paths = {m['name']: m['mountPath'] for m in container['volumeMounts']}
        assert paths.keys() == {v['name'] for v in spec['volumes']}, 'not mounted'
        for volume in spec['volumes']:
            words += self._mount(volume, paths[volume['name']])
        for path, source in {**mounts, '/etc/hosts': hosts_file}.items():
            words += ['--volume', f'{source}:{path}:ro']
        first, *command = [expand(word, env) for word in [*container['command'], *container.get('args', [])]]
        return Pod(host, name, [*words, '--entrypoint', first, container['image'], *command],
                   self.folder / f'{name}.out')

    def _mount(self, source: dict, path: str) -> list[str]:
        """The options of podman that mount a volume."""
        [(kind, volume)] = [(k, v) for k, v in source.items() if k != 'name']
        match kind:
            case 'persistentVolumeClaim':
                return ['--volume', f'{self.claims[volume["claimName"]]}:{path}']
            case 'configMap':
                [found] = [o for o in self.objects
                           if o['kind'] == 'ConfigMap' and o['metadata']['name'] == volume['name']]
                folder = self.folder / f'ConfigMap-{volume["name"]}'
                folder.mkdir(exist_ok=True)
                for key, text in found['data'].items():
                    (folder / key).write_text(text)
                return ['--volume', f'{folder}:{path}:ro']
            case 'emptyDir' if volume['medium'] == 'Memory':
                size = volume['sizeLimit'].replace('Gi', 'g').replace('Mi', 'm')
                return ['--mount', f'type=tmpfs,destination={path},tmpfs-size={size},tmpfs-mode=1777']
        raise AssertionError(f'a volume that no test has seen: {source}')


def _user(pod: dict) -> list[str]:
    """Who runs a pod."""
    assert pod['runAsNonRoot'] and pod['seccompProfile'] == {'type': 'RuntimeDefault'}
    assert pod['runAsUser'] > 0  # this kubelet does not look into the image for another
    return ['--user', f'{pod["runAsUser"]}:{pod["runAsGroup"]}']
