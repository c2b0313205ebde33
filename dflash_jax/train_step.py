"""One optimizer step: target features, random anchors, blocks, loss, update. Pure and jitted; the loop around it is `trainer`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.blocks import Blocks, document_starts, make_blocks, sample_anchors
from dflash_jax.config import Config
from dflash_jax.drafter import Drafter, Execution, abstract_drafter
from dflash_jax.errors import ConfigError
from dflash_jax.loss import LossSums, draft_vocabulary, head_loss, sample_vocabulary
from dflash_jax.model_config import DFlashConfig
from dflash_jax.objectives import Objective
from dflash_jax.sharding import BATCH, Collect, batch_shards, collector, place_rows, placed_shapes, shardings
from dflash_jax.targets import PackableTarget, Target, TrainableTarget


class Guard(NamedTuple):
    """What the guard against loss spikes remembers. A step that it skips changes nothing but these counts and the step's number."""

    skipped: Int[Array, ""]
    """steps skipped so far"""
    in_a_row: Int[Array, ""]
    """of them the newest, without an applied step since"""
    usual_norm: Float[Array, ""]
    """running mean of the gradient norms of applied steps; 0 before the first"""


class TrainState(NamedTuple):
    """What training changes and a checkpoint holds. The target is not in it."""

    params: Any
    opt_state: Any
    step: Int[Array, ""]
    guard: Guard
    ema: Any = None
    """running mean of the parameters; None: not kept"""

    @property
    def eval_params(self) -> Any:
        """What is evaluated and exported: the running mean where there is one."""
        return self.params if self.ema is None else self.ema


class Batch(NamedTuple):
    """Rows of a step. Padding is on the right."""

    tokens_BT: Int[Array, "B T"]
    loss_mask_BT: Bool[Array, "B T"]
    length_B: Int[Array, " B"]
    doc_BT: Int[Array, "B T"] | None = None
    """of packed rows: which document a slot belongs to, -1 on padding; None: a row is one document"""


class StepMetrics(NamedTuple):
    """Sums over the step's slots, and what to watch."""

    sums: LossSums
    grad_norm: Float[Array, ""]
    tokens: Int[Array, ""]
    """of all rows; fillers have no loss and do not count"""
    guard: Guard
    """after the step"""
    diagnostics: dict[str, Array]
    """attention_entropy_L (nats, a layer) and context_feature_norm when asked for"""


TrainStep = Callable[[TrainState, Any, Batch, Array | None], tuple[TrainState, StepMetrics]]


def target_features(
    target: Target, params: Any, batch: Batch, taps: tuple[int, ...], last: bool = False, collect: Collect | None = None
) -> Float[Array, "B T M"]:
    """The taps of whole rows, without gradient; with `last` the target's final hidden states after them, [B, T, M + D].

    Documents of packed rows do not see each other; raises `ConfigError` when the target cannot keep them apart.
    `collect` brings parameters together that are in parts on several devices.
    """
    params = jax.lax.stop_gradient(params)
    if isinstance(target, PackableTarget):
        starts_BT = document_starts(batch.doc_BT) if batch.doc_BT is not None else jnp.zeros_like(batch.tokens_BT)
        how = {} if collect is None else {"collect": collect}  # targets of others need it on such meshes only
        hidden_BTD, taps_BTM = target.read_documents(params, batch.tokens_BT, starts_BT, taps, **how)
        return jax.lax.stop_gradient(jnp.concatenate([taps_BTM, hidden_BTD], axis=-1) if last else taps_BTM)
    if batch.doc_BT is not None:
        raise ConfigError(
            f"{type(target).__name__} has no read_documents, which keeps the documents of a packed row apart: "
            "set data.packing false, or add it (`PackableTarget`)"
        )
    params = params if collect is None else collect(params)
    slots_T = jnp.arange(batch.tokens_BT.shape[1], dtype=jnp.int32)
    positions_BT = jnp.where(slots_T[None] < batch.length_B[:, None], slots_T[None], -1)
    cache = target.init_cache(*batch.tokens_BT.shape)
    hidden_BTD, taps_BTM, _ = target.extend(params, batch.tokens_BT, positions_BT, cache, taps)
    return jax.lax.stop_gradient(jnp.concatenate([taps_BTM, hidden_BTD], axis=-1) if last else taps_BTM)


