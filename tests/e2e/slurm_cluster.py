"""A Slurm cluster of two nodes on this machine: the real daemons, configured for a test."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_SECONDS = 120.0
_CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CryptoType=crypto/munge
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_min_interval=100000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout=5
SlurmctldTimeout=10
KillWait=5
JobRequeue=1
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=low Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high Nodes=n1,n2 Default=NO MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def is_installed() -> bool:
    """Whether the daemons are there, and this user may start them."""
    return os.getuid() == 0 and all(shutil.which(name, path=_PATH) for name in PROGRAMS)


@dataclass
class Cluster:
    """The running cluster. Use it as a context."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> Cluster:
        folder, host = self.folder, socket.gethostname()
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        text = _CONFIG.format(folder=folder, host=host, user="root", ports=_free_ports(3))
        (folder / "slurm.conf").write_text(text)
        self.environment = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        names = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid", "log-file": "munged.log"}
        files = [f"--{option}={folder / name}" for option, name in names.items()]
        self.run("munged", "--force", f"--seed-file={folder}/munge.seed", *files)
        self.run("slurmctld", "-c")
        for node in ("n1", "n2"):
            self.start_node(node)
        self.until(lambda: self.run("sinfo", "-h", "-o", "%D %t").split() == ["2", "idle"])
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(subprocess.CalledProcessError):
            self.run("scancel", "--user", "root")
        for node in ("n1", "n2"):
            self.fail_node(node)
        for name in ("slurmctld", "munged"):
            self._kill(name, signal.SIGTERM)

    def run(self, *words: str, folder: Path | None = None) -> str:
        """Output of a command of Slurm."""
        done = subprocess.run(
            words, env=self.environment, cwd=folder or self.folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def start_node(self, node: str) -> None:
        """Start the daemon of a node."""
        self.run("slurmd", "-N", node)

    def fail_node(self, node: str) -> None:
        """End a node as a power loss does: its daemon and all processes of its jobs at once."""
        doomed = [process for process in psutil.process_iter() if _node_of(process) == node]
        for process in [*doomed]:
            with suppress(psutil.Error):
                if (parent := process.parent()) is not None and parent.name().startswith("slurmstepd"):
                    doomed.append(parent)
        self._kill(f"slurmd.{node}", signal.SIGKILL)
        for process in doomed:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def jobs(self, job: str) -> dict[str, str]:
        """State of each task of an array, by its index."""
        lines = self.run("squeue", "-h", "-j", job, "-r", "-t", "all", "-o", "%K %T").splitlines()
        return dict(line.split() for line in lines)

    def until(self, is_true: Callable[[], bool], seconds: float = _SECONDS) -> None:
        """Wait until something is so."""
        end = time.monotonic() + seconds
        while not is_true():
            assert time.monotonic() < end, self.run("scontrol", "show", "jobs")[-4000:]
            time.sleep(0.2)

    def _kill(self, name: str, number: signal.Signals) -> None:
        with suppress(OSError, ValueError):
            os.kill(int((self.folder / f"{name}.pid").read_text()), number)


def _node_of(process: psutil.Process) -> str | None:
    """The node that a process of a job runs on."""
    with suppress(psutil.Error):
        return process.environ().get("SLURMD_NODENAME")
    return None


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
