"""Plan of a run for a number of ranks: batches, steps and evaluations. Pure."""

from dataclasses import dataclass, replace
from itertools import groupby

from mlperf_rn50.config import Config
from mlperf_rn50.data.shards import Shard
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.text import plural, some
from mlperf_rn50.train.schedule import learning_rate


@dataclass(frozen=True)
class Plan:
    """Sizes and counts of a run, as computed by make_plan; lr_scale: factor on the scheduled
    learning rate.

    nodes: node number of every rank, counted from 0; empty if the nodes are unknown.
    """

    config: Config
    world_size: int
    local_batch_size: int
    eval_batch_size: int
    max_epochs: int
    lr_scale: float = 1.0
    nodes: tuple[int, ...] = ()

    def train_shard(self, rank: int = 0) -> Shard:
        data = self.config.data
        return Shard(
            num_samples=data.num_train,
            rank=rank,
            world_size=self.world_size,
            local_batch_size=self.local_batch_size,
            num_micro=self.config.train.gradient_accumulation_steps,
            nodes=self.nodes,
            rotation_epochs=data.node_rotation_epochs if data.shuffle == 'node' else None,
            is_wrapped=data.last_batch == 'wrap',
        )

    def eval_shard(self, rank: int = 0) -> Shard:
        return Shard(self.config.data.num_val, rank, self.world_size, self.eval_batch_size)

    @property
    def global_batch_size(self) -> int:
        """Images per optimizer step over all ranks."""
        return self.train_shard().global_batch_size

    @property
    def steps_per_epoch(self) -> int:
        return self.train_shard().steps_per_epoch

    @property
    def loss_weight(self) -> float:
        """Weight of an image in the loss of a rank, which is the mean over the rank's images of a
        step."""
        return 1 / (self.local_batch_size * self.config.train.gradient_accumulation_steps)

    def fraction(self, step_in_epoch: int) -> float:
        """Return the filled fraction of a global batch, below 1 only in the last step of an epoch.

        The optimizer applies the scheduled learning rate times this fraction.
        """
        return self.train_shard().num_valid_global(step_in_epoch) / self.global_batch_size

    @property
    def decay_steps(self) -> int:
        """Steps from the end of the warm-up to the end of the schedule."""
        s = self.config.schedule
        return round((s.decay_epochs - s.warmup_epochs) * self.steps_per_epoch)

    def learning_rate(self, step: int) -> float:
        """Return the scheduled learning rate of a step of the run."""
        return self.lr_scale * learning_rate(self.config.schedule, step, self.steps_per_epoch)

    def is_eval_epoch(self, epoch: int) -> bool:
        """Check whether an epoch, counted from 0, ends with an evaluation; the last one does in the
        open division."""
        t = self.config.train
        if epoch == self.max_epochs - 1 and self.config.run.submission_division == 'open':
            return True
        return epoch % t.eval_period == t.eval_offset

    @property
    def eval_epochs(self) -> list[int]:
        """Epochs that end with an evaluation, counted from 1."""
        return [e + 1 for e in range(self.max_epochs) if self.is_eval_epoch(e)]

    def block_epochs(self, epoch: int) -> int:
        """Return the number of epochs from an epoch, counted from 0, to the next evaluation or the
        end of the run."""
        last = self.max_epochs - 1
        return next((e for e in range(epoch, last) if self.is_eval_epoch(e)), last) - epoch + 1


