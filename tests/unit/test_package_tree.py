"""Submission trees: layouts of the rounds, programs of commits, scripts and README of a system."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from helpers import CLI, ROOT, git, run, write_files
from made_systems import commit_program
from sample_log import ENV, write_five

from mlperf_rn50.analysis.sets.load import Rules, load_run_sets
from mlperf_rn50.errors import ConfigError, UserError
from mlperf_rn50.mllog.check.official_tree import TreeVerdict
from mlperf_rn50.mllog.package import submission
from mlperf_rn50.mllog.package.code import accepted_keys, check_commit, copy_code, sources_of
from mlperf_rn50.mllog.package.tree_layouts import layout_of, rule_files
from mlperf_rn50.mllog.rulesets import ROUNDS

NEW = 'benchmarks/resnet/implementations'


@pytest.fixture(autouse=True)
def without_verdict(monkeypatch):
    """The official tools take seconds."""
    monkeypatch.setattr(submission, 'judge_package', lambda *arguments: TreeVerdict())


@pytest.fixture
def runs(tmp_path):
    return write_five(tmp_path / 'runs')


def make(tmp_path, runs, system='box', round_name='v4.0', **keys):
    """Package a set with the program in checkout/."""
    given = {'org': 'us', 'out': tmp_path / 'out', 'code': tmp_path / 'checkout'} | keys
    order = submission.Order(system=system, round=round_name, **given)
    (run_set,) = load_run_sets([runs], Rules([ROUNDS[round_name]]))
    return submission.make_package(run_set.runs, run_set.judgement, order)


def files_of(home, code):
    """Return the files of a tree, except those of the program."""
    paths = [str(p.relative_to(home)) for p in home.rglob('*') if p.is_file()]
    return {path for path in paths if f'/{code}/' not in path}


@pytest.mark.parametrize(
    'round_name, home, folder, names, description',
    [
        (
            'v0.5',
            'us/box',
            'code/resnet',
            'README.md setup_box.sh preproc_dataset.sh run_and_time_box.sh',
            'results/box/entry.json submission.json',
        ),
        ('v0.7', 'us', f'{NEW}/box', 'README.md setup.sh init_datasets.sh run_and_time.sh', ''),
        ('v4.0', 'us', f'{NEW}/box', 'README.md setup.sh init_datasets.sh run_and_time.sh', ''),
    ],
)
def test_tree_has_the_files_of_its_round(
    tmp_path, runs, round_name, home, folder, names, description
):
    code = f'mlperf_rn50-{commit_program(tmp_path / "checkout", runs)[:8]}'
    made = make(tmp_path, runs, round_name=round_name, poc_email='a@b.c')
    assert made.home == tmp_path / 'out' / home
    expected = {f'{folder}/{name}' for name in names.split()}
    expected |= {f'{folder}/{name}_{k}' for k in range(5) for name in ('config', 'env')}
    expected |= {f'results/box/resnet/result_{k}.txt' for k in range(5)}
    expected |= set(description.split() or ['systems/box.json', f'{folder}/box_{code}.json'])
    found = {re.sub(r'(_\d)\.(yaml|json)$', r'\1', name) for name in files_of(made.home, code)}
    assert found == expected
    assert {*rule_files(layout_of(round_name), 'box', code)} <= files_of(made.home, code)
    title, *lines = (made.home / folder / 'README.md').read_text().splitlines()
    [machine] = [line for line in lines if line.startswith('| machine |')]
    assert title == '# ResNet-50 v1.5 on box' and 'Xeon' in machine
    assert 'None' not in machine


def test_v06_has_a_folder_for_each_system_that_names_its_program():
    files = rule_files(layout_of('v0.6'), 'box', 'mxnet')
    folder = 'benchmarks/resnet/box'
    names = 'README.md setup.sh preproc_dataset.sh run_and_time.sh uses_mxnet'
    assert {*files} == {'systems/box.json', *(f'{folder}/{name}' for name in names.split())}


@pytest.mark.parametrize(
    'commits, refusal',
    [
        (['a' * 40] * 3 + ['b' * 40] * 2, 'b in result_3.txt, result_4.txt, expected one; repeat'),
        ([None] * 5, 'got commit unknown in env.json of the runs, expected 40 hexadecimal digits'),
        (['a' * 40 + '-dirty'] * 5, 'used commit aaaaaaaa with changed files, expected a commit'),
        (['a' * 40] * 5, 'its history lacks commit aaaaaaaa of the runs'),
        (['$(touch evil)'] * 5, 'got commit $(touch evil) in env.json'),
    ],
    ids='mixed unknown dirty absent hostile'.split(),
)
def test_runs_without_one_known_commit_are_refused(tmp_path, runs, commits, refusal):
    commit_program(tmp_path / 'checkout', runs)
    for k, commit in enumerate(commits):
        env = json.dumps(ENV | {'git_commit': commit})
        (runs / f'env{f"_{k}" if k else ""}.json').write_text(env)
    made = make(tmp_path, runs)
    assert made.home is None and refusal in ' '.join(made.refusals)
    assert not (tmp_path / 'out').exists()


def test_commit_outside_the_history_of_the_checkout_is_refused(tmp_path):
    home = tmp_path / 'checkout'
    main = commit_program(home)
    git(home, 'checkout', '-qb', 'other')
    other = commit_program(home, later='int')
    git(home, 'checkout', '-q', main)
    assert check_commit(home, main) == []
    [text] = check_commit(home, other)
    assert other[:8] in text and '--code DIR' in text


def test_commit_without_a_called_file_is_refused(tmp_path):
    home = tmp_path / 'checkout'
    commit_program(home)
    git(home, 'rm', '-q', 'launch/local.sh')
    git(home, 'commit', '-qm', 'x')
    commit = git(home, 'rev-parse', 'HEAD')
    assert check_commit(home, commit) == [
        f'commit {commit[:8]} lacks launch/local.sh, which the scripts call'
    ]


def test_configuration_that_the_commit_does_not_accept_is_refused(tmp_path, runs):
    commit_program(tmp_path / 'checkout', runs)
    for name in ('config_1.yaml', 'config_3.yaml'):
        (runs / name).write_text('data: {dir: x, depth: 50}\nmodel: {name: y}\n')
    made = make(tmp_path, runs)
    assert made.home is None and [text.partition(': a key')[0] for text in made.refusals] == [
        'config_1.yaml, config_3.yaml: data.depth',
        'config_1.yaml, config_3.yaml: model.name',
    ]


def test_keys_of_this_program_are_found_without_running_it():
    from dataclasses import fields

    from mlperf_rn50.config import SECTIONS

    expected = {name: {f.name for f in fields(part)} for name, part in SECTIONS.items()}
    assert accepted_keys(sources_of(ROOT)) == expected


def test_program_is_that_of_the_commit_of_the_runs(tmp_path, runs):
    home = tmp_path / 'checkout'
    commit = commit_program(home, runs)
    commit_program(home, later='int')
    (home / 'launch/local.sh').write_text('now')
    copy_code(tmp_path / 'code', home, commit)
    assert 'printf' in (tmp_path / 'code/launch/local.sh').read_text()
    assert 'later' not in (tmp_path / 'code/mlperf_rn50/config.py').read_text()


def test_two_systems_with_different_commits_keep_their_programs(tmp_path, runs):
    other = shutil.copytree(runs, tmp_path / 'other')
    first = commit_program(tmp_path / 'checkout', runs)
    second = commit_program(tmp_path / 'checkout', other, later='int')
    make(tmp_path, runs)
    home = make(tmp_path, other, system='box2').home
    for system, commit in (('box', first), ('box2', second)):
        readme = (home / NEW / system / 'README.md').read_text()
        assert commit in readme and f'../mlperf_rn50-{commit[:8]}/' in readme
        assert f'mlperf_rn50-{commit[:8]}' in (home / NEW / system / 'run_and_time.sh').read_text()
    programs = [home / NEW / f'mlperf_rn50-{c[:8]}/mlperf_rn50/config.py' for c in (first, second)]
    assert ['later' in p.read_text() for p in programs] == [False, True]


def test_replaced_system_leaves_the_other_one_and_no_unused_program(tmp_path, runs):
    again = write_five(tmp_path / 'again', seeds=range(11, 19))
    first = commit_program(tmp_path / 'checkout', runs)
    second = commit_program(tmp_path / 'checkout', again, later='int')
    make(tmp_path, runs, system='other')
    home = make(tmp_path, runs).home
    kept = {p: p.read_bytes() for p in home.rglob('*other*/**/*') if p.is_file()}
    make(tmp_path, again, is_replacing=True)
    assert {p: p.read_bytes() for p in home.rglob('*other*/**/*') if p.is_file()} == kept
    result = home / 'results/box/resnet/result_0.txt'
    assert result.read_bytes() == (again / 'result_0.txt').read_bytes()
    data = home / NEW / f'mlperf_rn50-{first[:8]}' / 'data'
    data.mkdir()
    notes = make(tmp_path, again, system='other', is_replacing=True).notes
    assert f'{data.parent}: unused, but not removed, because of data in it' in notes
    data.rmdir()
    own = data.parent / 'mlperf_rn50/own.sh'
    write_files(own.parent, {own.name: 'the user wrote this'})
    notes = make(tmp_path, again, system='other', is_replacing=True).notes
    assert 'because of mlperf_rn50/own.sh in it' in ' '.join(notes)
    own.unlink()
    make(tmp_path, again, system='other', is_replacing=True)
    assert {p.name for p in (home / NEW).glob('mlperf_rn50-*')} == {f'mlperf_rn50-{second[:8]}'}
    assert first != second and not list((tmp_path / 'out').glob('.package-*'))


def test_nothing_is_written_through_a_link_of_the_tree(tmp_path, runs):
    commit_program(tmp_path / 'checkout', runs)
    results = make(tmp_path, runs).home / 'results'
    elsewhere = results.rename(tmp_path / 'elsewhere')
    results.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match='results exists already and is not replaced'):
        make(tmp_path, runs, system='box2')
    assert [p.name for p in elsewhere.iterdir()] == ['box']


def test_replacement_keeps_other_benchmarks_and_refuses_files_of_the_user(tmp_path, runs):
    commit_program(tmp_path / 'checkout', runs)
    home = make(tmp_path, runs).home
    other = home / 'results/box/bert/result_0.txt'
    write_files(other.parent, {other.name: 'a log'})
    make(tmp_path, runs, is_replacing=True)
    assert other.read_text() == 'a log\n'
    for folder in ('results/box/resnet/power', f'{NEW}/box'):
        own = home / folder / 'notes.txt'
        write_files(own.parent, {own.name: 'mine'})
        with pytest.raises(UserError, match='is no file of package; move it out of the tree'):
            make(tmp_path, runs, is_replacing=True)
        assert own.read_text() == 'mine\n'
        own.unlink()
        if folder.endswith('power'):
            own.parent.rmdir()


def test_replacement_refuses_files_that_were_changed_since(tmp_path, runs):
    commit_program(tmp_path / 'checkout', runs)
    home = make(tmp_path, runs).home
    for path in (home / 'systems/box.json', home / NEW / 'box/README.md'):
        text = path.read_text()
        path.write_text(f'{text}\n')
        with pytest.raises(UserError, match=f'{path} exists already and is not replaced'):
            make(tmp_path, runs, is_replacing=True)
        path.write_text(text)
    make(tmp_path, runs, is_replacing=True)
    listed = (tmp_path / 'out/.mlperf_rn50.sha256').read_text()
    assert '  us/systems/box.json\n' in listed and '/mlperf_rn50/' not in listed


def test_logs_with_a_name_of_the_site_are_not_packaged(tmp_path, runs):
    commit_program(tmp_path / 'checkout', runs)
    for path in runs.glob('env*.json'):
        env = json.loads(path.read_text()) | {'host': {'hostname': 'secret7'}}
        path.write_text(json.dumps(env))
    (runs / 'result_1.txt').write_text((runs / 'result_1.txt').read_text() + 'on secret7\n')
    made = make(tmp_path, runs)
    assert made.home is None and 'result_1.txt: contains secret7' in made.refusals[0]


def test_replacement_in_v05_keeps_the_program_beside_the_files_of_the_system(tmp_path, runs):
    code = f'mlperf_rn50-{commit_program(tmp_path / "checkout", runs)[:8]}'
    v05 = {'round_name': 'v0.5', 'poc_email': 'a@b.c'}
    folder = make(tmp_path, runs, **v05).home / 'code/resnet'
    make(tmp_path, runs, is_replacing=True, **v05)
    assert (folder / code / 'setup.cfg').is_file()
    for own in (folder / 'notes.txt', folder / code / 'data/train.rec'):
        write_files(own.parent, {own.name: 'mine'})
        with pytest.raises(UserError, match='is no file of package'):
            make(tmp_path, runs, is_replacing=True, **v05)
        own.unlink()
    own.parent.rmdir()
    write_files(folder / code, {'launch/mine.sh': 'mine'})
    with pytest.raises(UserError, match=r'launch/mine.sh in it would be lost'):
        make(tmp_path, runs, is_replacing=True, **v05)
    (folder / code / 'launch/mine.sh').unlink()
    (tmp_path / 'checkout/launch/local.sh').write_text('exit\n')
    commit_program(tmp_path / 'checkout', runs)
    write_files(folder / code, {'launch/local.sh': 'mine'})
    with pytest.raises(UserError, match=r'launch/local.sh in it would be lost'):
        make(tmp_path, runs, is_replacing=True, **v05)


def test_changed_program_in_a_tree_is_not_kept(tmp_path, runs):
    commit_program(tmp_path / 'checkout', runs)
    home = make(tmp_path, runs).home
    source = next((home / NEW).rglob('mlperf_rn50-*/**/*.py'))
    source.write_text('')
    with pytest.raises(UserError, match=f'{source}: absent or changed since an earlier package'):
        make(tmp_path, runs, system='other')


def test_failed_replacement_leaves_the_old_files(tmp_path, runs, monkeypatch):
    again = write_five(tmp_path / 'again', seeds=range(11, 19))
    commit_program(tmp_path / 'checkout', runs, again)
    home = make(tmp_path, runs).home
    before = {p: p.read_bytes() for p in home.rglob('*') if p.is_file()}
    rename, failed = Path.rename, 0
    for num_moves in range(20):
        left = iter(range(num_moves))

        def move(path, target, left=left):
            if '.package-' in f'{path}{target}' and next(left, None) is None:
                raise OSError(28, 'No space left on device')
            return rename(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, 'rename', move)
            try:
                make(tmp_path, again, is_replacing=True)
            except UserError:
                failed += 1
                assert {p: p.read_bytes() for p in home.rglob('*') if p.is_file()} == before
            else:
                break
    assert failed >= 6 and {p: p.read_bytes() for p in home.rglob('*') if p.is_file()} != before


def test_scripts_call_the_launcher_of_the_program(tmp_path, runs):
    commit = commit_program(tmp_path / 'checkout', runs)
    tree = shutil.copytree(make(tmp_path, runs).home, tmp_path / 'a b' / 'us')
    folder = tree / NEW / 'box'
    done = run([folder / 'run_and_time.sh', '--run.seed', '5', '--seeds', '1'])
    words = done.stdout.splitlines()
    program = f'{folder}/../mlperf_rn50-{commit[:8]}'
    assert done.returncode == 0 and words[words.index('--config') + 1] == f'{folder}/config_0.yaml'
    assert words[-4:] == ['--run.seed', '5', '--seeds', '1'] and '--clear-caches' in words
    assert run([folder / 'setup.sh']).returncode == 0, program
    assert '"${MLPERF_RN50_VARIANT:-cu117}"' in (folder / 'setup.sh').read_text()
    shellcheck = Path(CLI[0]).with_name('shellcheck')
    assert run([shellcheck, *folder.glob('*.sh')]).returncode == 0


def test_readme_states_order_and_weights_of_the_configuration(tmp_path, runs, monkeypatch):
    commit_program(tmp_path / 'checkout', runs)
    monkeypatch.setattr(submission, 'accepted_keys', lambda _: accepted_keys(sources_of(ROOT)))
    for path in runs.glob('config*.yaml'):
        tree = yaml.safe_load(path.read_text())
        tree |= {
            'data': {'shuffle': 'node', 'node_rotation_epochs': 4},
            'train': {'init_weights': '/home/me/best.npz', 'max_epochs': None},
            'schedule': {'decay_epochs': 35.5},
        }
        path.write_text(yaml.safe_dump(tree))
    folder = make(tmp_path, runs).home / NEW / 'box'
    text = (folder / 'README.md').read_text()
    assert 'of the images of each node, which change every 4 epochs |' in text
    assert 'the weights best.npz of an earlier training |' in text and 'Xavier' not in text
    assert ', or 35 epochs |' in text
    assert '"best.npz"' in next(folder.glob('box_*.json')).read_text()
    assert '--train.init_weights "${WEIGHTS:?' in (folder / 'run_and_time.sh').read_text()


@pytest.mark.parametrize(
    'sections, texts',
    [
        (
            {'schedule': {'decay': 'step', 'step_factor': 0.1, 'step_epochs': [30, 60]}},
            ['epochs, times 0.1 at epochs 30, 60 |'],
        ),
        (
            {'schedule': {'decay': 'poly', 'poly_power': 2.0, 'end_lr': 0.1, 'decay_epochs': 35}},
            ['epochs, decay poly of power 2.0 to 0.1 at epoch 35 |'],
        ),
        (
            {
                'data': {'sizes': [128, 160], 'eval_size': 192, 'mirror': 'alternating'}
                | {'eval_flip': True},
                'train': {'ema': 0.99},
                'optimizer': {'name': 'sgd', 'nesterov': True, 'last_layer_lr_factor': 0.02},
            },
            [
                'resized to 128, 160 (by epoch) pixels, mirrored in every other epoch |',
                'centre crop of 192 pixels, mean of an image and its mirror image |',
                'sgd, Nesterov momentum',
                'averaged with weight 0.99 |',
                'last layer times 0.02 |',
            ],
        ),
    ],
)
def test_readme_states_what_determines_the_result(tmp_path, runs, monkeypatch, sections, texts):
    commit_program(tmp_path / 'checkout', runs)
    monkeypatch.setattr(submission, 'accepted_keys', lambda _: accepted_keys(sources_of(ROOT)))
    for path in runs.glob('config*.yaml'):
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | sections))
    readme = (make(tmp_path, runs).home / NEW / 'box/README.md').read_text()
    assert [text for text in texts if text not in readme] == []


def test_readme_names_a_line_of_this_program_for_each_statement(tmp_path, runs, monkeypatch):
    commit_program(tmp_path / 'checkout', runs)
    monkeypatch.setattr(submission, 'sources_of', lambda code: sources_of(ROOT))
    readme = make(tmp_path, runs).home / NEW / 'box/README.md'
    _, _, *rows = readme.read_text().partition('| subject |')[2].splitlines()
    places = {row.split('|')[1].strip(): row.split('|')[-2].strip() for row in rows}
    assert len(places) > 10
    for subject, place in places.items():
        path, _, line = place.partition(':')
        assert (ROOT / path).read_text().splitlines()[int(line) - 1].strip(), subject
    files = {'learning rate': 'train/schedule.py', 'precision': 'train/options.py'}
    for subject, name in {**files, 'end': 'train/loop.py'}.items():
        assert places[subject].startswith(f'mlperf_rn50/{name}:')
