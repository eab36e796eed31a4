"""Models to be cut, written as users write them: none knows of pipelines."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

MICROBATCHES = int(os.environ.get("TESTS_MICROBATCHES", "4"))
ROWS = 2
LENGTH, WIDTH, WORDS, HEADS = 6, 16, 32, 2
MOST_DRAWN = 1024 * MICROBATCHES


@dataclass(frozen=True)
class Model:
    """A loss ``(params, *arguments)``, what to call it with, and the settings of ``value_and_grad`` for it."""

    loss: Callable[..., Any]
    params: Any
    arguments: tuple[Any, ...]
    settings: dict[str, Any] = field(default_factory=dict)


def key(number: int) -> Any:
    return jax.random.key(number)


def widest_dtype() -> Any:
    """In which the models of the trainers compute: float64 where JAX has it."""
    return str(jnp.zeros(()).dtype)


def tokens(number: int, rows: int = MICROBATCHES * ROWS) -> Any:
    return jax.random.randint(key(number), (rows, LENGTH), 0, WORDS)


def normal(number: int, *shape: int, scale: float = 1.0) -> Any:
    """The first of so many numbers, which are the same for any shape: XLA compiles the drawing of each for a second."""
    numbers = np.asarray(jax.random.normal(key(number), (MOST_DRAWN,)))
    return jnp.asarray(scale * numbers[: math.prod(shape)].reshape(shape))


def drawn(shapes: Any) -> Any:
    """The variables of a model of flax, about as its initializers would, but drawn by NumPy: nothing is compiled."""
    generator = np.random.default_rng(0)

    def draw(path: Any, leaf: Any) -> Any:
        name = [part.key for part in path if isinstance(part, jax.tree_util.DictKey)][-1]
        if name in ("scale", "var"):
            return jnp.ones(leaf.shape, leaf.dtype)
        if name == "mean" or name.endswith("bias"):
            return jnp.zeros(leaf.shape, leaf.dtype)
        spread = np.prod(leaf.shape[:-1]) ** -0.5 if name == "kernel" else 0.02
        return jnp.asarray(generator.normal(0, spread, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def cross_entropy(logits: Any, targets: Any) -> Any:
    logits = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def norm(x: Any, scale: Any) -> Any:
    return scale * x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def attention(block: Any, queries: Any, keys: Any, mask: Any) -> Any:
    def heads(x: Any) -> Any:
        return x.reshape(*x.shape[:2], HEADS, -1)

    q, k, v = heads(queries @ block["q"]), heads(keys @ block["k"]), heads(keys @ block["v"])
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(queries.shape) @ block["o"]


def causal_mask() -> Any:
    return jnp.tril(jnp.ones((LENGTH, LENGTH), bool))


def decoder_block(block: Any, x: Any) -> Any:
    y = norm(x, block["norm1"])
    x = x + attention(block, y, y, causal_mask())
    y = norm(x, block["norm2"])
    return x + jax.nn.silu(y @ block["up"]) @ block["down"]


def block_params(number: int) -> Any:
    names = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "o": (WIDTH, WIDTH)}
    names |= {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
    drawn = {name: normal(100 * number + i, *shape, scale=0.2) for i, (name, shape) in enumerate(names.items())}
    return {**drawn, "norm1": jnp.ones(WIDTH), "norm2": jnp.ones(WIDTH)}


def language_model(
    *, tied: bool = False, remat: bool = False, scan: bool = False, dtype: Any = jnp.float32, layers: int = 4
) -> Model:
    """A decoder: embeddings, blocks, and a head that may be the embeddings again."""
    blocks = [block_params(number) for number in range(1, layers + 1)]
    params = {"embed": normal(1, WORDS, WIDTH, scale=0.3), "blocks": blocks, "norm": jnp.ones(WIDTH)}
    if scan:
        params["blocks"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
    if not tied:
        params["head"] = normal(2, WIDTH, WORDS, scale=0.3)
    run = jax.checkpoint(decoder_block) if remat else decoder_block

    def loss(params: Any, x: Any, y: Any) -> Any:
        cast = jax.tree.map(lambda leaf: leaf.astype(dtype), params) if dtype != jnp.float32 else params
        h = cast["embed"][x]
        if scan:
            h, _ = jax.lax.scan(lambda h, block: (run(block, h), None), h, cast["blocks"])
        else:
            for block in cast["blocks"]:
                h = run(block, h)
        head = cast["embed"].T if tied else cast["head"]
        logits = norm(h, cast["norm"]) @ head
        return cross_entropy(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), y)

    return Model(loss, params, (tokens(3), tokens(4)))


def dropout_model() -> Model:
    """Dropout with a key for each microbatch; the key is a part of the batch."""
    base = language_model()

    def loss(params: Any, x: Any, y: Any, keys: Any) -> Any:
        h = params["embed"][x]
        for number, block in enumerate(params["blocks"]):
            h = decoder_block(block, h)
            kept = jax.random.bernoulli(jax.random.fold_in(keys[0], number), jnp.float32(0.8), h.shape)
            h = jnp.where(kept, h / 0.8, 0)
        return cross_entropy(norm(h, params["norm"]) @ params["head"], y)

    return Model(loss, base.params, (*base.arguments, jax.random.split(key(5), MICROBATCHES)))


def encoder_decoder() -> Model:
    """What the encoder makes goes to every block of the decoder."""
    params = {
        "embed": normal(1, WORDS, WIDTH, scale=0.3),
        "encoder": [block_params(number) for number in (1, 2)],
        "decoder": [{"self": block_params(number), "cross": block_params(number + 10)} for number in (3, 4)],
        "head": normal(2, WIDTH, WORDS, scale=0.3),
    }

    def loss(params: Any, source: Any, target: Any) -> Any:
        memory = params["embed"][source]
        for block in params["encoder"]:
            y = norm(memory, block["norm1"])
            memory = memory + attention(block, y, y, jnp.ones((LENGTH, LENGTH), bool))
            memory = memory + jax.nn.relu(norm(memory, block["norm2"]) @ block["up"]) @ block["down"]
        h = params["embed"][target]
        for block in params["decoder"]:
            h = decoder_block(block["self"], h)
            h = h + attention(block["cross"], norm(h, block["cross"]["norm1"]), memory, jnp.ones((1, LENGTH), bool))
        return cross_entropy(h @ params["head"], jnp.roll(target, 1, axis=1))

    return Model(loss, params, (tokens(6), tokens(7)))


def unet() -> Model:
    """Convolutions with connections from the way down to the way up, and an output beside the loss."""
    channels = (4, 8, 8)
    down, up = [], []
    for number, (inside, outside) in enumerate(zip((3, *channels), channels, strict=False)):
        down.append(normal(10 + number, 3, 3, inside, outside, scale=0.2))
        up.append(normal(20 + number, 3, 3, 2 * outside, inside, scale=0.2))

    def convolve(x: Any, kernel: Any, stride: int = 1) -> Any:
        dimensions = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=dimensions)

    def loss(params: Any, images: Any) -> Any:
        skips, h = [], images
        for kernel in params["down"]:
            h = jax.nn.gelu(convolve(h, kernel))
            skips.append(h)
            h = jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
        for kernel, skip in zip(params["up"][::-1], skips[::-1], strict=True):
            h = jax.image.resize(h, (*skip.shape[:3], h.shape[3]), "nearest")
            h = jax.nn.gelu(convolve(jnp.concatenate([h, skip], axis=-1), kernel))
        error = jnp.mean((h - images) ** 2)
        return error, {"largest": jnp.max(h), "count": jnp.sum(h > 0)}

    params = {"down": down, "up": up}
    return Model(loss, params, (normal(30, MICROBATCHES * ROWS, 8, 8, 3),), {"has_aux": True})


def resnet() -> Model:
    """The tiny ResNet of the trainers, with the statistics of BatchNorm as a state."""
    from models.resnet.model import ModelConfig, ResNet

    config = ModelConfig(
        architecture="tiny", class_count=5, stem_kernel=3, stem_stride=1, stem_pool=False, dtype=widest_dtype()
    )
    shapes = nnx.eval_shape(lambda: ResNet(config, rngs=nnx.Rngs(0)))
    graph, params, statistics = nnx.split(shapes, nnx.Param, nnx.BatchStat)

    def loss(params: Any, statistics: Any, images: Any, labels: Any) -> Any:
        model = nnx.merge(graph, params, statistics, copy=True)
        value = cross_entropy(model(images), labels)
        return value, nnx.state(model, nnx.BatchStat)

    images = normal(40, MICROBATCHES * ROWS * 2, 8, 8, 3)
    labels = jnp.arange(images.shape[0]) % 5
    return Model(loss, drawn(params), (drawn(statistics), images, labels), {"state_argnum": 1})


def bert(dropout: float = 0.1) -> Model:
    """A small BERT of the trainers: tied embeddings, dropout."""
    from models.bert.loss import Targets, pre_training_loss
    from models.bert.model import Batch, ModelConfig, PreTrainingModel

    config = ModelConfig(
        vocabulary_size=WORDS,
        hidden_size=WIDTH,
        layer_count=3,
        head_count=HEADS,
        intermediate_size=2 * WIDTH,
        position_count=LENGTH,
        dropout=dropout,
        attention_dropout=dropout,
        dtype=widest_dtype(),
    )
    graph, params = nnx.split(PreTrainingModel(config, rngs=nnx.Rngs(0)), nnx.Param)

    def loss(params: Any, batch: Any, targets: Any, keys: Any) -> Any:
        model = nnx.merge(graph, params, copy=True)
        logits = model(batch, targets.positions, rngs=nnx.Rngs(dropout=keys[0]))
        return pre_training_loss(*logits, targets)

    rows = MICROBATCHES * ROWS
    batch = Batch(tokens(50), jnp.zeros((rows, LENGTH), jnp.int32), jnp.ones((rows, LENGTH), jnp.int32))
    positions = jnp.tile(jnp.array([1, 3]), (rows, 1))
    targets = Targets(positions, tokens(51)[:, :2], jnp.ones((rows, 2)), jnp.arange(rows) % 2)
    return Model(loss, params, (batch, targets, jax.random.split(key(52), MICROBATCHES)))


def linen_vae() -> Model:
    """In the manner of flax's example of a variational autoencoder: linen modules, and noise from a key."""

    class Encoder(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            h = nn.relu(nn.Dense(24)(x))
            return nn.Dense(4)(h), nn.Dense(4)(h)

    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, z: Any) -> Any:
            return nn.Dense(12)(nn.relu(nn.Dense(24)(z)))

    encoder, decoder = Encoder(), Decoder()
    shapes = {
        "encoder": jax.eval_shape(encoder.init, key(60), jnp.ones((1, 12))),
        "decoder": jax.eval_shape(decoder.init, key(61), jnp.ones((1, 4))),
    }

    def loss(params: Any, x: Any, keys: Any) -> Any:
        mean, log_variance = encoder.apply(params["encoder"], x)
        z = mean + jnp.exp(0.5 * log_variance) * jax.random.normal(keys[0], mean.shape, jnp.float32)
        logits = decoder.apply(params["decoder"], z)
        likelihood = jnp.mean(jnp.sum(nn.log_sigmoid(logits) * x + nn.log_sigmoid(-logits) * (1 - x), axis=-1))
        divergence = -0.5 * jnp.mean(jnp.sum(1 + log_variance - mean**2 - jnp.exp(log_variance), axis=-1))
        return divergence - likelihood

    x = jax.random.uniform(key(62), (MICROBATCHES * ROWS, 12))
    return Model(loss, drawn(shapes), (x, jax.random.split(key(63), MICROBATCHES)))


