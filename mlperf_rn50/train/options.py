"""Options of training: optimizer, schedule, steps, exchange and checkpoints."""

import re
from dataclasses import dataclass
from typing import Literal

from mlperf_rn50.bounds import (
    ABOVE_0,
    ACCURACY,
    EPOCHS,
    FRACTION_BELOW_1,
    FROM_0,
    free_option,
    option,
    refuse,
)


@dataclass(frozen=True)
class OptimizerConfig:
    """SGD with momentum, or LARS.

    Args:
        name: sgd or lars.
        momentum: factor on the velocity of the previous step.
        nesterov: use Nesterov momentum with sgd.
        weight_decay: factor of the L2 regularisation.
        decay_bn_and_bias: apply weight_decay also to BatchNorm gamma and beta and to biases.
        last_layer_lr_factor: factor on the learning rate of the last layer, such as 0.05 for high
            learning rates.
        lars_eta: LARS trust coefficient.
        lars_epsilon: term added to the LARS denominator; MLPerf's closed division requires 0.
    """

    name: Literal['sgd', 'lars'] = 'sgd'
    momentum: float = option(0.9, FRACTION_BELOW_1, 'fraction')
    nesterov: bool = False
    weight_decay: float = option(1e-4, FROM_0)
    decay_bn_and_bias: bool = False
    last_layer_lr_factor: float = option(1.0, ABOVE_0)
    lars_eta: float = option(0.001, ABOVE_0)
    lars_epsilon: float = option(0.0, FROM_0)


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate over the run.

    Args:
        base_lr: learning rate for the global batch at the end of the warm-up.
        warmup_epochs: epochs in which the learning rate rises linearly from 0; may be fractional.
        decay: shape of the decay after the warm-up: poly, cosine or step.
        decay_epochs: epochs of the whole schedule, warm-up included.
        end_lr: final learning rate of poly and cosine, kept after decay_epochs.
        poly_power: exponent of decay=poly.
        step_epochs: epochs at which decay=step multiplies the learning rate by step_factor.
        step_factor: factor on the learning rate at each of step_epochs.
    """

    base_lr: float = option(0.1, ABOVE_0)
    warmup_epochs: float = option(5.0, FROM_0, 'epochs')
    decay: Literal['poly', 'cosine', 'step'] = 'poly'
    decay_epochs: float = option(90.0, EPOCHS, 'epochs')
    end_lr: float = option(1e-4, FROM_0)
    poly_power: float = option(2.0, FROM_0)
    step_epochs: tuple[float, ...] = option((30.0, 60.0, 80.0), ABOVE_0, 'epochs')
    step_factor: float = option(0.1, ABOVE_0)


@dataclass(frozen=True)
class TrainConfig:
    """Batch sizes, precision, evaluations and end of training.

    Args:
        local_batch_size: images per rank and forward pass; set this or global_batch_size.
        global_batch_size: images per optimizer step over all ranks.
        gradient_accumulation_steps: forward passes per optimizer step.
        label_smoothing: part of a label's probability that is spread evenly over all classes.
        precision: float32, bfloat16 (CPU only), or float16 with float32 master weights (GPU only).
        loss_scale: factor on the loss in float16; the initial one of loss_scale_policy=dynamic.
        loss_scale_policy: dynamic skips a step that overflows and halves the scale, and doubles it
            after 2,000 finite steps; static changes and skips nothing, as in the published recipes,
            which saves time in each step.
        device: cpu or gpu; each visible GPU serves run.ranks_per_device consecutive ranks.
        target_accuracy: stop when Top-1 is at least this fraction.
        max_epochs: abort after this many epochs; null means schedule.decay_epochs.
        eval_period: epochs between two evaluations.
        eval_offset: evaluate after epoch e, counted from 0, if e modulo eval_period equals this
            value; the open division also evaluates after the last epoch.
        eval_batch_size: images per rank and evaluation pass; null means local_batch_size.
        ema: factor per step by which an exponential moving average of weights and BatchNorm
            statistics forgets, such as 0.998; evaluations and saved weights then use the average.
            null means none.
        num_warmup_steps: steps on synthetic images before the clock starts; the network is restored
            afterwards.
        init_weights: run folder or file with initial weights (short form --init-weights); null
            means random weights.
    """

    local_batch_size: int | None = free_option(None, ABOVE_0, 'images')
    global_batch_size: int | None = free_option(None, ABOVE_0, 'images')
    gradient_accumulation_steps: int = option(1, ABOVE_0, 'passes')
    label_smoothing: float = option(0.0, FRACTION_BELOW_1, 'fraction')
    precision: Literal['float32', 'bfloat16', 'float16'] = 'float32'
    loss_scale: float = option(65536.0, ABOVE_0)
    loss_scale_policy: Literal['dynamic', 'static'] = 'dynamic'
    device: Literal['cpu', 'gpu'] = 'cpu'
    target_accuracy: float = free_option(0.749, ACCURACY, 'fraction')
    max_epochs: int | None = free_option(None, EPOCHS, 'epochs')
    eval_period: int = option(4, ABOVE_0, 'epochs')
    eval_offset: int = option(0, FROM_0, 'epochs')
    eval_batch_size: int | None = free_option(None, ABOVE_0, 'images')
    ema: float | None = option(None, FRACTION_BELOW_1, 'fraction')
    num_warmup_steps: int = free_option(2, FROM_0, 'steps')
    init_weights: str | None = None


@dataclass(frozen=True)
class CommConfig:
    """Gradient exchange, and time limits for ranks.

    Args:
        compression: none, or fp16 (exchange float32 gradients in 16 bits).
        num_buckets: parts in which gradients are exchanged, at least one per dtype, each as soon as
            it is computed.
        stall_limit_s: end a run if a rank gives no sign of life for this long in training, or for a
            shorter limit learned from the run; 0 disables it.
        start_limit_s: stall limit while the ranks connect, until training begins; 0 disables it.
        eval_limit_s: stall limit in an evaluation, or a shorter one learned from the run; 0
            disables it.
        checkpoint_limit_s: stall limit in a checkpoint and the first step after it; 0 disables it.
    """

    compression: Literal['none', 'fp16'] = 'none'
    num_buckets: int = free_option(8, ABOVE_0, 'buckets')
    stall_limit_s: float = free_option(300.0, FROM_0, 's')
    start_limit_s: float = free_option(900.0, FROM_0, 's')
    eval_limit_s: float = free_option(300.0, FROM_0, 's')
    checkpoint_limit_s: float = free_option(900.0, FROM_0, 's')


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints from which a run can be resumed.

    Args:
        period_epochs: epochs between two checkpoints; 0 disables them. A stop request always writes
            one.
        period_steps: steps between two additional checkpoints; 0 disables them.
        period_s: seconds without a checkpoint after which an additional one is written; 0 disables
            these, and auto chooses them from the cost of a checkpoint and the faults so far.
        keep: number of newest checkpoints to keep.
    """

    period_epochs: int = free_option(1, FROM_0, 'epochs')
    period_steps: int = free_option(0, FROM_0, 'steps')
    period_s: float | Literal['auto'] = free_option(600.0, FROM_0, 's')
    keep: int = free_option(2, ABOVE_0, 'checkpoints')


