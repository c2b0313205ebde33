"""Tokenizer, chat templates and the streaming decoder."""

import inspect
import json
import re
from pathlib import Path

import pytest
from tiny_text import SPECIAL, TEMPLATE, tiny_metadata, tiny_tokenizer

from dflash_jax.errors import CheckpointError, ConfigError, PromptError
from dflash_jax.gguf import embedded_model_path, read_gguf
from dflash_jax.tokenizer import StreamDecoder, Tokenizer

pytestmark = pytest.mark.one_cell

TEXTS = [
    "",
    "hello world",
    "  two  spaces\n\n\tand a tab ",
    "def f(x):\n    return x + 1  # 12345 and 3.14\n",
    "I'm sure they'll say it's HELLO'S",
    "café naïve Ångström ﬁ",
    "日本語と中文 😀👩‍👩‍👧 \u200b\u00a0x",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|>b <|im_end|> c",
    "1234567890 1e-5 $9.99 100%",
    "\r\n windows\r\n",
    "\x00\x7f control",
]
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi 12"}]


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "default", "llama-bpe"])
@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(pre, text):
    tokenizer = tiny_tokenizer(pre)
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


def test_ids_and_special_tokens():
    tokenizer = tiny_tokenizer()
    hello = tokenizer.token_id("hello")
    assert tokenizer.encode("<|im_start|>hello<|im_end|>") == [1, hello, 2]
    assert tokenizer.decode([1, hello, 2]) == "hello"
    assert tokenizer.decode([1, hello, 2], skip_special=False) == "<|im_start|>hello<|im_end|>"
    assert tokenizer.vocab_size == len(tiny_metadata()["tokenizer.ggml.tokens"])
    assert tokenizer.stop_token_ids == (2,)
    assert tokenizer.special_ids == set(range(len(SPECIAL)))
    assert tokenizer.token_id("nowhere") is None


def test_pre_tokenizers_differ_in_digits_newlines_and_normal_forms():
    digits = {pre: len(tiny_tokenizer(pre).encode("12")) for pre in ("smollm", "gpt-2", "llama-bpe", "qwen2")}
    assert digits == {"smollm": 2, "gpt-2": 1, "llama-bpe": 1, "qwen2": 2}
    newlines = {pre: tiny_tokenizer(pre).encode("\n\nhe") for pre in ("gpt-2", "qwen2")}
    assert {pre: len(ids) for pre, ids in newlines.items()} == {"gpt-2": 3, "qwen2": 2}
    composed, apart = "\u00e9", "e\u0301"
    assert tiny_tokenizer("qwen2").encode(apart) == tiny_tokenizer("qwen2").encode(composed)
    assert tiny_tokenizer("smollm").encode(apart) != tiny_tokenizer("smollm").encode(composed)


def test_llama3_keeps_whole_tokens_that_no_merge_builds():
    metadata = tiny_metadata("llama-bpe")
    metadata["tokenizer.ggml.tokens"].append("world")
    metadata["tokenizer.ggml.token_type"].append(1)
    assert len(Tokenizer.from_gguf(metadata).encode("world")) == 1
    assert len(Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": "gpt-2"}).encode("world")) == 5


def test_user_defined_tokens_are_kept_in_decoded_text():
    metadata = tiny_metadata()
    metadata["tokenizer.ggml.tokens"].append("<think>")
    metadata["tokenizer.ggml.token_type"].append(4)
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = tokenizer.encode("a<think>b")
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "a<think>b"
    assert ids[1] not in tokenizer.special_ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "the GGUF tokenizer 'llama' is not supported"),
        (
            {"tokenizer.ggml.pre": "tekken"},
            r"the GGUF pre-tokenizer 'tekken' is not supported \(default, gpt-2, llama-bpe, qwen2, smollm",
        ),
        ({"tokenizer.ggml.merges": ["one"]}, "merge 'one', which is not two tokens"),
        ({"tokenizer.ggml.merges": ["no where"]}, "tokenizer data is damaged"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer data is damaged"),
        ({"tokenizer.ggml.token_type": 5}, "tokenizer data is damaged"),
        ({"tokenizer.ggml.token_type": [3] * 999}, r"\d+ tokens but 999 token types"),
        ({"tokenizer.ggml.eos_token_id": 100_000}, r"the GGUF tokenizer's eos id 100000 is outside its \d+ tokens"),
        ({"tokenizer.ggml.bos_token_id": -1}, "bos id -1 is outside"),
        ({"tokenizer.ggml.eos_token_id": "end"}, "tokenizer data is damaged"),
    ],
)
def test_gguf_refusals(change, message):
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_gguf(tiny_metadata() | change)


