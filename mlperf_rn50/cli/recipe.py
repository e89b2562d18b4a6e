"""Show the hyper-parameters of published runs that converged at a batch, write them, compare a configuration.

At a batch that no published set has, but sets below and above it do, the recipe lies between those and says so;
outside of them there is none.
"""
import json
import os
import shlex
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlperf_rn50
from mlperf_rn50.cli._parsers import Parser, count, fraction
from mlperf_rn50.errors import EXIT_OK, ConfigError

if TYPE_CHECKING:
    from mlperf_rn50.config import Config
    from mlperf_rn50.study.known import KnownSet
    from mlperf_rn50.study.recipe_differences import Row
    from mlperf_rn50.study.recipes import Choice, Published

EPILOG = """examples:
  mlperf-rn50 recipe --global-batch-size 1664
  mlperf-rn50 recipe --global-batch-size 1664 --nodes 2 --ranks-per-node 4 --out recipe.yaml
  mlperf-rn50 recipe --global-batch-size 2500 --optimizer sgd --target 0.749 --format json
  mlperf-rn50 recipe --compare launch/configs/c4140_v100_2node.yaml

The recipes are those of MLPerf Training v0.5 to v1.0 that trained ResNet-50 with MXNet on ImageNet.

exit codes: 0 shown or written, 2 a mistake in what was asked for, or no recipe is known at the batch"""
FORMAT = 'mlperf-rn50 recipe 1'
_MAX_BATCH = 1_281_167


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser('recipe', __doc__, EPILOG)
    parser.add_argument('--global-batch-size', type=count(_MAX_BATCH), metavar='N',
                        help='images per optimizer step over all ranks (default: of the --compare configuration)')
    parser.add_argument('--optimizer', choices=['sgd', 'lars'], help='only recipes of this optimizer (default: both)')
    parser.add_argument('--target', type=fraction, metavar='TOP1',
                        help='only recipes made for this Top-1 or a higher one, as a fraction; published are 0.749 and '
                             '0.759 (default: all, each with its own)')
    parser.add_argument('--nodes', type=count(_MAX_BATCH), metavar='N', help='nodes of the layout to write for')
    parser.add_argument('--ranks-per-node', type=count(_MAX_BATCH), metavar='N', help='ranks (GPUs) of each node')
    parser.add_argument('--out', metavar='FILE', help='write a configuration for train there; it must not exist')
    parser.add_argument('--compare', metavar='CONFIG',
                        help='show every value of this configuration beside those of the recipes')
    parser.add_argument('--format', choices=['table', 'json'], default='table',
                        help='what goes to the standard output (default: table)')
    return parser


@dataclass(frozen=True)
class _Answer:
    """What was found: published recipes, whether they are of the very batch, the choice, and rows of values."""

    batch: int
    target: float | None
    recipes: Sequence['Published']
    is_at_batch: bool
    choice: 'Choice | None'
    config: 'Config | None'
    rows: Sequence['Row']
    deviations: Sequence[str]


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    options = make_parser().parse_args(argv)
    if (options.nodes is None) != (options.ranks_per_node is None):
        raise ConfigError('--nodes, --ranks-per-node: got one of them, expected both or neither')
    if options.compare and options.out:
        raise ConfigError('--compare, --out: got both, expected one: to compare, or to write')
    for name in ('out', 'compare'):
        if getattr(options, name) == '':
            raise ConfigError(f'--{name}: got an empty text, expected a file')
    if options.out and os.path.lexists(options.out):
        raise ConfigError(f'--out: {options.out} is there already, expected a new file; move it or name another')
    answer = _compare(options) if options.compare else _find(options)
    if options.out and answer.choice:
        _write(answer.choice, options, argv)
    print(json.dumps(_to_json(answer), indent=2) if options.format == 'json' else _render(answer))
    return EXIT_OK


def _find(options: Namespace) -> _Answer:
    """The recipes of a batch, and the one to train with."""
    from mlperf_rn50.study.known import load_published
    from mlperf_rn50.study.recipe_differences import rows_of
    from mlperf_rn50.study.recipes import around, at_batch, check_shares, choose_recipe, fold
    batch = options.global_batch_size
    if batch is None:
        raise ConfigError('--global-batch-size N: missing; see mlperf-rn50 recipe --help')
    check_shares(batch, (options.nodes or 1) * (options.ranks_per_node or 1))
    choice = choose_recipe(batch, options.optimizer, options.target)
    known = fold(load_published(), options.optimizer, options.target)
    recipes = _ordered(around(known, batch))
    return _Answer(batch, options.target, recipes, bool(at_batch(known, batch)), choice, None, rows_of(recipes), [])


