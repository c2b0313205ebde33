"""How well a drafter drafts the target's own answers, wired as given and in other ways that are easily confused with it.

The target answers prompts greedily, and a block is drafted at every token of the answers (the training forward, no decoding).
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.blocks import Blocks, make_blocks, slot_weights
from dflash_jax.conversations import first_messages
from dflash_jax.drafter import Drafter, Execution
from dflash_jax.errors import ConfigError
from dflash_jax.generate import generate
from dflash_jax.model_config import DFlashConfig, RopeConfig, TargetConfig, default_target_layer_ids
from dflash_jax.prompts import Prompt
from dflash_jax.targets import Target
from dflash_jax.train_step import Batch, target_features

PROMPTS = (
    "Write a Python function that checks whether a string is a palindrome.",
    "What is the capital of France, and what is it known for?",
    "List five tips for learning a new language.",
    "Write a Python function that returns the largest number of a list.",
    "Explain in simple words why the sky is blue.",
    "A train goes 60 miles in an hour. How far does it go in three hours?",
    "Write a short letter that thanks a teacher.",
    "Give me a recipe for pancakes.",
    "Write a Python class for a bank account with deposit and withdraw.",
    "What are the main causes of climate change?",
    "How do I stay healthy when I work at a desk?",
    "Write a Python loop that prints the numbers from 1 to 10.",
    "What is the difference between a list and a tuple in Python?",
    "Tell me a short story about a fox and a river.",
    "Summarize how a bill becomes a law.",
    "Write a Python function that counts the vowels of a word.",
)
NEW_TOKENS = 48
"""answer tokens a prompt"""
MOST_PROMPTS = 32
"""of a prompt file: they are decoded together"""
COPY_ROPE = "copy the target's rope_theta, rope_scaling and partial_rotary_factor into the drafter's config.json"


class Sample(NamedTuple):
    """Prompts with the target's own greedy answers, padded on the right."""

    tokens_BT: np.ndarray
    prompt_B: np.ndarray
    """tokens of each prompt"""
    length_B: np.ndarray
    """tokens of prompt and answer"""

    def answers(self) -> np.ndarray:
        """All answer tokens in one row."""
        rows = zip(self.tokens_BT, self.prompt_B, self.length_B, strict=True)
        return np.concatenate([row[start:end] for row, start, end in rows])

    def blocks(self, block_size: int) -> Blocks:
        """A block at every answer token but the last."""
        anchors_BA = self.prompt_B[:, None] + np.arange(NEW_TOKENS - 1)
        valid_BA = anchors_BA + 1 < self.length_B[:, None]
        real_BT = np.arange(self.tokens_BT.shape[1]) < self.length_B[:, None]
        anchors_BA = np.where(valid_BA, anchors_BA, 0).astype(np.int32)
        tokens, real, anchors, valid = (jnp.asarray(x) for x in (self.tokens_BT, real_BT, anchors_BA, valid_BA))
        return jax.jit(make_blocks, static_argnums=4)(tokens, real, anchors, valid, block_size)


class Wiring(NamedTuple):
    """Another way to read the same parameters."""

    name: str
    mend: str
    config: DFlashConfig
    taps: tuple[int, ...]


class Outcome(NamedTuple):
    """What a wiring does at every block of a sample."""

    accepted_BA: np.ndarray
    """drafted tokens that stand"""
    score_BA: np.ndarray
    """what it gives to the target's tokens: their probabilities, weighed as in training (paper, Eq. 4). It moves with every
    change of wiring, where the drafted tokens mostly stay the same"""
    finite: bool
    """whether its final hidden states are"""


