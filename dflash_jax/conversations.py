"""Conversations and prompts as JSONL, and conversations as token ids with a loss mask."""

import glob
import gzip
import importlib
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from dflash_jax.errors import ConfigError, DataError, DFlashError
from dflash_jax.prompts import Prompt
from dflash_jax.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant")
NO_ANSWER = "no assistant turn"


def expand_files(patterns: Sequence[str], field: str) -> list[str]:
    """The files that paths and globs (`*`, `?`, `[a-z]`, `**` for folders) name: each pattern's in the order of their names.

    `field` is the config field they come from. Raises `DataError` when a glob matches nothing, `ConfigError` when two name a file.
    """
    files: dict[Path, str] = {}
    for pattern in patterns:
        plain = not glob.has_magic(pattern) or Path(pattern).exists()
        found = [pattern] if plain else sorted(path for path in glob.glob(pattern, recursive=True) if not Path(path).is_dir())
        if not found:
            raise DataError(f"{field}: {pattern} matches no file: give the paths of JSONL files (.jsonl, .jsonl.gz, .jsonl.zst)")
        for name in found:
            if Path(name).resolve() in files:
                raise ConfigError(f"{field} names {name} twice: name it once")
            files[Path(name).resolve()] = name
    return list(files.values())


def read_jsonl(
    path: str | Path, size: int | None = None, seen: Callable[[int], object] = lambda place: None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) of a JSONL file, or of the lines in its first `size` bytes; blank lines are skipped.

    Files named .gz or .zst are decompressed on the way. `seen` is told how many bytes of the file have been read.
    Raises `DataError` with file and line for what is not a JSON object, and when the file is missing, damaged or holds nothing.
    """
    number, found = 0, False
    try:
        with _opened(path) as (lines, file):
            for number, line in enumerate(lines, start=1):
                seen(file.tell())
                if size is not None and lines.tell() > size:
                    break
                if not line.strip():
                    continue
                value = json.loads(line.decode("utf-8-sig"))
                if b"\\ud" in line.lower():  # halves of characters pass as JSON, not as text
                    json.dumps(value, ensure_ascii=False).encode()
                if not isinstance(value, dict):
                    raise DataError(
                        f"{path}:{number}: the line holds a {type(value).__name__}, not an object: write one {{...}} a line"
                    )
                found = True
                yield number, value
    except DFlashError:
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): give the path of a JSONL file") from None
    except (ValueError, RecursionError) as error:  # also half a character, a number of thousands of digits, endless nesting
        raise DataError(f"{path}:{number}: not valid JSON ({error}): mend or delete the line") from None
    if not found:
        raise DataError(f"{path} holds no lines: give a JSONL file with one object a line")


@contextmanager
def _opened(path: str | Path) -> Iterator[tuple[Any, IO[bytes]]]:
    """The lines of a file, decompressed as its name says, and the file itself."""
    damage: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
    with open(path, "rb") as file:
        lines: Any = file
        if Path(path).suffix == ".gz":
            lines = gzip.GzipFile(fileobj=file)
        elif Path(path).suffix == ".zst":
            zstd = _zstd(path)
            lines, damage = zstd.open(file), (*damage, zstd.ZstdError)
        try:
            yield lines, file
        except damage as error:
            raise DataError(f"{path} cannot be decompressed ({error}): fetch or write the file again") from None


def _zstd(path: str | Path) -> Any:
    """The standard library's module, or its backport for Pythons before 3.14."""
    name = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(f"{path} needs {name} to be read: pip install 'dflash_jax[zstd]', or give it as .gz") from None


def read_prompts(paths: Iterable[str | Path]) -> list[Prompt]:
    """Prompts of JSONL files whose lines hold {"turns": [str, ...]} or {"messages": [...]}, with optional `id` and `set`.

    Of messages, a leading system message and the user's turns are kept: the target writes its own answers. Without `id` a prompt is
    called file:line, without `set` it belongs to the set named like its file. Raises `DataError` with file and line.
    """
    prompts = []
    for path in paths:
        for number, row in read_jsonl(path):
            where = f"{path}:{number}"
            system = None
            if "messages" in row:
                messages = check_messages(row, where)
                if messages and messages[0]["role"] == "system":
                    system = messages[0]["content"]
                turns = [message["content"] for message in messages if message["role"] == "user"]
            elif "turns" in row:
                turns = row["turns"]
            else:
                raise DataError(
                    f"{where}: neither 'turns' nor 'messages' among its keys {sorted(row)}: write {{\"turns\": [\"...\"]}}"
                )
            if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
                raise DataError(f"{where}: a prompt needs at least one user turn, each a text that is not empty")
            stem = Path(path).stem
            prompt = Prompt(id=_name(row.get("id"), f"{stem}:{number}"), set=_name(row.get("set"), stem), turns=turns)
            if system is not None:
                prompt["system"] = system
            prompts.append(prompt)
    return prompts