def _compare(options: Namespace) -> _Answer:
    """The recipes of the batch of a configuration, beside it."""
    from mlperf_rn50.study.known import load_published
    from mlperf_rn50.study.recipe_differences import find_deviations, global_batch_size, rows_of
    from mlperf_rn50.study.recipes import around, at_batch, fold
    from mlperf_rn50.train.plan import config_world_size
    config = _load(Path(options.compare))
    num_ranks = options.nodes * options.ranks_per_node if options.nodes else config_world_size(config)
    own = global_batch_size(config, num_ranks)
    batch = options.global_batch_size or own
    if batch is None:
        raise ConfigError(f'{options.compare}: train.local_batch_size is {config.train.local_batch_size} for each of '
                          'an unknown number of ranks; give --nodes and --ranks-per-node, or --global-batch-size')
    if own not in (None, batch):
        raise ConfigError(f'--global-batch-size: got {batch}, {options.compare} has {own}; leave it out')
    target = config.train.target_accuracy if options.target is None else options.target
    known = fold(load_published(), options.optimizer, target)
    recipes = _ordered(around(known, batch), config.optimizer.name)
    if not recipes:
        raise ConfigError(f'{options.compare}: nothing to compare with: no published set reached {100 * target:.4g} %')
    return _Answer(batch, target, recipes, bool(at_batch(known, batch)), None, config, rows_of(recipes, config),
                   find_deviations(config, num_ranks))


def _load(path: Path) -> 'Config':
    from mlperf_rn50.cli._parsers import config_parser
    from mlperf_rn50.options import resolve_config
    return resolve_config(path, [], config_parser('train', None, ''))


def _ordered(recipes: Sequence['Published'], opt_name: str | None = None) -> list['Published']:
    """Recipes of an optimizer first, then the newest rounds."""
    newest_first = sorted(recipes, key=lambda p: p.rounds, reverse=True)
    return sorted(newest_first, key=lambda p: (p.recipe.opt_name != opt_name, p.recipe.opt_name or ''))


def _write(choice: 'Choice', options: Namespace, argv: Sequence[str]) -> None:
    """Writes the configuration.

    Raises:
        ConfigError: it cannot be written.
    """
    from mlperf_rn50.files import write_atomically
    from mlperf_rn50.study.recipes import comments_of, make_config, render_config
    config = make_config(choice, options.nodes, options.ranks_per_node)
    comments = comments_of(choice, shlex.join(['mlperf-rn50', 'recipe', *argv]), options.nodes, options.ranks_per_node)
    try:
        write_atomically(Path(options.out), render_config(config, comments))
    except OSError as e:
        raise ConfigError(f'--out: cannot write {options.out}: {e.strerror}') from e


def _letter(place: int) -> str:
    return chr(ord('A') + place) if place < 26 else f'#{place + 1}'


def _layout(known: 'KnownSet') -> str:
    """Nodes x accelerators of each, as predict names layouts."""
    if not known.num_accelerators:
        return f'{known.num_nodes}, CPUs'
    return f'{known.num_nodes}x{known.num_accelerators // (known.num_nodes or 1)}'


def _systems_table(recipes: Sequence['Published']) -> str:
    from tabulate import tabulate

    from mlperf_rn50.mlperf.events import printable
    from mlperf_rn50.study.recipes import reached_epoch
    rows = []
    for place, published in enumerate(recipes):
        for i, known in enumerate(published.sets):
            epochs = [reached_epoch(r, published.target) for r in known.runs]
            rows.append([_letter(place) if i == 0 else '', f'{published.recipe.global_batch_size:,}', known.round,
                         known.org or '-', known.name, _layout(known), f'{100 * published.target:.4g} %',
                         ' '.join('-' if e is None else str(e) for e in epochs),
                         f'{sum(e is not None for e in epochs)} of {len(epochs)}'])
    head = ['', 'batch', 'round', 'organisation', 'system', 'layout', 'target', 'epochs', 'converged']
    return tabulate([[printable(text) for text in row] for row in rows], head, disable_numparse=True,
                    colalign=['left', 'right', *['left'] * 7])


def _values_tables(answer: _Answer) -> list[str]:
    """The values, beside a configuration in two tables: what the recipes differ in, and what all of them have."""
    from tabulate import tabulate
    letters = [_letter(i) for i in range(len(answer.recipes))]
    if not answer.config:
        return [tabulate([_texts(row) for row in answer.rows], ['', *letters], disable_numparse=True)]
    shared = [row for row in answer.rows if len({c.text for c in row.published}) == 1]
    other = [_texts(row) for row in answer.rows if row not in shared]
    tables = [tabulate(other, ['', 'yours', *letters], disable_numparse=True)] if other else []
    head = ['', 'yours', f'{letters[0]} to {letters[-1]}' if len(letters) > 1 else letters[0]]
    return [*tables, tabulate([_texts(row)[:3] for row in shared], head, disable_numparse=True)]


def _texts(row: 'Row') -> list[str]:
    from mlperf_rn50.mlperf.events import printable
    own = [] if row.own is None else [row.own.text + (' *' if row.is_alone else '')]
    return [row.key, *own, *(printable(cell.text) for cell in row.published)]


