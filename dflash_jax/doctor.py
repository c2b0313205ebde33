"""Why a drafter accepts little: `python -m dflash_jax doctor --target T --drafter D`.

Wrong taps, rotary positions or windows fit every shape and raise nothing: they only cost acceptance. So what the config states is
compared with the target first, and then the drafter is tried on the target's own answers, wired as given and in ways that are
easily confused with it (`wiring`). Another wiring is named when it accepts more and a paired test is clear about it.
"""

from collections.abc import Iterator, Sequence

import jax
import numpy as np

from dflash_jax.drafter import Drafter
from dflash_jax.errors import DFlashError, PromptError
from dflash_jax.findings import TRAINED_MASK, Finding, stated, stated_checks, tokenizer_check, unless
from dflash_jax.hf import load_drafter, load_target
from dflash_jax.model_config import DFlashConfig
from dflash_jax.prompts import Prompt
from dflash_jax.targets import Target
from dflash_jax.wiring import Sample, Trials, Wiring, answer, other_wirings, tap_features

CLEAR_Z = 4.0
"""of the paired test; a handful of wirings is tried, so chance reaches it in about one healthy drafter of 5,000"""
FEW_GROUPS = 16
"""fewer blocks than this many block sizes judge nothing"""
FLOAT16_MAX = 65504.0
SAME, OUT_OF_LINE = 1e-3, 1e3
"""relative difference below which features are equal; ratio of sizes between taps that no sound target is known to reach"""
FLAT, LOW = 0.05, 0.25
"""share of blocks in which slot 1 stands: next to none, and too few to pay"""
DECAY, FEW_REACHED = 0.5, 50
"""of the blocks in which all slots before it stand, if these are not few, a later slot should stand in this share of slot 1's"""
FEW_DRAFTED = 0.75
"""share of the answers' tokens that the drafter can draft"""


def doctor(target_path: str, drafter_path: str, dtype: str = "bfloat16", prompts: Sequence[Prompt] = ()) -> int:
    """Print one line a check and a summary. Returns 1 when anything was found, a failure or a warning.

    A failure is a mistake, or acceptance too low to pay. A warning is unusual, but may be right for this drafter.
    """
    found: dict[str, list[str]] = {"FAIL": [], "WARN": [], "ok": []}
    for finding in examine(target_path, drafter_path, dtype, prompts):
        found[finding.level].append(finding.check)
        print(finding, flush=True)
    parts = [f"{len(found[level])} {level} ({', '.join(found[level])})" for level in ("FAIL", "WARN") if found[level]]
    print(f"{sum(map(len, found.values()))} checks: {'; '.join(parts) or 'nothing found'}")
    return int(bool(found["FAIL"] or found["WARN"]))


def examine(target_path: str, drafter_path: str, dtype: str, prompts: Sequence[Prompt] = ()) -> Iterator[Finding]:
    """All checks of two checkpoints. What loading refuses is a finding too, after what config.json shows by itself."""
    try:
        target = load_target(target_path, dtype)
    except DFlashError as error:
        yield Finding("FAIL", "target", str(error))
        return
    c = target.config
    yield Finding("ok", "target", f"{c.model_type}, {c.num_layers} layers of width {c.hidden_size}, {c.vocab_size} tokens, {dtype}")
    refusal, drafter = "", None
    try:
        drafter = load_drafter(drafter_path, target)
    except DFlashError as error:
        refusal = str(error)
    config = drafter.config if drafter is not None else stated(drafter_path)
    if config is not None:
        yield from stated_checks(config, target)
    yield tokenizer_check(target, drafter_path)
    if drafter is None:
        yield Finding("FAIL", "drafter", refusal)
        return
    d = drafter.config
    yield Finding("ok", "drafter", f"{d.num_draft_layers} layers of width {d.draft_hidden_dim}, blocks of {d.block_size}")
    try:
        sample = answer(target, prompts, d.mask_token_id)
    except PromptError as error:
        yield Finding("FAIL", "sample", str(error))
        return
    yield from measured_checks(target, drafter, sample)


