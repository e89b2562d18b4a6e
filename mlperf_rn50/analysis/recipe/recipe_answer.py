"""The answer of recipe: published recipes at a batch, next to a configuration's values or with a
recommended recipe; and the latter as a configuration file."""

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
    make_config,
    range_text,
    rank,
    recipes_near,
)
from mlperf_rn50.analysis.recipe.differences import Row, find_deviations, is_imagenet, rows_of
from mlperf_rn50.analysis.sets.published import load_published
from mlperf_rn50.answer import Answer, Cell, Table, number_cell
from mlperf_rn50.config import Config, render_yaml
from mlperf_rn50.data.options import MANIFEST_NAME
from mlperf_rn50.data.recordio import load_manifest
from mlperf_rn50.errors import ConfigError, DataError, StorageError
from mlperf_rn50.text import plural, printable

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
    config: Config | None,
    num_ranks: int | None,
    division: str,
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
        batch=batch,
        target=target,
        recipes=ordered,
        rows=rows_of(ordered, config),
        is_at_batch=is_at_batch,
        choice=choice,
        config=config,
        deviations=find_deviations(config, num_ranks) if config else (),
    )


def _systems_table(title: str, recipes: Sequence[RecipeGroup]) -> Table:
    rows = []
    for letter, published in zip(ascii_uppercase, recipes):
        ordered = sorted(published.sets, key=lambda s: s.round, reverse=True)
        newest, others = ordered[:_MAX_SYSTEMS], ordered[_MAX_SYSTEMS:]
        for k, run_set in enumerate(newest):
            epochs = published.epochs_of(run_set)
            per_node = (run_set.num_accelerators or 0) // (run_set.num_nodes or 1)
            texts = [
                run_set.round,
                run_set.org or '-',
                run_set.name,
                f'{run_set.num_nodes}x{per_node}' if per_node else f'{run_set.num_nodes}, CPUs',
                f'{100 * published.target:.4g} %',
                ' '.join('-' if e is None else str(e) for e in epochs),
                f'{sum(e is not None for e in epochs)} of {len(epochs)}',
            ]
            first = Cell('' if k else letter)
            rows.append((first, number_cell(published.batch, ',d'), *map(Cell, texts)))
        if others:
            num_runs = sum(e is not None for s in others for e in published.epochs_of(s))
            more = f'and {plural(len(others), "more set")}'
            texts = ['', '', more, '', '', '', f'{num_runs} more runs']
            rows.append((Cell(''), Cell('', published.batch), *map(Cell, texts)))
    head = ',batch,round,organisation,system,layout,target,epochs,converged'
    minor = 'layout', 'round', 'target', 'converged', 'organisation'
    return Table(title, head.split(','), rows, minor=minor)


def _values_tables(found: Recipes) -> Iterator[Table]:
    """Yield one table of values or, with a configuration, two: one for values that differ, one for
    shared values."""
    letters = ascii_uppercase[: min(_MAX_RECIPES, len(found.recipes))]
    rows = [_value_cells(row) for row in found.rows]
    if not found.config:
        yield Table('', ('', *letters), rows)
        return
    differing = [row for row in rows if len({c.text for c in row[2:]}) > 1]
    shared = [row[:3] for row in rows if row not in differing]
    yield Table('', ('', 'config', *letters), differing)
    span = f'{letters[0]} to {letters[-1]}' if differing else letters[0]
    yield Table('', ('', 'config', span), shared)


def _value_cells(row: Row) -> tuple[Cell, ...]:
    cells = [Cell(row.key)]
    if row.config:
        cells.append(Cell(f'{row.config.text} *' if row.is_alone else row.config.text))
    return *cells, *(Cell(value.text) for value in row.published[:_MAX_RECIPES])


def recipe_answer(found: Recipes) -> Answer:
    """Return the recommended recipe or the deviations of a configuration, then the published
    systems, the values of their recipes, and notes."""
    title = f'Published at batch {found.batch:,}'
    if not found.is_at_batch:
        title = f'Not published at batch {found.batch:,}; adjacent batches'
    if found.target is not None:
        title += f', for {100 * found.target:.4g} % or more'
    notes = ['† from the submitted settings, not logged  ? unknown  - not applicable']
    if more := found.recipes[_MAX_RECIPES:]:
        more_text = plural(len(more), 'more recipe')
        notes = [f'{more_text} with other values or more epochs: --format json', *notes]
    sentences: list[str] = []
    if found.config:
        sentences += _compared_lines(found, found.config)
        notes += _compared_notes(found, found.config)
    if found.choice:
        sentences += _choice_lines(found.choice)
    return Answer(
        sentences=sentences,
        tables=[_systems_table(title, found.recipes[:_MAX_RECIPES]), *_values_tables(found)],
        notes=notes,
        data=_data_of(found),
    )


