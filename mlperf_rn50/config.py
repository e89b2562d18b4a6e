"""The configuration: one tree of frozen dataclasses, filled from defaults < YAML file < command line.

Every section is owned here; derived numbers (global batch, steps per epoch) are in train/plan.py.
"""
import dataclasses
import math
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import yaml

from mlperf_rn50.errors import ConfigError

IMAGENET = 'imagenet'
# Unicode's categories of control characters, surrogates, and line and paragraph separators.
_UNPRINTED = ('Cc', 'Cs', 'Zl', 'Zp')


@dataclass(frozen=True)
class Bounds:
    """Which numbers a key takes: in words, and as a test."""

    text: str
    holds: Callable[[float], bool]


FINITE = Bounds('a finite number', lambda v: True)
ABOVE_0 = Bounds('a number above 0', lambda v: v > 0)
FROM_0 = Bounds('0 or more', lambda v: v >= 0)
FROM_2 = Bounds('2 or more', lambda v: v >= 2)
FRACTION = Bounds('a fraction from 0 to 1', lambda v: 0 <= v <= 1)
FRACTION_ABOVE_0 = Bounds('a fraction above 0, up to 1', lambda v: 0 < v <= 1)
FRACTION_BELOW_1 = Bounds('a fraction from 0 to below 1', lambda v: 0 <= v < 1)
UP_TO_65535 = Bounds('0 to 65,535', lambda v: 0 <= v <= 65_535)  # the side of the largest JPEG
INT32_FROM_0 = Bounds('0 to 2,147,483,647', lambda v: 0 <= v < 2**31)
ACCURACY = Bounds('a fraction such as 0.749, not per cent', lambda v: 0 < v <= 1)


