"""What DFlash claims of itself, checked on a small random model: `python -m dflash_jax invariants`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.blocks import make_blocks, slot_weights
from dflash_jax.config import DecodeConfig
from dflash_jax.decode import draft
from dflash_jax.drafter import ContextFuser, Drafter, DraftModel, Execution
from dflash_jax.generate import start
from dflash_jax.loss import head_loss
from dflash_jax.model_config import DFlashConfig, RopeConfig, TargetConfig
from dflash_jax.objectives import Objective
from dflash_jax.targets import DenseTarget
from dflash_jax.verify import verify_block

TARGET = TargetConfig("llama", 89, 32, 3, 4, 2, 8, 48, 1e-5, 256, RopeConfig())
DRAFTER = DFlashConfig(
    32, 32, 89, 3, 4.0, 4, 2, 8, 48, block_size=8, num_target_sampled_layers=2, num_draft_layers=2, mask_token_id=7
)


class Model:
    """A small target and drafter over one random row."""

    def __init__(self, drafter: DFlashConfig = DRAFTER, seed: int = 0) -> None:
        keys = jax.random.split(jax.random.key(seed), 3)
        self.target = DenseTarget.random(keys[0], TARGET)
        self.drafter = Drafter.random(keys[1], drafter)
        self.tokens_BT = jax.random.randint(keys[2], (1, 24), 8, TARGET.vocab_size)
        positions_BT = jnp.arange(24, dtype=jnp.int32)[None]
        cache = self.target.init_cache(1, 24)

        def taps(params: Any) -> Any:
            return self.target.extend(params, self.tokens_BT, positions_BT, cache, drafter.target_layer_ids)[1]

        self.taps_BTM = jax.jit(taps)(self.target.params)
        self.anchors_BA = jnp.asarray([[5, 9, 14]], jnp.int32)

    def embed(self, tokens: Any) -> Any:
        return self.target.embed(self.target.params, tokens)

    def hidden(self, params: Any) -> Any:
        """Final hidden states of the anchored blocks."""
        anchor_tokens = jnp.take_along_axis(self.tokens_BT, self.anchors_BA, axis=1)
        block = self.drafter.embed_block(params, anchor_tokens, self.drafter.config.block_size, self.embed)
        return self.drafter.forward(params, self.taps_BTM, self.anchors_BA, block, Execution())[0]

    def logits(self, params: Any) -> Any:
        head_VD = self.drafter.head(params, self.target, self.target.params)
        return self.drafter.unembed(self.hidden(params), head_VD, self.target, self.target.params)


def one_pass_drafts_all() -> str | None:
    """one forward pass drafts all gamma - 1 tokens"""
    model = Model()
    target, drafter = model.target, model.drafter
    state, _ = start(target, drafter, model.tokens_BT.tolist(), DecodeConfig(DRAFTER.block_size))
    head_VD = drafter.head(drafter.params, target, target.params)
    drafts: list[Any] = []

    def tokens(params: Any) -> Any:
        return draft(target.params, params, head_VD, state, target, drafter, DRAFTER.block_size)[0]

    passes = _count_calls(DraftModel, "blocks", lambda: drafts.append(jax.jit(tokens)(drafter.params)))
    wanted = (1, DRAFTER.block_size - 1)
    return None if passes == 1 and drafts[0].shape == wanted else f"{passes} passes drafted {drafts[0].shape}, not {wanted}"


def features_fused_once() -> str | None:
    """context features are fused once and every layer reads them"""
    model = Model()
    calls = _count_calls(ContextFuser, "__call__", lambda: model.hidden(model.drafter.params))
    if calls != 1:
        return f"the fuser ran {calls} times"
    before = model.hidden(model.drafter.params)
    for layer in range(DRAFTER.num_draft_layers):
        if not _differ(before, _with_context_of(model, layer, lambda kv: (jnp.zeros_like(kv[0]), jnp.zeros_like(kv[1])))):
            return f"layer {layer} does not read the features"
    return None


def weights_decrease() -> str | None:
    """slot weights strictly decrease from 1; the anchor weighs nothing"""
    weights = np.asarray(slot_weights(DRAFTER.block_size, DRAFTER.loss_decay_gamma))
    good = weights[0] == 0 and weights[1] == 1 and bool(np.all(np.diff(weights[1:]) < 0)) and weights[-1] > 0
    return None if good else f"weights are {weights.tolist()}"


def prefix_and_bonus() -> str | None:
    """verification commits the exact agreeing prefix and one bonus token"""
    random = np.random.default_rng(0)
    draft = random.integers(0, 3, (64, 5)).astype(np.int32)
    own = random.integers(0, 3, (64, 6)).astype(np.int32)
    verified = verify_block(jnp.asarray(draft), jnp.asarray(own))
    for row in range(64):
        prefix = 0
        while prefix < 5 and draft[row, prefix] == own[row, prefix]:
            prefix += 1
        if int(verified.accepted_B[row]) != prefix or int(verified.tau_B[row]) != prefix + 1:
            return f"row {row} accepted {int(verified.accepted_B[row])}, not {prefix}"
        if verified.tokens_BK[row, : prefix + 1].tolist() != [*draft[row, :prefix].tolist(), int(own[row, prefix])]:
            return f"row {row} commits {verified.tokens_BK[row].tolist()}, not the accepted prefix and the target's next token"
    return None


def gradients_reach_everything() -> str | None:
    """gradients reach the fuser and every projection of every layer, and none is NaN"""
    model = Model()
    mask_BT = jnp.ones_like(model.tokens_BT, bool)
    blocks = make_blocks(model.tokens_BT, mask_BT, model.anchors_BA, jnp.ones_like(model.anchors_BA, bool), DRAFTER.block_size)

    def loss(params: Any) -> Any:
        head = model.target.head_kernel(model.target.params)
        sums = head_loss(
            model.hidden(params),
            head,
            blocks.labels_BAK,
            blocks.supervised_BAK,
            Objective(4.0),
            frozen=True,
            logit_chunk=16,
            dtype="float32",
        )
        return sums.weighted

    for path, grad in jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(model.drafter.params)):
        if not bool(jnp.isfinite(grad).all()) or float(jnp.abs(grad).max()) == 0:
            return f"the gradient of {jax.tree_util.keystr(path)} is zero or not finite"
    return None


def slots_differ() -> str | None:
    """different slots of a block can draft different tokens (they differ by position alone)"""
    logits = Model().logits(Model().drafter.params)[:, :, 1:]
    spread = float(jnp.abs(logits - logits[:, :, :1]).max())
    drafts_AK = np.asarray(jnp.argmax(logits, axis=-1))[0]
    return None if spread > 1e-3 and any(len(np.unique(block)) > 1 for block in drafts_AK) else f"slots differ by {spread} at most"


CHECKS: tuple[Callable[[], str | None], ...] = (
    one_pass_drafts_all,
    features_fused_once,
    weights_decrease,
    prefix_and_bonus,
    gradients_reach_everything,
    slots_differ,
)


def check_invariants() -> int:
    """Print one line a check; 1 when one fails."""
    failed = 0
    for check in CHECKS:
        problem = check()
        failed += problem is not None
        print(f"{'ok' if problem is None else 'FAILED'}: {check.__doc__}" + (f": {problem}" if problem else ""))
    return int(failed > 0)


def _count_calls(kind: type, method: str, call: Callable[[], Any]) -> int:
    original = getattr(kind, method)
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    setattr(kind, method, counted)
    try:
        call()
    finally:
        setattr(kind, method, original)
    return calls


def _with_context_of(model: Model, layer: int, change: Callable[[Any], Any]) -> Any:
    """Hidden states when one layer gets another context, its keys and values changed after all layers' were made."""
    original = DraftModel.context

    def changed(self: DraftModel, *args: Any) -> Any:
        context = original(self, *args)
        return [change(pair) if i == layer else pair for i, pair in enumerate(context)]

    setattr(DraftModel, "context", changed)  # noqa: B010 - mypy knows methods cannot be assigned
    try:
        return model.hidden(model.drafter.params)
    finally:
        setattr(DraftModel, "context", original)  # noqa: B010


def _differ(a: Any, b: Any) -> bool:
    return float(jnp.abs(a - b).max()) > 1e-6
