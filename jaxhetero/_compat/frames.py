"""Where in whose source something was made, or is called."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import jax
from jax._src import source_info_util, tree, tree_util

from jaxhetero._compat.equations import Equation


def equation_source(equation: Equation) -> str:
    """``train.py:train_step``, where the user's program made an equation."""
    frames = source_info_util.user_frames(equation.source_info.traceback)
    frame = next((frame for frame in frames if not _is_of_this_package(frame)), None)
    return source_name(frame.file_name, frame.function_name) if frame else "an unknown place"


_INPUT = re.compile(r"<?i?python-input-\d|.*/ipython-input-\d|.*/ipykernel_\d+/")


def source_name(file_name: str, function_name: str) -> str:
    """``train.py:train_step``; ``<input>:train_step`` in a notebook or a shell.

    An input is named without its number and its hash, which differ where a worker has run more inputs than the others.

    Why: no program promises what it calls the file of an input. IPython says ``<ipython-input-3-1a2b>``, Python since
    3.13 ``<python-input-3>``, Colab ``/tmp/ipython-input-3-1a2b.py``, Jupyter ``/tmp/ipykernel_17/1234.py``.
    """
    return f"{'<input>' if _INPUT.match(file_name) else Path(file_name).name}:{function_name}"


def _is_of_this_package(frame: Any) -> bool:
    return bool(frame.file_name.startswith(_PACKAGE_DIR))


_PACKAGE_DIR = f"{Path(__file__).parents[1]}/"


def is_of_our_collectives(equation: Equation, scope: str) -> bool:
    """Whether one of our collectives made an equation, or something in a ``jax.named_scope`` of this name did."""
    frame = next(iter(source_info_util.user_frames(equation.source_info.traceback)), None)
    is_ours = frame is not None and frame.file_name.startswith(_OUR_COLLECTIVES)
    return is_ours or is_within(equation, scope)


_OUR_COLLECTIVES = f"{_PACKAGE_DIR}_collectives/"


def is_within(equation: Equation, scope: str) -> bool:
    """Whether an equation, or what JAX made it of, was made in a ``jax.named_scope`` of this name."""
    return scope in str(equation.source_info.name_stack)


def equation_functions(equation: Equation) -> list[str]:
    """The functions of the user's program, and of libraries, in which an equation was made; the innermost first."""
    return [frame.function_name for frame in source_info_util.user_frames(equation.source_info.traceback)]


def describe_flattener() -> str | None:
    """Who takes a node of a pytree apart, called in the node's ``tree_flatten``; None if JAX does so to carry it.

    JAX carries nodes in and out of functions. Out of a branch of ``lax.cond`` it carries those of ours alone: the other
    branch has to give such a node as well. And nobody computes with a structure that has no leaves.

    Why: JAX does not tell a node who asks, and its own files are told by their names. Since 0.10.
    """
    frames = _frames_from(2)
    asked = [frame.f_code.co_name for frame in itertools.takewhile(_is_of_trees, frames)]
    rest = frames[len(asked) :]
    passed = [frame.f_code.co_filename for frame in itertools.takewhile(_is_of_jax, rest)]
    callers = rest[len(passed) :]
    in_branch = any(name.endswith("conditionals.py") for name in passed)
    is_carried = (passed or not asked) and not (in_branch and _package(callers[0]) != "jaxhetero")
    if is_carried or "tree_structure" in asked or not callers:
        return None
    return _describe(callers) + (" in a branch of jax.lax.cond" if in_branch else "")


def describe_caller() -> str:
    """Who calls a method of ours, by an operator that JAX may have been asked for. Why and since: as above."""
    return _describe(list(itertools.dropwhile(_is_of_jax, _frames_from(2))))


def _describe(callers: Sequence[FrameType]) -> str:
    who = callers[0]
    user = next((frame for frame in callers if not _is_of_jax(frame) and _package(frame) != _package(who)), who)
    name = who.f_code.co_qualname.split(".<locals>.update")[0]
    return f"{name} ({_place(who)}; called from {_place(user)})"


def _frames_from(depth: int) -> list[FrameType]:
    """Of the functions that run, the innermost first: from the caller's caller on for a ``depth`` of 2."""
    frames = []
    frame = inspect.currentframe()
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[1 + depth :]


def _is_of_trees(frame: FrameType) -> bool:
    return frame.f_code.co_filename in {tree.__file__, tree_util.__file__}


def _is_of_jax(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(str(Path(jax.__file__).parent))


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _place(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
