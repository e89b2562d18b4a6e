"""Random faults on namespace hosts during a training that restarts, compared with an undisturbed
run of the same seed.

Requires the same as hosts.py. Example, for faults about every minute on eight hosts:
  .venv/bin/python tests/cluster/stress.py --out stress --faults 100 --seed 1
Each link of a host has the rate of --rate, except in the undisturbed run, which is thus shorter.
A fault kills a process of the job (kill -9), stops one for 10 s (SIGSTOP), or cuts a host's link
for 5 s or 20 s. After the last fault, the run is stopped, and resumed for two more epochs, so that
it reaches its end. OUT/reference has the undisturbed run; it is used again, and continued if it is
too short. The exit code is 0 if the run reached its end, all losses and learning rates are
identical, each attempt has one recorded cause, and neither processes nor files of a job are left.
Goodput is that of `mlperf-rn50 report`, without the first start and the stop at the end.

With --elastic, a host that fails twice without a newer checkpoint is excluded, after which losses
are not comparable. Faults therefore hit a host only once between two checkpoints.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from cluster.hosts import Cluster, Host, kill, words  # noqa: E402

from mlperf_rn50.runfolder.jsonl import read_lines  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent.parent
KINDS = ('kill', 'stop 10 s', 'link down 5 s', 'link down 20 s')
VARIABLES = {'OMP_NUM_THREADS': '1', 'OMPI_MCA_pml': 'ob1', 'OMPI_MCA_btl': 'tcp,self,vader'}
CONFIG = """
run: {{metrics_period_steps: 1, seed: 7}}
data: {{dir: {folder}/data, dataset: digits, num_train: 1437, num_val: 360, num_classes: 10,
       image_size: 8, resize_shorter: 8, crop: none, mirror_probability: 0.0,
       mean: [127.5, 127.5, 127.5], std: [127.5, 127.5, 127.5], num_threads: 1, read_threads: 1}}
model: {{name: resnet18, zero_gamma: true}}
schedule: {{base_lr: 0.02, warmup_epochs: 1, decay: poly, decay_epochs: 9000}}
train: {{global_batch_size: 240, eval_period: 4, eval_batch_size: 90, target_accuracy: 1.0,
        num_warmup_steps: 1}}