def block_loss(
    drafter: Drafter,
    params: Any,
    target: TrainableTarget,
    target_params: Any,
    taps_BTM: Float[Array, "B T M"],
    blocks: Blocks,
    key: Array,
    config: Config,
    hidden_BTD: Float[Array, "B T D"] | None = None,
    mesh: Mesh | None = None,
) -> tuple[LossSums, dict[str, Array]]:
    """Loss sums of anchored blocks over the target's features, and diagnostics if asked for.

    `hidden_BTD`: the target's final hidden states, which all losses but ce need. `mesh`: what the rows, and parameters
    in parts, are spread over.
    """
    train, model = config.train, drafter.config
    collect = collector(mesh, model.dtype)
    frozen, whole = jax.lax.stop_gradient(target_params), params if collect is None else collect(params)
    dropout_key, vocabulary_key = jax.random.split(key)
    dropped = dropout_key if model.dropout else None
    execution = Execution(train.anchor_chunk, train.remat, dropped, train.remat_layers, collect)

    def embed(tokens: Array) -> Array:
        return target.embed(frozen, tokens)

    block_BAKD = drafter.embed_block(whole, blocks.anchor_tokens_BA, model.block_size, embed)
    hidden_BAKD, entropies = drafter.forward(params, taps_BTM, blocks.anchors_BA, block_BAKD, execution, blocks.starts_BT)
    candidates = None
    if model.draft_token_ids:
        candidates = draft_vocabulary(model.draft_token_ids, model.vocab_size)
    elif train.vocab_sample:
        candidates = sample_vocabulary(
            vocabulary_key, blocks.labels_BAK, blocks.supervised_BAK, model.vocab_size, train.vocab_sample
        )

    def target_logits(anchors_BA: Array) -> Array:
        """The state at anchor + k - 1 has the law of the token at anchor + k."""
        assert hidden_BTD is not None
        drafted_BAJ = anchors_BA[:, :, None] + jnp.arange(model.block_size - 1, dtype=jnp.int32)[None, None]
        drafted_BN = jnp.minimum(drafted_BAJ, hidden_BTD.shape[1] - 1).reshape(anchors_BA.shape[0], -1)
        return target.unembed(frozen, jnp.take_along_axis(hidden_BTD, drafted_BN[:, :, None], axis=1))

    sums = head_loss(
        hidden_BAKD,
        whole["lm_head"][...] if model.own_head else target.head_kernel(frozen),
        blocks.labels_BAK,
        blocks.supervised_BAK,
        Objective(model.loss_decay_gamma, train.slot_weights, train.loss),
        frozen=not model.own_head,
        logit_chunk=train.logit_chunk * (1 if mesh is None else batch_shards(mesh)),
        dtype=model.dtype,
        candidates=candidates,
        anchors_BA=blocks.anchors_BA,
        target_logits=target_logits,
    )
    diagnostics = {}
    if train.diagnostics:
        valid_BA = blocks.valid_BA.astype(jnp.float32)
        count = jnp.maximum(valid_BA.sum(), 1.0)
        fused_BTD = drafter.model(whole).fuser.fc(taps_BTM)
        # of the positions that some block reads: padding's features mean nothing
        slots_11T, anchors_BA1 = jnp.arange(taps_BTM.shape[1])[None, None], blocks.anchors_BA[:, :, None]
        read_BAT = slots_11T < anchors_BA1
        if blocks.starts_BT is not None:
            read_BAT &= slots_11T >= jnp.take_along_axis(blocks.starts_BT, blocks.anchors_BA, axis=1)[:, :, None]
        read_BT = read_BAT.any(1).astype(jnp.float32)
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
    devices change the result. `taps` None computes them from the target in each micro-batch; given ones are what `target_features`
    returns, with `last` for all losses but ce.

    A step whose loss or gradient norm is not finite, or whose norm is beyond optim.skip_above times the usual, changes no
    parameter, moment or mean: the device decides, so the host need not wait to know.
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
    if config.train.vocab_sample and config.train.loss != "ce":
        raise ConfigError(
            f"train.loss {config.train.loss} takes its tokens from the target's law, which is over the whole vocabulary, and "
            f"train.vocab_sample is {config.train.vocab_sample}: set it to 0, or train.loss ce"
        )
    taps, last = drafter.config.target_layer_ids, config.train.loss != "ce"
    width, hidden = len(taps) * drafter.config.target_hidden_dim, drafter.config.target_hidden_dim if last else 0

    def micro_sums(params: Any, target_params: Any, part: tuple[Batch, Blocks, Array | None], key: Array) -> tuple[Array, Any]:
        batch, blocks, taps_BTM = part
        collect = collector(mesh, target.config.dtype)
        if taps_BTM is None:
            taps_BTM = target_features(target, target_params, batch, taps, last, collect)
        taps_BTM = taps_BTM.astype(jnp.float32)  # those that were kept are bfloat16
        if taps_BTM.shape[-1] != width + hidden:
            raise ConfigError(
                f"the given target features are {taps_BTM.shape[-1]} numbers a token, but train.loss {config.train.loss} needs "
                f"{width} of taps and {hidden} of final hidden states: compute them for this loss"
            )
        taps_BTM, hidden_BTD = jnp.split(taps_BTM, [width], axis=-1)
        frozen = target_params if collect is None else collect(target_params)
        sums, diagnostics = block_loss(
            drafter, params, target, frozen, taps_BTM, blocks, key, config, hidden_BTD if last else None, mesh
        )
        return sums.weighted, (sums, diagnostics)

    def train_step(state: TrainState, target_params: Any, batch: Batch, taps_BTM: Array | None) -> tuple[TrainState, StepMetrics]:
        anchor_key, rest_key = jax.random.split(jax.random.fold_in(jax.random.key(config.train.seed), state.step))
        starts_BT = None if batch.doc_BT is None else document_starts(batch.doc_BT)
        counts = (config.train.anchors_per_row, starts_BT, config.train.anchors_per_document)
        anchors_BA, valid_BA = sample_anchors(anchor_key, batch.loss_mask_BT, *counts)
        blocks = make_blocks(batch.tokens_BT, batch.loss_mask_BT, anchors_BA, valid_BA, drafter.config.block_size, starts_BT)
        # micro-batch i takes rows i, i + micro, ...: every device keeps its share of each
        parts = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(rows // micro, micro, *x.shape[1:]), 1, 0), (batch, blocks, taps_BTM))

        def add(total: Any, part_and_index: tuple[Any, Array]) -> tuple[Any, None]:
            part, index = part_and_index
            key = jax.random.fold_in(rest_key, index)
            # Bound to the micro-batch, else XLA collects every kernel before the loop and holds all of them in it.
            params, frozen, part = jax.lax.optimization_barrier((state.params, target_params, part))
            grads, aux = jax.grad(micro_sums, has_aux=True)(params, frozen, part, key)
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
        applied, guard = watch(state.guard, sums.weighted, grad_norm, config.optim.skip_above)
        ema = None if state.ema is None else average(state.ema, params, config.optim.ema, state.step - state.guard.skipped)
        new = TrainState(params, opt_state, state.step, guard, ema)
        new = jax.tree.map(lambda x, old: jnp.where(applied, x, old), new, state)._replace(step=state.step + 1, guard=guard)
        tokens = jnp.where(batch.loss_mask_BT.any(1), batch.length_B, 0).sum()
        return new, StepMetrics(sums, grad_norm, tokens, guard, diagnostics)

    # every process reads the metrics, so all of them are whole everywhere
    return jax.jit(train_step, donate_argnums=0, out_shardings=(None, NamedSharding(mesh, PartitionSpec())))


def watch(guard: Guard, loss: Array, grad_norm: Array, skip_above: float) -> tuple[Bool[Array, ""], Guard]:
    """Whether a step with this loss and gradient norm is applied, and what the guard knows after it. `skip_above` 0: only
    numbers that are not finite are skipped."""
    applied = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    usual = guard.usual_norm
    if skip_above:
        applied &= (usual == 0) | (grad_norm <= skip_above * usual)
    skip = 1 - applied.astype(jnp.int32)
    norm = jnp.where(usual == 0, grad_norm, 0.98 * usual + 0.02 * grad_norm)
    return applied, Guard(guard.skipped + skip, skip * (guard.in_a_row + 1), jnp.where(applied, norm, usual))


def average(ema: Any, params: Any, decay: float, applied: Int[Array, ""]) -> Any:
    """The running mean after one more applied step: decay x mean + (1 - decay) x parameters. `applied` steps came before it; while
    they are few the decay is only (1 + n) / (10 + n), so that the first parameters are soon forgotten."""
    n = applied.astype(jnp.float32)
    kept = jnp.minimum(decay, (1 + n) / (10 + n))
    return jax.tree.map(lambda mean, new: kept * mean + (1 - kept) * new, ema, params)


def init_state(drafter: Drafter, tx: optax.GradientTransformation, mesh: Mesh, ema: bool = False) -> TrainState:
    """The state of step 0 on the mesh; optimizer moments and the mean (with `ema`) are born sharded like their parameters."""

    def build(params: Any) -> TrainState:
        zero = jnp.zeros((), jnp.int32)
        mean = jax.tree.map(lambda x: jnp.copy(x.astype(jnp.float32)), params) if ema else None  # a donated buffer is one array's
        with jax.numpy_dtype_promotion("standard"):
            return TrainState(params, tx.init(params), zero, Guard(zero, zero, jnp.zeros((), jnp.float32)), mean)

    placed = jax.device_put(drafter.params, shardings(drafter.params, mesh))
    out = shardings(jax.eval_shape(build, placed), mesh)
    return jax.jit(build, out_shardings=out)(placed)


def abstract_state(config: DFlashConfig, tx: optax.GradientTransformation, mesh: Mesh, ema: bool = False) -> TrainState:
    """What `init_state` gives, as shapes with shardings: to compile a step for devices that need not be there."""
    params = nnx.state(abstract_drafter(config), nnx.Param)
    state: TrainState = jax.eval_shape(lambda params: init_state(Drafter(config, params), tx, mesh, ema), params)
    return placed_shapes(state, mesh)  # type: ignore[no-any-return]


def abstract_batch(config: Config, width: int, features: int, mesh: Mesh) -> tuple[Batch, Any]:
    """Shapes of a step's rows of `width` slots, and of given target features, so many numbers a token (0: None), where they lie."""
    rows, by_row = config.data.batch_size, NamedSharding(mesh, BATCH)

    def shape(dtype: Any, *sizes: int) -> Any:
        return jax.ShapeDtypeStruct((rows, *sizes), dtype, sharding=by_row)

    documents = shape(jnp.int32, width) if config.data.packing else None
    batch = Batch(shape(jnp.int32, width), shape(jnp.bool_, width), shape(jnp.int32), documents)
    return batch, shape(jnp.bfloat16, width, features) if features else None


def place_batch(batch: dict[str, Any], mesh: Mesh) -> Batch:
    """The rows of this process as its part of a batch on the mesh."""
    names = ("tokens_BT", "loss_mask_BT", "length_B", *(("doc_BT",) if "doc_BT" in batch else ()))
    return Batch(*(place_rows(batch[name], mesh) for name in names))
