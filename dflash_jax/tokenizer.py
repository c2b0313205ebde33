"""Text to token ids and back, and chat templates. The work is done by `tokenizers` and a sandboxed `jinja2`."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from dflash_jax.config import read_json
from dflash_jax.errors import CheckpointError, PromptError

# Word splitting of the two best known byte-level vocabularies, from their published tokenizer.json; they differ in the digits.
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type, llama.cpp's llama_token_type
GGUF_PRE_TOKENIZERS = ("default", "gpt-2", "llama-bpe", "qwen2", "smollm")
_HELD_TOKENS = 64


class Tokenizer:
    """A `tokenizers.Tokenizer` with a chat template and the ids that end an answer."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_template: str | None = None,
        stop_token_ids: Iterable[int] = (),
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """`special_tokens` are the template's variables, such as {"bos_token": "<s>", "eos_token": "</s>"}."""
        self.backend = backend
        self.chat_template = chat_template
        self.stop_token_ids = tuple(stop_token_ids)
        self.special_tokens = dict(special_tokens or {})
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self._template: Any = None

    @property
    def vocab_size(self) -> int:
        """Ids that stand for text, added tokens included; a model may have more embedding rows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of the text. Nothing is added around it; special tokens written out in the text become their ids."""
        try:
            return list(self.backend.encode(text, add_special_tokens=False).ids)
        except (TypeError, UnicodeEncodeError):
            raise PromptError("the text holds half a character (a lone surrogate, such as \\ud800): repair it") from None

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of token ids; bytes that form no character come out as U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def token_id(self, token: str) -> int | None:
        """The id of one token given as text, None when the vocabulary lacks it."""
        return self.backend.token_to_id(token)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The conversation as the target reads it; messages are {"role", "content"} mappings.

        Raises `PromptError` when there is no chat template, a message is malformed, or the template refuses the conversation.
        """
        if self.chat_template is None:
            raise PromptError("this target has no chat template: give plain token ids, or put a chat_template.jinja in its folder")
        if isinstance(messages, (str, Mapping)):
            raise PromptError("messages are not a list: give [{'role': 'user', 'content': TEXT}]")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
                raise PromptError(f"message {index} is not {{'role': ..., 'content': ...}}: {message!r}"[:300])
        try:
            if self._template is None:
                self._template = _environment().from_string(self.chat_template)
            names = {"messages": list(messages), "add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
            return str(self._template.render(self.special_tokens | names))
        except (TemplateError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise PromptError(f"the chat template refuses this conversation ({error}): check its roles and contents") from None

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of `render_chat`."""
        return self.encode(self.render_chat(messages, add_generation_prompt))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """From a GGUF file's metadata (`read_gguf(path).metadata`): byte-level BPE vocabularies, `tokenizer.ggml.model` gpt2.

        A file whose `pre` is missing or `default` is split as GPT-2 splits. Raises `CheckpointError` naming the kind of tokenizer
        when it is another one.
        """
        model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
        if model != "gpt2":
            raise CheckpointError(
                f"the GGUF tokenizer {model!r} is not supported (gpt2 is): "
                "load the model's Hugging Face folder, which has a tokenizer.json"
            )
        try:
            return cls._from_gguf(metadata, pre)
        except CheckpointError:
            raise
        except Exception as error:  # tokenizers raises plain Exception
            raise CheckpointError(f"the GGUF file's tokenizer data is damaged ({error}): fetch the file again") from None

    @classmethod
    def _from_gguf(cls, metadata: Mapping[str, Any], pre: str) -> "Tokenizer":
        tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
        kinds = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
        if len(kinds) != len(tokens):
            raise CheckpointError(f"the GGUF tokenizer has {len(tokens)} tokens but {len(kinds)} token types: fetch the file again")
        pairs = [_pair(merge) for merge in merges]
        vocab = {token: i for i, token in enumerate(tokens)}
        # Llama 3 keeps words that are whole tokens, whatever the merges say (ignore_merges in its tokenizer.json).
        backend = tokenizers.Tokenizer(BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe"))
        backend.pre_tokenizer = _gguf_pre_tokenizer(pre)
        backend.decoder = decoders.ByteLevel()
        if pre == "qwen2":
            backend.normalizer = normalizers.NFC()

        def added(kind: int) -> list[AddedToken]:
            return [AddedToken(tokens[i], normalized=False, special=kind == _CONTROL) for i, k in enumerate(kinds) if k == kind]

        backend.add_special_tokens(added(_CONTROL))
        backend.add_tokens(added(_USER_DEFINED))
        found = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
        ids = {name: int(token) for name, token in found.items() if token is not None}
        for name, token in ids.items():
            if not 0 <= token < len(tokens):
                raise CheckpointError(
                    f"the GGUF tokenizer's {name} id {token} is outside its {len(tokens)} tokens: fetch the file again"
                )
        texts = {f"{name}_token": tokens[ids[name]] for name in ("bos", "eos") if name in ids}
        stops = [token for name, token in ids.items() if name != "bos"]
        return cls(backend, metadata.get("tokenizer.chat_template"), dict.fromkeys(stops), texts)

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer | None":
        """From a Hugging Face folder: tokenizer.json, and the chat template of chat_template.jinja or tokenizer_config.json.

        None when the folder has no tokenizer.json. Stop ids come from generation_config.json, else config.json, else `eos_token`.
        Raises `CheckpointError` or `ConfigError` when a file is damaged.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            return None
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises plain Exception
            raise CheckpointError(f"{file} is not a usable tokenizer ({error}): fetch the file again") from None
        settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
        template = _template_of(folder, settings)
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        texts = {
            name: _token_text(settings[name], f"{folder / 'tokenizer_config.json'}: {name}") for name in names if settings.get(name)
        }
        stops: Any = None
        for other in ("generation_config.json", "config.json"):
            if stops is None and (folder / other).is_file():
                stops = read_json(folder / other).get("eos_token_id")
        if stops is None and "eos_token" in texts:
            stops = backend.token_to_id(texts["eos_token"])
        stops = [] if stops is None else stops if isinstance(stops, list) else [stops]
        if not all(type(token) is int for token in stops):
            raise CheckpointError(f"{folder}: eos_token_id is {stops}, not an id or a list of ids: correct it")
        return cls(backend, template, stops, texts)


class StreamDecoder:
    """Turns a growing list of ids into text piece by piece; the pieces join to the text of the whole list.

    An id may end in the middle of a character, so text that ends in U+FFFD is held back until the next id completes it. The two
    newest finished pieces are decoded together, because some tokenizers drop a leading space at the start of a text.
    (`tokenizers.decoders.DecodeStream` raises on ids whose bytes never form a character, which models do write.)
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._ids: list[int] = []
        self._read = 0

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete, possibly empty."""
        return "".join(self._step(token) for token in ids)

    def flush(self) -> str:
        """The rest at the end of the answer: a cut character comes out as U+FFFD. The decoder is then empty."""
        text = self.pending()
        self._ids, self._read = [], 0
        return text

    def pending(self) -> str:
        """What is held back, with U+FFFD in place of a cut character."""
        return self._decode(self._ids)[len(self._decode(self._ids[: self._read])) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special)

    def _step(self, token: int) -> str:
        self._ids.append(token)
        known, text = self._decode(self._ids[: self._read]), self._decode(self._ids)
        if text.endswith("\ufffd") and len(self._ids) - self._read < _HELD_TOKENS:
            return ""
        if len(text) > len(known):  # else only special tokens: keep the context for what follows
            self._ids = self._ids[self._read :]
            self._read = len(self._ids)
        return text[len(known) :]


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise CheckpointError(f"the GGUF tokenizer has the merge {merge!r}, which is not two tokens: fetch the file again")
    return left, right


def _gguf_pre_tokenizer(pre: str) -> Any:
    words = {"llama-bpe": _LLAMA3_WORDS, "qwen2": _QWEN2_WORDS}.get(pre)
    if words is not None:
        split = pre_tokenizers.Split(Regex(words), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":  # as in SmolLM2's tokenizer.json and llama.cpp (transformers' GGUF route leaves the digits out)
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if pre in ("default", "gpt-2"):
        return gpt2
    raise CheckpointError(
        f"the GGUF pre-tokenizer {pre!r} is not supported ({', '.join(GGUF_PRE_TOKENIZERS)} are): "
        "load the model's Hugging Face folder, which has a tokenizer.json"
    )


def _token_text(token: Any, where: str) -> str:
    """tokenizer_config.json writes a token as text or as an object with its content."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str) or any("\ud800" <= c <= "\udfff" for c in text):
        raise CheckpointError(f"{where} is {token!r}, not a token's text: correct it, or fetch the file again")
    return text


def _template_of(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template: its own file, or in tokenizer_config.json as text or as the default of several named ones."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{file} is not UTF-8 text ({error}): fetch the file again") from None
    template = settings.get("chat_template")
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    if not isinstance(template, str | None):
        raise CheckpointError(f"{folder / 'tokenizer_config.json'}: chat_template is no text: correct it, or fetch the file again")
    return template


# ---------------------------------------------------------------------------------------------------------------------
# The environment that Hugging Face templates expect (transformers, utils/chat_template_utils.py)


class _Generation(Extension):
    """{% generation %} marks assistant text for training masks in some templates; rendering ignores it."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False, separators: Any = None
) -> str:
    # jinja2's own filter escapes HTML, which a model must not see
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
