"""Find the one-node set that a set on several nodes is predicted from, a second set of its machine,
and its ports.

Only with_network and network_of read files; all other functions are pure.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from mlperf_rn50.analysis.predict.prediction import FLOAT16_BYTES, Base, Layout, Link
from mlperf_rn50.analysis.run_data import load_run, load_run_config
from mlperf_rn50.analysis.sets.run_set import RunSet, generation_of, ratio
from mlperf_rn50.analysis.sets.time_parts import RunTimes
from mlperf_rn50.runfolder.names import run_of
from mlperf_rn50.runfolder.records import NetworkRecord

_SLOWEST_GBIT_S = 50.0  # minimum rate of described ports between nodes
# Networks, with numbers of trainable parameters (1000 classes) and of last-layer inputs.
_TABLE = """
    resnet18       11689512   512
    resnet34       21797672   512
    resnet50       25557032  2048
    resnet101      44549160  2048
    resnet152      60192808  2048
    alexnet        61100840  4096
    googlenet       6998552  1024
    inception_v3   23834568  2048
    inception_v4   42679816  1536
    vgg16         138357544  4096
    vgg19         143667240  4096
"""
_NETWORKS = {name: numbers for name, *numbers in map(str.split, _TABLE.strip().splitlines())}


def base_of(run_set: RunSet) -> Base | None:
    """Return a run set as a base, or None if the logs lack times, training images, nodes, or
    accelerators and ranks, or if the number of nodes changed during a run.

    If the epochs were not logged, the step is the mean over the whole run, evaluations and gaps
    included. If the first epoch was the shortest, epochs differ by chance, so the step is the mean
    over all of them, without a start.
    """
    batch, samples = run_set.global_batch_size, run_set.train_samples
    epochs, times = run_set.scored_epochs_mean, run_set.times
    if times is None:
        times = RunTimes((ratio(run_set.time_s, epochs) or 0.0), 0.0, 0.0)
    if not (run_set.has_recipe and run_set.num_nodes and run_set.num_units):
        return None
    if run_set.num_units < run_set.num_nodes:  # contradicting counts
        return None
    if run_set.has_changed_nodes:
        return None
    if not (batch and samples and times.epoch_s > 0):
        return None
    epoch_s, noise = times.epoch_s, 0.0
    if times.outside_s < 0 and epochs:
        noise = -times.outside_s / epochs / epoch_s
        epoch_s += times.outside_s / epochs
    return Base(
        name=run_set.name,
        source=run_set.source,
        num_nodes=run_set.num_nodes,
        num_units=run_set.num_units,
        has_accelerators=bool(run_set.num_accelerators),
        global_batch_size=batch,
        step_s=epoch_s * batch / samples,
        evaluation_s=times.evaluation_s,
        outside_s=max(times.outside_s, 0.0),
        train_samples=samples,
        dataset=run_set.other_dataset,
        run_set=run_set,
        generation=generation_of(run_set.accelerator),
        noise=noise,
    )


def num_parameters(network: str, num_classes: int) -> int:
    """Return the number of trained parameters, without those of data.pad_to_4_channels."""
    count, num_inputs = map(int, _NETWORKS[network])
    return count + (num_inputs + 1) * (num_classes - 1000)


def with_network(link: Link, run_set: RunSet) -> Link:
    """Return a link with the gradients of the network that the files of a set's last run name, if
    any do."""
    run = load_run(run_of(run_set.readable[-1].path))
    network, config = run.last(NetworkRecord), run.config
    if network:
        return replace(link, exchange_bytes=network.gradient_bytes, network=run.folder.metrics.name)
    if not config:
        return link if run_set.is_imagenet else replace(link, network='ResNet-50 assumed')
    name, classes = config.model.name, config.data.num_classes
    is_half = config.comm.compression == 'fp16' or config.train.precision == 'float16'
    return replace(
        link,
        exchange_bytes=(2 if is_half else 4) * num_parameters(name, classes),
        network=f'{name} with {classes:,} classes',
    )


def network_of(run_set: RunSet) -> str:
    """Return the network in the configuration of a set's last run; without one, ResNet-50."""
    config = load_run_config(run_of(run_set.readable[-1].path), ())
    return config.model.name if config else 'resnet50'


