"""What the trainers share, on a toy problem: checkpoints, Ctrl-C, a loss that is not a number, dry runs."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from PIL import Image
from rich.console import Console

import jaxhetero
from models.common.batches import BatchSplit, ExampleStream, evaluation_batches, read_pieces
from models.common.command import RunOptions
from models.common.dry_run import DryRun
from models.common.errors import CheckpointError, DataError, LossError, SettingsError
from models.common.optimizer import GradientConfig, WeightsDtype, distributed, init_state, scaled
from models.common.rank_0 import run_on_rank_0
from models.common.report import Result
from models.common.training import Training
from tests.support.cluster import ROOT, program_path

STEPS, STRETCH = 9, 3
PLAIN = GradientConfig()


@pytest.fixture(autouse=True)
def world_of_one() -> Iterator[None]:
    jaxhetero.initialize()
    yield
    jaxhetero.shutdown()


class ToyState(NamedTuple):
    params: dict[str, jax.Array]
    opt_state: optax.OptState


def toy(
    *,
    width: int = 3,
    identity: Any = "toy",
    accumulate_every: int = 1,
    gradients: GradientConfig = PLAIN,
    weights_from_reducers: WeightsDtype | None = None,
    on_batch: Callable[[int], None] = lambda step: None,
    spoil_at: int | None = None,
) -> Training:
    """Fit a vector by momentum; step ``spoil_at`` gets an infinite target."""
    optimizer = distributed(
        optax.sgd(0.05, momentum=0.9),
        gradients,
        accumulate_every=accumulate_every,
        weights_from_reducers=weights_from_reducers,
    )
    params = {"weights": jnp.zeros(width)}

    @jax.jit
    def train_step(state: ToyState, target: jax.Array) -> tuple[ToyState, jax.Array]:
        def loss_fn(params: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            loss = jnp.mean((params["weights"] - target) ** 2)
            return scaled(loss, state.opt_state), loss

        grads, loss = jax.grad(loss_fn, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return ToyState(optax.apply_updates(state.params, updates), opt_state), loss

    def batches(_: BatchSplit, first_step: int) -> Iterator[tuple[Any, ...]]:
        for step in range(first_step, STEPS):
            on_batch(step)
            for piece in range(accumulate_every):
                rng = np.random.default_rng((step, piece))
                target = np.full(width, np.inf) if step == spoil_at else rng.normal(size=width)
                yield (target.astype(np.float32),)

    return Training(
        title="toy",
        unit="vectors",
        split=BatchSplit.make(4 * accumulate_every, 4, rank=0, worker_count=1),
        step_count=STEPS,
        stretch_steps=STRETCH,
        evaluate_every=2,
        label=lambda step: f"part {step // STRETCH + 1}",
        state=ToyState(params, init_state(optimizer, params)),
        train_step=train_step,
        batches=batches,
        learning_rate=lambda step: 0.05,
        synchronize=lambda state: state,
        pull=optimizer.pull,
        push=optimizer.push,
        evaluate=lambda state: {"norm": float(jnp.linalg.norm(state.params["weights"]))},
        identity={"model": identity},
        advice="try less",
    )


def run(training: Training, output: Path | None, resume: str | None = None) -> tuple[Result, str]:
    console = Console(file=io.StringIO(), width=200)
    return training.run(RunOptions(output=output, resume=resume), console), console.file.getvalue()


def saved_steps(output: Path) -> set[str]:
    return {path.name for path in (output / "checkpoints").iterdir()}


def test_every_stretch_ends_with_a_checkpoint_and_some_with_an_evaluation(tmp_path: Path) -> None:
    result, _ = run(toy(), tmp_path)
    assert saved_steps(tmp_path) == {"3", "6", "9"}
    assert [scores["step"] for scores in result.evaluations] == [6, 9]
    assert result.is_complete
    assert len(result.losses) == result.step_count == STEPS


def test_only_the_latest_checkpoints_are_kept(tmp_path: Path) -> None:
    """Also of a run before: a resumed one counts them all."""
    console = Console(file=io.StringIO(), width=200)
    toy().run(RunOptions(output=tmp_path, keep=2), console)
    assert saved_steps(tmp_path) == {"6", "9"}
    resumed = toy().run(RunOptions(output=tmp_path, resume="6", keep=1), console)
    assert resumed.first_step == 6
    assert "resumed from step 6 of 9" in console.file.getvalue()  # type: ignore[attr-defined]
    with pytest.raises(SettingsError, match="keep is 0; it must be at least 1"):
        RunOptions(keep=0)


def test_a_checkpoint_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(CheckpointError, match=rf"cannot write checkpoint 3 in {tmp_path}/checkpoints: "):
        run(toy(), tmp_path)


def test_what_an_evaluation_found_is_drawn(tmp_path: Path) -> None:
    """The picture of the last evaluation as a file, and those of all in TensorBoard's log."""
    training, shades = toy(), iter((50, 200))
    training.draw = lambda: np.full((2, 3, 3), next(shades), np.uint8)
    run(training, tmp_path)
    assert np.asarray(Image.open(tmp_path / "picture.png")).tolist() == [[[200] * 3] * 3] * 2
    (log,) = (tmp_path / "tensorboard").iterdir()
    assert log.read_bytes().count(b"\x89PNG") == 2