def parse_trace(text: str | None) -> range:
    """Return the steps, counted from 1, of a value of run.trace, such as 20@100; none for None.
    Raise ConfigError."""
    m = re.fullmatch('([1-9][0-9]{0,3})@([1-9][0-9]{0,11})', text or '')
    refuse(
        text is not None and m is None,
        f'run.trace: got {text}, expected STEPS@FIRST, such as 20@100 for 20 steps '
        'from step 100 on, with at most 9,999 steps',
    )
    return range(int(m[2]), int(m[2]) + int(m[1])) if m else range(0)


def check_training(t: TrainConfig, s: ScheduleConfig, o: OptimizerConfig) -> None:
    refuse(
        t.local_batch_size is None and t.global_batch_size is None,
        'train.global_batch_size: got nothing; set --train.global_batch_size, such as 256, or '
        'give --config',
    )
    refuse(
        t.local_batch_size is not None and t.global_batch_size is not None,
        f'train: got local_batch_size={t.local_batch_size} and '
        f'global_batch_size={t.global_batch_size}, '
        'expected exactly one of them; set the other to null',
    )
    refuse(
        not 0 <= t.eval_offset < t.eval_period,
        f'train.eval_offset: got {t.eval_offset}, expected 0 to {t.eval_period - 1} '
        '(train.eval_period - 1)',
    )
    refuse(
        t.precision == 'float16' and t.device != 'gpu',
        'train.precision: got float16 with train.device=cpu, expected float32 or bfloat16 on a CPU',
    )
    refuse(
        t.precision == 'bfloat16' and t.device != 'cpu',
        'train.precision: got bfloat16 with train.device=gpu, expected float32 or float16 on a GPU',
    )
    refuse(
        s.warmup_epochs >= s.decay_epochs,
        f'schedule.warmup_epochs: got {s.warmup_epochs}, expected less than '
        f'decay_epochs={s.decay_epochs}',
    )
    refuse(
        o.nesterov and o.name != 'sgd',
        f'optimizer.nesterov: got true with optimizer.name={o.name}, expected false, or name=sgd',
    )
