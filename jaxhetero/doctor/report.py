"""The report of ``jaxhetero doctor``: problems in words, and tables for people. No network here."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table

# A host is slow below this share of the typical goodput. Headers and other traffic take a part on every host.
SLOW = 0.6
_CLOCK_S = 1.0


@dataclass(frozen=True)
class Patient:
    """One process of the examination, as it describes itself."""

    host: str
    address: str
    versions: dict[str, str]
    """The versions of jaxhetero, jax and python, by these names."""
    interface: str = ""
    speeds_mbit: dict[str, int] = field(default_factory=dict)
    """The speed of every interface of its host that is hardware, is up, and knows its speed."""
    mtu: int = 0
    fabric: str = ""
    """The devices that ``JAXHETERO_FABRIC`` would use, if any: "efa on rdmap0s6-rdm"."""
    fabric_problem: str = ""
    """Why they cannot be used."""
    clock_s: float = 0.0
    """How far its clock is ahead of the coordinator's."""

    @property
    def name(self) -> str:
        """The name in messages: "w1 (10.0.0.3)"."""
        return f"{self.host} ({self.address})"


Pair = tuple[int, int]


@dataclass(frozen=True)
class FabricTrial:
    """One pair that has sent over a fabric, and the same way over its socket, while the network was quiet."""

    source: int
    target: int
    provider: str = ""
    bytes_per_s: float = 0.0
    socket_bytes_per_s: float = 0.0
    failure: str = ""
    """Why there are no figures."""


@dataclass(frozen=True)
class Findings:
    """The results of an examination. Pairs are (from, to), by the order of ``patients``."""

    wanted_count: int
    patients: list[Patient]
    goodput: dict[Pair, float] = field(default_factory=dict)
    """Bytes per second that arrived, while the other direction was busy too."""
    failures: dict[Pair, str] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)
    """For each process that was refused, the reason."""
    trial: FabricTrial | None = None
    """None where fewer than two processes have a fabric."""


def problems(findings: Findings) -> list[str]:
    """Every problem to mend before a long job, and how to mend it."""
    return [*findings.refusals, *_missing(findings), *_differences(findings), *_networks(findings), *_slow(findings)]


def _missing(findings: Findings) -> Iterator[str]:
    if len(findings.patients) < findings.wanted_count:
        names = ", ".join(patient.name for patient in findings.patients)
        yield (
            f"only {len(findings.patients)} of {findings.wanted_count} processes came: {names}; is `jaxhetero doctor` "
            "running on every host, and can each reach the coordinator's address?"
        )


def _differences(findings: Findings) -> Iterator[str]:
    first = findings.patients[0]
    for patient in findings.patients[1:]:
        for what, version in patient.versions.items():
            if version != first.versions.get(what):
                yield (
                    f"{patient.name} has {what} {version}, {first.name} {first.versions.get(what)}; install the same "
                    "everywhere"
                )
        if abs(patient.clock_s) > _CLOCK_S:
            yield (
                f"the clock of {patient.name} differs from the coordinator's by {patient.clock_s:+.1f} s; training "
                "does not depend on it, but logs cannot be compared: set it with NTP"
            )


def _networks(findings: Findings) -> Iterator[str]:
    hosts = {patient.host for patient in findings.patients}
    for patient in findings.patients:
        if len(hosts) > 1 and patient.address.startswith("127."):
            yield f"{patient.name} can be reached from its own host only; give it --interface or --host"
        speeds = patient.speeds_mbit
        best = max(speeds, key=lambda name: speeds[name], default="")
        if patient.interface in speeds and speeds[patient.interface] < speeds[best]:
            yield (
                f"{patient.name} uses {patient.interface} ({speeds[patient.interface]} Mbit/s) although {best} has "
                f"{speeds[best]} Mbit/s; if the others can reach that, give --interface {best}"
            )
    mtus = {patient.mtu for patient in findings.patients if patient.mtu and patient.interface != "lo"}
    if len(mtus) > 1:
        each = ", ".join(f"{patient.name} {patient.mtu}" for patient in findings.patients)
        yield f"the MTUs differ: {each}; large packets may be lost on the way: set the same everywhere"
    yield from _fabrics(findings)
    for (source, target), reason in sorted(findings.failures.items()):
        yield (
            f"{findings.patients[source].name} cannot reach {findings.patients[target].name}: {reason}; check cables, "
            "routes and firewalls between them, for TCP and all ports"
        )


