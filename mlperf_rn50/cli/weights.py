"""What the commands that use kept weights share: finding and naming them, their configuration and network."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_rn50.cli.parsers import config_parser
from mlperf_rn50.config import Config
from mlperf_rn50.errors import ConfigError, DataError
from mlperf_rn50.parser import Parser

if TYPE_CHECKING:
    import numpy as np
    from jsonargparse import ArgumentParser
    from mxnet.gluon import HybridBlock

    from mlperf_rn50.model.weights import WeightsDescription


@dataclass(frozen=True)
class SavedWeights:
    """The weights that a command uses."""

    path: Path
    description: WeightsDescription
    arrays: dict[str, np.ndarray]

    def __str__(self) -> str:
        d = self.description
        kind = ' and '.join(['best'] * d.is_best + ['last'] * d.is_last) or 'none of best and last'
        return f'{self.path}: {d.model["name"]}, {kind} of its run, {d.epoch} epochs on {d.data["dataset"]}'

    def config(self, argv: Sequence[str], parser: ArgumentParser | None = None) -> Config:
        """Return the configuration that they come with, changed by options; raise ConfigError or DataError if wrong."""
        from mlperf_rn50.options import resolve_tree
        tree, where = self.description.tree(), f'{self.path.with_suffix(".json")}'
        try:
            resolve_tree(tree, where, [], config_parser('', '', ''))
        except ConfigError as e:
            raise DataError(f'{e}; expected what a run leaves in its weights/') from e
        return resolve_tree(tree, where, argv, parser or config_parser('', '', ''))

    def portable_network(self, argv: Sequence[str] = ()) -> tuple[Config, HybridBlock]:
        """Return the network as it computes on any machine, and its configuration."""
        import mxnet as mx

        from mlperf_rn50.model.weights import portable
        from mlperf_rn50.model.zoo import restore_model
        config, arrays = portable(self.config(argv), self.arrays)
        return config, restore_model(config, mx.cpu(), arrays, str(self.path))


def load_kept(path: str, which: str) -> SavedWeights:
    """Load the weights that a path means; see find_weights and load_weights."""
    from mlperf_rn50.model.weights import find_weights, load_weights
    found = find_weights(Path(path), which)
    return SavedWeights(found, *load_weights(found))


def add_weights_options(parser: Parser) -> None:
    """Add the path of the weights, and which of a run's."""
    parser.add_argument('path', metavar='RUN|WEIGHTS', help='run folder (its newest run), weights folder, or .npz')
    parser.add_argument('--which', choices=['best', 'last'], default='best', help='network of a run (default: best)')
