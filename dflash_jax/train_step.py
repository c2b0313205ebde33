"""One optimizer step: target features, random anchors, blocks, loss, update. Pure and jitted; the loop around it is `trainer`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.blocks import Blocks, make_blocks, sample_anchors
from dflash_jax.config import Config
from dflash_jax.drafter import Drafter, Execution
from dflash_jax.errors import ConfigError
from dflash_jax.loss import LossSums, Objective, draft_vocabulary, head_loss, sample_vocabulary
from dflash_jax.sharding import batch_shards, place_rows, shardings
from dflash_jax.targets import Target, TrainableTarget


class TrainState(NamedTuple):
    """What training changes and a checkpoint holds. The target is not in it."""

    params: Any
    opt_state: Any
    step: Int[Array, ""]


class Batch(NamedTuple):
    """Rows of a step. Padding is on the right."""

    tokens_BT: Int[Array, "B T"]
    loss_mask_BT: Bool[Array, "B T"]
    length_B: Int[Array, " B"]


class StepMetrics(NamedTuple):
    """Sums over the step's slots, and what to watch."""

    sums: LossSums
    grad_norm: Float[Array, ""]
    diagnostics: dict[str, Array]
    """attention_entropy_L (nats, a layer) and context_feature_norm when asked for"""


TrainStep = Callable[[TrainState, Any, Batch, Array | None], tuple[TrainState, StepMetrics]]


def target_features(target: Target, params: Any, batch: Batch, taps: tuple[int, ...]) -> Float[Array, "B T M"]:
    """The taps of whole rows, without gradient."""
    slots_T = jnp.arange(batch.tokens_BT.shape[1], dtype=jnp.int32)
    positions_BT = jnp.where(slots_T[None] < batch.length_B[:, None], slots_T[None], -1)
    cache = target.init_cache(*batch.tokens_BT.shape)
    _, taps_BTM, _ = target.extend(jax.lax.stop_gradient(params), batch.tokens_BT, positions_BT, cache, taps)
    return jax.lax.stop_gradient(taps_BTM)


def block_loss(
    drafter: Drafter,
    params: Any,
    target: TrainableTarget,
    target_params: Any,
    taps_BTM: Float[Array, "B T M"],
    blocks: Blocks,
    key: Array,
    config: Config,
) -> tuple[LossSums, dict[str, Array]]:
    """Loss sums of anchored blocks over the target's features, and diagnostics if asked for."""
    train, model = config.train, drafter.config
    frozen = jax.lax.stop_gradient(target_params)
    dropout_key, vocabulary_key = jax.random.split(key)
    execution = Execution(train.anchor_chunk, train.remat, dropout_key if model.dropout else None)

    def embed(tokens: Array) -> Array:
        return target.embed(frozen, tokens)

    block_BAKD = drafter.embed_block(params, blocks.anchor_tokens_BA, model.block_size, embed)
    hidden_BAKD, entropies = drafter.forward(params, taps_BTM, blocks.anchors_BA, block_BAKD, execution)
    candidates = None
    if model.draft_token_ids:
        candidates = draft_vocabulary(model.draft_token_ids, model.vocab_size)
    elif train.vocab_sample:
        candidates = sample_vocabulary(
            vocabulary_key, blocks.labels_BAK, blocks.supervised_BAK, model.vocab_size, train.vocab_sample
        )
    sums = head_loss(
        hidden_BAKD,
        params["lm_head"][...] if model.own_head else target.head_kernel(frozen),
        blocks.labels_BAK,
        blocks.supervised_BAK,
        Objective(model.loss_decay_gamma, train.objective),
        frozen=not model.own_head,
        logit_chunk=train.logit_chunk,
        dtype=model.dtype,
        candidates=candidates,
    )
    diagnostics = {}
    if train.diagnostics:
        valid_BA = blocks.valid_BA.astype(jnp.float32)
        count = jnp.maximum(valid_BA.sum(), 1.0)
        fused_BTD = drafter.model(params).fuser.fc(taps_BTM)
        # of the positions that some block reads: padding's features mean nothing
        read_BT = (jnp.arange(taps_BTM.shape[1])[None] < blocks.anchors_BA.max(1)[:, None]).astype(jnp.float32)
        diagnostics = {
            "attention_entropy_L": jnp.stack([(entropy_BA * valid_BA).sum() / count for entropy_BA in entropies]),
            "context_feature_norm": (jnp.sqrt(jnp.square(fused_BTD).sum(-1)) * read_BT).sum() / jnp.maximum(read_BT.sum(), 1.0),
        }
    return sums, diagnostics


