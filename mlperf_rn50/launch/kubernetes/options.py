"""Options of mlperf-rn50 launch kubernetes, their checks, and the training that they describe."""

from __future__ import annotations

import argparse
import posixpath
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.launch.arguments import count, whole_number
from mlperf_rn50.launch.engines import CHECKOUT
from mlperf_rn50.parser import Parser

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

EPILOG = """examples:
  launch/kubernetes.sh --image registry.example/mlperf_rn50:cu117 --nodes 4 --ranks-per-node 4 \\
      --config launch/configs/c4140_v100_4node.yaml --volume imagenet:/data --volume results:/results \\
      --run-dir /results/c4140 --data.dir /data/imagenet --namespace training | kubectl apply -f -
  kubectl delete mpijob,configmap -l app.kubernetes.io/instance=mlperf-rn50

All other options are passed to: mlperf-rn50 train; --dry-run prints the plan instead. This command checks --config and
the options. Relative paths of the run folder and the data start at the first volume."""


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
    volumes: tuple[Volume, ...]
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
    place = PurePosixPath(posixpath.normpath(path))
    return PurePosixPath(folder) in (place, *place.parents)


def _user(text: str) -> User:
    _matching(r'[1-9][0-9]{0,9}(:[0-9]{1,10})?', 'UID or UID:GID, not root')(text)
    uid, _, gid = text.partition(':')
    return User(int(uid), int(gid) if gid else None)


def make_parser() -> Parser:
    parser = Parser(
        'mlperf-rn50 launch kubernetes', 'Print the manifests for training on Kubernetes.', EPILOG
    )
    add = parser.add_argument
    size = _matching(r'(?=.*[1-9])[0-9]{1,9}(\.[0-9]{1,3})?[KMGT]i', 'a size such as 64Gi')
    add(
        '--image',
        metavar='IMAGE',
        required=True,
        help='image built from the Dockerfile',
        type=_matching(r'[A-Za-z0-9][A-Za-z0-9._/:@-]*', 'the name of an image'),
    )
    add(
        '--config',
        metavar='FILE',
        required=True,
        help=f'configuration: a local file or one in the image ({IMAGE_CONFIGS}...)',
    )
    add(
        '--volume',
        metavar='CLAIM:PATH',
        required=True,
        action='append',
        type=_volume,
        help='PersistentVolumeClaim and its mount point in all pods (ReadWriteMany for the run '
        'folder); repeatable',
    )
    add('--run-dir', metavar='DIR', help='run folder, in a volume (default: run.dir)')
    add(
        '--nodes',
        metavar='N',
        type=count,
        help='number of pods (default: run.num_nodes of the configuration, or 1)',
    )
    add(
        '--ranks-per-node',
        metavar='R',
        type=count,
        help='ranks in each pod (default: run.ranks_per_node of the configuration, or 1)',
    )
    add(
        '--gpus-per-node',
        metavar='N',
        type=whole_number(0),
        help='GPUs of each pod (default: as many as its ranks use; 0 with train.device=cpu)',
    )
    add(
        '--name',
        metavar='NAME',
        default='mlperf-rn50',
        help='name of the job and its pods (default %(default)s)',
        type=_matching(
            '[a-z]([a-z0-9-]*[a-z0-9])?',
            'lower-case letters, digits and -, a letter first, no - last',
        ),
    )
    add(
        '--namespace',
        metavar='NAME',
        help="namespace of the job (default: kubectl's)",
        type=_matching(
            '[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?', 'at most 63 lower-case letters, digits and -'
        ),
    )
    add(
        '--memory',
        metavar='SIZE',
        type=size,
        help='memory limit of a worker pod, such as 64Gi, with shared memory',
    )
    add(
        '--cpus',
        metavar='N',
        help='CPU limit of a worker pod, in cores',
        type=_matching(r'(?=.*[1-9])[0-9]{1,6}(\.[0-9]{1,3}|m)?', 'a number of cores such as 16'),
    )
    add(
        '--shm-size',
        metavar='SIZE',
        type=size,
        default='8Gi',
        help='size limit of /dev/shm (default %(default)s)',
    )
    add(
        '--grace-seconds',
        metavar='S',
        type=count,
        default=120,
        help='time for a checkpoint when a pod is terminated (default %(default)s)',
    )
    add(
        '--user',
        metavar='UID[:GID]',
        type=_user,
        help='user of the pods (default: 1000 from the image, or the choice of the cluster) and '
        'group of the volumes',
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
    needed = (
        -(-ranks_per_node // config.run.ranks_per_device) if config.train.device == 'gpu' else 0
    )
    if requested is None:
        return needed
    if bool(requested) != bool(needed) or requested < needed:
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
    return [
        word
        for option, value in values.items()
        if value is not None
        for word in (option, str(value))
    ]


def train_words(argv: Sequence[str]) -> list[str]:
    """Return the command line of train for the plan of a training."""
    o, options = parse_words(argv)
    return ['--config', str(_find_config(o.config)), *_given(o), *options]


def plan_training(argv: Sequence[str]) -> tuple[Training, str]:
    """Return the run that a command line requests and a warning or ''; raise ConfigError for an
    invalid one."""
    o, options = parse_words(argv)
    for text in (*options, o.config, o.run_dir or '', *(v.path for v in o.volume)):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f'{text!r}: got invalid UTF-8, expected UTF-8 for the manifest'
            ) from None
    path, given = _find_config(o.config), _given(o)
    import jsonargparse  # imported late, because --help needs no packages

    from mlperf_rn50.config_file import add_config_options, resolve_config

    checker = jsonargparse.ArgumentParser(
        'mlperf-rn50 train', allow_abbrev=False, exit_on_error=False
    )
    add_config_options(checker)
    # the pods parse the options in the same order
    config = resolve_config(path, [*given, *options], checker)
    num_nodes, ranks_per_node = config.run.num_nodes or 1, config.run.ranks_per_node or 1
    longest = f'-worker-{num_nodes - 1}'  # '-launcher' is never longer
    if len(o.name + longest) > LABEL_LENGTH:
        raise ConfigError(
            f'--name: got {len(o.name)} characters, expected at most '
            f'{LABEL_LENGTH - len(longest)}; '
            f'pods are called NAME{longest}'
        )
    warning = _check_paths(config, o.volume)
    is_in_image = o.config.startswith(IMAGE_CONFIGS)
    run_dir = ('--run-dir', o.run_dir) if o.run_dir is not None else ()
    return Training(
        name=o.name,
        namespace=o.namespace,
        image=o.image,
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        gpus_per_node=_num_gpus(config, o.gpus_per_node, ranks_per_node),
        volumes=tuple(o.volume),
        config_path=o.config if is_in_image else f'{CONFIG_FOLDER}/config.yaml',
        config_text=None if is_in_image else path.read_text(),
        options=(*run_dir, *options),
        user=o.user,
        memory=o.memory,
        cpus=o.cpus,
        shm_size=o.shm_size,
        grace_s=o.grace_seconds,
    ), warning
