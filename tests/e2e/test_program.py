"""launch/engines/program.sh: replacement of a launch script by the program of its checkout."""

import os
import shutil

from helpers import ROOT, run, write_files


def test_python_that_the_user_cannot_execute_is_named(tmp_path):
    for folder in ('a/.venv/bin', 'a/launch/engines'):
        (tmp_path / folder).mkdir(parents=True)
    script = tmp_path / 'a/launch/local.sh'
    for name in ('local.sh', 'engines/program.sh'):
        shutil.copy(ROOT / 'launch' / name, script.parent / name)
    done = run([script, 'word', '--help'])  # not the help of the script
    assert done.returncode == 2
    assert done.stderr == f'mlperf-rn50: {tmp_path}/a/.venv is missing; run launch/setup.sh there\n'
    (tmp_path / 'a/.venv/bin/python').symlink_to('python3.11')
    done = run([script])
    assert (
        done.returncode == 2
        and f' cannot execute {tmp_path}/a/.venv/bin/python3.11, to which' in done.stderr
    )
    # of a user without a name
    write_files(tmp_path, {'bin/id': '#!/bin/sh\necho 4711\nexit 1'}, mode=0o755)
    done = run([script], env={**os.environ, 'PATH': f'{tmp_path}/bin:{os.environ["PATH"]}'})
    assert f': user {os.geteuid()} cannot' in done.stderr and done.stderr.count('\n') == 1
