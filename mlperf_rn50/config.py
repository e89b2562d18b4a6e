"""Configuration: a tree of frozen dataclasses, filled from defaults, then the YAML file, then the
command line.

Options of the components are in data/options.py, model/options.py and train/options.py; those of
the run are here. Numbers that also depend on the ranks (such as steps per epoch) are in
train/plan.py.
"""

import json
import math
import unicodedata
from dataclasses import Field, dataclass, fields, replace
from operator import attrgetter
from typing import Any, Literal, get_args

from mlperf_rn50.bounds import ABOVE_0, FROM_0, Bounds, free_option, refuse
from mlperf_rn50.data.options import IMAGENET, NUM_IMAGENET, DataConfig, check_data
from mlperf_rn50.model.options import ModelConfig, check_model
from mlperf_rn50.train import options as train_options
from mlperf_rn50.train.options import (
    CheckpointConfig,
    CommConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)

# Values that the closed division requires. Only those of OPEN_ONLY are not visible in other events
# of the log.
OPEN_ONLY: dict[str, Any] = {
    'data.sizes': (),
    'data.eval_size': None,
    'data.eval_flip': False,
    'train.ema': None,
    'optimizer.last_layer_lr_factor': 1.0,
}
_CLOSED = {
    'optimizer.nesterov': False,
    'optimizer.lars_epsilon': 0.0,
    'data.mirror': 'random',
    'data.last_batch': 'wrap',
    'train.init_weights': None,
    **OPEN_ONLY,
}
_CLOSED_ON_IMAGENET = {'model.name': 'resnet50', 'data.image_size': 224}
_FIXED_SIZE = ('alexnet', 'vgg16', 'vgg19')  # networks whose dense layers fit images of one size
_LEAST, _MOST = 1e-30, 1e30  # MXNet's operators take float32, which ends at 1.2e-38 and 3.4e38
# Unicode categories of controls, surrogates, line and paragraph separators
_UNPRINTED = ('Cc', 'Cs', 'Zl', 'Zp')


@dataclass(frozen=True)
class RunConfig:
    """Run folder, ranks, logs and submission.

    Args:
        dir: run folder; its results are numbered and never overwritten.
        seed: random seed for initial weights, image order and augmentation; null draws a new seed
            for each run.
        num_nodes: expected number of nodes, which launchers start and the doctor checks; training
            checks only the product with ranks_per_node. null disables the check.
        ranks_per_node: expected number of ranks per node, as for num_nodes.
        ranks_per_device: number of consecutive ranks on a node that share a GPU or, without GPUs, a
            set of cores.
        submission_org: name of the submitting organisation, for the log.
        submission_platform: name of the system, for the log.
        submission_division: division (open or closed), for the log.
        submission_status: availability of the system, in the terms of the MLPerf rules.
        submission_poc_name: name of the contact person, for the v0.6 log.
        clear_caches: flush the page cache of every node before initialisation; needs root.
        log_v06: also write a log in the v0.6 format, result_<k>_v0.6.txt.
        metrics_period_steps: number of steps between two lines of metrics.jsonl.
        telemetry: write the load of every node once a second to telemetry_<k>_<host>.jsonl; short:
            --telemetry true.
        trace: steps of which every rank writes the times of all phases and gradient buckets to
            trace_<k>_<rank>.jsonl, as their number and the first one, such as 20@100; null means
            none.
        tensorboard: also write losses, learning rates, norms and times for TensorBoard, in
            tensorboard/.
        reference: folders of logs whose evaluations the run is compared with; [] selects the
            included published run sets with the same or, without any, a similar recipe, on ImageNet
            only.
        stop_when_behind: write a checkpoint and stop when the run falls behind its references.
    """

    dir: str = free_option('logs/run')
    seed: int | None = free_option(None, FROM_0)
    num_nodes: int | None = free_option(None, ABOVE_0, 'nodes')
    ranks_per_node: int | None = free_option(None, ABOVE_0, 'ranks')
    ranks_per_device: int = free_option(1, ABOVE_0, 'ranks')
    submission_org: str = free_option('unnamed')
    submission_platform: str = free_option('unnamed')
    submission_division: Literal['open', 'closed'] = free_option('open')
    submission_status: Literal['cloud', 'onprem', 'preview', 'research'] = free_option('research')
    submission_poc_name: str = free_option('unnamed')
    clear_caches: bool = free_option(False)
    log_v06: bool = free_option(False)
    metrics_period_steps: int = free_option(20, ABOVE_0, 'steps')
    telemetry: bool = free_option(False)
    trace: str | None = free_option(None)
    tensorboard: bool = free_option(False)
    reference: tuple[str, ...] = free_option(())
    stop_when_behind: bool = free_option(False)


