"""One training step: the same numbers however rows are split, nothing learned from nothing, and every kind of drafter trains."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from tiny_run import leaves, mesh

from dflash_jax.blocks import make_blocks, sample_anchors
from dflash_jax.config import Config, DataConfig, OptimConfig, TrainConfig
from dflash_jax.drafter import Drafter, Execution
from dflash_jax.errors import ConfigError
from dflash_jax.model_config import DFlashConfig, TargetConfig
from dflash_jax.optim import optimizer
from dflash_jax.targets import DenseTarget
from dflash_jax.train_step import (
    Batch,
    Guard,
    average,
    block_loss,
    init_state,
    make_train_step,
    place_batch,
    target_features,
    watch,
)

ROWS, LENGTH, VOCAB, MASK = 8, 16, 64, 3
TARGET = DenseTarget.random(jax.random.key(0), TargetConfig("llama", VOCAB, 32, 3, 4, 2, 8, 48, 1e-5, 64))
DRAFTER = DFlashConfig(
    32, 32, VOCAB, 3, 2.0, 4, 2, 8, 48, block_size=4, num_draft_layers=1, target_layer_ids=(0, 1), mask_token_id=MASK
)
CONFIG = Config(
    data=DataConfig(batch_size=ROWS), train=TrainConfig(anchors_per_row=3, anchor_chunk=2, logit_chunk=20, vocab_sample=0, seed=5)
)


def make_rows(seed=0):
    """Rows of different lengths with different numbers of supervised tokens; row 2 has none, so a mean of means is wrong."""
    random = np.random.default_rng(seed)
    lengths = np.asarray([16, 9, 12, 16, 5, 14, 10, 16], np.int32)
    slots = np.arange(LENGTH)[None]
    starts = np.asarray([4, 6, 99, 12, 2, 3, 7, 1])[:, None]
    return {
        "tokens_BT": np.where(slots < lengths[:, None], random.integers(4, VOCAB, (ROWS, LENGTH)), 0).astype(np.int32),
        "loss_mask_BT": (slots >= starts) & (slots < lengths[:, None]),
        "length_B": lengths,
    }


SGD = optax.sgd(1.0, momentum=0.5)
"""With it, what the first step takes from the parameters is the gradient; and it has moments to place."""


ONE_DEVICE = mesh()


def run_steps(rows, *, mesh=ONE_DEVICE, drafter=DRAFTER, tx=SGD, config=CONFIG, steps=1, taps=None, step=None):
    """Parameters before and after, and the metrics of each step."""
    fresh = Drafter.random(jax.random.key(1), drafter)
    state = init_state(fresh, tx, mesh)
    step = step or make_train_step(config, TARGET, fresh, tx, mesh)
    params = jax.device_put(TARGET.params, jax.sharding.NamedSharding(mesh, jax.P()))
    seen, places = [], [leaf.sharding for leaf in jax.tree.leaves(state)]
    for _ in range(steps):
        state, metrics = step(state, params, place_batch(rows, mesh), taps)
        seen.append(jax.device_get(metrics))
    for place, leaf in zip(places, jax.tree.leaves(state), strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim), f"gathered: {place.spec} became {leaf.sharding}"
    return leaves(fresh.params), leaves(state.params), seen


def change(**fields):
    """CONFIG with other fields of train or optim."""
    optim = {name: fields.pop(name) for name in ("accumulation", "ema", "skip_above") if name in fields}
    return dataclasses.replace(
        CONFIG, train=dataclasses.replace(CONFIG.train, **fields), optim=dataclasses.replace(CONFIG.optim, **optim)
    )


def assert_same(a, b, rtol=2e-4):
    """Gradients (before - after) and sums agree to float32 rounding."""
    for key, before in a[0].items():
        ours, theirs = before - a[1][key], b[0][key] - b[1][key]
        np.testing.assert_allclose(ours, theirs, atol=rtol * max(np.abs(ours).max(), 1e-6), rtol=0, err_msg=key)
    for name, ours, theirs in zip(a[2][0].sums._fields, a[2][0].sums, b[2][0].sums, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(a[2][0].grad_norm, b[2][0].grad_norm, rtol=1e-4)


def features(rows):
    return tapped(TARGET.params, place_batch(rows, mesh()))


tapped = jax.jit(lambda params, batch: target_features(TARGET, params, batch, (0, 1)))


@functools.cache
def one_device_step():
    return make_train_step(CONFIG, TARGET, Drafter.random(jax.random.key(1), DRAFTER), SGD, mesh())


@pytest.fixture(scope="module")
def plain():
    return run_steps(make_rows(), step=one_device_step())


# ---------------------------------------------------------------------------------------------------------------------
# Splitting rows changes nothing


def test_the_step_learns_something(plain):
    """What the comparisons below rest on: gradients of every parameter, and rows that count differently."""
    before, after, (metrics,) = plain
    assert all(np.abs(before[key] - after[key]).max() > 1e-5 for key in before)
    eligible = make_rows()["loss_mask_BT"][:, :-1] & make_rows()["loss_mask_BT"][:, 1:]
    assert metrics.sums.blocks == np.minimum(eligible.sum(1), 3).sum() == 18, "up to three anchors a row"
    assert 0 < metrics.sums.slots < metrics.sums.blocks * 3, "and some blocks hang over the end of their row"
    assert 2 < metrics.sums.loss < 8
    assert metrics.diagnostics == {}


SPLITS = {
    "8 devices": ((8, 1, 1), 1),
    "2x2x2, 2 micro": ((2, 2, 2), 2),
    "4 micro": ((1, 1, 1), 4),
}
MORE_SPLITS = {"2 replicas of 2 devices, layers recomputed": ((1, 2, 1, 2), 1)}


@pytest.mark.parametrize(
    ("sizes", "accumulation", "remat_layers"),
    [pytest.param(*split, False, id=name) for name, split in SPLITS.items()]
    + [pytest.param(*split, True, id=name, marks=pytest.mark.one_cell) for name, split in MORE_SPLITS.items()],
)
def test_devices_and_micro_batches_change_nothing(plain, sizes, accumulation, remat_layers):
    """Global sums over global counts, with rows that have different numbers of supervised slots; and all stays where it was."""
    config = change(accumulation=accumulation, remat_layers=remat_layers)
    assert_same(plain, run_steps(make_rows(), mesh=mesh(*sizes), config=config))


@pytest.mark.one_cell
def test_rows_are_independent_of_padding(plain):
    """What stands in the padding cannot matter."""
    rows = make_rows()
    padding = np.arange(LENGTH)[None] >= rows["length_B"][:, None]
    rows["tokens_BT"] = np.where(padding, 17, rows["tokens_BT"]).astype(np.int32)
    assert_same(plain, run_steps(rows, step=one_device_step()))


@pytest.mark.one_cell
def test_anchors_follow_the_step_and_the_seed():
    """Each step draws its own anchors; the same step draws the same."""
    _, _, twice = run_steps(make_rows(), steps=2, tx=SGD, step=one_device_step())
    again = run_steps(make_rows(), step=one_device_step())[2][0]
    assert float(twice[0].sums.weighted) == float(again.sums.weighted)
    state = init_state(Drafter.random(jax.random.key(1), DRAFTER), SGD, mesh())
    later = state._replace(step=jax.device_put(jnp.int32(1), state.step.sharding))  # one step later
    _, metrics = one_device_step()(later, TARGET.params, place_batch(make_rows(), mesh()), None)
    assert abs(float(metrics.sums.weighted) - float(again.sums.weighted)) > 1e-3


# ---------------------------------------------------------------------------------------------------------------------
# Nothing to learn from, and nothing for the target


@pytest.mark.one_cell
def test_no_valid_anchor_changes_nothing():
    """Zero loss, zero gradient, and no 0 / 0; a supervised token alone is no anchor either."""
    rows = make_rows()
    rows["loss_mask_BT"] = np.zeros_like(rows["loss_mask_BT"])
    rows["loss_mask_BT"][1, 5] = rows["loss_mask_BT"][1, 7] = True
    before, after, (metrics,) = run_steps(rows, step=one_device_step())
    for key, value in before.items():
        np.testing.assert_array_equal(after[key], value, err_msg=key)
    assert float(metrics.sums.weighted) == float(metrics.grad_norm) == float(metrics.sums.loss) == 0
    assert float(metrics.sums.blocks) == float(metrics.sums.slots) == 0


@pytest.mark.one_cell
def test_the_target_takes_no_gradient():
    batch = Batch(*(jnp.asarray(x) for x in make_rows().values()))
    drafter = Drafter.random(jax.random.key(1), DRAFTER)
    anchors_BA = jnp.full((ROWS, 1), 4, jnp.int32)
    blocks = make_blocks(batch.tokens_BT, batch.loss_mask_BT, anchors_BA, jnp.ones((ROWS, 1), bool), 4)

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def gradient(target_params, params):
        taps = target_features(TARGET, target_params, batch, DRAFTER.target_layer_ids)
        return block_loss(drafter, params, TARGET, target_params, taps, blocks, jax.random.key(0), CONFIG)[0].weighted

    of_target, of_drafter = gradient(TARGET.params, drafter.params)
    assert all(np.abs(x).max() > 0 for x in leaves(of_drafter).values())
    assert {float(np.abs(x).max()) for x in leaves(of_target).values()} == {0.0}


@pytest.mark.one_cell
def test_the_state_holds_no_target():
    state = init_state(Drafter.random(jax.random.key(1), DRAFTER), SGD, mesh())
    assert set(leaves(state.params)) == set(leaves(Drafter.random(jax.random.key(1), DRAFTER).params))


# ---------------------------------------------------------------------------------------------------------------------
# Features and vocabulary


@pytest.mark.one_cell
def test_features_may_be_given(plain):
    """Features computed before are those of the step, and bfloat16 ones change the gradient by no more than their rounding."""
    rows = make_rows()
    taps = features(rows)
    assert taps.shape == (ROWS, LENGTH, 2 * 32)
    step = make_train_step(CONFIG, TARGET, Drafter.random(jax.random.key(1), DRAFTER), SGD, mesh())
    assert_same(plain, run_steps(rows, taps=taps, step=step))
    rounded = run_steps(rows, taps=taps.astype(jnp.bfloat16).astype(jnp.float32), step=step)
    assert_same((plain[0], plain[1], rounded[2]), rounded, rtol=2e-2)
    assert float(rounded[2][0].sums.weighted) == pytest.approx(float(plain[2][0].sums.weighted), rel=1e-2)
    other = run_steps(rows, taps=jnp.zeros_like(taps), step=step)
    assert abs(other[2][0].sums.loss - plain[2][0].sums.loss) > 1e-3, "features matter"


@pytest.mark.one_cell
def test_features_are_the_targets_taps():
    """Layer outputs of the rows' tokens at positions 0.., padding unseen."""
    rows = make_rows()
    taps = features(rows)
    row, length = 1, int(rows["length_B"][1])
    alone = jnp.asarray(rows["tokens_BT"][row : row + 1, :length])
    _, want, _ = TARGET.extend(TARGET.params, alone, jnp.arange(length)[None], TARGET.init_cache(1, length), (0, 1))
    np.testing.assert_allclose(taps[row, :length], want[0], atol=1e-5)


