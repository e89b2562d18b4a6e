"""The configuration: one tree of frozen dataclasses, filled from defaults < YAML file < command line.

Every section is owned here; derived numbers (global batch, steps per epoch) are in train/plan.py.
"""
import dataclasses
import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from mlperf_rn50.errors import ConfigError

IMAGENET = 'imagenet'


@dataclass(frozen=True)
class RunConfig:
    """Where the run goes and who submits it.

    Args:
        dir: run folder; results are numbered and never overwritten.
        seed: seed of initialisation, order and augmentation; null draws a fresh one for every run.
        num_nodes: nodes the run is made for; checked at start when given.
        ranks_per_node: ranks on each node; checked at start when given.
        ranks_per_device: neighbouring ranks of a node that share a GPU, or a core set without GPUs.
        submission_org: organisation named in the log.
        submission_platform: system named in the log.
        submission_division: open or closed.
        submission_status: availability of the system, in the words of the rules.
        submission_poc_name: contact named in the 0.6.0 log.
        clear_caches: flush the page cache on every node before initialisation (needs root).
        log_v06: also write a 0.6.0 log, as result_<k>_v0.6.txt.
        metrics_period_steps: steps between two lines of metrics.jsonl.
        telemetry: sample every node once a second into telemetry_<k>_<host>.jsonl (--telemetry true).
    """

    dir: str = 'logs/run'
    seed: int | None = None
    num_nodes: int | None = None
    ranks_per_node: int | None = None
    ranks_per_device: int = 1
    submission_org: str = 'unnamed'
    submission_platform: str = 'unnamed'
    submission_division: Literal['open', 'closed'] = 'open'
    submission_status: Literal['cloud', 'onprem', 'preview', 'research'] = 'research'
    submission_poc_name: str = 'unnamed'
    clear_caches: bool = False
    log_v06: bool = False
    metrics_period_steps: int = 20
    telemetry: bool = False


@dataclass(frozen=True)
class DataConfig:
    """The data set and the way from its files to batches.

    Args:
        dir: folder written by `mlperf-rn50 prepare`.
        dataset: name of the data set, shown beside every accuracy.
        num_train: training images; must agree with the manifest in dir.
        num_val: validation images; must agree with the manifest in dir.
        num_classes: classes; must agree with the manifest in dir.
        synthetic: train on made-up images, without any file.
        image_size: side of the square network input, pixels.
        resize_shorter: evaluation: shorter side before the centre crop, pixels.
        crop: training crop: random_resized (area and aspect), padded (shift by up to crop_padding), or none.
        crop_padding: pixels of black border for crop=padded.
        min_area: smallest crop, as a share of the image's area.
        max_area: largest crop, as a share of the image's area.
        min_aspect: smallest width / height of a crop.
        max_aspect: largest width / height of a crop.
        interpolation: resize filter; triangular and lanczos3 average what they shrink, the others do not.
        mirror_probability: chance of a horizontal flip in training.
        mean: per channel, in 0..255.
        std: per channel, in 0..255.
        decoder: cpu, or mixed (nvJPEG, with train.device=gpu).
        num_threads: DALI threads of a rank.
        read_threads: threads of a rank that read records from storage.
        prefetch_depth: batches kept ready.
        pad_to_4_channels: add a channel of zeros, for tensor cores and for bfloat16 on a CPU.
    """

    dir: str = 'data/imagenet'
    dataset: str = IMAGENET
    num_train: int = 1_281_167
    num_val: int = 50_000
    num_classes: int = 1000
    synthetic: bool = False
    image_size: int = 224
    resize_shorter: int = 256
    crop: Literal['random_resized', 'padded', 'none'] = 'random_resized'
    crop_padding: int = 4
    min_area: float = 0.05
    max_area: float = 1.0
    min_aspect: float = 0.75
    max_aspect: float = 4 / 3
    interpolation: Literal['nearest', 'linear', 'cubic', 'triangular', 'lanczos3'] = 'linear'
    mirror_probability: float = 0.5
    mean: tuple[float, float, float] = (123.675, 116.28, 103.53)
    std: tuple[float, float, float] = (58.395, 57.12, 57.375)
    decoder: Literal['cpu', 'mixed'] = 'cpu'
    num_threads: int = 2
    read_threads: int = 4
    prefetch_depth: int = 2
    pad_to_4_channels: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """The network.

    Args:
        name: resnet50 is the benchmark (ResNet v1.5, as the other depths); the others are for throughput studies.
        layout: NCHW or NHWC; the CPU wheel wants NCHW.
        zero_gamma: start the last BatchNorm of each block at gamma = 0.
        fused_bn_relu: BatchNorm and ReLU as one operator (CPU builds have it).
        bn_momentum: weight of the old value in the running statistics.
        bn_epsilon: added to the variance.
    """

    name: Literal['resnet18', 'resnet34', 'resnet50', 'resnet101', 'resnet152', 'alexnet', 'googlenet', 'inception_v3',
                  'inception_v4', 'vgg16', 'vgg19'] = 'resnet50'
    layout: Literal['NCHW', 'NHWC'] = 'NCHW'
    zero_gamma: bool = False
    fused_bn_relu: bool = False
    bn_momentum: float = 0.9
    bn_epsilon: float = 1e-5


