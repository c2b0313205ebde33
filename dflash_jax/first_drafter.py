"""The drafter that a run starts with: at random, from its target, or loaded."""

import dataclasses
from collections.abc import Set
from typing import Any

import jax

from dflash_jax.config import Config, DrafterSource, read_json
from dflash_jax.data import ConversationDataset
from dflash_jax.drafter import Drafter, check_drafter_fits
from dflash_jax.errors import CheckpointError, ConfigError, DFlashError
from dflash_jax.hf import load_drafter
from dflash_jax.hf_drafter import Parts, config_from_json, layout_of
from dflash_jax.hf_weights import model_folder
from dflash_jax.model_config import DFlashConfig, TargetConfig, loss_decay_gamma
from dflash_jax.sharding import mesh_of
from dflash_jax.targets import DenseTarget
from dflash_jax.train_step import Batch
from dflash_jax.warm_start import check_warm_start, drafter_from_target

_SAMPLE_ROWS = 8


def drafter_config(config: Config, target: TargetConfig) -> DFlashConfig:
    """The drafter that a run describes, sizes left open taken from the target. Raises `ConfigError` when they do not fit."""
    d = config.drafter
    made = DFlashConfig(
        target_hidden_dim=target.hidden_size,
        draft_hidden_dim=d.draft_hidden_dim or target.hidden_size,
        vocab_size=target.vocab_size,
        num_target_layers=target.num_layers,
        loss_decay_gamma=loss_decay_gamma(d.block_size) if d.loss_decay_gamma is None else d.loss_decay_gamma,
        num_heads=d.num_heads or target.num_heads,
        num_kv_heads=d.num_kv_heads or target.num_kv_heads,
        head_dim=d.head_dim or target.head_dim,
        mlp_dim=d.mlp_dim or target.mlp_dim,
        block_size=d.block_size,
        num_target_sampled_layers=d.num_target_sampled_layers,
        num_draft_layers=d.num_draft_layers,
        target_layer_ids=tuple(d.target_layer_ids),
        mask_token_id=None if d.learned_mask_embedding else d.mask_token_id,
        learned_mask_embedding=d.learned_mask_embedding,
        own_embedding=d.own_embedding,
        own_head=d.own_head,
        input_embedding_scale=1.0 if d.own_embedding else target.embedding_scale,
        rms_norm_eps=target.rms_norm_eps,
        rope=target.rope,
        max_position=target.max_position,
        temperature=d.temperature,
        dropout=d.dropout,
        dtype=d.dtype,
    )
    check_drafter_fits(made, target)
    return made


def first_config(config: Config, target: TargetConfig) -> DFlashConfig | None:
    """The config of the drafter before the first step, as far as neither text nor weights decide it: with
    `drafter.draft_vocab_size` it has so many tokens, but not yet the right ones.

    None for a drafter to be loaded whose tensors say what its config.json leaves out. Raises `ConfigError` when it cannot be what
    the run asks for.
    """
    size = config.drafter.draft_vocab_size
    if not 0 <= size <= target.vocab_size:
        raise ConfigError(f"drafter.draft_vocab_size is {size}: give 0 (all) to {target.vocab_size}, the vocabulary")
    few: dict[str, Any] = {"draft_token_ids": tuple(range(size))} if size else {}
    if config.train.init == "loaded":
        return _described(config.drafter, target, few)
    wanted = dataclasses.replace(drafter_config(config, target), **few)
    if config.train.init == "target":
        check_warm_start(wanted, target)
    return wanted


def described_drafter(config: Config, target: TargetConfig) -> DFlashConfig:
    """`first_config`, where no tensor may be needed. Raises `ConfigError`."""
    described = first_config(config, target)
    if described is None:
        raise ConfigError(
            f"{config.drafter.path}: its config.json leaves out what its tensors say: write it in z-lab's layout first "
            "(`python -m dflash_jax export --to zlab`)"
        )
    return described


def first_drafter(config: Config, target: DenseTarget, dataset: ConversationDataset) -> Drafter:
    """The drafter before the first step, as `train.init` says. Raises `ConfigError` when it cannot be what the run asks for."""
    size = config.drafter.draft_vocab_size
    few: dict[str, Any] = {"draft_token_ids": dataset.frequent_tokens(size)} if size else {}
    if config.train.init == "loaded":
        loaded = load_drafter(_path(config.drafter), target, dtype="float32")
        return Drafter(_as_asked(config.drafter, loaded.config, few), loaded.params)
    wanted = dataclasses.replace(drafter_config(config, target.config), **few)
    key = jax.random.key(config.train.seed)
    if config.train.init == "random":
        return Drafter.random(key, wanted, mesh_of(target.params))
    return drafter_from_target(key, wanted, target, sample_batch(dataset))


def _path(asked: DrafterSource) -> str:
    if asked.path is None:
        raise ConfigError("train.init loaded needs drafter.path: name the drafter to start from")
    return asked.path


def _described(asked: DrafterSource, target: TargetConfig, few: dict[str, Any]) -> DFlashConfig | None:
    """What config.json says of a drafter to be loaded, changed as asked; None where its tensors say more."""
    where = str(model_folder(_path(asked), ("config.json",)) / "config.json")
    values = read_json(where)
    try:
        if layout_of(values, where) != "zlab":
            return None
        loaded = _fitting(values, where, target)
    except CheckpointError:  # without the tensors; loading says what is wrong, if anything is
        return None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return _as_asked(asked, loaded, few, {"own_embedding", "own_head"})


def _fitting(values: dict[str, Any], where: str, target: TargetConfig) -> DFlashConfig:
    """A config.json whose drafter fits the target, be it with tables of its own (another width needs them), which config.json need
    not mention: its tensors tell."""
    try:
        loaded = config_from_json(values, where, target)
        check_drafter_fits(loaded, target)
    except ConfigError as error:
        try:
            loaded = config_from_json(values, where, target, Parts(own_embedding=True, own_head=True))
            check_drafter_fits(loaded, target)
        except DFlashError:
            raise error from None
    return loaded


def _as_asked(asked: DrafterSource, loaded: DFlashConfig, changes: dict[str, Any], unknown: Set[str] = frozenset()) -> DFlashConfig:
    """A loaded drafter as the run wants it. What training decides may change (its draft tokens only when asked for); a size or a
    part that the run asks for, not by default, and that the drafter does not have is refused, but for what is still `unknown`."""
    changes = changes | {"dtype": asked.dtype, "dropout": asked.dropout}
    if asked.loss_decay_gamma is not None:
        changes["loss_decay_gamma"] = asked.loss_decay_gamma
    overruled = {"mask_token_id"} if asked.learned_mask_embedding else set()  # as in `drafter_config`
    overruled |= {"num_target_sampled_layers"} if asked.target_layer_ids else set()
    for field in dataclasses.fields(asked):
        value = getattr(asked, field.name)
        if field.name in {"path", "draft_vocab_size", *changes, *overruled, *unknown} or value in (field.default, []):
            continue
        has = getattr(loaded, field.name)
        if (tuple(value) if isinstance(value, list) else value) != has:
            raise ConfigError(
                f"drafter.{field.name} is {value}, but the drafter of drafter.path has {has}: leave it out, or change train.init"
            )
    return dataclasses.replace(loaded, **changes)


def sample_batch(dataset: ConversationDataset) -> Batch:
    """A few rows of the data, the same for every process: what a start measures its scales on."""
    raw: dict[str, Any] = dataset.sample(_SAMPLE_ROWS)
    return Batch(*(raw[name] for name in ("tokens_BT", "loss_mask_BT", "length_B")))
