"""False alarms of `train`, and faults that it finds, in published runs that reached their target.

Every run is compared with the sets of other systems that have its recipe, or a like one, as `train` does it, with the
spreads of the other rounds only. Then from a third of its schedule on each run is stuck, or 3 or 2 points lower.

Usage: python benchmarks/replay.py [FOLDER]    (the packaged table of published systems; or a tree of published logs,
whose runs are compared with that table)
"""
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mlperf_rn50.study.known import KnownSet, known_of, load_published
from mlperf_rn50.study.recipes import STEP_SCHEDULE_EPOCHS
from mlperf_rn50.study.reference import Band, Curve, How, Reference, band, find_published, is_behind, typical_spreads
from mlperf_rn50.study.systems import load_systems

FAULT_AT = 1 / 3  # of the schedule
FAULTS = ('stuck', '3 points low', '2 points low')


def with_recipe(known: KnownSet, published: Sequence[KnownSet]) -> KnownSet:
    """Return a set with the recipe of the published one of its name, as logs of v0.5 have less of it."""
    own = next((s for s in published if s.name == known.name and s.round == known.round), known)
    return replace(known, recipe=own.recipe)


def length_of(known: KnownSet) -> float:
    """Return the epochs of the schedule; undeclared ones: of the submissions with steps, or all that were trained."""
    undeclared = STEP_SCHEDULE_EPOCHS if known.recipe.decay == 'step' else max(r.curve[-1][0] for r in known.runs)
    return known.recipe.decay_epochs or undeclared


def faults(curve: Curve, length: float) -> dict[str, Curve]:
    """A curve, and what it would be with each fault."""
    at = FAULT_AT * length
    stuck_at = next((a for e, a in curve if e >= at), 0.0)
    return {'good': curve, 'stuck': [(e, stuck_at if e >= at else a) for e, a in curve],
            '3 points low': [(e, a - 0.03 if e >= at else a) for e, a in curve],
            '2 points low': [(e, a - 0.02 if e >= at else a) for e, a in curve]}


def alarm_at(bands: Mapping[int, Band], curve: Curve) -> int | None:
    """Return the epoch at which a run would have been behind; None where it never would."""
    return next((curve[i - 1][0] for i in range(1, len(curve) + 1) if is_behind(bands, curve[:i])), None)


def bands_of(reference: Reference, known: KnownSet) -> dict[int, Band]:
    """The bands at the evaluations of a set, by epoch."""
    return band(reference, sorted({e for run in known.runs for e, _ in run.curve}))


def is_one(a: KnownSet, b: KnownSet) -> bool:
    """Whether two sets are of one system: the same name, or the same runs under another."""
    return a.name == b.name or {r.curve for r in a.runs} & {r.curve for r in b.runs} != set()


def spreads_for(known: KnownSet, others: Sequence[KnownSet]) -> dict[int, float]:
    """Return the spreads of the other rounds, or for systems of v0.5 of all others."""
    return typical_spreads([s for s in others if s.round != known.round or known.recipe.decay == 'step'])


def find(known: KnownSet, published: Sequence[KnownSet]) -> Reference | None:
    """Return the reference of a system's runs, itself left out."""
    others = [s for s in published if not is_one(s, known)]
    found = find_published(known.recipe, others)
    return found and replace(found, spreads=spreads_for(known, others))


def without(known: KnownSet, run_name: str) -> Reference:
    """Return the other runs of its own system, for a run of a system that no other has the recipe of."""
    rest = replace(known, runs=tuple(r for r in known.runs if r.name != run_name))
    others = [s for s in load_published() if not is_one(s, known)]
    return Reference('same', known.recipe, (rest,), spreads_for(known, others))


@dataclass
class Tally:
    """The flagged runs of a kind, by fault, and the latest point at which."""

    sets: int = 0
    runs: int = 0
    flagged: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    latest: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, bands: Mapping[int, Band], curve: Curve, length: float) -> None:
        self.runs += 1
        for name, bent in faults(curve, length).items():
            at = alarm_at(bands, bent)
            self.flagged[name] += at is not None
            self.latest[name] = max(self.latest[name], (at or 0) / length)


def replay(sets: Sequence[KnownSet], published: Sequence[KnownSet]) -> dict[str, Tally]:
    """Return the tallies by how the references match; 'own' for systems whose own other runs are all there is."""
    tallies: dict[str, Tally] = {}
    for known in sets:
        found = find(known, published)
        how: How | str = found.how if found else 'own, step' if known.recipe.decay == 'step' else 'own'
        tally = tallies.setdefault(how, Tally())
        tally.sets += 1
        bands = bands_of(found, known) if found else None
        for run in known.converged:
            own = bands if bands is not None else bands_of(without(known, run.name), known)
            tally.add(own, run.curve, length_of(known))
    return tallies


NAMES = {'same': 'same recipe, other systems', 'like': 'like recipe, other systems',
         'own': 'own system, other runs', 'own, step': 'own system, other runs, step decay'}


def main() -> int:
    published = load_published()
    sets: Sequence[KnownSet] = published
    if len(sys.argv) > 1:
        systems = load_systems([Path(p) for p in sys.argv[1:]])
        sets = [with_recipe(k, published) for k in map(known_of, systems) if k and k.is_imagenet]
    print('| compared with | sets | runs | false alarms | stuck found | 3 points low | 2 points low | latest, of the '
          'schedule |')
    print('|---|---|---|---|---|---|---|---|')
    for how, t in sorted(replay(sets, published).items(), key=lambda pair: list(NAMES).index(pair[0])):
        shares = [f'{t.flagged[f]} ({t.flagged[f] / t.runs:.0%})' for f in ('good', *FAULTS)]
        latest = ', '.join(f'{t.latest[f]:.2f}' for f in FAULTS)
        print(f'| {NAMES[how]} | {t.sets} | {t.runs} | {" | ".join(shares)} | {latest} |')
    return 0


if __name__ == '__main__':
    sys.exit(main())
