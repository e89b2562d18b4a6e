"""Made-up trees of logs, of every shape that has once been misread: small, and the same each time.

A function writes one tree under a folder. A set has five runs of 10.0, 10.1, ... 10.4 minutes where nothing else is
said, so that its MLPerf score is 10.2 minutes, the mean of the middle three.
"""
import gzip
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from helpers import ROOT
from lines import mllog, run_lines, v05, v06, write_lines

CLIMB = (0.4, 0.62, 0.7, 0.74, 0.7602)  # Top-1 at each evaluation
PERIOD = 8  # epochs between two: 40 to converge
RUNS = range(5)
DIGITS = ROOT / 'logs/digits_five'  # five real runs, which every checker accepts

Lines = list[str]
Make = Callable[[Path], object]  # writes a tree under a folder


# What runs are made of

def climb(k: int) -> tuple[float, ...]:
    """The accuracies of run k: shares of 50,000 images, different in each run."""
    return tuple(round(a + 0.0002 * k, 4) for a in CLIMB)


def minutes_of(k: int) -> float:
    return 10 + k / 10


def moved(lines: Iterable[str], by_s: float, *keys: str) -> Lines:
    """Lines with their times moved; only those of some keys, where any are named."""
    def move(line: str) -> str:
        if keys and not re.search(rf'(?:"| )(?:{"|".join(keys)})(?:"|:|$)', line):
            return line
        line = re.sub(r'"time_ms": (\d+)', lambda m: f'"time_ms": {int(m[1]) + round(1e3 * by_s)}', line)
        return re.sub(r'(:::MLPv0\.5\.0 resnet |:::MLL )(\d+\.)(\d+)',
                      lambda m: f'{m[1]}{float(m[2] + m[3]) + by_s:.{len(m[3])}f}', line)
    return [move(line) for line in lines]


def later_run(k: int = 0, minutes: float | None = None, accuracies: Sequence[float] | None = None, period: int = PERIOD,
              **keys) -> Lines:
    """Run k of a set in :::MLLOG lines, two hours after the one before; keys of run_lines."""
    accuracies = climb(k) if accuracies is None else accuracies
    epoch_s = (60 * (minutes_of(k) if minutes is None else minutes) - len(accuracies)) / (len(accuracies) * period)
    return moved(run_lines(accuracies, epoch_s=epoch_s, period=period, **{'seed': 1000 + k, 'batch': 3264, 'ranks': 8,
                                                                         **keys}), 7200 * k)


def as_v06(lines: Iterable[str]) -> Lines:
    """:::MLLOG lines as :::MLL lines."""
    events = (json.loads(line[len(':::MLLOG '):]) for line in lines)
    return [v06(e['key'], e['time_ms'] / 1e3 - 1_600_000_000, e['value'], **e['metadata']) for e in events]


def v05_run(k: int = 0, *, clears: int = 1, seeds: int = 8, local_batch: int = 208, minutes: float | None = None,
            first_s: float = 2.0) -> Lines:
    """Run k of a set in the lines of v0.5, which count epochs from 0 and log the batch of an accelerator."""
    num = len(CLIMB)
    total_s = 60 * (minutes_of(k) if minutes is None else minutes)
    epoch_s = (total_s - first_s - num) / (num * PERIOD)
    lines = [*(v05('run_clear_caches', -20 + n / 1000) for n in range(clears)), v05('run_start', 0),
             *(v05('run_set_random_seed', 0.5 + n / 1000, 5000 * k + n) for n in range(seeds)),
             v05('input_batch_size', 1.5, local_batch), v05('preproc_num_train_examples', 1.5, 1281167),
             v05('eval_size', 1.5, 50000), v05('eval_target', 1.5, 0.749), v05('opt_learning_rate', 1.5, 0.1),
             v05('train_loop', first_s)]
    now = first_s
    for n, accuracy in enumerate(climb(k)):
        for epoch in range(n * PERIOD, (n + 1) * PERIOD):
            lines.append(v05('train_epoch', now, epoch))
            now += epoch_s
        lines.append(v05('eval_start', now, epoch))
        now += 1
        lines += [v05('eval_accuracy', now, {'epoch': epoch, 'value': accuracy}), v05('eval_stop', now, epoch)]
    return moved([*lines, v05('run_stop', now), v05('run_final', now + 1)], 7200 * k)


