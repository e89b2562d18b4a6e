"""Print the page about all published rounds, made from the packaged table; with a FOLDER, write its two pictures there.

python docs/make_history.py > docs/history.md
python docs/make_history.py docs/pictures
"""
import math
import sys
from itertools import groupby
from pathlib import Path

from mlperf_rn50.analysis.recipe.choose import families, fold, frontier
from mlperf_rn50.analysis.sets.published import load_published, load_table

CARDS = {'V100': '#1b9e77', 'A100': '#2166ac', 'H100': '#d95f02'}  # generations with one to thousands of accelerators
OTHER = '#888888'
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 340, 62, 14, 30, 46
HEAD = """# Published results

This page is about the closed-division sets of ResNet-50 on MXNet in {rounds} rounds of MLPerf Training, v0.5 to v4.0.
v4.0 was the last round with ResNet. The page is generated from the packaged table, which has {all} sets of all
frameworks; {mxnet} of them are on MXNet, in the closed division and not copies. `mlperf-rn50 report published` shows
all sets, and [`recipe`](recipes.md) the hyper-parameters for a batch.
"""
EPOCHS = """## Epochs by batch

![Epochs to 75.9 % over the global batch, with the fewest epochs of each batch as a line](pictures/history_epochs.svg)

Since v0.7, 35 or 36 epochs with LARS suffice up to 4,096 images. Beyond, the epochs rise, to {most:.0f} at {batch:,}.
The line and the table show the fewest mean epochs at each batch, without batches at which a larger one takes fewer.
"""
TIMES = """## Time by accelerators

![Minutes to 75.9 % over the number of accelerators, by generation](pictures/history_time.svg)

Shortest time to 75.9 % in minutes; in brackets, the round.
"""
SERIES = """## Efficiency by series

A series is one organisation, round, accelerator and number of accelerators per node on at least three numbers of nodes.
Efficiency is the speed-up divided by the ratio of accelerators, both relative to the smallest set.
"""


def sets_to_target():
    """Return the closed MXNet sets with a time to the target of 75.9 %."""
    return [s for s in load_published() if s.minutes and s.target_accuracy == 0.759 and s.num_accelerators]


def card_of(run_set):
    return next((card for card in CARDS if card in (run_set.accelerator or '')), 'other')


def table(head, rows):
    return '\n'.join(f'| {" | ".join(map(str, row))} |' for row in [head, ['---'] * len(head), *rows]) + '\n'


def best_recipes():
    """Return the best recipe of each batch since v0.7 with LARS."""
    known = fold(load_published(), 'lars', 0.759)
    return next(edge for family in families(known) if (edge := frontier(family)))


def epochs_table():
    sizes = [s.global_batch_size for s in load_published()]
    rows = []
    for p in best_recipes():
        r, run_set = p.recipe, p.sets[-1]
        rows.append([f'{r.global_batch_size:,}', f'{p.mean_epochs:.3g}', sizes.count(r.global_batch_size),
                     f'{r.base_lr:g}', f'{r.warmup_epochs:g}', f'{r.decay_epochs:g}', f'{r.weight_decay:g}',
                     f'{run_set.round} {run_set.org} {run_set.name}'])
    return table(['batch', 'epochs', 'sets at this batch', 'learning rate', 'warm-up', 'schedule', 'weight decay',
                  'for example'], rows)


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
    def key(s):
        return s.org, s.round, s.accelerator or '', s.num_accelerators // (s.num_nodes or 1)
    rows = []
    for (org, round_, card, per_node), members in groupby(sorted(sets_to_target(), key=key), key):
        best = {}
        for s in sorted(members, key=lambda s: -s.minutes):
            best[s.num_nodes] = s
        found = [best[n] for n in sorted(best)]
        if len(found) < 3:
            continue
        first = found[0]
        shares = [first.minutes * first.num_nodes / (s.minutes * s.num_nodes) for s in found]
        rows.append([f'{org} {round_}', card, per_node, ', '.join(str(s.num_nodes) for s in found),
                     ', '.join(f'{s.minutes:.2f}' for s in found), ', '.join(f'{100 * x:.0f} %' for x in shares)])
    return table(['series', 'accelerator', 'per node', 'nodes', 'minutes', 'efficiency'], rows)


