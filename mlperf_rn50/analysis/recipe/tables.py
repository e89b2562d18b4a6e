"""Render published recipes as tables and JSON, next to a configuration's values or with a
recommended recipe."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import mlperf_rn50
from mlperf_rn50.analysis.recipe.choose import (
    Choice,
    RecipeGroup,
    choose_recipe,
    group,
    range_text,
    rank,
    recipes_near,
)
from mlperf_rn50.analysis.recipe.differences import Row, find_deviations, is_imagenet, rows_of
from mlperf_rn50.analysis.sets.published import load_published
from mlperf_rn50.analysis.show.text import fit_columns
from mlperf_rn50.config import Config, render_yaml
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.files import parse_json, read_text
from mlperf_rn50.text import plural, printable, wrap_line

FORMAT = 'mlperf-rn50 recipe 1'
_MAX_RECIPES, _MAX_SYSTEMS = 8, 3  # maximum recipes in a table, and systems for each recipe


@dataclass(frozen=True)
class Recipes:
    """Published recipes at a batch or at adjacent batches, with a choice or a configuration to
    compare."""

    batch: int
    target: float | None  # None means the target of each recipe
    recipes: Sequence[RecipeGroup]
    rows: Sequence[Row]
    is_at_batch: bool
    choice: Choice | None = None
    config: Config | None = None
    deviations: Sequence[str] = ()


def find_recipes(
    batch: int,
    opt_name: str | None,
    target: float | None,
    config: Config | None = None,
    num_ranks: int | None = None,
    division: str = 'closed',
) -> Recipes:
    """Return recipes at or near a batch, compared with config or, without it, a choice. Raise
    ConfigError if none."""
    sets = load_published(division)
    choice = None if config else choose_recipe(batch, opt_name, target, sets)
    recipes, is_at_batch = recipes_near(group(sets, opt_name, target), batch)
    if not recipes:
        raise ConfigError(f'--compare: no published set reached {100 * (target or 0):.4g} %')
    preferred = config.optimizer.name if config else None
    ordered = sorted(
        recipes,
        key=lambda p: (preferred not in (None, p.recipe.opt_name), not p.is_whole, rank(p, batch)),
    )
    return Recipes(
        batch,
        target,
        ordered,
        rows_of(ordered, config),
        is_at_batch,
        choice,
        config,
        find_deviations(config, num_ranks) if config else (),
    )


def _systems_table(recipes: Sequence[RecipeGroup], width: int | None) -> str:
    rows = []
    for letter, published in zip(ascii_uppercase, recipes):
        newest = sorted(published.sets, key=lambda s: s.round, reverse=True)[:_MAX_SYSTEMS]
        for run_set in newest:
            epochs, per_node = (
                published.epochs_of(run_set),
                (run_set.num_accelerators or 0) // (run_set.num_nodes or 1),
            )
            layout = f'{run_set.num_nodes}x{per_node}' if per_node else f'{run_set.num_nodes}, CPUs'
            rows.append(
                [
                    letter if run_set is newest[0] else '',
                    f'{published.batch:,}',
                    run_set.round,
                    run_set.org or '-',
                    run_set.name,
                    layout,
                    f'{100 * published.target:.4g} %',
                    ' '.join('-' if e is None else str(e) for e in epochs),
                    f'{sum(e is not None for e in epochs)} of {len(epochs)}',
                ]
            )
        if more := published.sets[_MAX_SYSTEMS:]:
            runs = len(published.epochs) - sum(
                e is not None for s in newest for e in published.epochs_of(s)
            )
            rows.append(
                [
                    '',
                    '',
                    '',
                    '',
                    f'and {plural(len(more), "more set")}',
                    *[''] * 3,
                    f'{runs} more runs',
                ]
            )
    head = [
        '',
        'batch',
        'round',
        'organisation',
        'system',
        'layout',
        'target',
        'epochs',
        'converged',
    ]
    return fit_columns(
        head,
        [[printable(text) for text in row] for row in rows],
        width,
        ('layout', 'round', 'target', 'converged', 'organisation'),
        ['left', 'right', *['left'] * 7],
    )


def _values_tables(found: Recipes, width: int | None) -> list[str]:
    """Return one table of values or, with a configuration, two: one for values that differ, one for
    shared values."""
    letters = ascii_uppercase[: min(_MAX_RECIPES, len(found.recipes))]
    if not found.config:
        return [fit_columns(['', *letters], [*map(_texts, found.rows)], width)]
    num_values = [
        (len({c.text for c in row.published[:_MAX_RECIPES]}), _texts(row)) for row in found.rows
    ]
    differing, shared = (
        [t for n, t in num_values if n > 1],
        [t[:3] for n, t in num_values if n == 1],
    )
    span = f'{letters[0]} to {letters[-1]}' if differing else letters[0]
    tables = [(differing, ['', 'config', *letters]), (shared, ['', 'config', span])]
    return [fit_columns(head, rows, width) for rows, head in tables if rows]


def _texts(row: Row) -> list[str]:
    compared = [] if row.config is None else [row.config.text + (' *' if row.is_alone else '')]
    return [row.key, *compared, *(printable(cell.text) for cell in row.published[:_MAX_RECIPES])]


def render_recipes(found: Recipes, width: int | None = None) -> str:
    """Return the systems, the values of their recipes, and notes as text that fits a width."""
    title = (
        f'Published at batch {found.batch:,}'
        if found.is_at_batch
        else f'Not published at batch {found.batch:,}; adjacent batches'
    )
    goal = '' if found.target is None else f', for {100 * found.target:.4g} % or more'
    notes = ['† from the submitted settings, not logged  ? unknown  - not applicable']
    if more := found.recipes[_MAX_RECIPES:]:
        notes.insert(
            0, f'{plural(len(more), "more recipe")} with other values or more epochs: --format json'
        )
    if found.config:
        notes += _compared_notes(found, found.config)
    if found.choice:
        notes += ['', *map(printable, _choice_lines(found.choice))]
    return '\n\n'.join(
        [
            f'{title}{goal}:',
            _systems_table(found.recipes[:_MAX_RECIPES], width),
            *_values_tables(found, width),
            '\n'.join(wrap_line(n, width) for n in notes),
        ]
    )


def _compared_notes(found: Recipes, config: Config) -> list[str]:
    """Return the legend, facts that no configuration key describes, and the warnings that train
    gives."""
    recipes = (
        'with this optimizer'
        if any(p.recipe.opt_name == config.optimizer.name for p in found.recipes)
        else 'above, none of which has this optimizer,'
    )
    notes = [
        f'* no recipe {recipes} has this value (schedule end and length: among schedules of the '
        'same kind)',
        'Colours: the submissions and train change the colours of training images only by mean '
        'and std.',
        'Files: the storage format of the images is not logged. This configuration: '
        f'{_images_of(config)}.',
        '',
    ]
    if is_imagenet(config):
        return [
            *notes,
            'Deviations from converged published sets at similar batches:',
            *([f'- {d}' for d in found.deviations] or ['- none; train does not warn']),
        ]
    data = 'synthetic images' if config.data.synthetic else config.data.dataset
    return [
        *notes,
        'The recipes are for ResNet-50 on ImageNet. This configuration trains '
        f'{config.model.name} on '
        f'{config.data.num_train:,} images of {data}, so they may not apply, and train does not '
        'warn.',
    ]


def _images_of(config: Config) -> str:
    """Return the storage format of a configuration's images, from the data manifest."""
    path = Path(config.data.dir) / 'manifest.json'
    try:
        size = parse_json(read_text(path, 1 << 22))['resize_shorter']
    except (OSError, ValueError, TypeError, KeyError):
        return f'unknown, because {path} is not a manifest written by prepare'
    if size is None:
        return 'original files, byte for byte'
    return (
        f'resized by prepare to {printable(str(size))[:10]} pixels on the shorter side, as '
        'JPEG of quality 95'
    )


