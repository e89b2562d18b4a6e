"""A submission tree: results as they are, the system description, the code, and what the official checkers say.

Source: MLPerf training submission rules; the layouts of v0.5 and of later rounds.
"""
import csv
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlperf_rn50
from mlperf_rn50.errors import UserError
from mlperf_rn50.files import write_atomically
from mlperf_rn50.mlperf import check
from mlperf_rn50.mlperf.description import beside, load_env
from mlperf_rn50.mlperf.events import printable
from mlperf_rn50.mlperf.run import Run

RULESETS = {'v0.5': check.V05, **{f'v{r[:3]}': r for r in check.RULESETS[1:]}}
NUM_RESULTS = 5
_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]{0,99}')
# What a submission's code is, of our checkout.
_CODE = ('mlperf_rn50', 'launch', 'setup.cfg', 'pyproject.toml', 'Dockerfile', 'README.md', 'CHANGELOG.md', 'LICENSE')
_STATUS_OF_4 = {'cloud': 'Available cloud', 'onprem': 'Available on-premise', 'preview': 'Preview',
                'research': 'Research, Development, or Internal (RDI)'}


@dataclass(frozen=True)
class Order:
    """What is to be packaged.

    Args:
        org: who submits.
        system: name of the system, of its folder and of its description.
        round: v0.5 to v4.0, one of RULESETS.
        out: the folder that holds the tree of the organisation.
        poc_email: v0.5 only: whom to ask.
        is_redacted: whether host names and paths are left out of what is taken from env.json and config.yaml.
    """

    org: str
    system: str
    round: str
    out: Path
    poc_email: str = ''
    is_redacted: bool = False

    @property
    def ruleset(self) -> str:
        return RULESETS[self.round]

    @property
    def home(self) -> Path:
        return self.out / self.org


Finding = tuple[str, str]  # a checker, and what it says


@dataclass(frozen=True)
class Package:
    """What became of an order.

    Args:
        home: the tree; None where a rule refused it and nothing was written.
        refusals: the rules against it, a sentence each.
        findings: what the checkers say of an accepted one.
        notes: what to know of it.
    """

    home: Path | None
    refusals: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()


def check_order(order: Order) -> None:
    """Names that are to become folders.

    Raises:
        UserError: a name cannot be one, or is taken.
    """
    for option, name in (('--org', order.org), ('--system', order.system)):
        if not _NAME.fullmatch(name):
            raise UserError(f'{option}: got {name!r:.100}, expected letters, digits, ., _ and -, and no . or - first')
    taken = order.home / 'results' / order.system
    if taken.exists():
        raise UserError(f'{taken}: is there already and is not overwritten; choose another --system or --out')


def _result_of(run: Run, order: Order) -> Path:
    """The file of a run that the round's rules can read."""
    return run.path.with_name(f'{run.path.stem}_v0.6.txt') if order.round == 'v0.6' else run.path


def check_set(runs: Sequence[Run], order: Order) -> list[str]:
    """The rules that a set breaks, whatever its single logs say; a sentence each."""
    refusals = []
    if len(runs) != NUM_RESULTS:
        refusals.append(f'a ResNet result is {NUM_RESULTS} runs; here are {len(runs)}')
    failed = [r for r in runs if r.status != 'converged']
    if len(failed) > 1:
        refusals.append(f'one run of five may fail; here {len(failed)} did: '
                        + ', '.join(f'{r.path.name} ({r.status})' for r in failed))
    refusals += [f'{r.path.name}: a log that spans a resume is not that of one timed run'
                 for r in runs if r.num_resumes]
    divisions = sorted({str(r.division) for r in runs if r.status != 'unreadable'})
    if len(divisions) > 1:
        refusals.append(f'a set has one division; the logs name {", ".join(divisions)}')
    if 'closed' in divisions and not all(r.is_imagenet for r in runs):
        refusals.append('the closed division trains on ImageNet; these logs are of other data')
    seeds = [r.seed for r in runs if r.seed is not None]
    if len(set(seeds)) < len(seeds):
        refusals.append('every run has a seed of its own; here some share one')
    if order.round == 'v0.6':
        refusals += [f'{_result_of(r, order).name} is missing: the 0.6.0 rules read :::MLL lines only; run with '
                     '--run.log_v06 true' for r in runs if not _result_of(r, order).is_file()]
    return refusals


