"""Find the one-node set that a set on several nodes is predicted from, and a second set of its machine. Pure."""
import math
import re
from collections.abc import Sequence

from mlperf_rn50.analysis.predict.prediction import FLOAT16_BYTES, Base, Layout, Link, generation_of
from mlperf_rn50.analysis.sets.run_set import RunSet

_SLOWEST_GBIT_S = 50.0  # minimum rate of described ports between nodes with accelerators


def base_of(run_set: RunSet) -> Base | None:
    """Return a run set as a base; None if the logs lack times, the data size, or the number of nodes or units.

    If the epochs were not logged, the step is the mean over the whole run, evaluations and gaps included.
    """
    step_s, times, batch, samples = run_set.step_s, run_set.times, run_set.global_batch_size, run_set.train_samples
    if not run_set.has_recipe or not run_set.num_nodes or not run_set.num_units or not batch or not samples:
        return None
    if not step_s and run_set.time_s and run_set.scored_epochs_mean:
        step_s = run_set.time_s / run_set.scored_epochs_mean * batch / samples
    return Base(run_set.name, run_set.source, run_set.num_nodes, run_set.num_units, bool(run_set.num_accelerators),
                batch, step_s, times.evaluation_s if times else 0.0, times.outside_s if times else 0.0, samples,
                run_set.other_dataset, run_set, generation_of(run_set.accelerator)) if step_s else None


def link_of(run_set: RunSet | None, num_bytes: int = FLOAT16_BYTES) -> Link:
    """Return the ports by the system description; slow ports are for management only."""
    gbit_s = run_set.node_gbit_s if run_set else None
    is_known = gbit_s is not None and gbit_s >= _SLOWEST_GBIT_S
    return Link(gbit_s if is_known else None, num_bytes, 'the system description' if is_known else 'unknown')


def organisation(run_set: RunSet) -> str:
    return (run_set.org or '').casefold()


def _kind(run_set: RunSet) -> str:
    """Return the name of the accelerator without vendor, power and form-factor version."""
    return re.sub(r'nvidia|tesla|\(.*?\)|[\s-]|(?<=sxm)\d', '', (run_set.accelerator or '').casefold())


def is_machine(a: RunSet, b: RunSet) -> bool:
    """Return whether two sets are of one machine: equal round, organisation, data and kind of accelerator or node."""
    return (a.round == b.round and organisation(a) == organisation(b) and a.other_dataset == b.other_dataset
            and _kind(a) == _kind(b) and (bool(_kind(a)) or _per_node(a) == _per_node(b)))


def _per_node(run_set: RunSet) -> float:
    return (run_set.num_units or 0) / (run_set.num_nodes or 1)


def _batch_distance(run_set: RunSet, local_batch_size: float) -> float:
    return abs(math.log(run_set.recipe.global_batch_size / (run_set.num_units or 1) / local_batch_size))


def _words(run_set: RunSet) -> frozenset[str]:
    """Return the words of a system's name, without a leading number of nodes."""
    return frozenset(re.findall('[a-z0-9]+', re.sub(r'^\d+ *x *', '', run_set.name.casefold())))


def one_node_base(target: RunSet, sets: Sequence[RunSet], is_own: bool = True) -> Base | None:
    """Return the one-node set of a target's machine, or of another one with the same generation; None without one.

    Of several, choose equal nodes, the nearest round, the most similar name, the same optimizer, the nearest batch.
    """
    def distance(s: RunSet) -> tuple:
        return (_kind(s) != _kind(target), _per_node(s) != _per_node(target),
                abs(_round_number(s) - _round_number(target)), is_own and -len(_words(s) & _words(target)),
                s.recipe.opt_name != target.recipe.opt_name,
                _batch_distance(s, target.recipe.global_batch_size / (target.num_units or 1)), s.name)
    generation = generation_of(target.accelerator)
    nearest = min((s for s in sets if s.num_nodes == 1 and base_of(s) and is_machine(s, target) is is_own and (
        is_own or s.is_imagenet and generation_of(s.accelerator) == generation != '')), key=distance, default=None)
    return base_of(nearest) if nearest else None


def _round_number(run_set: RunSet) -> float:
    found = re.fullmatch(r'v(\d\.\d)', run_set.round)
    return float(found[1]) if found else 0.0


def logs_schedule(run_set: RunSet) -> bool:
    return run_set.recipe.decay is not None and 'decay' not in run_set.unlogged


def is_early(run_set: RunSet) -> bool:
    """Return whether a set is of a round before v1.0, with the software of that time."""
    return 0.0 < _round_number(run_set) < 1.0


def second_base(layout: Layout, base: Base, sets: Sequence[RunSet], like: RunSet) -> Base | None:
    """Return the set of the base's machine on several but fewer nodes than a layout; None if there is none.

    Of several, return the one whose name is most similar to that of `like`; of equally similar ones, the one with the
    nearest local batch. Sets whose nodes differ in size from the base's do not count.
    """
    def distance(s: RunSet) -> tuple:
        likeness = len(_words(s) & _words(like)) / (len(_words(s) | _words(like)) or 1)
        return -round(likeness, 2), _batch_distance(s, layout.local_batch_size), -(s.num_nodes or 0), s.name
    own = base.run_set
    nearest = min((s for s in sets if own and 1 < (s.num_nodes or 0) < layout.num_nodes and is_machine(s, own)
                   and base_of(s) and _per_node(s) == base.num_units / base.num_nodes), key=distance, default=None)
    return base_of(nearest) if nearest else None
