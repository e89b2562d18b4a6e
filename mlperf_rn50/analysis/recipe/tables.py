"""Published recipes as tables and as JSON: systems, values beside a configuration, the recipe to train with."""
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import yaml
from tabulate import tabulate

import mlperf_rn50
from mlperf_rn50 import config as cfg
from mlperf_rn50.analysis.recipe.choose import Choice, Published, around, at_batch, choose_recipe, fold, range_text
from mlperf_rn50.analysis.recipe.differences import Row, find_deviations, is_imagenet, rows_of
from mlperf_rn50.analysis.sets.run_set import KnownSet, load_published
from mlperf_rn50.config import Config
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.files import parse_json, read_text
from mlperf_rn50.mllog.events import printable

FORMAT = 'mlperf-rn50 recipe 1'


@dataclass(frozen=True)
class Recipes:
    """The published recipes of a batch, or those next to it, beside a choice or a configuration.

    Args:
        target: None for the own one of each recipe.
    """

    batch: int
    target: float | None
    recipes: Sequence[Published]
    is_at_batch: bool
    choice: Choice | None = None
    config: Config | None = None
    deviations: Sequence[str] = ()

    @property
    def rows(self) -> list[Row]:
        return rows_of(self.recipes, self.config)


def find_recipes(batch: int, opt_name: str | None, target: float | None, config: Config | None = None,
                 num_ranks: int | None = None) -> Recipes:
    """Return the recipes of a batch, and the one to train with or a configuration beside them.

    Raises:
        ConfigError: no recipe is known for it.
    """
    choice = None if config else choose_recipe(batch, opt_name, target)
    known = fold(load_published(), opt_name, target)
    recipes = _ordered(around(known, batch), config.optimizer.name if config else None)
    if not recipes:
        raise ConfigError(f'--compare: no published set reached {100 * (target or 0):.4g} %: nothing to compare with')
    return Recipes(batch, target, recipes, bool(at_batch(known, batch)), choice, config,
                   find_deviations(config, num_ranks) if config else ())


def _ordered(recipes: Sequence[Published], opt_name: str | None) -> list[Published]:
    """Recipes of an optimizer first, then the newest rounds."""
    newest_first = sorted(recipes, key=lambda p: p.rounds, reverse=True)
    return sorted(newest_first, key=lambda p: (p.recipe.opt_name != opt_name, p.recipe.opt_name or ''))


def _layout(known: KnownSet) -> str:
    """Nodes x accelerators of each, as predict names layouts."""
    if not known.num_accelerators:
        return f'{known.num_nodes}, CPUs'
    return f'{known.num_nodes}x{known.num_accelerators // (known.num_nodes or 1)}'


def _systems_table(recipes: Sequence[Published]) -> str:
    rows = []
    for letter, published in zip(ascii_uppercase, recipes):
        for known in published.sets:
            epochs = published.epochs_of(known)
            rows.append([letter if known is published.sets[0] else '', f'{published.recipe.global_batch_size:,}',
                         known.round, known.org or '-', known.name, _layout(known), f'{100 * published.target:.4g} %',
                         ' '.join('-' if e is None else str(e) for e in epochs),
                         f'{sum(e is not None for e in epochs)} of {len(epochs)}'])
    head = ['', 'batch', 'round', 'organisation', 'system', 'layout', 'target', 'epochs', 'converged']
    return tabulate([[printable(text) for text in row] for row in rows], head, disable_numparse=True,
                    colalign=['left', 'right', *['left'] * 7])


def _values_tables(found: Recipes) -> list[str]:
    """The values; beside a configuration in two tables, those that differ between the recipes first."""
    letters = ascii_uppercase[:len(found.recipes)]  # all published recipes are fewer
    if not found.config:
        return [tabulate(map(_texts, found.rows), ['', *letters], disable_numparse=True)]
    differing = [_texts(row) for row in found.rows if len({c.text for c in row.published}) > 1]
    shared = [_texts(row)[:3] for row in found.rows if len({c.text for c in row.published}) == 1]
    span = f'{letters[0]} to {letters[-1]}' if differing else letters[0]
    tables = [(differing, ['', 'yours', *letters]), (shared, ['', 'yours', span])]
    return [tabulate(rows, head, disable_numparse=True) for rows, head in tables if rows]


def _texts(row: Row) -> list[str]:
    own = [] if row.own is None else [row.own.text + (' *' if row.is_alone else '')]
    return [row.key, *own, *(printable(cell.text) for cell in row.published)]


def render_recipes(found: Recipes) -> str:
    """Return the systems, their values, and notes on both."""
    where = (f'Published at batch {found.batch:,}' if found.is_at_batch else
             f'Nothing is published at batch {found.batch:,}; next to it')
    goal = '' if found.target is None else f', for {100 * found.target:.4g} % or more'
    notes = ['† not logged: as submitted with the logs  ? not known  - has no meaning there']
    if found.config:
        notes += _compared_notes(found, found.config)
    if found.choice:
        notes += ['', *map(printable, _choice_lines(found.choice))]
    return '\n\n'.join([f'{where}{goal}:', _systems_table(found.recipes), *_values_tables(found), '\n'.join(notes)])


