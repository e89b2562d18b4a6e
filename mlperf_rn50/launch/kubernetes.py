"""Print the manifests of a training on Kubernetes: an MPIJob of Kubeflow's operator.

The options and the configuration are checked, and fill the template in launch/kubernetes; all its values are quoted.
"""
from __future__ import annotations

import argparse
import functools
import posixpath
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import jinja2
import yaml

from mlperf_rn50.config import Config
from mlperf_rn50.errors import EXIT_OK, ConfigError, UserError
from mlperf_rn50.launch.options import count, number, say, script_parser
from mlperf_rn50.options import add_config_options, resolve_config

PROGRAM = 'launch/kubernetes.sh'
CHECKOUT = Path(__file__).parents[2]
CONFIG_FOLDER = '/etc/mlperf_rn50/config'  # where the ConfigMap is mounted
IMAGE_CONFIGS = '/opt/mlperf_rn50/launch/configs/'
# A volume mounted on or above one of these would hide what the pods need.
NEEDED_PATHS = ('/opt/mlperf_rn50', '/etc/mlperf_rn50', '/etc/mpi', '/dev/shm', '/home/rn50', '/usr', '/bin', '/lib',
                '/tmp', '/proc', '/sys', '/var/lib/extrausers')
LABEL_LENGTH = 63

EPILOG = """examples:
  launch/kubernetes.sh --image registry.example/mlperf_rn50:cu117 --nodes 4 --ranks-per-node 4 \\
      --config launch/configs/c4140_v100_4node.yaml --volume imagenet:/data --volume results:/results \\
      --run-dir /results/c4140 --data.dir /data/imagenet --namespace training | kubectl apply -f -
  kubectl delete mpijob,configmap -l app.kubernetes.io/instance=mlperf-rn50

Everything else is an option of: mlperf-rn50 train. --config and the options are checked here. Relative paths, of the
run folder and of the data, are meant in the first volume."""


@dataclass(frozen=True)
class Volume:
    """A PersistentVolumeClaim, and where the pods see it."""

    claim: str
    path: str


@dataclass(frozen=True)
class User:
    """Return the user and group of the pods, and the group that owns their volumes, if any."""

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


def _matching(pattern: str, expected: str) -> Callable[[str], str]:
    """The type of an option whose text has a pattern."""
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f'got {text!r}, expected {expected}')
        return text
    return check


def _volume(text: str) -> Volume:
    claim, _, path = text.partition(':')
    _matching(r'[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?', 'CLAIM:/PATH, with the name of a PersistentVolumeClaim')(claim)
    if not path.startswith('/') or ':' in path or not path.isprintable() or posixpath.normpath(path) != path:
        raise argparse.ArgumentTypeError(f'got {text!r}, expected CLAIM:/PATH, an absolute path without . .. // and :')
    for needed in NEEDED_PATHS:
        if _is_within(needed, path):
            raise argparse.ArgumentTypeError(f'got {text!r}, which would hide {needed} of the image; use another path')
    return Volume(claim, path)


def _is_within(path: str, folder: str) -> bool:
    """Whether an absolute path is a folder or lies in it."""
    place = PurePosixPath(posixpath.normpath(path))
    return PurePosixPath(folder) in (place, *place.parents)


def _user(text: str) -> User:
    _matching(r'[1-9][0-9]{0,9}(:[0-9]{1,10})?', 'UID or UID:GID, and not root')(text)
    uid, _, gid = text.partition(':')
    return User(int(uid), int(gid) if gid else None)


