"""The tensors of a drafter's files beside its layers: an embedding and a head, its own or the target's, and a draft vocabulary."""

import jax.numpy as jnp
import numpy as np

from dflash_jax.errors import CheckpointError
from dflash_jax.hf_drafter import Parts
from dflash_jax.hf_layouts import RENAMED_TENSORS, UNUSED_TENSORS
from dflash_jax.hf_weights import VOCABULARY_TENSORS, Index, Tensor, to_numpy_dtype
from dflash_jax.model_config import DFlashConfig
from dflash_jax.targets.base import Target

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
_ROWS = 8192
"""rows of a table that are compared at once"""


def drafter_tensors(tensors: list[Tensor], source: str) -> dict[str, Tensor]:
    """A drafter's tensors under z-lab's names. Raises `CheckpointError` when two have the same."""
    found: dict[str, Tensor] = {}
    for tensor in tensors:
        name = tensor.name.removeprefix("model.")  # some exporters keep the class's prefix
        name = RENAMED_TENSORS.get(name, name)
        if name in found:
            raise CheckpointError(f"{source}: {tensor.name} is there under another name too: remove one of them")
        if name not in UNUSED_TENSORS and not name.endswith("rotary_emb.inv_freq"):
            found[name] = tensor._replace(name=name)
    return found


def drafter_parts(tensors: dict[str, Tensor], target: Target, source: str) -> Parts:
    """The draft vocabulary, and which of embedding and head are the drafter's own.

    Speculators' files may carry the target's tables, or the drafted rows of its head: copies are not kept.
    Raises `CheckpointError` when `d2t` and `t2d` are no draft vocabulary.
    """
    ids = draft_vocabulary(tensors, target.config.vocab_size, source)
    rows = np.asarray(ids or range(target.config.vocab_size))
    own = {}
    for name in (EMBEDDING, HEAD):
        own[name] = name in tensors and not _is_the_targets(tensors[name], target, rows if name == HEAD else None)
    return Parts(ids, own[EMBEDDING], own[HEAD])


def draft_vocabulary(tensors: dict[str, Tensor], vocab_size: int, source: str) -> tuple[int, ...]:
    """The drafted token ids, ascending; none when all are. The token at place i is `i + d2t[i]` (speculators 0.9.0)."""
    if not VOCABULARY_TENSORS.keys() & tensors.keys():
        return ()
    if "d2t" not in tensors:
        raise CheckpointError(f"{source} has the tensor t2d without d2t, which names the drafted tokens: fetch the files again")
    offsets = tensors["d2t"].read().astype(np.int64)
    ids = offsets.reshape(-1) + np.arange(offsets.size)
    if offsets.ndim != 1 or not len(ids) or (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= vocab_size:
        raise CheckpointError(
            f"{source}: the tensor d2t does not name ascending ids in 0..{vocab_size - 1} (i + d2t[i]): "
            "take the target it was made for"
        )
    marks = tensors["t2d"].read() if "t2d" in tensors else np.isin(np.arange(vocab_size), ids)
    if marks.shape != (vocab_size,) or not np.array_equal(np.flatnonzero(marks), ids):
        raise CheckpointError(f"{source}: the tensors d2t and t2d name different tokens: fetch the files again")
    return () if len(ids) == vocab_size else tuple(ids.tolist())


def own_tensors(tensors: dict[str, Tensor], config: DFlashConfig) -> list[Tensor]:
    """The tensors that are parameters of ours: without copies of the target's, and a cut head with its rows where they belong.

    Our head has a row for every token; those that are not drafted are zero, and nothing reads them.
    """
    left_out = set(VOCABULARY_TENSORS)
    left_out |= set() if config.own_embedding else {EMBEDDING}
    left_out |= set() if config.own_head else {HEAD}
    found = {name: tensor for name, tensor in tensors.items() if name not in left_out}
    ids = list(config.draft_token_ids)
    if HEAD in found and ids and found[HEAD].shape == (len(ids), config.draft_hidden_dim):
        cut = found[HEAD]

        def spread(index: Index = ()) -> np.ndarray:
            rows = cut.read()
            head = np.zeros((config.vocab_size, config.draft_hidden_dim), rows.dtype)
            head[ids] = rows
            return head[index]

        found[HEAD] = Tensor(HEAD, (config.vocab_size, config.draft_hidden_dim), spread)
    return list(found.values())


def target_rows(target: Target, ids: np.ndarray) -> np.ndarray | None:
    """Rows of the target's head, float32; None where it cannot show them."""
    if not hasattr(target, "head_kernel"):
        return None
    head = target.head_kernel(target.params)
    return np.asarray(jnp.take(head, jnp.asarray(ids, jnp.int32), axis=0).astype(jnp.float32))


def _is_the_targets(tensor: Tensor, target: Target, head_ids: np.ndarray | None) -> bool:
    """Whether a table is what the target has, in the coarser of the two dtypes; `head_ids` None: its embedding."""
    ids = np.arange(target.config.vocab_size) if head_ids is None else head_ids
    if tensor.shape != (len(ids), target.config.hidden_size):
        return False
    table = tensor.read()
    for start in range(0, len(ids), _ROWS):
        some = ids[start : start + _ROWS]
        if head_ids is None:
            rows = np.asarray(target.embed(target.params, jnp.asarray(some, jnp.int32)), np.float32)
        else:
            found = target_rows(target, some)
            if found is None:
                return False
            rows = found
        mine = table[start : start + len(some)]
        rounded = mine.astype(to_numpy_dtype(target.config.dtype)).astype(np.float32)
        if not (np.array_equal(rounded, rows) or np.array_equal(mine, rows.astype(mine.dtype))):
            return False
    return True
