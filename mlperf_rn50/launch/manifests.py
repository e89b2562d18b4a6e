"""Manifests of a training on Kubernetes: the template of launch/kubernetes, whose values are all quoted."""
from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import jinja2
import yaml

TEMPLATES = Path(__file__).parents[2] / 'launch/kubernetes'
CONFIG_FOLDER = '/etc/mlperf_rn50/config'  # where the ConfigMap is mounted


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


def render_mpi_job(training: Training) -> str:
    """Render an MPIJob, after the ConfigMap of a configuration that is not in the image, as YAML for kubectl."""
    gpus = str(training.gpus_per_node) if training.gpus_per_node else None
    limits = {'nvidia.com/gpu': gpus, 'cpu': training.cpus, 'memory': training.memory}
    return _template().render(
        vars(training), config_folder=CONFIG_FOLDER, limits={k: v for k, v in limits.items() if v},
        launcher_words=['--hostfile', '/etc/mpi/hostfile', '--resume', '--restarts', '3', '--nodes',
                        str(training.num_nodes), '--ranks-per-node', str(training.ranks_per_node), '--config',
                        training.config_path, *training.options])


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined,
                                     keep_trailing_newline=True)
    environment.filters.update(text=_quote, block=_block, escaped=_escape)
    return environment.get_template('mpi_job.yaml.j2')


def _quote(text: str) -> str:
    """Text in quotes, which no reader of YAML takes for a number or a truth value."""
    return yaml.dump(text, default_style='"', width=float('inf')).rstrip('\n')


def _block(text: str) -> str:
    """Lines as they are, where YAML can hold them so."""
    return yaml.dump(text, default_style='|' if '\n' in text else '"', width=float('inf')).rstrip('\n')


def _escape(word: str) -> str:
    """A word that a pod's command gets as it was: Kubernetes makes $ of $$, and puts values for $(...)."""
    return word.replace('$', '$$')