def test_chat_template():
    tokenizer = tiny_tokenizer()
    want = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat(CHAT[:1]) == want
    assert tokenizer.render_chat(CHAT, add_generation_prompt=False) == want + "hi 12<|im_end|>\n"
    assert tokenizer.encode_chat(CHAT[:1]) == tokenizer.encode(want)


def test_template_features():
    template = (
        "{%- for message in messages %}\n"
        "    {%- if loop.index0 == 2 %}{% break %}{% endif %}\n"
        "    {%- if message.role == 'system' %}{{ raise_exception('no system role: ' + message.content) }}{% endif %}\n"
        "    {% generation %}\n"
        "{{ message | tojson }}{{ eos_token }}\n"
        "    {% endgeneration %}\n"
        "{%- endfor %}{{ strftime_now('%Y') | length }}"
    )
    tokenizer = tiny_tokenizer(template=template)
    messages = [{"role": "user", "content": "<é>"}] * 3
    one = '\n{"role": "user", "content": "<é>"}<|im_end|>\n'
    assert tokenizer.render_chat(messages).replace("\n", "") == (one * 2 + "4").replace("\n", "")
    with pytest.raises(PromptError, match=r"refuses this conversation \(no system role: be nice"):
        tokenizer.render_chat([{"role": "system", "content": "be nice"}])


def test_template_is_sandboxed():
    tokenizer = tiny_tokenizer(template="{{ messages.__class__.__mro__ }}{{ messages.append(1) }}")
    with pytest.raises(PromptError, match="refuses this conversation"):
        tokenizer.render_chat(CHAT)


@pytest.mark.parametrize("messages", ["hi", CHAT[0]], ids=["text", "one message"])
def test_what_is_no_list_of_messages_is_refused(messages):
    with pytest.raises(PromptError, match="messages are not a list: give"):
        inspect.unwrap(Tokenizer.render_chat)(tiny_tokenizer(template="x"), messages)


def test_template_refusals():
    with pytest.raises(PromptError, match="has no chat template"):
        tiny_tokenizer(template=None).render_chat(CHAT)
    with pytest.raises(PromptError, match=r"message 1 is not \{'role'"):
        tiny_tokenizer().render_chat([CHAT[0], {"content": "x"}])
    with pytest.raises(PromptError, match="refuses this conversation"):
        tiny_tokenizer(template="{% for %}").render_chat(CHAT)


