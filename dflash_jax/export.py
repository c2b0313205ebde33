"""Export: a drafter's folder as other engines read it, with a README of commands and of what each engine cannot do with it."""

import dataclasses
import json
import shlex
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from dflash_jax.drafter import Drafter
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.hf import EMBEDDED_NAME, drafter_arrays, write_drafter
from dflash_jax.hf_config import FAMILIES
from dflash_jax.hf_drafter import config_to_json, config_to_speculators, differences
from dflash_jax.hf_parts import HEAD, target_rows
from dflash_jax.hf_weights import to_numpy_dtype
from dflash_jax.model_config import DFlashConfig, TargetConfig
from dflash_jax.targets import Target

FORMATS = ("zlab", "speculators")
HEADING = "# A DFlash drafter for "


def export_drafter(drafter: Drafter, target: Target, to: str, folder: str | Path, target_name: str) -> None:
    """Write a drafter for other engines, in bfloat16: all or nothing, replacing an earlier drafter of that folder.

    Args:
        to: `zlab` (vLLM, SGLang, tpu-inference, z-lab's class) or `speculators` (vLLM and the package speculators 0.9.0).
        target_name: what the README and speculators' config call the target: a hub id, or a folder that other engines load.
    Raises:
        ConfigError: an engine would silently misread the drafter, or the folder's name hides what it is.
        CheckpointError: the folder holds something else than a drafter, or cannot be written.
    """
    folder = Path(folder).expanduser().resolve()
    if Path(target_name).expanduser().is_dir():
        target_name = str(Path(target_name).expanduser().resolve())
    if target_name == EMBEDDED_NAME or target_name.endswith(".gguf"):
        raise ConfigError(f"other engines cannot load the target as {target_name}: give its hub id or folder with --target_name")
    page = folder / "README.md"
    if page.is_file() and not page.read_text(encoding="utf-8", errors="replace").startswith(HEADING):
        raise CheckpointError(f"{page} is not of an earlier export: move it, or give another folder")
    arrays = drafter_arrays(drafter, "bfloat16")
    broken = [name for name, array in arrays.items() if not np.isfinite(array.astype(np.float32)).all()]
    if broken:
        raise CheckpointError(f"the drafter is not finite in bfloat16: {', '.join(broken[:4])}. Train it again, or fetch it again")
    if to == "zlab":
        if differences(drafter.config):
            raise ConfigError(
                f"other engines cannot load this drafter: they would silently do without {'; '.join(differences(drafter.config))}"
                + (". Export --to speculators, or give --all_tokens if it learned all" if drafter.config.draft_token_ids else "")
                + ". Train one without it, or keep the folder for dflash_jax, which loads it as it is"
            )
        name = folder.name
        if "dflash" not in name.lower():
            raise ConfigError(
                f"{folder}: vLLM knows a DFlash drafter by 'dflash' in its path. Call the folder {name}-DFlash, for example"
            )
        config = config_to_json(drafter.config, "bfloat16")
    elif to == "speculators":
        config = config_to_speculators(_for_speculators(drafter.config), "bfloat16", target_name, _model_class(target.config))
        if drafter.config.draft_token_ids:
            arrays |= _vocabulary_arrays(drafter, target)
    else:
        raise ConfigError(f"--to {to!r} is not known: use one of {', '.join(FORMATS)}")
    write_drafter(folder, config, arrays, {"README.md": readme(drafter.config, target.config, to, str(folder), target_name)})


def _for_speculators(config: DFlashConfig) -> DFlashConfig:
    """The config when speculators' layout can say it: a head only together with a draft vocabulary."""
    kept = dataclasses.replace(config, own_head=config.own_head and not config.draft_token_ids, draft_token_ids=())
    if differences(kept):
        raise ConfigError(
            f"speculators cannot load this drafter: it would silently do without {'; '.join(differences(kept))}. "
            "Train one without it, or keep the folder for dflash_jax, which loads it as it is"
        )
    return config


def _vocabulary_arrays(drafter: Drafter, target: Target) -> dict[str, np.ndarray]:
    """The drafted rows of the head, its own or the target's, and the tables d2t and t2d of speculators 0.9.0."""
    ids = np.asarray(drafter.config.draft_token_ids)
    if drafter.config.own_head:
        rows = np.asarray(jnp.take(drafter.params["lm_head"][...], jnp.asarray(ids, jnp.int32), axis=0))
    else:
        found = target_rows(target, ids)
        if found is None:
            raise ConfigError("this target does not show its head (head_kernel), whose drafted rows speculators' layout holds")
        rows = found
    drafted = np.zeros(drafter.config.vocab_size, bool)
    drafted[ids] = True
    return {HEAD: rows.astype(to_numpy_dtype("bfloat16")), "d2t": ids - np.arange(len(ids)), "t2d": drafted}


