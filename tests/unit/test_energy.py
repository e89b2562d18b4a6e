"""Energy of a run: telemetry files of nodes and every format of the report, with made-up
numbers."""

import json
import re

import pytest
from helpers import table
from lines import START_S, run_lines, write_lines
from made_systems import page_of

from mlperf_rn50.analysis.report.sections import make_report
from mlperf_rn50.analysis.sets.load import load_run_sets
from mlperf_rn50.analysis.sets.scaling import make_studies
from mlperf_rn50.analysis.show.plain import render_text
from mlperf_rn50.mllog.read.reader import read_run
from mlperf_rn50.mllog.sidecar import energy as energy_module
from mlperf_rn50.mllog.sidecar.energy import NO_COUNTERS, NO_TELEMETRY, read_energy


def line(time_s, **values):
    """Return a telemetry line of a node whose clock is 7 s ahead of the log."""
    return json.dumps({'time_ms': round(1e3 * (START_S + 7 + time_s)), **values})


def reading(time_s, **joules):
    """Return a telemetry line with the joules of each kind of devices, of which one is '0'."""
    kinds = {kind: v if isinstance(v, dict) else {'0': v} for kind, v in joules.items()}
    return line(time_s, energy_j=kinds)


def steady(start_s=-10, stop_s=30, clock_s=0.0, run_s=0, **watts):
    """Return a reading per second of devices at constant power, and at 40 % of it until 4 s before
    run_start."""

    def joules(t, w):
        return w * (0.4 * (min(t, run_s - 4) - start_s) + max(0.0, t - run_s + 4))

    rows = [
        (start_s - 0.1, line(start_s - 0.1, event='start')),
        (run_s, line(run_s, event='run_start', clock_s=clock_s)),
    ]
    for t in range(start_s, stop_s + 1):
        rows.append((t, reading(t, **{kind: joules(t, w) for kind, w in watts.items()})))
    return [text for _, text in sorted(rows, key=lambda r: r[0])]


def write_node(folder, host, lines, number=0):
    (folder / f'telemetry_{number}_{host}.jsonl').write_text('\n'.join(lines) + '\n')


def write_log(folder, number=0, nodes=1, **keys):
    return write_lines(
        folder / f'result_{number}.txt',
        run_lines(nodes=nodes, ranks=nodes, accelerators=False, target=0.759, seed=number, **keys),
    )


def energy_of(log, *nodes):
    for number, lines in enumerate(nodes, 1):
        write_node(log.parent, f'n{number}', lines)
    return read_energy(read_run(log))


def readings(pairs):
    """Return telemetry lines with the start of the run and (seconds, joules) of a CPU."""
    return [line(0, event='run_start', clock_s=0.0), *(reading(t, cpu=j) for t, j in pairs)]


# Invalid lines are ignored.
HOSTILE = [
    line(12.5, energy_j={'cpu': {'0': '@'}}).replace('"@"', value)
    for value in ('-5', 'NaN', '1e300', 'true', '"9"', 'null')
]
HOSTILE += [
    line(12.5, energy_j=[1]),
    line(12.5, energy_j={'cpu': [1], 'gpu': 7}),
    '{"time_ms": NaN, "event": 1}',
    reading(12.5, cpu={'x' * 65: 1.0}),
    '[' * 100_000,
]
STEADY = steady(cpu=100)
NO_ENERGY = [*readings([]), line(1, cpu_percent=3.0)]
# Killed at 15 s with a checkpoint from 10 s, and resumed 1,000 s later.
RESUMED = steady(start_s=990, run_s=1000, stop_s=1013, clock_s=10.0, cpu=200)


def between(*limits):
    """Return the telemetry of a CPU of one watt, with readings between these seconds."""
    return readings((t, t) for t in range(*limits))


TELEMETRY = {
    'steady': STEADY,
    'none': [],
    'no_energy': NO_ENERGY,
    'uneven': readings([(-1.5, 0), (0.5, 100), (10, 400), (21, 1100), (23, 1500)]),
    'with_a_gap': [*STEADY[:14], *STEADY[28:]],
    'hostile': [*STEADY[:25], *HOSTILE, *STEADY[25:]],
    'weak': steady(cpu=10),
    'microseconds_late': steady(cpu=100, clock_s=5.7e-6),
    'too_strong': steady(cpu=2e4),
    'before_run': STEADY[:5],
    'booted': [*STEADY, line(31, event='stop', boot='b1')],
    'to_18': steady(stop_s=18, cpu=100),
    'to_20': steady(stop_s=20, cpu=100),
    'from_4': between(4, 30),
    'from_2_to_20': between(2, 21),
    'decreasing': [*STEADY, reading(31, cpu=3.0)],
    'backwards': [*STEADY, reading(5, cpu=9e4)],
    'constant_second': [text.replace('"cpu": {', '"cpu": {"1": 5.0, ') for text in STEADY],
    'resumed': RESUMED,
    'killed_at_15': [*steady(stop_s=15, cpu=100), *RESUMED],
    'killed_at_6': [*steady(stop_s=6, cpu=100), *RESUMED],
}


