"""Find the one-node set that a set on several nodes is predicted from, and a second set of the machine. Pure functions.

Sets are of one machine if they share the round, the organisation, the kind of accelerator and the data.
"""
import math
import re
from collections.abc import Iterable, Sequence

from mlperf_rn50.analysis.predict.prediction import FLOAT16_BYTES, Base, Layout, Link, generation_of
from mlperf_rn50.analysis.sets.run_set import RunSet

_SLOWEST_GBIT_S = 50.0  # of described ports between nodes with accelerators


def base_of(run_set: RunSet) -> Base | None:
    """Return a run set as a base; None if the logs lack nodes, accelerators or ranks, times or the size of the data.

    If the epochs were not logged, the step is the mean over the whole run, evaluations and gaps included.
    """
    step_s, times, batch, samples = run_set.step_s, run_set.times, run_set.global_batch_size, run_set.train_samples
    evaluation_s, outside_s = (times.evaluation_s, times.outside_s) if times else (0.0, 0.0)
    if not step_s and run_set.time_s and run_set.scored_epochs_mean and batch and samples:
        step_s = run_set.time_s / run_set.scored_epochs_mean * batch / samples
    if not run_set.num_nodes or not run_set.num_units or not step_s or not samples or not run_set.has_recipe:
        return None
    return Base(run_set.name, run_set.source, run_set.num_nodes, run_set.num_units, bool(run_set.num_accelerators),
                run_set.recipe.global_batch_size, step_s, evaluation_s, outside_s, samples, run_set.other_dataset,
                run_set, run_set.accelerator)


def layout_of(run_set: RunSet) -> Layout | None:
    """Return the layout of a run set; None if the logs lack it or the nodes differ in size."""
    if not run_set.num_nodes or not run_set.num_units or run_set.num_units % run_set.num_nodes:
        return None
    return Layout(run_set.num_nodes, run_set.num_units // run_set.num_nodes, run_set.recipe)


def link_of(run_set: RunSet) -> Link:
    """Return the ports by the system description, for gradients of 2 bytes; slow ports are for management only."""
    gbit_s = run_set.node_gbit_s if (run_set.node_gbit_s or 0.0) >= _SLOWEST_GBIT_S else None
    return Link(gbit_s, FLOAT16_BYTES, 'the system description' if gbit_s else 'unknown')


def organisation(run_set: RunSet) -> str:
    return (run_set.org or '').casefold()


def _kind(run_set: RunSet) -> str:
    """Return the name of the accelerator without vendor, power and form version."""
    return re.sub(r'nvidia|tesla|\(.*?\)|[\s-]|(?<=sxm)\d', '', (run_set.accelerator or '').casefold())


def is_machine(a: RunSet, b: RunSet) -> bool:
    """Return whether two sets are of one machine; of machines without named accelerators, the nodes must be equal."""
    return (a.round == b.round and organisation(a) == organisation(b) and a.other_dataset == b.other_dataset
            and _kind(a) == _kind(b) and (bool(_kind(a)) or _per_node(a) == _per_node(b)))


def _per_node(run_set: RunSet) -> float:
    return (run_set.num_units or 0) / (run_set.num_nodes or 1)


def _local(run_set: RunSet) -> float:
    return run_set.recipe.global_batch_size / (run_set.num_units or 1)


def _words(run_set: RunSet) -> frozenset[str]:
    """Return the words of a system's name, without a leading number of nodes."""
    return frozenset(re.findall('[a-z0-9]+', re.sub(r'^\d+ *x *', '', run_set.name.casefold())))


def likeness(a: RunSet, b: RunSet) -> float:
    """Return the share of words that two system names have in common."""
    return len(_words(a) & _words(b)) / (len(_words(a) | _words(b)) or 1)


def _distance(a: RunSet, target: RunSet) -> tuple:
    """Return a sort key: nodes of equal size, most similar name, same optimizer, nearest local batch."""
    return (_per_node(a) != _per_node(target), -len(_words(a) & _words(target)),
            a.recipe.opt_name != target.recipe.opt_name, abs(math.log(_local(a) / _local(target))), a.name)


def _bases(sets: Iterable[RunSet]) -> list[tuple[RunSet, Base]]:
    return [(s, base) for s in sets if s.num_nodes == 1 and (base := base_of(s))]


def own_base(target: RunSet, sets: Sequence[RunSet]) -> Base | None:
    """Return the one-node set of a target's machine as a base; None if there is none."""
    found = _bases(s for s in sets if is_machine(s, target))
    return min(found, key=lambda pair: _distance(pair[0], target), default=(None, None))[1]


def other_base(target: RunSet, sets: Sequence[RunSet]) -> Base | None:
    """Return a one-node set of another machine with the same generation of accelerator; None if there is none."""
    generation = generation_of(target.accelerator)
    found = _bases(s for s in sets if generation and generation_of(s.accelerator) == generation
                   and not is_machine(s, target) and s.is_imagenet)
    return min(found, key=lambda pair: (
        _kind(pair[0]) != _kind(target), _per_node(pair[0]) != _per_node(target),
        abs(_round_number(pair[0]) - _round_number(target)), *_distance(pair[0], target)[2:]), default=(None, None))[1]


def _round_number(run_set: RunSet) -> float:
    found = re.fullmatch(r'v(\d\.\d)', run_set.round)
    return float(found[1]) if found else 0.0


def logs_schedule(run_set: RunSet) -> bool:
    return run_set.recipe.decay is not None and 'decay' not in run_set.unlogged


def is_early(run_set: RunSet) -> bool:
    """Return whether a set is of a round before v1.0, with the software of that time."""
    return 0.0 < _round_number(run_set) < 1.0


def second_set(layout: Layout, base: Base, sets: Sequence[RunSet], like: RunSet) -> RunSet | None:
    """Return the set of the base's machine on several but fewer nodes than a layout; None if there is none.

    Of several, return the one whose name is most similar to that of a set, with the nearest local batch. Sets whose
    nodes differ in size from the base's do not count.
    """
    own = base.run_set
    found = [s for s in sets if own and 1 < (s.num_nodes or 0) < layout.num_nodes and is_machine(s, own) and base_of(s)
             and _per_node(s) == base.num_units / base.num_nodes]
    return min(found, key=lambda s: (-round(likeness(s, like), 2), abs(math.log(_local(s) / layout.local_batch_size)),
                                     -(s.num_nodes or 0), s.name), default=None)
