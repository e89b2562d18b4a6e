"""Files about a system in a submission tree: README.md with the lines that determine the result,
the scripts that the rules require, and the file that names the program."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlperf_rn50.config_file import load_tree
from mlperf_rn50.files import dump_json
from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.mllog.package.system_desc import data_note
from mlperf_rn50.mllog.package.tree_layouts import TreeLayout
from mlperf_rn50.mllog.read.description import JsonObject, object_at, objects_at, value_at
from mlperf_rn50.runfolder.names import run_of
from mlperf_rn50.text import printable

_PREPARED = ('imagenet', 'digits', 'cifar10')  # data sets of `prepare`; others are folders
_TYPES = {'float32': 'fp32', 'float16': 'fp16', 'bfloat16': 'bf16'}
_TEMPLATES = Path(__file__).parent / 'templates'


def find_line(sources: Mapping[str, str], pattern: str) -> str:
    """Return the first line of a program that contains a pattern, as file:line, or '-'."""
    for path, text in sources.items():
        if found := re.search(pattern, text, re.MULTILINE):
            return f'{path}:{text.count(chr(10), 0, found.start()) + 1}'
    return '-'


def _clean(value: Any) -> Any:
    """Return a value of a log or configuration without characters that end a cell of a table."""
    if isinstance(value, dict):
        return {str(k): _clean(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_clean(v) for v in value]
    return printable(value).replace('|', '/').replace('`', "'") if isinstance(value, str) else value


def _command(runs: Sequence[Run], data_dir: str, has_weights: bool) -> tuple[str, str]:
    """Return the launcher of the runs, and its command line for the shell.

    It contains checked names and numbers, and no text of a log.
    """
    nodes = next((r.num_nodes for r in runs if r.num_nodes), 1)
    ranks = next((r.num_ranks for r in runs if r.num_ranks), nodes)
    launcher = 'mpirun' if nodes > 1 else 'local'
    # the README has their name
    weights = ' --train.init_weights "${WEIGHTS:?set it to the path of the weights}"' * has_weights
    return launcher, (
        f'launch/{launcher}.sh --config "$here/config_0.yaml" --run-dir "$here/runs" '
        f'--data.dir "${{DATA_DIR:-{data_dir}}}" --run.seed null --seeds 5 '
        f'--ranks-per-node {max(ranks // nodes, 1)} --clear-caches{weights}'
    )


def _variant(env: JsonObject, config: JsonObject) -> str:
    """Return the MLPERF_RN50_VARIANT of the runs, never text from their files."""
    packages = object_at(env, 'packages')
    for variant in ('cu112', 'cu117'):
        if f'mxnet-{variant}' in packages:
            return variant
    return 'ngc' if value_at(config, 'train', 'device') == 'gpu' else 'cpu'


def write_system(
    home: Path,
    paths: TreeLayout,
    runs: Sequence[Run],
    description: JsonObject,
    env: JsonObject,
    sources: Mapping[str, str],
) -> None:
    """Write the files about a system, beside the configurations of its runs."""
    import jinja2

    folder = home / paths.folder
    config = _clean(load_tree(folder / 'config_0.yaml'))
    dataset = config.get('data', {}).get('dataset') or 'imagenet'
    kind = dataset if dataset in _PREPARED else 'folder'
    schedule_epochs = value_at(config, 'schedule', 'decay_epochs')
    epochs = value_at(config, 'train', 'max_epochs') or schedule_epochs
    # their path may not be published
    weights = str(value_at(load_tree(run_of(runs[0].path).config), 'train', 'init_weights'))
    launcher, command = _command(runs, f'data/{kind}', has_weights=bool(weights))
    node = next(iter(objects_at(description, 'nodes')), {})  # in v0.5
    facts = {
        **config,
        'paths': asdict(paths),
        'runs': runs,
        'label': printable(data_note(runs)),
        'variant': _variant(env, config),
        'title': _clean(description.get('system_name') or description.get('hardware', '')),
        'accelerator': _clean(
            description.get('accelerator_model_name') or node.get('accelerator', '')
        ),
        'processor': _clean(description.get('host_processor_model_name') or node.get('cpu', '')),
        'env': _clean(env),
        'commit': value_at(env, 'git_commit'),
        'code': os.path.relpath(home / paths.code, folder),
        'kind': kind,
        'weights': _clean(Path(weights).name),
        'num_epochs': f'{epochs // 1:.0f}' if isinstance(epochs, int | float) else 'all',
        'launcher': launcher,
        'command': command,
        'line': lambda pattern: find_line(sources, pattern),
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.ChainableUndefined,  # an older configuration lacks keys
        keep_trailing_newline=True,
    )
    for template, name in (
        ('README.md', paths.readme),
        ('setup.sh', paths.setup),
        ('init_datasets.sh', paths.data),
        ('run_and_time.sh', paths.run),
    ):
        path = folder / name
        path.write_text(environment.get_template(f'{template}.j2').render(facts, name=name))
        path.chmod(0o755 if name.endswith('.sh') else 0o644)

    # the file that names the program: empty, or with the fields of later rounds
    uses = folder / paths.uses
    kind = _TYPES.get(str(config.get('train', {}).get('precision')), 'fp32')
    if uses.suffix == '.json':
        content = {
            'Starting weights filename?': Path(weights).name or 'N/A',
            'Weight transformations?': 'No',
            'Weight data type(s)': kind if kind == 'fp32' else f'{kind}, with a copy in fp32',
            'Input data type(s)': kind,
            'Retraining': 'No',
        }
        dump_json(uses, content)
    elif not uses.is_dir():
        uses.touch()
