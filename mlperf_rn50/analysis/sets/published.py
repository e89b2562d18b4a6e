"""Published run sets from the packaged table published.json, which docs/make_published.py
writes."""

import json
import os
from argparse import ArgumentTypeError
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from mlperf_rn50.analysis.sets.run_set import RunSet
from mlperf_rn50.analysis.sets.time_parts import RunTimes
from mlperf_rn50.errors import UserError, nearest
from mlperf_rn50.mllog.logged_run import IMAGENET_TRAIN, Evaluation, Run
from mlperf_rn50.mllog.rulesets import parse_round

NAME = 'published'  # selects the packaged table where a folder of logs is expected
_FACTS = (
    'round',
    'org',
    'division',
    'framework',
    'num_nodes',
    'num_ranks',
    'num_accelerators',
    'accelerator',
    'node_gbit_s',
    'global_batch_size',
    'target_accuracy',
    'optimizer',
    'is_from_0',
)


def is_mxnet(name: str, framework: str | None) -> bool:
    """Return whether the name of a published set or the framework in its description contains
    MXNet."""
    return 'mxnet' in f'{name} {framework or ""}'.casefold()


def _published_set(entry: Mapping[str, Any]) -> RunSet:
    facts = {name: entry.get(name, False) for name in _FACTS} | {'train_samples': IMAGENET_TRAIN}
    unlogged = entry.get('unlogged', {})
    if unlogged and entry['optimizer'].get('opt_name') == 'sgd':
        # required by the rules
        facts['optimizer'] = {**entry['optimizer'], 'sgd_opt_nesterov': False}
    folder = Path(NAME, entry['round'], entry['org'], entry['name'])
    runs = tuple(
        Run(
            folder / name,
            status=status,
            time_to_train_s=time_s,
            last_epoch=epochs,
            epochs_to_converge=epochs if status == 'converged' else None,
            evaluations=[
                Evaluation(epoch, accuracy, None, None, None, None) for epoch, accuracy in curve
            ],
            **facts,
        )
        for name, status, epochs, time_s, curve in entry['runs']
    )
    logged = RunSet(
        name=entry['name'],
        folder=folder,
        study=folder.parent / 'results',
        runs=runs,
        refusal=entry.get('refusal'),
        is_published=True,
        given_times=RunTimes(*entry['times']) if entry['times'] else None,
    )
    return replace(
        logged,
        later=tuple(_submitted_again(logged, *place) for place in entry.get('later', ())),
        unlogged={
            name: tuple(value) if isinstance(value, list) else value
            for name, value in unlogged.items()
            if getattr(logged.recipe, name) is None
        },
    )


def _submitted_again(run_set: RunSet, round_: str, *names: str) -> RunSet:
    """Return a set as it was submitted again in a later round; names: organisation and system."""
    folder, runs = Path(NAME, round_, *names), tuple(replace(r, round=round_) for r in run_set.runs)
    return replace(run_set, name=folder.name, folder=folder, runs=runs)


@cache
def load_table() -> tuple[RunSet, ...]:
    """Return all published sets, of every framework and division, from
    mlcommons/training_results_v0.5 to v4.0.

    A set that was submitted again in later rounds is the one of its first round.
    """
    text = resources.files(__package__).joinpath('published.json').read_text(encoding='utf-8')
    return tuple(map(_published_set, json.loads(text)['sets']))


def sets_under(path: Path) -> tuple[RunSet, ...]:
    """Return the sets under published, published/ROUND and so on, or () for other paths. Raise
    UserError for no set."""
    if path.parts[:1] != (NAME,) or os.path.lexists(path):
        return ()
    path = with_round(path)
    found = [s for s in load_table() if any(f.is_relative_to(path) for f in s.folders)]
    if not found:
        hint = nearest(str(path), [name.rstrip('/') for name in published_names()])
        raise UserError(f'{path}: no such published sets{hint or "; see report published"}')
    return tuple(sorted(found, key=lambda s: (s.study, s.num_units or 0, s.num_nodes or 0, s.name)))


def with_round(path: Path) -> Path:
    """Return the path of published sets with its round in the spelling of v2.0."""
    with suppress(ArgumentTypeError, IndexError):
        return Path(NAME, parse_round(path.parts[1]), *path.parts[2:])
    return path


def published_names() -> list[str]:
    """Return the paths of all published sets and, with a slash at the end, of their rounds and
    organisations."""
    folders = [f for s in load_table() for f in s.folders]
    return sorted(
        {str(f) for f in folders} | {f'{p}/' for f in folders for p in (f.parent, f.parent.parent)}
    )


@cache
def load_published(division: str = 'closed') -> tuple[RunSet, ...]:
    """Return the published MXNet sets of the closed division, or of both divisions for 'open'.

    Refused sets are left out.
    """
    return tuple(
        s
        for s in load_table()
        if s.has_recipe and division in ('open', s.division) and is_mxnet(s.name, s.framework)
    )