@pytest.mark.one_cell
def test_the_whole_vocabulary_as_sample_is_exact(plain):
    assert_same(plain, run_steps(make_rows(), config=change(vocab_sample=VOCAB)))


# ---------------------------------------------------------------------------------------------------------------------
# Losses against the target's law

BLEND = change(loss="lk", slot_weights="dpace")


@pytest.mark.one_cell
def test_the_step_sees_the_targets_law_of_each_slot():
    """Sums of a step of 2 micro-batches on 8 devices are those of whole logits, by loops: slot k stands against what the target
    gives after position anchor + k - 1 of the data."""
    rows = make_rows()
    _, _, (metrics,) = run_steps(rows, mesh=mesh(2, 2, 2), config=dataclasses.replace(BLEND, optim=change(accumulation=2).optim))
    drafter, batch = Drafter.random(jax.random.key(1), DRAFTER), place_batch(rows, mesh())
    anchor_key, _ = jax.random.split(jax.random.fold_in(jax.random.key(5), 0))
    blocks = make_blocks(*batch[:2], *sample_anchors(anchor_key, batch.loss_mask_BT, 3), 4)

    @jax.jit
    def whole_logits(params, target_params):
        block_BAKD = drafter.embed_block(params, blocks.anchor_tokens_BA, 4, lambda tokens: TARGET.embed(target_params, tokens))
        taps_BTM = target_features(TARGET, target_params, batch, (0, 1))
        hidden_BAKD, _ = drafter.forward(params, taps_BTM, blocks.anchors_BA, block_BAKD, Execution())
        slots_1T = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32)[None], (ROWS, LENGTH))
        last_BTD, _, _ = TARGET.extend(target_params, batch.tokens_BT, slots_1T, TARGET.init_cache(ROWS, LENGTH))
        return TARGET.unembed(target_params, hidden_BAKD), TARGET.unembed(target_params, last_BTD)

    logits, of_target = (np.asarray(x) for x in whole_logits(drafter.params, TARGET.params))
    at_slots = np.zeros_like(logits)
    for b, a, k in np.ndindex(ROWS, 3, 4):
        at_slots[b, a, k] = of_target[b, min(int(blocks.anchors_BA[b, a]) + k - 1, LENGTH - 1)]
    wanted, correct_K, _ = reference.loss(logits, blocks.labels_BAK, blocks.supervised_BAK, 2.0, "dpace", "lk", at_slots)
    for name, value in dataclasses.asdict(wanted).items():
        np.testing.assert_allclose(getattr(metrics.sums, name), value, rtol=1e-4, err_msg=name)
    np.testing.assert_array_equal(metrics.sums.correct_K, correct_K)