def _model_class(target: TargetConfig) -> str:
    family = FAMILIES.get(target.model_type)
    if family is None:
        raise ConfigError(
            f"speculators' layout names the target's class, and {target.model_type!r} has none here: export --to zlab"
        )
    return family.architecture


def readme(config: DFlashConfig, target: TargetConfig, to: str, folder: str, target_name: str) -> str:
    """README.md of an exported folder: commands that start each engine, and what it cannot do with this drafter."""
    drafts = config.block_size - 1
    speculative = json.dumps({"method": "dflash", "model": folder, "num_speculative_tokens": drafts})
    vllm = f"vllm serve {shlex.quote(target_name)} --speculative-config {shlex.quote(speculative)}"
    sglang = (
        f"python -m sglang.launch_server --model-path {shlex.quote(target_name)} --speculative-algorithm DFLASH "
        f"--speculative-draft-model-path {shlex.quote(folder)} --speculative-num-draft-tokens {config.block_size}"
    )
    if to == "zlab":
        commands = {"vLLM": vllm, "SGLang": sglang, "tpu-inference (vLLM on a TPU host)": vllm}
    else:
        commands = {"vLLM": f"vllm serve {shlex.quote(folder)}", "vLLM, with the target named": vllm}
    layout = "z-lab's layout" if to == "zlab" else "the layout of speculators"
    lines = [
        f"{HEADING}{target_name}",
        "",
        f"Exported by dflash_jax in {layout}, bfloat16. It proposes {drafts} tokens a pass (block size {config.block_size}:",
        f"one known token and {drafts} drafted ones). The target checks every token, so what an engine cannot do with this drafter",
        "costs speed and never changes the text.",
        "",
    ]
    for name, command in commands.items():
        lines += [f"## {name}", "", "```sh", command, "```", ""]
    lines += ["## What to expect of each engine", "", *(f"- {note}" for note in notes(config, target, to)), ""]
    return "\n".join(lines)


def notes(config: DFlashConfig, target: TargetConfig, to: str) -> list[str]:
    """What each engine makes of this drafter, as far as its source tells (docs/formats.md has the versions)."""
    sliding, bidirectional = any(config.sliding_window), not any(config.causal)
    found = [
        f"vLLM does not read the block size: num_speculative_tokens must be {config.block_size - 1}; more would ask for slots that "
        "were never trained."
    ]
    if to == "speculators":
        found.append("SGLang and tpu-inference read z-lab's layout: export once more with --to zlab.")
        if sliding and bidirectional:
            found.append("vLLM does not read sliding_window_non_causal: it drafts with causal sliding layers and accepts less.")
        if sliding:
            found.append("Training on with speculators cuts the context at the window before the anchor, the same for every slot.")
    else:
        if config.input_embedding_scale != 1.0:
            found.append("vLLM's class reads the target's embedding rows without input_embedding_scale: it drafts badly there.")
        if sliding:
            found.append(
                "tpu-inference has no sliding windows: it reads the whole context in every layer and accepts less in texts longer "
                "than the window."
            )
        if sliding and not all(config.sliding_window):
            found.append("vLLM needs its V2 model runner for layers of two kinds (full and sliding).")
        if any(config.causal):
            found.append("tpu-inference drafts bidirectionally in every layer: it accepts less with these causal layers.")
        same = dataclasses.replace(config.rope, partial_rotary_factor=1.0) == dataclasses.replace(
            target.rope, partial_rotary_factor=1.0
        )
        found.append(
            "tpu-inference takes rope theta and scaling from the target's config.json: "
            + ("they are the same here." if same else "they differ from this drafter's, so it drafts badly there.")
        )
        if sliding and bidirectional:
            found.append("The converter of speculators does not read is_causal: export with --to speculators instead.")
    if config.rope.partial_rotary_factor != 1.0:
        found.append(
            "The classes of z-lab and of speculators rotate whole heads and ignore partial_rotary_factor: they draft badly with it."
        )
    return found
