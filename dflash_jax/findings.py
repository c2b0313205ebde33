"""Findings of the doctor, and those that need no forward pass: what a drafter's config.json states against its target."""

import contextlib
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from dflash_jax.config import read_json
from dflash_jax.errors import DFlashError
from dflash_jax.hf_drafter import layout_of, read_attention
from dflash_jax.hf_fields import read_rope
from dflash_jax.hf_layouts import COMPOUNDS, FIELDS, Sections
from dflash_jax.hf_weights import model_folder
from dflash_jax.model_config import RopeConfig
from dflash_jax.targets import Target
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.wiring import COPY_ROPE, PROMPTS

UNREADABLE: Any = object()
TRAINED_MASK = "set mask_token_id to the trained one, an id that the target never writes"


class Finding(NamedTuple):
    """One line of the report."""

    level: Literal["ok", "WARN", "FAIL"]
    check: str
    seen: str
    mend: str = ""

    def __str__(self) -> str:
        return f"{self.level:<5}{self.check}: {self.seen}" + (f" -> {self.mend}" if self.mend else "")


def unless(wrong: str, check: str, well: str, mend: str, level: Literal["WARN", "FAIL"] = "FAIL") -> Finding:
    """What is wrong with its mend, or else what is well."""
    return Finding(level, check, wrong, mend) if wrong else Finding("ok", check, well)


def stated(drafter_path: str) -> Any:
    """What a refused config.json still shows, under `DFlashConfig`'s names: None where a field cannot be read or is absent, and
    None for all when the file cannot be read or is in no known layout. A mask that cannot be read is `UNREADABLE`.
    """
    try:
        file = model_folder(drafter_path) / "config.json"
        values = read_json(file)
        sections = Sections(values, str(file), layout_of(values, str(file)))
    except DFlashError:
        return None
    found: dict[str, Any] = {field.name: None for field in FIELDS} | {"mask_token_id": UNREADABLE, "sliding_window": ()}
    for field in FIELDS:
        if field.kind not in COMPOUNDS:
            with contextlib.suppress(DFlashError):
                found[field.name] = sections.read(field)
    if found["target_hidden_dim"] is None:
        found["target_hidden_dim"] = found["draft_hidden_dim"]
    with contextlib.suppress(DFlashError):
        found["rope"] = read_rope(sections.body)
    if found["num_draft_layers"] is not None:
        with contextlib.suppress(DFlashError):
            found |= read_attention(sections, found["num_draft_layers"])
    return SimpleNamespace(**found)


def stated_checks(d: Any, target: Target) -> Iterator[Finding]:
    """A drafter's config (a `DFlashConfig`, or what `stated` found) against its target."""
    c = target.config
    for check, has, wants in (
        ("width", d.target_hidden_dim, c.hidden_size),
        ("vocabulary", d.vocab_size, c.vocab_size),
        ("layers", d.num_target_layers, c.num_layers),
    ):
        if has == wants:
            yield Finding("ok", check, f"{has}, as the target has")
        elif has is not None:
            yield Finding(
                "FAIL", check, f"made for a target with {has}, but this has {wants}", "load the target it was trained for"
            )
    if d.target_layer_ids is not None:
        yield _taps(d.target_layer_ids, c.num_layers)
    if not d.learned_mask_embedding and d.mask_token_id is not UNREADABLE:
        yield _mask(d.mask_token_id, target)
    if d.rope is not None:
        pairs = [(field.name, getattr(d.rope, field.name), getattr(c.rope, field.name)) for field in dataclasses.fields(RopeConfig)]
        differ = ", ".join(f"{name} {has} (target {wants})" for name, has, wants in pairs if has != wants)
        same = f"theta {d.rope.theta:g}, {d.rope.type}, as the target has"
        yield unless(differ, "rope", same, f"unless it was trained so (see wiring), {COPY_ROPE}", "WARN")
    windows = [window for window in d.sliding_window if window is not None]
    if windows and d.block_size is not None and min(windows) < d.block_size:
        seen = f"sliding_window {min(windows)} is shorter than a block of {d.block_size}"
        yield Finding("FAIL", "window", seen, "set sliding_window to the trained one, in tokens")
        return
    short = d.max_position is not None and d.max_position < c.max_position
    seen = f"max_position_embeddings is {d.max_position}, the target's {c.max_position}" if short else ""
    whole = (
        f"{min(windows)} tokens; a wrong one shows only on longer --prompts" if windows else "every layer sees the whole context"
    )
    yield unless(seen, "window", whole, "expect less acceptance past it, or correct it", "WARN")


def _taps(ids: tuple[int, ...], num_layers: int) -> Finding:
    mend = "set target_layer_ids to the layers it was trained with, 0-based"
    if not all(0 <= i < num_layers for i in ids):
        return Finding("FAIL", "taps", f"{list(ids)} do not all lie in 0..{num_layers - 1}, the target's layers", mend)
    if len(set(ids)) < len(ids):
        return Finding("FAIL", "taps", f"{list(ids)} name a layer twice", mend)
    if max(ids) == num_layers - 1:
        return Finding("FAIL", "taps", f"{list(ids)} hold the last layer: some engines give its output after the final norm", mend)
    unsorted = "" if list(ids) == sorted(ids) else f"{list(ids)} are not ascending, as those of published drafters are"
    return unless(unsorted, "taps", f"{list(ids)} of {num_layers} layers, ascending", mend, "WARN")


def _mask(mask: int | None, target: Target) -> Finding:
    c = target.config
    if mask is None:
        return Finding("FAIL", "mask", "mask_token_id is missing", TRAINED_MASK)
    if not 0 <= mask < c.vocab_size:
        return Finding("FAIL", "mask", f"{mask} is outside the {c.vocab_size} embedding rows", TRAINED_MASK)
    text = "" if target.tokenizer is None else f" {target.tokenizer.decode([mask], skip_special=False)!r}"
    used = mask in c.stop_token_ids or mask == c.pad_token_id
    wrong = f"{mask}{text} is a stop or pad token of the target" if used else ""
    return unless(wrong, "mask", f"{mask}{text}: in range, neither stop nor pad", TRAINED_MASK)


def tokenizer_check(target: Target, drafter_path: str) -> Finding:
    """The target's tokenizer against its embedding, and against the tokenizer in the drafter's folder if there is one."""
    if target.tokenizer is None:
        return Finding("WARN", "tokenizer", "the target has none, so the prompts are random token ids", "add its tokenizer.json")
    tokens, rows = target.tokenizer.vocab_size, target.config.vocab_size
    if tokens > rows:
        return Finding(
            "FAIL", "tokenizer", f"{tokens} tokens, but {rows} embedding rows", "put the target's own tokenizer beside it"
        )
    own = None
    with contextlib.suppress(DFlashError):
        own = Tokenizer.from_folder(model_folder(drafter_path))
    differs = own is not None and any(own.encode(text) != target.tokenizer.encode(text) for text in PROMPTS)
    wrong = "the drafter's folder has one that gives other ids than the target's" if differs else ""
    return unless(wrong, "tokenizer", f"{tokens} tokens for {rows} embedding rows", "load the target it was trained for")