@pytest.mark.one_cell
@pytest.mark.parametrize(("loss", "width", "needs"), [("kl", 64, 32), ("ce", 96, 0)])
def test_given_features_must_suit_the_loss(loss, width, needs):
    message = rf"features are {width} numbers a token, but train\.loss {loss} needs 64 of taps and {needs} of final hidden states"
    with pytest.raises(ConfigError, match=message):
        run_steps(make_rows(), config=change(loss=loss), taps=jnp.zeros((ROWS, LENGTH, width)))


# ---------------------------------------------------------------------------------------------------------------------
# Running mean and guard


def guarded_step():
    """A step over given features, and those with what the target has last: what a test of the guard can poison."""
    config = change(loss="lk", slot_weights="dpace", ema=0.9, skip_above=4.0)
    fresh, tx = Drafter.random(jax.random.key(1), DRAFTER), optimizer(OptimConfig(learning_rate=1e-2), 10)
    batch = place_batch(make_rows(), mesh())
    taps = jax.jit(lambda params: target_features(TARGET, params, batch, (0, 1), True))(TARGET.params)
    step = make_train_step(config, TARGET, fresh, tx, mesh())
    return init_state(fresh, tx, mesh(), ema=True), lambda state, taps: step(state, TARGET.params, batch, taps), taps