@dataclass(frozen=True)
class OptimizerConfig:
    """SGD with momentum, or LARS.

    Args:
        name: sgd or lars.
        momentum: of the velocity.
        weight_decay: L2 factor.
        decay_bn_and_bias: apply weight_decay to BatchNorm gamma and beta and to biases too.
        lars_eta: LARS trust coefficient.
        lars_epsilon: added to the LARS denominator; the closed division wants 0.
    """

    name: Literal['sgd', 'lars'] = 'sgd'
    momentum: float = 0.9
    weight_decay: float = 1e-4
    decay_bn_and_bias: bool = False
    lars_eta: float = 0.001
    lars_epsilon: float = 0.0


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the run.

    Args:
        base_lr: reached at the end of the warm-up, for the global batch.
        warmup_epochs: linear warm-up from 0; may be fractional.
        decay: poly, cosine or step.
        decay_epochs: epochs of the whole schedule, warm-up included.
        end_lr: lower end of poly and cosine, kept after decay_epochs.
        poly_power: exponent of poly.
        step_epochs: epochs at which decay=step multiplies by step_factor.
        step_factor: see step_epochs.
    """

    base_lr: float = 0.1
    warmup_epochs: float = 5.0
    decay: Literal['poly', 'cosine', 'step'] = 'poly'
    decay_epochs: float = 90.0
    end_lr: float = 1e-4
    poly_power: float = 2.0
    step_epochs: tuple[float, ...] = (30.0, 60.0, 80.0)
    step_factor: float = 0.1


@dataclass(frozen=True)
class TrainConfig:
    """The steps and when to stop.

    Args:
        local_batch_size: images per rank and forward pass; give this or global_batch_size.
        global_batch_size: images per optimizer step over all ranks.
        gradient_accumulation_steps: forward passes per optimizer step.
        label_smoothing: probability spread evenly over all classes.
        precision: float32, bfloat16 (CPU) or float16 with float32 master weights (GPU).
        loss_scale: static factor on the loss, for float16.
        device: cpu or gpu; a rank takes GPU number local_rank // run.ranks_per_device.
        target_accuracy: stop when Top-1 is at least this fraction.
        max_epochs: give up after this many epochs; null means schedule.decay_epochs.
        eval_period: epochs between two evaluations.
        eval_offset: evaluate after epoch e (from 0) when e modulo eval_period is this.
        eval_batch_size: images per rank and evaluation pass; null means local_batch_size.
    """

    local_batch_size: int | None = None
    global_batch_size: int | None = None
    gradient_accumulation_steps: int = 1
    label_smoothing: float = 0.0
    precision: Literal['float32', 'bfloat16', 'float16'] = 'float32'
    loss_scale: float = 1024.0
    device: Literal['cpu', 'gpu'] = 'cpu'
    target_accuracy: float = 0.749
    max_epochs: int | None = None
    eval_period: int = 4
    eval_offset: int = 0
    eval_batch_size: int | None = None


@dataclass(frozen=True)
class CommConfig:
    """The gradient exchange.

    Args:
        compression: none, or fp16 (gradients travel in 16 bits).
        stall_limit_s: a rank without a sign of life for so long is ended, and the run with it; 0 for never.
    """

    compression: Literal['none', 'fp16'] = 'none'
    stall_limit_s: float = 300.0


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept to go on from.

    Args:
        period_epochs: write one every so many epochs; 0 writes only on SIGTERM and SIGUSR1.
        period_steps: write one every so many steps, beside those; 0 for none.
        keep: how many to keep.
    """

    period_epochs: int = 1
    period_steps: int = 0
    keep: int = 2


