"""What Python and the C++ core both declare has the same names and numbers on both sides."""

import ast
import inspect
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import jaxhetero
from jaxhetero import _native, _simulator, config
from jaxhetero._collectives.exchange_primitive import ExchangeAttributes
from jaxhetero._collectives.kinds import Kind
from jaxhetero._collectives.pending_primitives import DoneAttributes, StartAttributes
from jaxhetero._collectives.primitive import CallAttributes
from jaxhetero._job.counts import Metrics
from jaxhetero.config import Config, CoordinatorConfig, ReducerConfig
from jaxhetero.simulator import job as simulator_job

ROOT = Path(__file__).resolve().parents[2]


def names(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}


def test_initialize_takes_every_setting() -> None:
    """By its name and type, where None means that it is not given; and its docstring tells of each."""
    parameters = inspect.signature(jaxhetero.initialize).parameters.values()
    assert {parameter.kind for parameter in parameters} == {inspect.Parameter.KEYWORD_ONLY}
    assert {parameter.default for parameter in parameters} == {None}
    declared = [(parameter.name, parameter.annotation) for parameter in parameters]
    assert declared == [(field.name, f"{field.type} | None") for field in fields(Config)]
    arguments = (jaxhetero.initialize.__doc__ or "").partition("Args:")[2].partition("Blocks")[0]
    described = [name for line in arguments.splitlines() for name in line.partition(":")[0].replace(" ", "").split(",")]
    assert names(Config) <= set(described)


def test_every_setting_of_a_worker_is_one_of_config() -> None:
    # Made from host, interface, cores and `elastic` where the communicator starts.
    assert set(_native.declared_names["worker settings"]) <= (
        names(Config) | {"sources", "most_strands", "memory_nodes", "least_worker_count", "first_worker_count"}
    )


def test_every_setting_of_a_reducer_is_one_of_its_config() -> None:
    # No user sets the rank of the worker that a reducer lives in, nor what follows from interfaces and cores.
    known = names(ReducerConfig) | {"colocated_rank", "most_strands", "memory_nodes", "more_hosts"}
    assert set(_native.declared_names["reducer settings"]) <= known


def test_every_setting_of_a_coordinator_is_one_of_its_config() -> None:
    assert set(_native.declared_names["coordinator settings"]) <= names(CoordinatorConfig)


def test_metrics_are_what_the_core_counts() -> None:
    # A reducer counts its workers; its log shows the number.
    assert names(Metrics) == set(_native.declared_names["metrics"]) - {"joined_count"}


def test_the_attributes_of_the_call_are_what_its_handler_reads() -> None:
    assert names(CallAttributes) == set(_native.declared_names["call attributes"])
    own = set(_native.declared_names["exchange attributes"])
    assert names(ExchangeAttributes) == names(CallAttributes) | own
    assert names(StartAttributes) == names(CallAttributes) | set(_native.declared_names["start attributes"])
    assert names(DoneAttributes) == set(_native.declared_names["done attributes"])


def core_numbers(header: str, enumeration: str = "") -> dict[str, int]:
    """The constants of a header of the core, or the enumerators of one enumeration, by name."""
    text = (ROOT / "xla_ffi" / header).read_text()
    text = text.partition(f"enum class {enumeration} ")[2].partition("};")[0] if enumeration else text
    found = re.findall(r"\bk(\w+) = (?:size_t\{(\d+)\} << )?(\d+)[,;]", text)
    return {name: int(base) << int(number) if base else int(number) for name, base, number in found}


def test_limits_are_those_of_the_core() -> None:
    core = core_numbers("wire/job_shape.h") | core_numbers("wire/frame.h")
    assert core["MaxWorkers"] == config.MOST_WORKERS
    assert core["MaxReducers"] == config.MOST_REDUCERS
    assert core["MaxStrands"] == config.MOST_STRANDS
    assert core["MaxRails"] == config.MOST_INTERFACES
    assert core["MaxChunkBytes"] == config.MOST_CHUNK_BYTES


def test_kinds_and_dtypes_have_the_numbers_of_the_core() -> None:
    kinds = core_numbers("wire/op_spec.h", "Kind")
    assert {kind.name: kind.value for kind in Kind} == {name.upper(): number for name, number in kinds.items()}
    dtypes = core_numbers("sum/reduce.h", "DType")
    for dtype, (number, _) in simulator_job._DTYPES.items():
        assert number == dtypes[dtype.replace("float", "f").upper()], dtype


def parameters(function: ast.FunctionDef) -> str:
    """Without their types: the core knows a dict where the stub knows a dict of what."""
    for node in ast.walk(function.args):
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(function.args)


def bound_parameters(function: Any) -> str:
    """Of a function of nanobind, whose types and defaults are not all Python."""
    text = re.sub(r"ndarray\[[^]]*\]", "object", function.__nb_signature__[0][0].replace("\\0", "..."))
    (parsed,) = ast.parse(f"{text}: ...").body
    assert isinstance(parsed, ast.FunctionDef)
    return parameters(parsed)


def in_stub(body: list[ast.stmt], of: str = "") -> dict[str, str]:
    """All that is declared, by name, with the parameters of functions."""
    found = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            found |= {node.name: ""} | in_stub(node.body, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            found[of + node.name] = "" if node.decorator_list else parameters(node)
        elif isinstance(node, ast.AnnAssign):
            found[of + ast.unparse(node.target)] = ""
    return found


def in_module(members: Mapping[str, Any], of: str = "") -> dict[str, str]:
    """All that is bound, likewise."""
    found = {}
    for name, value in members.items():
        if isinstance(value, type):
            found |= {name: ""} | in_module(vars(value), f"{name}.")
        elif name == "__init__" or not name.startswith("__"):
            found[of + name] = bound_parameters(value) if hasattr(value, "__nb_signature__") else ""
    return {name: text for name, text in found.items() if not name.endswith("__init__") or text not in ("", "self")}


@pytest.mark.parametrize("module", [_native, _simulator], ids=lambda module: module.__name__)
def test_stubs_declare_what_is_bound(module: ModuleType) -> None:
    stub = ROOT / f"{module.__name__.replace('.', '/')}.pyi"
    assert in_stub(ast.parse(stub.read_text()).body) == in_module(vars(module))