def with_usual_norm(state, norm):
    return state._replace(guard=state.guard._replace(usual_norm=jax.device_put(np.float32(norm), state.step.sharding)))


def on_host(tree):
    return jax.tree.map(np.array, tree)


@pytest.mark.one_cell
def test_bad_steps_change_nothing_and_are_counted():
    """Not a number in the features, or a gradient far larger than usual: parameters, moments and mean keep their bits, the step's
    number and the counts go on; good steps after it learn."""
    state, step, taps = guarded_step()
    state, metrics = step(state, taps)
    first = on_host(state)
    assert leaves(metrics.guard) == leaves(state.guard) == {".skipped": 0, ".in_a_row": 0, ".usual_norm": metrics.grad_norm}
    state, metrics = step(state, taps.at[3, 1, 2].set(jnp.nan))
    assert not np.isfinite(metrics.grad_norm)
    state, _ = step(with_usual_norm(state, first.guard.usual_norm / 100), taps)
    assert (int(state.step), int(state.guard.skipped), int(state.guard.in_a_row)) == (3, 2, 2)
    for name, value in leaves((state.params, state.opt_state, state.ema)).items():
        np.testing.assert_array_equal(value, leaves((first.params, first.opt_state, first.ema))[name], err_msg=name)
    state, metrics = step(with_usual_norm(state, first.guard.usual_norm), taps)
    assert (int(state.guard.skipped), int(state.guard.in_a_row)) == (2, 0)
    usual = 0.98 * float(first.guard.usual_norm) + 0.02 * float(metrics.grad_norm)
    assert float(state.guard.usual_norm) == pytest.approx(usual, rel=1e-5)
    now, before = leaves(state.params), leaves(first.params)
    assert all(np.abs(now[name] - before[name]).max() > 0 for name in now)
    # the second applied step: decay (1 + 1) / (10 + 1), below 0.9
    for name, mean in leaves(state.ema).items():
        np.testing.assert_allclose(mean, 2 / 11 * leaves(first.ema)[name] + 9 / 11 * now[name], rtol=1e-5, atol=1e-6)
    assert all(leaves(first.ema)[name].dtype == np.float32 for name in now)


