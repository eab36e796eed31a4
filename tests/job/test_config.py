"""Settings: what is accepted, what is refused and with which words, and the way through the environment."""

from __future__ import annotations

from pathlib import Path
from socket import AF_INET, AF_INET6
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from jaxhetero.config import (
    Config,
    ReducerConfig,
    colour_wanted,
    interface_addresses,
    parse_address,
    read_environment,
    read_token,
    write_environment,
)
from jaxhetero.errors import ConfigError

_JOB: dict[str, Any] = {"worker_count": 4, "coordinator": "a:1", "token": "secret"}
_REDUCER: dict[str, Any] = {"coordinator": "a:1", "token": "secret"}


def test_one_worker_needs_no_setting() -> None:
    assert Config() == Config(rank=0, worker_count=1, reducer_count=0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"worker_count": 0}, ["worker_count", "0", "at least 1"]),
        ({"rank": 4}, ["rank 4", "0..3"]),
        ({"rank": -1}, ["rank -1", "0..3"]),
        ({"reducer_count": -1}, ["reducer_count", "-1"]),
        ({"alone": True}, ["alone is set, but worker_count is 4"]),
        ({"alone": True, "worker_count": 1, "reducer_count": 2}, ["alone is set, but reducer_count is 2"]),
        ({"alone": True, "worker_count": 1, "colocated_count": 1}, ["alone is set, but colocated_count is 1"]),
        ({"coordinator": ""}, ["coordinator", "JAXHETERO_COORDINATOR", "jaxhetero launch"]),
        ({"coordinator": "a"}, ["coordinator", "'a'", "host:port"]),
        ({"token": ""}, ["token", "JAXHETERO_TOKEN_FILE", "jaxhetero launch"]),
        ({"start_timeout_ms": 0}, ["start_timeout_ms", "0"]),
        ({"timeout_ms": -5}, ["timeout_ms", "-5"]),
        ({"interface": "nic9"}, ["'nic9'", "lo (127.0.0.1)"]),
        ({"window_chunks": -1}, ["window_chunks", "-1"]),
        ({"restart_count": -1}, ["restart_count", "-1"]),
        ({"strands": -1}, ["strands is -1", "1..32", "or 0"]),
        ({"interface": "lo,lo"}, ["'lo,lo'", "twice"]),
        ({"interface": "lo,nic9"}, ["'nic9'", "lo (127.0.0.1)"]),
        ({"strands": 33}, ["strands is 33", "1..32"]),
        ({"chunk_bytes": 1023}, ["chunk_bytes", "1023"]),
        ({"chunk_bytes": 1024 + 32}, ["chunk_bytes", "1056", "64"]),
        ({"chunk_bytes": (1 << 24) + 64}, ["chunk_bytes", "16777216"]),
    ],
)
def test_a_bad_worker_setting_is_named(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**_JOB | changes)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"coordinator": ""}, ["--coordinator", "JAXHETERO_COORDINATOR"]),
        ({"coordinator": "a:x"}, ["coordinator", "'a:x'", "host:port"]),
        ({"token": ""}, ["token", "JAXHETERO_TOKEN", "--token-file"]),
        ({"port": 65536}, ["port", "65536"]),
        ({"port": -1}, ["port", "-1"]),
        ({"number": -2}, ["number", "-2"]),
        ({"timeout_ms": 0}, ["timeout_ms", "0"]),
        ({"start_timeout_ms": 0}, ["start_timeout_ms", "0"]),
    ],
)
def test_a_bad_reducer_setting_is_named(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        ReducerConfig(**_REDUCER | changes)
    assert all(word in str(caught.value) for word in words), caught.value


def test_the_token_is_never_printed() -> None:
    assert "secret" not in repr(Config(**_JOB))
    assert "secret" not in repr(ReducerConfig(**_REDUCER))


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1:80", ("10.0.0.1", 80)),
        ("node-3.cluster:65535", ("node-3.cluster", 65535)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_address("coordinator", text) == address


@pytest.mark.parametrize(
    "text", ["", "a", ":1", "a:", "a:0", "a:65536", "a:-1", "a:+1", "a: 1", "a:1_0", "a:٣", "::1:80", "[]:1", "a:b:1"]
)
def test_bad_addresses(text: str) -> None:
    with pytest.raises(ConfigError, match="coordinator is"):
        parse_address("coordinator", text)


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, {}),
        ({"RANK": "3", "JAXHETERO": "x", "JAXHETERO_": "x", "JAXHETERO_COLOUR": "x"}, {}),
        ({"JAXHETERO_RANK": "3"}, {"rank": 3}),
        ({"JAXHETERO_COORDINATOR": "a:1", "JAXHETERO_HOST": "b"}, {"coordinator": "a:1", "host": "b"}),
        ({"JAXHETERO_COORDINATOR": "", "JAXHETERO_TOKEN": ""}, {}),
        ({"JAXHETERO_CHUNK_BYTES": "4096", "JAXHETERO_TIMEOUT_MS": "9"}, {"chunk_bytes": 4096, "timeout_ms": 9}),
        ({"JAXHETERO_TOKEN": "t", "JAXHETERO_TOKEN_FILE": "/nowhere"}, {"token": "t"}),
        ({"JAXHETERO_TOKEN_FILE": ""}, {}),
        ({"JAXHETERO_CHECKSUM": "1"}, {"checksum": True}),
        ({"JAXHETERO_CHECKSUM": "False"}, {"checksum": False}),
    ],
)
def test_reading_the_environment(environ: dict[str, str], found: dict[str, str | int]) -> None:
    assert read_environment(environ) == found


