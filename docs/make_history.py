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
from mlperf_rn50.analysis.sets.scaling import make_studies

HEAD = """# Published results

This page is about the closed-division sets of ResNet-50 on MXNet in {rounds} rounds of MLPerf Training, v0.5 to v4.0.
v4.0 was the last round with ResNet. The page is generated from the packaged table, which has {all} sets of all
frameworks; {mxnet} of them are on MXNet, in the closed division and not copies. `mlperf-rn50 report published` shows
all sets, and [`recipe`](recipes.md) the hyper-parameters for a batch.
"""
EPOCHS = """## Epochs by batch

![Epochs to 75.9 % over the global batch, with the fewest epochs of each batch as a line](pictures/history_epochs.svg)

Since v0.7, 35 or 36 epochs with LARS suffice up to 4,096 images. Beyond, the epochs rise, to {most:.0f} at {batch:,}.
The line and the table show the recipe with the fewest epochs at each batch, without batches at which a larger one takes
fewer. Its epochs are the mean over all runs with this recipe, as in `recipe`, and so not always those of the example.
"""
TIMES = """## Time by accelerators

![Minutes to 75.9 % over the number of accelerators, by generation](pictures/history_time.svg)

Shortest time to 75.9 % in minutes; in brackets, the round.
"""
SERIES = """## Efficiency by series

The series of `report` on at least three numbers of nodes, with the fastest set of each number. A
[series](results.md#series) has one organisation, round, accelerator, framework and number of accelerators per node.
Efficiency is the speed-up divided by the ratio of accelerators, both relative to the set on the fewest nodes.
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


def epochs_table():
    sizes = [s.global_batch_size for s in load_published()]
    rows = []
    for p in best_recipes():
        r, run_set = p.recipe, p.sets[-1]
        rows.append(
            [
                f'{r.global_batch_size:,}',
                f'{p.mean_epochs:.3g}',
                sizes.count(r.global_batch_size),
                f'{r.base_lr:g}',
                f'{r.warmup_epochs:g}',
                f'{r.decay_epochs:g}',
                f'{r.weight_decay:g}',
                f'{run_set.round} {run_set.org} {run_set.name}',
            ]
        )
    return table(
        [
            'batch',
            'epochs',
            'sets at this batch',
            'learning rate',
            'warm-up',
            'schedule',
            'weight decay',
            'for example',
        ],
        rows,
    )


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


def series_table():
    rows, shown = [], set(sets_to_target())
    for study in make_studies(load_table()):
        for series in study.series:
            # the fastest comes last
            best = {s.num_nodes: s for s in reversed(series.run_sets) if s in shown}
            if len(best) < 3:
                continue
            found = [study.comparison_of[best[n]] for n in sorted(best)]
            base = series.baseline
            rows.append(
                [
                    f'{base.org} {base.round}',
                    base.accelerator,
                    f'{base.units_per_node:g}',
                    ', '.join(map(str, sorted(best))),
                    ', '.join(f'{c.run_set.minutes:.2f}' for c in found),
                    ', '.join(f'{100 * c.efficiency:.0f} %' for c in found),
                ]
            )
    return table(
        ['series', 'accelerator', 'per node', 'nodes', 'minutes', 'efficiency'], sorted(rows)
    )


def write_pictures(folder):
    for name, picture in zip(('history_time', 'history_epochs'), draw_overview(sets_to_target())):
        Path(folder, f'{name}.svg').write_text(picture.svg, encoding='utf-8')


def main():
    if len(sys.argv) > 1:
        write_pictures(sys.argv[1])
        return
    last = best_recipes()[-1]
    rounds = len({s.round for s in load_table()})
    head = HEAD.format(rounds=rounds, all=len(load_table()), mxnet=len(load_published()))
    print(
        '\n'.join(
            [
                head,
                EPOCHS.format(most=last.mean_epochs, batch=last.recipe.global_batch_size),
                epochs_table(),
                TIMES,
                times_table(),
                SERIES,
                series_table(),
            ]
        ),
        end='',
    )


if __name__ == '__main__':
    main()
