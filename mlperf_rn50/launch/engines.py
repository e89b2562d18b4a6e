"""Engines that start the ranks: their scripts, stop requests and environment, and the command line
of every rank."""

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.launch.arguments import Options, launch_parser
from mlperf_rn50.launch.hosts import parse_host
from mlperf_rn50.parser import Parser
from mlperf_rn50.system.gpu_env import DEVICE_VARIABLE
from mlperf_rn50.system.launcher_env import COMMAND

CHECKOUT = Path(__file__).parents[2]
_SCONTROL_S = 60  # time limit for scontrol
_IN_IMAGE = ('/opt/mlperf_rn50/launch/bind.sh', '/opt/mlperf_rn50/.venv/bin/mlperf-rn50')


def _program_here(options: Options, folder: str) -> list[str]:
    return [str(CHECKOUT / 'launch/bind.sh'), str(CHECKOUT / '.venv/bin/mlperf-rn50')]


def _program_in_apptainer(options: Options, folder: str) -> list[str]:
    if not options.image:
        raise ConfigError('--image: got nothing, expected an Apptainer image')
    if not Path(options.image).exists():
        raise ConfigError(
            f'--image: {options.image} does not exist; build it with: apptainer build '
            f'{options.image} '
            'docker-daemon:mlperf_rn50:cpu'
        )
    gpu = ['--nv'] if shutil.which('nvidia-smi') else []
    return [
        'apptainer',
        'exec',
        *gpu,
        '--bind',
        folder,
        '--bind',
        str(CHECKOUT),
        '--pwd',
        folder,
        options.image,
        *_IN_IMAGE,
    ]


def _program_of_slurm(options: Options, folder: str) -> list[str]:
    if not options.image:
        return _program_here(options, folder)
    mounts = [folder, *(_mount(m) for m in options.mounts)]
    return [
        '--container-image',
        options.image,
        '--container-mounts',
        ','.join(f'{m}:{m}' for m in mounts),
        '--container-workdir',
        folder,
        *_IN_IMAGE,
    ]


@dataclass(frozen=True)
class Engine:
    """Script in launch/engines that starts the ranks of a launcher, and the properties of both."""

    script: str
    description: str
    has_hosts: bool = False
    # whether it forwards SIGUSR1, the stop request; if not, the guards do
    forwards_stop: bool = True
    image_option: str | None = None  # None if ranks do not run in a container
    image_script: str | None = None  # script for ranks in an image, if it is a different one
    in_slurm: bool = False
    get_program: Callable[[Options, str], list[str]] = _program_here

    def make_parser(self, name: str) -> Parser:
        """Return the parser of the launcher with this name."""
        return launch_parser(name, self.description, self.has_hosts, self.image_option)

    def script_for(self, image: str | None) -> str:
        """Return the script that starts the ranks in an image, or without a container if image is
        None."""
        return image and self.image_script or self.script

    def program(self, options: Options) -> list[str]:
        """Return the first words of a rank's command line; raise ConfigError for a missing image,
        mount or folder."""
        try:
            return self.get_program(options, os.getcwd())
        except FileNotFoundError as e:
            raise ConfigError('the current folder has been deleted; change to another one') from e

    def check_horovod(self, image: str | None, num_ranks: int) -> None:
        """Raise ConfigError if Horovod is missing but several ranks or horovodrun need it; an image
        has its own."""
        is_needed = num_ranks > 1 or self.script == 'horovodrun.sh'
        if is_needed and not image and find_spec('horovod') is None:
            user = f'{num_ranks} ranks need' if num_ranks > 1 else 'horovodrun needs'
            raise ConfigError(
                f'Horovod is not installed, but {user} it; start one rank with launch/local.sh, '
                'or run '
                'launch/setup.sh (for GPUs with nvcc in PATH)'
            )


# mpirun and srun forward SIGUSR1 to their ranks and wait until the ranks end. mpirun kills its
# ranks 1 s after SIGTERM. horovodrun forwards only SIGTERM, and kills the ranks 5 s later.
ENGINES: Mapping[str, Engine] = {
    'local': Engine('openmpi.sh', 'Train on this machine with one or more ranks'),
    'mpirun': Engine(
        'openmpi.sh', "Train on hosts over ssh with Open MPI's mpirun", has_hosts=True
    ),
    'horovodrun': Engine(
        'horovodrun.sh',
        'Train on hosts over ssh with horovodrun and Gloo, not MPI',
        has_hosts=True,
        forwards_stop=False,
    ),
    'slurm': Engine(
        'openmpi.sh',
        'Train on the nodes of a Slurm job; launch/slurm.sbatch runs this',
        image_option='--container',
        image_script='srun.sh',
        in_slurm=True,
        get_program=_program_of_slurm,
    ),
    'apptainer': Engine(
        'openmpi.sh',
        'Train with every rank in an Apptainer image, here or on hosts over ssh',
        has_hosts=True,
        image_option='--image',
        get_program=_program_in_apptainer,
    ),
}


def _mount(folder: str) -> str:
    path = os.path.realpath(folder)
    if not os.path.isdir(path):
        raise ConfigError(f'--mount: got {folder}, expected a folder')
    if set(path) & {',', ':'}:
        raise ConfigError(
            f'--mount: got {folder}, expected a path without commas and colons; Pyxis splits at '
            'them'
        )
    return path


def nodes_of_slurm_job(env: Mapping[str, str]) -> list[str]:
    """Return the nodes of the surrounding Slurm job; raise ConfigError outside one."""
    nodes = env.get('SLURM_JOB_NODELIST')
    if not nodes:
        raise ConfigError('SLURM_JOB_NODELIST is not set; submit this file with sbatch')
    is_done, text = run_scontrol('show', 'hostnames', nodes)
    if not is_done:
        raise ConfigError(f'scontrol: {text}')
    return [parse_host(name) for name in text.split()]


def run_scontrol(*words: str) -> tuple[bool, str]:
    """Run scontrol of Slurm; return whether it succeeded, and its output or the reason of the
    failure."""
    try:
        done = subprocess.run(
            ['scontrol', *words], capture_output=True, text=True, timeout=_SCONTROL_S
        )
    except subprocess.TimeoutExpired:
        return False, f'no answer within {_SCONTROL_S} s; see whether slurmctld runs'
    except OSError as e:
        return False, f'{e.strerror}'
    return not done.returncode, ' '.join((done.stderr if done.returncode else done.stdout).split())


def environment(options: Options, env: Mapping[str, str], job: str, device: str) -> dict[str, str]:
    """Return the environment of the engine, which forwards the variables listed by
    launch/engines/variables.sh."""
    # fewer page faults on batches and gradients
    result = {
        'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1',
        **env,
        'MLPERF_RN50_RANKS_PER_DEVICE': str(options.ranks_per_device),
        'MLPERF_RN50_JOB': job,
        DEVICE_VARIABLE: device,
        COMMAND: options.command,
    }
    if options.ranks_per_device > 1:
        # Twice an even share, so that other ranks can use what a waiting rank leaves idle. Source:
        # NVIDIA's guide to the Multi-Process Service, execution resource provisioning (100 % / 0.5
        # n).
        result.setdefault(
            'CUDA_MPS_ACTIVE_THREAD_PERCENTAGE', str(min(100, 200 // options.ranks_per_device))
        )
    return result


def plain_output(stream: TextIO, env: Mapping[str, str]) -> dict[str, str]:
    """Return NO_COLOR for ranks unless stream is a terminal or FORCE_COLOR is set; mpirun gives
    them a terminal."""
    return {} if stream.isatty() or env.get('FORCE_COLOR') else {'NO_COLOR': '1'}
