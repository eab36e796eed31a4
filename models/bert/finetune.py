"""``python -m models.bert.finetune``: extractive question answering on SQuAD 1.1 or 2.0, training and evaluation."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from rich.console import Console

import jaxhetero
from models.bert.model import Batch, ModelConfig, PreTrainingModel, QuestionAnsweringModel
from models.bert.optimizer import OptimizerConfig, make_optimizer
from models.bert.presets import LARGE, SMOKE, TINY
from models.bert.squad import (
    AnswerConfig,
    FeatureConfig,
    choose_answers,
    make_features,
    read_squad,
    score_answers,
)
from models.bert.text import Vocabulary
from models.bert.torch_weights import load_torch_weights
from models.bert.train import Loss, TrainState, make_piece, make_staged_step
from models.common.batches import BatchSplit, Example, ExampleStream, evaluation_batches, read_pieces
from models.common.checkpoint import Checkpoints
from models.common.command import RunOptions, parse_options, run_command, run_trainer
from models.common.errors import DataError, require
from models.common.first import from_first, total_of
from models.common.optimizer import init_state
from models.common.report import Result, write_whole
from models.common.schedules import WarmupPoly
from models.common.stages import split_over_replicas, split_over_workers
from models.common.steps import data_parallel_step
from models.common.tensor_file import read_safetensors
from models.common.training import Scores, Training

State = nnx.State[Any, Any]


@dataclass(frozen=True)
class Preset:
    """One fine-tuning run."""

    model: ModelConfig
    optimizer: OptimizerConfig
    peak: float
    """The highest learning rate, at the end of the warm-up."""
    global_batch: int
    """Windows per step over all workers."""
    epochs: int
    warmup_share: float
    """The share of the steps in which the learning rate rises."""
    features: FeatureConfig = field(default_factory=FeatureConfig)
    answers: AnswerConfig = field(default_factory=AnswerConfig)
    micro_batch: int = 0
    """Windows in one forward and backward pass of a worker. 0: all of its part of the global batch."""
    seed: int = 0
    """The seed of the head's initial weights, of the order of the windows and of dropout."""

    def __post_init__(self) -> None:
        for name in ("global_batch", "epochs"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be at least 1")
        require(
            self.features.sequence_length <= self.model.position_count,
            f"sequence_length is {self.features.sequence_length}; the model has {self.model.position_count} positions",
        )

    def schedule(self, step_count: int) -> WarmupPoly:
        """The learning rate: a linear rise to ``peak``, then a linear fall to 0."""
        return WarmupPoly(self.peak, self.warmup_share * step_count, step_count, 1.0, "step_zero")


PRESETS = {
    # NVIDIA DeepLearningExamples, PyTorch.
    "bert-large-squad11": Preset(
        dataclasses.replace(LARGE, dtype="float16"),
        OptimizerConfig(algorithm="adam", loss_scaling="dynamic"),
        peak=4.6e-5,
        global_batch=256,
        epochs=2,
        warmup_share=0.2,
        micro_batch=32,
    ),
    # Devlin et al. (2018), section 4.3; the warm-up is that of the original program.
    "bert-large-squad20": Preset(
        LARGE,
        OptimizerConfig(algorithm="adam"),
        peak=5e-5,
        global_batch=48,
        epochs=2,
        warmup_share=0.1,
        answers=AnswerConfig(has_unanswerable=True),
        micro_batch=12,
    ),
    # For the weights of the pre-training preset bert-tiny, which trains only 64 positions, and for the questions of
    # models.bert.cloze.
    "bert-tiny": Preset(
        dataclasses.replace(TINY),
        OptimizerConfig(algorithm="adam"),
        peak=1e-3,
        global_batch=32,
        epochs=4,
        warmup_share=0.1,
        features=FeatureConfig(sequence_length=64, stride=16, question_length=24),
    ),
    # For tests: the same in seconds, for the weights of the pre-training preset bert-smoke.
    "bert-smoke": Preset(
        SMOKE.model,
        OptimizerConfig(algorithm="adam"),
        peak=2e-2,
        global_batch=4,
        epochs=15,
        warmup_share=0.1,
        features=FeatureConfig(sequence_length=40, stride=8, question_length=10),
    ),
}
DEFAULT_PRESET = "bert-tiny"


@dataclass(frozen=True)
class Options:
    """Fine-tune BERT on SQuAD files, data-parallel over the workers of `jaxhetero launch`, or on one worker."""

    settings: Annotated[Preset, tyro.conf.arg(name="")]
    train: Path = Path("train-v1.1.json")
    """Questions to train on, in SQuAD's JSON."""
    dev: Path = Path("dev-v1.1.json")
    """Questions to evaluate on."""
    vocabulary: Path = Path("vocab.txt")
    """The vocabulary file of the pre-training, one WordPiece per line."""
    start_from: Path | None = None
    """The output folder of a pre-training run, or a .safetensors file with weights in torch's names."""
    preset: Literal[tuple(PRESETS)] = DEFAULT_PRESET  # type: ignore[valid-type]
    """The named set of hyperparameters to start from."""
    run: Annotated[RunOptions, tyro.conf.arg(name="")] = field(default_factory=RunOptions)


class QuestionData:
    """The questions of a file, and their windows."""

    def __init__(self, path: Path, vocabulary: Vocabulary, preset: Preset) -> None:
        self._preset = preset
        self.questions = read_squad(path)
        self.features = make_features(self.questions, vocabulary, preset.features)

    def __str__(self) -> str:
        empty_count = sum(feature.start == 0 for feature in self.features)
        return (
            f"{len(self.questions):,} questions in {len(self.features):,} windows, "
            f"{empty_count:,} of them without an answer"
        )

    def load(self, index: int) -> Example:
        """One window: int32 arrays."""
        feature, length = self.features[index], self._preset.features.sequence_length
        real, begin = len(feature.token_ids), feature.context_begin
        places = np.arange(length)
        return {
            "token_ids": np.pad(np.array(feature.token_ids, np.int32), (0, length - real)),
            "segment_ids": ((places >= begin) & (places < real)).astype(np.int32),
            "mask": (places < real).astype(np.int32),
            "start": np.array(feature.start, np.int32),
            "end": np.array(feature.end, np.int32),
        }

    def train_batches(self, split: BatchSplit, step_count: int, first_step: int) -> Iterator[tuple[Any, ...]]:
        """This worker's pieces from a step on: the batch, the answers' first and last tokens, the piece's number."""
        count = len(self.features)
        epoch_size = count // split.global_batch * split.global_batch
        stream = ExampleStream(count, epoch_size, step_count * split.global_batch, self._preset.seed)
        pieces = read_pieces(stream, lambda place: self.load(place[0]), split, first_step=first_step)
        for number, piece in enumerate(pieces):
            step, index = divmod(number, split.accumulate_every)
            yield _batch(piece), piece["start"], piece["end"], np.uint32(split.piece(first_step + step, index))


def _batch(example: Example) -> Batch:
    return Batch(example["token_ids"], example["segment_ids"], example["mask"])


class Questions:
    """The questions for training and for evaluation, and the number of train steps that they make."""

    def __init__(self, options: Options) -> None:
        preset = options.settings
        vocabulary = Vocabulary(options.vocabulary)
        if len(vocabulary) != preset.model.vocabulary_size:
            raise DataError(
                f"{options.vocabulary} has {len(vocabulary)} tokens; vocabulary_size is "
                f"{preset.model.vocabulary_size}: it is of another model"
            )
        self.train, self.dev = (QuestionData(path, vocabulary, preset) for path in (options.train, options.dev))
        self.steps_per_epoch = len(self.train.features) // preset.global_batch
        require(
            self.steps_per_epoch >= 1,
            f"{options.train} makes {len(self.train.features)} windows, fewer than one global batch "
            f"({preset.global_batch})",
        )
        self.step_count = self.steps_per_epoch * preset.epochs


def train(options: Options, questions: Questions, console: Console) -> Result:
    """Train and evaluate; call it on every worker after ``jaxhetero.initialize()``."""
    preset, steps_per_epoch, step_count = options.settings, questions.steps_per_epoch, questions.step_count
    split = split_over_replicas(preset.global_batch, preset.micro_batch, options.run)
    graphdef, params = nnx.split(make_model(preset, options.start_from), nnx.Param)
    params = from_first(params)
    schedule, stages = preset.schedule(step_count), options.run.stages
    optimizer = make_optimizer(
        preset.optimizer,
        schedule,
        accumulate_every=options.run.accumulated(split),
        is_reduced=options.run.is_exact,
        weights_from_reducers=options.run.weights_from_reducers,
        is_across_steps=options.run.across_steps,
    )
    predict = make_predict(graphdef)
    loss = make_loss(graphdef)
    piece = make_piece(loss, preset.seed)
    train_step: Any = data_parallel_step(piece, optimizer, preset.optimizer, split, options.run)
    if stages > 1:
        train_step = make_staged_step(loss, preset.optimizer, schedule, preset.seed, stages, split)
    return Training(
        title="BERT fine-tuning",
        unit="windows",
        split=split,
        step_count=step_count,
        stretch_steps=steps_per_epoch,
        evaluate_every=1,
        label=lambda step: f"epoch {step // steps_per_epoch + 1}/{preset.epochs}",
        state=TrainState(params, init_state(optimizer, params)),
        train_step=train_step,
        batches=lambda split, step: questions.train.train_batches(split, step_count, step),
        learning_rate=schedule,
        pull=optimizer.pull,
        push=optimizer.push,
        begin=optimizer.begin,
        settle=optimizer.settle,
        evaluate=lambda state: evaluate(
            predict, state.params, questions.dev, split_over_workers(split), preset, options.run
        ),
        identity={"trainer": "bert-finetune", "model": dataclasses.asdict(preset.model)},
        advice="lower --peak",
    ).run(options.run, console)


def make_model(preset: Preset, start_from: Path | None) -> QuestionAnsweringModel:
    """A model with a new head. Its encoder is new, or comes from a pre-training run or from torch's weights."""
    is_file = start_from is not None and start_from.suffix == ".safetensors"

    @nnx.jit
    def initial() -> tuple[QuestionAnsweringModel, PreTrainingModel]:
        rngs = nnx.Rngs(jax.random.key(preset.seed, impl="rbg"))
        return QuestionAnsweringModel(preset.model, rngs=rngs), PreTrainingModel(preset.model, rngs=rngs)

    model, pre_training = initial()
    if start_from and is_file:
        load_torch_weights(model, read_safetensors(start_from), missing_heads=True)
    elif start_from:
        identity = {"trainer": "bert", "model": dataclasses.asdict(preset.model)}
        params = nnx.state(pre_training, nnx.Param)
        nnx.update(pre_training, Checkpoints(start_from / "checkpoints", identity).restore_params("latest", params))
        model.encoder = pre_training.encoder
    return model


def make_loss(graphdef: nnx.GraphDef[QuestionAnsweringModel]) -> Loss:
    """The loss of fine-tuning: the mean of the losses of the first and of the last token."""

    def loss(params: State, rngs: nnx.Rngs, batch: Batch, start: jax.Array, end: jax.Array) -> jax.Array:
        logits = nnx.merge(graphdef, params, copy=True)(batch, rngs=rngs)
        losses = [
            optax.softmax_cross_entropy_with_integer_labels(scores, place).mean()
            for scores, place in zip(logits, (start, end), strict=True)
        ]
        mean: jax.Array = (losses[0] + losses[1]) / 2
        return mean

    return loss


def make_predict(graphdef: nnx.GraphDef[QuestionAnsweringModel]) -> jax.stages.Wrapped:
    """The jitted function from a batch to its logits, float32 ``[2, batch, length]``: first and last token."""

    @jax.jit
    def predict(params: State, batch: Batch) -> jax.Array:
        return jnp.stack(nnx.merge(graphdef, params, copy=True)(batch))

    return predict


def evaluate(
    predict: jax.stages.Wrapped, params: State, dev: QuestionData, split: BatchSplit, preset: Preset, run: RunOptions
) -> Scores:
    """The official scores over all questions. Every worker computes the logits of its share of the windows."""
    length = preset.features.sequence_length
    logits = np.zeros((2, len(dev.features), length), np.float32)
    mine = range(split.rank, len(dev.features), split.worker_count)
    batches = evaluation_batches(
        len(dev.features), dev.load, batch=split.micro_batch, rank=split.rank, worker_count=split.worker_count
    )
    for number, (example, is_real) in enumerate(batches):
        places = mine[number * split.micro_batch : (number + 1) * split.micro_batch]
        logits[:, places] = np.asarray(predict(params, _batch(example)))[:, is_real]
    # The rows of other workers' windows are zero, so the sum has the logits of all windows.
    starts, ends = np.asarray(total_of(jnp.asarray(logits)))
    answers = choose_answers(dev.questions, dev.features, list(zip(starts, ends, strict=True)), preset.answers)
    chosen = {name: best[0].text for name, best in answers.items()}
    if path := run.file("predictions.json"):
        write_whole(path, json.dumps(chosen, indent=2) + "\n")
    if path := run.file("best-answers.json"):
        as_plain = {name: [dataclasses.asdict(answer) for answer in best] for name, best in answers.items()}
        write_whole(path, json.dumps(as_plain, indent=2) + "\n")
    return score_answers(dev.questions, chosen)


def run(arguments: list[str]) -> int:
    """Train, or print the dry run. Returns the exit code."""
    options = parse_options(Options, PRESETS, DEFAULT_PRESET, arguments, "python -m models.bert.finetune")
    jaxhetero.initialize()
    questions = Questions(options)
    if jaxhetero.rank() == 0:
        print(f"{options.train}: {questions.train}\n{options.dev}: {questions.dev}", flush=True)
    return run_trainer(
        options,
        questions.step_count,
        lambda: QuestionAnsweringModel(options.settings.model, rngs=nnx.Rngs(0)),
        lambda console: train(options, questions, console),
        "BERT fine-tuning",
        "windows",
    )


if __name__ == "__main__":
    sys.exit(run_command(run))
