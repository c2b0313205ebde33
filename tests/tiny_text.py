"""A byte-level tokenizer of 260 tokens, as the metadata of a GGUF file."""

from tokenizers import pre_tokenizers

from dflash_jax.tokenizer import Tokenizer

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]


def tiny_metadata(pre: str = "smollm", template: str | None = TEMPLATE) -> dict:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["l l", "h e", "he ll", "hell o", "1 2", "Ċ Ċ", "Ċ h"]
    tokens = SPECIAL + letters + ["".join(merge.split()) for merge in merges]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return metadata | ({"tokenizer.chat_template": template} if template else {})


def tiny_tokenizer(pre: str = "smollm", template: str | None = TEMPLATE) -> Tokenizer:
    return Tokenizer.from_gguf(tiny_metadata(pre, template))
