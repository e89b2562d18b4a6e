"""A configuration from its parts: defaults < YAML file < options of the command line."""
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from mlperf_rn50 import config as cfg
from mlperf_rn50.errors import ConfigError


def add_config_options(parser: ArgumentParser) -> None:
    """Adds --config, and an option for every key of the configuration."""
    parser.add_argument('--config', metavar='FILE', type=str, help='YAML file: only what differs from the defaults')
    parser.add_argument('--telemetry', metavar='BOOL', type=bool | None, help='the short form of --run.telemetry')
    for name, section in cfg.SECTIONS.items():
        parser.add_class_arguments(section, name)


def parse_options(parser: ArgumentParser, argv: Sequence[str], namespace: Namespace | None = None) -> Namespace:
    """What a parser with the options of a configuration makes of the words of a command line.

    Raises:
        ConfigError: an option is unknown or its value has the wrong type.
    """
    try:
        return parser.parse_args(list(argv), namespace=namespace)
    except ArgumentError as e:
        raise cfg.option_error(str(e), parser) from e


def resolve_config(yaml_path: Path | None, argv: Sequence[str], parser: ArgumentParser) -> cfg.Config:
    """Defaults < YAML < command line, as one checked tree.

    Args:
        yaml_path: the configuration file, None for the defaults.
        argv: the options of the command.
        parser: of the command, with the options of a configuration among its own.

    Raises:
        ConfigError: a key, type or value is wrong.
    """
    tree = cfg.load_yaml(yaml_path) if yaml_path else {}
    try:
        base = parser.parse_object(tree, defaults=True)
    except ArgumentError as e:
        raise ConfigError(f'{yaml_path}: {" ".join(str(e).split())}') from e
    options = parse_options(parser, argv, base)
    result = cfg.Config(**{name: section(**_plain(options[name])) for name, section in cfg.SECTIONS.items()})
    if options.telemetry is not None:
        result = replace(result, run=replace(result.run, telemetry=options.telemetry))
    cfg.check_values(result)
    return result


def _plain(section: Namespace) -> dict[str, Any]:
    """The values of a section, lists as the tuples of the dataclass."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in vars(section).items()}
