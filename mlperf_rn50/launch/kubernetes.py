"""Kubernetes manifests of a training: an MPIJob of Kubeflow's operator, from the template in
launch/kubernetes, with the options of mlperf-rn50 launch kubernetes.

The operator creates the pods and the host file of the launcher's mpirun, and sshd runs in the pods
of the workers.
"""

from __future__ import annotations

import argparse
import posixpath
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import ceil
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.launch.engines import CHECKOUT, COUNT, announce
from mlperf_rn50.parser import Parser, filled, option_adder, whole_number

if TYPE_CHECKING:
    from mlperf_rn50.config import Config

CONFIG_FOLDER = '/etc/mlperf_rn50/config'  # where the ConfigMap is mounted
IMAGE_CONFIGS = '/opt/mlperf_rn50/launch/configs/'
# The pods need these paths. A volume that is mounted on or above one of them would hide it.
NEEDED_PATHS = (
    '/opt/mlperf_rn50',
    '/etc/mlperf_rn50',
    '/etc/mpi',
    '/dev/shm',
    '/home/rn50',
    '/usr',
    '/bin',
    '/lib',
    '/tmp',
    '/proc',
    '/sys',
    '/var/lib/extrausers',
)
LABEL_LENGTH = 63  # characters that Kubernetes allows in a label
_LEAST_UID = 500  # that libnss-extrausers looks up
_LARGEST_ID = 2**31 - 1  # in Kubernetes

EPILOG = """examples:
  launch/kubernetes.sh --image registry.example/mlperf_rn50:cu117 --nodes 4 --ranks-per-node 4 \\
      --config launch/configs/c4140_v100_4node.yaml \\
      --volume imagenet:/data --volume results:/results --run-dir /results/c4140 \\
      --data.dir /data/imagenet --namespace training | kubectl apply -f -
  kubectl delete mpijob,configmap -l app.kubernetes.io/instance=mlperf-rn50

Options of configuration keys are passed to: mlperf-rn50 train; --dry-run prints the plan instead.
This command checks --config and the options. Relative paths of the run folder and the data start at
the first volume."""


@dataclass(frozen=True)
class Volume:
    """A PersistentVolumeClaim and its mount point in the pods."""

    claim: str
    path: str


@dataclass(frozen=True)
class User:
    """The user of the pods, and the group of their volumes, if any."""

    uid: int
    volume_group: int | None = None


@dataclass(frozen=True)
class Training:
    """Values of the manifests; None leaves a value to kubectl, the image or the cluster."""

    name: str
    image: str
    num_nodes: int
    ranks_per_node: int
    gpus_per_node: int
    volumes: Sequence[Volume]
    config_path: str
    config_text: str | None = None  # None if the configuration is in the image
    options: tuple[str, ...] = ()
    namespace: str | None = None
    user: User | None = None
    memory: str | None = None  # per worker, including shared memory
    cpus: str | None = None
    shm_size: str = '8Gi'
    grace_s: int = 120  # from SIGTERM to SIGKILL


def _matching(pattern: str, expected: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f'got {text!r}, expected {expected}')
        return text

    return check


def _volume(text: str) -> Volume:
    claim, _, path = text.partition(':')
    _matching(
        r'[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?',
        'CLAIM:/PATH, with the name of a PersistentVolumeClaim',
    )(claim)
    if (
        not path.startswith('/')
        or ':' in path
        or not path.isprintable()
        or posixpath.normpath(path) != path
    ):
        raise argparse.ArgumentTypeError(
            f'got {text!r}, expected CLAIM:/PATH: an absolute path without . .. // and :'
        )
    for needed in NEEDED_PATHS:
        if _is_within(needed, path):
            raise argparse.ArgumentTypeError(
                f'got {text!r}, which would hide {needed} of the image; use another path'
            )
    return Volume(claim, path)


def _is_within(path: str, folder: str) -> bool:
    target = PurePosixPath(posixpath.normpath(path))
    return PurePosixPath(folder) in (target, *target.parents)


def _user(text: str) -> User:
    _matching(r'[1-9][0-9]{0,9}(:[0-9]{1,10})?', 'UID or UID:GID, not root')(text)
    uid, _, gid = text.partition(':')
    if not _LEAST_UID <= int(uid) <= _LARGEST_ID or int(gid or 0) > _LARGEST_ID:
        raise argparse.ArgumentTypeError(
            f'got {text!r}, expected a UID from {_LEAST_UID} and ids up to {_LARGEST_ID}'
        )
    return User(int(uid), int(gid) if gid else None)