def measured_checks(target: Target, drafter: Drafter, sample: Sample) -> Iterator[Finding]:
    """Weights, features and acceptance on the sample, and whether another wiring would accept more."""
    d = drafter.config
    wirings = other_wirings(d, target.config, sample.tokens_BT.shape[1])
    layers = {i for ids in (d.target_layer_ids, *(wiring.taps for wiring in wirings)) for i in ids}
    taps = tap_features(target, sample, tuple(sorted(layers)))
    first = [weight_check(drafter), *text_checks(d, sample)]
    first += feature_checks({i: taps[i] for i in d.target_layer_ids}, sample.length_B)
    yield from first
    if any(finding.level == "FAIL" and finding.check in ("weights", "features") for finding in first):
        return  # what follows would only say it again
    trials = Trials(target, drafter, sample, taps)
    if not trials.given.finite:
        yield Finding(
            "FAIL", "activations", "the drafter's hidden states are not finite", "try float32, or fetch its weights again"
        )
        return
    blocks = int(trials.valid_BA.sum())
    if blocks < FEW_GROUPS * d.block_size:
        seen = f"{blocks} blocks are too few to judge: the target's answers are short"
        yield Finding("WARN", "acceptance", seen, "give more or other --prompts")
        return
    yield acceptance_check(trials.given.accepted_BA, trials.supervised_BAK)
    yield reading_check(trials)
    yield wiring_check(trials, wirings)


def weight_check(drafter: Drafter) -> Finding:
    """Whether the parameters survived their dtypes: a float16 or bfloat16 copy of a large number is infinite."""
    arrays = {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(drafter.params)}
    broken = [name for name, x in arrays.items() if not np.isfinite(x).all()]
    if broken:
        return Finding("FAIL", "weights", f"not finite: {', '.join(broken)}", "convert or fetch the checkpoint again, in bfloat16")
    largest = max(float(np.abs(x).max()) for x in arrays.values())
    wrong = f"the largest is {largest:.3g}, infinite in float16" if largest > FLOAT16_MAX else ""
    return unless(wrong, "weights", f"finite, the largest is {largest:.3g}", "keep and serve it in bfloat16", "WARN")


def text_checks(d: DFlashConfig, sample: Sample) -> Iterator[Finding]:
    """The mask token and the draft vocabulary against what the target writes."""
    answers, (prompts, longest) = sample.answers(), sample.tokens_BT.shape
    yield Finding("ok", "sample", f"{prompts} prompts, {len(answers)} answer tokens, at most {longest} tokens together")
    if d.mask_token_id is not None:
        count = int((answers == d.mask_token_id).sum())
        wrong = f"the target wrote the mask token {d.mask_token_id} {count} times" if count else ""
        yield unless(wrong, "mask in text", "the target never wrote the mask token", TRAINED_MASK)
    if d.draft_token_ids:
        share = float(np.isin(answers, d.draft_token_ids).mean())
        seen = f"{share:.0%} of the answers' tokens are among the {len(d.draft_token_ids)} that it drafts"
        yield unless(seen if share < FEW_DRAFTED else "", "draft vocabulary", seen, "train with a larger draft_vocab_size", "WARN")