def make_plan(config: Config, world_size: int) -> Plan:
    """Return the plan for a number of ranks; raise ConfigError if the configuration does not fit
    that number."""
    t, r = config.train, config.run
    configured = config.world_size
    if configured not in (None, world_size):
        raise ConfigError(
            f'run.num_nodes x run.ranks_per_node: got {r.num_nodes} x {r.ranks_per_node} = '
            f'{configured} ranks, expected {world_size} as started; start {configured}, or set '
            'both to null'
        )
    local = t.local_batch_size
    if local is None:
        assert t.global_batch_size is not None  # check_values requires exactly one of the two sizes
        passes = world_size * t.gradient_accumulation_steps
        local, rest = divmod(t.global_batch_size, passes)
        if rest or not local:
            fit = max(1, round(t.global_batch_size / passes)) * passes
            raise ConfigError(
                f'train.global_batch_size: got {t.global_batch_size}, expected a multiple of '
                f'{passes} ({world_size} ranks x {t.gradient_accumulation_steps} accumulation '
                f'steps), such as {fit}'
            )
    max_epochs = config.num_epochs
    if r.submission_division == 'closed' and max_epochs <= t.eval_offset:
        raise ConfigError(
            f'train.max_epochs: got {max_epochs}, expected at least {t.eval_offset + 1} '
            '(train.eval_offset + 1), because the closed division evaluates no other epoch; raise '
            'it'
        )
    eval_batch_size = min(t.eval_batch_size or local, -(-config.data.num_val // world_size))
    return Plan(config, world_size, local, eval_batch_size, max_epochs)


def fit_batch(config: Config, world_size: int) -> Config:
    """Return a configuration whose global batch size, if configured, is rounded down so that all
    ranks get equal parts."""
    train, passes = config.train, world_size * config.train.gradient_accumulation_steps
    if train.global_batch_size is None or train.global_batch_size < passes:
        return config
    batch = train.global_batch_size // passes * passes
    return replace(config, train=replace(train, global_batch_size=batch))


def make_elastic_plan(config: Config, world_size: int, lr_batch_size: int) -> Plan:
    """Plan a resumed run with a number of ranks other than the configured one; raise ConfigError as
    make_plan does.

    A configured local batch size is kept. A configured global one is rounded down so that all ranks
    get equal parts, and the learning rate is proportional to the resulting global batch size.
    """
    run = replace(config.run, num_nodes=None, ranks_per_node=None)
    plan = make_plan(replace(fit_batch(config, world_size), run=run), world_size)
    return replace(plan, config=config, lr_scale=plan.global_batch_size / lr_batch_size)


def resumed_step(plan: Plan, step: int, global_batch_size: int, has_same_nodes: bool = True) -> int:
    """Convert a step reached with a different global batch size to one of this plan, rounded down
    to skip no image."""
    num_train = plan.config.data.num_train
    epoch, step_in_epoch = divmod(step, -(-num_train // global_batch_size))
    # the image order has changed, so the epoch restarts
    if plan.config.data.shuffle == 'node' and not has_same_nodes:
        step_in_epoch = 0
    num_images = step_in_epoch * global_batch_size
    return epoch * plan.steps_per_epoch + num_images // plan.global_batch_size


def rate_world_size(config: Config, world_size: int, is_elastic: bool) -> int:
    """Return the number of ranks for which the learning rate is configured, which an elastic run
    scales for the started ones."""
    configured = config.world_size if is_elastic else None
    return configured or world_size


def _render_rates(plan: Plan) -> str:
    """Return the learning rates of the first and the last step of each range of epochs in which
    they rise, fall or are constant."""
    steps = plan.steps_per_epoch

    def ends_of(first: int, last: int) -> tuple[float, float]:
        return plan.learning_rate(first * steps), plan.learning_rate((last + 1) * steps - 1)

    def trend(epoch: int) -> object:
        start, end = ends_of(epoch, epoch)
        return (start, end) if start == end else start < end

    texts = []
    for _, group in groupby(range(plan.max_epochs), trend):
        epochs = list(group)
        first, last = epochs[0], epochs[-1]
        numbers = f'{first + 1}' if first == last else f'{first + 1} to {last + 1}'
        start, end = (f'{rate:.6g}' for rate in ends_of(first, last))
        texts.append(f'{numbers}: {start if start == end else f"{start} .. {end}"}')
    return '; '.join(texts)


def render_plan(plan: Plan) -> str:
    """Return the plan as text."""
    d, train, val = plan.config.data, plan.train_shard(), plan.eval_shard()
    name = f'{d.dataset} (synthetic images)' if d.synthetic else d.dataset
    part = 'all images over time'
    if d.shuffle == 'node':
        part = f'a part of the images, another one every {d.node_rotation_epochs} epochs'
    sizes = f'{" ".join(map(str, d.sizes))} by epoch; evaluation {d.eval_size or d.image_size}'
    num_steps = f'{plan.max_epochs * plan.steps_per_epoch:,} steps'
    rows = {
        'data set': f'{name}: {d.num_train:,} training, {d.num_val:,} validation images, '
        f'{d.num_classes} classes',
        'ranks': plan.world_size,
        'local batch': f'{plan.local_batch_size} per rank and pass; passes per step: '
        f'{train.num_micro}',
        'global batch': plan.global_batch_size,
        'steps per epoch': plan.steps_per_epoch,
        'image sizes': sizes if d.sizes or d.eval_size else None,
        'shuffle': f'{d.shuffle}: each node reads {part}',
        'padded, per epoch': f'{train.num_padded} training positions (weight '
        f'{int(train.is_wrapped)}), {val.num_padded} validation positions (not counted)',
        'last step': f'learning rate x {plan.fraction(plan.steps_per_epoch - 1):.4g}, its filled '
        'part',
        'target': f'Top-1 >= {plan.config.train.target_accuracy} on {d.dataset}',
        'aborts after': f'{plural(plan.max_epochs, "epoch")}, {num_steps}',
        'evaluated epochs': f'{some(plan.eval_epochs, 5)} (counted from 1)',
        'learning rate': f'{_render_rates(plan)} (epochs: first step .. last step)',
    }
    return '\n'.join(f'{key:22}{text}' for key, text in rows.items() if text is not None)
