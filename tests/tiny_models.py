"""Tiny targets and drafters: dense ones with random parameters, and rigged ones whose every token is chosen."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash_jax.drafter import Drafter, abstract_drafter
from dflash_jax.model_config import DFlashConfig, RopeConfig, TargetConfig
from dflash_jax.targets import DenseTarget
from dflash_jax.targets.dense import abstract_decoder

VOCAB, HIDDEN, LAYERS, BLOCK, MASK, CONTEXT = 61, 16, 2, 6, 60, 128
TAPS = (0, 1)
TARGET = TargetConfig("qwen3", VOCAB, HIDDEN, LAYERS, 4, 2, 8, 24, 1e-6, CONTEXT, qk_norm=True, tie_embeddings=False)
DRAFTER = DFlashConfig(
    target_hidden_dim=HIDDEN,
    draft_hidden_dim=HIDDEN,
    vocab_size=VOCAB,
    num_target_layers=LAYERS,
    loss_decay_gamma=3.5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=24,
    block_size=BLOCK,
    num_draft_layers=2,
    target_layer_ids=TAPS,
    mask_token_id=MASK,
    rope=RopeConfig(theta=100.0),
)


def random_params(abstract, seed):
    """Every parameter random, norms and biases too, so that a mistake in any of them shows. Made with numpy: nothing to compile."""
    random = np.random.default_rng(seed)

    def fill(x):
        noise = random.standard_normal(x.shape)
        return jnp.asarray(1.5 * noise * x.shape[-1] ** -0.5 if x.ndim == 2 else 1 + 0.1 * noise, jnp.float32)

    return jax.tree.map(fill, nnx.state(abstract, nnx.Param))


def dense_target(seed=0, **changes):
    config = dataclasses.replace(TARGET, **changes)
    return DenseTarget(config, random_params(abstract_decoder(config), seed))


def dense_drafter(seed=1, **changes):
    config = dataclasses.replace(DRAFTER, **changes)
    return Drafter(config, random_params(abstract_drafter(config), seed))


SCRIPT_LENGTH = 512
FREE = -1


@dataclass(frozen=True, eq=False)
class TableTarget:
    """A third party's target, no transformer: the next token is a function of every token so far, or a script's choice.

    Its cache is the text itself, so one stale, missing or misplaced entry changes what follows.
    """

    config: TargetConfig
    params: Any = field(repr=False)
    tokenizer: Any = None

    def __eq__(self, other):
        return isinstance(other, TableTarget) and self.config == other.config

    def __hash__(self):
        return hash(self.config)

    def init_cache(self, batch, capacity):
        return {"text_BC": jnp.zeros((batch, capacity), jnp.int32)}

    def extend(self, params, tokens_BT, positions_BT, cache, taps=()):
        text_BC = cache["text_BC"]
        capacity = text_BC.shape[1]
        rows_B1 = jnp.arange(text_BC.shape[0])[:, None]
        slots_BT = jnp.where(positions_BT < 0, capacity, positions_BT)
        text_BC = text_BC.at[rows_B1, slots_BT].set(tokens_BT, mode="drop")
        weights_C = jnp.asarray(position_weights(capacity))
        seen_BTC = jnp.arange(capacity)[None, None] <= positions_BT[..., None]
        state_BT = jnp.where(seen_BTC, (text_BC * weights_C[None])[:, None], 0).sum(-1) % self.config.vocab_size
        width_D = jnp.arange(self.config.hidden_size)
        parts = jnp.stack([state_BT, positions_BT + 1], axis=-1).astype(jnp.float32)
        hidden_BTD = jnp.pad(parts, ((0, 0), (0, 0), (0, self.config.hidden_size - 2)))
        waves = [jnp.sin((tokens_BT[..., None] * (width_D + tap + 1)[None, None]).astype(jnp.float32)) for tap in taps]
        taps_BTM = jnp.concatenate(waves, axis=-1) if taps else jnp.zeros((*tokens_BT.shape, 0), jnp.float32)
        return hidden_BTD, taps_BTM, {"text_BC": text_BC}

    def embed(self, params, tokens):
        return params["embedding_VD"][tokens]

    def unembed(self, params, hidden):
        state, position = hidden[..., 0].astype(jnp.int32), hidden[..., 1].astype(jnp.int32)
        forced = params["script_L"][jnp.clip(position, 0, SCRIPT_LENGTH - 1)][..., None]
        ids_V = jnp.arange(self.config.vocab_size).reshape((1,) * (forced.ndim - 1) + (-1,))
        chosen = 50.0 * (forced == ids_V).astype(jnp.float32)
        return jnp.where(forced == FREE, params["logits_VV"][state], chosen)

    def logits(self, text):
        """What follows a text, in numpy."""
        forced = int(np.asarray(self.params["script_L"])[len(text)])
        if forced != FREE:
            return 50.0 * (np.arange(self.config.vocab_size) == forced)
        state = int((np.asarray(text, np.int64) * position_weights(len(text))).sum() % self.config.vocab_size)
        return np.asarray(self.params["logits_VV"])[state]

    def next_token(self, text):
        return int(np.argmax(self.logits(text)))


def position_weights(length):
    return (np.arange(length, dtype=np.int32) * 7 % 11) + 1


TABLE = TargetConfig("table", VOCAB, HIDDEN, LAYERS, 1, 1, 8, 24, 1e-6, CONTEXT)


def table_target(script=None, **changes):
    """`script` {position: token} forces tokens; elsewhere the text decides."""
    random = np.random.default_rng(7)
    forced = np.full(SCRIPT_LENGTH, FREE, np.int32)
    for position, token in (script or {}).items():
        forced[position] = token
    params = {
        "logits_VV": jnp.asarray(1.5 * random.standard_normal((VOCAB, VOCAB)), jnp.float32),
        "embedding_VD": jnp.asarray(random.standard_normal((VOCAB, HIDDEN)), jnp.float32),
        "script_L": jnp.asarray(forced),
    }
    return TableTarget(dataclasses.replace(TABLE, **changes), params)


class ScriptedDrafter(Drafter):
    """Drafts a script, whatever it reads: `params` hold a token for every position of every row, and how many slots follow it."""

    def __eq__(self, other):
        return type(other) is ScriptedDrafter and self.config == other.config

    def __hash__(self):
        return hash((ScriptedDrafter, self.config))

    def init_cache(self, batch, capacity):
        return {"calls_B": jnp.zeros((batch,), jnp.int32)}

    def extend_context(self, params, taps_BTM, positions_BT, cache):
        return {"calls_B": cache["calls_B"] + 1}

    def propose(self, params, block_BKD, positions_BK, cache):
        script_BK = jnp.take_along_axis(params["script_BL"], positions_BK, axis=1)
        wrong_BK = jnp.arange(positions_BK.shape[1])[None] > params["good_B"][:, None]
        tokens_BK = (script_BK + wrong_BK.astype(jnp.int32)) % self.config.vocab_size
        return jnp.zeros_like(block_BKD).at[..., 0].set(tokens_BK.astype(jnp.float32))

    def unembed(self, hidden, head_VD, target, target_params):
        return 9.0 * jax.nn.one_hot(hidden[..., 0].astype(jnp.int32), self.config.vocab_size)


def scripted_drafter(texts, good=None, **changes):
    """Row r drafts `texts[r]` (by absolute position); slots after the `good[r]`-th of every block miss by one token."""
    batch = 1 << (len(texts) - 1).bit_length()
    script_BL = np.zeros((batch, SCRIPT_LENGTH), np.int32)
    for row, text in enumerate(texts):
        script_BL[row, : len(text)] = text
    good_B = np.full(batch, BLOCK, np.int32)
    if good is not None:
        good_B[: len(good)] = good
    params = {"script_BL": jnp.asarray(script_BL), "good_B": jnp.asarray(good_B)}
    return ScriptedDrafter(dataclasses.replace(DRAFTER, **changes), params)


class CommonDrafter(ScriptedDrafter):
    """Knows what is frequent, `common_V` of the target's parameters, and reads nothing: a law to draft from that costs nothing."""

    def __hash__(self):
        return hash((CommonDrafter, self.config))

    def __eq__(self, other):
        return type(other) is CommonDrafter and self.config == other.config

    def unembed(self, hidden, head_VD, target, target_params):
        return jnp.broadcast_to(target_params["common_V"], (*hidden.shape[:-1], self.config.vocab_size))


def constant_drafter(token, rows=1):
    return scripted_drafter([[token] * SCRIPT_LENGTH] * rows)


def random_prompt(seed, length, vocab=VOCAB):
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()