@pytest.mark.parametrize("accumulate_every", [1, 2])
@pytest.mark.parametrize("step", ["3", "6"])
def test_resuming_from_any_checkpoint_gives_the_same_bits(tmp_path: Path, step: str, accumulate_every: int) -> None:
    whole, again = toy(accumulate_every=accumulate_every), toy(accumulate_every=accumulate_every)
    first, _ = run(whole, tmp_path)
    resumed, _ = run(again, tmp_path, resume=step)
    assert resumed.first_step == int(step)
    assert resumed.losses == first.losses
    assert resumed.evaluations[-1] == first.evaluations[-1]


@pytest.mark.parametrize("accumulate_every", [1, 2])
def test_rounded_weights_and_residuals_survive_a_checkpoint(tmp_path: Path, accumulate_every: int) -> None:
    """A checkpoint has the weights in float32. A run goes on from their roundings, with the same bits."""

    def halves() -> Training:
        gradients = GradientConfig(wire_dtype="bfloat16", error_feedback=True)
        return toy(accumulate_every=accumulate_every, gradients=gradients, weights_from_reducers="bfloat16")

    first, _ = run(halves(), tmp_path)
    resumed, _ = run(halves(), tmp_path, resume="3")
    exact, _ = run(toy(accumulate_every=accumulate_every), None)
    assert resumed.losses == first.losses
    assert first.losses != exact.losses
    np.testing.assert_allclose(first.losses, exact.losses, rtol=0.05)


def test_a_checkpoint_may_be_identified_by_a_tuple(tmp_path: Path) -> None:
    run(toy(identity=(1, 2)), tmp_path)
    assert run(toy(identity=(1, 2)), tmp_path, resume="6")[0].first_step == 6


def test_ctrl_c_saves_a_checkpoint_from_which_the_run_goes_on(tmp_path: Path) -> None:
    first, _ = run(toy(), None)

    def press(step: int) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    output = tmp_path / "stopped"
    stopped, text = run(toy(on_batch=press), output)
    last = len(stopped.losses)
    assert not stopped.is_complete
    assert 4 < last < STEPS
    assert saved_steps(output) == {"3", str(last)} | ({"6"} if last > 6 else set())
    assert f"stopped after step {last} of 9; its checkpoint is saved" in text
    resumed, _ = run(toy(), output, resume="latest")
    assert resumed.losses == first.losses
    assert resumed.is_complete