def feature_checks(taps: dict[int, np.ndarray], length_B: np.ndarray) -> Iterator[Finding]:
    """Whether the features [B, T, D] of each tap are finite, of usual size, and differ between positions and between taps."""
    real_BT = np.arange(next(iter(taps.values())).shape[1]) < length_B[:, None]
    real_BT[:, 0] = False  # where attention rests: in many targets its features are huge and the same in every text
    rows = {i: x_BTD[real_BT] for i, x_BTD in taps.items()}
    mend = "check the target's weights, and what its extend gives as taps"
    broken = [i for i, x_ND in rows.items() if not np.isfinite(x_ND).all()]
    if broken:
        yield Finding("FAIL", "features", f"taps {broken} are not finite", f"try float32; {mend}")
        return

    def size(x_ND: np.ndarray) -> float:
        return float(np.median(np.sqrt(np.square(x_ND).mean(-1))))  # a median: single positions are huge in many targets

    sizes = {i: size(x_ND) for i, x_ND in rows.items()}
    still = [i for i, x_ND in rows.items() if size(x_ND - x_ND.mean(0)) <= SAME * sizes[i]]
    equal = [(i, j) for i in rows for j in rows if i < j and size(rows[i] - rows[j]) <= SAME * sizes[i]]
    wrong = f"taps {still} are the same at every position" if still else f"taps {equal} are equal" if equal else ""
    yield unless(wrong, "features", "they vary across positions and across taps", mend)
    middle, largest = float(np.median(list(sizes.values()))), max(float(np.abs(x_ND).max()) for x_ND in rows.values())
    seen = f"taps are of size {' '.join(f'{x:.3g}' for x in sizes.values())}, the largest value is {largest:.3g}"
    odd = [i for i, x in sizes.items() if not middle / OUT_OF_LINE <= x <= middle * OUT_OF_LINE]
    wrong = f"{seen}: {odd} out of line" if odd else f"{seen}, infinite in float16" if largest > FLOAT16_MAX else ""
    yield unless(wrong, "feature size", seen, mend if odd else "serve in bfloat16", "WARN")


def acceptance_check(accepted_BA: np.ndarray, supervised_BAK: np.ndarray) -> Finding:
    """Share of blocks in which slot 1, 2, ... stands, and what the shape of these says. Slots past an answer's end do not count."""
    stands_BAJ = accepted_BA[..., None] >= np.arange(1, supervised_BAK.shape[-1])
    stands_J = stands_BAJ.sum((0, 1))
    share_J = stands_J / np.maximum(supervised_BAK[..., 1:].sum((0, 1)), 1)
    seen = f"slots {' '.join(f'{x:.2f}' for x in share_J)}"
    reached_J = (supervised_BAK[..., 2:] & stands_BAJ[..., :-1]).sum((0, 1))
    fallen = [k for k, n in enumerate(reached_J, start=2) if n >= FEW_REACHED and stands_J[k - 1] / n < DECAY * share_J[0]]
    mend = "see the other lines; if they are fine, train more"
    if share_J[0] < FLAT:
        return Finding(
            "FAIL", "acceptance", f"flat zero, {seen}", f"taps, mask, rope or the target are wrong, or untrained: {mend}"
        )
    if share_J[0] < LOW:
        return Finding("FAIL", "acceptance", f"first slot low, {seen}", mend)
    wrong = f"decays too fast at slot {fallen[0]}, {seen}" if fallen else ""
    return unless(wrong, "acceptance", seen, f"slots differ by position alone, so check rope, is_causal and the mask: {mend}")


def reading_check(trials: Trials) -> Finding:
    """Whether the drafter gains from its features: they are replaced by their mean."""
    constant = trials.run(trials.drafter.config, trials.mean_features())
    means = trials.mean(trials.given), trials.mean(constant)
    seen = f"{means[0]:.2f} accepted tokens a block, {means[1]:.2f} with the same features everywhere"
    wrong = "" if means[0] > means[1] and trials.compare(constant, trials.given) > CLEAR_Z else seen
    return unless(wrong, "features read", seen, "they are useless as wired: see the other lines; if they are fine, train more")


def wiring_check(trials: Trials, wirings: Sequence[Wiring]) -> Finding:
    """Whether another wiring accepts more, and which does most."""
    given, tried, better = trials.mean(trials.given), [], []
    for wiring in wirings:
        other = trials.run(wiring.config, trials.side_by_side(wiring.taps))
        accepted, z = trials.mean(other), trials.compare(trials.given, other)
        tried.append(f"{wiring.name} {accepted:.2f}")
        if z > CLEAR_Z and accepted > given:
            better.append((accepted, z, wiring.name, wiring.mend))
    if not better:
        return Finding("ok", "wiring", f"{given:.2f} accepted tokens a block as given; not clearly more with {', '.join(tried)}")
    accepted, z, name, mend = max(better)
    return Finding("FAIL", "wiring", f"{given:.2f} accepted tokens a block as given, {accepted:.2f} with {name} (z {z:.1f})", mend)