def put(lines: Lines, key: str, *new: str, offset: int = 0) -> Lines:
    """Lines with new ones in the place of the last line of a key; offset 1 puts them after it instead."""
    place = max(i for i, line in enumerate(lines) if f'"{key}"' in line or f' {key}' in line)
    return [*lines[:place + offset], *new, *lines[place + 1:]]


def without(lines: Lines, *keys: str) -> Lines:
    return [line for line in lines if not any(f'"{k}"' in line or f' {k}' in line for k in keys)]


def seconds_of(line: str) -> float:
    """The time of a :::MLLOG line as lines.mllog takes it."""
    return json.loads(line[len(':::MLLOG '):])['time_ms'] / 1e3 - 1_600_000_000


def end_s(lines: Lines) -> float:
    """When the last :::MLLOG line was written."""
    return seconds_of(lines[-1])


def write_runs(folder: Path, run: Callable[[int], Lines], runs: Iterable[int] = RUNS) -> Path:
    """A set: result_<k>.txt of each run."""
    for k in runs:
        write_lines(folder / f'result_{k}.txt', run(k))
    return folder


def write_json(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def entry(nodes: object, accelerators: object, **more: object) -> dict:
    """An entry.json of v0.5."""
    return {'division': 'closed', 'status': 'on-prem', 'hardware': 'box', 'framework': 'MXNet 1.3',
            'nodes': [{'num_nodes': nodes, 'num_accelerators': accelerators, 'accelerator': 'V100', **more}]}


def system(nodes: object, per_node: object, org: str = 'us', **more: object) -> dict:
    """A system description of a later round."""
    return {'submitter': org, 'division': 'closed', 'status': 'Available on-premise', 'system_name': 'box',
            'number_of_nodes': nodes, 'accelerators_per_node': per_node, 'accelerator_model_name': 'A100',
            'framework': 'MXNet 1.9', **more}


def whole_system() -> dict:
    """A description with every key that the official tools read."""
    names = ('processors_per_node', 'processor_model_name', 'processor_core_count', 'processor_vcpu_count',
             'processor_frequency', 'processor_caches', 'processor_interconnect', 'memory_capacity', 'storage_type',
             'storage_capacity', 'networking', 'networking_topology', 'memory_configuration')
    of_accelerator = ('host_interconnect', 'frequency', 'on-chip_memories', 'memory_configuration', 'memory_capacity',
                      'interconnect', 'interconnect_topology')
    return system('1', '8', **{f'host_{n}': '2' for n in names}, **{f'accelerator_{n}': 'x' for n in of_accelerator},
                  cooling='air', hw_notes='', other_software_stack={'driver': '1'}, operating_system='Linux',
                  sw_notes='')


def v05_home(tree: Path, name: str, org: str = 'Acme') -> Path:
    return tree / 'v0.5' / org / 'results' / name / 'resnet'


def later_home(tree: Path, name: str, org: str = 'us', round_name: str = 'v2.0') -> Path:
    return tree / round_name / org / 'results' / name / 'resnet'


def write_v05(tree: Path, name: str, run: Callable[[int], Lines], description: dict | None, org: str = 'Acme') -> None:
    """A set of v0.5 in its place, with its description."""
    home = write_runs(v05_home(tree, name, org), run)
    if description is not None:
        write_json(home.parent / 'entry.json', description)


def write_later(tree: Path, name: str, run: Callable[[int], Lines], description: dict | None = None,
                org: str = 'us', round_name: str = 'v2.0') -> None:
    """A set of a later round in its place, with its description."""
    write_runs(later_home(tree, name, org, round_name), run)
    if description is not None:
        write_json(tree / round_name / org / 'systems' / f'{name}.json', description)


# Sets that are right: nothing is to be said against them

def clean(tree: Path) -> None:
    write_v05(tree, 'old', lambda k: v05_run(k), entry(1, 8))
    write_later(tree, 'middle', lambda k: as_v06(later_run(k, submission_status='onprem')), round_name='v0.6')
    minutes = 10.05, 10.15, 10.16, 10.29, 10.35  # other runs than those of v0.6
    write_later(tree, 'new', lambda k: later_run(k, minutes[k], submission_status='onprem'), system('1', '8'))


# Lost lines, and other batches

def _big(k: int, lost: int = 0, local_batch: int = 26) -> Lines:
    lines = v05_run(k, clears=40, seeds=640, local_batch=local_batch)
    seeds = [line for line in lines if 'run_set_random_seed' in line]
    return [line for line in lines if line not in seeds[100:100 + lost]]


def _small_v05(tree: Path) -> None:
    write_v05(tree, 'x1', lambda k: v05_run(k, minutes=100 + k), entry(1, 8))


def lost_lines(tree: Path) -> None:
    write_v05(tree, 'x40', lambda k: _big(k, lost=2 * (k == 2)), entry(40, 16))
    _small_v05(tree)


def lost_lines_without_description(tree: Path) -> None:
    write_v05(tree, 'x40', lambda k: _big(k, lost=2 * (k == 2)), None)


def lost_lines_in_the_first(tree: Path) -> None:
    """The first log is as likely as any other to have lost some."""
    write_v05(tree, 'x40', lambda k: _big(k, lost=2 * (k == 0)), None)


def another_batch(tree: Path) -> None:
    write_v05(tree, 'x40', lambda k: _big(k, local_batch=32 if k == 3 else 26), entry(40, 16))
    _small_v05(tree)


def another_batch_later(tree: Path) -> None:
    write_later(tree, 'mixed', lambda k: later_run(k, batch=4096 if k == 3 else 3264))
    write_later(tree, 'other', lambda k: later_run(k))


# Doubled lines

def _doubled(k: int, arguments_batch: int | None = 4096) -> Lines:
    lines = v05_run(k, seeds=1, local_batch=256, clears=1)
    arguments = ([] if arguments_batch is None else
                 [f"INFO:root:start with arguments Namespace(batch_size={arguments_batch}, gpus='0,1,2,3,4,5,6,7,8,9,"
                  "10,11,12,13,14,15', kv_store='device', lr=4.0, network='resnet-v1b')"])
    return [*arguments, *(twice for line in lines for twice in (line, f'DEBUG:mlperf_compliance:{line}'))]


def _baseline(tree: Path) -> None:
    write_v05(tree, 'x8', lambda k: v05_run(k, seeds=8, local_batch=256, minutes=20 + k / 5), entry(1, 8))


def doubled(tree: Path) -> None:
    write_v05(tree, 'x16', _doubled, entry(1, 16))
    _baseline(tree)


def doubled_without_arguments(tree: Path) -> None:
    write_v05(tree, 'x16', lambda k: _doubled(k, None), entry(1, 16))
    _baseline(tree)


def doubled_against_arguments(tree: Path) -> None:
    """The arguments say half of what the local batch and the description give."""
    write_v05(tree, 'x16', lambda k: _doubled(k, 2048), entry(1, 16))


# Clocks

def _one_of_five(tree: Path, change: Callable[[Lines], Lines], run: Callable[[int], Lines] = later_run) -> None:
    write_runs(tree / 'box', lambda k: change(run(k)) if k == 2 else run(k))


def shifted(key: str, by_s: float, run: Callable[[int], Lines] = later_run) -> Make:
    """One of five logs has one event at another time."""
    return lambda tree: _one_of_five(tree, lambda lines: moved(lines, by_s, key), run)


def clock_set_back(tree: Path) -> None:
    """An hour is lost in the middle of a run: summer time ends, or a clock is set."""
    def change(lines: Lines) -> Lines:
        middle = len(lines) * 3 // 4
        return [*lines[:middle], *moved(lines[middle:], -300)]
    _one_of_five(tree, change)


def times_in_seconds(tree: Path) -> None:
    """time_ms is filled with seconds."""
    _one_of_five(tree, lambda lines: [re.sub(r'"time_ms": (\d+)\d{3}\b', r'"time_ms": \1', line) for line in lines])


def evaluation_after_the_end(tree: Path) -> None:
    """The target is reached by an evaluation after run_stop."""
    def change(lines: Lines) -> Lines:
        end = end_s(lines)
        lines = [*lines[:-4], lines[-1]]  # without the last evaluation
        return [*lines, mllog('eval_start', end + 60, epoch_num=40),
                mllog('eval_accuracy', end + 61, 0.7606, epoch_num=40), mllog('eval_stop', end + 61, epoch_num=40)]
    _one_of_five(tree, change)


def evaluation_before_the_start(tree: Path) -> None:
    """As in a published set of v0.5: the first evaluation is older than run_start; the rest is as it should be."""
    def run(k: int) -> Lines:
        lines = v05_run(k)
        first = next(i for i, line in enumerate(lines) if ' eval_start' in line)
        return [*lines[:first], *moved(lines[first:first + 3], -400), *lines[first + 3:]]
    write_v05(tree, 'box', run, entry(1, 8))


# Halves of v0.5 and of later lines

def _two_halves(k: int, by_s: float = 0.0, accuracy: float | None = None) -> Lines:
    later, old = later_run(k, target=0.759), v05_run(k, first_s=0.001)
    old = [line.replace('0.749', '0.759') for line in old]
    if accuracy is not None:
        old = [line.replace(f'"value": {climb(k)[-1]}', f'"value": {accuracy}') for line in old]
    old = moved(old, by_s, 'run_stop', 'run_final')
    return [x for pair in zip(later, old) for x in pair] + later[len(old):] + old[len(later):]


def halves_agree(tree: Path) -> None:
    write_runs(tree / 'box', _two_halves)


def halves_of_other_accuracies(tree: Path) -> None:
    write_runs(tree / 'box', lambda k: _two_halves(k, accuracy=0.7412 if k == 2 else None))


def halves_of_other_ends(tree: Path) -> None:
    write_runs(tree / 'box', lambda k: _two_halves(k, by_s=600 if k == 2 else 0))


# Copies and tampering

def _reseeded(lines: Lines, seed: int) -> Lines:
    return [re.sub(r'("key": "seed", "value": )\d+', rf'\g<1>{seed}', line) for line in lines]


def copied(tree: Path) -> None:
    write_runs(tree / 'box', lambda k: _reseeded(later_run(1), 77) if k == 3 else later_run(k))


def copied_to_another_day(tree: Path) -> None:
    write_runs(tree / 'box', lambda k: _reseeded(moved(later_run(1), 86_400), 77) if k == 3 else later_run(k))


def _digits(tree: Path) -> Path:
    """The five real runs, to be packaged."""
    tree.mkdir(parents=True, exist_ok=True)
    for path in DIGITS.glob('*_*.*'):
        shutil.copyfile(path, tree / path.name)
    for name in ('env.json', 'config.yaml'):
        shutil.copyfile(DIGITS / name, tree / name)
    return tree


def digits(tree: Path) -> None:
    _digits(tree / 'box')


def digits_copied(tree: Path) -> None:
    folder = _digits(tree / 'box')
    text = (folder / 'result_1.txt').read_text()
    seed = re.search(r'"key": "seed", "value": (\d+)', text)[1]
    (folder / 'result_3.txt').write_text(text.replace(seed, '77'))


def digits_went_on(tree: Path) -> None:
    """In both halves, an evaluation before the last one has reached the target of 0.749."""
    path = _digits(tree / 'box') / 'result_1.txt'
    path.write_text(path.read_text().replace('0.7416666666666667', '0.7583333333333333'))


def digits_stopped_twice(tree: Path) -> None:
    path = _digits(tree / 'box') / 'result_1.txt'
    lines = path.read_text().splitlines()
    stop = next(line for line in lines if '"run_stop"' in line)
    path.write_text('\n'.join([*lines, stop.replace('"success"', '"aborted"').replace('"converged"', '"aborted"')])
                    + '\n')


def went_on(tree: Path) -> None:
    _one_of_five(tree, lambda lines: [line.replace('0.7404', '0.7596') for line in lines])


def stopped_twice(first: str, then: str) -> Make:
    """One of five logs has two run_stop, of other statuses."""
    def change(lines: Lines) -> Lines:
        return [*lines[:-1], mllog('run_stop', end_s(lines), status=first),
                mllog('run_stop', end_s(lines) + 1, status=then)]
    return lambda tree: _one_of_five(tree, change)


def no_word_of_success(tree: Path) -> None:
    """run_stop has no status; the target was reached."""
    _one_of_five(tree, lambda lines: [*lines[:-1], mllog('run_stop', end_s(lines))])


# The reference convergence points

RCP_EPOCHS = (34, 34, 34, 35, 35)  # the olympic mean is 103 / 3
LARS = {'gradient_accumulation_steps': 1, 'model_bn_span': 32, 'lars_opt_end_learning_rate': 0.0001,
        'lars_opt_learning_rate_decay_poly_power': 2, 'lars_epsilon': 0, 'lars_opt_weight_decay': 0.00005,
        'lars_opt_base_learning_rate': 10.5, 'lars_opt_learning_rate_decay_steps': 14000,
        'lars_opt_learning_rate_warmup_epochs': 2, 'lars_opt_momentum': 0.9}


def _closed(k: int, epochs: int, batch: int = 3264) -> Lines:
    """A run that passes the closed division of 4.0.0."""
    lines = later_run(k, accuracies=(round(0.7594 + 0.0002 * k, 4),), period=epochs, optimizer=LARS, batch=batch,
                      submission_status='onprem')
    lines = [line.replace('"value": "sgd"', '"value": "lars"') for line in lines]
    start = next(i for i, line in enumerate(lines) if '"init_start"' in line)
    return [*lines[:start], moved([mllog('cache_clear', -5.5, True)], 7200 * k)[0], *lines[start:]]


def scaled(tree: Path) -> None:
    write_later(tree, 'box', lambda k: _closed(k, RCP_EPOCHS[k]), whole_system(), round_name='v4.0')


def not_scaled(tree: Path) -> None:
    """Slower to converge than the reference: nothing is applied."""
    write_later(tree, 'box', lambda k: _closed(k, 45 + k), whole_system(), round_name='v4.0')


# Names

def other_org(tree: Path) -> None:
    """The logs name another organisation than folder and description."""
    write_later(tree, 'box', lambda k: later_run(k), system('1', '8', 'Beta'), 'Beta')


def other_org_in_folder_only(tree: Path) -> None:
    write_later(tree, 'box', lambda k: later_run(k), None, 'Beta')


def org_in_other_letters(tree: Path) -> None:
    write_later(tree, 'box', lambda k: later_run(k), system('1', '8', 'US'), 'US')


def no_submission(tree: Path) -> None:
    """Logs outside a submission: what they say counts."""
    write_runs(tree / 'sweep/box', later_run)


# Files that cannot be read, outputs that cannot be written

def plain(tree: Path) -> None:
    write_runs(tree / 'box', later_run)


def unreadable_folder(tree: Path) -> None:
    write_runs(tree / 'good', later_run)
    write_runs(tree / 'shut', later_run).chmod(0)


def pipe(tree: Path) -> None:
    write_runs(tree / 'box', later_run, range(1, 5))
    os.mkfifo(tree / 'box/result_0.txt')


def long_line(num_bytes: int, kind: str) -> Make:
    """A log with one line of many bytes."""
    texts = {'value': mllog('note', 1, 'a' * num_bytes), 'spaces': ':::MLLOG ' + ' ' * num_bytes + 'x',
             'tokens': ':::MLL ' * (num_bytes // 7), 'brackets': ':::MLLOG ' + '[' * num_bytes,
             'v06': f':::MLL 1.0 note:{" " * num_bytes}x',
             'v05': f':::MLPv0.5.0 resnet 1.0 (a:1) note:{" " * num_bytes}x',
             'plain': 'a' * num_bytes}

    def make(tree: Path) -> None:
        lines = later_run(0, submission_status='onprem')
        write_lines(tree / 'result_0.txt', [*lines[:30], texts[kind], *lines[30:]])
    return make


# Logs that end before the end

def _cut(lines: Lines) -> Lines:
    return lines[:len(lines) - 8]  # after the evaluation at 32 epochs, in a later one


def _until_now(lines: Lines) -> Lines:
    """The same run, whose last event is a moment old."""
    stamps = re.compile(r'(?<="time_ms": )\d+')
    shift_ms = round(1e3 * time.time()) - max(int(m) for line in lines for m in stamps.findall(line))
    return [stamps.sub(lambda m: str(int(m[0]) + shift_ms), line) for line in lines]


def running(tree: Path) -> None:
    write_runs(tree / 'box', lambda k: _until_now(_cut(later_run(k))) if k == 4 else later_run(k))


def ended_long_ago(tree: Path) -> None:
    running(tree)
    old = time.time() - 2 * 86_400
    os.utime(tree / 'box/result_4.txt', (old, old))


def _aged(tree: Path) -> None:
    """A log that nobody writes to any more."""
    for path in tree.rglob('result_*.txt'):
        os.utime(path, (1_700_000_000, 1_700_000_000))


def cut_in_a_line(tree: Path) -> None:
    _one_of_five(tree, lambda lines: [*_cut(lines), lines[-8][:57]])
    _aged(tree)


# Many of one

def repeated(tree: Path) -> None:
    """Twelve lines that contradict an earlier one."""
    _one_of_five(tree, lambda lines: put(lines, 'run_stop', *(
        mllog('global_batch_size', seconds_of(lines[-2]), 1632) for _ in range(12)), lines[-1]))


def torn_often(tree: Path) -> None:
    """Twelve lines that are cut in the same way, at twelve places."""
    def change(lines: Lines) -> Lines:
        return [x for i, line in enumerate(lines) for x in ([line[:60 + i % 12], line] if 40 <= i < 52 else [line])]
    _one_of_five(tree, change)


def evaluated_twice(tree: Path) -> None:
    """Every evaluation stands twice, a second apart, with one value."""
    _one_of_five(tree, lambda lines: [x for line in lines for x in (
        [line, *moved([line], 0.5)] if '"eval_accuracy"' in line else [line])])


# Hostile

def bad_number(number: str, key: str = 'run_stop') -> Make:
    """One of five logs has a time that is none."""
    def change(lines: Lines) -> Lines:
        return [re.sub(r'"time_ms": \d+', f'"time_ms": {number}', line) if f'"{key}"' in line else line
                for line in lines]

    def make(tree: Path) -> None:
        _one_of_five(tree, change)
        _aged(tree)
    return make


def _accuracies(write: Callable[[float], object]) -> Callable[[Lines], Lines]:
    return lambda lines: [re.sub(r'("key": "eval_accuracy", "value": )([\d.]+)',
                                 lambda m: m[1] + json.dumps(write(float(m[2]))), line) for line in lines]


def accuracy_as(write: Callable[[float], object]) -> Make:
    """A set whose accuracies are written in another way."""
    change = _accuracies(write)
    return lambda tree: write_runs(tree / 'box', lambda k: change(later_run(k)))


def encoded(encode: Callable[[str], bytes]) -> Make:
    """One of five logs has other bytes."""
    def make(tree: Path) -> None:
        write_runs(tree / 'box', later_run)
        path = tree / 'box/result_2.txt'
        path.write_bytes(encode(path.read_text()))
        _aged(tree)
    return make


def interleaved(tree: Path) -> None:
    """A line of another rank stands in the middle of one."""
    def change(lines: Lines) -> Lines:
        place = next(i for i, line in enumerate(lines) if '"epoch_num": 20' in line)
        other = mllog('tracked_stats', 0, {'throughput': 1.0}, epoch_num=19)
        return [*lines[:place], lines[place][:50] + other, lines[place][50:], *lines[place + 1:]]
    _one_of_five(tree, change)


def zipped(text: str) -> bytes:
    return gzip.compress(text.encode(), mtime=0)


def two_runs(tree: Path) -> None:
    _one_of_five(tree, lambda lines: [*lines, *moved(lines, 3600)])


def empty(tree: Path) -> None:
    _one_of_five(tree, lambda lines: [])


# Habits of strangers

def prefixed(*prefixes: str) -> Make:
    """A set whose lines all stand behind what a launcher or a logger writes."""
    return lambda tree: write_later(tree, 'box', lambda k: [prefixes[i % len(prefixes)] + line for i, line in
                                                             enumerate(later_run(k, submission_status='onprem'))])


def _in_metadata(lines: Lines, change: Callable[[dict], dict]) -> Lines:
    def one(line: str) -> str:
        e = json.loads(line[len(':::MLLOG '):])
        return ':::MLLOG ' + json.dumps({**e, 'metadata': change(e['metadata'])})
    return [one(line) for line in lines]


def epochs_as(write: Callable[[int], object]) -> Make:
    """A set whose epoch numbers are written in another way."""
    def run(k: int) -> Lines:
        return _in_metadata(later_run(k),
                            lambda m: {**m, 'epoch_num': write(m['epoch_num'])} if 'epoch_num' in m else m)
    return lambda tree: write_runs(tree / 'box', run)


def evaluation_of_epoch_0(tree: Path) -> None:
    """The untrained network is evaluated, too."""
    def run(k: int) -> Lines:
        lines = later_run(k)
        return put(lines, 'run_start', *moved([mllog('eval_accuracy', 0.5, 0.001, epoch_num=0)], 7200 * k), offset=1)
    write_runs(tree / 'box', run)


def only_epochs_from_0(tree: Path) -> None:
    def run(k: int) -> Lines:
        return [re.sub(r'"epoch_num": (\d+)', lambda m: f'"epoch_num": {int(m[1]) - 1}', line)
                if re.search('"epoch_(start|stop)"', line) else line for line in later_run(k)]
    write_runs(tree / 'box', run)


def v05_epochs_from_1(tree: Path) -> None:
    def run(k: int) -> Lines:
        return [re.sub(r'("epoch": |train_epoch: |eval_start: |eval_stop: )(\d+)',
                       lambda m: f'{m[1]}{int(m[2]) + 1}', line) for line in v05_run(k)]
    write_v05(tree, 'box', run, entry(1, 8))


def _blocks(k: int, number: Callable[[int], dict]) -> Lines:
    """A run with blocks alone, without the starts and stops of epochs and evaluations."""
    lines = [line for line in later_run(k) if not re.search('"(epoch|eval)_(start|stop)"', line)]
    start = seconds_of(next(line for line in lines if '"run_start"' in line))
    result = []
    for line in lines:
        if '"eval_accuracy"' in line:
            epoch = json.loads(line[len(':::MLLOG '):])['metadata']['epoch_num']
            result.append(mllog('block_start', start, **number(epoch - PERIOD + 1)))
            start = seconds_of(line)
        result.append(line)
    return result


def blocks_from_zero(tree: Path) -> None:
    """Blocks and evaluations count from 0: the block 0 + 8 ends with the evaluation of epoch 7."""
    def run(k: int) -> Lines:
        lines = _blocks(k, lambda first: {'first_epoch_num': first - 1, 'epoch_count': PERIOD})
        return _in_metadata(lines, lambda m: {**m, 'epoch_num': m['epoch_num'] - 1} if 'epoch_num' in m else m)
    write_later(tree, 'box', run)


def blocks_by_their_last(tree: Path) -> None:
    """A block is named by its last epoch."""
    write_later(tree, 'box', lambda k: _blocks(k, lambda first: {'first_epoch_num': first + PERIOD - 1,
                                                                 'epoch_count': PERIOD}))


def blocks_in_fractions(tree: Path) -> None:
    """A block of so many steps is not a whole number of epochs."""
    write_later(tree, 'box', lambda k: _blocks(k, lambda first: {'first_epoch_num': float(first),
                                                                 'epoch_count': PERIOD + 0.01}))


def no_times_of_submission(tree: Path) -> None:
    """v0.6 lines of who submits have the time 0.0; run_final stands before run_stop."""
    def run(k: int) -> Lines:
        lines = as_v06(later_run(k))
        lines = [re.sub(r':::MLL [\d.]+ submission', ':::MLL 0.0 submission', line) for line in lines]
        return put(lines, 'run_stop', lines[-1].replace('run_stop', 'run_final'), lines[-1])
    write_later(tree, 'box', run, round_name='v0.6')


def two_workers(tree: Path) -> None:
    """Two workers log the same events, a few milliseconds apart, under namespaces of their own."""
    def run(k: int) -> Lines:
        lines = [line for line in later_run(k) if '"init_start"' not in line]
        return [x.replace('"namespace": ""', f'"namespace": "worker{n}"') for line in lines
                for n, x in enumerate((line, *moved([line], 0.003)))]
    write_later(tree, 'box', run, system('2', '4'))


def several_platforms(tree: Path) -> None:
    """Each of two nodes names itself."""
    def run(k: int) -> Lines:
        lines = later_run(k)
        place = next(i for i, line in enumerate(lines) if '"submission_platform"' in line)
        return [*lines[:place], lines[place].replace('1xbox', 'box-a'), lines[place].replace('1xbox', 'box-b'),
                *lines[place + 1:]]
    write_later(tree, 'box', run, system('2', '4'))


def described_as(nodes: object, per_node: object, num_inits: int = 1) -> Make:
    """A set of one process a node whose accelerators stand in the description alone."""
    return lambda tree: write_later(tree, 'box', lambda k: without(later_run(k, ranks=num_inits),
                                                                   'submission_platform'),
                                    system(nodes, per_node))


def old_keys_in_systems(tree: Path) -> None:
    """A description of v0.6 that has the keys of v0.5."""
    write_later(tree, 'box', lambda k: as_v06(without(later_run(k, ranks=1), 'submission_platform')), entry(512, 4),
                round_name='v0.6')


def entry_of_the_whole(tree: Path) -> None:
    """num_accelerators is of all 64 nodes, as the name of the accelerator tells."""
    write_v05(tree, 'box', lambda k: v05_run(k, seeds=1, local_batch=32768), entry(64, 512, accelerator='chip-512'))


def one_tree_a_submission(tree: Path) -> None:
    """An organisation with a submission a system: <org>/<submission>/results/<system>."""
    for name, nodes in (('resnet-chip-8', 1), ('resnet-chip-32', 4)):
        home = tree / 'v0.5/Acme' / name / 'results/chip'
        write_runs(home / 'resnet', lambda k: v05_run(k, seeds=1, local_batch=4096))  # noqa: B023
        write_json(home / 'entry.json', entry(nodes, 8))


def value_as(key: str, value: object) -> Make:
    """A set that writes a value in another way."""
    def run(k: int) -> Lines:
        return [re.sub(rf'("key": "{key}", "value": )[^,]+', rf'\g<1>{json.dumps(value)}', line)
                for line in later_run(k)]
    return lambda tree: write_later(tree, 'box', run, system('1', '8'))


def foreign_format(tree: Path) -> None:
    """Lines of another logger, without a token."""
    _one_of_five(tree, lambda lines: ['MLPerf: resnet [02/03/21 00:30:56], run_start',
                                      'MLPerf: resnet [02/03/21 00:40:40], eval_accuracy: {"value": 76.02%}',
                                      'MLPerf: resnet [02/03/21 00:40:41], run_stop'])


def from_one(tree: Path) -> None:
    """result_1.txt to result_5.txt."""
    write_runs(later_home(tree, 'box'), lambda k: later_run(k - 1), range(1, 6))


def other_benchmarks_beside(tree: Path) -> None:
    write_later(tree, 'box', later_run)
    for k in RUNS:
        write_lines(tree / f'v2.0/us/results/box/ssd/result_{k}.txt',
                    [line.replace('"resnet"', '"ssd"') for line in later_run(k)])
