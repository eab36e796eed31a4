"""A Slurm cluster on this machine: a controller and nodes, each in a network namespace with a name of its own.

Needs root, and Debian's packages slurmctld, slurmd, slurm-client, munge and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

TOOLS = ("slurmctld", "slurmd", "munged", "mungekey", "sbatch", "squeue", "scontrol", "nsenter", "ip")
NETWORK = "10.77.0"
PATIENCE_S = 60

CONFIGURATION = """\
ClusterName=lab
SlurmctldHost=controller
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool/%n
StateSaveLocation={folder}/state
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,bf_resolution=1,batch_sched_delay=0
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=2
SlurmctldTimeout=10
SlurmdTimeout=5
InactiveLimit=0
MinJobAge=300
"""


def missing_tools() -> list[str]:
    """The commands that the cluster needs and this machine lacks."""
    return [tool for tool in TOOLS if shutil.which(tool) is None] + ([] if os.geteuid() == 0 else ["root"])


@dataclass
class SlurmLab:
    """A cluster with nodes ``gpu1``... and ``cpu1``..., in partitions ``gpu`` and ``cpu``."""

    folder: Path
    gpu_count: int
    cpu_count: int
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def nodes(self) -> list[str]:
        """The names of all nodes."""
        return [f"gpu{i + 1}" for i in range(self.gpu_count)] + [f"cpu{i + 1}" for i in range(self.cpu_count)]

    def command(self, *command: str, host: str = "controller", **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end."""
        done = subprocess.run(
            [*self._on(host), *command],
            env=self._environment() | environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done

    def submit(self, script: Path, folder: Path) -> int:
        """Queue a batch script, to run in ``folder``; its number."""
        return int(self.command("sbatch", "--parsable", f"--chdir={folder}", str(script)).stdout.split(";")[0])

    def states(self, job: int) -> list[str]:
        """The state of a job's components, in Slurm's words: first that of the one with the batch script."""
        listed = self.command("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%i %T").stdout
        return [line.split()[1] for line in sorted(listed.splitlines())]

    def state(self, job: int) -> str:
        """The state of a job."""
        return self.states(job)[0]

    def wait_for_end(self, job: int, patience_s: float) -> str:
        """Wait until a job has ended; its last state."""
        deadline = time.monotonic() + patience_s
        while (state := self.state(job)) in ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "REQUEUED"):
            assert time.monotonic() < deadline, f"job {job} is still {state}"
            time.sleep(0.2)
        return state

    def start_again(self, job: int) -> None:
        """Spare a job that is queued again the two minutes for which Slurm holds it back.

        A node takes no credential of the second in which it ended the job's earlier processes, hence some seconds.
        """
        deadline = time.monotonic() + PATIENCE_S
        while set(self.states(job)) != {"PENDING"}:  # one component after the other
            assert time.monotonic() < deadline, f"job {job} is {self.states(job)}"
            time.sleep(0.1)
        self.command("scontrol", "update", f"jobid={job}", "starttime=now+3")

    def kill_node(self, node: str) -> None:
        """The node is gone: every process that runs on it, and its link."""
        subprocess.run(["ip", "-n", self._namespace("controller"), "link", "del", f"to-{node}"], check=True)
        for pid in self.processes(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait_until_down(self, node: str) -> None:
        """Wait until Slurm has noticed that a node is gone."""
        deadline = time.monotonic() + PATIENCE_S
        while "down" not in self.command("sinfo", "--noheader", f"--nodes={node}", "--format=%T").stdout:
            assert time.monotonic() < deadline, f"{node} is not down"
            time.sleep(0.2)

    def processes(self, node: str) -> list[int]:
        """The processes that run on a node."""
        listed = subprocess.run(["ip", "netns", "pids", self._namespace(node)], capture_output=True, text=True)
        return [int(pid) for pid in listed.stdout.split()]

    def find(self, node: str, words: str) -> list[int]:
        """The processes on a node whose command line has these words."""
        found = []
        for pid in self.processes(node):
            with contextlib.suppress(OSError):
                if words in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode():
                    found.append(pid)
        return found

    # --- Starting and ending.

    def start(self) -> None:
        """Start the network and all daemons; return when all nodes are idle."""
        for name in ("munge", "spool", "state", "log"):
            (self.folder / name).mkdir(mode=0o700)
        hosts = ["127.0.0.1 localhost", f"{NETWORK}.1 controller"]
        hosts += [f"{NETWORK}.{10 + i} {node}" for i, node in enumerate(self.nodes)]
        (self.folder / "hosts").write_text("".join(f"{line}\n" for line in hosts))
        self._write_configuration()
        self._make_network()
        self._start_munge()
        self._start("slurmctld", "controller", "-D", "-c")
        for node in self.nodes:
            (self.folder / "spool" / node).mkdir()
            self._start("slurmd", node, "-D", "-N", node)
        deadline = time.monotonic() + PATIENCE_S
        while self._idle_count() < len(self.nodes):
            assert time.monotonic() < deadline, f"the nodes are not idle; see {self.folder}/log"
            time.sleep(0.1)

    def stop(self) -> None:
        """End every process of the cluster and of its jobs, and take the network down."""
        namespaces = ["controller", *self.nodes]
        for _ in range(20):
            left = [pid for host in namespaces for pid in self.processes(host)]
            if not left:
                break
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        for daemon in self.daemons.values():
            daemon.kill()
            daemon.wait()
        for host in namespaces:
            subprocess.run(["ip", "netns", "del", self._namespace(host)], capture_output=True)

    def _namespace(self, host: str) -> str:
        return f"jaxhetero-slurm-{os.getpid()}-{host}"

    def _on(self, host: str) -> list[str]:
        # Not `ip netns exec`: that mounts /sys anew, without cgroups, and slurmd does not start.
        mount = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
        return [
            "nsenter", f"--net=/run/netns/{self._namespace(host)}", "unshare", "--uts", "--mount",
            "bash", "-c", mount, host, str(self.folder / "hosts"),
        ]  # fmt: skip

    def _environment(self) -> dict[str, str]:
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "JAXHETERO_"))}
        return ours | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def _write_configuration(self) -> None:
        text = CONFIGURATION.format(folder=self.folder)
        for node in self.nodes:
            text += f"NodeName={node} CPUs=8 RealMemory=4000\n"
        text += f"PartitionName=gpu Nodes=gpu[1-{self.gpu_count}] Default=YES\n"
        if self.cpu_count:
            text += f"PartitionName=cpu Nodes=cpu[1-{self.cpu_count}]\n"
        (self.folder / "slurm.conf").write_text(text)

    def _make_network(self) -> None:
        controller = self._namespace("controller")
        for host in ("controller", *self.nodes):
            _ip("netns", "add", self._namespace(host))
            _ip("-n", self._namespace(host), "link", "set", "lo", "up")
        _ip("-n", controller, "link", "add", "bridge", "type", "bridge")
        _ip("-n", controller, "addr", "add", f"{NETWORK}.1/24", "dev", "bridge")
        _ip("-n", controller, "link", "set", "bridge", "up")
        for i, node in enumerate(self.nodes):
            space = self._namespace(node)
            _ip("-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", f"to-{node}", "netns", controller)
            _ip("-n", space, "addr", "add", f"{NETWORK}.{10 + i}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", controller, "link", "set", f"to-{node}", "master", "bridge", "up")

    def _start_munge(self) -> None:
        munge = self.folder / "munge"
        subprocess.run(["mungekey", "--create", f"--keyfile={munge}/key", "--force"], check=True)
        self._start(
            "munged", "controller", "--foreground", "--force", f"--socket={munge}/socket", f"--key-file={munge}/key",
            f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed",
        )  # fmt: skip
        deadline = time.monotonic() + PATIENCE_S
        while not (munge / "socket").exists():
            assert time.monotonic() < deadline, "munged did not start"
            time.sleep(0.05)

    def _start(self, daemon: str, host: str, *arguments: str) -> None:
        with (self.folder / "log" / f"{daemon}.{host}").open("wb") as log:
            self.daemons[f"{daemon} {host}"] = subprocess.Popen(
                [*self._on(host), daemon, *arguments],
                env=self._environment(), stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def _idle_count(self) -> int:
        with contextlib.suppress(AssertionError):  # the controller does not answer yet
            counts = self.command("sinfo", "--noheader", "--states=idle", "--format=%D").stdout.split()
            return sum(map(int, counts))
        return 0


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextlib.contextmanager
def slurm_lab(folder: Path, gpu_count: int, cpu_count: int) -> Iterator[SlurmLab]:
    """A running cluster, with its files in ``folder``. None of its processes outlives the context."""
    lab = SlurmLab(folder, gpu_count, cpu_count)
    try:
        lab.start()
        yield lab
    finally:
        lab.stop()