def _name(given: Any, otherwise: str) -> str:
    return otherwise if given is None else str(given)


def first_messages(prompt: Prompt) -> list[dict[str, str]]:
    """What the target reads of a prompt with one turn. Raises `DataError` for one with more: their answers would be missing."""
    if len(prompt["turns"]) != 1:
        raise DataError(
            f"prompt {prompt['id']} has {len(prompt['turns'])} turns, but one is measured at a time: give later ones as prompts "
            "of their own, or let `python -m dflash_jax regenerate` answer all of them"
        )
    system = [{"role": "system", "content": prompt["system"]}] if "system" in prompt else []
    return [*system, {"role": "user", "content": prompt["turns"][0]}]


def check_messages(row: Mapping[str, Any], where: str) -> list[dict[str, str]]:
    """The `messages` of a JSONL row; raises `DataError` that begins with `where` when they are not roles and texts."""
    messages = row.get("messages")
    if not isinstance(messages, list):
        mend = "run `python -m dflash_jax regenerate` on prompt files first" if "turns" in row else f"its keys are {sorted(row)}"
        raise DataError(f"{where}: a conversation needs a list 'messages' of {{'role', 'content'}} objects; {mend}")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES or not isinstance(message.get("content"), str):
            raise DataError(f"{where}: message {index} needs a role ({', '.join(ROLES)}) and a text 'content'")
    return messages


def tokenize_conversation(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    finish_reason: str | None = None,
    answer_tokens: Sequence[int] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids int32 [T] and their loss mask bool [T]: True on what the assistant wrote, its end-of-turn token included.

    Every answer is encoded apart from what precedes it, because decoding also starts from an encoded prefix: encoded together, the
    first token of an answer could merge with the prompt's last. What the template writes after an end-of-turn token belongs to the
    next prefix. The sequence ends with the last answer. `answer_tokens` are the ids that the target really wrote for it (stop token
    included) and replace its encoding; without them, `finish_reason` "length" leaves its end-of-turn token out.

    A template that shows earlier answers changed (without their thoughts) leaves those unsupervised. Raises `DataError` when no
    message is the assistant's, or when the template does not open an answer as its generation prompt does.
    """
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise DataError(f"a conversation of {len(messages)} messages has {NO_ANSWER}")
    tokens: list[int] = []
    mask: list[bool] = []
    text = ""  # what `tokens` stand for
    for index in answers:
        last = index == answers[-1]
        prefix = tokenizer.render_chat(messages[:index], add_generation_prompt=True)
        if not prefix.startswith(text):
            tokens, mask, text = [], [], ""
        between = tokenizer.encode(prefix[len(text) :])
        if last and answer_tokens is not None:
            answer = list(answer_tokens)
        else:
            whole = tokenizer.render_chat(messages[: index + 1], add_generation_prompt=False)
            if not whole.startswith(prefix):
                raise DataError(
                    "the chat template does not begin an answer with its generation prompt, so the loss mask is unknown: "
                    "give answer_tokens, or another chat_template.jinja"
                )
            answer, text = _answer_span(tokenizer, prefix, whole, cut=last and finish_reason == "length")
        tokens += between + answer
        mask += [False] * len(between) + [True] * len(answer)
    return np.asarray(tokens, dtype=np.int32), np.asarray(mask, dtype=np.bool_)


def _answer_span(tokenizer: Tokenizer, prefix: str, whole: str, cut: bool) -> tuple[list[int], str]:
    """Ids of an answer up to its last stop token (without it when `cut`), and the text up to the same place."""
    ids = tokenizer.encode(whole[len(prefix) :])
    stops = [place for place, token in enumerate(ids) if token in tokenizer.stop_token_ids]
    if not stops:  # the template ends turns with plain text
        return ids, whole
    end = whole.rindex(tokenizer.decode([ids[stops[-1]]], skip_special=False))
    text = whole[:end] + tokenizer.decode([ids[stops[-1]]], skip_special=False)
    return ids[: stops[-1] + (not cut)], text
