"""Composition of a configuration from defaults, then the YAML file, then options."""

from __future__ import annotations

import itertools
import json
import re
from argparse import ArgumentError
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mlperf_rn50 import config as cfg
from mlperf_rn50.config import SECTIONS
from mlperf_rn50.config_text import type_text
from mlperf_rn50.data.options import read_manifest
from mlperf_rn50.errors import ConfigError, StorageError, nearest, option_error
from mlperf_rn50.files import PASSING_FAULTS, read_text
from mlperf_rn50.parser import expand, expand_home
from mlperf_rn50.text import short

if TYPE_CHECKING:
    import jsonargparse

_MAX_BYTES, _MAX_DEPTH = 1 << 18, 8  # limits of a configuration file
_PATHS = ('--run.reference',)  # options with one or more paths
_SHORT = (('run', 'telemetry'), ('train', 'init_weights'))  # keys that also have a short option


def check_keys(tree: Any, where: str = '') -> None:
    """Raise ConfigError for the first unknown section or key of a parsed YAML tree."""
    if not isinstance(tree, dict):
        raise ConfigError(
            f'{where or "the file"}: got {type(tree).__name__}, expected sections with keys'
        )
    for section, values in tree.items():
        if section not in SECTIONS:
            raise ConfigError(
                f'{where}{section}: unknown section{nearest(str(section), list(SECTIONS))}'
            )
        if not isinstance(values, dict):
            raise ConfigError(f'{where}{section}: got {repr(values)[:80]}, expected keys')
        known = [f.name for f in fields(SECTIONS[section])]
        for key in values:
            if key not in known:
                raise ConfigError(f'{where}{section}.{key}: unknown key{nearest(str(key), known)}')


class _Loader(yaml.SafeLoader):
    """Loader of plain values, which refuses everything that could need much time or memory.

    In YAML 1.1, 010 is 8, 1:30 is 90, and no is false; here, these three are texts. Whatever is a
    number here is one in YAML 1.1, too, so that PyYAML quotes texts of this form when it writes a
    file.
    """

    # without dates, merge keys and the rest of YAML 1.1
    yaml_implicit_resolvers: dict[str, list] = {}
    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        self._depth += 1
        if isinstance(event, yaml.AliasEvent):  # aliases can expand to gigabytes
            raise yaml.YAMLError(f'got the alias *{event.anchor}, expected explicit values')
        if event.tag:
            raise yaml.YAMLError(f'got the tag {event.tag}, expected plain values')
        if self._depth > _MAX_DEPTH + 1:
            raise yaml.YAMLError(f'is nested deeper than {_MAX_DEPTH} levels')
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:  # PyYAML would silently keep the last one
                raise yaml.YAMLError(
                    f'{name}: occurs on line {lines[name]} and again on line {line}, expected once'
                )
            lines[name] = line
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ('bool', 'true|True|TRUE|false|False|FALSE', 'tTfF'),
    ('int', '[-+]?(0|[1-9][0-9]*)', '-+0123456789'),
    ('float', r'[-+]?[0-9]+\.[0-9]*([eE][-+][0-9]+)?|\.[0-9]+|[-+]?\.inf|\.nan', '-+.0123456789'),
    ('null', '~|null|Null|NULL|', ['~', 'n', 'N', '']),
):
    _Loader.add_implicit_resolver(
        f'tag:yaml.org,2002:{_tag}', re.compile(f'({_pattern})$'), list(_first)
    )


def load_tree(path: Path, max_bytes: int = _MAX_BYTES) -> Any:
    """Return the content of a YAML file. Raise ConfigError if it is unreadable or malformed."""
    try:
        return yaml.load(read_text(path, max_bytes), _Loader)
    except OSError as e:
        raise ConfigError(f'{path}: cannot read the configuration: {e.strerror}') from e
    except (yaml.YAMLError, ValueError) as e:
        raise ConfigError(f'{path}: not a valid YAML file: {" ".join(str(e).split())}') from e


def override(tree: dict, values: Mapping[str, Any]) -> dict:
    """Set values of keys such as schedule.base_lr in a tree; return it."""
    for key, value in values.items():
        section, _, name = key.partition('.')
        tree.setdefault(section, {})[name] = value
    return tree


def load_yaml(path: Path) -> dict:
    """Return the tree of a configuration file. Raise ConfigError if it is unreadable or contains an
    unknown key."""
    tree = load_tree(path) or {}
    check_keys(tree, f'{path}: ')
    return tree


def add_config_options(parser: jsonargparse.ArgumentParser) -> None:
    """Add an option for every key of the configuration."""
    from jsonargparse import _loaders_dumpers

    # set_loader leaves this one unchanged
    _loaders_dumpers.yaml_default_loader = _Loader  # type: ignore[assignment]
    parser.add_argument(
        '--telemetry', metavar='BOOL', type=bool | None, help='short form of --run.telemetry'
    )
    parser.add_argument(
        '--init-weights', metavar='PATH', type=str, help='short form of --train.init_weights'
    )
    for name, section in SECTIONS.items():
        parser.add_class_arguments(section, name)


