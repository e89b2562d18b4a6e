"""Writer of the log of a run: all events that the rules require, in the formats of all rounds.

Only rank 0 writes. The official libraries mlperf-logging (:::MLLOG) and mlperf-compliance
(:::MLPv0.5.0) write to one file. 0.6.0 lines (:::MLL) go to a second file, because the 0.6.0
checker rejects the other lines. Methods take epoch numbers that start at 0, and convert them for
each format.

The time of a line is the wall clock at the opening of the log plus the monotonic time since then,
so that a change of the wall clock does not change the result. The rules permit this: a result is "a
wall-clock timing measurement for a contiguous period", whose clock "may not be paused" (MLPerf
training rules, Run Results), and a line has "milliseconds since unix epoch" (mlperf-logging).
"""

import logging
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlperf_rn50
from mlperf_rn50.config import Config, for_evaluation, open_values
from mlperf_rn50.data.options import IMAGENET
from mlperf_rn50.files import LineFile, LineHandler
from mlperf_rn50.mllog import events

# If this variable is set at import, the v0.5 package writes lines with a value only to the file
# named there.
os.environ.pop('COMPLIANCE_FILE', None)

from mlperf_compliance import mlperf_log as v05  # noqa: E402
from mlperf_compliance import tags  # noqa: E402
from mlperf_logging.mllog import constants as keys  # noqa: E402
from mlperf_logging.mllog.mllog import MLLogger  # noqa: E402

_ROOT = re.escape(str(Path(mlperf_rn50.__file__).parent.parent))
# stack frames between the function that encodes a line and the caller of a RunLog method
_DEPTH = 3


def _make_logger(name: str, sink: logging.Handler) -> logging.Logger:
    """Return a logger that writes only to the sink."""
    logger = logging.getLogger(name)
    logger.handlers[:] = [sink]
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    return logger


