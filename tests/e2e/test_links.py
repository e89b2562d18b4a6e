"""Outputs in folders full of links: no command and no launcher changes the file that a link leads
to."""

import functools
import os
import re
import shutil
import sys

import pytest
from e2e.training import arguments
from helpers import ROOT, argv, call, run, shipped_logs
from made_systems import commit_program

from mlperf_rn50.cli import COMMANDS
from mlperf_rn50.launch.engines import ENGINES

FIVE = shipped_logs() / 'digits_five'
PRECIOUS = 'precious\n'
# folders and files with names that no user has
RANDOM = re.compile(r'\.(new|package)-|\.tmp$|/tmp')
ONLY_PRINTS = {'bench', 'check', 'classify', 'completion', 'doctor', 'evaluate'}
# Words of each command that writes files, with {out} for the folder; {run} and {data} are made by
# fixtures, and {five} are runs of the program {code}.
WRITES = {
    'export': '{run} --format=gluon --out {out} --data.dir {data}',
    'package': '{five} --code {code} --org us --system box --out {out}',
    'predict': 'v2.0/NVIDIA/dgxa100_ngc22.04_mxnet --layouts 1x8 8x8 --strong --out {out}',
    'prepare': 'digits --out {out} --workers 1',
    'recipe': '1664 --nodes 2 --ranks-per-node 4 --out {out}/recipe.yaml',
    'report': f'{shipped_logs()}/digits_sweep {FIVE} --out {{out}}',
    'train': '--train.max_epochs=1 --run.telemetry=true --run.log_v06=true '
    '--checkpoint.period_epochs=1',
    'watch': '{out} --html',
    'why': f'{shipped_logs()}/cifar10_five --out {{out}}',
}
UNFIT = ('train', 'package')  # whose exit code is 1: the target is missed, digits are not ImageNet
_opened: list[str] = []  # paths opened to write


def _note(event, words):
    is_written = event == 'open' and words[2] & (os.O_WRONLY | os.O_RDWR)
    if is_written and isinstance(words[0], (str, bytes, os.PathLike)):
        _opened.append(os.fsdecode(words[0]))


@pytest.fixture(scope='module', autouse=True)
def audited():
    sys.addaudithook(_note)


@pytest.fixture(scope='module')
def small_run(tiny, thin, tmp_path_factory):
    """Folder of a run of one epoch, with weights."""
    folder = tmp_path_factory.mktemp('run')
    options = '--train.max_epochs=1 --run.telemetry=true --run.tensorboard=true'.split()
    done = call(*arguments(folder, tiny, *options))
    assert done.returncode == 1 and (folder / 'weights').is_dir(), done.stderr
    return folder


@pytest.fixture(scope='module')
def places(small_run, tiny, tmp_path_factory):
    """Return the folders in the words of commands."""
    five = shutil.copytree(FIVE, tmp_path_factory.mktemp('runs') / 'five')
    commit_program(five.parent / 'code', five)
    return {'run': small_run, 'data': tiny, 'five': five, 'code': five.parent / 'code'}


def words_of(command, out, places):
    words = [w.format(out=out, **places) for w in WRITES[command].split()]
    data = places['data']
    return arguments(out, data, *words) if command == 'train' else [command, *words]


def prepare_inputs(command, out):
    out.mkdir()
    if command == 'watch':
        for name in ('result_0.txt', 'metrics.jsonl', 'config.yaml'):
            shutil.copy(FIVE / name, out)


def files_in(folder):
    return {str(p.relative_to(folder)) for p in folder.rglob('*') if p.is_file()}


def test_every_command_is_tried():
    # the last two are tried below
    assert ONLY_PRINTS | set(WRITES) | {'launch', 'sweep'} == set(COMMANDS)
    for name in ONLY_PRINTS:
        assert '--out' not in call(name, '--help').stdout, name


@pytest.fixture(scope='module')
def written(places, thin, tmp_path_factory):
    """Return the names of all files that a command writes into an empty folder, except those with
    random names."""

    @functools.cache
    def names_of(command):
        out = tmp_path_factory.mktemp(command) / 'out'
        prepare_inputs(command, out)
        inputs = files_in(out)
        _opened.clear()
        assert call(*words_of(command, out, places)).returncode == (command in UNFIT)
        opened = {os.path.relpath(p, out) for p in _opened if p.startswith(f'{out}/')}
        return sorted((files_in(out) | {n for n in opened if not RANDOM.search(n)}) - inputs)

    return names_of


