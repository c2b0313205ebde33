"""The drafter that a run starts with: at random, from its target, or loaded."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from dflash_jax.config import Config, DrafterSource, read_json
from dflash_jax.data import ConversationDataset
from dflash_jax.drafter import Drafter, check_drafter_fits
from dflash_jax.errors import ConfigError
from dflash_jax.hf import load_drafter
from dflash_jax.hf_drafter import config_from_json
from dflash_jax.hf_weights import model_folder
from dflash_jax.model_config import DFlashConfig, TargetConfig, loss_decay_gamma
from dflash_jax.sharding import mesh_of
from dflash_jax.targets import DenseTarget
from dflash_jax.train_step import Batch
from dflash_jax.warm_start import drafter_from_target

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


def draft_tokens(config: Config, target: TargetConfig, frequent: Callable[[int], tuple[int, ...]]) -> dict[str, Any]:
    """What a part of the vocabulary changes in a drafter's config. `frequent` names so many tokens. Raises `ConfigError`."""
    size = config.drafter.draft_vocab_size
    if not 0 <= size <= target.vocab_size:
        raise ConfigError(f"drafter.draft_vocab_size is {size}: give 0 (all) to {target.vocab_size}, the vocabulary")
    return {"draft_token_ids": frequent(size)} if size else {}


def path_to_load(config: Config) -> str | None:
    """Where the drafter is that the run starts from; None: it is made. Raises `ConfigError`."""
    if config.train.init == "loaded" and config.drafter.path is None:
        raise ConfigError("train.init loaded needs drafter.path: name the drafter to start from")
    return config.drafter.path if config.train.init == "loaded" else None


def described_drafter(config: Config, target: TargetConfig) -> DFlashConfig:
    """The drafter that training would start with; which tokens a part of the vocabulary has, only the text says."""
    few = draft_tokens(config, target, lambda size: tuple(range(size)))
    path = path_to_load(config)
    if path is None:
        return dataclasses.replace(drafter_config(config, target), **few)
    where = str(model_folder(path, ("config.json",)) / "config.json")
    loaded = config_from_json(read_json(where), where, target)
    check_drafter_fits(loaded, target)
    return continued(config.drafter, loaded, few)


def first_drafter(config: Config, target: DenseTarget, dataset: ConversationDataset) -> Drafter:
    """The drafter before the first step, as `train.init` says. Raises `ConfigError` when it cannot be what the run asks for."""
    few = draft_tokens(config, target.config, dataset.frequent_tokens)
    path = path_to_load(config)
    if path is not None:
        loaded = load_drafter(path, target, dtype="float32")
        return Drafter(continued(config.drafter, loaded.config, few), loaded.params)
    wanted = dataclasses.replace(drafter_config(config, target.config), **few)
    key = jax.random.key(config.train.seed)
    if config.train.init == "random":
        return Drafter.random(key, wanted, mesh_of(target.params))
    return drafter_from_target(key, wanted, target, sample_batch(dataset))


def continued(asked: DrafterSource, loaded: DFlashConfig, changes: dict[str, Any]) -> DFlashConfig:
    """The config of a loaded drafter that a run trains on. What training decides may change (its draft tokens only when asked for);
    a size or a part that the run asks for, not by default, and that the drafter does not have is refused (`ConfigError`)."""
    changes = changes | {"dtype": asked.dtype, "dropout": asked.dropout}
    if asked.loss_decay_gamma is not None:
        changes["loss_decay_gamma"] = asked.loss_decay_gamma
    overruled = {"mask_token_id"} if asked.learned_mask_embedding else set()  # as in `drafter_config`
    overruled |= {"num_target_sampled_layers"} if asked.target_layer_ids else set()
    for field in dataclasses.fields(asked):
        value = getattr(asked, field.name)
        if field.name in {"path", "draft_vocab_size", *changes, *overruled} or value in (field.default, []):
            continue
        has = getattr(loaded, field.name)
        if (tuple(value) if isinstance(value, list) else value) != has:
            raise ConfigError(
                f"drafter.{field.name} is {value}, but the drafter of drafter.path has {has}: leave it out, or change train.init"
            )
    return dataclasses.replace(loaded, **changes)


def sample_batch(dataset: ConversationDataset) -> Batch:
    """A few rows of the data, the same for every process: what a start measures its scales on."""
    raw: dict[str, Any] = dataset.sample()
    return Batch(*(raw[name][:_SAMPLE_ROWS] for name in ("tokens_BT", "loss_mask_BT", "length_B")))