@pytest.fixture
def folder(tmp_path):
    tiny_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": {"content": "<|im_end|>", "special": True}, "bos_token": "<|im_start|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_folder(folder):
    tokenizer, twin = Tokenizer.from_folder(folder), tiny_tokenizer()
    assert tokenizer is not None
    for text in TEXTS:
        assert tokenizer.encode(text) == twin.encode(text)
    assert tokenizer.render_chat(CHAT) == twin.render_chat(CHAT)
    assert tokenizer.stop_token_ids == (2,)
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (folder / "config.json").write_text('{"eos_token_id": 0}')
    assert Tokenizer.from_folder(folder).stop_token_ids == (0,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert Tokenizer.from_folder(folder).stop_token_ids == (2, 0)
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    assert Tokenizer.from_folder(folder).render_chat(CHAT) == "<|im_start|>hello"


def test_folder_with_named_templates(folder):
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.render_chat(CHAT) == "yes"
    assert tokenizer.stop_token_ids == ()


def test_folder_without_or_with_broken_files(folder, tmp_path_factory):
    assert Tokenizer.from_folder(tmp_path_factory.mktemp("empty")) is None
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a usable tokenizer"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("chat_template.jinja", b"\xff", r"chat_template\.jinja is not UTF-8 text"),
        ("tokenizer_config.json", b'{"eos_token": 5}', r"tokenizer_config\.json: eos_token is 5, not a token's text"),
        ("tokenizer_config.json", b'{"bos_token": {"special": true}}', "bos_token is .*, not a token's text"),
        ("tokenizer_config.json", b'{"chat_template": ["x"]}', r"tokenizer_config\.json: chat_template is no text"),
        ("tokenizer_config.json", b'{"chat_template": {"default": "x"}}', "chat_template is no text"),
        ("tokenizer_config.json", b'{"eos_token": "\\ud800"}', "eos_token is .*, not a token's text"),
        ("generation_config.json", b'{"eos_token_id": ["</s>"]}', r"eos_token_id is \['</s>'\], not an id or a list of ids"),
    ],
)
def test_folder_with_fields_of_another_kind(folder, file, content, message):
    (folder / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("text", TEXTS)
def test_stream_joins_to_the_whole(text, size):
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(text)
    stream = StreamDecoder(tokenizer)
    pieces = [stream.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)
    assert stream.flush() == ""


def test_stream_holds_back_half_characters_only():
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("a😀b")
    stream = StreamDecoder(tokenizer)
    assert [stream.push([token]) for token in ids] == ["a", "", "", "", "😀", "b"]
    stream = StreamDecoder(tokenizer)
    assert stream.push(ids[:3]) == "a"  # what is whole comes out at once
    assert stream.flush() == "\ufffd"


def test_stream_survives_bytes_that_are_no_text():
    tokenizer = tiny_tokenizer()
    broken = tokenizer.encode("😀")[1:2]
    stream = StreamDecoder(tokenizer)
    pieces = [stream.push(broken) for _ in range(200)]
    assert any(pieces), "text that never becomes valid must not be held for ever"
    hello = tokenizer.encode("hello")
    assert ("".join(pieces) + stream.push(hello) + stream.flush()) == "\ufffd" * 200 + "hello"


def test_stream_of_a_tokenizer_that_eats_leading_spaces():
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    backend = tokenizers.Tokenizer(models.WordLevel({"▁the": 0, "▁cat": 1, "s": 2}, unk_token="s"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = Tokenizer(backend)
    stream = StreamDecoder(tokenizer)
    assert [stream.push([token]) for token in (0, 1, 2, 1)] == ["the", " cat", "s", " cat"]
    assert tokenizer.decode([0, 1, 2, 1]) == "the cats cat"


def test_embedded_tokenizer_round_trip():
    tokenizer = Tokenizer.from_gguf(read_gguf(embedded_model_path()).metadata)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special=False) == text
        stream = StreamDecoder(tokenizer, skip_special=False)
        assert stream.push(ids) + stream.flush() == text
    assert tokenizer.render_chat(CHAT[:1]).startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert tokenizer.vocab_size == 49152


@pytest.mark.oracle
def test_embedded_tokenizer_equals_transformers():
    from transformers import AutoTokenizer

    path = embedded_model_path()
    ours = Tokenizer.from_gguf(read_gguf(path).metadata)
    theirs = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    # transformers' GGUF route forgets that smollm splits digits off first (its tokenizer.json and llama.cpp do), which shows only
    # where several spaces precede a digit
    source = re.sub(r"\s{2,}(?=\d)", " ", Path(path.parent.parent, "gguf", "quants.py").read_text())
    for text in [*TEXTS, source, *source.splitlines()[:200]]:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text
    assert ours.render_chat(CHAT) == theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)


@pytest.mark.oracle
def test_templates_render_as_in_transformers(folder):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|im_end|>")
    template = (
        "{%- set ns = namespace(n=0) %}\n{%- for message in messages %}\n  {% if message.role == 'user' %}\n"
        "    {%- set ns.n = ns.n + 1 %}\n  {% continue %}\n  {% endif %}\n"
        "  {% generation %}{{ message | tojson(indent=2) }}{{ ns.n }}{% endgeneration %}\n{{ eos_token }}\n"
        "{% endfor %}\n{% if add_generation_prompt %}{{ messages[-1]['content'] | trim | upper }}{% endif %}\n"
    )
    for source in (TEMPLATE, template):
        ours = tiny_tokenizer(template=source)
        ours.special_tokens = {"eos_token": "<|im_end|>"}
        for prompt in (True, False):
            want = theirs.apply_chat_template(CHAT, chat_template=source, tokenize=False, add_generation_prompt=prompt)
            assert ours.render_chat(CHAT, add_generation_prompt=prompt) == want