@pytest.mark.parametrize('plant', [os.symlink, os.link, shutil.copy], ids=['link', 'hard', 'file'])
@pytest.mark.parametrize('command', WRITES)
def test_outputs_replace_no_file_of_the_user(command, plant, written, places, tmp_path):
    """Also no target of a link. Either the command is refused, or it uses other names."""
    # the run would take another number
    names = [n for n in written(command) if n != 'result_0.txt']
    parts = [names, names[1::2], names[-1:]] if plant is shutil.copy else [names]
    for k, planted in enumerate(parts):
        out, kept = tmp_path / f'out{k}', tmp_path / f'kept{k}'
        prepare_inputs(command, out)
        kept.mkdir()
        for i, name in enumerate(planted):
            (kept / str(i)).write_text(PRECIOUS)
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            plant(kept / str(i), out / name)
        before = files_in(out)
        done = call(*words_of(command, out, places))
        for i, name in enumerate(planted):
            texts = {(kept / str(i)).read_text(), (out / name).read_text()}
            assert texts == {PRECIOUS}, name
        if done.returncode != (command in UNFIT):
            assert done.returncode in (1, 2) and str(out) in done.stderr
            assert done.stderr.count('mlperf-rn50: ') == 1, done.stderr
            assert command == 'train' or files_in(out) == before


@pytest.mark.parametrize('make_link', [os.symlink, os.link], ids=['symbolic', 'hard'])
def test_launchers_do_not_follow_links(make_link, tmp_path):
    # all run one supervisor
    assert set(ENGINES) == {'local', 'mpirun', 'apptainer', 'horovodrun', 'slurm'}
    names = 'attempts.jsonl', 'failures.jsonl', '.launcher.lock'
    (tmp_path / 'run').mkdir()
    kept, links = ([tmp_path / part / name for name in names] for part in ('', 'run'))
    for file, link in zip(kept, links):
        file.write_text(PRECIOUS)
        make_link(file, link)
    command = '{} --hosts host.invalid --no-doctor --config {} --run-dir {}'
    config = ROOT / 'launch/configs/digits_cpu.yaml'
    for _ in names:  # each call stops at a link
        done = run(argv(command, ROOT / 'launch/mpirun.sh', config, tmp_path / 'run'), cwd=ROOT)
        assert done.returncode and 'Traceback' not in done.stderr
        assert {file.read_text() for file in kept} == {PRECIOUS}
        for link in links:
            if str(link) in done.stderr or link == links[-1] and 'link' in done.stderr:
                link.unlink(missing_ok=True)


# --- reading


def assert_not_packaged(folder, *texts):
    """Assert that a run set is refused with some texts and without a secret."""
    done = call(*argv('package {} --org a --system b --out {}', folder, folder.parent / 'out'))
    assert done.returncode == 1 and not (folder.parent / 'out/a').exists()
    assert all(text in done.stdout for text in texts) and 'SECRET' not in done.stdout


@pytest.mark.parametrize('name', ['result_2.txt', 'config_2.yaml', 'env_2.json'])
def test_linked_files_of_a_run_are_not_packaged(tmp_path, name):
    shutil.copytree(FIVE, tmp_path / 'set')
    (tmp_path / 'set' / name).rename(tmp_path / 'elsewhere')
    (tmp_path / 'set' / name).symlink_to(tmp_path / 'elsewhere')
    text = f'{name}: got a symbolic link, expected a file; replace it with a copy'
    assert_not_packaged(tmp_path / 'set', text)


def test_only_a_valid_configuration_is_packaged(tmp_path):
    shutil.copytree(FIVE, tmp_path / 'set')
    (tmp_path / 'set/config_1.yaml').write_text('TOP SECRET KEY')
    assert_not_packaged(tmp_path / 'set', 'result_1.txt: got no configuration in config_1.yaml')


def test_links_in_submitted_code_are_not_followed(tmp_path):
    from mlperf_rn50.mllog.package.code import copy_code, sources_of

    (tmp_path / 'secret').write_text('TOP SECRET KEY')
    home, code = tmp_path / 'home', tmp_path / 'code'
    commit_program(home)
    names = 'launch/other.sh', 'mlperf_rn50/other.py'
    for name in names:
        (home / name).symlink_to(tmp_path / 'secret')
    copy_code(code, home, commit_program(home))
    assert all((code / name).is_symlink() for name in names)
    assert 'SECRET' not in str(sources_of(code))