def make_train_step(
    config: Config, target: TrainableTarget, drafter: Drafter, tx: optax.GradientTransformation, mesh: Mesh
) -> TrainStep:
    """The jitted step: (state, target params, batch, taps or None) -> (state, metrics). The state is donated.

    Anchors are drawn for the whole batch and gradients of loss sums are added up before one division, so neither micro-batches nor
    devices change the result. `taps` None computes them from the target in each micro-batch.
    """
    rows, micro = config.data.batch_size, config.optim.accumulation
    shards = batch_shards(mesh)
    if micro < 1 or rows % (micro * shards):
        raise ConfigError(
            f"data.batch_size {rows} is not a multiple of optim.accumulation {micro} x {shards} devices that hold rows: "
            "change one of them"
        )
    slots = rows // micro * config.train.anchors_per_row * (drafter.config.block_size - 1)
    if (
        0 < config.train.vocab_sample < min(slots, drafter.config.vocab_size)
        or config.train.vocab_sample > drafter.config.vocab_size
    ):
        raise ConfigError(
            f"train.vocab_sample is {config.train.vocab_sample}: give 0 (all), or from {min(slots, drafter.config.vocab_size)} "
            f"(the slots of a micro-batch, whose labels must fit) to {drafter.config.vocab_size}"
        )
    if config.train.vocab_sample and drafter.config.draft_token_ids:
        raise ConfigError(
            f"train.vocab_sample is {config.train.vocab_sample}, but this drafter only learns the "
            f"{len(drafter.config.draft_token_ids)} tokens that it drafts, at that cost: set train.vocab_sample 0"
        )
    taps = drafter.config.target_layer_ids

    def micro_sums(params: Any, target_params: Any, part: tuple[Batch, Blocks, Array | None], key: Array) -> tuple[Array, Any]:
        batch, blocks, taps_BTM = part
        if taps_BTM is None:
            taps_BTM = target_features(target, target_params, batch, taps)
        sums, diagnostics = block_loss(drafter, params, target, target_params, taps_BTM, blocks, key, config)
        return sums.weighted, (sums, diagnostics)

    def train_step(state: TrainState, target_params: Any, batch: Batch, taps_BTM: Array | None) -> tuple[TrainState, StepMetrics]:
        anchor_key, rest_key = jax.random.split(jax.random.fold_in(jax.random.key(config.train.seed), state.step))
        anchors_BA, valid_BA = sample_anchors(anchor_key, batch.loss_mask_BT, config.train.anchors_per_row)
        blocks = make_blocks(batch.tokens_BT, batch.loss_mask_BT, anchors_BA, valid_BA, drafter.config.block_size)
        # micro-batch i takes rows i, i + micro, ...: every device keeps its share of each
        parts = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(rows // micro, micro, *x.shape[1:]), 1, 0), (batch, blocks, taps_BTM))

        def add(total: Any, part_and_index: tuple[Any, Array]) -> tuple[Any, None]:
            part, index = part_and_index
            key = jax.random.fold_in(rest_key, index)
            grads, aux = jax.grad(micro_sums, has_aux=True)(state.params, target_params, part, key)
            return jax.tree.map(jnp.add, total, (grads, aux)), None

        if micro == 1:
            part = jax.tree.map(lambda x: x[0], parts)
            grads, (sums, diagnostics) = jax.grad(micro_sums, has_aux=True)(
                state.params, target_params, part, jax.random.fold_in(rest_key, 0)
            )
        else:
            first = jax.tree.map(lambda x: x[0], parts)
            shape = jax.eval_shape(lambda: jax.grad(micro_sums, has_aux=True)(state.params, target_params, first, rest_key))
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)
            (grads, (sums, diagnostics)), _ = jax.lax.scan(add, zeros, (parts, jnp.arange(micro)))
            diagnostics = jax.tree.map(lambda x: x / micro, diagnostics)
        # a batch without a single supervised slot has zero gradient, not 0 / 0
        grads = jax.tree.map(lambda g: g / jnp.maximum(sums.weight, 1e-9), grads)
        with jax.numpy_dtype_promotion("standard"):  # optax adds Python floats to integer counters
            updates, opt_state = tx.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            grad_norm = optax.tree.norm(grads)
        return TrainState(params, opt_state, state.step + 1), StepMetrics(sums, grad_norm, diagnostics)

    # every process reads the metrics, so all of them are whole everywhere
    return jax.jit(train_step, donate_argnums=0, out_shardings=(None, NamedSharding(mesh, PartitionSpec())))


def init_state(drafter: Drafter, tx: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """The state of step 0 on the mesh; optimizer moments are born there, sharded like their parameters."""

    def build(params: Any) -> TrainState:
        with jax.numpy_dtype_promotion("standard"):
            return TrainState(params, tx.init(params), jnp.zeros((), jnp.int32))

    placed = jax.device_put(drafter.params, shardings(drafter.params, mesh))
    out = shardings(jax.eval_shape(build, placed), mesh)
    return jax.jit(build, out_shardings=out)(placed)


def place_batch(batch: dict[str, Any], mesh: Mesh) -> Batch:
    """The rows of this process as its part of a batch on the mesh."""
    return Batch(*(place_rows(batch[name], mesh) for name in ("tokens_BT", "loss_mask_BT", "length_B")))
