"""Reference convergence points: our verdict is that of the official checker."""
import pytest
from lines import write_set
from mlperf_logging.rcp_checker.rcp_checker import check_directory

from mlperf_rn50.study.rcp import check_rcp, is_applicable
from mlperf_rn50.study.systems import load_systems


def system_of(folder, batch, epochs, round_name='v4.0', **keys):
    write_set(folder / round_name / 'us/results/box/resnet', batch=batch, accuracies=(0.76,),
              period=lambda k: epochs[k], **keys)
    return load_systems([folder])[0]


@pytest.mark.parametrize('batch', [512, 1632, 3264, 4096, 5000, 13056, 60000, 67840, 80000])
@pytest.mark.parametrize('epochs', [[33, 34, 34, 34, 35], [35] * 5, [40, 44, 45, 46, 60], [78, 78, 80, 80, 85],
                                    [90] * 5])
def test_the_verdict_is_the_official_one(tmp_path, batch, epochs):
    system = system_of(tmp_path, batch, epochs)
    ours = check_rcp(system)
    passed, message, scale = check_directory(str(system.folder), 'training', '4.0.0', False, False,
                                             rcp_pass='pruned_rcps')
    assert ours.passed == passed, message
    if passed and scale != 1:
        assert f'scaled by {scale:.4f}' in ours.text
    assert ('must be submitted' in ours.text) == ('please submit RCP' in message)


def test_points_are_those_of_the_round_where_it_has_some(tmp_path):
    assert check_rcp(system_of(tmp_path / 'a', 3264, [35] * 5, 'v1.0')).ruleset == '1.0.0'
    old = check_rcp(system_of(tmp_path / 'b', 3264, [35] * 5, 'v0.7'))
    assert (old.ruleset, old.is_of_round) == ('4.0.0', False)


def test_a_run_without_convergence_counts_as_the_most(tmp_path):
    system = system_of(tmp_path, 3264, [30, 35, 36, 37, 31], status=lambda k: 'aborted' if k == 4 else 'success')
    assert is_applicable(system) and check_rcp(system).epochs == 36


@pytest.mark.parametrize('keys', [{'target': 0.749}, {'train_samples': 1437}, {'num_runs': 4}])
def test_other_targets_data_and_counts_have_no_points(tmp_path, keys):
    assert not is_applicable(load_systems([write_set(tmp_path, **{'accuracies': (0.76,), **keys})])[0])
