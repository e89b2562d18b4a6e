"""Plots: consistent colours, axes, and limits on the number of marks."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from helpers import CLI, run, shipped_logs, write_files
from lines import run_lines, write_lines, write_set
from made_systems import study_of, write_layouts

from mlperf_rn50.analysis.report.plots import draw_study
from mlperf_rn50.analysis.show.figure import COLOURS, GRID, render_svg

SVG = '{http://www.w3.org/2000/svg}'


def pictures_of(*folders, **changes):
    """Return the plots of a study by name, with some fields of the study changed."""
    return {p.name: p for p in draw_study(replace(study_of(*folders), **changes))}


def marks_of(picture):
    """Return the title of each mark with the colours of the mark or its group."""
    marks = []
    for group in ElementTree.fromstring(render_svg(picture)).iter(f'{SVG}g'):
        if group.get('id', '').startswith('tip'):
            colours = set(re.findall('#[0-9a-f]{6}', ElementTree.tostring(group).decode())) - {GRID}
            marks += [(t.text, colours) for t in group.iter(f'{SVG}title')]
    return marks


@pytest.fixture(scope='module')
def sweep(tmp_path_factory):
    """Systems of 1, 2 and 40 nodes whose times differ more than tenfold; one run aborted."""
    tmp_path = tmp_path_factory.mktemp('sweep')
    times = {f'{n}x4': lambda k, n=n: (600.0 + k) / n for n in (1, 2, 40)}
    write_layouts(tmp_path / 'sweep', times, 3)
    aborted = lambda k: 'success' if k else 'aborted'  # noqa: E731
    return write_layouts(tmp_path / 'sweep', {'2x4': times['2x4']}, 3, status=aborted)


@pytest.fixture(scope='module')
def pictures(sweep):
    return pictures_of(sweep)


def test_system_has_one_exclusive_colour_in_all_plots(pictures):
    phases = set().union(*(drawn for _, drawn in marks_of(pictures['time_parts'])))
    assert phases and not phases & set(COLOURS)
    colours = {}
    for picture in pictures.values():
        for title, drawn in (
            marks_of(picture) if picture.name not in ('time_parts', 'sweep_1x4') else []
        ):
            system = (
                re.sub('^(1|2|40)x4/.*|:.*', r'\1', title).removesuffix('s').removesuffix(' node')
            )
            if drawn:  # an ideal line has the colour of the grid
                colours.setdefault(system, set()).update(drawn)
    assert len(pictures) == 7
    assert colours == {name: {c} for name, c in zip(('1', '2', '40'), COLOURS)}


def test_curve_that_starts_at_zero_has_a_logarithmic_axis(tmp_path):
    for name, epoch_s in (('a', 1.0), ('b', 100.0)):
        write_set(tmp_path / name, 1, epoch_s=epoch_s, first_s=0.0, eval_s=0.0)
    titles = [t for t, _ in marks_of(pictures_of(tmp_path)['accuracy_time'])]
    # the first evaluation is at 0 min
    assert len(titles) == 2 and all(t.endswith('2 epochs') for t in titles)


def test_heading_is_in_the_file_but_not_in_the_page(pictures):
    for name in ('accuracy_time', 'accuracy_epochs'):
        assert '>target 75.9 %<' in render_svg(pictures[name])
    for picture in pictures.values():
        for text in (picture.heading, picture.title):
            assert text in picture.svg and f'>{text}<' not in render_svg(picture)
        assert 'fill: #ffffff' in picture.svg and 'id="paper"' not in render_svg(picture)


def test_refused_system_is_named_but_not_drawn(sweep):
    study = study_of(sweep)
    refused = replace(study.run_sets[1], refusal='made up')
    drawn = pictures_of(sweep, run_sets=(study.run_sets[0], refused, study.run_sets[2]), series=())
    for name, picture in drawn.items():
        assert 'Not drawn because they are refused: 2 nodes' in picture.caption
        assert not [t for t, _ in marks_of(picture) if t.startswith(('2 nodes', '2x4'))], name
    assert drawn and not pictures_of(sweep, run_sets=(refused,), comparisons=(None,), series=())


def test_status_of_a_run_is_marked(sweep, pictures):
    svg = render_svg(pictures['epochs'])
    assert '>did not converge<' in svg and '>converged<' in svg and '>still running<' not in svg
    system = study_of(sweep / '1x4').baseline
    first, *others = system.runs
    run = replace(first, status='running', time_to_train_s=None)
    running = replace(system, runs=(run, *others))
    drawn = pictures_of(sweep / '1x4', run_sets=(running,), baseline=running)
    for name in ('epochs', 'accuracy_time'):
        svg = render_svg(drawn[name])
        assert '>still running<' in svg and '>did not converge<' not in svg
    assert '1x4/result_0.txt: 2.00 epochs, running' in render_svg(drawn['epochs'])
    assert 'sweep_1x4' not in drawn


def test_number_of_drawn_runs_is_limited_and_noted(tmp_path):
    curve, times = (0.2, 0.5, 0.6, 0.7, 0.76), {'1x4': lambda k: 60.0 + k / 7}
    pictures = pictures_of(write_layouts(tmp_path, times, 300, accuracies=curve))
    assert max(len(p.tips) for p in pictures.values()) < 10  # more runs do not add artists
    picture = pictures['time_to_train']
    times = [t.partition(':')[0] for t, _ in marks_of(picture)]
    assert len(times) == 1 + 240
    assert {'1x4/result_0.txt', '1x4/result_299.txt'} <= {*times}  # fastest and slowest
    assert 'At most 240 runs of each system are drawn, evenly spaced' in picture.caption
    assert len(marks_of(pictures['accuracy_epochs'])) == 5 * 60


def test_number_of_drawn_systems_is_limited_and_noted(tmp_path):
    curve = (*[0.5] * 44, 0.76)
    for i in range(30):
        write_set(tmp_path / f'box{i:02d}', 1, epoch_s=600.0 - i, seed=i, accuracies=curve)
    pictures = pictures_of(tmp_path)
    names = {t.partition('/')[0] for t, _ in marks_of(pictures['epochs']) if '/' in t}
    assert len(names) == 24 and {'box00', 'box29'} <= names
    assert all('24 of 30 systems are drawn' in p.caption for p in pictures.values())
    # Only the last of 45 evaluations of each run is marked.
    curves = pictures['accuracy_time']
    assert len(marks_of(curves)) == 24
    assert 'Only the last point of each curve is marked' in curves.caption
    assert '>other systems<' in render_svg(curves)


def test_unlogged_initialisation_has_no_bar(tmp_path):
    lines = [text for text in run_lines(target=0.759) if '"init_' not in text]
    write_lines(tmp_path / 'result_0.txt', lines)
    svg = render_svg(pictures_of(tmp_path)['time_parts'])
    assert 'before the clock 0.0 s' not in svg and 'later epochs 10.0 s' in svg


def test_settings_of_matplotlib_in_the_current_folder_change_nothing(tmp_path):
    settings = """
        text.usetex: True
        axes.facecolor: red
        lines.linewidth: 9
        savefig.format: pdf
        figure.dpi: 20"""
    write_files(tmp_path, {'mine/matplotlibrc': settings, 'other/empty': ''})
    files = []
    for name in ('mine', 'other'):
        command = [*CLI, 'report', shipped_logs() / 'digits_2ranks', '--out', 'out']
        done = run(command, cwd=tmp_path / name)
        assert done.returncode == 0, done.stderr
        files.append({p.name: p.read_bytes() for p in (tmp_path / name / 'out').glob('*.svg')})
    assert files[0] == files[1] != {}
