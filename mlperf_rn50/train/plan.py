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
            data.num_train,
            rank,
            self.world_size,
            self.local_batch_size,
            self.config.train.gradient_accumulation_steps,
            self.nodes,
            data.node_rotation_epochs if data.shuffle == 'node' else None,
            data.last_batch == 'wrap',
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
        t, is_last = self.config.train, epoch == self.max_epochs - 1
        return (
            epoch % t.eval_period == t.eval_offset
            or is_last
            and self.config.run.submission_division == 'open'
        )

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
    configured = config_world_size(config)
    if configured not in (None, world_size):
        raise ConfigError(
            f'run.num_nodes x run.ranks_per_node: got {r.num_nodes} x {r.ranks_per_node} = '
            f'{configured} ranks, expected {world_size} as started; start {configured}, or set '
            'both to '
            'null'
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
                f'{passes} '
                f'({world_size} ranks x {t.gradient_accumulation_steps} accumulation steps), '
                f'such as {fit}'
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


def make_elastic_plan(config: Config, world_size: int, lr_batch_size: int) -> Plan:
    """Plan a resumed run with a number of ranks other than the configured one; raise ConfigError as
    make_plan does.

    A configured local batch size is kept. A configured global one is rounded down so that all ranks
    get equal parts, and the learning rate is proportional to the resulting global batch size.
    """
    train, passes = config.train, world_size * config.train.gradient_accumulation_steps
    if train.global_batch_size is not None and train.global_batch_size >= passes:
        train = replace(train, global_batch_size=train.global_batch_size // passes * passes)
    run = replace(config.run, num_nodes=None, ranks_per_node=None)
    plan = make_plan(replace(config, train=train, run=run), world_size)
    return replace(plan, config=config, lr_scale=plan.global_batch_size / lr_batch_size)


def resumed_step(plan: Plan, step: int, global_batch_size: int, has_same_nodes: bool = True) -> int:
    """Convert a step reached with a different global batch size to one of this plan, rounded down
    to skip no image."""
    num_train = plan.config.data.num_train
    epoch, step_in_epoch = divmod(step, -(-num_train // global_batch_size))
    # the image order has changed, so the epoch restarts
    if plan.config.data.shuffle == 'node' and not has_same_nodes:
        return epoch * plan.steps_per_epoch
    return (
        epoch * plan.steps_per_epoch + step_in_epoch * global_batch_size // plan.global_batch_size
    )


def config_world_size(config: Config) -> int | None:
    """Return the configured number of ranks; None if not configured."""
    if config.run.num_nodes is None or config.run.ranks_per_node is None:
        return None
    return config.run.num_nodes * config.run.ranks_per_node


def _render_rates(plan: Plan) -> str:
    """Return the learning rate at the ends of runs of epochs in which it rises, falls or is
    constant."""
    steps, texts = plan.steps_per_epoch, []
    rates = [
        (plan.learning_rate(e * steps), plan.learning_rate((e + 1) * steps - 1))
        for e in range(plan.max_epochs)
    ]
    for _, group in groupby(
        enumerate(rates, 1), lambda x: (x[1][0] < x[1][1], x[1][0] == x[1][1] and x[1])
    ):
        run = dict(group)
        ends = dict.fromkeys(f'{rate:.6g}' for rate in (run[min(run)][0], run[max(run)][1]))
        texts.append(
            f'{" to ".join(map(str, dict.fromkeys([min(run), max(run)])))}: {" .. ".join(ends)}'
        )
    return '; '.join(texts)


def render_plan(plan: Plan) -> str:
    """Return the plan as text."""
    c, train, val = plan.config, plan.train_shard(), plan.eval_shard()
    lines = [
        'data set              '
        f'{c.data.dataset}{" (synthetic images)" if c.data.synthetic else ""}: '
        f'{c.data.num_train:,} training, {c.data.num_val:,} validation images, '
        f'{c.data.num_classes} classes',
        f'ranks                 {plan.world_size}',
        f'local batch           {plan.local_batch_size} per rank and pass; passes per step: '
        f'{train.num_micro}',
        f'global batch          {plan.global_batch_size}',
        f'steps per epoch       {plan.steps_per_epoch}',
        *(
            [
                f'image sizes           {" ".join(map(str, sizes))} by epoch; evaluation '
                f'{c.data.eval_size or c.data.image_size}'
            ]
            if (sizes := c.data.sizes) or c.data.eval_size
            else []
        ),
        f'shuffle               {c.data.shuffle}: each node reads '
        + (
            'all images over time'
            if c.data.shuffle == 'global'
            else f'a part of the images, another one every {c.data.node_rotation_epochs} epochs'
        ),
        f'padded, per epoch     {train.num_padded} training positions (weight '
        f'{int(train.is_wrapped)}), '
        f'{val.num_padded} validation positions (not counted)',
        f'last step             learning rate x {plan.fraction(plan.steps_per_epoch - 1):.4g}, '
        'its filled part',
        f'target                Top-1 >= {c.train.target_accuracy} on {c.data.dataset}',
        f'aborts after          {plural(plan.max_epochs, "epoch")}, '
        f'{plan.max_epochs * plan.steps_per_epoch:,} steps',
        f'evaluated epochs      {some(plan.eval_epochs, 5)} (counted from 1)',
        f'learning rate         {_render_rates(plan)} (epochs: first step .. last step)',
    ]
    return '\n'.join(lines)
