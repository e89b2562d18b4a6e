"""Expected time of a planned run, from published systems with the same accelerator. Pure."""
from mlperf_rn50.analysis.predict.prediction import generation_of
from mlperf_rn50.analysis.recipe.choose import is_within, range_text
from mlperf_rn50.analysis.recipe.differences import SIMILAR_BATCH, find_followed, global_batch_size, is_imagenet
from mlperf_rn50.analysis.sets.published import load_published
from mlperf_rn50.analysis.sets.run_set import RunSet, ratio
from mlperf_rn50.config import Config
from mlperf_rn50.mllog.run import IMAGENET_TRAIN
from mlperf_rn50.text import plural, span


def speed_of(run_set: RunSet) -> float:
    """Return the images per second and accelerator of a set, evaluations and start included; 0 if unknown."""
    return IMAGENET_TRAIN * (ratio(ratio(run_set.scored_epochs_mean, run_set.time_s), run_set.num_accelerators) or 0)


def render_outlook(config: Config, num_ranks: int, max_epochs: int, gpu: str | None) -> list[str]:
    """Return a line with the expected time, if published systems are a guide.

    Args:
        gpu: name of this machine's GPU; None selects the one that run.submission_platform names.
    """
    batch, num_units = global_batch_size(config, num_ranks), -(-num_ranks // config.run.ranks_per_device)
    if not batch or not is_imagenet(config) or (config.train.device, config.train.precision) != ('gpu', 'float16'):
        return []
    name, images = generation_of(gpu or config.run.submission_platform), IMAGENET_TRAIN / num_units
    speeds = [speed for s in load_published() if generation_of(s.accelerator) == name and (speed := speed_of(s))
              and is_within(ratio(s.global_batch_size, s.num_accelerators), batch / num_units, SIMILAR_BATCH)]
    if not speeds:
        return []
    followed = find_followed(config, num_ranks)
    epochs = sorted(e for p in followed for e in p.epochs) or [max_epochs]
    source = followed and (f', as published {followed[0].generation} sets at batch '
                           f'{range_text([p.recipe.global_batch_size for p in followed])} did')
    return [f'time                  about {span(epochs[0] * images / max(speeds), epochs[-1] * images / min(speeds))} '
            f'on {num_units} {name} at {range_text([round(v) for v in speeds])} images/s each '
            f'({plural(len(speeds), "published system")}), if it takes {range_text(epochs)} epochs{source or ""}']
