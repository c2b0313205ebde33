"""z-lab's own classes (package dflash 0.1.0) at toy sizes: random drafters of every kind, and how its decoder drafts with them."""

import contextlib
import functools
import warnings
from types import SimpleNamespace

import numpy as np
from safetensors.numpy import load_file

from dflash_jax.drafter import Drafter
from dflash_jax.hf import save_drafter

VOCAB, MASK, TARGET_LAYERS = 61, 60, 9
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 3}
KINDS = {
    "plain": {},
    "yarn": {"rope_parameters": YARN | {"beta_fast": 24.0, "attention_factor": 1.1}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}},
    "llama3, biases": {"rope_parameters": LLAMA3, "attention_bias": True},
    "sliding layers causal": SLIDING,
    "sliding, none causal": SLIDING | {"is_causal": False},
    "sliding, all causal, yarn": SLIDING | {"is_causal": True, "rope_parameters": YARN, "sliding_window": 3},
    "full, causal": {"is_causal": True},
}


def draw_cases(seed=0):
    """One drafter a kind, as fields of its config. Each list below holds its corners; the seed pairs them with one another."""
    random = np.random.default_rng(seed)
    columns = {
        "num_hidden_layers": [1, 1, 2, 2, 3, 3, 4, 5],
        "taps": [1, 1, 2, 3, 4, 5, 6, 8],
        "block_size": [2, 3, 4, 5, 6, 8, 11, 16],
        "hidden_size": [8, 16, 24, 24, 32, 32, 32, 40],
        "heads": [(1, 1), (2, 1), (4, 1), (4, 2), (4, 4), (6, 2), (6, 3), (8, 2)],
        "head_dim": [6, 8, 8, 10, 12, 16, 20, 24],
        "intermediate_size": [5, 16, 24, 32, 40, 40, 56, 64],
    }
    shuffled = [random.permutation(len(KINDS)) for _ in columns]
    cases = {}
    for i, (kind, changes) in enumerate(KINDS.items()):
        case = {name: values[order[i]] for (name, values), order in zip(columns.items(), shuffled, strict=True)}
        heads, kv_heads = case.pop("heads")
        # in no order: z-lab's decoder reads whatever the list says; we refuse the last layer
        taps = random.choice(TARGET_LAYERS - 1, case.pop("taps"), replace=False).tolist()
        case |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, **changes}
        case["layer_types"] = changes.get("layer_types", ["full_attention"] * 6)[: case["num_hidden_layers"]]
        cases[kind] = case | {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": taps}}
    return cases


@contextlib.contextmanager
def quiet():
    """Without the warnings of the oracle, which would be errors here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@functools.cache
def zlab():
    """torch, and what the tests use of z-lab's package and of transformers."""
    with quiet():
        import torch
        from dflash import model
        from transformers import Qwen3Config, Qwen3ForCausalLM
    torch.set_num_threads(1)  # tiny arrays: threads would only wait for one another
    model._cuda_time = lambda: 0.0  # its clock waits for a GPU
    return SimpleNamespace(torch=torch, model=model, Config=Qwen3Config, Target=Qwen3ForCausalLM)


def randomise(model, seed):
    """Every parameter random, norms and biases too, so that a mistake in any of them shows."""
    zlab().torch.manual_seed(seed)
    with zlab().torch.no_grad():
        for parameter in model.parameters():
            noise = zlab().torch.randn(parameter.shape)
            parameter.copy_(1.5 * noise * parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 1 + 0.1 * noise)
    return model.eval()


def make_drafter(seed=0, **fields):
    """A random drafter of z-lab's class; `fields` are those of its config."""
    common = {
        "vocab_size": VOCAB,
        "num_target_layers": TARGET_LAYERS,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    }
    return randomise(zlab().model.DFlashDraftModel(zlab().Config(**common | fields)), seed)


def save(model, folder):
    """Write a folder as z-lab and transformers do."""
    with quiet():
        model.save_pretrained(folder)
    return folder


def load(folder):
    """A folder in z-lab's class, and what its loader complains of."""
    with quiet():
        model, info = zlab().model.DFlashDraftModel.from_pretrained(folder, output_loading_info=True, dtype=zlab().torch.float32)
    return model.eval(), [kind for kind, names in info.items() if names]


def block_hidden(model, taps_TM, block_KD, start, cache=None):
    """Final hidden states of a block at position `start`; the features of the `len(taps_TM)` positions before it are new."""
    torch = zlab().torch
    return model(
        position_ids=torch.arange(start - len(taps_TM), start + len(block_KD))[None],
        noise_embedding=torch.as_tensor(block_KD)[None],
        target_hidden=torch.as_tensor(taps_TM)[None],
        past_key_values=cache,
        use_cache=cache is not None,
    )[0]


def equal_gradients(config, grads, model, folder):
    """Our gradients, written as a checkpoint, are torch's of every parameter of that name."""
    save_drafter(Drafter(config, grads), folder, dtype="float32")
    ours = load_file(folder / "model.safetensors")
    theirs = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        largest = np.abs(grad).max()
        assert largest > 1e-5, f"{name} takes no gradient"
        np.testing.assert_allclose(ours[name], grad, atol=1e-4 * largest, rtol=0, err_msg=name)


def answer(target, drafter, prompt, new, stops):
    """Their greedy tokens after the prompt, and how many of them each verify pass gave."""
    with quiet():
        out = zlab().model.dflash_generate(drafter, target, zlab().torch.tensor([prompt]), new, list(stops), return_stats=True)
    return out.output_ids[0, len(prompt) :].tolist(), out.acceptance_lengths


def teach(target, drafter, texts_BT, steps):
    """Fit a drafter to texts of its target, so that drafts are accepted now and then; `steps` blocks a text, at random anchors."""
    torch, slots = zlab().torch, drafter.block_size
    texts, random = torch.tensor(texts_BT), np.random.default_rng(0)
    with quiet(), torch.no_grad():
        states = target(texts, output_hidden_states=True).hidden_states
        taps = zlab().model.extract_context_feature(states, drafter.target_layer_ids)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    for anchor in random.integers(1, texts.shape[1] - slots, steps).tolist():
        block = torch.full((len(texts), slots), drafter.mask_token_id)
        block[:, 0] = texts[:, anchor]
        hidden = drafter(
            position_ids=torch.arange(anchor + slots)[None].expand(len(texts), -1),
            noise_embedding=target.get_input_embeddings()(block).detach(),
            target_hidden=taps[:, :anchor],
        )
        logits, labels = target.lm_head(hidden[:, 1:]), texts[:, anchor + 1 : anchor + slots]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