def _render(answer: _Answer) -> str:
    """Which systems, their values, and what is worth knowing of both."""
    from mlperf_rn50.mlperf.events import printable
    where = (f'Published at batch {answer.batch:,}' if answer.is_at_batch else
             f'Nothing is published at batch {answer.batch:,}; next to it')
    goal = '' if answer.target is None else f', for {100 * answer.target:.4g} % or more'
    notes = ['† not logged: as submitted with the logs  ? not known  - has no meaning there']
    if answer.config:
        notes += _compared_notes(answer, answer.config)
    if answer.choice:
        notes += ['', *map(printable, _choice_lines(answer.choice))]
    tables = [_systems_table(answer.recipes), *_values_tables(answer)]
    return '\n\n'.join([f'{where}{goal}:', *tables, '\n'.join(notes)])


def _compared_notes(answer: _Answer, config: 'Config') -> list[str]:
    """What the marks mean, what no key says, and what train would say."""
    from mlperf_rn50.study.recipe_differences import is_imagenet
    whose = 'with your optimizer' if any(p.recipe.opt_name == config.optimizer.name for p in answer.recipes) else \
        'here, and none has your optimizer'
    notes = [f'* no recipe {whose} has this value (end and length of a schedule: with the same kind of schedule)',
             'Colours: the submissions changed none of a training image, but for mean and std; nor does train.',
             f'Files: no log says how the images were stored. Yours: {_images_of(config)}.']
    if not is_imagenet(config):
        return [*notes, '', f'The recipes are of ResNet-50 on ImageNet; yours trains {_trained(config)}: what holds '
                            'there need not hold here, and train compares nothing.']
    said = [f'- {d}' for d in answer.deviations] or ['- nothing: train would not warn']
    return [*notes, '', 'What no published set of like batch had that converged:', *said]


def _trained(config: 'Config') -> str:
    """The network and the data of a configuration that is not one for ImageNet."""
    data = 'synthetic images' if config.data.synthetic else config.data.dataset
    return f'{config.model.name} on {config.data.num_train:,} images of {data}'


def _images_of(config: 'Config') -> str:
    """How the images of a configuration are stored, as the manifest of its data says."""
    from mlperf_rn50.files import parse_json, read_text
    from mlperf_rn50.mlperf.events import printable
    path = Path(config.data.dir) / 'manifest.json'
    try:
        manifest = parse_json(read_text(path, 1 << 22)) if path.is_file() else {}  # a pipe would be waited for
        size = manifest['resize_shorter']
    except (OSError, ValueError, TypeError, KeyError):
        return f'not known, as {path} is no manifest of prepare'
    if size is None:
        return 'as they were, byte for byte'
    return f'made smaller by prepare, to {printable(str(size))[:10]} pixels of the shorter side, as JPEG of quality 95'


def _choice_lines(choice: 'Choice') -> list[str]:
    from mlperf_rn50.study.recipes import range_text
    r = choice.recipe
    length = (f'step at {" ".join(f"{e:g}" for e in r.step_epochs)} epochs' if r.step_epochs else
              f'{r.decay} over {r.decay_epochs:g} epochs')
    lines = [f'To train with ({choice.kind}): {r.opt_name}, learning rate {r.base_lr:g}, warm-up {r.warmup_epochs:g} '
             f'epochs, {length}, weight decay {r.weight_decay:g}.',
             f'Expected: {choice.epochs:.3g} epochs to {100 * choice.target:.4g} % (theirs '
             f'{range_text(choice.epochs_range)}); {choice.num_converged} of their {choice.num_runs} runs reached it.',
             f'Source: {choice.said_by}.']
    if choice.kind == 'between':
        lines.append('No set is known that was trained at this batch: learning rate, warm-up and schedule lie between.')
    return lines


def _published_json(published: 'Published') -> dict[str, Any]:
    from mlperf_rn50.study.recipes import reached_epoch
    systems = [{'round': s.round, 'org': s.org, 'name': s.name, 'num_nodes': s.num_nodes,
                'num_accelerators': s.num_accelerators, 'accelerator': s.accelerator,
                'epochs': [reached_epoch(r, published.target) for r in s.runs]} for s in published.sets]
    return {'recipe': asdict(published.recipe), 'unlogged': sorted(published.unlogged),
            'target_accuracy': published.target, 'num_converged': len(published.epochs),
            'num_runs': len(published.runs), 'systems': systems}


def _choice_json(choice: 'Choice | None') -> dict[str, Any] | None:
    if choice is None:
        return None
    return {'kind': choice.kind, 'recipe': asdict(choice.recipe), 'epochs': choice.epochs,
            'epochs_range': choice.epochs_range, 'num_converged': choice.num_converged, 'num_runs': choice.num_runs,
            'sources': [_published_json(p) for p in choice.sources]}


def _to_json(answer: _Answer) -> dict[str, Any]:
    rows = [{'key': row.key, 'own': row.own and row.own.value, 'is_alone': row.is_alone,
             'published': [{'value': c.value, 'is_logged': c.is_logged} for c in row.published]} for row in answer.rows]
    return {'format': FORMAT, 'version': mlperf_rn50.__version__,
            'global_batch_size': answer.batch, 'target_accuracy': answer.target, 'is_at_batch': answer.is_at_batch,
            'published': [_published_json(p) for p in answer.recipes], 'choice': _choice_json(answer.choice),
            'comparison': rows if answer.config else None, 'deviations': list(answer.deviations)}