def link_of(run_set: RunSet) -> Link:
    """Return the described ports of a node. Slow ports are for management, so the rate is then
    unknown."""
    num_bytes = FLOAT16_BYTES
    if not run_set.num_accelerators:  # such ranks exchange float32
        num_bytes = 4 * num_parameters('resnet50', 1000)
    gbit_s = run_set.node_gbit_s
    if gbit_s is None or gbit_s < _SLOWEST_GBIT_S:
        return Link(None, num_bytes, 'unknown')
    return Link(gbit_s, num_bytes, 'the system description')


def organisation(run_set: RunSet) -> str:
    return (run_set.org or '').casefold()


def _accelerator(run_set: RunSet) -> str:
    """Return the name of the accelerator without vendor, power and form-factor version."""
    return re.sub(
        r'nvidia|tesla|\(.*?\)|[\s-]|(?<=sxm)\d', '', (run_set.accelerator or '').casefold()
    )


def is_machine(a: RunSet, b: RunSet) -> bool:
    """Return whether two sets are of one machine: equal round, organisation, data and kind of
    accelerator or node."""

    def machine(s: RunSet) -> tuple:
        name = _accelerator(s)
        return s.round, organisation(s), s.other_dataset, name or s.units_per_node

    return machine(a) == machine(b)


def most_local(base: Base, own: Iterable[RunSet], published: Iterable[RunSet]) -> float:
    """Return the most images per unit in a base, the sets `own` and published sets with its
    accelerator."""
    sets = list(own)
    if base.run_set and (name := _accelerator(base.run_set)):
        sets += [s for s in published if _accelerator(s) == name]
    known = [b for s in sets if (b := ratio(s.global_batch_size, s.num_units))]
    return max([base.local_batch_size, *base.steps, *known])


def _words(run_set: RunSet) -> frozenset[str]:
    """Return the words of a system's name, without a leading number of nodes."""
    return frozenset(re.findall('[a-z0-9]+', re.sub(r'^\d+ *x *', '', run_set.name.casefold())))


def _nearest(target: RunSet, local_batch_size: float, sets: Iterable[RunSet]) -> Base | None:
    """Return the set that is most similar to a target, by the criteria below in this order, or None
    without sets."""

    def distance(pair: tuple[RunSet, Base]) -> tuple:
        s, base = pair
        return (
            _accelerator(s) != _accelerator(target),
            s.units_per_node != target.units_per_node,
            abs(_round_number(s) - _round_number(target)),
            -len(_words(s) & _words(target)),
            s.recipe.opt_name != target.recipe.opt_name,
            abs(math.log(base.local_batch_size / local_batch_size)),
            -base.num_nodes,
            s.name,
        )

    bases = ((s, base) for s in sets if (base := base_of(s)))
    _, nearest = min(bases, key=distance, default=(None, None))
    return nearest


def one_node_base(target: RunSet, sets: Sequence[RunSet], is_own: bool = True) -> Base | None:
    """Return a one-node set of a target's machine or, if not is_own, another machine of its
    generation; else None."""
    generation = generation_of(target.accelerator)

    def is_usable(s: RunSet) -> bool:
        if s.num_nodes != 1 or is_machine(s, target) is not is_own:
            return False
        return is_own or s.is_imagenet and generation_of(s.accelerator) == generation != ''

    local_batch_size = target.recipe.global_batch_size / (target.num_units or 1)
    return _nearest(target, local_batch_size, filter(is_usable, sets))


def second_base(
    layout: Layout, base: Base, sets: Sequence[RunSet], target: RunSet | None = None
) -> Base | None:
    """Return a set of a one-node base's machine on several equal nodes, fewer than the layout has;
    else None."""
    own = base.run_set
    if own is None or base.num_nodes > 1 or base.is_scaled or not base.has_accelerators:
        return None
    smaller = (
        s
        for s in sets
        if 1 < (s.num_nodes or 0) < layout.num_nodes
        and is_machine(s, own)
        and s.units_per_node == base.num_units
    )
    return _nearest(target or own, layout.local_batch_size, smaller)


def _round_number(run_set: RunSet) -> float:
    found = re.fullmatch(r'v(\d\.\d)', run_set.round)
    return float(found[1]) if found else 0.0


def lacks_schedule(run_set: RunSet | None) -> bool:
    """Return whether a set's logs declare no schedule, as in v0.5, whose software differs from that
    of other sets."""
    return (
        run_set is not None
        and run_set.is_imagenet
        and (run_set.recipe.decay is None or 'decay' in run_set.unlogged)
    )


def is_early(run_set: RunSet) -> bool:
    """Return whether a set is of a round before v1.0, with the software of that time."""
    return 0.0 < _round_number(run_set) < 1.0
