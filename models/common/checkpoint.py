"""Checkpoints with orbax. The first worker reads and writes; the others get the state from it by broadcast.

The workers need no shared file system. A checkpoint is a folder named by its step. It appears complete or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

import jaxhetero
from models.common.errors import CheckpointError, require
from models.common.first import from_first, is_first

T = TypeVar("T")


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, identity: dict[str, Any], keep: int | None = None) -> None:
        """``identity``: settings that a run and its checkpoints must have in common, as JSON values.

        ``keep``: of more checkpoints than this, the latest are kept.
        """
        self._keep = keep
        self._folder = folder.absolute()
        self._identity = json.loads(json.dumps(identity))  # as it is read again: JSON has no tuples

    def steps(self) -> list[int]:
        """The steps of the saved checkpoints, in ascending order."""
        if not self._folder.is_dir():
            return []
        return sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdigit())

    def choose(self, wanted: str | None) -> str | None:
        """The checkpoint to continue from: ``wanted``, or the latest one after a restart by the launcher.

        Call it on every worker. None: there is no checkpoint to continue from.

        Raises:
          SettingsError: on every worker, if the folder has checkpoints of an earlier run and ``wanted`` is None. After
            a restart, these could not be told from the checkpoints of this run.
        """
        has_any = bool(from_first(jnp.int32(bool(self.steps()))))
        if has_any and jaxhetero.restart_count():
            return "latest"
        require(
            wanted is not None or not has_any,
            f"there are checkpoints in {self._folder} already: continue from them with --resume latest, or choose "
            "another --output",
        )
        return wanted

    def save(self, step: int, state: Any, history: dict[str, Any]) -> None:
        """Save the state. Call it on every worker with the same state; the first writes. ``history`` becomes JSON."""
        if is_first() and step not in self.steps():
            ocp = _orbax()
            run = {"identity": self._identity, "shapes": _shapes(_flatten(state)), "history": history}
            args = ocp.args.Composite(state=ocp.args.StandardSave(_flatten(state)), run=ocp.args.JsonSave(run))
            try:
                with _manager(self._folder, create=True, max_to_keep=self._keep) as manager:
                    manager.save(step, args=args)
            except (OSError, ValueError, RuntimeError) as error:  # such as those of a full disk
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise CheckpointError(f"cannot write checkpoint {step} in {self._folder}: {reason}") from error

    def restore(self, wanted: str, template: Any) -> tuple[int, Any, dict[str, Any]]:
        """The step, state and history of the checkpoint ``wanted``: the number of a step, or ``latest``.

        Call it on every worker. The state has the structure of ``template``. The history is empty on all but the first
        worker.

        Raises:
          CheckpointError: on every worker, if the checkpoint is missing, damaged, or of another model.
        """

        def read() -> tuple[int, Any, dict[str, Any]]:
            step = self._choose(wanted)
            return step, *self._read(step, template)

        nothing: tuple[int, Any, dict[str, Any]] = (0, template, {})
        step, state, history = _on_first(read, otherwise=nothing)
        step, state = from_first((jnp.int32(step), state))
        return int(step), state, history

    def restore_params(self, wanted: str, template: Any) -> Any:
        """Only the field ``params`` of a saved training state, to start another training from it.

        Call it on every worker. It raises as ``restore`` does.
        """

        def read() -> Any:
            step = self._choose(wanted)
            prefix = ".params"
            saved = self.read_arrays(step)
            flat = {name.removeprefix(prefix): leaf for name, leaf in saved.items() if name.startswith(prefix)}
            _check_shapes(_shapes(flat), _shapes(_flatten(template)), f"checkpoint {step} in {self._folder}")
            return _unbound(_unflatten(template, flat))

        return from_first(_on_first(read, otherwise=template))

    def read_arrays(self, step: int) -> dict[str, Any]:
        """All arrays of a checkpoint, by the names of the leaves. Only the worker that calls it reads."""
        ocp = _orbax()
        with _manager(self._folder) as manager:
            try:
                found = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore())).state
            except (OSError, ValueError, KeyError) as error:
                where = f"checkpoint {step} in {self._folder}"
                raise CheckpointError(f"{where} is damaged: {str(error).splitlines()[0]}") from error
        return dict(found)

    def _choose(self, wanted: str) -> int:
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"there is no checkpoint in {self._folder}")
        if wanted == "latest":
            return steps[-1]
        if not wanted.isdigit() or int(wanted) not in steps:
            raise CheckpointError(
                f"there is no checkpoint {wanted!r} in {self._folder}; there are {', '.join(map(str, steps))}"
            )
        return int(wanted)

    def _read(self, step: int, template: Any) -> tuple[Any, dict[str, Any]]:
        where = f"checkpoint {step} in {self._folder}"
        ocp = _orbax()
        with _manager(self._folder) as manager:
            try:
                run = manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore())).run
                _check_identity(run["identity"], self._identity, where)
                flat = _flatten(template)
                _check_shapes(run["shapes"], _shapes(flat), where)
                abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, flat)
                state = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))).state
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(f"{where} is damaged: {str(error).splitlines()[0]}") from error
        return _unbound(_unflatten(template, state)), run["history"]


def _on_first(read: Callable[[], T], *, otherwise: T) -> T:
    """The result of ``read`` on the first worker, ``otherwise`` on others. If ``read`` fails, every worker raises."""
    result, failure = otherwise, None
    if is_first():
        try:
            result = read()
        except CheckpointError as error:
            failure = error
    if from_first(jnp.int32(failure is not None)):
        raise failure or CheckpointError("the first worker could not read the checkpoint; its message says why")
    return result


def _orbax() -> Any:
    import orbax.checkpoint as ocp  # takes seconds to import, and only the first worker of a run that saves needs it

    return ocp


def _manager(folder: Path, *, create: bool = False, max_to_keep: int | None = None) -> Any:
    ocp = _orbax()
    options = ocp.CheckpointManagerOptions(max_to_keep=max_to_keep, create=create, enable_async_checkpointing=False)
    return ocp.CheckpointManager(folder, options=options, item_names=("state", "run"))


def _flatten(state: Any) -> dict[str, Any]:
    """The leaves by the names of their paths, so that a checkpoint does not depend on the containers' types."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def _unflatten(template: Any, flat: dict[str, Any]) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: flat[jax.tree_util.keystr(path)], template)


def _unbound(state: Any) -> Any:
    """The same arrays, not bound to a device as those of orbax are.

    JAX compiles a program anew for arrays that are. So the first worker would compile what the others have compiled
    before in the same process, and its collectives would not meet theirs.
    """
    return jax.tree.map(lambda leaf: jnp.array(np.asarray(leaf)), state)


def _check_identity(saved: dict[str, Any], wanted: dict[str, Any], where: str) -> None:
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            raise CheckpointError(
                f"{where} is of another run: {name} is {saved.get(name)!r} there and {wanted.get(name)!r} here"
            )


def _shapes(flat: dict[str, Any]) -> dict[str, list[int]]:
    return {name: list(np.shape(leaf)) for name, leaf in flat.items()}


def _check_shapes(saved: dict[str, list[int]], wanted: dict[str, list[int]], where: str) -> None:
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            raise CheckpointError(
                f"{where} is of another model: {name} is {saved.get(name)} there and {wanted.get(name)} here"
            )
