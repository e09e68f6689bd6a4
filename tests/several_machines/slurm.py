"""Slurm on the rig: a controller on machine 0 and a node on each of both."""

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

from tests.several_machines.rig import HOSTS, Rig, wait_until

JOB = "scripts/slurm_job.sbatch"
CONFIG = """
ClusterName=rig
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=5,bf_interval=5
SlurmdParameters=config_overrides
ReturnToService=2
MinJobAge=3600
KillWait=30
SlurmctldPidFile={lab}/slurmctld.pid
SlurmdPidFile={lab}/slurmd-%n.pid
StateSaveLocation={lab}/state
SlurmdSpoolDir={lab}/spool-%n
SlurmctldPort=16817
SlurmdPort=16818
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={nodes} CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=graceless Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
GOES_ON = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "PREEMPTED")


class Slurm:
    """The daemons, while the block lasts.

    Args:
        rig: on whose machines they run.
    """

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.variables = {"SLURM_CONF": str(rig.lab / "slurm.conf")}
        self._munged: subprocess.Popen[bytes] | None = None

    @staticmethod
    def is_installed() -> bool:
        return all(shutil.which(tool) for tool in ("slurmctld", "slurmd", "munged"))

    @staticmethod
    def version() -> str:
        return subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, check=True).stdout.strip()

    def __enter__(self) -> "Slurm":
        lab = self.rig.lab
        (lab / "state").mkdir()
        (lab / "slurm.conf").write_text(CONFIG.format(lab=lab, controller=HOSTS[0], nodes=",".join(HOSTS)))
        (lab / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        self._start_munge()
        self.rig.start(0, ["slurmctld", "-D"], self.variables)
        for machine, host in enumerate(HOSTS):
            self.rig.start(machine, ["slurmd", "-D", "-N", host], self.variables)
        wait_until(lambda: self("sinfo", "--noheader", "--format", "%T").split() == ["idle"], 60, "nodes are idle")
        return self

    def __exit__(self, *_: object) -> None:
        self.rig.kill_all()
        if self._munged is not None:
            self._munged.terminate()
            self._munged.wait()

    def __call__(self, *command: object) -> str:
        """The output of one of Slurm's commands on machine 0."""
        process = self.rig.start(0, command, self.variables)
        process.popen.wait()
        output = process.output
        process.log.unlink()  # there are hundreds
        return output

    def submit(self, run: Path, flags: list[object], *options: object) -> str:
        """Submit the project's job script; returns the job's id."""
        words = ["sbatch", "--parsable", "--output", f"{run}.out", *options, JOB, *flags]
        return self(*words).strip()

    def state(self, job: str) -> str:
        found = re.search(r"JobState=(\w+)", self("scontrol", "show", "job", job))
        return found[1] if found else "unknown"

    def restarts(self, job: str) -> int:
        found = re.search(r"Restarts=(\d+)", self("scontrol", "show", "job", job))
        return int(found[1]) if found else 0

    def wait_for(self, job: str, state: str, seconds: float) -> float:
        """Wait until the job has that state; another end fails. Returns the seconds it took."""

        def has_it() -> bool:
            now = self.state(job)
            assert now in (state, *GOES_ON), f"job {job} is {now}"
            time.sleep(0.5)
            return now == state

        return wait_until(has_it, seconds, f"{state} of job {job}")

    def _start_munge(self) -> None:
        socket = Path("/run/munge/munge.socket.2")
        if socket.exists():
            return
        for folder in ("/run/munge", "/var/log/munge", "/var/lib/munge"):
            os.makedirs(folder, exist_ok=True)
            shutil.chown(folder, "munge", "munge")
        with (self.rig.lab / "munged.log").open("wb") as log:
            command = ["munged", "--foreground"]
            self._munged = subprocess.Popen(command, stderr=log, user="munge", group="munge", extra_groups=[])
        wait_until(socket.exists, 30, "munged answers")