def check_results(runs: Sequence[Run], order: Order) -> tuple[list[str], Finding]:
    """What the round's checker has against the logs, where more than the one that may fail do; how many pass.

    A log that could steer the official tools is refused whatever the others are.
    """
    if order.ruleset != check.V05:
        dangers = [(r, check.find_danger(_result_of(r, order), order.ruleset)) for r in runs]
        if any(danger for _, danger in dangers):
            return [f'{r.path.name}: {danger}' for r, danger in dangers if danger], ('logs', 'not checked')
    verdicts = [(r, check.check_log(_result_of(r, order), (order.ruleset,), None)[0]) for r in runs
                if r.status != 'unreadable']
    failed = [(r, v) for r, v in verdicts if not v.passed]
    good = len(verdicts) - len(failed)
    tolerated = '; one may fail' if good < len(runs) else ''
    finding = 'logs', f'{good} of {len(runs)} pass the rules of {order.ruleset}{tolerated}'
    violations = [f'{r.path.name}: {text}' for r, v in failed for text in v.violations]
    return violations if len(runs) - good > 1 else [], finding


def _env_of(runs: Sequence[Run]) -> dict[str, Any]:
    return next((env for r in runs if (env := load_env(r.path))), {})


def _find(env: dict[str, Any], *names: str) -> Any:
    """What lies at the end of some names in a tree of objects; '' where it does not."""
    for name in names:
        env = env.get(name) if isinstance(env, dict) else None  # type: ignore[assignment]
    return '' if env is None else env


