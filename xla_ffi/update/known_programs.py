"""Writes the programs that have fused kernels into the C++ core, after a change of how optax is lowered.

    python xla_ffi/update/known_programs.py && clang-format -i xla_ffi/update/{known_programs.h,fused.cc}

``tests/optimizers/test_updates.py`` fails where a known optimizer has a program without a kernel.
"""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import optax

from jaxhetero import optimizers
from jaxhetero.optimizers._programs import lower
from jaxhetero.optimizers._programs.program import Program

FOLDER = Path(__file__).resolve().parent
_PARAMS = {"w": np.zeros((2, 3), np.float32)}


def schedule(count: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
    return 0.1 / (count + 1)


# Names of kernels, and what they run. Where a kernel has several passes, those before the last are called its sums.
OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1),
    "lamb": optimizers.lamb(0.1, max_grad_norm=None),
    "lars": optimizers.lars(0.1),
    "lars, without decay": optimizers.lars(0.1, mask=lambda _: {"w": False}),
    "adam, clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "adamw, clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "lamb, clipped": optimizers.lamb(0.1),
    "lamb, clipped, scheduled": optimizers.lamb(schedule),
}


def known() -> dict[str, Program]:
    """Each program once, by a name."""
    found: dict[Program, str] = {}
    for name, tx in OPTIMIZERS.items():
        update = lower(tx, _PARAMS)
        passes = update.leaves[0].passes
        for number, pass_ in enumerate(passes, 1):
            suffix = "" if number == len(passes) else ", sums" if number == len(passes) - 1 else ", norm"
            found.setdefault(update.programs[pass_.program], name + suffix)
    return {name: program for program, name in found.items()}


def _constant(name: str) -> str:
    return "k" + "".join(word.capitalize() for word in name.replace(",", " ").split())


def _declaration(name: str, program: Program) -> str:
    steps = ", ".join(
        f"{{k{step.opcode.name.title().replace('_', '')}, "
        f"{', '.join(map(str, (step.to, *(*step.operands, 0, 0)[:3])))}}}"
        for step in program.instructions
    )
    results = list(dict.fromkeys((*program.summands, *(output.slot for output in program.outputs))))
    counts = f"{program.input_count}, {program.scalar_count}, {program.temporary_count}"
    return (
        f"inline constexpr KnownProgram<{len(program.instructions)}, {len(results)}> {_constant(name)} = "
        f'{{"{name}", {counts}, {{{{{steps}}}}}, {{{", ".join(map(str, results))}}}}};\n'
    )


def _replace(path: Path, lines: str) -> None:
    text = path.read_text(encoding="utf-8")
    before, after = text.partition("// BEGIN\n")[0], text.partition("// END\n")[2]
    path.write_text(f"{before}// BEGIN\n{lines}// END\n{after}", encoding="utf-8")


if __name__ == "__main__":
    programs = known()
    _replace(FOLDER / "known_programs.h", "".join(_declaration(name, program) for name, program in programs.items()))
    entries = "".join(f"    entry<known::{_constant(name)}>(),\n" for name in programs)
    _replace(FOLDER / "fused.cc", f"constexpr std::array kEntries = {{\n{entries}}};\n")
