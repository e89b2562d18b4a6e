"""Kubernetes manifests of a training: an MPIJob of Kubeflow's operator, from the template in
launch/kubernetes.

The operator creates the pods and the host file of the launcher's mpirun, and sshd runs in the pods
of the workers.
"""

import jinja2
import yaml

from mlperf_rn50.launch.arguments import announce
from mlperf_rn50.launch.engines import CHECKOUT
from mlperf_rn50.launch.kubernetes.options import CONFIG_FOLDER, Training


def render_mpi_job(training: Training) -> str:
    """Render an MPIJob as YAML for kubectl, preceded by a ConfigMap if the configuration is not in
    the image."""
    loader = jinja2.FileSystemLoader(CHECKOUT / 'launch/kubernetes')
    environment = jinja2.Environment(
        loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    # Kubernetes substitutes $(...) in the arguments of a pod, and turns $$ into $.
    environment.filters.update(
        text=_quote, block=_block, escaped=lambda word: word.replace('$', '$$')
    )
    gpus = str(training.gpus_per_node) if training.gpus_per_node else None
    limits = {'nvidia.com/gpu': gpus, 'cpu': training.cpus, 'memory': training.memory}
    return environment.get_template('mpi_job.yaml.j2').render(
        vars(training),
        config_folder=CONFIG_FOLDER,
        limits={k: v for k, v in limits.items() if v},
        launcher_words=[
            '--hostfile',
            '/etc/mpi/hostfile',
            '--resume',
            '--restarts',
            '3',
            '--nodes',
            str(training.num_nodes),
            '--ranks-per-node',
            str(training.ranks_per_node),
            '--config',
            training.config_path,
            *training.options,
        ],
    )


def _quote(text: str, style: str = '"') -> str:
    """Return a text as a YAML scalar that no parser reads as a number or a boolean."""
    return yaml.dump(text, default_style=style, width=float('inf')).rstrip('\n')


def _block(text: str) -> str:
    """Return lines as a YAML block. Quote a single line, and lines whose empty last line would end
    the document."""
    return _quote(text, '|' if '\n' in text and not f'\n{text}'.endswith('\n\n') else '"')


def print_manifests(training: Training, warning: str) -> None:
    """Print the manifests of a training, after its warning, if any."""
    if warning:
        announce('launch kubernetes', f'warning: {warning}')
    print(render_mpi_job(training), end='')
