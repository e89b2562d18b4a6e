"""The energy of a run: read back from its nodes' files, and in every form of the report. Numbers are made up."""
import csv
import io
import json
import re

import pytest
from helpers import call
from lines import START_S, run_lines, write_lines

from mlperf_rn50.mlperf.energy import NO_COUNTERS, NO_TELEMETRY, read_energy
from mlperf_rn50.mlperf.reader import read_run
from mlperf_rn50.study.cost import cost, kwh, mean_energy, node_hours
from mlperf_rn50.study.report_data import render_csv, render_json
from mlperf_rn50.study.report_page import render_html
from mlperf_rn50.study.report_text import render_table
from mlperf_rn50.study.scaling import make_studies
from mlperf_rn50.study.systems import load_systems

RUN_S = 22.0  # of lines.run_lines


def line(time_s, **values):
    """A line of a node whose clock is 7 s ahead of the log's."""
    return json.dumps({'time_ms': round(1e3 * (START_S + 7 + time_s)), **values})


def reading(time_s, cpu=None, gpu=None, **values):
    found = {kind: v if isinstance(v, dict) else {'0': v} for kind, v in (('cpu', cpu), ('gpu', gpu)) if v is not None}
    return line(time_s, energy_j=found, **values)


def steady(start_s=-10, stop_s=30, zero=0.0, clock_s=0.0, init_s=-4, run_s=0, **watts):
    """A sampler of devices that take as many watts, 40 % of them before init_start; a reading a second."""
    def joules(t, w):
        idle_s = min(t, init_s) - start_s
        return zero + w * (0.4 * idle_s + max(0.0, t - init_s))
    rows = [(start_s - 0.1, line(start_s - 0.1, event='start')), (init_s, line(init_s, event='init_start')),
            (run_s, line(run_s, event='run_start', clock_s=clock_s))]
    rows += [(t, reading(t, **{kind: joules(t, w) for kind, w in watts.items()}))
             for t in (start_s + k for k in range(int(stop_s - start_s) + 1))]
    return [text for _, text in sorted(rows, key=lambda r: r[0])]


def write_node(folder, host, lines, number=0):
    (folder / f'telemetry_{number}_{host}.jsonl').write_text('\n'.join(lines) + '\n')


def write_log(folder, number=0, nodes=1, **keys):
    return write_lines(folder / f'result_{number}.txt',
                       run_lines(nodes=nodes, ranks=nodes, accelerators=False, target=0.759, seed=number, **keys))


@pytest.fixture
def log(tmp_path):
    return write_log(tmp_path / '1x1')


def energy_of(log, **nodes):
    for host, lines in nodes.items():
        write_node(log.parent, host, lines)
    return read_energy(read_run(log))


def test_joules_are_of_the_run_alone(log):
    found = energy_of(log, n1=steady(cpu=100, gpu=300))
    assert found.seconds == RUN_S and found.measured == ('cpu', 'gpu')
    assert found.cpu_joules == pytest.approx(2200) and found.gpu_joules == pytest.approx(6600)
    assert found.joules == pytest.approx(8800) and not found.reasons
    assert found.nodes == {'n1': {'cpu': {'0': pytest.approx(2200)}, 'gpu': {'0': pytest.approx(6600)}}}


def test_ends_between_two_samples_are_interpolated(log):
    readings = [(-1.5, 0), (0.5, 100), (10, 400), (21, 1100), (23, 1500)]
    found = energy_of(log, n1=[line(0, event='run_start', clock_s=0.0), *(reading(t, cpu=j) for t, j in readings)])
    assert found.cpu_joules == pytest.approx(1300 - 75)


def test_lost_lines_take_no_joules_away(log):
    lines = steady(cpu=100)
    assert energy_of(log, n1=[*lines[:14], *lines[28:]]).cpu_joules == pytest.approx(2200)


def test_nodes_add_up_and_so_do_their_devices(tmp_path):
    log = write_log(tmp_path, nodes=2)
    two = [text.replace('"gpu": {"0":', '"gpu": {"1": 5.0, "0":') for text in steady(cpu=100, gpu=50)]
    found = energy_of(log, n1=steady(cpu=100, gpu=50), n2=steady(cpu=10, gpu=25))
    assert (found.cpu_joules, found.gpu_joules) == (pytest.approx(2420), pytest.approx(1650))
    found = energy_of(log, n1=two)
    assert found.gpu_joules is None and found.cpu_joules == pytest.approx(2420)
    assert found.reasons == {'gpu': 'n1, gpu 1: its counter stands still'}


def test_a_node_that_is_missing_leaves_no_sum_of_the_others(tmp_path):
    log = write_log(tmp_path, nodes=2)
    found = energy_of(log, n1=steady(cpu=100))
    assert found.joules is None and found.measured == () and found.nodes == {}
    assert found.reasons == {'cpu': 'nodes with telemetry: 1, in the log: 2', 'gpu': NO_COUNTERS}
    found = energy_of(log, n2=[line(0, event='run_start', clock_s=0.0), line(1, cpu_percent=3.0)])
    assert found.reasons['cpu'] == 'n2 has no counters that could be read'
    assert energy_of(log, n2=steady(cpu=1)[:5]).reasons['cpu'] == 'n2 has no samples of the start of the run'


