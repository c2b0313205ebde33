"""The dumb twins: slow, plain and independent ways to compute what the package computes cleverly. Loops and float64, no caches."""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash_jax.drafter import Execution

# ---------------------------------------------------------------------------------------------------------------------
# Attention


def sees(query_position, query_block, key_position, key_block, anchor, *, causal, window):
    """Whether a block's query sees a key; `key_block` None is the context. Written from the paper and z-lab's window rule."""
    if key_block is None:
        if not key_position < anchor:
            return False
    else:
        if key_block != query_block:
            return False
        if causal and key_position > query_position:
            return False
    if window is not None:
        if not key_position > query_position - window:
            return False
        if not causal and not key_position < query_position + window:
            return False
    return True


def anchored_mask(anchors, slots, context, *, causal, window):
    """The dense mask of one row, [A * K, T + A * K]: queries block by block, keys [context ; every block]."""
    mask = np.zeros((len(anchors) * slots, context + len(anchors) * slots), bool)
    for a, anchor in enumerate(anchors):
        for k in range(slots):
            query = mask[a * slots + k]
            for t in range(context):
                query[t] = sees(anchor + k, a, t, None, anchor, causal=causal, window=window)
            for b, other in enumerate(anchors):
                for j in range(slots):
                    query[context + b * slots + j] = sees(anchor + k, a, other + j, b, anchor, causal=causal, window=window)
    return mask