def _choice_lines(choice: Choice) -> Iterator[str]:
    r = choice.recipe
    length = (
        f'step at {" ".join(f"{e:g}" for e in r.step_epochs)} epochs'
        if r.step_epochs
        else f'{r.decay} over {r.decay_epochs:g} epochs'
    )
    yield (
        f'Recipe ({choice.kind}): {r.opt_name}, learning rate {r.base_lr:g}, warm-up '
        f'{r.warmup_epochs:g} epochs, '
        f'{length}, weight decay {r.weight_decay:g}.'
    )
    yield (
        f'Expected: {choice.epochs:.3g} epochs to {100 * choice.target:.4g} % '
        f'({range_text(choice.epochs_range)} '
        f'in the sources); {choice.num_converged} of {choice.num_runs} source runs reached it.'
    )
    both = 'it' if choice.kind == 'known' else 'the recipes on both sides'
    yield f'Sets that converged with {both}: {choice.num_sets}.'
    yield f'Source: {choice.source_text}.'
    if choice.kind == 'between':
        yield (
            'No published set has this batch; learning rate, warm-up and schedule are interpolated.'
        )


def _published_object(published: RecipeGroup) -> dict[str, Any]:
    names = ('round', 'org', 'name', 'num_nodes', 'num_accelerators', 'accelerator')
    return {
        'recipe': asdict(published.recipe),
        'unlogged': sorted(published.unlogged),
        'target_accuracy': published.target,
        'num_converged': len(published.epochs),
        'num_runs': len(published.runs),
        'systems': [
            {**{n: getattr(s, n) for n in names}, 'epochs': published.epochs_of(s)}
            for s in published.sets
        ],
    }


