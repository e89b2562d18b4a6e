"""A Slurm cluster on the hosts: the controller on the first, a node on each of the others."""
import os
import pwd
import subprocess
import time
from pathlib import Path

from cluster.hosts import Cluster, Host
from helpers import HANG_LIMIT_S, run


class Slurm:
    """munge, slurmctld and slurmd from Debian's packages, with everything they write in one folder."""

    def __init__(self, cluster: Cluster, folder: Path):
        self.cluster, self.folder = cluster, folder
        self.processes: list[subprocess.Popen] = []
        self.controller, self.nodes = cluster.hosts[0], cluster.hosts[1:]
        self._start_munge()
        for name in ('state', *(f'tmp_{n.name}' for n in self.nodes)):
            (folder / name).mkdir()
        (folder / 'slurm.conf').write_text(self._configuration())
        self._start(self.controller, 'slurmctld', '-D')
        for node in self.nodes:
            self._start(node, 'slurmd', '-D')
        self._wait_until_ready()

    def _start_munge(self) -> None:
        munge = self.folder / 'munge'
        munge.mkdir()
        (munge / 'key').write_bytes(os.urandom(128))
        (munge / 'key').chmod(0o600)
        user = pwd.getpwnam('munge')
        for path in (munge, munge / 'key'):
            os.chown(path, user.pw_uid, user.pw_gid)
        for path in munge.parents:  # pytest's folders are for their owner only
            if path.stat().st_mode & 0o011 != 0o011:
                path.chmod(path.stat().st_mode | 0o011)
        self._start(self.controller, 'setpriv', '--reuid=munge', '--regid=munge', '--clear-groups', 'munged', '-F',
                    f'--key-file={munge}/key', f'--socket={munge}/socket', f'--pid-file={munge}/pid',
                    f'--log-file={munge}/log', f'--seed-file={munge}/seed')
        while not (munge / 'socket').exists():
            time.sleep(0.05)

    def _configuration(self) -> str:
        nodes = ''.join(f'NodeName={n.name} NodeAddr={n.address} CPUs=2 RealMemory=4000\n' for n in self.nodes)
        return f"""ClusterName=test
SlurmctldHost={self.controller.name}({self.controller.address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={self.folder}/munge/socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=300
OverTimeLimit=0
StateSaveLocation={self.folder}/state
TmpFS={self.folder}/tmp_%n
SlurmdSpoolDir={self.folder}/spool_%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd_%n.pid
SlurmctldLogFile={self.folder}/slurmctld.log
SlurmdLogFile={self.folder}/slurmd_%n.log
{nodes}PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

    def environment(self) -> dict[str, str]:
        return {**self.cluster.environment(), 'SLURM_CONF': str(self.folder / 'slurm.conf')}

    def _start(self, host: Host, *command: str) -> None:
        log = open(self.folder / f'{command[0]}_{host.name}.out', 'w')
        self.processes.append(subprocess.Popen(host.inside(command), env=self.environment(), stdout=log, stderr=log))

    def call(self, *command: object) -> str:
        """Output of a Slurm command on the controller."""
        done = run(self.controller.inside(command), env=self.environment())
        assert done.returncode == 0, f'{command}: {done.stdout}{done.stderr}'
        return done.stdout

    def _wait_until_ready(self) -> None:
        """Waits until every node is idle."""
        deadline = time.monotonic() + HANG_LIMIT_S
        command = self.controller.inside(['sinfo', '-h', '-o', '%D %t'])
        while (done := run(command, env=self.environment())).stdout.split() != [str(len(self.nodes)), 'idle']:
            assert time.monotonic() < deadline, f'Slurm is not ready: {done.stdout}{done.stderr}; see {self.folder}'
            time.sleep(0.2)

    def state(self, job: str) -> str:
        """The state of a job, as scontrol says it."""
        words = self.call('scontrol', 'show', 'job', job).split()
        return next(w.partition('=')[2] for w in words if w.startswith('JobState='))

    def close(self) -> None:
        self._wait_until_ready()  # a step that is ending needs munge
        for process in reversed(self.processes):
            process.terminate()
            process.wait(HANG_LIMIT_S)
