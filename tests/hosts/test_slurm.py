"""The scripts of docs/hosts.md for Slurm, run by a Slurm in a lab: slurmctld and slurmd on host 0, slurmd on host 1."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from page import folder_of_a_user, losses_in, path_with_this_python, recipes

from weft.lab import Cluster, Command

DAEMONS = ("munged", "slurmctld", "slurmd")
MISSING = [name for name in DAEMONS if shutil.which(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not found; install slurm-wlm, Debian's Slurm"),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd starts jobs as root only"),
]

CONFIG = """\
ClusterName=lab
SlurmctldHost=host0({first})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
NodeName=host0 NodeAddr={first} CPUs={cpus}
NodeName=host1 NodeAddr={second} CPUs={cpus}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


class Slurm:
    """Its daemons, and how to ask it for something."""

    def __init__(self, lab: Cluster, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.env = {"SLURM_CONF": str(folder / "slurm.conf"), **path_with_this_python()}
        self.log = (folder / "daemons.log").open("w")
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        addresses = {"first": lab.address(0), "second": lab.address(1), "cpus": os.cpu_count()}
        (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, **addresses))
        # Credentials go through a socket in the file system, which all hosts of a lab share.
        files = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munged.pid",
                 "seed-file": folder / "munge.seed", "log-file": folder / "munged.log"}  # fmt: skip
        options = (f"--{name}={file}" for name, file in files.items())
        self.daemons = [self.start(0, "munged", "--foreground", "--force", *options)]
        self.until("the socket of munged", lambda: (folder / "munge.socket").exists())
        self.daemons.append(self.start(0, "slurmctld", "-D", "-i"))
        self.daemons += [self.start(host, "slurmd", "-D", "-N", f"host{host}") for host in range(2)]
        self.until("two idle nodes", lambda: self.ask("sinfo", "-h", "-o", "%t %D").strip() == "idle 2")

    def start(self, host: int, *words: str) -> Command:
        return self.lab.command(host, words, env=self.env, cwd=self.folder, stdout=self.log, stderr=self.log)

    def ask(self, *words: str) -> str:
        with (self.folder / "answer").open("w+") as file:
            self.lab.command(0, words, env=self.env, cwd=self.folder, stdout=file, stderr=self.log).wait(timeout=60.0)
            file.seek(0)
            return file.read()

    def until(self, what: str, is_so: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not is_so():
            ended = [str(daemon) for daemon in self.daemons if daemon.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"no {what}; ended: {ended}\n{(self.folder / 'daemons.log').read_text()}")
            time.sleep(0.2)


@pytest.fixture(scope="module")
def slurm(lab: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    made = Slurm(lab, tmp_path_factory.mktemp("slurm"))
    yield made
    for daemon in made.daemons:
        daemon.kill()
        daemon.wait(timeout=30.0)


@pytest.mark.parametrize("number", [0, 1])
def test_a_script(number: int, slurm: Slurm, tmp_path: Path) -> None:
    folder = folder_of_a_user(tmp_path)
    (folder / "train.sbatch").write_text(recipes()["Slurm"][number])
    job = slurm.ask("sbatch", "--parsable", f"--chdir={folder}", f"--output={folder}/said", f"{folder}/train.sbatch")
    assert job.strip().isdecimal(), (slurm.folder / "daemons.log").read_text()
    state = ""

    def is_over() -> bool:
        nonlocal state
        state = slurm.ask("scontrol", "-o", "show", "job", job.strip())
        return not any(f"JobState={word}" in state for word in ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING"))

    slurm.until("end of the job", is_over, seconds=200.0)
    said = (folder / "said").read_text()
    assert "JobState=COMPLETED" in state, said
    assert "NodeList=host[0-1]" in state
    losses = losses_in(said)
    assert sorted(losses) == list(range(1, 21))
    assert losses[20] < losses[1]
