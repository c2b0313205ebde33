"""Tokens a second of this package and of z-lab's `dflash` (PyTorch) on a CPU: the same target, drafter and prompts, in turn.

    make install VERSION=3.11 && make .venv-3.11/.oracle
    .venv-3.11/bin/python benchmarks/vs_zlab.py --prompts 8

Both decode greedily, each in its faster dtype of float32 and bfloat16 (found on the first prompts), one prompt at a time; prefill
and compilation are left out on both sides. The last line is JSON; `ratio` is ours over theirs.
"""

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from tqdm import tqdm

from dflash_jax.bench import DTYPES, TRIAL_PROMPTS, Timing, time_decoding, timed_prompts
from dflash_jax.config import DecodeConfig
from dflash_jax.conversations import first_messages
from dflash_jax.hf import load_drafter, load_text_target
from dflash_jax.prompts import packaged_prompts
from dflash_jax.targets import DenseTarget

ROOT = Path(__file__).parents[1]


class ZLab:
    """z-lab's decoder over our target's weights."""

    def __init__(self, target: DenseTarget, folder: Path, dtype: str, block_size: int | None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
            from dflash import model
            from transformers import LlamaConfig, LlamaForCausalLM
        model._cuda_time = time.perf_counter  # its own clock waits for a GPU
        self.torch, self.model, self.block_size = torch, model, block_size
        c = target.config
        config = LlamaConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=c.mlp_dim,
            num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_heads,
            num_key_value_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            max_position_embeddings=c.max_position,
            rms_norm_eps=c.rms_norm_eps,
            rope_theta=c.rope.theta,
            tie_word_embeddings=c.tie_embeddings,
        )
        self.target = LlamaForCausalLM(config).eval()
        tensors = {}
        for path, value in jax.tree.leaves_with_path(nnx.to_pure_dict(target.params)):
            *names, last = (str(entry.key) for entry in path)
            array = np.asarray(value, np.float32)
            if last == "embed_tokens":
                names = ["embed_tokens"]
            tensors[".".join(["model", *names, "weight"])] = torch.from_numpy(array.T.copy() if last == "kernel" else array.copy())
        missing, unknown = self.target.load_state_dict(tensors, strict=False)
        assert set(missing) | set(unknown) <= {"lm_head.weight"}, (missing, unknown)
        self.target = self.target.to(getattr(torch, dtype))
        self.drafter = model.DFlashDraftModel.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self.stops = list(c.stop_token_ids)

    def time(self, prompt: list[int], new: int, plain: bool) -> Timing:
        ids = self.torch.tensor([prompt])
        out = self.model.dflash_generate(
            self.drafter,
            self.target,
            ids,
            max_new_tokens=new,
            stop_token_ids=self.stops,
            block_size=1 if plain else self.block_size,
            return_stats=True,
        )
        tokens = out.output_ids[0, len(prompt) :].tolist()
        seconds = out.time_per_output_token * out.num_output_tokens
        return Timing(tokens, sum(out.acceptance_lengths), seconds, len(out.acceptance_lengths))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", default=str(ROOT / "assets/smollm2-135m-dflash"), help="folder in z-lab's layout")
    parser.add_argument("--prompts", type=int, default=8, help="how many, spread over HumanEval and chat")
    parser.add_argument("--max_new_tokens", type=int, default=96, help="answer tokens a prompt")
    parser.add_argument("--block_size", type=int, default=None, help="slots a block on both sides; the trained size by default")
    args = parser.parse_args()
    prompts = packaged_prompts("eval")
    chosen = timed_prompts([prompt["set"] for prompt in prompts], args.prompts)
    base = load_text_target("smollm2-135m", dtype="float32")
    encoded = [base.tokenizer.encode_chat(first_messages(prompts[i])) for i in chosen]
    targets = {dtype: base.with_dtype(dtype) for dtype in DTYPES}
    drafters = {dtype: load_drafter(args.drafter, targets[dtype], dtype=dtype) for dtype in DTYPES}
    theirs = {dtype: ZLab(base, Path(args.drafter), dtype, args.block_size) for dtype in DTYPES}
    runs: dict[tuple[str, str], list[Timing]] = {}

    def run(kind: str, dtype: str, prompt: list[int]) -> None:
        side, plain = kind.split(" ")[0], kind.endswith("plain")
        if side == "theirs":
            timing = theirs[dtype].time(prompt, args.max_new_tokens, plain)
        else:
            drafter = None if plain else drafters[dtype]
            timing = time_decoding(targets[dtype], drafter, prompt, DecodeConfig(args.max_new_tokens, block_size=args.block_size))
        runs.setdefault((kind, dtype), []).append(timing)

    def rate(kind: str, dtype: str) -> float:
        return sum(t.emitted for t in runs[kind, dtype]) / sum(t.seconds for t in runs[kind, dtype])

    kinds = ["ours", "theirs", "ours plain", "theirs plain"]
    run("theirs", DTYPES[0], encoded[0])  # torch's first call sets itself up
    runs.clear()
    for prompt in encoded[:TRIAL_PROMPTS]:
        for kind in kinds:
            for dtype in DTYPES:
                run(kind, dtype, prompt)
    best = {kind: max(DTYPES, key=lambda dtype: rate(kind, dtype)) for kind in kinds}
    for prompt in tqdm(encoded[TRIAL_PROMPTS:], unit="prompt"):
        for kind in kinds:
            run(kind, best[kind], prompt)
    result: dict[str, Any] = {"ratio": round(rate("ours", best["ours"]) / rate("theirs", best["theirs"]), 3)}
    for kind in kinds:
        result[kind] = {"tokens_per_second": round(rate(kind, best[kind]), 2), "dtype": best[kind]}
    same = sum(a.tokens == b.tokens for a, b in zip(runs["ours", "float32"], runs["theirs", "float32"], strict=False))
    result |= {"prompts": len(encoded), "float32_texts_equal": f"{same} of {min(len(encoded), TRIAL_PROMPTS)}"}
    result |= {"jax": jax.__version__, "torch": theirs["float32"].torch.__version__}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