def dense_anchored_attention(q_BAKHE, context_k, context_v, block_k, block_v, masks_BQS):
    """One softmax over one dense score matrix, differentiable. Outputs and each block's mean entropy."""
    batch, anchors, slots, heads, width = q_BAKHE.shape
    groups = context_k.shape[1]

    def keys(context_BGTE, block_BAKGE):
        blocks_BGSE = jnp.moveaxis(block_BAKGE, 3, 1).reshape(batch, groups, anchors * slots, width)
        return jnp.repeat(jnp.concatenate([context_BGTE, blocks_BGSE], axis=2), heads // groups, axis=1)

    k_BHSE, v_BHSE = keys(context_k, block_k), keys(context_v, block_v)
    q_BHQE = jnp.moveaxis(q_BAKHE, 3, 1).reshape(batch, heads, anchors * slots, width)
    scores = jnp.where(masks_BQS[:, None], jnp.einsum("bhqe,bhse->bhqs", q_BHQE, k_BHSE) / math.sqrt(width), -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    entropy = -jnp.where(weights > 0, weights * jnp.log(jnp.where(weights > 0, weights, 1.0)), 0.0).sum(-1)
    out = jnp.einsum("bhqs,bhse->bhqe", weights, v_BHSE).reshape(batch, heads, anchors, slots, width)
    return jnp.moveaxis(out, 1, 3), entropy.reshape(batch, heads, anchors, slots).mean((1, 3))


def attend_one(q_E, keys, values, scale=None, cap=math.inf):
    """One query over the keys that it sees, float64. Output and entropy."""
    scale = 1 / math.sqrt(len(q_E)) if scale is None else scale
    scores = np.array([np.dot(q_E, k) * scale for k in keys], np.float64)
    if cap < math.inf:
        scores = np.array([cap * math.tanh(score / cap) for score in scores])
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    return sum(w * v for w, v in zip(weights, values, strict=True)), -sum(w * math.log(w) for w in weights if w > 0)


def loop_anchored_attention(q_BAKHE, context_k, context_v, block_k, block_v, anchors_BA, *, causal, window):
    """Query by query over lists of keys, float64."""
    args = (np.asarray(x, np.float64) for x in (q_BAKHE, context_k, context_v, block_k, block_v))
    q_BAKHE, context_k, context_v, block_k, block_v = args
    batch, anchors, slots, heads, _ = q_BAKHE.shape
    share, context = heads // context_k.shape[1], context_k.shape[2]
    out, entropy = np.zeros(q_BAKHE.shape), np.zeros((batch, anchors))
    for b, a, k, h in np.ndindex(batch, anchors, slots, heads):
        anchor, g = int(anchors_BA[b, a]), h // share
        rule = partial(sees, anchor + k, a, anchor=anchor, causal=causal, window=window)
        spots = [t for t in range(context) if rule(t, None)]
        own = [j for j in range(slots) if rule(anchor + j, a)]
        keys = [context_k[b, g, t] for t in spots] + [block_k[b, a, j, g] for j in own]
        values = [context_v[b, g, t] for t in spots] + [block_v[b, a, j, g] for j in own]
        out[b, a, k, h], nats = attend_one(q_BAKHE[b, a, k, h], keys, values)
        entropy[b, a] += nats / (slots * heads)
    return out, entropy


def loop_cached_attention(q_BTHE, k_BGCE, v_BGCE, positions_BT, window=math.inf, **scores):
    q_BTHE, k_BGCE, v_BGCE = (np.asarray(x, np.float64) for x in (q_BTHE, k_BGCE, v_BGCE))
    share, out = q_BTHE.shape[2] // k_BGCE.shape[1], np.zeros(q_BTHE.shape)
    for b, t, h in np.ndindex(*q_BTHE.shape[:3]):
        position, g = int(positions_BT[b, t]), h // share
        seen = [c for c in range(position + 1) if position - c < window]
        out[b, t, h], _ = attend_one(q_BTHE[b, t, h], k_BGCE[b, g, seen], v_BGCE[b, g, seen], **scores)
    return out


# ---------------------------------------------------------------------------------------------------------------------
# The drafter


def rms_norm(x, scale, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def rotate(x_HE, position, theta):
    """Default rotary positions, one vector a head, pair by pair."""
    half, out = x_HE.shape[-1] // 2, np.array(x_HE)
    for i in range(half):
        angle = position * theta ** (-2 * i / (2 * half))
        first, second = x_HE[..., i], x_HE[..., i + half]
        out[..., i] = first * math.cos(angle) - second * math.sin(angle)
        out[..., i + half] = second * math.cos(angle) + first * math.sin(angle)
    return out


def draft_hidden(params, config, taps_TM, anchor, block_KD):
    """Final hidden states of one block, float64, from the paper's formulas (default rotary positions)."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(params))
    eps, theta = config.rms_norm_eps, config.rope.theta

    def linear(x, name):
        return x @ name["kernel"] + name.get("bias", 0.0)

    def heads(x):
        return x.reshape(len(x), -1, config.head_dim)

    features = rms_norm(linear(np.asarray(taps_TM, np.float64), p["fuser"]["fc"]), p["fuser"]["hidden_norm"]["scale"], eps)
    x_KD = np.asarray(block_KD, np.float64)
    slots, context = len(x_KD), len(features)
    for i in range(config.num_draft_layers):
        layer = p["layers"][i]
        attention = layer["self_attn"]
        normed = rms_norm(x_KD, layer["input_layernorm"]["scale"], eps)

        def keys(x, positions, attention=attention):
            k = rms_norm(heads(linear(x, attention["k_proj"])), attention["k_norm"]["scale"], eps)
            return [rotate(k[j], position, theta) for j, position in enumerate(positions)], heads(linear(x, attention["v_proj"]))

        q = rms_norm(heads(linear(normed, attention["q_proj"])), attention["q_norm"]["scale"], eps)
        context_k, context_v = keys(features, range(context))
        block_k, block_v = keys(normed, range(anchor, anchor + slots))
        mixed = np.zeros((slots, config.num_heads, config.head_dim))
        for k in range(slots):
            rule = partial(sees, anchor + k, 0, anchor=anchor, causal=config.causal[i], window=config.sliding_window[i])
            q_HE = rotate(q[k], anchor + k, theta)
            for h in range(config.num_heads):
                g = h // (config.num_heads // config.num_kv_heads)
                seen = [(context_k[t][g], context_v[t][g]) for t in range(context) if rule(t, None)]
                seen += [(block_k[j][g], block_v[j][g]) for j in range(slots) if rule(anchor + j, 0)]
                mixed[k, h], _ = attend_one(q_HE[h], *zip(*seen, strict=True))
        x_KD = x_KD + linear(mixed.reshape(slots, -1), attention["o_proj"])
        normed = rms_norm(x_KD, layer["post_attention_layernorm"]["scale"], eps)
        gate, up = linear(normed, layer["mlp"]["gate_proj"]), linear(normed, layer["mlp"]["up_proj"])
        x_KD = x_KD + linear(gate / (1 + np.exp(-gate)) * up, layer["mlp"]["down_proj"])
    return rms_norm(x_KD, p["norm"]["scale"], eps)


# ---------------------------------------------------------------------------------------------------------------------
# Losses


@dataclass
class Loss:
    weighted: float = 0.0
    weight: float = 0.0
    unweighted: float = 0.0
    slots: int = 0
    accepted: int = 0
    blocks: int = 0


def loss(logits_BAKS, labels_BAK, supervised_BAK, gamma, slot_weights="decay", loss="ce", target_BAKV=None, ids=None):
    """Slot by slot, float64. Sums and counts, and the correct and counted slots by k. `ids`: the tokens that are drafted at all;
    `target_BAKV`: the target's logits of the token at each slot, for all losses but ce."""
    batch, anchors, slots, drafted = np.shape(logits_BAKS)
    ids = list(range(drafted)) if ids is None else list(ids)
    sums, correct_K, count_K = Loss(), np.zeros(slots), np.zeros(slots)
    for b, a in np.ndindex(batch, anchors):
        standing, any_label, learned, likely = True, False, {}, {}
        for k in range(1, slots):
            if not supervised_BAK[b, a, k]:
                standing = False
                continue
            q = softmax(logits_BAKS[b, a, k])
            label = int(labels_BAK[b, a, k] if loss == "ce" else np.argmax(target_BAKV[b, a, k]))
            hit = ids[int(np.argmax(q))] == label
            if loss in ("ce", "ce_argmax"):
                chance = q[ids.index(label)] if label in ids else 0.0
                value = -math.log(chance) if label in ids else None
            else:
                p = softmax(target_BAKV[b, a, k])[ids]
                chance = sum(min(x, y) for x, y in zip(p, q, strict=True))
                kl = sum(x * math.log(x / y) for x, y in zip(p, q, strict=True)) + 1 - sum(p)
                value = {"kl": kl, "tv": 1 - chance, "lk": math.exp(-3 * chance) * (kl - 1 + chance) + 1 - chance}[loss]
            likely[k] = 0.5 + 0.5 * chance
            if value is not None:
                learned[k] = value
            correct_K[k] += hit
            count_K[k] += 1
            standing, any_label = standing and hit, True
            sums.accepted += standing
        sums.blocks += any_label
        for k, value in learned.items():
            if slot_weights == "decay":
                weight = math.exp(-(k - 1) / gamma)
            else:  # D-PACE: how likely the prefixes are that hold slot k, confidences halved towards 1
                weight = sum(math.prod(x for i, x in likely.items() if i <= end) for end in learned if end >= k)
            sums.weighted += weight * value
            sums.weight += weight if slot_weights == "decay" else 1
            sums.unweighted += value
            sums.slots += 1
    return sums, correct_K, count_K


def softmax(logits):
    """A law in float64."""
    logits = np.asarray(logits, np.float64)
    return np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()


# ---------------------------------------------------------------------------------------------------------------------
# Sampling


def process_logits(logits, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0):
    """One vector of logits: the allowed tokens keep logits / temperature, the others become -inf."""
    logits = np.asarray(logits, np.float64) / (temperature if temperature > 0 else 1.0)
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    allowed = [i for i in order if not top_k or logits[i] >= logits[order[min(top_k, len(order)) - 1]]]
    mass = np.exp(logits[allowed] - logits[order[0]])
    mass /= mass.sum()
    kept, before = [], 0.0
    for token, share in zip(allowed, mass, strict=True):
        if (before < top_p or top_p >= 1) and share >= min_p * mass[0]:
            kept.append(token)
        before += share
    floor = min(logits[kept])  # equal logits stay or go together
    return np.where(logits >= floor, logits, -np.inf)


def keyed_draw(logits, seed, position, purpose=0, anchor=None, **sampling):
    """The token at a position: Gumbel-max over the processed logits, keyed as the package says (purpose 0 target, 1 draft).

    Drafts have the position of their round's anchor in the key too."""
    return int(np.argmax(process_logits(logits, **sampling) + keyed_noise(len(logits), seed, position, purpose, anchor)))


def keyed_noise(vocab, seed, position, purpose=0, anchor=None):
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(jnp.uint32(seed)), position), purpose)
    key = key if anchor is None else jax.random.fold_in(key, anchor)
    return np.asarray(jax.random.gumbel(key, (vocab,), jnp.float32))


# ---------------------------------------------------------------------------------------------------------------------
# Decoding


@dataclass
class Answer:
    tokens: list[int]
    reason: str
    rounds: int
    histogram: list[int]


def plain(next_token, prompt, max_new_tokens, stops=(), limit=10**9):
    """Token by token, everything recomputed from the whole text."""
    text, new = list(prompt), []
    while True:
        new.append(next_token(text + new))
        if new[-1] in stops:
            return Answer(new, "stop", 0, [])
        if len(new) == max_new_tokens or len(text) + len(new) == limit:
            return Answer(new, "length", 0, [])


def speculative(next_token, draft, prompt, max_new_tokens, block_size, stops=(), limit=10**9):
    """Draft, verify, commit in Python lists; `draft(text)` gives block_size - 1 tokens after the whole text."""
    text, rounds, histogram = [*prompt, next_token(list(prompt))], 0, [0] * block_size

    def full():
        return len(text) - len(prompt) == max_new_tokens or len(text) == limit

    while text[-1] not in stops and not full():
        kept, drafted = 0, draft(list(text))
        assert len(drafted) == block_size - 1
        for token in drafted:
            if token != next_token(text):
                break
            text.append(token)
            kept += 1
            if token in stops or full():
                break
        if not kept or (text[-1] not in stops and not full()):
            text.append(next_token(text))  # the bonus token
        rounds += 1
        histogram[kept] += 1
    return Answer(text[len(prompt) :], "stop" if text[-1] in stops else "length", rounds, histogram)


def from_scratch(target, drafter=None, length=128):
    """`next_token` and `draft` of real models: one pass over the whole text on an empty cache for every single token."""
    taps = drafter.config.target_layer_ids if drafter is not None else ()

    @jax.jit
    def read(tokens_1T, last):
        positions_1T = jnp.arange(length, dtype=jnp.int32)[None]
        hidden, taps_1TM, _ = target.extend(target.params, tokens_1T, positions_1T, target.init_cache(1, length), taps)
        return target.unembed(target.params, hidden[:, last])[0], taps_1TM

    @jax.jit
    def block(taps_1TM, anchor, token):
        embed = partial(target.embed, target.params)
        block_11KD = drafter.embed_block(drafter.params, token[None, None], drafter.config.block_size, embed)
        hidden, _ = drafter.forward(drafter.params, taps_1TM, anchor[None, None], block_11KD, Execution())
        return drafter.unembed(hidden[0, 0, 1:], drafter.head(drafter.params, target, target.params), target, target.params)

    drafted = (drafter.config.draft_token_ids or range(target.config.vocab_size)) if drafter is not None else ()
    known = {}

    def logits(text):
        if tuple(text) not in known:
            padded = jnp.asarray([text + [0] * (length - len(text))], jnp.int32)
            row, features = read(padded, jnp.int32(len(text) - 1))
            known[tuple(text)] = (np.asarray(row), features)
        return known[tuple(text)]

    def next_token(text):
        return int(np.argmax(logits(text)[0]))

    def draft(text, choose=lambda row, position: int(np.argmax(row))):
        features = logits(text)[1]  # the block reads only what lies before its anchor, the last token
        rows = np.asarray(block(features, jnp.int32(len(text) - 1), jnp.int32(text[-1])))
        return [drafted[choose(row, len(text) + slot)] for slot, row in enumerate(rows)]

    return next_token, draft, lambda text: logits(text)[0]