@pytest.mark.parametrize(
    'nodes, joules, reason',
    table(f"""
uneven | 1225 |
with_a_gap | 2200 |
hostile | 2200 |
microseconds_late | 2200 |
to_20 | 2200 |
steady weak | 2420 |
killed_at_15 | 3400 |
steady none | | telemetry of 1 node, but 2 in the log
steady no_energy | | n2 has no readable counters
steady before_run | | n2 has no samples from the start of the run
resumed | | n1 has no samples from the start of the run
booted booted | | n1 and n2 are the same machine, which would count twice
none | | {NO_TELEMETRY}
no_energy | | {NO_COUNTERS}
to_18 | | n1, cpu 0: the nearest sample is 4.0 s from the end, expected at most 3 s
killed_at_6 | | n1, cpu 0: the nearest sample is 4.0 s from the end, expected at most 3 s
from_4 | | n1, cpu 0: the nearest sample is 4.0 s from the start, expected at most 3 s
from_2_to_20 | | n1, cpu 0: the samples cover 18.0 s of 22.0 s
too_strong | | n1, cpu 0: got 20,000 W, expected at most 10,000 W
decreasing | | n1, cpu 0: the counter decreases
backwards | | n1, cpu 0: the sample times decrease
constant_second | | n1, cpu 1: the counter does not change
"""),
)
def test_cpu_joules_or_the_reason_for_none(tmp_path, nodes, joules, reason):
    """Without a partial sum; a few seconds are extrapolated. Killed runs were resumed from 10 s."""
    lines = [TELEMETRY[name] for name in nodes.split()]
    energy = energy_of(write_log(tmp_path, nodes=len(lines)), *filter(None, lines))
    assert energy.reasons.get('cpu', '') == reason
    if reason:
        assert (energy.cpu_joules, energy.joules) == (None, None)
    else:
        assert energy.cpu_joules == pytest.approx(float(joules))


def test_number_of_devices_is_bounded(tmp_path):
    lines = readings((t, {str(k): 1.0 + t for k in range(1000)}) for t in range(-1, 24))
    assert len(energy_of(write_log(tmp_path), lines).nodes['n1']['cpu']) == 64


def test_energy_of_a_running_run_covers_the_time_so_far(tmp_path):
    log = write_log(tmp_path, nodes=2, status=None)
    energy = energy_of(log, steady(stop_s=18, cpu=100), steady(stop_s=15, cpu=100))
    assert energy.seconds == 15 and energy.cpu_joules == pytest.approx(3000)


@pytest.fixture
def studies(tmp_path):
    """Systems: 1x1 measured in two runs, 2x1 with a node missing in one, 4x1 without telemetry, 8x1
    without energy."""
    for nodes, counts in ((1, (1, 1)), (2, (2, 1)), (4, (0, 0)), (8, (0, 0))):
        for number, count in enumerate(counts):
            folder = write_log(tmp_path / f's/{nodes}x1', number, nodes).parent
            for node in range(count):
                write_node(folder, f'n{node}', steady(cpu=100 + 100 * number, gpu=300), number)
    write_node(folder, 'n1', NO_ENERGY)
    return lambda price=None: make_studies(load_run_sets([tmp_path]), None, price)


def rows_of(text):
    """Return the cells of each line."""
    return [re.split(' {2,}', line.strip()) for line in text.splitlines()]


def test_tables_have_columns_of_known_values(studies, tmp_path):
    text = render_text(make_report(studies(3.5), has_all_findings=True))
    heads = ['node-hours', 'cost', 'CPU kWh', 'GPU kWh', 'images/J']
    columns, _, first, second, *_ = rows_of(text[text.index('\n  nodes ') + 1 :])
    first, second = ([dict(zip(columns, row))[h] for h in heads] for row in (first, second))
    assert first == ['0.00611', '0.0214', '0.000917', '0.00183', '259']
    assert second[2:] == ['-', '-', '-']
    note = 'CPU energy was not measured in 1 of 2 runs; result_1.txt: telemetry of 1 node, but 2'
    assert f'2x1: note: {note}' in text
    by_run = rows_of(text.partition('Energy per run\n')[2])
    assert by_run[2] == ['1x1', '22.0', '0.00275', 'CPUs and GPUs', '450']
    page = page_of(studies(3.5), tmp_path)
    assert '>0.0214<' in page and '>GPU kWh<' in page
    for path in tmp_path.rglob('telemetry*'):
        path.unlink()
    text = render_text(make_report(studies(2)))
    assert [h for h in heads if h in text] == ['node-hours', 'cost']


def test_readings_of_all_nodes_are_limited_in_total(tmp_path, monkeypatch):
    log = write_log(tmp_path / '2x1', nodes=2)
    own = steady(cpu=100)
    assert energy_of(log, own, own).joules
    # a line has at most a reading
    monkeypatch.setattr(energy_module, 'MAX_READINGS', 3 * len(own))
    energy = energy_of(log, own, own)
    assert energy.joules is None
    assert all('readings' in energy.reasons[kind] for kind in ('cpu', 'gpu'))