class RunLog:
    """The log of a run; with v06_path None, without :::MLL."""

    def __init__(self, path: Path, v06_path: Path | None, is_resumed: bool = False):
        """Create files (FileExistsError if one exists) or, if is_resumed, open them. Raise
        StorageError on failure."""
        self._sink = LineHandler(path, not is_resumed)
        self._v06 = LineFile(v06_path, not is_resumed) if v06_path else None
        self._mllog = MLLogger(
            _make_logger('mlperf_rn50.mllog', self._sink),
            root_dir=_ROOT,
            default_stack_offset=_DEPTH,
        )
        _make_logger('mlperf_compliance', self._sink)
        v05.ROOT_DIR_RESNET = _ROOT
        self._opened_s = time.time() - time.monotonic()
        self._time_s, self._is_converged = 0.0, False
        v05.time = self  # the package calls time.time() for each line

    def close(self) -> None:
        self._sink.close()
        if self._v06:
            self._v06.close()

    def set_time(self, now_s: float) -> None:
        """Continue at a time since 1970; the wall clock may have been set since run_start."""
        self._opened_s = now_s - time.monotonic()

    def time(self) -> float:
        """Return the time of the next line since 1970: now or, from run_stop with success on, that
        of the last line."""
        self._time_s = self._time_s if self._is_converged else self._opened_s + time.monotonic()
        return self._time_s

    def _event(
        self, key: str, value: Any = None, now: float | None = None, **metadata: Any
    ) -> None:
        """Write an event as an MLLOG line, and as a 0.6.0 line if the run has a 0.6.0 log."""
        now = self.time() if now is None else now
        writers = {'start': self._mllog.start, 'stop': self._mllog.end}
        write = writers.get(key.rpartition('_')[2], self._mllog.event)
        write(key, value, metadata, time_ms=int(now * 1000))
        self._event_v06(key, value, metadata, now)

    def _event_v06(self, key: str, value: Any, metadata: dict[str, Any], now: float) -> None:
        if self._v06:
            event = events.LogEvent('MLL', key, now, value=value, metadata=metadata)
            self._v06.write(events.encode_v06(event))

    def _tag(self, tag: str, value: Any = None) -> None:
        v05.resnet_print(tag, value, stack_offset=_DEPTH)

    def submission(self, config: Config) -> None:
        """Log the benchmark, and the submitter, division, status and platform of the submission."""
        run = config.run
        benchmark = keys.RESNET if config.model.name.startswith(keys.RESNET) else config.model.name
        for key, value in {
            keys.SUBMISSION_BENCHMARK: benchmark,
            keys.SUBMISSION_ORG: run.submission_org,
            keys.SUBMISSION_DIVISION: run.submission_division,
            keys.SUBMISSION_STATUS: run.submission_status,
            keys.SUBMISSION_PLATFORM: run.submission_platform,
        }.items():
            self._event(key, value)
        # other rounds do not have these keys, and publish no name of a person
        self._event_v06(keys.SUBMISSION_POC_NAME, run.submission_poc_name, {}, self.time())
        self._event_v06(keys.SUBMISSION_ENTRY, run.submission_platform, {}, self.time())

    def cache_clear(self, was_done: bool, reason: str) -> None:
        """Log whether the page cache was flushed on every node, and how or why not."""
        self._event(keys.CACHE_CLEAR, was_done, reason=reason)
        self._tag(tags.RUN_CLEAR_CACHES, was_done)

    def init_start(self) -> None:
        """Log the start of initialization, before the model is built. The clock of v0.5 starts
        here."""
        self._event(keys.INIT_START)
        self._tag(tags.RUN_START)

    def seed(self, seed: int) -> None:
        self._event(keys.SEED, seed)
        self._tag(tags.RUN_SET_RANDOM_SEED, seed)

    def hyperparameters(
        self,
        config: Config,
        global_batch_size: int,
        local_batch_size: int,
        decay_steps: int,
        warmup_steps: int,
        last_step_lr_factor: float,
    ) -> None:
        """Log the batch size, the optimizer and the schedule, under the keys for this optimizer."""
        o, s, t = config.optimizer, config.schedule, config.train
        values: dict[str, Any] = {
            keys.GLOBAL_BATCH_SIZE: global_batch_size,
            keys.MODEL_BN_SPAN: local_batch_size,
            keys.GRADIENT_ACCUMULATION_STEPS: t.gradient_accumulation_steps,
            events.TARGET_ACCURACY: t.target_accuracy,
            events.LAST_STEP_LR_FACTOR: last_step_lr_factor,
            keys.OPT_NAME: o.name,
            keys.OPT_BASE_LR: s.base_lr,
            keys.OPT_LR_WARMUP_EPOCHS: s.warmup_epochs,
            f'{o.name}_opt_base_learning_rate': s.base_lr,
            f'{o.name}_opt_weight_decay': o.weight_decay,
            f'{o.name}_opt_momentum': o.momentum,
        }
        # closed forbids Nesterov momentum
        if o.name == 'sgd' and config.run.submission_division == 'open':
            values[events.SGD_NESTEROV] = o.nesterov
        values[f'{o.name}_opt_learning_rate_decay_steps'] = decay_steps
        if s.decay != 'step':
            values[f'{o.name}_opt_end_learning_rate'] = s.end_lr
        if s.decay == 'poly':
            values[f'{o.name}_opt_learning_rate_decay_poly_power'] = s.poly_power
        if o.name == keys.LARS:
            values[keys.LARS_EPSILON] = o.lars_epsilon
            values[keys.LARS_OPT_LEARNING_RATE_WARMUP_EPOCHS] = s.warmup_epochs
        if s.decay == 'step':
            values[keys.OPT_LR_DECAY_BOUNDARY_EPOCHS] = list(s.step_epochs)
            values[keys.OPT_LR_DECAY_FACTOR] = s.step_factor
        if s.decay != 'poly':
            values[events.LR_DECAY] = s.decay
        for key, value in values.items():
            self._event(key, value)
        self.open_options(config)
        momentum = 'Nesterov Momentum' if o.nesterov else 'Momentum'
        optimizer = 'LARS' if o.name == keys.LARS else f'SGD with {momentum}'
        for tag, value in {
            tags.INPUT_BATCH_SIZE: local_batch_size,
            tags.OPT_NAME: optimizer,
            tags.OPT_LR: s.base_lr,
            tags.OPT_LR_WARMUP_STEPS: warmup_steps,
            tags.OPT_MOMENTUM: o.momentum,
            tags.MODEL_L2_REGULARIZATION: o.weight_decay,
            tags.MODEL_EXCLUDE_BN_FROM_L2: not o.decay_bn_and_bias,
        }.items():
            self._tag(tag, value)

    def open_options(self, config: Config) -> None:
        """Log the options that only the open division permits, if any differs from its default."""
        if options := open_values(config):
            self._event(events.OPEN_OPTIONS, options)

    def model(self, description: Sequence[tuple[str, Any]], tensor_names: Sequence[str]) -> None:
        """Log the network, given as (v0.5 tag, value) layer by layer, and the name of every
        initialized tensor."""
        for tag, value in description:
            self._tag(tag, value)
        self._tag(tags.MODEL_HP_LOSS_FN, 'categorical_cross_entropy')
        for name in tensor_names:
            self._event(keys.WEIGHTS_INITIALIZATION, None, tensor=name)

    def initial_weights(self, source: str, notes: Sequence[str]) -> None:
        """Log that the weights were loaded instead of drawn at random, which only the open division
        permits."""
        self._event(events.INITIAL_WEIGHTS, source, notes=list(notes))

    def init_stop(self) -> None:
        """Log the end of initialization, before any access to the data."""
        self._event(keys.INIT_STOP)

    def run_start(self) -> None:
        self._event(keys.RUN_START)

    def run_resumed(self, step: int, epoch: int, clock_s: float, **plan: Any) -> None:
        """Log a resume from a checkpoint that covers clock_s of training. plan: other metadata
        (RUN_RESUMED)."""
        self._event(
            events.RUN_RESUMED,
            step,
            epoch_num=epoch + 1,
            clock_s=clock_s,
            submittable=False,
            **plan,
        )

    def data(self, config: Config, num_ranks: int, num_nodes: int) -> None:
        """Log the data set, its augmentation and order, and the number of ranks and nodes."""
        d, t = for_evaluation(config).data, config.train
        shuffle: dict[str, Any] = {'shuffle': d.shuffle}
        if d.shuffle == 'node':
            shuffle['node_rotation_epochs'] = d.node_rotation_epochs
        if d.mirror != 'random':
            shuffle['mirror'] = d.mirror
        self._event(
            events.DATASET,
            d.dataset,
            is_imagenet=d.dataset == IMAGENET and not d.synthetic,
            synthetic=d.synthetic,
            **shuffle,
        )
        per_device = num_nodes * config.run.ranks_per_device
        per_node = -(-num_ranks // per_device) if t.device == 'gpu' else 0
        for key, count in {
            events.NUM_RANKS: num_ranks,
            events.NUM_NODES: num_nodes,
            events.ACCELERATORS_PER_NODE: per_node,
            keys.TRAIN_SAMPLES: d.num_train,
            keys.EVAL_SAMPLES: d.num_val,
        }.items():
            self._event(key, count)
        order = 'a new global permutation every epoch'
        if d.shuffle == 'node':
            order = (
                'each node permutes its part of the images every epoch, and gets a new part every '
                f'{d.node_rotation_epochs} epochs'
            )
        crop = {}
        if d.crop == 'random_resized':
            crop[tags.INPUT_DISTORTED_CROP_RATIO_RANGE] = [d.min_aspect, d.max_aspect]
            crop[tags.INPUT_DISTORTED_CROP_AREA_RANGE] = [d.min_area, d.max_area]
        for tag, value in {
            tags.PREPROC_NUM_TRAIN_EXAMPLES: d.num_train,
            tags.PREPROC_NUM_EVAL_EXAMPLES: d.num_val,
            tags.INPUT_SIZE: d.num_train,
            tags.INPUT_ORDER: order,
            tags.INPUT_SHARD: num_ranks,
            tags.INPUT_CENTRAL_CROP: d.resize_shorter > d.image_size,
            **crop,
            tags.INPUT_MEAN_SUBTRACTION: list(d.mean),
            tags.INPUT_RANDOM_FLIP: d.mirror_probability,
            tags.INPUT_RESIZE: {'shorter_side': d.resize_shorter, 'crop': d.image_size},
            tags.INPUT_RESIZE_ASPECT_PRESERVING: True,
            tags.EVAL_EPOCH_OFFSET: t.eval_offset,
            tags.EVAL_SIZE: d.num_val,
            tags.EVAL_TARGET: t.target_accuracy,
            tags.TRAIN_LOOP: None,
        }.items():
            self._tag(tag, value)

    def block_start(self, epoch: int, num_epochs: int) -> None:
        self._event(keys.BLOCK_START, first_epoch_num=epoch + 1, epoch_count=num_epochs)

    def block_stop(self, epoch: int) -> None:
        """Log the end of the block whose first epoch is given."""
        self._event(keys.BLOCK_STOP, first_epoch_num=epoch + 1)

    def epoch_start(self, epoch: int) -> None:
        self._event(keys.EPOCH_START, epoch_num=epoch + 1)
        self._tag(tags.TRAIN_EPOCH, epoch)

    def epoch_stop(self, epoch: int, images_per_s: float, learning_rate: float) -> None:
        """Log the end of an epoch, its throughput over all ranks and the learning rate scheduled
        for its last step."""
        self._event(keys.EPOCH_STOP, epoch_num=epoch + 1)
        self._event(
            events.TRACKED_STATS,
            {'throughput': float(images_per_s), 'learning_rate': float(learning_rate)},
            epoch_num=epoch + 1,
        )

    def clock_step(self, host: str, step_s: float) -> None:
        # a run that has converged ends at the time of the line before
        self._event(events.CLOCK_STEP, round(step_s, 3), self._time_s, host=host)

    def loss_scale(self, step: int, value: float) -> None:
        self._event(events.LOSS_SCALE, value, step=step)

    def eval_start(self, epoch: int) -> None:
        self._event(keys.EVAL_START, epoch_num=epoch + 1)
        self._tag(tags.EVAL_START, epoch)

    def eval_stop(self, epoch: int, top1: float) -> None:
        """Log the end of an evaluation, and its Top-1 as a fraction of the whole validation set."""
        self._event(keys.EVAL_ACCURACY, float(top1), epoch_num=epoch + 1)
        self._event(keys.EVAL_STOP, epoch_num=epoch + 1)
        self._tag(tags.EVAL_ACCURACY, {'epoch': epoch, 'value': float(top1)})
        self._tag(tags.EVAL_STOP, epoch)

    def run_stop(self, reason: str, elapsed_parts: dict[str, float] | None = None) -> None:
        """Log the end of the run. reason: aborted, interrupted, failed or, at the time of the last
        line, converged.

        elapsed_parts: parts of the time to train of a resumed run, in seconds.
        """
        self._is_converged = reason == 'converged'
        status = keys.SUCCESS if self._is_converged else keys.ABORTED
        parts: dict[str, Any] = {'elapsed_parts': elapsed_parts} if elapsed_parts else {}
        self._event(keys.RUN_STOP, status=status, reason=reason, **parts)
        self._tag(tags.RUN_STOP, {'success': self._is_converged})
        self._time_s += 1e-6  # the official checker of v0.5 sorts lines by time, then by name
        self._tag(tags.RUN_FINAL)
