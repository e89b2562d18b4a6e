"""Submission trees: accepted by the official checkers, or refused with the rule; results untouched."""
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from helpers import CLI, ROOT, run
from lines import mllog, quiet
from sample_log import LARS, SGD
from submissions import closed, write_five

from mlperf_rn50.config import DataConfig
from mlperf_rn50.errors import UserError
from mlperf_rn50.mlperf.package import Order, make_package
from mlperf_rn50.study.rcp import check_rcp
from mlperf_rn50.study.systems import load_systems

DIGITS = ROOT / 'logs/digits_five'  # five real runs


@pytest.fixture
def runs(tmp_path):
    """Makes a set of five logs of ImageNet with env.json, and reads it."""
    def runs(*args, seeds=range(1, 9), **keys):
        found = load_systems([write_five(tmp_path / 'runs', *args, seeds=seeds, **keys)])[0].runs
        assert [r.seed for r in found] == list(seeds[:len(found)])
        return found
    return runs


def order(tmp_path, **keys):
    return Order(**{'org': 'us', 'system': 'box', 'round': 'v4.0', 'out': tmp_path / 'out', **keys})


def official(tool, *args, cwd):
    done = subprocess.run([sys.executable, '-m', f'mlperf_logging.{tool}', *map(str, args)], cwd=cwd, text=True,
                          capture_output=True)
    return done.stdout + done.stderr


def test_five_real_runs_pass_the_official_checkers_and_are_labelled(tmp_path):
    done = run([*CLI, 'package', DIGITS, '--org', 'us', '--system', 'vm', '--out', tmp_path / 'out'])
    assert done.returncode == 0, done.stdout + done.stderr
    label = 'Trained on digits, not ImageNet: a check of the format, not a result'
    for finding in ('logs                5 of 5 pass the rules of 4.0.0', 'system description  passed',
                    'package_checker     found no errors (4.0.0)', label):
        assert finding in done.stdout
    home = tmp_path / 'out/us'
    checked = official('package_checker', home, 'training', '4.0.0', cwd=tmp_path)
    assert 'PACKAGE CHECKER FOUND NO ERRORS, SUCCESS !' in checked
    described = official('system_desc_checker', home / 'systems/vm.json', 'training', '4.0.0', cwd=tmp_path)
    assert 'checker passed' in described
    official('result_summarizer', home, 'training', '4.0.0', '--csv', 'summary.csv', cwd=tmp_path)
    summary = (tmp_path / 'summary.csv').read_text()
    score = load_systems([DIGITS])[0].score_minutes
    assert f'result_summarizer   {score:.2f} min' in done.stdout and ',vm,' in summary
    for k in range(5):
        assert (home / f'results/vm/resnet/result_{k}.txt').read_bytes() == (DIGITS / f'result_{k}.txt').read_bytes()
    assert label in json.loads((home / 'systems/vm.json').read_text())['sw_notes']
    code = home / 'benchmarks/resnet/implementations/mlperf_rn50'
    assert label in (code / 'README.md').read_text() and (code / 'code/mlperf_rn50/__main__.py').is_file()
    assert sorted(p.name for p in (code / 'runs_vm').iterdir()) == sorted(
        f'{stem}_{k}.{suffix}' for k in range(5) for stem, suffix in (('config', 'yaml'), ('env', 'json')))
    shellcheck = run([CLI[0].replace('python', 'shellcheck'), *code.glob('*.sh')])
    assert shellcheck.returncode == 0, shellcheck.stdout


@pytest.mark.parametrize('round_name', ['v1.0', 'v2.1', 'v3.1'])
def test_open_sets_of_every_round(tmp_path, runs, round_name):
    assert make_package(runs(), order(tmp_path, round=round_name)).refusals == ()


def test_the_description_is_that_of_the_machine(tmp_path, runs):
    gpu = replace(SGD, train=replace(SGD.train, device='gpu'))
    made = make_package(runs(gpu), order(tmp_path))
    found = json.loads((made.home / 'systems/box.json').read_text())
    assert len(found) == 33
    assert [found[k] for k in ('number_of_nodes', 'accelerators_per_node', 'accelerator_model_name',
                               'accelerator_memory_capacity', 'host_processors_per_node', 'host_processor_core_count',
                               'host_processor_vcpu_count', 'host_memory_capacity', 'host_storage_type',
                               'host_storage_capacity', 'host_networking', 'operating_system', 'framework')] == [
        '2', '4', 'V100', '32510 MiB', '2', '20', '40', '512 GB', '2x NVMe SSD', '2x 1600 GB', 'mlx5_0 100 Gb/sec',
        'Debian GNU/Linux 12', 'MXNet 1.9.1 Gluon']
    assert any('the system description says nothing of ' in n and 'cooling' in n for n in made.notes)


@pytest.mark.parametrize('keys, rule', [
    ({'num': 4}, 'a ResNet result is 5 runs; here are 4'),
    ({'num': 6}, 'a ResNet result is 5 runs; here are 6'),
    ({'ends': ['aborted', 'failed']},
     'one run of five may fail; here 2 did: result_0.txt (aborted), result_1.txt (failed)'),
    ({'seeds': [1, 2, 3, 4, 4]}, 'every run has a seed of its own; here some share one'),
    ({'config': closed(replace(SGD, data=DataConfig(dataset='digits', num_train=1437, num_val=360)))},
     'the closed division trains on ImageNet; these logs are of other data'),
    ({'config': closed(LARS)}, 'package_checker: RCP Test Failed: Missing RCP, please submit RCP with BS = 64')])