def test_hosts_of_one_machine_do_not_count_twice(tmp_path):
    log = write_log(tmp_path, nodes=2)
    lines = [*steady(cpu=100), reading(31, event='stop', boot='b1', cpu=9e4)]
    assert energy_of(log, n1=lines, n2=lines).reasons['cpu'].startswith('n1 and n2 are one machine')


def test_no_telemetry_is_not_measured_and_no_zero(log):
    found = energy_of(log)
    assert found.joules is None and found.reasons == dict.fromkeys(('cpu', 'gpu'), NO_TELEMETRY)
    found = energy_of(log, n1=[line(0, event='run_start', clock_s=0.0), line(1, cpu_percent=3.0)])
    assert found.joules is None and found.reasons == dict.fromkeys(('cpu', 'gpu'), NO_COUNTERS)


@pytest.mark.parametrize('lines, why', [
    (steady(stop_s=18, cpu=100), 'no sample within 3 s of the end, the next is 4.0 s away'),
    ([line(0, event='run_start', clock_s=0.0), *(reading(t, cpu=t) for t in range(4, 30))],
     'no sample within 3 s of the start, the next is 4.0 s away'),
    (steady(run_s=0, cpu=2e4), '20,000 W is more than any device takes'),
    ([*steady(cpu=100), reading(31, cpu=3.0)], 'its counter falls'),
    ([*steady(cpu=100), reading(5, cpu=9e4)], 'the times of its samples fall'),
    (steady(cpu=0), 'its counter stands still')])
def test_what_the_samples_do_not_tell_is_not_measured(log, lines, why):
    found = energy_of(log, n1=lines)
    assert found.cpu_joules is None and found.reasons['cpu'] == f'n1, cpu 0: {why}'


def test_a_little_that_is_missing_at_an_end_is_as_the_rest(log):
    assert energy_of(log, n1=steady(stop_s=20, cpu=100)).cpu_joules == pytest.approx(2200)
    rows = [reading(t, cpu=t) for t in range(2, 21)]
    found = energy_of(log, n1=[line(0, event='run_start', clock_s=0.0), *rows])
    assert found.reasons['cpu'] == 'n1, cpu 0: its samples cover 18.0 of 22.0 s'


def test_hostile_readings_are_none(log):
    bad = ['-5', 'NaN', '1e300', 'Infinity', 'true', '"9"', 'null', '[1]', '{}']
    rows = [line(12.5, energy_j={'cpu': {'0': '@'}}).replace('"@"', value) for value in bad]
    rows += [line(12.5, energy_j=[1]), line(12.5, energy_j={'cpu': [1], 'gpu': 7}), '{"time_ms": NaN, "event": 1}',
             reading(12.5, cpu={'x' * 65: 1.0}), '[' * 100_000]
    lines = [text for t in steady(cpu=100) for text in ([t, *rows] if f'{(START_S + 19) * 1e3:.0f}' in t else [t])]
    assert len(lines) > len(steady(cpu=100))
    assert energy_of(log, n1=lines).cpu_joules == pytest.approx(2200)


def test_so_many_devices_are_no_node(log):
    rows = [reading(t, cpu={str(k): 1.0 + t for k in range(1000)}) for t in range(-1, 24)]
    assert len(energy_of(log, n1=[line(0, event='run_start', clock_s=0.0), *rows]).nodes['n1']['cpu']) == 64


def test_parts_of_a_resumed_run_add_up_without_the_gap_and_what_was_trained_again(tmp_path):
    # Killed at 15 s, the checkpoint is of 10 s; it goes on a thousand seconds later.
    log = write_log(tmp_path)
    first, second = steady(stop_s=15, cpu=100), steady(start_s=990, init_s=995, run_s=1000, stop_s=1013, clock_s=10.0,
                                                       cpu=200)
    assert energy_of(log, n1=[*first, *second]).cpu_joules == pytest.approx(10 * 100 + 12 * 200)
    assert energy_of(log, n1=second).reasons['cpu'] == 'n1 has no samples of the start of the run'
    assert 'no sample within 3 s of the end' in energy_of(log, n1=[*steady(stop_s=6, cpu=100), *second]).reasons['cpu']


def test_of_a_run_that_goes_on_it_is_so_far(tmp_path):
    log = write_log(tmp_path, nodes=2, status=None)
    found = energy_of(log, n1=steady(stop_s=18, cpu=100), n2=steady(stop_s=15, cpu=100))
    assert found.seconds == 15 and found.cpu_joules == pytest.approx(3000)
    assert read_energy(read_run(log), until_s=5.0).cpu_joules == pytest.approx(1000)


def test_costs():
    assert node_hours(1800, 4) == 2 and cost(1800, 4, 3.5) == 7 and kwh(3.6e6) == 1 and kwh(None) is None


