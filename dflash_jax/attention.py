"""The two attentions of the project: cached causal (targets) and anchored (drafters). Grouped query heads, softmax in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.layers import product, softcap

# Large and finite: a row that sees nothing stays finite, forward and backward.
HIDDEN_SCORE = -1e30
QUERY_CHUNK = 256
"""queries a row whose scores against a whole cache exist at once: memory grows with the length, not with its square"""


def cached_attention(
    q_BTHE: Float[Array, "B T H E"],
    k_BGCE: Float[Array, "B G C E"],
    v_BGCE: Float[Array, "B G C E"],
    positions_BT: Int[Array, "B T"],
    dtype: str,
    *,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    starts_BT: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T H E"]:
    """Causal attention over a cache: the query at position p sees the cache slots 0..p, or the last `window` of them.

    `starts_BT`: nor does it see slots before its start, where its document begins (packed rows; a position here is a slot). `scale`
    multiplies the queries (None: E ** -0.5), and `cap` bounds the scores (`softcap`). Returns float32. More than `QUERY_CHUNK`
    queries are taken in chunks.
    """
    batch, length, heads, width = q_BTHE.shape
    if length > QUERY_CHUNK:

        def attend(part: tuple[Array, Array, Array | None]) -> Array:
            q_BTHE, positions_BT, starts_BT = part
            return cached_attention(
                q_BTHE, k_BGCE, v_BGCE, positions_BT, dtype, window=window, scale=scale, cap=cap, starts_BT=starts_BT
            )

        chunks = -(-length // QUERY_CHUNK)
        parts = jax.tree.map(lambda x: _split_chunks(x, chunks, QUERY_CHUNK), (q_BTHE, positions_BT, starts_BT))
        return _join_chunks(jax.lax.map(attend, parts))[:, :length]
    groups = k_BGCE.shape[1]
    factor = jnp.float32(width**-0.5 if scale is None else scale)
    # Rows of one matrix a group, in the scores' order: XLA would transpose the scores otherwise, the largest arrays here.
    q_BTGRE = q_BTHE.reshape(batch, length, groups, heads // groups, width) * factor
    rows_BGNE = jnp.swapaxes(q_BTGRE, 1, 2).reshape(batch, groups, -1, width)
    scores_BGNC = softcap(product("bgne,bgce->bgnc", rows_BGNE, k_BGCE, dtype), cap)
    scores_BGTRC = scores_BGNC.reshape(batch, groups, length, -1, k_BGCE.shape[2])
    slots_C = jnp.arange(k_BGCE.shape[2], dtype=positions_BT.dtype)
    seen_BTC = slots_C[None, None, :] <= positions_BT[:, :, None]
    if window is not None:
        seen_BTC &= slots_C[None, None, :] > positions_BT[:, :, None] - window
    if starts_BT is not None:
        seen_BTC &= slots_C[None, None, :] >= starts_BT[:, :, None]
    weights_BGTRC = jax.nn.softmax(jnp.where(seen_BTC[:, None, :, None], scores_BGTRC, HIDDEN_SCORE), axis=-1)
    out_BGNE = product("bgnc,bgce->bgne", weights_BGTRC.reshape(scores_BGNC.shape), v_BGCE, dtype)
    return jnp.swapaxes(out_BGNE.reshape(batch, groups, length, -1, width), 1, 2).reshape(batch, length, heads, width)


def anchored_attention(
    q_BAKHE: Float[Array, "B A K H E"],
    context_k_BGTE: Float[Array, "B G T E"],
    context_v_BGTE: Float[Array, "B G T E"],
    block_k_BAKGE: Float[Array, "B A K G E"],
    block_v_BAKGE: Float[Array, "B A K G E"],
    anchors_BA: Int[Array, "B A"],
    *,
    causal: bool,
    window: int | None,
    dtype: str,
    ring: bool = False,
    starts_BA: Int[Array, "B A"] | None = None,
    anchor_chunk: int | None = None,
    remat: bool = False,
) -> tuple[Float[Array, "B A K H E"], Float[Array, "B A"]]:
    """Each block attends the context strictly before its anchor and its own slots, under one softmax (paper, Figure 4).

    Context key t has position t, or in a `ring` of T slots the newest position before the anchor that is congruent to t; slot k of
    a block has position anchor + k. `window`: a query at position p sees keys at positions > p - window, and < p + window unless
    `causal`. `starts_BA`: nor does a block see context before its start, where its document begins (packed rows; a position here is
    a slot). Decoding is the case A = 1. `anchor_chunk` blocks a row are scored at once, and `remat` recomputes their scores
    in the backward pass. Returns float32 outputs and each block's mean attention entropy in nats, without gradient.
    """
    batch, anchors, slots, heads, width = q_BAKHE.shape
    groups, context = context_k_BGTE.shape[1:3]
    q_BAKGRE = q_BAKHE.reshape(batch, anchors, slots, groups, heads // groups, width) * jnp.float32(width**-0.5)

    def attend(part: tuple[Array, Array, Array, Array, Array | None]) -> tuple[Array, Array]:
        q, block_k, block_v, anchors_BA, starts_BA = part
        # Rows of one matrix a group, in the scores' order: XLA would transpose the scores otherwise, the largest arrays here.
        q = jnp.moveaxis(q, (3, 4), (1, 2))
        rows_BGNE = q.reshape(batch, groups, -1, width)
        context_scores = product("bgne,bgte->bgnt", rows_BGNE, context_k_BGTE, dtype).reshape(*q.shape[:-1], context)
        block_scores = product("bgrake,bajge->bgrakj", q, block_k, dtype)
        context_seen, block_seen = _seen(anchors_BA, slots, context, causal=causal, window=window, ring=ring)
        if starts_BA is not None:
            context_seen &= jnp.arange(context, dtype=starts_BA.dtype)[None, None, None] >= starts_BA[:, :, None, None]
        context_scores = jnp.where(context_seen[:, None, None], context_scores, HIDDEN_SCORE)
        block_scores = jnp.where(block_seen[None, None, None, None], block_scores, HIDDEN_SCORE)
        # One softmax over two parts: a common maximum, then one normaliser. Its gradient is zero, so it is not traced.
        top = jax.lax.stop_gradient(jnp.maximum(context_scores.max(-1), block_scores.max(-1)))[..., None]
        context_e, block_e = jnp.exp(context_scores - top), jnp.exp(block_scores - top)
        total_BGRAK = context_e.sum(-1) + block_e.sum(-1)
        out = product("bgnt,bgte->bgne", context_e.reshape(*rows_BGNE.shape[:3], context), context_v_BGTE, dtype).reshape(q.shape)
        out = out + product("bgrakj,bajge->bgrake", block_e, block_v, dtype)
        # Divided afterwards: outputs are fewer than scores.
        out = jnp.moveaxis(out / total_BGRAK[..., None], (1, 2), (3, 4))
        # entropy = log Z - E[score]; hidden scores have weight exactly 0. Nobody learns from it, but a loop would differentiate it.
        e_and_s = jax.lax.stop_gradient((context_e, context_scores - top, block_e, block_scores - top))
        sum_BGRAK = (e_and_s[0] * e_and_s[1]).sum(-1) + (e_and_s[2] * e_and_s[3]).sum(-1)
        total_BGRAK = jax.lax.stop_gradient(total_BGRAK)
        return out, (jnp.log(total_BGRAK) - sum_BGRAK / total_BGRAK).mean(axis=(1, 2, 4))

    if remat:
        attend = jax.checkpoint(attend)
    parts = (q_BAKGRE, block_k_BAKGE, block_v_BAKGE, anchors_BA, starts_BA)
    if anchor_chunk is None or anchors <= anchor_chunk:
        out, entropy_BA = attend(parts)
    else:
        chunks = -(-anchors // anchor_chunk)
        out, entropy_BA = jax.lax.map(attend, jax.tree.map(lambda x: _split_chunks(x, chunks, anchor_chunk), parts))
        out, entropy_BA = (_join_chunks(x)[:, :anchors] for x in (out, entropy_BA))
    return out.reshape(batch, anchors, slots, heads, width), entropy_BA


def _seen(
    anchors_BA: Array, slots: int, context: int, *, causal: bool, window: int | None, ring: bool
) -> tuple[Bool[Array, "..."], Bool[Array, "..."]]:
    """What slot k sees: of the context [B, A, K, T], of its own block [K, K]."""
    k_K = jnp.arange(slots, dtype=anchors_BA.dtype)
    t_BAKT = jnp.arange(context, dtype=anchors_BA.dtype)[None, None, None]  # every context key's position
    anchors_BA11 = anchors_BA[:, :, None, None]
    if ring:
        last_BA11 = anchors_BA11 - 1
        t_BAKT = last_BA11 - (last_BA11 - t_BAKT) % context
        before_BAKT = t_BAKT >= 0  # a slot that no position before the anchor has reached is empty
    else:
        before_BAKT = t_BAKT < anchors_BA11
    context_seen = jnp.broadcast_to(before_BAKT, (*anchors_BA.shape, slots, context))
    block_seen = k_K[None] <= k_K[:, None] if causal else jnp.ones((slots, slots), bool)
    if window is not None:
        positions_BAK = anchors_BA[:, :, None] + k_K[None, None]
        context_seen &= t_BAKT > positions_BAK[..., None] - window
        block_seen &= k_K[None] > k_K[:, None] - window
        if not causal:
            block_seen &= k_K[None] < k_K[:, None] + window
    return context_seen, block_seen


def _split_chunks(x_BA: Array, chunks: int, size: int) -> Array:
    """[B, A, ...] to [chunks, B, size, ...]; the last chunk is padded with zeros (position 0: it sees little)."""
    pad = [(0, 0)] * x_BA.ndim
    pad[1] = (0, chunks * size - x_BA.shape[1])
    padded = jnp.pad(x_BA, pad).reshape(x_BA.shape[0], chunks, size, *x_BA.shape[2:])
    return jnp.moveaxis(padded, 1, 0)


def _join_chunks(x_CBA: Array) -> Array:
    """[chunks, B, size, ...] back to [B, chunks * size, ...]."""
    x = jnp.moveaxis(x_CBA, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])