def scale(values):
    low, high = math.log(min(values) / 1.15), math.log(max(values) * 1.15)
    return lambda v: (math.log(v) - low) / (high - low)


def picture(title, labels, points, line, ticks):
    """Return a log-log scatter plot; points: (x, y, colour, tip), line: (x, y), ticks: values of both axes."""
    xs, ys = (scale([p[i] for p in points]) for i in (0, 1))

    def at(x, y):
        return LEFT + xs(x) * (WIDTH - LEFT - RIGHT), TOP + (1 - ys(y)) * (HEIGHT - TOP - BOTTOM)
    used = {colour for *_, colour, _ in points}
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
             f'height="{HEIGHT}" font-family="sans-serif" font-size="12" fill="#333"><title>{title}</title>'
             f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>']
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for value in ticks[0]:
        x = at(value, points[0][1])[0]
        parts.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="#ddd"/><text x="{x:.1f}" y="{bottom + 16}" '
                     f'text-anchor="middle">{value:,}</text>')
    for value in ticks[1]:
        y = at(points[0][0], value)[1]
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#ddd"/><text x="{LEFT - 6}" y="{y + 4:.1f}" '
                     f'text-anchor="end">{value:g}</text>')
    parts.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{labels[0]}</text>'
                 f'<text transform="translate(14 {(TOP + bottom) / 2}) rotate(-90)" text-anchor="middle">{labels[1]}'
                 '</text>')
    for x, y, colour, tip in points:
        cx, cy = at(x, y)
        parts.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="3.5" fill="{colour}" fill-opacity=".65"><title>{tip}'
                     '</title></circle>')
    if line:
        path = 'L'.join('{:.1f} {:.1f}'.format(*at(*p)) for p in line)
        parts.append(f'<path d="M{path}" fill="none" stroke="#333" stroke-width="1.5"/>')
    for i, (name, colour) in enumerate(c for c in {**CARDS, 'other': OTHER}.items() if c[1] in used):
        parts.append(f'<circle cx="{LEFT + 8 + 74 * i}" cy="16" r="4" fill="{colour}"/>'
                     f'<text x="{LEFT + 16 + 74 * i}" y="20">{name}</text>')
    return '\n'.join([*parts, '</svg>\n'])


def write_pictures(folder):
    colours = {**CARDS, 'other': OTHER}
    sets = sets_to_target()

    def tip(s):
        return f'{s.round} {s.org} {s.name}'.replace('&', '&amp;').replace('<', '&lt;')
    epochs = [(s.global_batch_size, s.epochs_mean, colours[card_of(s)], tip(s)) for s in sets]
    line = [(p.recipe.global_batch_size, p.mean_epochs) for p in best_recipes()]
    Path(folder, 'history_epochs.svg').write_text(picture(
        'Epochs to 75.9 % over the global batch', ('global batch, images', 'epochs to 75.9 %'), epochs, line,
        ((512, 2048, 8192, 32768), (35, 40, 50, 60, 70, 80, 90))), encoding='utf-8')
    times = [(s.num_accelerators, s.minutes, colours[card_of(s)], tip(s)) for s in sets]
    Path(folder, 'history_time.svg').write_text(picture(
        'Minutes to 75.9 % over accelerators', ('accelerators', 'minutes to 75.9 %'), times, (),
        ((1, 4, 16, 64, 256, 1024, 4096), (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200))), encoding='utf-8')


def main():
    if len(sys.argv) > 1:
        write_pictures(sys.argv[1])
        return
    last = best_recipes()[-1]
    rounds = len({s.round for s in load_table()})
    head = HEAD.format(rounds=rounds, all=len(load_table()), mxnet=len(load_published()))
    print('\n'.join([head, EPOCHS.format(most=last.mean_epochs, batch=last.recipe.global_batch_size), epochs_table(),
                     TIMES, times_table(), SERIES, series_table()]), end='')


if __name__ == '__main__':
    main()