@pytest.fixture
def studies(tmp_path):
    """1x1: two runs measured. 2x1: one of the two lacks a node. 4x1: no telemetry. 8x1: none of energy."""
    for nodes in (1, 2, 4, 8):
        for number in (0, 1):
            write_log(tmp_path / f's/{nodes}x1', number, nodes)
            for node in range({1: 1, 2: 2 - number, 4: 0, 8: 0}[nodes]):
                write_node(tmp_path / f's/{nodes}x1', f'n{node}', steady(cpu=100 + 100 * number, gpu=300), number)
    write_node(tmp_path / 's/8x1', 'n1', [line(0, event='run_start', clock_s=0.0), line(1, cpu_percent=1.0)])

    def made(price=None):
        return make_studies(load_systems([tmp_path]), None, price)
    return made


def test_the_mean_of_runs_is_of_what_all_of_them_measured(studies):
    systems = studies()[0].systems
    assert systems[0].energy.cpu_joules == pytest.approx(3300)
    assert systems[1].energy.joules is None and systems[2].energy is None
    assert systems[0].images_per_joule == pytest.approx(2 * 1_281_167 / 9900)
    assert mean_energy([]).joules is None


def columns(text):
    """The heads of the first table."""
    return re.split(' {2,}', next(row for row in text.splitlines() if row.startswith('system')).strip())


def test_tables_have_the_columns_that_are_known(studies, tmp_path):
    text = render_table(studies(3.5))
    assert {'node-hours', 'cost', 'CPU kWh', 'GPU kWh', 'images/J'} < set(columns(text))
    rows = {w[0]: dict(zip(columns(text), w)) for row in reversed(text.splitlines()) if (w := re.split(' {2,}', row))}
    assert [rows['1x1'][h] for h in ('node-hours', 'cost', 'CPU kWh', 'GPU kWh', 'images/J')] == [
        '0.00611', '0.0214', '0.000917', '0.00183', '259']
    assert [rows['2x1'][h] for h in ('CPU kWh', 'GPU kWh', 'images/J')] == ['-', '-', '-']
    assert ('- 2x1: CPU energy is not measured in 1 of 2 runs: result_1.txt: nodes with telemetry: 1, in the log: 2'
            in text)
    assert 'U energy' not in text.replace('- 2x1: CPU energy', '').replace('- 2x1: GPU energy', '')
    energy = text.partition('Energy of a run\n')[2].splitlines()
    assert re.split(' {2,}', energy[2].strip()) == ['1x1', '22.0', '0.00275', 'CPUs and GPUs', '450']
    for path in tmp_path.rglob('telemetry*'):
        path.unlink()
    assert not {'node-hours', 'cost', 'CPU kWh', 'GPU kWh', 'images/J'} & set(columns(render_table(studies())))
    assert set(columns(render_table(studies(2)))) & {'node-hours', 'cost', 'CPU kWh'} == {'node-hours', 'cost'}


def test_what_was_counted_in_vain_is_said(log):
    energy_of(log, n1=steady(cpu=0))
    text = render_table(make_studies(load_systems([log])))
    assert '- 1x1: CPU energy is not measured in 1 of 1 runs: result_0.txt: n1, cpu 0: its counter stands still' in text
    assert 'GPU energy' not in text


def test_json_and_csv_have_null_for_what_was_not_measured(studies):
    first, second, third, fourth = json.loads(render_json(studies(3.6)))['systems']
    assert first['cost'] == pytest.approx(0.022) and first['node_hours'] == pytest.approx(22 / 3600)
    assert first['cpu_kwh'] == pytest.approx(3300 / 3.6e6) and first['energy_not_measured'] == {}
    assert first['runs'][1]['energy_of_nodes'] == {'n0': {'cpu': {'0': pytest.approx(4400)},
                                                          'gpu': {'0': pytest.approx(6600)}}}
    assert second['cpu_kwh'] is None and set(second['energy_not_measured']) == {'cpu', 'gpu'}
    assert second['runs'][0]['cpu_joules'] == pytest.approx(4400) and second['runs'][1]['cpu_joules'] is None
    assert (third['cpu_kwh'], third['images_per_joule'], third['energy_not_measured']) == (None, None, None)
    assert fourth['energy_not_measured'] == {'cpu': NO_COUNTERS, 'gpu': NO_COUNTERS}
    rows = list(csv.DictReader(io.StringIO(render_csv(studies()))))
    assert [r['cpu_joules'][:4] for r in rows] == ['2200', '4400', '4400', *[''] * 5]
    assert rows[0]['cost'] == '' and rows[5]['cpu_kwh'] == '' and 'energy_of_nodes' not in rows[0]


def test_the_page_says_what_it_costs(studies, tmp_path):
    page = render_html(studies(3.5), [[]], tmp_path)
    assert '0.0214 for 0.00611 node-hours' in page and '>GPU kWh<' in page
    assert 'node-hours' not in render_html(make_studies(load_systems([tmp_path / 's/4x1'])), [[]], tmp_path)


@pytest.mark.parametrize('price', ['0', '-1', 'nan', 'inf', 'free', ''])
def test_a_price_is_a_number_above_0(log, price):
    done = call('report', log, '--price-per-node-hour', price)
    assert done.returncode == 2 and 'expected a number above 0, such as 3.5' in done.stderr
    assert done.stderr.count('\n') == 1