def _compared_notes(found: Recipes, config: Config) -> list[str]:
    """What the marks mean, what no key has, and the warnings of train."""
    whose = 'with your optimizer' if any(p.recipe.opt_name == config.optimizer.name for p in found.recipes) else \
        'here, and none has your optimizer'
    notes = [f'* no recipe {whose} has this value (end and length of a schedule: with the same kind of schedule)',
             'Colours: the submissions changed none of a training image, but for mean and std; nor does train.',
             f'Files: no log says how the images were stored. Yours: {_images_of(config)}.', '']
    if is_imagenet(config):
        return [*notes, 'What no published set of like batch had that converged:',
                *([f'- {d}' for d in found.deviations] or ['- nothing: train would not warn'])]
    data = 'synthetic images' if config.data.synthetic else config.data.dataset
    return [*notes, f'The recipes are of ResNet-50 on ImageNet; yours trains {config.model.name} on '
                    f'{config.data.num_train:,} images of {data}: what holds there need not hold here, and train '
                    'compares nothing.']


def _images_of(config: Config) -> str:
    """How the images of a configuration are stored, from the manifest of its data."""
    path = Path(config.data.dir) / 'manifest.json'
    try:
        size = parse_json(read_text(path, 1 << 22))['resize_shorter']
    except (OSError, ValueError, TypeError, KeyError):
        return f'not known, as {path} is no manifest of prepare'
    if size is None:
        return 'as they were, byte for byte'
    return f'made smaller by prepare, to {printable(str(size))[:10]} pixels of the shorter side, as JPEG of quality 95'


def _choice_lines(choice: Choice) -> list[str]:
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


def _published_object(published: Published) -> dict[str, Any]:
    names = ('round', 'org', 'name', 'num_nodes', 'num_accelerators', 'accelerator')
    return {'recipe': asdict(published.recipe), 'unlogged': sorted(published.unlogged),
            'target_accuracy': published.target, 'num_converged': len(published.epochs),
            'num_runs': len(published.runs),
            'systems': [{**{n: getattr(s, n) for n in names}, 'epochs': published.epochs_of(s)}
                        for s in published.sets]}


def recipes_object(found: Recipes) -> dict[str, Any]:
    """Return the recipes as JSON has them; docs/recipes.md explains the keys."""
    choice, names = found.choice, ('epochs', 'epochs_range', 'num_converged', 'num_runs')
    rows = [{'key': row.key, 'own': row.own and row.own.value, 'is_alone': row.is_alone,
             'published': [{'value': c.value, 'is_logged': c.is_logged} for c in row.published]} for row in found.rows]
    return {'format': FORMAT, 'version': mlperf_rn50.__version__,
            'global_batch_size': found.batch, 'target_accuracy': found.target, 'is_at_batch': found.is_at_batch,
            'published': [_published_object(p) for p in found.recipes],
            'choice': choice and {
                'kind': choice.kind, 'recipe': asdict(choice.recipe), **{n: getattr(choice, n) for n in names},
                'sources': [_published_object(p) for p in choice.sources]},
            'comparison': rows if found.config else None, 'deviations': list(found.deviations)}


def render_config(config: cfg.Config, comments: Sequence[str]) -> str:
    """Return a configuration file of the values that differ from the defaults, below some comments."""
    usual = cfg.to_tree(cfg.Config())
    other = {section: {key: value for key, value in values.items() if value != usual[section][key]}
             for section, values in cfg.to_tree(config).items()}
    tree = {section: values for section, values in other.items() if values}
    body = yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=110)
    return ''.join(f'# {printable(c)}\n' for c in comments) + body


def comments_of(choice: Choice, command: str, num_nodes: int | None, ranks_per_node: int | None) -> list[str]:
    """Return the head of a recipe's file: its command, its layout and target, its source, the epochs to expect."""
    layout = f'{num_nodes} nodes of {ranks_per_node}, ' if num_nodes and ranks_per_node else ''
    recipe = choice.recipe
    lines = [command, f'{layout}ImageNet, Top-1 {100 * choice.target:.4g} %, batch {recipe.global_batch_size:,}, '
                      f'{(recipe.opt_name or "").upper()}. Expected: {choice.epochs:.3g} epochs.',
             f'{choice.kind.capitalize()}: MLPerf Training, {choice.said_by.removeprefix("between ")}.']
    if choice.kind == 'between':
        lines.append('Learning rate, warm-up and schedule lie between theirs; no set was trained with them.')
    if names := sorted(frozenset().union(*(p.unlogged for p in choice.sources))):
        lines.append(f'Not in the logs, but in the settings submitted with them: {", ".join(names)}.')
    return lines
