"""Manifests of a training on Kubernetes: the templates of launch/kubernetes with some fields set, no text is pasted."""
from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

TEMPLATES = Path(__file__).parents[2] / 'launch/kubernetes'
CONFIG_FOLDER = '/etc/mlperf_rn50/config'  # where the ConfigMap is mounted
# Text that every reader of YAML, 1.1 or 1.2, takes for text without quotes, if it is none of these.
_PLAIN = re.compile(r'[A-Za-z/][A-Za-z0-9/._-]*')
_NO_TEXTS = {'y', 'n', 'yes', 'no', 'on', 'off', 'true', 'false', 'null'}


@dataclass(frozen=True)
class Volume:
    """A PersistentVolumeClaim, and where the pods see it."""

    claim: str
    path: str


@dataclass(frozen=True)
class User:
    """Whom the pods run as, and the group that volumes are given to, if any."""

    uid: int
    volume_group: int | None = None


@dataclass(frozen=True)
class Training:
    """What runs where.

    Args:
        gpus_per_node: 0 asks for none.
        volumes: the first one is the working folder.
        config_path: in the pods.
        config_text: None where the configuration is in the image.
        options: of the training, exactly as the program gets them.
        namespace: None leaves it to kubectl.
        user: None leaves it to the image or the cluster.
        memory: limit of each worker such as 64Gi, shared memory included; None for no limit.
        cpus: limit of each worker; None for no limit.
        grace_s: time from SIGTERM to SIGKILL, for a checkpoint.
    """

    name: str
    image: str
    num_nodes: int
    ranks_per_node: int
    gpus_per_node: int
    volumes: tuple[Volume, ...]
    config_path: str
    config_text: str | None = None
    options: tuple[str, ...] = ()
    namespace: str | None = None
    user: User | None = None
    memory: str | None = None
    cpus: str | None = None
    shm_size: str = '8Gi'
    grace_s: int = 120


def make_mpi_job(training: Training) -> list[dict]:
    """Manifests of an MPIJob, in the order in which they are made."""
    [job] = _load_template('mpi_job')
    job['spec']['slotsPerWorker'] = training.ranks_per_node
    launcher, worker = (job['spec']['mpiReplicaSpecs'][role] for role in ('Launcher', 'Worker'))
    worker['replicas'] = training.num_nodes
    launcher['template']['spec']['containers'][0]['args'] += _escaped(
        ['--nodes', str(training.num_nodes), '--ranks-per-node', str(training.ranks_per_node),
         '--config', training.config_path, *training.options])
    for replica in (launcher, worker):
        _fill_pod(replica['template'], training)
    _fill_trainer(worker['template'], training)
    return _named([*_config_maps(training), job], training)


def render_manifests(manifests: Sequence[dict]) -> str:
    """YAML that kubectl reads as it is meant: what some reader could take for a number or a truth value is quoted."""
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, width=float('inf'), explicit_start=True)


class _Dumper(yaml.SafeDumper):
    """Never refers back to what was written before."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    is_plain = _PLAIN.fullmatch(text) and text.lower() not in _NO_TEXTS
    style = '|' if '\n' in text else None if is_plain else '"'
    return dumper.represent_scalar('tag:yaml.org,2002:str', text, style=style)


_Dumper.add_representer(str, _represent_text)


def _load_template(name: str) -> list[dict]:
    return list(yaml.safe_load_all((TEMPLATES / f'{name}.yaml').read_text()))


def _escaped(words: Sequence[str]) -> list[str]:
    """Words that a pod's command gets as they were: Kubernetes makes $ of $$, and puts values for $(...)."""
    return [word.replace('$', '$$') for word in words]


def _labels(training: Training) -> dict[str, str]:
    return {'app.kubernetes.io/name': 'mlperf-rn50', 'app.kubernetes.io/instance': training.name}


def _named(manifests: list[dict], training: Training) -> list[dict]:
    """The same manifests with their names, namespace and labels."""
    where = {'namespace': training.namespace} if training.namespace else {}
    for manifest in manifests:
        manifest['metadata'] = {'name': training.name, **where, 'labels': _labels(training)}
    return manifests


def _config_maps(training: Training) -> list[dict]:
    if training.config_text is None:
        return []
    [config_map] = _load_template('config_map')
    config_map['data']['config.yaml'] = training.config_text
    return [config_map]


def _fill_pod(template: dict, training: Training) -> None:
    """Sets what every pod of a training has: image, user, volumes."""
    template['metadata'] = {'labels': _labels(training)}
    pod = template['spec']
    [container] = pod['containers']
    [shared], [of_container] = _load_template('pod'), _load_template('container')
    pod.update(shared, terminationGracePeriodSeconds=training.grace_s)
    container.update(of_container, image=training.image, workingDir=training.volumes[0].path)
    if training.user:
        pod['securityContext'].update(runAsUser=training.user.uid, runAsGroup=0)  # the group that the image is made for
        if training.user.volume_group is not None:
            pod['securityContext']['fsGroup'] = training.user.volume_group
    sources: dict[str, dict] = {f'volume-{i}': {'persistentVolumeClaim': {'claimName': v.claim}}
                                for i, v in enumerate(training.volumes)}
    paths = {f'volume-{i}': v.path for i, v in enumerate(training.volumes)}
    if training.config_text is not None:
        sources['config'] = {'configMap': {'name': training.name}}
        paths['config'] = CONFIG_FOLDER
    pod['volumes'] = [{'name': name, **source} for name, source in sources.items()]
    container['volumeMounts'] = [{'name': name, 'mountPath': path} for name, path in paths.items()]


def _fill_trainer(template: dict, training: Training) -> None:
    """Sets what pods have that train: GPUs, shared memory, a node each where there are enough."""
    pod = template['spec']
    [container] = pod['containers']
    gpus = str(training.gpus_per_node) if training.gpus_per_node else None
    limits = {'nvidia.com/gpu': gpus, 'cpu': training.cpus, 'memory': training.memory}
    if any(limits.values()):
        container['resources'] = {'limits': {name: limit for name, limit in limits.items() if limit}}
    pod['volumes'].append({'name': 'shm', 'emptyDir': {'medium': 'Memory', 'sizeLimit': training.shm_size}})
    container['volumeMounts'].append({'name': 'shm', 'mountPath': '/dev/shm'})
    # Workers alone: a launcher may share its node.
    template['metadata']['labels']['app.kubernetes.io/component'] = 'trainer'
    pod['topologySpreadConstraints'] = [
        {'maxSkew': 1, 'topologyKey': 'kubernetes.io/hostname', 'whenUnsatisfiable': 'ScheduleAnyway',
         'labelSelector': {'matchLabels': template['metadata']['labels']}}]
