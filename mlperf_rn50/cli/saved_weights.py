"""Saved weights for commands: their selection by options, their configuration and their network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mlperf_rn50.cli.parsers import config_parser
from mlperf_rn50.config import Config
from mlperf_rn50.errors import ConfigError, DataError
from mlperf_rn50.parser import Parser, add_option

if TYPE_CHECKING:
    import numpy as np
    from jsonargparse import ArgumentParser
    from mxnet.gluon import HybridBlock

    from mlperf_rn50.model.weights import WeightsDescription


class SavedWeights(NamedTuple):
    path: Path
    description: WeightsDescription
    arrays: dict[str, np.ndarray]

    def __str__(self) -> str:
        d = self.description
        kinds = {'best': d.is_best, 'last': d.is_last}
        kind = ' and '.join(k for k, holds in kinds.items() if holds) or 'neither best nor last'
        run = f'{kind} of its run, {d.epoch} epochs on {d.data["dataset"]}'
        return f'{self.path}: {d.model["name"]}, {run}'

    def config(self, argv: Sequence[str], parser: ArgumentParser | None = None) -> Config:
        """Apply options to the stored configuration. Raise DataError if it is invalid, ConfigError
        for options."""
        from mlperf_rn50.config_file import resolve_tree

        tree = self.description.tree()
        where = str(self.path.with_suffix('.json'))
        try:
            resolve_tree(tree, where, [], config_parser())
        except ConfigError as e:
            raise DataError(f'{e}; expected a file that a run wrote to its weights folder') from e
        return resolve_tree(tree, where, argv, parser or config_parser())

    def portable_network(self, argv: Sequence[str] = ()) -> tuple[Config, HybridBlock]:
        """Return the configuration and the network, changed so that they run on any machine."""
        import mxnet as mx

        from mlperf_rn50.model.weights import portable
        from mlperf_rn50.model.zoo import restore_model

        config, arrays = portable(self.config(argv), self.arrays)
        return config, restore_model(config, mx.cpu(), arrays, str(self.path))


def load_saved(path: str, which: str) -> SavedWeights:
    """Load the best or the last weights from a run folder, weights folder or .npz."""
    from mlperf_rn50.model.weights import find_weights, load_weights

    npz = find_weights(Path(path), which)
    return SavedWeights(npz, *load_weights(npz))


def add_weights_options(parser: Parser) -> None:
    add_option(parser, 'path RUN|WEIGHTS', 'run folder (its newest run), weights folder, or .npz')
    add_option(
        parser,
        '--which',
        'saved network of the run (default: best)',
        choices=['best', 'last'],
        default='best',
    )