@pytest.mark.one_cell
def test_what_the_guard_skips():
    guard = Guard(jnp.int32(5), jnp.int32(2), jnp.float32(1.0))
    unknown = guard._replace(usual_norm=jnp.float32(0.0))
    cases = [
        (guard, 1.0, 3.9, True), (guard, 1.0, 4.1, False), (guard, jnp.nan, 1.0, False), (guard, 1.0, jnp.inf, False),
        (unknown, 1.0, 1e6, True), (unknown, 1.0, jnp.nan, False),
    ]  # fmt: skip
    for before, loss, norm, wanted in cases:
        applied, after = watch(before, jnp.float32(loss), jnp.float32(norm), 4.0)
        assert bool(applied) == wanted
        assert (int(after.skipped), int(after.in_a_row)) == ((5, 0) if wanted else (6, 3))
        assert np.isfinite(after.usual_norm)
        assert wanted or float(after.usual_norm) == float(before.usual_norm)
    assert bool(watch(guard, jnp.float32(1.0), jnp.float32(1e6), 0.0)[0]), "off"


@pytest.mark.one_cell
def test_the_mean_follows_the_parameters():
    """Constant parameters are reached soon; after many steps the decay is the one given."""
    mean = {"w": jnp.zeros(2)}
    for step in range(20):
        mean = average(mean, {"w": jnp.ones(2)}, 0.999, jnp.int32(step))
    assert float(mean["w"][0]) > 0.99
    late = average({"w": jnp.zeros(2)}, {"w": jnp.ones(2)}, 0.999, jnp.int32(10**6))
    np.testing.assert_allclose(late["w"], 0.001, rtol=1e-3)


# ---------------------------------------------------------------------------------------------------------------------
# Kinds of drafters

KINDS = {
    "own embedding, head, mask and width, dropout": {
        "draft_hidden_dim": 24, "own_embedding": True, "own_head": True, "learned_mask_embedding": True, "mask_token_id": None,
        "dropout": 0.1,
    },
    "bfloat16, causal, window": {"dtype": "bfloat16", "causal": (True,), "sliding_window": (3,)},
}  # fmt: skip