def _key(default: Any, bounds: Bounds, unit: str = '') -> Any:
    """A key that takes numbers: its default, bounds and unit."""
    return field(default=default, metadata={'bounds': bounds, 'unit': unit})


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
        tensorboard: also write losses, rates, norms and times for TensorBoard, into tensorboard/.
        reference: run folders or published trees that evaluations are compared with; [] for the published sets that
            have the recipe, on ImageNet.
        stop_when_behind: end the run, with a checkpoint, when it is behind its reference runs.
    """

    dir: str = 'logs/run'
    seed: int | None = _key(None, FROM_0)
    num_nodes: int | None = _key(None, ABOVE_0, 'nodes')
    ranks_per_node: int | None = _key(None, ABOVE_0, 'ranks')
    ranks_per_device: int = _key(1, ABOVE_0, 'ranks')
    submission_org: str = 'unnamed'
    submission_platform: str = 'unnamed'
    submission_division: Literal['open', 'closed'] = 'open'
    submission_status: Literal['cloud', 'onprem', 'preview', 'research'] = 'research'
    submission_poc_name: str = 'unnamed'
    clear_caches: bool = False
    log_v06: bool = False
    metrics_period_steps: int = _key(20, ABOVE_0, 'steps')
    telemetry: bool = False
    tensorboard: bool = False
    reference: tuple[str, ...] = ()
    stop_when_behind: bool = False


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
        shuffle: global (every node comes to read all records) or node (each keeps to a part of them for a while).
        node_rotation_epochs: epochs a node keeps the same part with shuffle=node; a part is cold in its first one.
        image_size: side of the square network input, pixels.
        resize_shorter: evaluation: shorter side before the centre crop, pixels.
        crop: training crop: random_resized (area and aspect), padded (shift by up to crop_padding), or none.
        crop_padding: pixels of black border for crop=padded.
        min_area: smallest crop, as a share of the image's area.
        max_area: largest crop, as a share of the image's area.
        min_aspect: smallest width / height of a crop.
        max_aspect: largest width / height of a crop.
        interpolation: resize filter; triangular and lanczos3 average what they shrink, the others do not.
        mirror: random mirrors an image with mirror_probability each time; alternating every other epoch, half of the
            images in the first.
        mirror_probability: chance of a horizontal flip in training.
        mean: per channel, in 0..255.
        std: per channel, in 0..255.
        decoder: cpu, or mixed (nvJPEG, with train.device=gpu).
        hw_decoder_load: decoder=mixed: share of the images for the GPU's own JPEG decoder, where it has one (A100 and
            later).
        hybrid_huffman_threshold: decoder=mixed: images of more pixels have their Huffman codes decoded on the GPU, the
            others on the CPU.
        preallocate_width_hint: decoder=mixed: width of an image that the GPU's JPEG decoder has memory for from the
            start; 0 to allocate as images come.
        preallocate_height_hint: the same for the height.
        device_memory_padding_mib: decoder=mixed: GPU memory that nvJPEG has for each thread from the start.
        host_memory_padding_mib: decoder=mixed: the same for page-locked memory of the host, twice for each thread.
        decoded_bytes_hint: decoder=mixed: GPU memory that each decoded image of a batch has from the start; 0 to
            allocate as images come.
        num_threads: DALI threads of a rank.
        read_threads: threads of a rank that read records from storage.
        record_cache_mib: encoded images that a rank keeps in memory once read, until they fill it, of training and of
            validation each; 0 for none.
        prefetch_depth: batches kept ready.
        pad_to_4_channels: add a channel of zeros, for tensor cores and for bfloat16 on a CPU.
    """

    dir: str = 'data/imagenet'
    dataset: str = IMAGENET
    num_train: int = _key(1_281_167, ABOVE_0, 'images')
    num_val: int = _key(50_000, ABOVE_0, 'images')
    num_classes: int = _key(1000, FROM_2, 'classes')
    synthetic: bool = False
    shuffle: Literal['global', 'node'] = 'global'
    node_rotation_epochs: int = _key(10, ABOVE_0, 'epochs')
    image_size: int = _key(224, ABOVE_0, 'pixels')
    resize_shorter: int = _key(256, ABOVE_0, 'pixels')
    crop: Literal['random_resized', 'padded', 'none'] = 'random_resized'
    crop_padding: int = _key(4, FROM_0, 'pixels')
    min_area: float = _key(0.05, FRACTION_ABOVE_0, 'fraction')
    max_area: float = _key(1.0, FRACTION_ABOVE_0, 'fraction')
    min_aspect: float = _key(0.75, ABOVE_0, 'width / height')
    max_aspect: float = _key(4 / 3, ABOVE_0, 'width / height')
    interpolation: Literal['nearest', 'linear', 'cubic', 'triangular', 'lanczos3'] = 'linear'
    mirror: Literal['random', 'alternating'] = 'random'
    mirror_probability: float = _key(0.5, FRACTION, 'fraction')
    mean: tuple[float, float, float] = _key((123.675, 116.28, 103.53), FINITE, '0..255')
    std: tuple[float, float, float] = _key((58.395, 57.12, 57.375), ABOVE_0, '0..255')
    decoder: Literal['cpu', 'mixed'] = 'cpu'
    hw_decoder_load: float = _key(0.65, FRACTION, 'fraction')
    hybrid_huffman_threshold: int = _key(1_000_000, INT32_FROM_0, 'pixels')
    preallocate_width_hint: int = _key(0, UP_TO_65535, 'pixels')
    preallocate_height_hint: int = _key(0, UP_TO_65535, 'pixels')
    device_memory_padding_mib: int = _key(16, UP_TO_65535, 'MiB')
    host_memory_padding_mib: int = _key(8, UP_TO_65535, 'MiB')
    decoded_bytes_hint: int = _key(0, INT32_FROM_0, 'bytes')
    num_threads: int = _key(2, ABOVE_0, 'threads')
    read_threads: int = _key(4, ABOVE_0, 'threads')
    record_cache_mib: int = _key(0, FROM_0, 'MiB')
    prefetch_depth: int = _key(2, ABOVE_0, 'batches')
    pad_to_4_channels: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """The network.

    Args:
        name: resnet50 is the benchmark (ResNet v1.5, as the other depths); the others are for throughput studies.
        layout: NCHW or NHWC; the CPU wheel wants NCHW.
        zero_gamma: start the last BatchNorm of each block at gamma = 0.
        fused_bn_relu: BatchNorm and ReLU as one operator. CPU builds have it, NVIDIA's builds have it for float16 with
            NHWC; null: on a CPU not, on a GPU where it is there.
        fused_bn_add_relu: BatchNorm, the sum with the shortcut and ReLU as one operator, which NVIDIA's builds have for
            float16 with NHWC; null: where it is there.
        bn_momentum: weight of the old value in the running statistics.
        bn_epsilon: added to the variance.
    """

    name: Literal['resnet18', 'resnet34', 'resnet50', 'resnet101', 'resnet152', 'alexnet', 'googlenet', 'inception_v3',
                  'inception_v4', 'vgg16', 'vgg19'] = 'resnet50'
    layout: Literal['NCHW', 'NHWC'] = 'NCHW'
    zero_gamma: bool = False
    fused_bn_relu: bool | None = None
    fused_bn_add_relu: bool | None = None
    bn_momentum: float = _key(0.9, FRACTION_BELOW_1, 'fraction')
    bn_epsilon: float = _key(1e-5, ABOVE_0)


