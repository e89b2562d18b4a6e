"""What is published of env.json, configurations and logs of runs."""

import json

import pytest
from lines import mllog
from sample_log import ENV, write_five

from mlperf_rn50.analysis.sets.load import load_run_sets
from mlperf_rn50.mllog.package.redact import (
    Site,
    check_logs,
    find_site,
    public_config,
    public_env,
)

HOSTS = ['dgx-1.site.org', 'dgx-10.site.org', '10.1.2.3']
ENV_OF_SITE = ENV | {
    'git_commit': 'a' * 40,
    'git_commit_missing': '/home/ada/code: no repository',
    'num_nodes': 3,
    'nodes': [{'hostname': name, 'num_ranks': 4} for name in HOSTS],
    'host': {**ENV['host'], 'hostname': 'dgx-1', 'os': 'Linux-6.1', 'home': '/home/ada'},
    'variables': {
        'OMP_NUM_THREADS': '4',
        'NCCL_IB_HCA': 'mlx5_0:1',
        'NCCL_SOCKET_IFNAME': 'dgx-10',
        'CUDA_VISIBLE_DEVICES': '0,1',
        'NCCL_DEBUG': '/home/ada/nccl.log',
        'NCCL_ALGO': '192.168.0.7',
        'HOROVOD_SECRET_KEY': 'xyz',
        'HOROVOD_GLOO_RENDEZVOUS_ADDR': '10.1.2.3',
        'NCCL_TOKEN': 'abc',
    },
}


@pytest.fixture
def runs(tmp_path):
    folder = write_five(tmp_path / 'runs', env=ENV_OF_SITE)
    return load_run_sets([folder])[0].runs


def test_env_json_is_published_without_names_paths_and_unknown_variables(runs):
    public = public_env(ENV_OF_SITE, find_site(runs))
    assert [node['hostname'] for node in public['nodes']] == ['node1', 'node2', 'node3']
    assert public['host']['hostname'] == 'node1'
    assert public['host']['hardware'] == ENV['host']['hardware']
    assert public['packages'] == ENV['packages'] and public['git_commit'] == 'a' * 40
    assert public['variables'] == {
        'OMP_NUM_THREADS': '4',
        'NCCL_IB_HCA': 'mlx5_0:1',
        'NCCL_SOCKET_IFNAME': 'node2',
        'CUDA_VISIBLE_DEVICES': '0,1',
    }
    text = json.dumps(public)
    assert not [s for s in ('dgx', 'site.org', 'ada', '10.1.2.3', 'xyz', 'abc') if s in text]


def test_a_host_has_one_number_in_all_runs(runs):
    env = {'host': {'hostname': 'dgx-10'}, 'nodes': [{'hostname': 'dgx-10'}]}
    assert public_env(env, find_site(runs))['nodes'] == [{'hostname': 'node2'}]


def test_host_name_is_hidden_as_a_word_only(runs):
    site = find_site(runs)
    assert site.publish('on dgx-1.other.org, dgx-11 and xdgx-1') == 'on node1, dgx-11 and xdgx-1'


@pytest.mark.parametrize(
    'env',
    [
        {},
        {'host': 3, 'nodes': 'x', 'variables': []},
        {'nodes': [1], 'packages': [1], 'libraries': 'x'},
    ],
)
def test_malformed_env_json_is_published_empty(runs, env):
    assert not any(public_env(env, find_site(runs)).values())


def test_configuration_is_published_without_paths_and_persons(runs):
    config = {
        'run': {'dir': '/scratch/ada/x', 'submission_poc_name': 'Ada', 'reference': ['/a/b']},
        'data': {'dir': 'data/imagenet', 'mean': [127.5], 'dataset': 'imagenet'},
        'schedule': {'base_lr': 0.1},
    }
    runs[0].path.with_name('config.yaml').write_text(json.dumps(config))  # JSON is YAML
    assert public_config(config, find_site(runs)) == {
        'run': {},
        'data': config['data'],
        'schedule': config['schedule'],
    }


def test_words_of_the_program_are_published_though_a_host_has_such_a_name():
    config = {
        'run': {'submission_platform': 'box gpu', 'submission_division': 'closed'},
        'data': {'dataset': 'gpu'},
        'train': {'device': 'gpu'},
    }
    found = public_config(config, Site({'gpu': 'node1', 'closed': 'node2'}))
    assert found['run'] == {'submission_platform': 'box node1', 'submission_division': 'closed'}
    assert (found['data'], found['train']) == (config['data'], config['train'])


def test_host_called_like_a_word_of_every_log_is_no_fault(runs):
    assert check_logs(runs, Site({'resnet': 'node1', 'node': 'node2'})) == []


def test_path_of_initial_weights_is_searched_in_logs(runs):
    config = {'train': {'init_weights': '/scratch/ada/best.npz'}}
    runs[0].path.with_name('config.yaml').write_text(json.dumps(config))
    assert '/scratch/ada/best.npz' in find_site(runs).paths


@pytest.mark.parametrize(
    'text', ['dgx-10', '/home/me/imagenet', '/home/me', 'on dgx-1.site.org', '10.1.2.3']
)
def test_name_or_path_in_a_log_is_a_fault(runs, text):
    path = runs[3].path
    path.write_text(path.read_text() + mllog('x', 0, 'dgx-100 /home/men 10.1.2.33') + '\n')
    assert check_logs(runs, find_site(runs)) == []
    path.write_text(path.read_text() + mllog('x', 0, text) + '\n')
    [fault] = check_logs(runs, find_site(runs))
    assert fault.file == 'result_3.txt'