def nnx_recurrent() -> Model:
    """An LSTM of flax's NNX, which scans over time, between dense layers."""

    class Tagger(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
            cell = nnx.OptimizedLSTMCell(WIDTH, WIDTH, param_dtype=widest_dtype(), rngs=rngs)
            self.recurrent = nnx.RNN(cell)
            self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.head = nnx.Linear(WIDTH, WORDS, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            h = self.recurrent(self.embed(x))
            return self.head(nnx.relu(self.dense(h)))

    graph, params, rest = nnx.split(Tagger(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params: Any, x: Any, y: Any) -> Any:
        return cross_entropy(nnx.merge(graph, params, rest, copy=True)(x), y)

    return Model(loss, params, (tokens(70), tokens(71)))


def custom_gradient() -> Model:
    """A function with a derivative of its own, one with a branch, and a scale that all microbatches get."""

    @jax.custom_vjp
    def clipped(x: Any) -> Any:
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))
    params = [normal(80 + number, WIDTH, WIDTH, scale=0.3) for number in range(4)]

    def loss(params: Any, x: Any, scale: Any) -> Any:
        h = x
        for kernel in params:
            h = clipped(jax.lax.cond(jnp.sum(h) > 0, jnp.tanh, jnp.sin, h @ kernel))
        return scale * jnp.mean(h**2)

    return Model(loss, params, (normal(90, MICROBATCHES * ROWS, WIDTH), jnp.float32(3)), {"whole_argnums": (2,)})


def widened(tree: Any) -> Any:
    """The same numbers in float64."""
    return jax.tree.map(lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def perturbed(model: Model, draw: int) -> Model:
    """The same model with other weights, each about a hundredth away. With draw 0 it is the model itself."""
    if draw == 0:
        return model
    generator = np.random.default_rng(draw)

    def other(leaf: Any) -> Any:
        return (leaf * (1 + 0.01 * generator.standard_normal(leaf.shape))).astype(leaf.dtype)

    return replace(model, params=jax.tree.map(other, model.params))


@functools.cache
def _step(loss: Callable[..., Any], has_aux: bool) -> Any:
    """Compiled once for all draws."""
    return jax.jit(jax.value_and_grad(loss, has_aux=has_aux))


def reference(model: Model, params: Any, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    """The value for the last microbatch, and the mean of ``jax.grad`` over all: what a pipeline has to find."""
    state_argnum = model.settings.get("state_argnum")
    has_more = state_argnum is not None or model.settings.get("has_aux", False)
    undivided = (*model.settings.get("whole_argnums", ()), state_argnum)
    step = _step(model.loss, has_more)
    given = list(arguments)
    total = value = None
    for number in range(MICROBATCHES):

        def part(leaf: Any, number: int = number) -> Any:
            size = leaf.shape[0] // MICROBATCHES
            return leaf[number * size : (number + 1) * size]

        own = [x if n in undivided else jax.tree.map(part, x) for n, x in enumerate(given, 1)]
        value, grads = step(params, *own)
        if state_argnum is not None:
            given[state_argnum - 1] = value[1]
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
    return value, jax.tree.map(lambda grad: grad / MICROBATCHES, total)


@functools.cache
def _exact(name: str) -> Model:
    return language_model() if name == "bfloat16" else MODELS[name]()


def truth_of(name: str, model: Model) -> Any:
    """The gradients of a model of the zoo, with its own parameters and batch, computed in float64.

    What a model draws must have the same dtype then as without: a draw in float64 has other bits.
    """
    with jax.enable_x64(True):
        _, grads = reference(_exact(name), widened(model.params), widened(model.arguments))
        return jax.tree.map(np.asarray, grads)


def rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


def errors(grads: Any, truth: Any) -> list[float]:
    """For each leaf, the RMS of its error over that of the truth; of the largest leaf, where a leaf should be zero."""
    leaves = list(zip(jax.tree.leaves(grads), jax.tree.leaves(truth), strict=True))
    largest = max(rms(leaf) for _, leaf in leaves)
    scales = [rms(leaf) if rms(leaf) > 1e-9 * largest else largest for _, leaf in leaves]
    return [
        rms(np.asarray(found, np.float64) - np.asarray(wanted, np.float64)) / scale
        for (found, wanted), scale in zip(leaves, scales, strict=True)
    ]


MODELS: dict[str, Callable[[], Model]] = {
    "decoder": language_model,
    "tied": lambda: language_model(tied=True),
    "remat": lambda: language_model(remat=True),
    "scan": lambda: language_model(scan=True),
    "bfloat16": lambda: language_model(dtype=jnp.bfloat16),
    "dropout": dropout_model,
    "encoder-decoder": encoder_decoder,
    "unet": unet,
    "resnet": resnet,
    "bert": bert,
    "bert-without-dropout": lambda: bert(dropout=0.0),
    "linen-vae": linen_vae,
    "nnx-recurrent": nnx_recurrent,
    "custom-gradient": custom_gradient,
}