def answer(target: Target, prompts: Sequence[Prompt] = (), mask: int | None = None) -> Sample:
    """The target's greedy answers to `prompts`, or to ours. Without a tokenizer, these are random ids (no stop, pad or mask)."""
    c, tokenizer = target.config, target.tokenizer
    if tokenizer is None:
        usable = np.setdiff1d(np.arange(c.vocab_size), [i for i in (*c.stop_token_ids, c.pad_token_id, mask) if i is not None])
        encoded = np.random.default_rng(0).choice(usable, (len(PROMPTS), 16)).tolist()
    else:
        chosen = list(prompts)[:MOST_PROMPTS] or [Prompt(id=text, set="doctor", turns=[text]) for text in PROMPTS]
        chats = [first_messages(prompt) for prompt in chosen]
        plain = tokenizer.chat_template is None  # a base model
        encoded = [tokenizer.encode(chat[-1]["content"]) if plain else tokenizer.encode_chat(chat) for chat in chats]
    new = generate(target, None, encoded, max_new_tokens=NEW_TOKENS).tokens
    rows = [prompt + tokens for prompt, tokens in zip(encoded, new, strict=True)]
    tokens_BT = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, tokens in enumerate(rows):
        tokens_BT[row, : len(tokens)] = tokens
    return Sample(tokens_BT, *(np.asarray([len(row) for row in lists], np.int32) for lists in (encoded, rows)))


def other_wirings(d: DFlashConfig, c: TargetConfig, context: int) -> list[Wiring]:
    """What the given wiring may have been confused with. Taps are data, so only the last four cost a compilation."""
    ids = d.target_layer_ids
    lists = {
        "reversed": ids[::-1],
        "ascending": tuple(sorted(ids)),
        "- 1": tuple(i - 1 for i in ids),
        "+ 1": tuple(i + 1 for i in ids),
    }
    with contextlib.suppress(ConfigError):
        lists["of the default spread"] = default_target_layer_ids(c.num_layers, len(ids))
    known, wirings = {ids}, []
    for name, other in lists.items():
        if other not in known and min(other) >= 0 and max(other) < c.num_layers - 1:
            known.add(other)
            wirings.append(Wiring(f"target_layer_ids {name}", f"set target_layer_ids to {list(other)}", d, other))
    flipped = not d.causal[0]
    changes: list[tuple[str, str, dict[str, Any]]] = [
        ("the target's rope", COPY_ROPE, {"rope": c.rope}),
        ("plain rope", "remove rope_scaling and partial_rotary_factor", {"rope": RopeConfig(d.rope.theta)}),
        (
            f"is_causal {str(flipped).lower()}",
            f"set is_causal to {str(flipped).lower()}",
            {"causal": (flipped,) * d.num_draft_layers},
        ),
    ]
    if any(window is not None and window < context for window in d.sliding_window):
        changes.append(("no sliding window", "set use_sliding_window to false, or correct sliding_window", {"sliding_window": ()}))
    for name, mend, change in changes:
        with contextlib.suppress(ConfigError):  # a rope that does not fit the heads
            config = dataclasses.replace(d, **change)
            if config not in (d, *(wiring.config for wiring in wirings)):
                wirings.append(Wiring(name, mend, config, ids))
    return wirings


def tap_features(target: Target, sample: Sample, layers: tuple[int, ...]) -> dict[int, np.ndarray]:
    """The output [B, T, D] of each of these layers over the sample: one pass for every order and choice of taps."""
    batch = Batch(jnp.asarray(sample.tokens_BT), jnp.zeros(sample.tokens_BT.shape, bool), jnp.asarray(sample.length_B))
    taps_BTM = jax.jit(target_features, static_argnums=(0, 3))(target, target.params, batch, layers)
    return dict(zip(layers, np.split(np.asarray(taps_BTM), len(layers), axis=-1), strict=True))