def make_parser() -> Parser:
    parser = Parser(
        'mlperf-rn50 launch kubernetes', 'Print the manifests for training on Kubernetes.', EPILOG
    )
    add = option_adder(parser)
    size = _matching(r'(?=.*[1-9])[0-9]{1,9}(\.[0-9]{1,3})?[KMGT]i', 'a size such as 64Gi')
    add(
        '--image IMAGE',
        'image built from the Dockerfile',
        required=True,
        type=_matching(r'[A-Za-z0-9][A-Za-z0-9._/:@-]*', 'the name of an image'),
    )
    add(
        '--config FILE',
        f'configuration: a local file or one in the image ({IMAGE_CONFIGS}...)',
        required=True,
    )
    add(
        '--volume CLAIM:PATH',
        'PersistentVolumeClaim and its mount point in all pods (ReadWriteMany for the run folder); '
        'repeatable',
        dest='volumes',
        required=True,
        action='append',
        type=_volume,
    )
    add('--run-dir DIR', 'run folder, in a volume (default: run.dir)', type=filled)
    add('--elastic', 'allow a number of ranks that differs from that of the run to resume')
    add('--allow-changed KEYS', 'keys that may differ in a resumed run, such as schedule.base_lr')
    add(
        '--nodes N',
        'number of pods (default: run.num_nodes of the configuration, or 1)',
        type=COUNT,
    )
    add(
        '--ranks-per-node R',
        'ranks in each pod (default: run.ranks_per_node of the configuration, or 1)',
        type=COUNT,
    )
    add(
        '--gpus-per-node N',
        'GPUs of each pod (default: as many as its ranks use; 0 with train.device=cpu)',
        type=whole_number(0),
    )
    add(
        '--name NAME',
        'name of the job and its pods (default %(default)s)',
        default='mlperf-rn50',
        type=_matching(
            '[a-z]([a-z0-9-]*[a-z0-9])?',
            'lower-case letters, digits and -, a letter first, no - last',
        ),
    )
    add(
        '--namespace NAME',
        "namespace of the job (default: kubectl's)",
        type=_matching(
            '[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?', 'at most 63 lower-case letters, digits and -'
        ),
    )
    add(
        '--memory SIZE',
        'memory limit of a worker pod, such as 64Gi, with shared memory',
        type=size,
    )
    add(
        '--cpus N',
        'CPU limit of a worker pod, in cores',
        type=_matching(r'(?=.*[1-9])[0-9]{1,6}(\.[0-9]{1,3}|m)?', 'a number of cores such as 16'),
    )
    add(
        '--shm-size SIZE',
        'size limit of /dev/shm (default %(default)s)',
        type=size,
        default='8Gi',
    )
    add(
        '--grace-seconds S',
        'time for a checkpoint when a pod is terminated (default %(default)s)',
        dest='grace_s',
        type=COUNT,
        default=120,
    )
    add(
        '--user UID[:GID]',
        'user of the pods (default: 1000 from the image, or the choice of the cluster) and group '
        'of the volumes',
        type=_user,
    )
    return parser


def _find_config(file: str) -> Path:
    """Return the local path of a configuration; raise ConfigError if the image lacks it."""
    if not file.startswith(IMAGE_CONFIGS):
        return Path(file)
    path = CHECKOUT / 'launch/configs' / posixpath.normpath(file.removeprefix(IMAGE_CONFIGS))
    if path.parent != CHECKOUT / 'launch/configs' or not path.is_file():
        raise ConfigError(
            f'--config: got {file}, expected a file in launch/configs of this version'
        )
    return path


def _check_paths(config: Config, volumes: Sequence[Volume]) -> str:
    """Return a warning about the data, or ''; raise ConfigError for duplicate paths or a run folder
    in no volume."""
    paths = [v.path for v in volumes]
    if duplicates := {p for p in paths if paths.count(p) > 1}:
        raise ConfigError(
            f'--volume: got two at {min(duplicates)}, expected a different path for each'
        )

    def is_lost(folder: str) -> bool:
        return not any(_is_within(posixpath.join(paths[0], folder), path) for path in paths)

    if is_lost(config.run.dir):
        raise ConfigError(
            f'--run-dir: got {config.run.dir}, expected a folder in a volume: {", ".join(paths)}; '
            'elsewhere it would be lost with its pod'
        )
    if config.data.synthetic or not is_lost(config.data.dir):
        return ''
    return (
        f'data.dir is {config.data.dir}, which is in none of the volumes; the image must contain it'
    )


def _num_gpus(config: Config, requested: int | None, ranks_per_node: int) -> int:
    """Return the GPUs of each pod; raise ConfigError for too few, or for any without need."""
    is_gpu = config.train.device == 'gpu'
    needed = ceil(ranks_per_node / config.run.ranks_per_device) if is_gpu else 0
    if requested is None:
        return needed
    if requested < needed or requested and not needed:
        raise ConfigError(
            f'--gpus-per-node: got {requested} with train.device={config.train.device} and '
            f'--ranks-per-node {ranks_per_node}, expected {needed}'
        )
    return requested