@pytest.mark.one_cell
@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_every_drafter_trains(changes):
    """Every parameter moves, stays float32 and finite, and the loss of a repeated batch falls far."""
    drafter = dataclasses.replace(DRAFTER, **changes)
    tx = optimizer(OptimConfig(learning_rate=2e-2, warmup_ratio=0.0), 40)
    before, after, metrics = run_steps(make_rows(), drafter=drafter, tx=tx, steps=40, config=change(diagnostics=True))
    for key, value in before.items():
        assert after[key].dtype == np.float32
        assert np.isfinite(after[key]).all(), key
        assert np.abs(after[key] - value).max() > 1e-3, f"{key} has not moved"
    first, last = metrics[0].sums.loss, np.mean([m.sums.loss for m in metrics[-5:]])
    assert last < 0.5 * first, f"{first} to {last}"
    entropy, norm = (metrics[0].diagnostics[name] for name in ("attention_entropy_L", "context_feature_norm"))
    assert entropy.shape == (1,)
    assert 0 < entropy[0] < np.log(LENGTH + 4)
    fused = np.asarray(features(make_rows()), np.float64) @ before["['fuser']['fc']['kernel'].value"]
    anchor_key, _ = jax.random.split(jax.random.fold_in(jax.random.key(5), 0))
    anchors_BA, _ = sample_anchors(anchor_key, jnp.asarray(make_rows()["loss_mask_BT"]), 3)
    read = [fused[row, : max(anchors)] for row, anchors in enumerate(anchors_BA.tolist())]
    assert norm == pytest.approx(
        np.linalg.norm(np.concatenate(read), axis=-1).mean(), rel=1e-2 if drafter.dtype == "bfloat16" else 1e-5
    )
    if "causal" in changes:
        assert entropy[0] < np.log(3), "a window of 3 shows a slot at most 3 keys"


@pytest.mark.one_cell
def test_dropout_drops_while_training_only():
    """Other keys drop other things, the same key the same, and the expectation is kept."""
    rows = make_rows()
    taps = features(rows)
    blocks = make_blocks(*(jnp.asarray(rows[k]) for k in ("tokens_BT", "loss_mask_BT")), *_one_anchor(), 4)

    def loss(dropout, *seeds):
        drafter = Drafter.random(jax.random.key(1), dataclasses.replace(DRAFTER, dropout=dropout))

        @jax.jit
        def run(params, key):
            return block_loss(drafter, params, TARGET, TARGET.params, taps, blocks, key, CONFIG)[0].loss

        return [float(run(drafter.params, jax.random.key(seed))) for seed in seeds]

    first, again, other = loss(0.3, 0, 0, 1)
    plain, plain_other = loss(0.0, 0, 1)
    assert first == again
    assert plain == plain_other
    assert min(abs(first - other), abs(first - plain)) > 1e-3


def _one_anchor():
    return jnp.full((ROWS, 1), 4, jnp.int32), jnp.ones((ROWS, 1), bool)


# ---------------------------------------------------------------------------------------------------------------------
# Sizes that do not fit


@pytest.mark.one_cell
@pytest.mark.parametrize(
    ("sizes", "fields", "message"),
    [
        ((1, 1, 1), {"accumulation": 3}, r"data\.batch_size 8 is not a multiple of optim\.accumulation 3 x 1 devices"),
        ((2, 2, 2), {"accumulation": 4}, r"batch_size 8 is not a multiple of optim\.accumulation 4 x 4 devices that hold rows"),
        ((1, 1, 1), {"accumulation": 0}, r"optim\.accumulation 0"),
        ((1, 1, 1), {"vocab_sample": VOCAB + 1}, r"train\.vocab_sample is 65: give 0 \(all\), or from 64 .* to 64"),
        ((1, 1, 1), {"vocab_sample": 17, "accumulation": 4}, r"vocab_sample is 17: .* from 18"),
        ((1, 1, 1), {"vocab_sample": VOCAB, "loss": "ce_argmax"}, r"train\.loss ce_argmax takes its tokens .* set it to 0, or"),
    ],
)
def test_refused_sizes(sizes, fields, message):
    drafter = Drafter.random(jax.random.key(1), DRAFTER)
    with pytest.raises(ConfigError, match=message):
        make_train_step(change(**fields), TARGET, drafter, SGD, mesh(*sizes))
