"""What the commands that use kept weights share: their configuration, and naming them."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_rn50.cli._parsers import config_parser
from mlperf_rn50.config import Config
from mlperf_rn50.errors import ConfigError, DataError
from mlperf_rn50.options import resolve_tree

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

    from mlperf_rn50.model.weights import Description


def weights_config(description: Description, path: Path, argv: Sequence[str],
                   parser: ArgumentParser | None = None) -> Config:
    """The configuration that weights come with < options, checked.

    Raises:
        ConfigError: an option is wrong.
        DataError: the description is.
    """
    where = f'{path.with_suffix(".json")}'
    try:
        resolve_tree(description.tree(), where, [], config_parser('', '', ''))
    except ConfigError as e:
        raise DataError(f'{e}; expected what a run leaves in its weights/') from e
    return resolve_tree(description.tree(), where, argv, parser or config_parser('', '', ''))


def render_weights(description: Description, path: Path) -> str:
    """Which weights these are, in a line."""
    kind = ' and '.join(['best'] * description.is_best + ['last'] * description.is_last) or 'none of best and last'
    return (f'{path}: {description.model["name"]}, {kind} of its run, {description.epoch} epochs on '
            f'{description.data["dataset"]}')