def _fabrics(findings: Findings) -> Iterator[str]:
    having = [patient.name for patient in findings.patients if patient.fabric]
    lacking = [patient.name for patient in findings.patients if not patient.fabric and not patient.fabric_problem]
    if having and lacking:
        yield f"{having[0]} has a device of a fabric, and {', '.join(lacking)} none; bytes there go over sockets"
    for patient in findings.patients:
        if patient.fabric_problem:
            yield f"{patient.name} cannot use a fabric: {patient.fabric_problem}; its bytes go over sockets"
    if findings.trial and findings.trial.failure:
        source, target = (findings.patients[end].name for end in (findings.trial.source, findings.trial.target))
        yield f"{source} cannot send to {target} over a fabric: {findings.trial.failure}"


def _slow(findings: Findings) -> Iterator[str]:
    """Hosts that are slow with all others, then pairs that are slow although both hosts are fast with others."""
    for direction, end in (("sends", 0), ("receives", 1)):
        best = _best(findings, end)
        typical = statistics.median(best.values()) if best else 0.0
        for index, rate in best.items():
            if rate < SLOW * typical:
                yield (
                    f"{findings.patients[index].name} {direction} at most {_mbit(rate)} Mbit/s where most hosts reach "
                    f"{_mbit(typical)}; check its interface, its cable and its port of the switch"
                )
    sends, receives = _best(findings, 0), _best(findings, 1)
    for (source, target), rate in sorted(findings.goodput.items()):
        could = min(sends[source], receives[target])
        if rate < SLOW * could:
            yield (
                f"{findings.patients[source].name} sends {_mbit(rate)} Mbit/s to {findings.patients[target].name}, "
                f"though with others both reach {_mbit(could)}; check the network between them"
            )


def _best(findings: Findings, end: int) -> dict[int, float]:
    """The best goodput of each process with any other, as the sender (0) or the receiver (1)."""
    best: dict[int, float] = {}
    for pair, rate in findings.goodput.items():
        best[pair[end]] = max(rate, best.get(pair[end], 0.0))
    return best


def show(findings: Findings, console: Console) -> None:
    """Print the tables and the problems."""
    sends, receives = _best(findings, 0), _best(findings, 1)
    table = Table("process", "interface", "clock", "sends Mbit/s", "receives Mbit/s", box=box.SIMPLE_HEAD)
    for index, patient in enumerate(findings.patients):
        speed = patient.speeds_mbit.get(patient.interface)
        table.add_row(
            f"{index}: {patient.name}",
            patient.interface + (f", {speed} Mbit/s" if speed else ""),
            f"{1e3 * patient.clock_s:+.1f} ms",
            _mbit(sends[index]) if index in sends else "-",
            _mbit(receives[index]) if index in receives else "-",
        )
    console.print(table)
    if len(findings.patients) > 2:
        console.print(_matrix(findings))
    for patient in findings.patients:
        if patient.fabric:
            console.print(f"{patient.name}: fabric {patient.fabric}", soft_wrap=True, highlight=False, markup=False)
    if findings.trial and not findings.trial.failure:
        console.print(_describe(findings.trial, findings.patients), soft_wrap=True, highlight=False, markup=False)
    for text in problems(findings) or ["nothing to mend"]:
        console.print(text, soft_wrap=True, highlight=False, markup=False)


def _describe(trial: FabricTrial, patients: list[Patient]) -> str:
    return (
        f"over the fabric {trial.provider}, {patients[trial.source].name} sends {_mbit(trial.bytes_per_s)} Mbit/s to "
        f"{patients[trial.target].name}; over the socket, {_mbit(trial.socket_bytes_per_s)}"
    )


def _matrix(findings: Findings) -> Table:
    count = len(findings.patients)
    table = Table("Mbit/s from \\ to", *map(str, range(count)), box=box.SIMPLE_HEAD)
    for source in range(count):
        cells = [findings.goodput.get((source, target)) for target in range(count)]
        marks = ["lost" if (source, target) in findings.failures else "" for target in range(count)]
        table.add_row(
            str(source),
            *(mark or ("" if cell is None else _mbit(cell)) for mark, cell in zip(marks, cells, strict=True)),
        )
    return table


def _mbit(bytes_per_s: float) -> str:
    return f"{8e-6 * bytes_per_s:.0f}"