def make_parser() -> argparse.ArgumentParser:
    """The options that are not of the training itself."""
    parser = script_parser(CHECKOUT / PROGRAM)
    parser.epilog = EPILOG
    add = parser.add_argument
    size = _matching(r'(?=.*[1-9])[0-9]{1,9}(\.[0-9]{1,3})?[KMGT]i', 'a size such as 64Gi')
    add('--image', metavar='IMAGE', required=True, help='with the program, built from the Dockerfile',
        type=_matching(r'[A-Za-z0-9][A-Za-z0-9._/:@-]*', 'the name of an image'))
    add('--config', metavar='FILE', required=True,
        help=f'the configuration: a file here, or one of the image ({IMAGE_CONFIGS}...)')
    add('--volume', metavar='CLAIM:PATH', required=True, action='append', type=_volume,
        help='a PersistentVolumeClaim that all pods mount (ReadWriteMany for the run folder), and where; repeatable')
    add('--run-dir', metavar='DIR', help='where the files of the run go, in a volume (default: run.dir)')
    add('--nodes', metavar='N', type=count, help='pods (default: run.num_nodes of the configuration, or 1)')
    add('--ranks-per-node', metavar='R', type=count,
        help='ranks in each pod (default: run.ranks_per_node of the configuration, or 1)')
    add('--gpus-per-node', metavar='N', type=number(0),
        help='GPUs of each pod (default: as many as its ranks use; 0 with train.device=cpu)')
    add('--name', metavar='NAME', default='mlperf-rn50', help='of the job and what belongs to it (default %(default)s)',
        type=_matching('[a-z]([a-z0-9-]*[a-z0-9])?', 'small letters, digits and -, a letter first and no - at the end'))
    add('--namespace', metavar='NAME', help="default: kubectl's own",
        type=_matching('[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?', 'at most 63 small letters, digits and -'))
    add('--memory', metavar='SIZE', type=size, help='limit of each pod, such as 64Gi; shared memory counts')
    add('--cpus', metavar='N', help='limit of each pod, in cores', type=_matching(
        r'(?=.*[1-9])[0-9]{1,6}(\.[0-9]{1,3}|m)?', 'a number of cores such as 16'))
    add('--shm-size', metavar='SIZE', type=size, default='8Gi', help='largest /dev/shm (default %(default)s)')
    add('--grace-seconds', metavar='S', type=count, default=120,
        help='time for a checkpoint when a pod is asked to go (default %(default)s)')
    add('--user', metavar='UID[:GID]', type=_user,
        help="whom the pods run as (default: the image's user 1000, or whom the cluster picks), and volumes' group")
    return parser


def _find_config(file: str) -> Path:
    """Return the path of a configuration on this machine; raise ConfigError where the image lacks it."""
    if not file.startswith(IMAGE_CONFIGS):
        return Path(file)
    path = CHECKOUT / 'launch/configs' / posixpath.normpath(file.removeprefix(IMAGE_CONFIGS))
    if path.parent != CHECKOUT / 'launch/configs' or not path.is_file():
        raise ConfigError(f'--config: got {file}, expected a file of launch/configs, which this version has')
    return path


def _check_text(words: Sequence[str]) -> None:
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ConfigError(f'{word!r}: expected UTF-8, which manifests are written in') from None


def _check_names(own: argparse.Namespace, num_nodes: int) -> None:
    """Raise ConfigError where a host name would be too long for DNS."""
    longest = f'-worker-{num_nodes - 1}'  # '-launcher' is no longer
    if len(own.name + longest) > LABEL_LENGTH:
        raise ConfigError(f'--name: got {len(own.name)} characters, expected at most {LABEL_LENGTH - len(longest)}; '
                          f'pods are called NAME{longest}')


def _check_paths(config: Config, volumes: Sequence[Volume]) -> str:
    """A doubt about the data, '' for none; ConfigError where volumes have one path, or the run folder is in none."""
    paths = [v.path for v in volumes]
    if twice := {p for p in paths if paths.count(p) > 1}:
        raise ConfigError(f'--volume: got two at {min(twice)}, expected another path for each')

    def is_lost(folder: str) -> bool:
        return not any(_is_within(posixpath.join(paths[0], folder), path) for path in paths)
    if is_lost(config.run.dir):
        raise ConfigError(f'--run-dir: got {config.run.dir}, expected a folder in a volume: {", ".join(paths)}; '
                          'anywhere else it would be lost with its pod')
    if config.data.synthetic or not is_lost(config.data.dir):
        return ''
    return f'data.dir is {config.data.dir}, in none of the volumes: is it in the image?'


