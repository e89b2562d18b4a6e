"""Shell injection: configuration, options, host names, variables and the working directory are
never executed."""

import dataclasses
import os
import tempfile
from pathlib import Path

import pytest
import yaml
from helpers import ROOT, json_table, run, write_files
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mlperf_rn50.config import SECTIONS

DIGITS = ROOT / 'launch/configs/digits_cpu.yaml'
# Texts that shells evaluate in some contexts. CANARY is a file that must not be created.
PAYLOADS = [
    *r"""
$(touch CANARY)
`touch CANARY`
x[$(touch CANARY)]
x"; touch CANARY; "
x'; touch CANARY #
${x:-$(touch CANARY)}
-x; touch CANARY
*
; touch CANARY
$((x[$(touch CANARY)]))
| touch CANARY
%n\n$(touch CANARY)
""".strip().splitlines(),
    'x\nseeds[$(touch CANARY)]\nseeds[$(touch CANARY)]',
    'a b\tc',
    '\x1b]0;x\x07',
]
PAYLOAD = st.sampled_from(PAYLOADS)
STRINGS = [
    (name, f.name)
    for name, section in SECTIONS.items()
    for f in dataclasses.fields(section)
    if f.type in (str, str | None)
]
VARIABLES = (
    'OMP_NUM_THREADS SLURM_RESTART_COUNT MLPERF_RN50_RANKS_PER_DEVICE MLPERF_RN50_JOB HOROVOD_X '
    'MLPERF_RN50_BIND CUDA_MPS_PIPE_DIRECTORY TMPDIR SLURM_JOB_ID'
).split()
# Stand-ins for Slurm that start ranks locally, one at a time.
TOOLS = {
    'srun': '#!/bin/sh\nwhile [ "${1#*/bind.sh}" = "$1" ]; do shift; done\nexec "$@"',
    'scontrol': '#!/bin/sh\necho localhost',
}
SLURM = {
    'SLURM_SUBMIT_DIR': str(ROOT),
    'SLURM_JOB_ID': '7',
    'SLURM_JOB_NODELIST': 'n1',
    'SLURM_JOB_NUM_NODES': '1',
}


@settings(max_examples=3, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(st.sampled_from(STRINGS), PAYLOAD), min_size=1, max_size=4),
    st.dictionaries(st.sampled_from(VARIABLES), PAYLOAD, max_size=2),
    st.sampled_from(['file', 'options']),
    PAYLOAD,
    st.sampled_from(['', '--hosts', '--study']),
)
@example([(('run', 'dir'), PAYLOADS[-3])], {}, 'file', '', '')
def test_shell_code_in_values_is_not_executed(keys, variables, way, word, option):
    assert {('run', 'dir'), ('data', 'dataset'), ('train', 'init_weights')} < set(STRINGS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        canary = folder / 'canary'
        write_files(folder, TOOLS, mode=0o755)

        def armed(text):
            return text.replace('CANARY', str(canary))

        tree = yaml.safe_load(DIGITS.read_text())
        tree.setdefault('data', {})['dir'] = str(folder / 'none')
        words = ['--run.dir', str(folder / 'run')]
        for (section, key), payload in keys:
            if way == 'file':
                tree.setdefault(section, {})[key] = armed(payload)
                words = []
            else:
                words += [f'--{section}.{key}={armed(payload)}']
        (folder / 'c.yaml').write_text(yaml.safe_dump(tree))
        env = {**os.environ, **SLURM, 'PATH': f'{folder}:{os.environ["PATH"]}'}
        env |= {name: armed(text) for name, text in variables.items()}
        words = ['--config', str(folder / 'c.yaml'), '--no-doctor', *words]
        words += [option, armed(word)] if option else []
        script = {'': 'slurm.sbatch', '--hosts': 'mpirun.sh', '--study': 'sweep.sh'}[option]
        done = run(['bash', ROOT / 'launch' / script, *words], cwd=folder, env=env)
        assert not canary.exists(), (script, words, variables)
        assert done.returncode and 'Traceback' not in done.stderr, done.stderr


@pytest.mark.parametrize(
    'script, words',
    json_table("""
"bind.sh"      | ["true"]
"local.sh"     | ["--help"]
"ranks.sh"     | []
"slurm.sbatch" | ["--help"]
"docker.sh"    | ["--help"]
"""),
)
def test_working_directory_is_not_imported(tmp_path, script, words):
    names = ('psutil', 'json', 'mlperf_rn50', 'yaml', 'sitecustomize')
    write_files(tmp_path, {f'{n}.py': 'open("canary", "w")\nraise SystemExit(9)' for n in names})
    env = {**os.environ, 'SLURM_SUBMIT_DIR': str(ROOT)}
    done = run(['bash', ROOT / 'launch' / script, *words], cwd=tmp_path, env=env)
    assert not (tmp_path / 'canary').exists()
    assert done.returncode == (2 if script == 'ranks.sh' else 0), done.stderr


@pytest.mark.parametrize('engine', ['openmpi.sh', 'horovodrun.sh', 'srun.sh'])
@pytest.mark.parametrize('slots', ['h1:0', 'h1:x[$(touch canary)]', 'h1:2;touch canary'])
def test_engines_accept_only_numeric_slots(tmp_path, engine, slots):
    done = run([ROOT / 'launch/engines' / engine, slots, 'true'], cwd=tmp_path)
    assert done.returncode == 2 and 'Usage: launch/engines/' in done.stderr
    assert not list(tmp_path.iterdir())


def test_guard_rejects_a_path_as_job(tmp_path):
    for job, code in ((f'../../{tmp_path}', 2), ('1-a', 0)):
        done = run([ROOT / 'launch/guard.sh', '--list', 'localhost', job], stdin=-3)
        assert done.returncode == code