@dataclass(frozen=True)
class Config:
    """The whole tree, one section each."""

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


SECTIONS: dict[str, type] = {f.name: f.type for f in dataclasses.fields(Config)}  # type: ignore[misc]


def field_names(section: type) -> list[str]:
    """The keys of a section."""
    return [f.name for f in dataclasses.fields(section)]


def choices_of(section: str, key: str) -> list[str]:
    """The values that a key with fixed choices may have."""
    return list(get_args(next(f.type for f in dataclasses.fields(SECTIONS[section]) if f.name == key)))


def nearest(word: str, known: list[str]) -> str:
    """The hint for a misspelt word: '; did you mean X?', or nothing where none is close."""
    match = difflib.get_close_matches(word, known, n=1)
    return f'; did you mean {match[0]}?' if match else ''


def check_keys(tree: Any, where: str = '') -> None:
    """Raise ConfigError for the first section or key of a parsed YAML tree that does not exist."""
    if not isinstance(tree, dict):
        raise ConfigError(f'{where or "the file"}: got {type(tree).__name__}, expected sections with keys')
    for section, values in tree.items():
        if section not in SECTIONS:
            raise ConfigError(f'{where}{section}: unknown section{nearest(str(section), list(SECTIONS))}')
        if not isinstance(values, dict):
            raise ConfigError(f'{where}{section}: got {values!r}, expected keys under it')
        known = field_names(SECTIONS[section])
        for key in values:
            if key not in known:
                raise ConfigError(f'{where}{section}.{key}: unknown key{nearest(str(key), known)}')


def load_yaml(path: Path) -> dict:
    """The tree in a YAML file, its keys known to exist.

    Raises:
        ConfigError: the file is missing, is not YAML, or holds an unknown key.
    """
    try:
        tree = yaml.safe_load(path.read_text()) or {}
    except OSError as e:
        raise ConfigError(f'{path}: cannot read the configuration: {e.strerror}') from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError(f'{path}: not a YAML file: {" ".join(str(e).split())}') from e
    check_keys(tree, f'{path}: ')
    return tree


def to_tree(config: Config) -> dict:
    """The configuration as plain dicts and lists, ready for YAML or JSON."""
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return list(value) if isinstance(value, tuple) else value
    return plain(dataclasses.asdict(config))