@pytest.mark.parametrize("text", ["", "yes", "2"])
def test_a_bad_switch_in_the_environment_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=f"JAXHETERO_CHECKSUM is {text!r}; it must be 1 or 0, true or false"):
        read_environment({"JAXHETERO_CHECKSUM": text})


@pytest.mark.parametrize("config", [Config, ReducerConfig])
def test_an_interface_gives_the_address(config: Any) -> None:
    assert config(**_REDUCER, interface="lo").host == "127.0.0.1"
    assert config(**_REDUCER, interface="lo", host="127.0.0.2").host == "127.0.0.2"


def test_an_interface_has_addresses_of_both_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is taken is of the coordinator's kind, and one that other hosts can reach."""
    ipv6 = ["fe80::1%both", "fd00::1"]
    known = {"both": [*ipv6, "10.0.0.1"], "new": ipv6, "old": ["10.0.0.2"], "local": ipv6[:1], "down": ipv6}
    found = {
        name: [SimpleNamespace(address=each, family=AF_INET6 if ":" in each else AF_INET) for each in addresses]
        for name, addresses in known.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {name: SimpleNamespace(isup=name != "down") for name in found})
    both = {"new": "fd00::1", "old": "10.0.0.2", "local": "fe80::1%both"}
    assert interface_addresses() == both | {"both": "10.0.0.1"}
    assert interface_addresses(prefers_ipv6=True) == both | {"both": "fd00::1"}
    assert Config(coordinator="[fd00::2]:7", interface="both").host == "fd00::1"
    assert Config(coordinator="a:7", interface="both,new").host == "10.0.0.1"


@pytest.mark.parametrize("text", ["", "three", "3.0", "0x3"])
def test_a_bad_number_in_the_environment_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=f"JAXHETERO_RANK is {text!r}; it must be a whole number"):
        read_environment({"JAXHETERO_RANK": text})


@pytest.mark.parametrize("token", ["", "from the environment"])
def test_a_token_file(tmp_path: Path, token: str) -> None:
    path = tmp_path / "token"
    path.write_text("  from the file\n")
    environ = {"JAXHETERO_TOKEN_FILE": str(path), "JAXHETERO_TOKEN": token}
    assert read_environment(environ) == {"token": token or "from the file"}


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No such file"), (b"", "is empty"), (b" \n", "is empty"), (b"\xff\xfe", "is not text")],
)
def test_a_bad_token_file_is_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        read_token(path)
    assert str(path) in str(caught.value)


def test_what_is_written_to_the_environment_is_read_back() -> None:
    settings: dict[str, str | int] = {"rank": 2, "worker_count": 4, "coordinator": "a:1", "token": "new", "checksum": 1}
    outer = {"PATH": "/bin", "JAXHETERO_RANK": "7", "JAXHETERO_TOKEN_FILE": "/nowhere", "JAXHETERO_TIMEOUT_MS": "5"}
    environ = write_environment(settings, outer)
    assert environ["PATH"] == "/bin"
    assert "JAXHETERO_TOKEN_FILE" not in environ
    assert read_environment(environ) == settings | {"timeout_ms": 5}


def test_only_known_settings_are_written() -> None:
    with pytest.raises(ConfigError, match="no such setting: rnak"):
        write_environment({"rnak": 1}, {})


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_colour(environ: dict[str, str], wanted: bool) -> None:
    assert colour_wanted(environ) is wanted


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [("checksum", 1, "bool"), ("failover", "yes", "bool"), ("timeout_ms", 2.5, "int"), ("timeout_ms", True, "int"),
     ("chunk_bytes", "4096", "int"), ("host", 127, "str")],
)  # fmt: skip
def test_settings_of_another_type_are_refused(name: str, value: object, wanted: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value!r}; it must be of type {wanted}"):
        Config(**{name: value})  # type: ignore[arg-type]


def test_whole_numbers_of_numpy_are_settings() -> None:
    timeout_ms = Config(timeout_ms=np.int64(5000)).timeout_ms
    assert timeout_ms == 5000
    assert type(timeout_ms) is int