def _list(env: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    found = _find(env, *names)
    return [x for x in found if isinstance(x, dict)] if isinstance(found, list) else []


def _size(value: Any) -> str:
    return f'{value / 1e9:.0f} GB' if isinstance(value, int) and not isinstance(value, bool) else ''


def _each(values: Sequence[str]) -> str:
    """'2x A + B' of A, A, B."""
    counts = {v: values.count(v) for v in values}
    return ' + '.join(f'{n}x {v}' if n > 1 else v for v, n in counts.items() if v)


def _data_note(runs: Sequence[Run]) -> str:
    """Said wherever the result is: what it was trained on, if it is not ImageNet."""
    other = next((r for r in runs if not r.is_imagenet), None)
    if other is None:
        return ''
    return (f'Trained on {other.dataset or "other data"}, not ImageNet: a check of the format, not a result that can '
            'be submitted or compared.')


def _stack(env: dict[str, Any]) -> dict[str, str]:
    packages = _find(env, 'packages')
    return {str(k): str(v) for k, v in packages.items()} if isinstance(packages, dict) else {}


def describe_system(runs: Sequence[Run], env: dict[str, Any], order: Order) -> dict[str, Any]:
    """The system description of the later rounds, from logs and env.json; what neither knows is ''.

    Source: mlperf_logging.system_desc_checker.
    """
    cpu, disks, gpus = _find(env, 'host', 'hardware', 'cpu'), _list(env, 'host', 'hardware', 'storage'), _list(
        env, 'host', 'hardware', 'gpus')
    cpu = cpu if isinstance(cpu, dict) else {}
    num_nodes = next((r.num_nodes for r in runs if r.num_nodes), None)
    accelerators = next((r.num_accelerators for r in runs if r.num_accelerators is not None), None)
    sockets, cores, threads = (cpu.get(k) if isinstance(cpu.get(k), int) else None
                               for k in ('sockets', 'cores_per_socket', 'threads_per_core'))
    stack = _stack(env)
    status = next((r.submission_status for r in runs if r.submission_status), 'research')
    framework = next((f'MXNet {v}' for k, v in stack.items() if k.startswith('mxnet')), 'MXNet')
    return {
        'submitter': order.org, 'division': next((r.division for r in runs if r.division), 'open'),
        'status': _STATUS_OF_4[status] if order.round >= 'v4.0' else status, 'system_name': order.system,
        'number_of_nodes': '' if num_nodes is None else str(num_nodes),
        'host_processors_per_node': str(sockets or ''),
        'host_processor_model_name': str(cpu.get('model') or _find(env, 'host', 'cpu')),
        'host_processor_core_count': str(cores or ''),
        'host_processor_vcpu_count': str(cores * threads) if cores and threads else '',
        'host_processor_frequency': f'{mhz:.0f} MHz' if isinstance(mhz := cpu.get('max_mhz'), float) else '',
        'host_processor_caches': str(cpu.get('caches') or ''), 'host_processor_interconnect': '',
        'host_memory_capacity': _size(_find(env, 'host', 'memory_bytes')),
        'host_storage_type': _each([str(d.get('kind') or '') for d in disks]),
        'host_storage_capacity': _each([_size(d.get('bytes')) for d in disks]),
        'host_networking': _each([f'{n.get("name")} {n.get("rate") or ""}'.strip() for n in
                                  _list(env, 'host', 'hardware', 'networks')]),
        'host_networking_topology': '', 'host_memory_configuration': '',
        'accelerators_per_node': str(accelerators // num_nodes) if accelerators is not None and num_nodes else '',
        'accelerator_model_name': _each(sorted({str(g.get('name')) for g in gpus})) if accelerators != 0 else '',
        'accelerator_host_interconnect': '',
        'accelerator_frequency': str(gpus[0].get('clocks.max.sm') or '') if gpus and accelerators else '',
        'accelerator_on-chip_memories': '', 'accelerator_memory_configuration': '',
        'accelerator_memory_capacity': str(gpus[0].get('memory.total') or '') if gpus and accelerators else '',
        'accelerator_interconnect': '', 'accelerator_interconnect_topology': '', 'cooling': '',
        'hw_notes': next((r.platform for r in runs if r.platform and r.platform != 'unnamed'), ''),
        'framework': f'{framework} Gluon', 'other_software_stack': stack,
        'operating_system': str(_find(env, 'host', 'os_name') or _find(env, 'host', 'os')),
        'sw_notes': _data_note(runs)}


def describe_entry(description: dict[str, Any]) -> dict[str, Any]:
    """entry.json of v0.5, from the later rounds' description."""
    d = description
    per_node = int(d['accelerators_per_node'] or 0)
    cores, sockets = d['host_processor_core_count'], d['host_processors_per_node']
    return {'division': d['division'], 'status': d['status'], 'hardware': d['system_name'], 'framework': d['framework'],
            'power': 'N/A', 'notes': d['sw_notes'], 'interconnect': d['host_networking'], 'os': d['operating_system'],
            'libraries': ' / '.join(f'{k} {v}' for k, v in d['other_software_stack'].items()), 'compilers': '',
            'nodes': [{'num_nodes': int(d['number_of_nodes'] or 0),
                       'cpu': f'{sockets}x {d["host_processor_model_name"]}',
                       'num_cores': int(cores or 0) * int(sockets or 0),
                       'num_vcpus': int(d['host_processor_vcpu_count'] or 0) * int(sockets or 0),
                       'accelerator': d['accelerator_model_name'], 'num_accelerators': per_node,
                       'sys_mem_size': d['host_memory_capacity'], 'sys_storage_type': d['host_storage_type'],
                       'sys_storage_size': d['host_storage_capacity'],
                       'cpu_accel_interconnect': d['accelerator_host_interconnect'],
                       'network_card': d['host_networking'], 'num_network_cards': '', 'notes': d['hw_notes']}]}


_PREPARE = '''#!/usr/bin/env bash
# Makes the data set of the runs. Usage: preproc_dataset.sh [OPTIONS of mlperf-rn50 prepare], such as --source DIR
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/code"
configs=(../runs_*/config_*.yaml)
mapfile -t data < <(.venv/bin/mlperf-rn50 train --config "${configs[0]}" --print data.dataset --print data.dir)
exec .venv/bin/mlperf-rn50 prepare "${data[0]}" --out "${data[1]}" "$@"
'''
_SETUP = '''#!/usr/bin/env bash
# Installs what the runs need.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/code/launch/setup.sh"
'''
# Filled in with names and numbers that were checked, never with text of a log.
_RUN = '''#!/usr/bin/env bash
# Runs the benchmark five times. Options are those of code/launch/LAUNCHER.sh, such as --hosts h1,h2
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/code"
exec launch/LAUNCHER.sh --config ../runs_SYSTEM/config_0.yaml --run-dir logs/SYSTEM --run.seed null --seeds 5 \\
    --ranks-per-node RANKS --clear-caches "$@"
'''


def _write_scripts(folder: Path, runs: Sequence[Run], system: str) -> None:
    """The files that the rules ask of a benchmark's code."""
    nodes = next((r.num_nodes for r in runs if r.num_nodes), 1)
    ranks = next((r.num_ranks for r in runs if r.num_ranks), nodes)
    run = _RUN.replace('LAUNCHER', 'mpirun' if nodes > 1 else 'local').replace('RANKS', str(max(ranks // nodes, 1)))
    for name, text in {'preproc_dataset.sh': _PREPARE, f'setup_{system}.sh': _SETUP,
                       f'run_and_time_{system}.sh': run.replace('SYSTEM', system)}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    note = _data_note(runs)
    (folder / 'README.md').write_text(
        '# ResNet-50 v1.5 on MXNet Gluon: mlperf_rn50\n\n' + (f'**{printable(note)}**\n\n' if note else '')
        + f'1. `setup_{system}.sh`\n2. `preproc_dataset.sh`\n3. `run_and_time_{system}.sh`\n\n'
        '`code/` is the program, `runs_<system>/` the configuration and environment of each run.\n')


def _copy_code(folder: Path, env: dict[str, Any]) -> str:
    """The program as the runs had it, where its checkout knows their commit, else as it is now; says what is off."""
    commit, home = _find(env, 'git_commit'), Path(mlperf_rn50.__file__).parent.parent
    is_known = isinstance(commit, str) and re.fullmatch(r'[0-9a-f]{40}', commit)
    if is_known:
        done = subprocess.run(['git', '-C', str(home), 'archive', '--format=tar', str(commit), '--', *_CODE],
                              capture_output=True)
        if done.returncode == 0:
            with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
                tar.extractall(folder, filter='data')
            return ''
    for name in _CODE:
        source = home / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns('__pycache__'))
        elif source.is_file():
            shutil.copy2(source, folder / name)
    return f'the code is that of now; the runs were made by commit {str(commit)[:50] or "unknown"}'


def redact(value: Any, hosts: Sequence[str]) -> Any:
    """A tree of objects without host names and without absolute paths."""
    if isinstance(value, dict):
        return {k: redact(v, hosts) for k, v in value.items()}
    if isinstance(value, list):
        return [redact(v, hosts) for v in value]
    if not isinstance(value, str):
        return value
    for i, host in enumerate(hosts):
        value = re.sub(rf'(?<![\w.-]){re.escape(host)}(?![\w-]|\.\w)', f'node{i + 1}', value)
    return re.sub(r'(?<![\w.])/(?:[\w.@+-]+/)*([\w.@+-]+)', r'\1', value)


def _hosts(env: dict[str, Any]) -> list[str]:
    names = [n.get('hostname') for n in _list(env, 'nodes')] + [_find(env, 'host', 'hostname')]
    return list(dict.fromkeys(n for n in names if isinstance(n, str) and n))


def _write_runs(folder: Path, runs: Sequence[Run], is_redacted: bool) -> None:
    """Configuration and environment of each run."""
    folder.mkdir()
    for k, run in enumerate(runs):
        config, env = beside(run.path, 'config', '.yaml'), load_env(run.path)
        hosts = _hosts(env) if is_redacted else []
        if env:
            _dump(folder / f'env_{k}.json', redact(env, hosts) if is_redacted else env)
        if config.is_file():
            text = config.read_text('utf-8', 'replace')
            (folder / f'config_{k}.yaml').write_text(redact(text, hosts) if is_redacted else text)


def _dump(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(content, indent=2) + '\n')


def _code_folder(order: Order) -> str:
    return 'code/resnet' if order.round == 'v0.5' else 'benchmarks/resnet/implementations/mlperf_rn50'


def _write_tree(home: Path, runs: Sequence[Run], order: Order) -> list[str]:
    """The tree of one system; returns notes."""
    env = _env_of(runs)
    description = describe_system(runs, env, order)
    if order.is_redacted:
        description = redact(description, _hosts(env))
    results = home / 'results' / order.system / 'resnet'
    results.mkdir(parents=True)
    for k, run in enumerate(runs):
        shutil.copyfile(_result_of(run, order), results / f'result_{k}.txt')
    if order.round == 'v0.5':
        _dump(results.parent / 'entry.json', describe_entry(description))
        _dump(home / 'submission.json', {'org': order.org, 'poc_email': order.poc_email})
    else:
        _dump(home / 'systems' / f'{order.system}.json', description)
    code = home / _code_folder(order)
    code.mkdir(parents=True)
    _write_scripts(code, runs, order.system)
    _write_runs(code / f'runs_{order.system}', runs, order.is_redacted)
    notes = [_copy_code(code / 'code', env), _data_note(runs)]
    irrelevant = ('hw_notes', 'sw_notes', 'accelerator_' if description['accelerators_per_node'] == '0' else 'sw_notes')
    empty = [k for k, v in description.items() if v in ('', {}) and not k.startswith(irrelevant)]
    if empty:
        notes.append(f'the machine does not say: {", ".join(empty)}; fill them in by hand')
    orgs = sorted({str(r.org) for r in runs if r.org} - {order.org})
    if orgs:
        notes.append(f'the logs say submission_org {", ".join(orgs)}, not {order.org}; results are never changed')
    return [n for n in notes if n]


def _official(*command: str) -> str:
    """What one of the official tools says; it writes its own log where it runs."""
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run([sys.executable, '-m', *command], cwd=place, capture_output=True, text=True)
    return done.stdout + done.stderr


def check_tree(home: Path, ruleset: str) -> tuple[list[str], list[Finding]]:
    """What the official package_checker finds wrong with a tree, and what it finds right; there is none for v0.5.

    The logs must have passed check_results first: the official checker builds file names from values of the log.
    """
    if ruleset == check.V05:
        return [], []
    text = _official('mlperf_logging.package_checker', str(home.absolute()), 'training', ruleset)
    lines = [' '.join(line.replace(f'{home.absolute()}/', '').split()) for line in text.splitlines()]
    if 'PACKAGE CHECKER FOUND NO ERRORS' not in text:
        errors = [line.removeprefix('ERROR - ') for line in lines if line.startswith('ERROR - ')]
        return [f'package_checker: {e}' for e in errors] or [f'package_checker: {text[-500:]}'], []
    described = [('system description', 'passed') for line in lines if 'System description checker passed' in line]
    converged = [('convergence', m[1]) for line in lines if (m := re.search(r'RCP Test Passed: (.*)', line))]
    return [], [*described, *converged, ('package_checker', f'found no errors ({ruleset})')]


def summarize(home: Path, system: str, ruleset: str) -> float | None:
    """The score in minutes that the official result_summarizer computes; None where it has none."""
    if ruleset == check.V05:
        return None
    with tempfile.TemporaryDirectory() as place:
        _official('mlperf_logging.result_summarizer', str(home.absolute()), 'training', ruleset, '--csv',
                  f'{place}/summary.csv')
        path = Path(place) / 'summary.csv'
        rows = path.read_text().splitlines() if path.is_file() else []
    if len(rows) < 2:
        return None
    value = next((r.get('resnet') for r in csv.DictReader(rows) if r.get('system') == system), None)
    return float(value) if value else None


def _merge(source: Path, target: Path) -> None:
    """Moves the tree of one system into that of its organisation, results last; what is there stays as it is."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir(), key=lambda p: (p.name == 'results', p.name)):
        place = target / path.name
        if not place.exists():
            path.rename(place)
        elif path.is_dir():
            _merge(path, place)


def make_package(runs: Sequence[Run], order: Order) -> Package:
    """Builds the tree and has it checked; a set that a rule refuses leaves nothing behind.

    Raises:
        UserError: a name is taken or cannot be a folder's, or the folder cannot be written.
    """
    check_order(order)
    refusals = check_set(runs, order)
    if refusals:
        return Package(None, tuple(refusals))
    refusals, of_logs = check_results(runs, order)
    if refusals:
        return Package(None, tuple(refusals))
    try:
        order.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=order.out, prefix='.package-') as place:
            new = Path(place) / order.org
            notes = _write_tree(new, runs, order)
            refusals, findings = check_tree(new, order.ruleset)
            if refusals:
                return Package(None, tuple(refusals), notes=tuple(notes))
            if (order.home / _code_folder(order) / 'code').exists():
                notes.append(f'{_code_folder(order)}/code is there already and stays as it is')
            _merge(new, order.home)
    except OSError as e:
        raise UserError(f'--out: {order.out}: {e.strerror}; choose a folder that can be written') from e
    score = summarize(order.home, order.system, order.ruleset)
    findings.append(('result_summarizer', 'gives no score' if score is None else f'{score:.2f} min'))
    return Package(order.home, (), (of_logs, *findings), tuple(notes))


def render_package(package: Package, order: Order, score_minutes: float | None) -> str:
    """What was made, what the official tools say of it, and what to know; or why it was refused."""
    lines = []
    if package.home is None:
        lines.append(f'refused by the rules of {order.round}; nothing was written:')
        lines += [f'  - {text}' for text in package.refusals]
    else:
        ours = 'none' if score_minutes is None else f'{score_minutes:.2f} min'
        lines.append(f'{package.home}: {order.system}, {order.round}')
        lines += [f'  {name:19s} {text}' for name, text in (*package.findings, ('score here', ours))]
    lines += [f'  mind: {text}' for text in package.notes]
    return '\n'.join(map(printable, lines))