def render_yaml(config: Config) -> str:
    """The configuration as YAML text that load_yaml reads back to the same tree."""
    return yaml.safe_dump(to_tree(config), sort_keys=False, default_flow_style=None)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def check_values(c: Config) -> None:
    """Raise ConfigError for values that cannot be run, each with the numbers and a fix."""
    t, d, s, o = c.train, c.data, c.schedule, c.optimizer
    _require((t.local_batch_size is None) != (t.global_batch_size is None),
             f'train: got local_batch_size={t.local_batch_size} and global_batch_size={t.global_batch_size}, '
             'expected exactly one of them; set the other to null')
    positive = {'train.local_batch_size': t.local_batch_size, 'train.global_batch_size': t.global_batch_size,
                'train.gradient_accumulation_steps': t.gradient_accumulation_steps,
                'train.eval_period': t.eval_period, 'train.eval_batch_size': t.eval_batch_size,
                'train.max_epochs': t.max_epochs, 'train.loss_scale': t.loss_scale,
                'data.num_train': d.num_train, 'data.num_val': d.num_val, 'data.image_size': d.image_size,
                'data.num_threads': d.num_threads, 'data.read_threads': d.read_threads,
                'data.prefetch_depth': d.prefetch_depth, 'schedule.base_lr': s.base_lr,
                'schedule.decay_epochs': s.decay_epochs, 'checkpoint.keep': c.checkpoint.keep,
                'run.num_nodes': c.run.num_nodes, 'run.ranks_per_node': c.run.ranks_per_node,
                'run.ranks_per_device': c.run.ranks_per_device,
                'run.metrics_period_steps': c.run.metrics_period_steps, 'model.bn_epsilon': c.model.bn_epsilon}
    for name, value in positive.items():
        _require(value is None or value > 0, f'{name}: got {value}, expected a number above 0')
    not_negative = {'schedule.warmup_epochs': s.warmup_epochs, 'schedule.end_lr': s.end_lr,
                    'optimizer.weight_decay': o.weight_decay, 'data.crop_padding': d.crop_padding,
                    'checkpoint.period_epochs': c.checkpoint.period_epochs,
                    'checkpoint.period_steps': c.checkpoint.period_steps,
                    'run.seed': c.run.seed, 'comm.stall_limit_s': c.comm.stall_limit_s}
    for name, value in not_negative.items():
        _require(value is None or value >= 0, f'{name}: got {value}, expected 0 or more')
    fractions = {'train.label_smoothing': t.label_smoothing, 'optimizer.momentum': o.momentum,
                 'model.bn_momentum': c.model.bn_momentum}
    for name, value in fractions.items():
        _require(0 <= value < 1, f'{name}: got {value}, expected a fraction from 0 to below 1')
    _require(0 <= d.mirror_probability <= 1,
             f'data.mirror_probability: got {d.mirror_probability}, expected a fraction from 0 to 1')
    _require(0 < t.target_accuracy <= 1,
             f'train.target_accuracy: got {t.target_accuracy}, expected a fraction such as 0.749, not per cent')
    _require((c.run.ranks_per_node or c.run.ranks_per_device) % c.run.ranks_per_device == 0,
             f'run.ranks_per_node: got {c.run.ranks_per_node}, expected a multiple of '
             f'run.ranks_per_device={c.run.ranks_per_device}')
    _require(d.num_classes >= 2, f'data.num_classes: got {d.num_classes}, expected 2 or more')
    _require(0 <= t.eval_offset < t.eval_period,
             f'train.eval_offset: got {t.eval_offset}, expected 0 to {t.eval_period - 1} (train.eval_period - 1)')
    _require(s.warmup_epochs < s.decay_epochs,
             f'schedule.warmup_epochs: got {s.warmup_epochs}, expected less than decay_epochs={s.decay_epochs}')
    _require(0 < d.min_area <= d.max_area <= 1,
             f'data.min_area, max_area: got {d.min_area}, {d.max_area}, expected 0 < min_area <= max_area <= 1')
    _require(0 < d.min_aspect <= d.max_aspect,
             f'data.min_aspect, max_aspect: got {d.min_aspect}, {d.max_aspect}, expected 0 < min <= max')
    _require(d.resize_shorter >= d.image_size,
             f'data.resize_shorter: got {d.resize_shorter}, expected at least image_size={d.image_size}')
    _require(t.device == 'gpu' or d.decoder == 'cpu',
             'data.decoder: got mixed with train.device=cpu, expected cpu; nvJPEG needs train.device=gpu')
    _require(t.precision != 'float16' or t.device == 'gpu',
             'train.precision: got float16 with train.device=cpu, expected float32 or bfloat16 on a CPU')
    _require(t.precision != 'bfloat16' or t.device == 'cpu',
             'train.precision: got bfloat16 with train.device=gpu, expected float32 or float16 on a GPU')
    _require(t.device == 'gpu' or c.model.layout == 'NCHW',
             'model.layout: got NHWC with train.device=cpu, expected NCHW; the CPU convolutions have no NHWC')
    _require(c.model.layout == 'NCHW' or c.model.name.startswith('resnet'),
             f'model.layout: got NHWC with model.name={c.model.name}, expected NCHW; only the ResNets have NHWC')
    _require(t.device == 'cpu' or not c.model.fused_bn_relu,
             'model.fused_bn_relu: got true with train.device=gpu, expected false; the operator is in CPU builds only')
