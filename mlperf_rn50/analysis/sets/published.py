"""Published run sets from the packaged table published.json, which docs/make_published.py writes."""
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from mlperf_rn50.analysis.sets.run_set import RunSet
from mlperf_rn50.analysis.sets.time_parts import RunTimes
from mlperf_rn50.mllog.run import IMAGENET_TRAIN, Evaluation, Run

_FACTS = ('round', 'org', 'num_nodes', 'num_ranks', 'num_accelerators', 'accelerator', 'global_batch_size',
          'target_accuracy')


def _published_set(entry: Mapping[str, Any]) -> RunSet:
    facts = {name: entry[name] for name in _FACTS} | {'train_samples': IMAGENET_TRAIN, 'optimizer': entry['optimizer']}
    if entry['optimizer']['opt_name'] == 'sgd':
        facts['optimizer'] = {**entry['optimizer'], 'sgd_opt_nesterov': False}  # required by the rules
    runs = tuple(Run(Path(name), status=status, time_to_train_s=time_s, last_epoch=epochs,
                     epochs_to_converge=epochs if status == 'converged' else None,
                     evaluations=[Evaluation(epoch, accuracy, 0, None, None, None) for epoch, accuracy in curve],
                     **facts) for name, status, epochs, time_s, curve in entry['runs'])
    folder = Path(entry['round'])
    logged = RunSet(entry['name'], folder, folder, runs, is_published=True, given_times=RunTimes(*entry['times']))
    return replace(logged, unlogged={name: tuple(value) if isinstance(value, list) else value for name, value
                                     in entry['unlogged'].items() if getattr(logged.recipe, name) is None})


@cache
def load_published() -> tuple[RunSet, ...]:
    """Return the published sets of ResNet-50 on MXNet, from github.com/mlcommons/training_results_v0.5 to v1.0."""
    text = resources.files(__package__).joinpath('published.json').read_text(encoding='utf-8')
    return tuple(map(_published_set, json.loads(text)['sets']))