@dataclass(frozen=True)
class Config:
    """The complete configuration. Each field is a section."""

    run: RunConfig = RunConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig()
    comm: CommConfig = CommConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def num_epochs(self) -> int:
        """Epochs after which a run ends; its schedule may be longer."""
        return self.train.max_epochs or max(1, int(self.schedule.decay_epochs))

    @property
    def world_size(self) -> int | None:
        """Configured number of ranks; None if it is not configured."""
        num_nodes, per_node = self.run.num_nodes, self.run.ranks_per_node
        return None if num_nodes is None or per_node is None else num_nodes * per_node

    @property
    def batch_key(self) -> str:
        """Key that sets the batch; a configuration has one of the two."""
        is_local = self.train.local_batch_size is not None
        return f'train.{"local" if is_local else "global"}_batch_size'

    @property
    def gradient_compression(self) -> str:
        """comm.compression, but none for float16: most of its gradients are small already, and the
        loss scale would exceed the limit of the float32 ones, those of BatchNorm."""
        return 'none' if self.train.precision == 'float16' else self.comm.compression

    def global_batch_size(self, num_ranks: int | None) -> int | None:
        """Return the images per step; None if they depend on an unknown number of ranks."""
        t = self.train
        if t.global_batch_size is None and t.local_batch_size and num_ranks:
            return t.local_batch_size * t.gradient_accumulation_steps * num_ranks
        return t.global_batch_size


_MAX_WHOLE = 10**18  # larger integers may not convert to float
SECTIONS: dict[str, type] = {f.name: f.type for f in fields(Config)}  # type: ignore[misc]
# The field of each key, such as run.dir.
KEYS = {f'{name}.{f.name}': f for name, section in SECTIONS.items() for f in fields(section)}


def with_size(config: Config, side: int) -> Config:
    """Return a configuration that trains on images of one size in all epochs."""
    return replace(config, data=replace(config.data, sizes=(side,)))


def for_evaluation(config: Config) -> Config:
    """Return a configuration whose data.image_size is that of evaluations, as for a network without
    data.sizes."""
    data = config.data
    return replace(
        config,
        data=replace(data, sizes=(), image_size=data.eval_size or data.image_size, eval_size=None),
    )


def image_shape(config: Config) -> tuple[int, int, int]:
    """Return the shape of a training image of the first epoch as network input, in the configured
    layout."""
    channels, side = 4 if config.data.pad_to_4_channels else 3, config.data.size_of()
    return (side, side, channels) if config.model.layout == 'NHWC' else (channels, side, side)


def open_values(config: Config) -> dict[str, Any]:
    """Return the values of a configuration for which the log has no event but OPEN_OPTIONS, by
    key."""
    return {
        key: value for key, rule in OPEN_ONLY.items() if (value := attrgetter(key)(config)) != rule
    }


def to_tree(config: Config) -> dict:
    """Return the configuration as plain dicts and lists, for YAML or JSON."""
    return {
        name: {k: list(v) if isinstance(v, tuple) else v for k, v in vars(section).items()}
        for name, section in vars(config).items()
    }


def render_yaml(config: Config, only_changed: bool = False) -> str:
    """Return the configuration, or its values other than the defaults, as YAML text that load_yaml
    accepts."""
    import yaml  # imported late, because --help needs no packages

    tree, defaults = to_tree(config), to_tree(Config())
    if only_changed:
        tree = {
            name: {k: v for k, v in values.items() if v != defaults[name][k]}
            for name, values in tree.items()
        }
    return yaml.safe_dump(
        {name: v for name, v in tree.items() if v},
        sort_keys=False,
        default_flow_style=None,
        width=110,
    )