class Trials:
    """Runs of one drafter's parameters over one sample."""

    def __init__(self, target: Target, drafter: Drafter, sample: Sample, taps: dict[int, np.ndarray]) -> None:
        """`taps`: features [B, T, D] by layer, of all layers that some wiring reads."""
        self.target, self.drafter, self.sample, self.taps = target, drafter, sample, taps
        self.blocks = sample.blocks(drafter.config.block_size)
        self.valid_BA, self.supervised_BAK = np.asarray(self.blocks.valid_BA), np.asarray(self.blocks.supervised_BAK)
        self.given = self.run(drafter.config, self.side_by_side(drafter.config.target_layer_ids))

    def side_by_side(self, ids: tuple[int, ...]) -> np.ndarray:
        """The drafter's input [B, T, M]."""
        return np.concatenate([self.taps[i] for i in ids], axis=-1)

    def mean_features(self) -> np.ndarray:
        """The given input with the same features at every position."""
        given_BTM = self.side_by_side(self.drafter.config.target_layer_ids)
        real_BT1 = (np.arange(given_BTM.shape[1]) < self.sample.length_B[:, None])[..., None]
        return np.broadcast_to(given_BTM.mean((0, 1), where=real_BT1), given_BTM.shape)

    def run(self, config: DFlashConfig, taps_BTM: np.ndarray) -> Outcome:
        """The drafter's parameters under a config, over given features."""
        # which layers the features are from does not matter here, so all choices of taps share one program
        config = dataclasses.replace(config, target_layer_ids=tuple(range(len(config.target_layer_ids))))
        wired, blocks = Drafter(config, self.drafter.params), self.blocks
        arrays = (jnp.asarray(taps_BTM), blocks.anchors_BA, blocks.anchor_tokens_BA, blocks.labels_BAK[..., 1:])
        drafts_BAJ, chance_BAJ, finite_B = jax.device_get(
            _draft(self.target.params, wired.params, arrays, target=self.target, drafter=wired)
        )
        counts_BAJ = self.supervised_BAK[..., 1:]
        accepted_BA = np.cumprod((drafts_BAJ == np.asarray(blocks.labels_BAK)[..., 1:]) & counts_BAJ, axis=-1).sum(-1)
        weights_J = np.asarray(slot_weights(config.block_size, config.loss_decay_gamma))[1:]
        return Outcome(accepted_BA, (chance_BAJ * counts_BAJ * weights_J).sum(-1), bool(finite_B.all()))

    def mean(self, outcome: Outcome) -> float:
        """Accepted tokens a block."""
        return float(outcome.accepted_BA[self.valid_BA].mean())

    def compare(self, first: Outcome, second: Outcome) -> float:
        """How clearly the second gives more to the target's tokens: z of a paired test.

        Blocks that overlap share labels, so one observation is the sum over as many neighbouring blocks as a block has slots.
        """
        span = self.drafter.config.block_size

        def groups(x_BA: np.ndarray) -> np.ndarray:
            return np.pad(x_BA, ((0, 0), (0, -x_BA.shape[1] % span))).reshape(-1, span).sum(-1)

        more = groups(np.where(self.valid_BA, second.score_BA - first.score_BA, 0.0))[groups(self.valid_BA) > 0]
        error = float(more.std(ddof=1)) / len(more) ** 0.5
        return float(more.mean()) / error if error else 0.0


@partial(jax.jit, static_argnames=("target", "drafter"))
def _draft(params: Any, draft_params: Any, arrays: Any, *, target: Target, drafter: Drafter) -> Any:
    """Drafts, the probabilities of the labels, and whether a row is finite; row by row, for the logits' sake."""
    head_VD = drafter.head(draft_params, target, params)
    embed = partial(target.embed, params)

    def row(arrays: Any) -> Any:
        taps_1TM, anchors_1A, tokens_1A, labels_1AJ = (x[None] for x in arrays)
        block = drafter.embed_block(draft_params, tokens_1A, drafter.config.block_size, embed)
        hidden, _ = drafter.forward(draft_params, taps_1TM, anchors_1A, block, Execution())
        logits = drafter.unembed(hidden[:, :, 1:], head_VD, target, params)
        drafted = drafter.token_ids(jnp.arange(logits.shape[-1], dtype=jnp.int32))
        place = jnp.minimum(jnp.searchsorted(drafted, labels_1AJ), len(drafted) - 1)
        of_label = jnp.take_along_axis(logits, place[..., None], axis=-1)[..., 0]
        chance = jnp.exp(of_label - jax.nn.logsumexp(logits, axis=-1))
        chance = jnp.where(drafted[place] == labels_1AJ, chance, 0.0)  # it cannot draft some tokens
        return drafter.token_ids(jnp.argmax(logits, axis=-1).astype(jnp.int32))[0], chance[0], jnp.isfinite(hidden).all()

    return jax.lax.map(row, arrays)
