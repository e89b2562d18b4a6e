"""Ctrl-C in each state of a launcher, with stand-ins that hang for ssh, Slurm, guards and MPS."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
from helpers import HANG_LIMIT_S, ROOT, wait_for, write_files, write_programs

CONFIG = """
data: {synthetic: true, num_train: 64, num_val: 20, num_classes: 10, image_size: 32,
       resize_shorter: 32}
model: {name: resnet18}
train: {local_batch_size: 4}
"""
# Shorter limits, none for horovodrun, so that it is killed, and a program that fails at once
# instead of the ranks.
DRIVER = """import sys
from dataclasses import replace
from mlperf_rn50.cli import main
from mlperf_rn50.launch import engines, launcher
launcher.TERM_LIMIT_S = 0.0 if 'horovodrun' in sys.argv else 2.0
if '--comm.start_limit_s' in sys.argv:
    launcher.GRACE_S = 0.0
if GUARD:
    launcher.GUARD = GUARD
if FAILS:
    engines.ENGINES = {k: replace(v, get_program=lambda o, f: ['sh', '-c', 'exit 7', 'sh', 'sh'])
                       for k, v in engines.ENGINES.items()}
    from mlperf_rn50.cli import launch
    launch.ENGINES = engines.ENGINES
sys.exit(main(sys.argv[1:]))
"""
PATIENT = (ROOT / 'launch/guard.sh').read_text().replace('login_s=60', 'login_s=100000')
HANG = 'echo "$$ $*" >>"$STATE"; exec sleep 100000'
FAR = ('mpirun', '--hosts', f'{os.uname().nodename},h2')
HERE = ('mpirun', '--hosts', 'localhost', '--no-doctor')
BARE = (*FAR, '--no-doctor')
OPTIONS = ('--config', 'c.yaml', '--run-dir', 'run')


def when(pattern, text, other='exit 255'):
    return f'case "$*" in {pattern}) {text} ;; *) {other} ;; esac'


def state(
    *words,
    seen='^[0-9]+ ',
    guard='',
    fails=False,
    variables=MappingProxyType({}),
    code=1,
    **programs,
):
    """Return a state of a launcher: its words, stand-ins in PATH, and what the state looks like in
    the file of stand-ins."""
    return SimpleNamespace(**locals())


STATES = {
    'nodes of a Slurm job': state(
        'slurm', scontrol=HANG, variables={'SLURM_JOB_NODELIST': 'n[1-2]'}, code=130
    ),
    'probe before the test of settings': state(
        *FAR, ssh=HANG, seen=' h2 true', variables={'OMPI_MCA_btl': 'self,tcp'}
    ),
    'start of the guards': state(*BARE, guard=HANG),
    'doctor': state(*FAR, ssh=HANG, seen='orted'),
    'login before the ranks': state(
        'mpirun', '--hosts', 'h2,h3', '--no-doctor', ssh=HANG, seen='orted', guard=PATIENT
    ),
    'login with horovodrun': state(
        'horovodrun', *BARE[1:], ssh=HANG, seen='StrictHostKeyChecking', guard=PATIENT
    ),
    'list of processes': state(*BARE, '--comm.start_limit_s', '1', ssh=HANG, seen='--list-here'),
    'probe after a failure': state(*BARE, ssh=when('*true', HANG), seen=' true'),
    'wait for silent hosts': state(
        *BARE, '--restarts', '3', ssh='echo "$*" >>"$STATE"; exit 255', seen=r'( true\n[^~]*){3}'
    ),
    'pause before a restart': state(
        'local', '--no-doctor', '--restarts', '3', fails=True, seen='waiting 5 s'
    ),
    'end of the guards': state(
        *HERE,
        fails=True,
        guard='trap "echo 1 hangs >>$STATE" TERM; exec >/dev/null\nwhile :; do sleep 0.1; done',
    ),
    'end of MPS': state(
        *HERE,
        *'--ranks-per-device 2 --train.device gpu --model.fused_bn_relu false'.split(),
        **{'nvidia-smi': HANG},
        fails=True,
    ),
}


def left_over(mark):
    """Return the command lines of the processes with a variable."""
    found = []
    for path in Path('/proc').glob('[0-9]*'):
        try:
            if f'MARK={mark}'.encode() in (path / 'environ').read_bytes().split(b'\0'):
                found.append((path / 'cmdline').read_text().replace('\0', ' '))
        except OSError:
            continue
    return found


@pytest.mark.parametrize('name', STATES)
def test_ctrl_c_ends_a_launcher_and_leaves_nothing_behind(tmp_path, name):
    s = STATES[name]
    write_files(tmp_path, {'c.yaml': CONFIG, 'state': '', 'tmp/.keep': ''})
    write_programs(tmp_path / 'bin', **s.programs, guard=s.guard)
    guard = s.guard and f'{tmp_path}/bin/guard'
    driver = f'GUARD, FAILS = {guard!r}, {s.fails}\n{DRIVER}'
    env = {
        **os.environ,
        'PATH': f'{tmp_path}/bin:{os.environ["PATH"]}',
        'STATE': f'{tmp_path}/state',
        'MARK': str(tmp_path),
        'TMPDIR': f'{tmp_path}/tmp',
        **s.variables,
    }
    log, output = tmp_path / 'state', tmp_path / 'output'
    with open(output, 'w') as file:
        process = subprocess.Popen(
            [sys.executable, '-c', driver, 'launch', *s.words, *OPTIONS],
            cwd=tmp_path,
            env=env,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )

    def shown():
        return log.read_text() + output.read_text()

    pattern = f'(?m){s.seen}'
    wait_for(lambda: re.search(pattern, shown()), lambda: process.poll() is None, shown, 0.02)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(HANG_LIMIT_S) == s.code, output.read_text()
    wait_for(lambda: not left_over(tmp_path), lambda: True, lambda: str(left_over(tmp_path)))
    assert not (tmp_path / 'run').exists()
    assert [p.name for p in (tmp_path / 'tmp').iterdir()] == ['.keep']
    assert 'Traceback' not in output.read_text()