def recipes_object(found: Recipes) -> dict[str, Any]:
    """Return the JSON output of the recipe command, documented in docs/recipes.md."""
    choice, names = (
        found.choice,
        ('epochs', 'epochs_range', 'num_converged', 'num_runs', 'num_sets'),
    )
    rows = [
        {
            'key': row.key,
            'own': row.config and row.config.value,
            'is_alone': row.is_alone,
            'published': [{'value': c.value, 'is_logged': c.is_logged} for c in row.published],
        }
        for row in found.rows
    ]
    return {
        'format': FORMAT,
        'version': mlperf_rn50.__version__,
        'global_batch_size': found.batch,
        'target_accuracy': found.target,
        'is_at_batch': found.is_at_batch,
        'published': [_published_object(p) for p in found.recipes],
        'choice': choice
        and {
            'kind': choice.kind,
            'recipe': asdict(choice.recipe),
            **{n: getattr(choice, n) for n in names},
            'sources': [_published_object(p) for p in choice.sources],
        },
        'comparison': rows if found.config else None,
        'deviations': list(found.deviations),
    }


def render_config(config: Config, comments: Sequence[str]) -> str:
    """Return a configuration file with comments and the values that differ from the defaults."""
    return '\n'.join(
        [*(f'# {printable(c)}' for c in comments), render_yaml(config, only_changed=True)]
    )


def comments_of(
    choice: Choice, command: str, num_nodes: int | None, ranks_per_node: int | None
) -> list[str]:
    """Return the header of a recipe file: command, layout, target, expected epochs and source."""
    layout = (
        f'{num_nodes} nodes with {ranks_per_node} ranks each, '
        if num_nodes and ranks_per_node
        else ''
    )
    recipe = choice.recipe
    lines = [
        command,
        f'{layout}ImageNet, Top-1 {100 * choice.target:.4g} %, batch {recipe.global_batch_size:,}, '
        f'{(recipe.opt_name or "").upper()}. Expected: {choice.epochs:.3g} epochs.',
        f'{choice.kind.capitalize()}: MLPerf Training, '
        f'{choice.source_text.removeprefix("between ")}.',
    ]
    if choice.kind == 'between':
        lines.append(
            'Learning rate, warm-up and schedule are interpolated; no set was trained with them.'
        )
    if names := sorted(frozenset().union(*(p.unlogged for p in choice.sources))):
        lines.append(f'Not logged, from the submitted settings: {", ".join(names)}.')
    return lines
