"""The encrypted archive, read by the commands of the official pack_submission.sh."""

import fcntl
import os
import pty
import subprocess
import sys
import termios

import pytest
from helpers import write_files

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.mllog.package.archive import pack_tree

_CALL = 'import sys, pathlib; from mlperf_rn50.mllog.package.archive import pack_tree'


def pack_on_terminal(tree, *passwords):
    """Pack a tree in a process that asks for the passwords. Return its exit code."""
    terminal, side = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, '-c', f'{_CALL}; pack_tree(pathlib.Path(sys.argv[1]))', tree],
        stdin=side,
        stdout=side,
        stderr=side,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(side)
    for password in passwords:
        text = b''
        while not text.endswith(b'password:'):
            text = text + os.read(terminal, 1)
        os.write(terminal, f'{password}\n'.encode())
    while True:
        try:
            if not os.read(terminal, 1024):
                break
        except OSError:  # the process has ended
            break
    os.close(terminal)
    return child.wait()


@pytest.fixture
def tree(tmp_path):
    write_files(
        tmp_path / 'us', {'results/box/resnet/result_0.txt': 'log', 'systems/box.json': '{}'}
    )
    (tmp_path / 'us/run.sh').write_text('exit')
    (tmp_path / 'us/run.sh').chmod(0o755)
    return tmp_path / 'us'


def test_archive_is_unpacked_by_the_official_commands(tree, tmp_path):
    assert pack_on_terminal(tree, 'secret', 'secret') == 0
    archive = 'mlperf_submission_us.tar.gz'
    summed = subprocess.run(['sha1sum', archive], cwd=tmp_path, capture_output=True, text=True)
    assert (tmp_path / 'mlperf_submission_us.sha1').read_text() == summed.stdout
    script = f'openssl enc -d -aes256 -in {archive} -pass pass:secret | tar -xz -C new'
    (tmp_path / 'new').mkdir()
    subprocess.run(['bash', '-c', script], cwd=tmp_path, check=True, stderr=subprocess.DEVNULL)
    new = tmp_path / 'new/us'
    names = {p.relative_to(tree) for p in tree.rglob('*')}
    assert {p.relative_to(new) for p in new.rglob('*')} == names
    assert (new / 'results/box/resnet/result_0.txt').read_text() == 'log\n'
    assert os.access(new / 'run.sh', os.X_OK)


def test_different_passwords_leave_no_file(tree, tmp_path):
    assert pack_on_terminal(tree, 'secret', 'other') == 1
    assert [p.name for p in tmp_path.iterdir()] == ['us']


def test_existing_archive_is_not_replaced(tree, tmp_path):
    write_files(tmp_path, {'mlperf_submission_us.sha1': 'mine'})
    with pytest.raises(ConfigError, match='us.sha1 exists'):
        pack_tree(tree)
