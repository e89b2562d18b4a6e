"""Print the page about all published rounds, made from the packaged table; with a FOLDER, write its
two pictures there.

python docs/make_history.py > docs/history.md
python docs/make_history.py docs/pictures
"""

import sys
from pathlib import Path

from mlperf_rn50.analysis.recipe.choose import families, frontier, group
from mlperf_rn50.analysis.report.plots import CARDS, card_of, draw_overview
from mlperf_rn50.analysis.sets.published import load_published, load_table

HEAD = """# Published results

Look up published times, systems and recipes:

```bash
mlperf-rn50 report published --accelerator h100 --nodes 1  # systems with times, epochs, images/s
mlperf-rn50 report published --org nvidia --out nvidia     # also series with speed-up, efficiency
mlperf-rn50 recipe 3200                                    # what converged at a batch
```

The packaged table has {all} sets of ResNet-50 from {rounds} rounds of MLPerf Training, v0.5 to
v4.0, the last round with ResNet. {mxnet} of them are on MXNet, in the closed division and not
copies. This page is generated from these.

## Epochs by batch

![Epochs to 75.9 % over the batch; a line joins the fewest epochs](pictures/history_epochs.svg)

Since v0.7, 35 or 36 epochs with LARS suffice up to 4,096 images. Beyond, the epochs rise, to
{most:.0f} at {batch:,}.

## Time by accelerators

![Minutes to 75.9 % over the number of accelerators, by generation](pictures/history_time.svg)

Shortest time to 75.9 % in minutes; in brackets, the round:

"""


def sets_to_target():
    """Return the closed MXNet sets with a time to the target of 75.9 %."""
    return [
        s
        for s in load_published()
        if s.minutes and s.target_accuracy == 0.759 and s.num_accelerators
    ]


def table(head, rows):
    return (
        '\n'.join(f'| {" | ".join(map(str, row))} |' for row in [head, ['---'] * len(head), *rows])
        + '\n'
    )


def best_recipes():
    """Return the best recipe of each batch since v0.7 with LARS."""
    known = group(load_published(), 'lars', 0.759)
    return next(edge for family in families(known) if (edge := frontier(family)))


def times_table():
    sets = sets_to_target()
    rows = []
    for units in sorted({s.num_accelerators for s in sets}):
        cells = []
        for card in CARDS:
            found = [s for s in sets if s.num_accelerators == units and card_of(s) == card]
            best = min(found, key=lambda s: s.minutes, default=None)
            cells.append(f'{best.minutes:.2f} ({best.round})' if best else '-')
        rows.append([f'{units:,}', *cells])
    return table(['accelerators', *CARDS], [r for r in rows if set(r[1:]) != {'-'}])


def write_pictures(folder):
    for name, picture in zip(('history_time', 'history_epochs'), draw_overview(sets_to_target())):
        Path(folder, f'{name}.svg').write_text(picture.svg, encoding='utf-8')


def main():
    if len(sys.argv) > 1:
        write_pictures(sys.argv[1])
        return
    last = best_recipes()[-1]
    head = HEAD.format(
        rounds=len({s.round for s in load_table()}),
        all=len(load_table()),
        mxnet=len(load_published()),
        most=last.mean_epochs,
        batch=last.recipe.global_batch_size,
    )
    print(head + times_table(), end='')


if __name__ == '__main__':
    main()