@dataclass(frozen=True)
class OptimizerConfig:
    """SGD with momentum, or LARS.

    Args:
        name: sgd or lars.
        momentum: of the velocity.
        nesterov: whether the momentum of sgd is Nesterov's.
        weight_decay: L2 factor.
        decay_bn_and_bias: apply weight_decay to BatchNorm gamma and beta and to biases too.
        lars_eta: LARS trust coefficient.
        lars_epsilon: added to the LARS denominator; the closed division wants 0.
    """

    name: Literal['sgd', 'lars'] = 'sgd'
    momentum: float = _key(0.9, FRACTION_BELOW_1, 'fraction')
    nesterov: bool = False
    weight_decay: float = _key(1e-4, FROM_0)
    decay_bn_and_bias: bool = False
    lars_eta: float = _key(0.001, ABOVE_0)
    lars_epsilon: float = _key(0.0, FROM_0)


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

    base_lr: float = _key(0.1, ABOVE_0)
    warmup_epochs: float = _key(5.0, FROM_0, 'epochs')
    decay: Literal['poly', 'cosine', 'step'] = 'poly'
    decay_epochs: float = _key(90.0, ABOVE_0, 'epochs')
    end_lr: float = _key(1e-4, FROM_0)
    poly_power: float = _key(2.0, FROM_0)
    step_epochs: tuple[float, ...] = _key((30.0, 60.0, 80.0), ABOVE_0, 'epochs')
    step_factor: float = _key(0.1, ABOVE_0)


@dataclass(frozen=True)
class TrainConfig:
    """The steps and when to stop.

    Args:
        local_batch_size: images per rank and forward pass; give this or global_batch_size.
        global_batch_size: images per optimizer step over all ranks.
        gradient_accumulation_steps: forward passes per optimizer step.
        label_smoothing: probability spread evenly over all classes.
        precision: float32, bfloat16 (CPU) or float16 with float32 master weights (GPU).
        loss_scale: float16: factor on the loss to begin with; halved on overflow, doubled after 2,000 steps without.
        device: cpu or gpu; ranks share out the GPUs that they see, run.ranks_per_device neighbours each.
        target_accuracy: stop when Top-1 is at least this fraction.
        max_epochs: give up after this many epochs; null means schedule.decay_epochs.
        eval_period: epochs between two evaluations.
        eval_offset: evaluate after epoch e (from 0) when e modulo eval_period is this.
        eval_batch_size: images per rank and evaluation pass; null means local_batch_size.
        num_warmup_steps: steps on made-up images before the clock starts, that leave no trace.
        init_weights: start from kept weights (a run folder or file; --init-weights); null draws fresh ones.
    """

    local_batch_size: int | None = _key(None, ABOVE_0, 'images')
    global_batch_size: int | None = _key(None, ABOVE_0, 'images')
    gradient_accumulation_steps: int = _key(1, ABOVE_0, 'passes')
    label_smoothing: float = _key(0.0, FRACTION_BELOW_1, 'fraction')
    precision: Literal['float32', 'bfloat16', 'float16'] = 'float32'
    loss_scale: float = _key(65536.0, ABOVE_0)
    device: Literal['cpu', 'gpu'] = 'cpu'
    target_accuracy: float = _key(0.749, ACCURACY, 'fraction')
    max_epochs: int | None = _key(None, ABOVE_0, 'epochs')
    eval_period: int = _key(4, ABOVE_0, 'epochs')
    eval_offset: int = _key(0, FROM_0, 'epochs')
    eval_batch_size: int | None = _key(None, ABOVE_0, 'images')
    num_warmup_steps: int = _key(2, FROM_0, 'steps')
    init_weights: str | None = None