def _join_paths(argv: Sequence[str]) -> list[str]:
    """Join the paths after an option of _PATHS: `--option A B` becomes `--option=["A", "B"]`."""
    for index, word in enumerate(argv):
        name, equals, value = word.partition('=')
        if name in _PATHS:
            after = list(itertools.takewhile(lambda w: not w.startswith('-'), argv[index + 1 :]))
            paths = [value, *after] if equals else after
            if paths and not paths[0].startswith('['):
                rest = argv[index + 1 + len(after) :]
                listed = json.dumps(paths, ensure_ascii=False)
                return [*argv[:index], f'{name}={listed}', *_join_paths(rest)]
    return list(argv)


def _type_error(error: Exception, parser: jsonargparse.ArgumentParser) -> str:
    """Return the parser's message in one line. For a wrong type: the key, the value found and the
    values expected."""
    text = ' '.join(str(error).split())
    found = re.fullmatch(r'Parser key "([\w.]+)".* value: (.*)', text)
    types = {a.dest: type_text(a._typehint) for a in parser._actions if hasattr(a, '_typehint')}
    if not found or found[1] not in types:
        return text
    key, expected = found[1], types[found[1]]
    if expected.startswith(('whole', 'number', 'list')):
        expected = f'a {expected}'
    dashes = '' if '.' in key else '--'
    return f'{dashes}{key}: got {short(found[2], 80)}, expected {expected}'


def parse_config_options(
    parser: jsonargparse.ArgumentParser,
    argv: Sequence[str],
    namespace: jsonargparse.Namespace | None = None,
) -> jsonargparse.Namespace:
    """Parse a command line with configuration options. Raise ConfigError for an unknown option or a
    wrong type."""
    for word in argv:
        name = word.partition('=')[0]
        if name.startswith('--') and name[2:] in SECTIONS:
            raise ConfigError(f'{name}: got a section, expected a key of it; see --help {name[2:]}')
    try:
        words = [w if w.rpartition('=')[2] == '~' else expand(w) for w in argv]  # ~ alone is null
        return parser.parse_args(_join_paths(words), namespace=namespace)
    # OverflowError for an integer too large for a float
    except (ArgumentError, OverflowError) as e:
        raise option_error(_type_error(e, parser), parser) from e


def _expanded(name: str, value: Any) -> Any:
    """Return a value with tuples instead of lists, and with its paths expanded."""
    if isinstance(value, (list, tuple)):
        return tuple(_expanded(name, v) for v in value)
    return expand(value, name) if isinstance(value, str) else value


def resolve_config(
    yaml_path: Path | None, argv: Sequence[str], parser: jsonargparse.ArgumentParser
) -> cfg.Config:
    """Return the configuration from defaults, then the YAML file, then options. Raise ConfigError
    if it is invalid."""
    return resolve_tree(load_yaml(yaml_path) if yaml_path else {}, str(yaml_path), argv, parser)


def _known_data(folder: Path) -> dict[str, Any]:
    """Return the data keys that the manifest of a prepared folder determines; none if it is missing
    or damaged."""
    try:
        manifest = read_manifest(folder)
    except (OSError, ValueError, MemoryError) as e:
        if isinstance(e, OSError) and e.errno in PASSING_FAULTS:
            problem = f'{folder}: {e.strerror}; repair the storage of the data'
            raise StorageError(f'{problem}, then repeat the command') from e
        return {}
    # training refuses a damaged one
    with suppress(ValueError, LookupError, TypeError):
        splits = manifest['splits']
        return {
            'dataset': str(manifest['dataset']),
            'num_train': int(splits['train']['num_images']),
            'num_val': int(splits['validation']['num_images']),
            'num_classes': len(manifest['classes']),
        }
    return {}


def resolve_tree(
    tree: dict, where: str, argv: Sequence[str], parser: jsonargparse.ArgumentParser
) -> cfg.Config:
    """Return the configuration of a file's tree, overridden by options; missing data sizes come
    from the manifest.

    `where` names the file in messages.
    """
    try:
        options = parse_config_options(parser, argv, parser.parse_object(tree, defaults=True))
        if not options.data.synthetic:
            given = tree.get('data', {})
            folder = expand_home(options.data.dir or '')
            known = _known_data(Path(folder)) | given
            if known != given:  # the configuration of a resumed run has all keys
                options = parse_config_options(
                    parser, argv, parser.parse_object({**tree, 'data': known}, defaults=True)
                )
    # OverflowError: integer too large for a float
    except (ArgumentError, RecursionError, OverflowError) as e:
        raise ConfigError(f'{where}: {_type_error(e, parser)[:500]}') from e
    for section, key in _SHORT:
        if options[key] is not None:
            options[section][key] = options[key]
    values = {
        name: {k: _expanded(f'{name}.{k}: ', v) for k, v in vars(options[name]).items()}
        for name in SECTIONS
    }
    result = cfg.Config(**{name: section(**values[name]) for name, section in SECTIONS.items()})
    cfg.check_values(result)
    return result
