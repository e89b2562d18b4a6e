"""Print docs/gpu.md with the table of expected speeds, made from the packaged sets of all rounds.

python docs/make_speeds.py --write    (replaces the page)
"""

import re
import sys
from pathlib import Path

from mlperf_rn50.analysis.sets.published import load_published, load_table
from mlperf_rn50.analysis.sets.rcp import official_score_minutes
from mlperf_rn50.analysis.sets.run_set import generation_of
from mlperf_rn50.mllog.logged_run import TARGET
from mlperf_rn50.text import grouped

PAGE = Path(__file__).parent / 'gpu.md'
PLACE = re.compile(r'(?<=<!-- speeds -->\n).*(?=<!-- end of speeds -->)', re.DOTALL)
# bench train should be between these multiples of the lowest and the highest full speed
LOW, HIGH = 0.9, 1.15
NUM_GPUS = 8  # of the sets whose times are shown
HEAD = [
    'card',
    'one-node systems',
    'rounds',
    'images per GPU',
    'at full speed',
    'with evaluation and start',
    '`bench train` should print',
    f'shortest time on {NUM_GPUS} GPUs, minutes (scaled)',
]
DRIVER_NAMES = {'H100 SXM': 'H100 SXM, H100 HBM3'}  # drivers name this card H100 80GB HBM3


def form_of(run_set):
    """Return the form factor of a set's cards, '' if the logs do not name it."""
    return next(
        (form for form in ('PCIe', 'SXM') if form.casefold() in run_set.accelerator.casefold()), ''
    )


def memory_of(run_set):
    return (re.findall(r'\d+GB', run_set.accelerator) or [''])[0]


def by_card(run_sets):
    """Return the sets of each card: by generation, form factor if it has two, and memory if that
    form has two."""
    found = {}
    for name, sets in grouped(
        run_sets, lambda s: generation_of(s.accelerator).removeprefix('NVIDIA ')
    ).items():
        if {'PCIe', 'SXM'} <= set(map(form_of, sets)):
            for form in sorted(set(map(form_of, sets))):
                alike = grouped((s for s in sets if form_of(s) == form), memory_of)
                for memory, members in alike.items():
                    found[' '.join(filter(None, (name, form, memory * (len(alike) > 1))))] = members
        else:
            found[name] = sets
    return {DRIVER_NAMES.get(name, name): found[name] for name in sorted(found)}


def span(values):
    low, high = (f'{v:,.0f}' for v in (min(values), max(values)))
    return low if low == high else f'{low} to {high}'


def row_of(card, sets):
    speeds = [s.images_per_s / s.num_accelerators for s in sets]
    whole = [
        s.train_samples * r.epochs_to_converge / r.time_to_train_s / s.num_accelerators
        for s in sets
        for r in s.converged
    ]
    best = min(
        (
            s
            for s in sets
            if s.num_accelerators == NUM_GPUS and s.target_accuracy == TARGET and s.score_minutes
        ),
        key=lambda s: s.score_minutes,
        default=None,
    )
    rounds = sorted({s.round for s in sets})
    return [
        card,
        len(sets),
        rounds[0] if len(rounds) == 1 else f'{rounds[0]} to {rounds[-1]}',
        span([s.global_batch_size / s.num_accelerators for s in sets]),
        span(speeds),
        span(whole),
        span([LOW * min(speeds), HIGH * max(speeds)]),
        f'{best.score_minutes:.2f} ({official_score_minutes(best):.2f})' if best else '-',
    ]


def speeds_table():
    """Return the table of the closed-division sets on MXNet with one node and a known speed."""
    sets = [
        s
        for s in load_published()
        if s.num_nodes == 1 and s.num_accelerators and s.accelerator and s.images_per_s
    ]
    rows = [
        HEAD,
        ['---'] * len(HEAD),
        *(row_of(card, members) for card, members in by_card(sets).items()),
    ]
    rounds = sorted({s.round for s in load_table()})
    return f'{len(sets)} sets of MLPerf Training {rounds[0]} to {rounds[-1]}:\n\n' + ''.join(
        f'| {" | ".join(map(str, row))} |\n' for row in rows
    )


def main():
    page = PLACE.sub(lambda _: speeds_table(), PAGE.read_text(encoding='utf-8'))
    if sys.argv[1:] == ['--write']:
        PAGE.write_text(page, encoding='utf-8')
    else:
        print(page, end='')


if __name__ == '__main__':
    main()
