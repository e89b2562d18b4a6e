"""Expected time of a planned run, from published systems with the same accelerator. Pure."""
from collections.abc import Iterator

from mlperf_rn50.analysis.predict.prediction import generation_of
from mlperf_rn50.analysis.recipe.choose import is_within, range_text
from mlperf_rn50.analysis.recipe.differences import (
    SIMILAR_BATCH,
    find_followed,
    followed_text,
    global_batch_size,
    is_imagenet,
)
from mlperf_rn50.analysis.sets.published import load_published
from mlperf_rn50.analysis.sets.run_set import RunSet, ratio
from mlperf_rn50.config import Config
from mlperf_rn50.mllog.run import IMAGENET_TRAIN
from mlperf_rn50.text import plural, span


def speeds_of(run_set: RunSet) -> list[float]:
    """Return the images per second and accelerator of each converged run, evaluations and start included."""
    return [IMAGENET_TRAIN * r.epochs_to_converge / r.time_to_train_s / run_set.num_accelerators
            for r in run_set.converged if run_set.num_accelerators and r.epochs_to_converge and r.time_to_train_s]


def render_outlook(config: Config, num_ranks: int, max_epochs: int, gpu: str | None) -> Iterator[str]:
    """Yield lines with the followed recipe and the expected time, if published systems are a guide.

    Args:
        gpu: name of this machine's GPU; None selects one that run.submission_platform names.
    """
    batch, followed = global_batch_size(config, num_ranks), find_followed(config, num_ranks)
    if not batch or not is_imagenet(config):
        return
    if followed:
        yield f'recipe                as {followed_text(followed, batch)}'
    num_units = -(-num_ranks // config.run.ranks_per_device)
    named = {generation_of(gpu)} if gpu else {*config.run.submission_platform.replace('-', ' ').upper().split()}
    similar = [(name, speeds, local) for s in load_published() if (name := generation_of(s.accelerator)) in named
               and (local := ratio(s.global_batch_size, s.num_accelerators))
               and is_within(local, batch / num_units, SIMILAR_BATCH) and (speeds := speeds_of(s))]
    if not similar or (config.train.device, config.train.precision) != ('gpu', 'float16'):
        return
    epochs = sorted(e for p in followed for e in p.epochs) or [max_epochs]
    speed = [v for _, speeds, _ in similar for v in speeds]
    name, images = similar[0][0], IMAGENET_TRAIN / num_units
    yield (f'time                  about {span(epochs[0] * images / max(speed), epochs[-1] * images / min(speed))} on '
           f'{num_units} {name} at {range_text([round(v) for v in speed])} images/s each '
           f'({plural(len(similar), "published system")} with {range_text([round(v[2]) for v in similar])} images per '
           f'{name}), if it takes {range_text(epochs)} epochs' + (', as these sets did' if followed else ''))