@dataclass(frozen=True)
class CommConfig:
    """The gradient exchange.

    Args:
        compression: none, or fp16 (gradients travel in 16 bits).
        num_buckets: parts in which gradients are exchanged, each as soon as backward has it.
        stall_limit_s: a rank without a sign of life for so long while training is ended, and the run with it; 0 for
            never.
        start_limit_s: the same for everything before the first step; 0 for never.
        eval_limit_s: the same for an evaluation; 0 for never.
        checkpoint_limit_s: the same for a checkpoint and the first step after it; 0 for never.
    """

    compression: Literal['none', 'fp16'] = 'none'
    num_buckets: int = _key(8, ABOVE_0, 'buckets')
    stall_limit_s: float = _key(300.0, FROM_0, 's')
    start_limit_s: float = _key(900.0, FROM_0, 's')
    eval_limit_s: float = _key(300.0, FROM_0, 's')
    checkpoint_limit_s: float = _key(900.0, FROM_0, 's')


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept to go on from.

    Args:
        period_epochs: write one every so many epochs; 0 writes only when asked to stop.
        period_steps: write one every so many steps, beside those; 0 for none.
        keep: how many to keep.
    """

    period_epochs: int = _key(1, FROM_0, 'epochs')
    period_steps: int = _key(0, FROM_0, 'steps')
    keep: int = _key(2, ABOVE_0, 'checkpoints')


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


_MAX_WHOLE = 10**18  # a larger number is none that a float tells from its neighbour, or no float at all
SECTIONS: dict[str, type] = {f.name: f.type for f in dataclasses.fields(Config)}  # type: ignore[misc]


def field_names(section: type) -> list[str]:
    """The keys of a section."""
    return [f.name for f in dataclasses.fields(section)]


def choices_of(section: str, key: str) -> list[str]:
    """The values that a key with fixed choices may have."""
    return list(get_args(next(f.type for f in dataclasses.fields(SECTIONS[section]) if f.name == key)))


def to_tree(config: Config) -> dict:
    """The configuration as plain dicts and lists, ready for YAML or JSON."""
    return {name: {k: list(v) if isinstance(v, tuple) else v for k, v in vars(section).items()}
            for name, section in vars(config).items()}


def render_yaml(config: Config) -> str:
    """The configuration as YAML text that load_yaml reads back to the same tree."""
    return yaml.safe_dump(to_tree(config), sort_keys=False, default_flow_style=None)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _check_key(name: str, key: dataclasses.Field, value: Any) -> None:
    """Raise ConfigError for a value that is missing, a number out of its bounds, or a text that a terminal obeys."""
    bounds: Bounds | None = key.metadata.get('bounds')
    _require(value is not None or type(None) in get_args(key.type),
             f'{name}: got null, expected a value; leave the key out for its default')
    for part in value if isinstance(value, tuple) else (value,):
        if isinstance(part, str):  # no control characters, ends of lines, or what has no encoding
            _require(not any(unicodedata.category(x) in _UNPRINTED for x in part),
                     f'{name}: got {part!a}, expected text without control characters')
        _require(not isinstance(part, int) or abs(part) < _MAX_WHOLE,
                 f'{name}: got a number of {len(str(part))} digits, expected at most 18')
        _require(bounds is None or part is None or (math.isfinite(part) and bounds.holds(part)),
                 f'{name}: got {part}, expected {bounds and bounds.text}')


def check_values(c: Config) -> None:
    """Raise ConfigError for values that cannot be run, each with the numbers and a fix."""
    for section, values in vars(c).items():
        for key in dataclasses.fields(values):
            _check_key(f'{section}.{key.name}', key, getattr(values, key.name))
    t, d, s = c.train, c.data, c.schedule
    _require((t.local_batch_size is None) != (t.global_batch_size is None),
             f'train: got local_batch_size={t.local_batch_size} and global_batch_size={t.global_batch_size}, '
             'expected exactly one of them; set the other to null')
    _require((c.run.ranks_per_node or c.run.ranks_per_device) % c.run.ranks_per_device == 0,
             f'run.ranks_per_node: got {c.run.ranks_per_node}, expected a multiple of '
             f'run.ranks_per_device={c.run.ranks_per_device}')
    _require(0 <= t.eval_offset < t.eval_period,
             f'train.eval_offset: got {t.eval_offset}, expected 0 to {t.eval_period - 1} (train.eval_period - 1)')
    _require(s.warmup_epochs < s.decay_epochs,
             f'schedule.warmup_epochs: got {s.warmup_epochs}, expected less than decay_epochs={s.decay_epochs}')
    _require(d.min_area <= d.max_area,
             f'data.min_area, max_area: got {d.min_area}, {d.max_area}, expected min_area <= max_area')
    _require(d.min_aspect <= d.max_aspect,
             f'data.min_aspect, max_aspect: got {d.min_aspect}, {d.max_aspect}, expected min_aspect <= max_aspect')
    _require(d.resize_shorter >= d.image_size,
             f'data.resize_shorter: got {d.resize_shorter}, expected at least image_size={d.image_size}')
    _require(d.mirror == 'random' or d.mirror_probability == 0.5,
             f'data.mirror: got alternating with mirror_probability={d.mirror_probability}, expected random, or 0.5; '
             'alternating mirrors every image half the time')
    _require(c.optimizer.name == 'sgd' or not c.optimizer.nesterov,
             f'optimizer.nesterov: got true with optimizer.name={c.optimizer.name}, expected false; it is of sgd')
    is_open = c.run.submission_division == 'open'
    _require(is_open or not c.optimizer.nesterov,
             'optimizer.nesterov: got true in the closed division, expected false, or run.submission_division=open')
    _require(is_open or d.mirror == 'random',
             'data.mirror: got alternating in the closed division, expected random, or run.submission_division=open')
    _require(t.device == 'gpu' or d.decoder == 'cpu',
             'data.decoder: got mixed with train.device=cpu, expected cpu; nvJPEG needs train.device=gpu')
    _require(t.precision != 'float16' or t.device == 'gpu',
             'train.precision: got float16 with train.device=cpu, expected float32 or bfloat16 on a CPU')
    _require(t.precision != 'bfloat16' or t.device == 'cpu',
             'train.precision: got bfloat16 with train.device=gpu, expected float32 or float16 on a GPU')
    _require(is_open or t.init_weights is None,
             f'train.init_weights: got {t.init_weights} with run.submission_division=closed, expected null; the closed '
             'division starts from drawn weights')
    _require(not c.run.stop_when_behind or bool(c.run.reference) or d.dataset == IMAGENET and not d.synthetic,
             f'run.stop_when_behind: got true on {d.dataset}{", synthetic" if d.synthetic else ""} without a '
             'reference, expected false, or run folders in run.reference; only ImageNet has published ones')
    _require(t.device == 'gpu' or c.model.layout == 'NCHW',
             'model.layout: got NHWC with train.device=cpu, expected NCHW; the CPU convolutions have no NHWC')
    _require(c.model.layout == 'NCHW' or c.model.name.startswith('resnet'),
             f'model.layout: got NHWC with model.name={c.model.name}, expected NCHW; only the ResNets have NHWC')
    is_nvidia = (t.device, t.precision, c.model.layout) == ('gpu', 'float16', 'NHWC')
    kind = f'train.device={t.device}, train.precision={t.precision}, model.layout={c.model.layout}'
    _require(is_nvidia or t.device == 'cpu' or not c.model.fused_bn_relu,
             f'model.fused_bn_relu: got true with {kind}, expected null; on a GPU it is there for float16 with NHWC')
    _require(is_nvidia or not c.model.fused_bn_add_relu,
             f'model.fused_bn_add_relu: got true with {kind}, expected null; it is there for gpu, float16 and NHWC')