def _compared_lines(found: Recipes, config: Config) -> list[str]:
    """Return the warnings that train gives."""
    if is_imagenet(config):
        return [
            'Deviations from converged published sets at similar batches:',
            *(f'- {text}' for text in found.deviations or ['none; train does not warn']),
        ]
    data = 'synthetic images' if config.data.synthetic else config.data.dataset
    return [
        f'The recipes are for ResNet-50 on ImageNet. This configuration trains {config.model.name} '
        f'on {config.data.num_train:,} images of {data}, so they may not apply, and train does not '
        'warn.'
    ]


def _compared_notes(found: Recipes, config: Config) -> list[str]:
    """Return the legend, and facts that no configuration key describes."""
    name = config.optimizer.name
    recipes = f'the recipes, all with another optimizer than {name},'
    if any(p.recipe.opt_name == name for p in found.recipes):
        recipes = f'the {name} recipes'
    legend = (
        f'* value of this configuration that none of {recipes} has; the end and the length of a '
        f'schedule are compared only with recipes of schedule.decay {config.schedule.decay}'
    )
    return [
        *([legend] if any(row.is_alone for row in found.rows) else []),
        'Colours: the submissions and train change the colours of training images only by mean and '
        'std.',
        'Files: the storage format of the images is not logged. This configuration: '
        f'{_images_of(config)}.',
    ]


def _images_of(config: Config) -> str:
    """Return the storage format of a configuration's images, from the data manifest."""
    folder = Path(config.data.dir)
    try:
        manifest = load_manifest(folder)
    except (DataError, StorageError):
        return f'unknown, because {folder / MANIFEST_NAME} is not a manifest written by prepare'
    size = manifest.get('resize_shorter')
    if size is None:
        return 'that of their source, which prepare has not changed'
    return f'resized by prepare to {size!s:.10} pixels on the shorter side, as JPEG of quality 95'


def _choice_lines(choice: Choice) -> Iterator[str]:
    r = choice.recipe
    if r.step_epochs:
        length = f'step at {" ".join(f"{e:g}" for e in r.step_epochs)} epochs'
    else:
        length = f'{r.decay} over {r.decay_epochs:g} epochs'
    yield (
        f'Recipe ({choice.kind}): {r.opt_name}, learning rate {r.base_lr:g}, warm-up '
        f'{r.warmup_epochs:g} epochs, {length}, weight decay {r.weight_decay:g}.'
    )
    yield (
        f'Expected: {choice.epochs:.3g} epochs to {100 * choice.target:.4g} % '
        f'({range_text(choice.epochs_range)} in the sources); {choice.num_converged} of '
        f'{choice.num_runs} source runs reached it.'
    )
    if choice.kind == 'known':
        yield f'Sets that converged with it: {choice.num_sets}.'
        yield f'Source: {choice.source_text}.'
    else:
        yield f'Sets that converged with the recipes on both sides: {choice.num_sets}.'
        yield f'Source: between {choice.source_text}.'
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


def _data_of(found: Recipes) -> dict[str, Any]:
    """Return the JSON output of the recipe command, documented in docs/recipes.md."""
    choice, rows = None, None
    if found.choice:
        names = ('kind', 'epochs', 'epochs_range', 'num_converged', 'num_runs', 'num_sets')
        choice = {n: getattr(found.choice, n) for n in names}
        choice['recipe'] = asdict(found.choice.recipe)
        choice['sources'] = [_published_object(p) for p in found.choice.sources]
    if found.config:
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
        'choice': choice,
        'comparison': rows,
        'deviations': list(found.deviations),
    }


def render_recipe(
    choice: Choice, command: str, num_nodes: int | None, ranks_per_node: int | None
) -> str:
    """Return a recipe as a configuration file, whose header has command, layout, target, expected
    epochs and source."""
    recipe, layout = choice.recipe, ''
    if num_nodes and ranks_per_node:
        layout = f'{num_nodes} nodes with {ranks_per_node} ranks each, '
    comments = [
        command,
        f'{layout}ImageNet, Top-1 {100 * choice.target:.4g} %, batch {recipe.global_batch_size:,}, '
        f'{(recipe.opt_name or "").upper()}. Expected: {choice.epochs:.3g} epochs.',
        f'{choice.kind.capitalize()}: MLPerf Training, {choice.source_text}.',
    ]
    if choice.kind == 'between':
        comments.append(
            'Learning rate, warm-up and schedule are interpolated; no set was trained with them.'
        )
    if names := sorted(frozenset().union(*(p.unlogged for p in choice.sources))):
        comments.append(f'Not logged, from the submitted settings: {", ".join(names)}.')
    config = make_config(choice, num_nodes, ranks_per_node)
    return '\n'.join(
        [*(f'# {printable(c)}' for c in comments), render_yaml(config, only_changed=True)]
    )
