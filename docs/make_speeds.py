"""Print docs/gpu.md with the table of expected speeds, made from the packaged sets of all rounds.

python docs/make_speeds.py --write    (replaces the page)
"""

import re
import sys
from pathlib import Path

from mlperf_rn50.analysis.sets.published import load_published
from mlperf_rn50.analysis.sets.run_set import generation_of
from mlperf_rn50.mllog.logged_run import TARGET
from mlperf_rn50.text import grouped

PAGE = Path(__file__).parent / 'gpu.md'
PLACE = re.compile(r'(?<=<!-- speeds -->\n).*(?=<!-- end of speeds -->)', re.DOTALL)
# bench train should be between these multiples of the lowest and the highest published speed
LOW, HIGH = 0.9, 1.15
NUM_GPUS = 8  # of the sets whose times are shown
HEAD = ['GPU', 'systems', '`bench train` should print', f'minutes on {NUM_GPUS} GPUs']
DRIVER_NAMES = {'H100 SXM': 'H100 SXM, H100 HBM3'}  # drivers name this GPU H100 80GB HBM3


def form_of(run_set):
    """Return the form factor of a set's GPUs, '' if the logs do not name it."""
    name = run_set.accelerator.casefold()
    return next((form for form in ('PCIe', 'SXM') if form.casefold() in name), '')


def memory_of(run_set):
    return (re.findall(r'\d+GB', run_set.accelerator) or [''])[0]


def published_sets():
    """Return the closed MXNet sets on one node whose speed is known."""
    return [
        s
        for s in load_published()
        if s.num_nodes == 1 and s.num_accelerators and s.accelerator and s.images_per_s
    ]


def by_gpu(run_sets):
    """Return the sets of each GPU: by generation, form factor if it has two, and memory if that
    form has two."""
    found = {}
    generations = grouped(run_sets, lambda s: generation_of(s.accelerator).removeprefix('NVIDIA '))
    for name, sets in generations.items():
        if not {'PCIe', 'SXM'} <= set(map(form_of, sets)):
            found[name] = sets
            continue
        for form in sorted(set(map(form_of, sets))):
            alike = grouped((s for s in sets if form_of(s) == form), memory_of)
            for memory, members in alike.items():
                words = (name, form, memory if len(alike) > 1 else '')
                found[' '.join(filter(None, words))] = members
    return {DRIVER_NAMES.get(name, name): found[name] for name in sorted(found)}


def speed_range(run_sets):
    """Return the lowest and the highest speed that bench train should print, images/s per GPU."""
    speeds = [s.images_per_s / s.num_accelerators for s in run_sets]
    return LOW * min(speeds), HIGH * max(speeds)


def expected_speed(gpu):
    """Return the name and the range of the GPU that a driver calls `gpu`, or None."""
    words = set(re.split(r'[\W_]|(?<=sxm)\d', gpu.lower()))
    kinds = [
        (len(kind), name, sets)
        for name, sets in by_gpu(published_sets()).items()
        for kind in (set(k.split()) for k in name.lower().split(','))
        if kind <= words
    ]
    # the one that names form and memory, if there is one
    _, name, sets = max(kinds, key=lambda k: k[0], default=(0, '', []))
    return (name, *speed_range(sets)) if sets else None


def row_of(gpu, sets):
    minutes = [
        s.score_minutes
        for s in sets
        if s.num_accelerators == NUM_GPUS and s.target_accuracy == TARGET and s.score_minutes
    ]
    low, high = speed_range(sets)
    return [gpu, len(sets), f'{low:,.0f} to {high:,.0f}', f'{min(minutes):.2f}' if minutes else '-']


def speeds_table():
    rows = [HEAD, ['---'] * len(HEAD)]
    rows += [row_of(gpu, sets) for gpu, sets in by_gpu(published_sets()).items()]
    return ''.join(f'| {" | ".join(map(str, row))} |\n' for row in rows)


def main():
    page = PLACE.sub(lambda _: speeds_table(), PAGE.read_text(encoding='utf-8'))
    if sys.argv[1:] == ['--write']:
        PAGE.write_text(page, encoding='utf-8')
    else:
        print(page, end='')


if __name__ == '__main__':
    main()