def test_a_restarted_run_goes_on_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its latest checkpoint, whatever the command line says; from the beginning where there is none yet."""
    first, _ = run(toy(), None)
    jaxhetero.shutdown()
    monkeypatch.setenv("JAXHETERO_RESTART_COUNT", "1")
    jaxhetero.initialize()
    with pytest.raises(LossError, match="at step 8"):
        run(toy(spoil_at=7), tmp_path)
    again, _ = run(toy(), tmp_path, resume="3")
    assert again.first_step == 6
    assert again.losses == first.losses


def test_a_second_ctrl_c_ends_at_once() -> None:
    def press(step: int) -> None:
        if step in (3, 4):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(toy(on_batch=press), None)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_loss_that_is_not_a_number_ends_the_run_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(LossError, match="the loss is inf at step 5; try less"):
        run(toy(spoil_at=4), tmp_path)
    assert saved_steps(tmp_path) == {"3"}


def test_checkpoints_that_cannot_be_continued_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        run(toy(), tmp_path, resume="latest")
    run(toy(), tmp_path)
    with pytest.raises(
        SettingsError, match=r"there are checkpoints in .* already: continue from them with --resume latest"
    ):
        run(toy(), tmp_path)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint '4' in .*; there are 3, 6, 9"):
        run(toy(), tmp_path, resume="4")
    with pytest.raises(CheckpointError, match="is of another run: model is 'toy' there and 'other' here"):
        run(toy(identity="other"), tmp_path, resume="9")
    with pytest.raises(CheckpointError, match=r"of another model: .*weights.* is \[3\] there and \[4\] here"):
        run(toy(width=4), tmp_path, resume="9")
    for path in (tmp_path / "checkpoints" / "9").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=r"checkpoint 9 in .* is damaged"):
        run(toy(), tmp_path, resume="9")


def test_resume_needs_an_output_folder() -> None:
    with pytest.raises(SettingsError, match="--resume needs --output"):
        RunOptions(resume="latest")


# --- batches and dry runs ---------------------------------------------------------------------------------------------


def load(place: tuple[int, int]) -> dict[str, Any]:
    number, epoch = place
    return {"number": np.array(number), "epoch": np.array(epoch)}


@pytest.mark.parametrize("worker_count", [1, 2, 4])
@pytest.mark.parametrize("first_step", [0, 3])
def test_a_step_has_the_same_pieces_on_any_number_of_workers(worker_count: int, first_step: int) -> None:
    """Ten examples, steps of eight in four pieces: every epoch leaves two out, others each time."""
    stream = ExampleStream(10, 8, 5 * 8, seed=1)
    whole = [stream[position] for position in range(len(stream))]
    found: dict[int, list[tuple[int, int]]] = {}
    for rank in range(worker_count):
        split = BatchSplit.make(8, 2, rank=rank, worker_count=worker_count)
        for count, piece in enumerate(read_pieces(stream, load, split, first_step=first_step)):
            step, index = divmod(count, split.accumulate_every)
            number = split.piece(first_step + step, index)
            found[number] = list(zip(piece["number"].tolist(), piece["epoch"].tolist(), strict=True))
    assert sorted(found) == list(range(4 * first_step, 20))
    for number, examples in found.items():
        assert examples == whole[2 * number : 2 * number + 2]
    for epoch in range(5):
        numbers = [number for number, seen_in in whole if seen_in == epoch]
        assert len(set(numbers)) == len(numbers) == 8


@pytest.mark.parametrize(("count", "worker_count"), [(10, 1), (10, 3), (2, 4)])
def test_evaluation_counts_every_example_once(count: int, worker_count: int) -> None:
    seen: list[int] = []
    for rank in range(worker_count):
        batches = evaluation_batches(
            count, lambda number: {"number": np.array(number)}, batch=4, rank=rank, worker_count=worker_count
        )
        for example, is_real in batches:
            assert len(example["number"]) == len(is_real) == 4
            seen += example["number"][is_real].tolist()
    assert sorted(seen) == list(range(count))


def test_a_dry_run_shows_what_is_sent() -> None:
    params = {
        "kernel": jax.ShapeDtypeStruct((1000, 1000), jnp.float32),
        "bias": jax.ShapeDtypeStruct((10,), jnp.float32),
    }
    dry_run = DryRun(params, BatchSplit.make(64, 4, rank=0, worker_count=4), 100, 4, 10.0, "images")
    console = Console(file=io.StringIO(), width=120)
    console.print(dry_run.to_table("dry run"))
    shown = console.file.getvalue()
    for figure in ("1,000,010 in 2 arrays", "4, 4", "4 x 4", "4,000,040 bytes", "1, the largest", "3.20 ms per step"):
        assert figure in shown


def test_work_of_rank_0_gives_its_result_or_raises() -> None:
    assert run_on_rank_0(lambda: 7) == 7

    def fail() -> None:
        raise DataError("no such thing")

    with pytest.raises(DataError, match="no such thing"):
        run_on_rank_0(fail)


def test_workers_wait_for_rank_0_longer_than_for_a_round(launch: Any) -> None:
    """And all of them fail if it does."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAXHETERO_TIMEOUT_MS": "4000"}
    program = (sys.executable, str(program_path("rank_0.py")))
    done = launch("--workers", "2", "--reducers", "1", "--", *program, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("rank 0 has 7", "rank 1 has None", "rank 0: no such thing", "rank 1: rank 0 has failed, and"):
        assert line in done.stdout