def _num_gpus(config: Config, asked: int | None, ranks_per_node: int) -> int:
    """GPUs of a pod; ConfigError where their number does not fit the ranks or the device."""
    needed = -(-ranks_per_node // config.run.ranks_per_device) if config.train.device == 'gpu' else 0
    if asked is None:
        return needed
    if bool(asked) != bool(needed) or asked < needed:
        raise ConfigError(f'--gpus-per-node: got {asked} with train.device={config.train.device} and '
                          f'--ranks-per-node {ranks_per_node}, expected {needed}')
    return asked


def plan_training(argv: Sequence[str]) -> tuple[Training, str]:
    """Return what a command line asks for, and a doubt, '' for none; raise ConfigError for a mistake."""
    parser = make_parser()
    own, options = parser.parse_known_args(argv)
    _check_text([*options, own.config, own.run_dir or '', *(v.path for v in own.volume)])
    path = _find_config(own.config)
    import jsonargparse  # takes longer to import than --help
    checker = jsonargparse.ArgumentParser(PROGRAM, allow_abbrev=False, exit_on_error=False)
    add_config_options(checker)
    of_run = {'--run.dir': own.run_dir, '--run.num_nodes': own.nodes, '--run.ranks_per_node': own.ranks_per_node}
    given = [word for option, value in of_run.items() if value is not None for word in (option, str(value))]
    config = resolve_config(path, [*given, *options], checker)  # in the order of the pods
    num_nodes, ranks_per_node = config.run.num_nodes or 1, config.run.ranks_per_node or 1
    _check_names(own, num_nodes)
    doubt = _check_paths(config, own.volume)
    is_in_image = own.config.startswith(IMAGE_CONFIGS)
    run_dir = ('--run-dir', own.run_dir) if own.run_dir is not None else ()
    return Training(
        name=own.name, namespace=own.namespace, image=own.image, num_nodes=num_nodes, ranks_per_node=ranks_per_node,
        gpus_per_node=_num_gpus(config, own.gpus_per_node, ranks_per_node), volumes=tuple(own.volume),
        config_path=own.config if is_in_image else f'{CONFIG_FOLDER}/config.yaml',
        config_text=None if is_in_image else path.read_text(), options=(*run_dir, *options), user=own.user,
        memory=own.memory, cpus=own.cpus, shm_size=own.shm_size, grace_s=own.grace_seconds), doubt


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
    loader = jinja2.FileSystemLoader(CHECKOUT / 'launch/kubernetes')
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    # An argument reaches the pod's command unchanged: Kubernetes makes $ of $$, and puts values for $(...).
    environment.filters.update(text=_quote, block=_block, escaped=lambda word: word.replace('$', '$$'))
    return environment.get_template('mpi_job.yaml.j2')


def _quote(text: str, style: str = '"') -> str:
    """Text in quotes, which no reader of YAML takes for a number or a truth value."""
    return yaml.dump(text, default_style=style, width=float('inf')).rstrip('\n')


def _block(text: str) -> str:
    """Lines as they are, where YAML can hold them so; after an empty last line it would end the document."""
    return _quote(text, '|' if '\n' in text and not f'\n{text}'.endswith('\n\n') else '"')


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    try:
        training, doubt = plan_training(sys.argv[1:] if argv is None else argv)
    except UserError as e:
        say(Path(PROGRAM), str(e))
        return e.exit_code
    if doubt:
        say(Path(PROGRAM), f'warning: {doubt}')
    print(render_mpi_job(training), end='')
    return EXIT_OK


if __name__ == '__main__':
    sys.exit(main())
