"""Count the false alarms of `train`, and the faults that it detects, in published runs that reached
their target.

As in `train`, each run is compared with other systems of the same or a similar recipe, but the
spreads are from other rounds only. Faults start after a third of the schedule: the accuracy stops
changing, or is 3 or 2 points too low.

Usage: python benchmarks/replay.py
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mlperf_rn50.analysis.recipe.band import Band, Curve, band, is_behind
from mlperf_rn50.analysis.recipe.choose import STEP_SCHEDULE_EPOCHS
from mlperf_rn50.analysis.recipe.reference import Reference, find_published, typical_spreads
from mlperf_rn50.analysis.sets.published import load_published
from mlperf_rn50.analysis.sets.run_set import RunSet
from mlperf_rn50.mllog.logged_run import Run

FAULT_AT = 1 / 3  # fraction of the schedule
FAULTS = ('stuck', '3 points low', '2 points low')


def length_of(known: RunSet) -> float:
    """Return the schedule's epochs; if unknown, STEP_SCHEDULE_EPOCHS for step decay or else the
    longest run's."""
    longest = max(r.curve[-1][0] for r in known.readable if r.curve)
    return known.recipe.decay_epochs or (
        STEP_SCHEDULE_EPOCHS if known.recipe.decay == 'step' else longest
    )


def faults(curve: Curve, length: float) -> dict[str, Curve]:
    """Return the unchanged curve as 'good', and a curve with each fault."""
    at = FAULT_AT * length
    stuck_at = next((a for e, a in curve if e >= at), 0.0)
    bent = {'good': curve, 'stuck': [(e, stuck_at if e >= at else a) for e, a in curve]}
    for points in (3, 2):
        low = [(e, a - points / 100 if e >= at else a) for e, a in curve]
        bent[f'{points} points low'] = low
    return bent


def alarm_at(bands: Mapping[int, Band], curve: Curve) -> int | None:
    """Return the epoch at which a run would be behind; None if never."""
    ends = (end for end in range(1, len(curve) + 1) if is_behind(bands, curve[:end]))
    return next((curve[end - 1][0] for end in ends), None)


def is_same_system(a: RunSet, b: RunSet) -> bool:
    """Return whether two sets are from one system, because they have the same name or share a
    run."""
    return (
        a.name == b.name or {r.curve for r in a.readable} & {r.curve for r in b.readable} != set()
    )


def reference_of(known: RunSet, run: Run) -> tuple[str, Reference]:
    """Return a key of NAMES and the reference of a run: other systems or, if none fits, other runs
    of the same system.

    The spreads are from other rounds or, for step decay (only in v0.5), from all other systems.
    """
    is_step = known.recipe.decay == 'step'
    others = [s for s in load_published() if not is_same_system(s, known)]
    spreads = typical_spreads([s for s in others if s.round != known.round or is_step])
    if found := find_published(known.recipe, others):
        return found.how, replace(found, spreads=spreads)
    rest = replace(known, runs=tuple(r for r in known.readable if r.path != run.path))
    return 'own, step' if is_step else 'own', Reference('same', known.recipe, (rest,), spreads)


@dataclass
class Tally:
    """Numbers of runs, and of runs flagged for each fault, and the latest detection as a fraction
    of the schedule."""

    systems: set[str] = field(default_factory=set)
    runs: int = 0
    flagged: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    latest: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, known: RunSet, run: Run, bands: Mapping[int, Band]) -> None:
        self.systems.add(known.name)
        self.runs += 1
        for name, bent in faults(run.curve, length_of(known)).items():
            at = alarm_at(bands, bent)
            self.flagged[name] += at is not None
            self.latest[name] = max(self.latest[name], (at or 0) / length_of(known))


def replay(sets: Sequence[RunSet]) -> dict[str, Tally]:
    """Return a tally for each kind of reference, which NAMES describes."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    for known in sets:
        epochs = sorted({e for run in known.readable for e, _ in run.curve})
        for run in known.converged:
            how, reference = reference_of(known, run)
            tallies[how].add(known, run, band(reference, epochs))
    return tallies


NAMES = {
    'same': 'same recipe, other systems',
    'like': 'similar recipe, other systems',
    'own': 'own system, other runs',
    'own, step': 'own system, other runs, step decay',
}


def main() -> None:
    print(
        '| compared with | sets | runs | false alarms | stuck found | 3 points low | 2 points low '
        '| latest, of the schedule |\n|---|---|---|---|---|---|---|---|'
    )
    for how, t in sorted(
        replay(load_published()).items(), key=lambda pair: list(NAMES).index(pair[0])
    ):
        shares = [f'{t.flagged[f]} ({t.flagged[f] / t.runs:.0%})' for f in ('good', *FAULTS)]
        latest = ', '.join(f'{t.latest[f]:.2f}' for f in FAULTS)
        print(f'| {NAMES[how]} | {len(t.systems)} | {t.runs} | {" | ".join(shares)} | {latest} |')


if __name__ == '__main__':
    main()