def render_value(value: Any) -> str:
    """Return a value as text like YAML, but a float with at most six significant digits and a list
    without brackets."""
    if isinstance(value, (tuple, list)):
        return ' '.join(map(render_value, value))
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return f'{value:.6g}' if isinstance(value, float) else str(value)


def _check_key(name: str, key: Field, value: Any) -> None:
    """Raise ConfigError for a missing value, a number out of bounds or a text with control
    characters."""
    bounds: Bounds | None = key.metadata.get('bounds')
    refuse(
        value is None and type(None) not in get_args(key.type),
        f'{name}: got null, expected a value; omit the key for its default',
    )
    for part in value if isinstance(value, tuple) else (value,):
        if isinstance(part, str):
            refuse(
                any(unicodedata.category(x) in _UNPRINTED for x in part),
                f'{name}: got {part!a}, expected text without control characters',
            )
        refuse(
            isinstance(part, int) and abs(part) >= _MAX_WHOLE,
            f'{name}: got a number with {len(str(part))} digits, expected at most 18',
        )
        if bounds and part is not None and not isinstance(part, str):
            refuse(
                not (math.isfinite(part) and bounds.holds(part)),
                f'{name}: got {part}, expected {bounds.text}',
            )
        refuse(
            isinstance(part, float) and part != 0 and not _LEAST <= abs(part) <= _MOST,
            f'{name}: got {part}, expected 0 or a magnitude from {_LEAST:g} to {_MOST:g}',
        )


def check_values(c: Config) -> None:
    """Raise ConfigError for invalid values."""
    for name, key in KEYS.items():
        _check_key(name, key, attrgetter(name)(c))
    check_data(c.data)
    train_options.parse_trace(c.run.trace)
    train_options.check_training(c.train, c.schedule, c.optimizer)
    check_model(c.model, c.train.device, c.train.precision)
    _check_together(c)


def _check_together(c: Config) -> None:
    """Raise ConfigError for values in different sections that conflict."""
    t, d = c.train, c.data
    refuse(not c.run.dir, 'run.dir: got an empty path, expected a folder')
    refuse('' in c.run.reference, 'run.reference: got an empty path, expected logs or folders')
    is_open = c.run.submission_division == 'open'
    refuse(
        (c.run.ranks_per_node or c.run.ranks_per_device) % c.run.ranks_per_device != 0,
        f'run.ranks_per_node: got {c.run.ranks_per_node}, expected a multiple of '
        f'run.ranks_per_device={c.run.ranks_per_device}',
    )
    is_imagenet = d.dataset == IMAGENET and not d.synthetic
    closed = {**_CLOSED, **(_CLOSED_ON_IMAGENET if is_imagenet else {})}
    for key, rule in closed.items():
        value = attrgetter(key)(c)
        refuse(
            value != rule and not is_open,
            f'{key}: got {render_value(value)} in the closed division, expected '
            f'{render_value(rule) or "[]"}, or run.submission_division=open',
        )
    refuse(
        c.model.name in _FIXED_SIZE and {*d.sizes, d.eval_size or d.image_size} != {d.image_size},
        f'data.sizes, data.eval_size: got other sizes than image_size={d.image_size} for '
        f'{c.model.name}, whose dense layers fit one size; omit them',
    )
    refuse(
        d.decoder == 'mixed' and t.device != 'gpu',
        'data.decoder: got mixed with train.device=cpu, expected cpu; nvJPEG needs '
        'train.device=gpu',
    )
    has_published = is_imagenet and c.model.name == 'resnet50' and d.num_train == NUM_IMAGENET[0]
    refuse(
        c.run.stop_when_behind and not (c.run.reference or has_published),
        f'run.stop_when_behind: got true on {d.dataset}{", synthetic" if d.synthetic else ""} '
        'without a reference, expected false, or run folders in run.reference; only ResNet-50 on '
        'all of ImageNet has published references',
    )