comm: {{num_buckets: 1, stall_limit_s: 120}}
checkpoint: {{period_epochs: 0, period_s: auto, keep: 2}}
"""


def records(run_dir: Path, name: str = 'metrics*.jsonl') -> list[dict]:
    """Return the complete lines of files in the folder; a run without a checkpoint starts again as
    a new run."""
    return [
        m
        for path in sorted(run_dir.glob(name), key=lambda p: (len(p.name), p.name))
        for _, m in read_lines(path, dict)
    ]


def steps_of(run_dir: Path) -> list[tuple[int, float, float]]:
    """Return (step, loss, learning rate) of all recorded steps, including repeated ones."""
    return [
        (m['step'], m['loss'], m['learning_rate'])
        for m in records(run_dir)
        if m['event'] == 'train'
    ]


def last_step(run_dir: Path) -> int:
    return max((step for step, *_ in steps_of(run_dir)), default=0)


def newest_checkpoint(run_dir: Path) -> str:
    return max((p.name for p in run_dir.glob('checkpoints*/step_*')), default='')


class Launcher:
    """Launcher on the first host of a cluster."""

    def __init__(self, cluster: Cluster, folder: Path, run_dir: Path, *options: object):
        self.run_dir, self.start_s = run_dir, time.monotonic()
        (folder / 'config.yaml').write_text(CONFIG.format(folder=folder))
        hosts = ','.join(h.name for h in cluster.hosts)
        command = [ROOT / 'launch/mpirun.sh', '--hosts', hosts, '--run-dir', run_dir, *options]
        if '--resume' not in options:
            command += ['--config', folder / 'config.yaml']
        self.output = folder / f'{run_dir.name}.out'
        with open(self.output, 'a') as output:
            self.process = subprocess.Popen(
                cluster.hosts[0].inside(command),
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**cluster.environment(), **VARIABLES},
            )

    def is_running(self) -> bool:
        return self.process.poll() is None

    def end(self) -> int:
        return self.process.wait()

    def stop(self, host: Host) -> int:
        """Send the launcher a stop request; return its exit code."""
        for pid in host.pids():
            if 'launch' in words(pid):
                os.kill(pid, signal.SIGTERM)
        return self.end()


def processes_of_job(host: Host) -> list[int]:
    """Return the processes of a job on a host, including the engine but not the launcher and its
    guards."""

    def is_of_job(pid: int) -> bool:
        try:
            return b'MLPERF_RN50_JOB=' in Path(f'/proc/{pid}/environ').read_bytes()
        except OSError:
            return False

    return [pid for pid in host.pids() if is_of_job(pid)]


def inject(cluster: Cluster, host: Host, kind: str, rng: random.Random) -> str:
    """Inject a fault and end it, except a kill; return the name of the victim, or '' if the host
    has no process."""
    if kind.startswith('link'):
        cluster.set_link(host, False)
        time.sleep(float(kind.split()[2]))
        cluster.set_link(host, True)
        return 'link'
    if not (pids := processes_of_job(host)):
        return ''
    pid = rng.choice(sorted(pids))
    name = ' '.join(os.path.basename(w) for w in words(pid)[:3])
    if kind == 'kill':
        kill([pid])
        return name
    try:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(10)
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass
    return name


def disturb(
    cluster: Cluster, launcher: Launcher, num_faults: int, period_s: float, rng: random.Random
) -> list[tuple[str, str, str]]:
    """Inject faults while the launcher runs, after its first checkpoint; return (kind, host,
    victim) of each."""
    faults, hit, checkpoint = [], set(), ''
    while launcher.is_running() and not newest_checkpoint(launcher.run_dir):
        time.sleep(0.2)
    while len(faults) < num_faults and launcher.is_running():
        pause_end = time.monotonic() + period_s * rng.uniform(0.5, 1.5)
        kind = rng.choice(KINDS)
        while launcher.is_running() and time.monotonic() < pause_end:
            time.sleep(0.2)
        victim = ''
        while launcher.is_running() and not victim:
            if (newest := newest_checkpoint(launcher.run_dir)) != checkpoint:
                checkpoint, hit = newest, set()
            hosts = [h for h in cluster.hosts if h.name not in hit]
            host = rng.choice(hosts) if hosts else None
            victim = inject(cluster, host, kind, rng) if host else ''
            time.sleep(0 if victim else 0.2)
        if victim:
            hit.add(host.name)
            faults.append((kind, host.name, victim))
            print(
                f'{time.strftime("%H:%M:%S")} {len(faults)} {kind} of {host.name} ({victim}), step '
                f'{last_step(launcher.run_dir)}',
                flush=True,
            )
    return faults


def make_reference(
    cluster: Cluster, folder: Path, num_epochs: int
) -> dict[int, tuple[float, float]]:
    """Return loss and learning rate of each step of an undisturbed run with at least num_epochs
    epochs."""
    run_dir = folder / 'reference'
    if last_step(run_dir) < 6 * num_epochs:
        resume = ['--resume'] if newest_checkpoint(run_dir) else []
        Launcher(
            cluster, folder, run_dir, *resume, '--no-doctor', '--train.max_epochs', num_epochs
        ).end()
    return {step: (loss, lr) for step, loss, lr in steps_of(run_dir)}


def goodput_of(run_dir: Path) -> tuple[float, dict[str, float]]:
    """Return the goodput of the disturbed run and its parts in seconds, without the first start
    and the pause at the end."""
    command = [ROOT / '.venv/bin/mlperf-rn50', 'report', run_dir, '--format', 'json']
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    [system] = json.loads(done.stdout)['systems']
    parts = system['runs'][-1]['goodput_parts_s']
    first = next(r for r in records(run_dir) if r['event'] == 'part' and r['name'] == 'start_up')
    parts['start_up'] -= first['seconds']
    del parts['paused']
    return (parts['training'] + parts['evaluation']) / sum(parts.values()), parts


def set_rate(cluster: Cluster, rate: str) -> None:
    """Limit what each host sends, such as to 1gbit; '' for no limit. Source: tc-tbf(8)."""
    change = f'replace dev eth0 root tbf rate {rate} burst 256kb latency 400ms'
    for host in cluster.hosts:
        host.call('tc', 'qdisc', *(change if rate else 'del dev eth0 root').split())


def left_files(jobs: set[str]) -> list[str]:
    """Return the folders that launchers or guards of these jobs did not remove."""
    folders = [p for top in ('/dev/shm', tempfile.gettempdir()) for p in Path(top).iterdir()]
    return sorted(str(p) for p in folders if any(f'-{job}-' in p.name for job in jobs))


def left_processes(cluster: Cluster) -> list[str]:
    """Return the processes that remain on the hosts 30 s after the end."""
    end = time.monotonic() + 30
    while (pids := [p for host in cluster.hosts for p in host.pids()]) and time.monotonic() < end:
        time.sleep(0.5)
    return [' '.join(words(pid))[:60] for pid in pids]


def print_rows(rows: dict[str, object]) -> None:
    print('\n| quantity | value |\n|---|---|')
    for name, value in rows.items():
        print(f'| {name} | {value} |')


def run(options: argparse.Namespace, cluster: Cluster) -> int:
    """Run the disturbed and the undisturbed training; print a summary."""
    folder, rng = options.out, random.Random(options.seed)
    run_dir = folder / f'run_{options.seed}'
    set_rate(cluster, options.rate)
    restarts = ['--restarts', 999, *(['--elastic'] if options.elastic else [])]
    launcher = Launcher(cluster, folder, run_dir, *restarts, '--train.max_epochs', 5000)
    faults = disturb(cluster, launcher, options.faults, options.period, rng)
    code = launcher.stop(cluster.hosts[0])
    wall_s, num_epochs = time.monotonic() - launcher.start_s, last_step(run_dir) // 6 + 2
    if code == 75:
        code = Launcher(
            cluster, folder, run_dir, '--resume', *restarts, '--train.max_epochs', num_epochs
        ).end()
    processes = left_processes(cluster)
    files = left_files({a['job'] for a in records(run_dir, 'attempts.jsonl')})
    goodput, parts = goodput_of(run_dir)
    set_rate(cluster, '')
    reference = make_reference(cluster, folder, num_epochs)
    output, attempts, metrics = (
        launcher.output.read_text(),
        records(run_dir, 'attempts.jsonl'),
        records(run_dir),
    )
    is_over = bool(metrics) and (metrics[-1]['event'], metrics[-1].get('status')) == (
        'end',
        'aborted',
    )
    seen = steps_of(run_dir)
    bad = [step for step, *values in seen if reference.get(step) != tuple(values)]
    # One end per start: each restart follows an attempt, and the two starts by hand have their own
    # end. But a stop request before the first step, which may follow the last fault, is no failure
    # and not recorded.
    num_starts = len(re.findall(r': restart \d+ of ', output)) + 2
    causes = Counter(re.sub(r'\d+ on |\b\d+ s\b', '', a.get('cause') or 'none') for a in attempts)
    of_kind = Counter(kind for kind, *_ in faults)
    print_rows(
        {
            **{f'faults: {kind}': of_kind[kind] for kind in KINDS},
            f'faults of {options.faults}': len(faults),
            'starts of the ranks': num_starts,
            'recorded attempts': len(attempts),
            'attempts without a cause': causes['none'],
            **{f'cause: {cause}': number for cause, number in causes.most_common()},
            'excluded hosts': ' '.join(re.findall(r'excluding (\S+)', output)) or 'none',
            'wall time with faults': f'{wall_s:.0f} s',
            'goodput': f'{100 * goodput:.1f} %',
            **{f'part: {name}': f'{seconds:.0f} s' for name, seconds in parts.items()},
            'reached the end': 'yes' if is_over else f'no (exit code {code})',
            'steps, repeated ones included': len(seen),
            'steps of the plan': last_step(run_dir),
            'steps with identical loss and learning rate': len(seen) - len(bad),
            'processes left': '; '.join(processes) or 'none',
            'files left': ' '.join(files) or 'none',
        }
    )
    if bad:
        print(f'first differing steps: {bad[:9]}')
    is_clean = not (bad or causes['none'] or processes or files)
    is_complete = is_over and len(faults) == options.faults and len(attempts) >= num_starts - 1
    return 0 if is_clean and is_complete else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        '--out', type=Path, required=True, help='folder for the data set, the runs and their output'
    )
    add('--faults', type=int, default=100)
    add(
        '--seed',
        type=int,
        default=1,
        help='seed of the faults; the seed of the training is always 7',
    )
    add('--hosts', type=int, default=8)
    add('--period', type=float, default=60.0, help='mean seconds between faults')
    add('--rate', default='1gbit', help='rate of each link, in the units of tc(8)')
    add('--elastic', action='store_true')
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    if not (options.out / 'data').exists():
        subprocess.run(
            [ROOT / '.venv/bin/mlperf-rn50', 'prepare', 'digits', '--out', options.out / 'data'],
            check=True,
        )
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder), options.hosts)
        try:
            return run(options, cluster)
        finally:
            cluster.close()


if __name__ == '__main__':
    sys.exit(main())