def test_a_set_that_a_rule_refuses_leaves_nothing_behind(tmp_path, runs, keys, rule):
    made = make_package(runs(**keys), order(tmp_path))
    assert made.home is None and rule in made.refusals
    assert not list((tmp_path / 'out').rglob('*'))


def test_logs_that_break_the_rules_are_said_in_words(tmp_path, runs):
    found = runs(closed(SGD), accuracies=(0.1, 0.75))
    later = make_package(found, order(tmp_path))
    assert later.home is None and len(later.refusals) == 5
    assert later.refusals[0].startswith('result_0.txt: eval_accuracy: no line passes the test')
    assert later.refusals[0].endswith('; the best is 0.75')


@pytest.mark.parametrize('key', ['opt_name', 'submission_division'])
def test_one_log_that_would_steer_the_official_tools_is_refused(tmp_path, runs, key):
    found = runs(ends=['aborted'])
    with open(found[0].path, 'a') as f:
        f.write(mllog(key, 0, 'adam/../../../tmp/x') + '\n')
    made = make_package(load_systems([found[0].path.parent])[0].runs, order(tmp_path))
    assert made.home is None
    assert made.refusals[0].startswith(f"result_0.txt: {key}: got 'adam/../../../tmp/x', expected")


def test_one_failed_run_is_accepted(tmp_path, runs):
    found = runs()
    lines = found[2].path.read_text().splitlines(keepends=True)
    found[2].path.write_text(''.join(lines[:-10]))  # killed before its end
    quiet(found[2].path)
    made = make_package(load_systems([found[2].path.parent])[0].runs, order(tmp_path))
    assert made.refusals == () and made.findings[0] == ('logs', '4 of 5 pass the rules of 4.0.0; one may fail')


def test_a_closed_set_that_converged_as_the_reference_does(tmp_path, runs):
    """36 epochs at a batch of 1632, where the reference has 35."""
    made = make_package(runs(closed(LARS), accuracies=(0.5,) * 17 + (0.7595,), batch=1632), order(tmp_path))
    assert ('convergence', 'RCP found') in made.findings, made.refusals
    folder = made.home / 'results/box/resnet'
    said = official('rcp_checker', folder, '--rcp_version', '4.0.0', cwd=tmp_path)
    assert 'RCP found, RCP test PASSED' in said
    verdict = check_rcp(load_systems([folder])[0])
    assert verdict.passed and verdict.text.startswith('passes: 36.00 epochs, reference 35.00')


def test_a_resumed_run_is_refused(tmp_path, runs):
    found = runs()
    changed = (replace(found[0], num_resumes=1), *found[1:])
    made = make_package(changed, order(tmp_path))
    assert made.refusals == ('result_0.txt: a log that spans a resume is not that of one timed run',)


def test_a_second_system_joins_the_tree_and_nothing_is_overwritten(tmp_path, runs):
    found = runs()
    make_package(found, order(tmp_path))
    home = make_package(found, order(tmp_path, system='box2')).home
    assert sorted(p.name for p in (home / 'results').iterdir()) == ['box', 'box2']
    assert (home / 'benchmarks/resnet/implementations/mlperf_rn50/run_and_time_box2.sh').is_file()
    assert 'SUCCESS' in official('package_checker', home, 'training', '4.0.0', cwd=tmp_path)
    with pytest.raises(UserError, match='is there already and is not overwritten'):
        make_package(found, order(tmp_path))
    assert not [p for p in (tmp_path / 'out').iterdir() if p.name.startswith('.')]


@pytest.mark.parametrize('name', ['', '..', '../x', 'a/b', '-x', '.x', 'a b', 'x' * 200, 'ü'])
@pytest.mark.parametrize('option', ['org', 'system'])
def test_a_name_cannot_leave_the_folder(tmp_path, option, name):
    with pytest.raises(UserError, match=f'--{option}: got'):
        make_package((), order(tmp_path, **{option: name}))


@pytest.mark.parametrize('env', [{}, {'host': 3},
                                 {'host': {'hardware': {'cpu': [], 'storage': {}, 'gpus': [1], 'networks': 'x'}}},
                                 {'git_commit': '$(touch evil)', 'packages': []}, {'nodes': [{'hostname': '../..'}]}])
def test_whatever_stands_in_env_json(tmp_path, runs, env):
    made = make_package(runs(env=env), order(tmp_path))
    assert made.refusals == () and not (tmp_path / 'evil').exists()


def test_the_command_wants_one_set(tmp_path, runs):
    runs()
    done = run([*CLI, 'package', tmp_path / 'runs', DIGITS, '--org', 'us', '--system', 'x', '--out', tmp_path / 'out'])
    assert (done.returncode, done.stdout) == (2, '') and 'RUNS: got 2 sets' in done.stderr
    done = run([*CLI, 'package', tmp_path / 'runs/result_0.txt', '--org', 'us', '--system', 'x', '--out',
                tmp_path / 'o'])
    assert done.returncode == 1 and 'refused by the rules of v4.0; nothing was written:' in done.stdout