def parse_words(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options and the other words; ~ is not expanded, because paths are in the pods."""
    return argparse.ArgumentParser.parse_known_args(make_parser(), argv)


def _given(o: argparse.Namespace) -> list[str]:
    """Return the options of the launcher that override the configuration, as options of train."""
    values = {
        '--run.dir': o.run_dir,
        '--run.num_nodes': o.nodes,
        '--run.ranks_per_node': o.ranks_per_node,
    }
    given = {option: str(value) for option, value in values.items() if value is not None}
    return [word for pair in given.items() for word in pair]


def _passed(o: argparse.Namespace) -> list[str]:
    """Return the options of the launcher that are no keys, as options of train."""
    words = ['--elastic'] if o.elastic else []
    return [*words, '--allow-changed', o.allow_changed] if o.allow_changed else words


def train_words(argv: Sequence[str]) -> list[str]:
    """Return the command line of train for the plan of a training."""
    o, options = parse_words(argv)
    return ['--config', str(_find_config(o.config)), *_given(o), *_passed(o), *options]


def plan_training(argv: Sequence[str]) -> tuple[Training, str]:
    """Return the run that a command line requests and a warning or ''; raise ConfigError for an
    invalid one."""
    o, options = parse_words(argv)
    for text in (*options, o.config, o.run_dir or '', *(v.path for v in o.volumes)):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f'{text!r}: got invalid UTF-8, expected UTF-8 for the manifest'
            ) from None
    path = _find_config(o.config)
    import jsonargparse  # imported late, because --help needs no packages

    from mlperf_rn50.config_file import add_config_options, resolve_config

    checker = jsonargparse.ArgumentParser(
        'mlperf-rn50 train', allow_abbrev=False, exit_on_error=False
    )
    add_config_options(checker)
    # the pods parse the options in the same order
    config = resolve_config(path, [*_given(o), *options], checker)

    num_nodes = config.run.num_nodes or 1
    ranks_per_node = config.run.ranks_per_node or 1
    longest = f'-worker-{num_nodes - 1}'  # '-launcher' is never longer
    if len(o.name + longest) > LABEL_LENGTH:
        raise ConfigError(
            f'--name: got {len(o.name)} characters, expected at most '
            f'{LABEL_LENGTH - len(longest)}; pods are called NAME{longest}'
        )
    warning = _check_paths(config, o.volumes)
    is_in_image = o.config.startswith(IMAGE_CONFIGS)
    run_dir = ['--run-dir', o.run_dir] if o.run_dir is not None else []
    values = {
        **vars(o),
        'num_nodes': num_nodes,
        'ranks_per_node': ranks_per_node,
        'gpus_per_node': _num_gpus(config, o.gpus_per_node, ranks_per_node),
        'config_path': o.config if is_in_image else f'{CONFIG_FOLDER}/config.yaml',
        'config_text': None if is_in_image else path.read_text(),
        'options': (*run_dir, *_passed(o), *options),
    }
    return Training(**{field.name: values[field.name] for field in fields(Training)}), warning


def render_mpi_job(training: Training) -> str:
    """Render an MPIJob as YAML for kubectl, preceded by a ConfigMap if the configuration is not in
    the image."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(CHECKOUT / 'launch/kubernetes'),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    # Kubernetes substitutes $(...) in the arguments of a pod, and turns $$ into $.
    environment.filters.update(
        text=_quote, block=_block, escaped=lambda word: word.replace('$', '$$')
    )
    limits = {
        'nvidia.com/gpu': training.gpus_per_node and str(training.gpus_per_node),
        'cpu': training.cpus,
        'memory': training.memory,
    }
    words = '--hostfile /etc/mpi/hostfile --resume --restarts 3'.split()
    words += ['--nodes', str(training.num_nodes)]
    words += ['--ranks-per-node', str(training.ranks_per_node)]
    words += ['--config', training.config_path, *training.options]
    return environment.get_template('mpi_job.yaml.j2').render(
        vars(training),
        config_folder=CONFIG_FOLDER,
        limits={k: v for k, v in limits.items() if v},
        launcher_words=words,
    )


def _quote(text: str, style: str = '"') -> str:
    """Return a text as a YAML scalar that no parser reads as a number or a boolean."""
    import yaml

    return yaml.dump(text, default_style=style, width=float('inf')).rstrip('\n')


def _block(text: str) -> str:
    """Return lines as a YAML block. Quote a single line, and lines whose empty last line would end
    the document."""
    is_block = '\n' in text and not f'\n{text}'.endswith('\n\n')
    return _quote(text, '|' if is_block else '"')


def print_manifests(training: Training, warning: str) -> None:
    """Print the manifests of a training, after its warning, if any."""
    if warning:
        announce('launch kubernetes', f'warning: {warning}')
    print(render_mpi_job(training), end='')
