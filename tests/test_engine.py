"""The engine gives every request what `generate` gives it alone, whatever comes before, beside or after it.

The tiny models here have five tokens, so that random drafts are often right and acceptance says something about the caches.
"""

import dataclasses
import inspect
import sys
import threading

import jax
import numpy as np
import pytest
from tiny_models import BLOCK, CONTEXT, HIDDEN, TABLE, TableTarget, dense_drafter, dense_target, random_prompt, scripted_drafter
from tiny_text import tiny_tokenizer

import dflash_jax.engine as engine_module
import dflash_jax.widths as widths_module
from dflash_jax.decode import decode
from dflash_jax.drafter import Drafter
from dflash_jax.engine import Engine
from dflash_jax.errors import ConfigError, EngineError, PromptError
from dflash_jax.generate import generate
from dflash_jax.request import TextWatch
from dflash_jax.rows import freeze, prefill_chunk, report
from dflash_jax.tokenizer import Tokenizer

TOKENS, MAX_LEN, CHUNK, ROUNDS, SLOTS = 5, 110, 16, 2, 3
DENSE = dense_target(vocab_size=TOKENS)
DENSE_DRAFTER = dense_drafter(vocab_size=TOKENS, mask_token_id=4, num_draft_layers=1, sliding_window=(None,), causal=(False,))


@pytest.fixture(autouse=True)
def one_shape(monkeypatch):
    """`generate` pads every prompt to one length, so that it has one program where prompts of many lengths are compared with it."""
    monkeypatch.setattr(sys.modules["dflash_jax.generate"], "prefill_lengths", lambda *_: (CONTEXT, 2 * CONTEXT))


def small_table(vocab=TOKENS, script=None, tokenizer=None):
    random = np.random.default_rng(5)
    forced = np.full(512, -1, np.int32)
    for position, token in (script or {}).items():
        forced[position] = token
    params = {
        "logits_VV": 1.5 * random.standard_normal((vocab, vocab)).astype(np.float32),
        "embedding_VD": random.standard_normal((vocab, HIDDEN)).astype(np.float32),
        "script_L": forced,
    }
    return TableTarget(dataclasses.replace(TABLE, vocab_size=vocab), jax.tree.map(jax.numpy.asarray, params), tokenizer)


def make(target=DENSE, drafter=DENSE_DRAFTER, **options):
    defaults = {"max_batch": SLOTS, "max_len": MAX_LEN, "rounds_per_step": ROUNDS, "prefill_chunk": CHUNK}
    return Engine(target, drafter, **defaults | options)


def prompt(seed, length):
    return random_prompt(seed, length, TOKENS)


def outcome(request):
    assert request.done
    return request.tokens, request.finish_reason, request.stats


def assert_equals_generate(request, target, drafter, arguments, **options):
    out = generate(target, drafter, [request.prompt], **arguments, **options)
    assert outcome(request) == (out.tokens[0], out.finish_reason[0], out.stats.rows[0]), arguments


def row_leaves(engine, row):
    """Every array of a row but where it is in the batch."""
    return [np.asarray(leaf)[row] for leaf in jax.tree.leaves(engine._state)]


def assert_same_bits(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


GREEDY = [
    (prompt(1, 1), {"max_new_tokens": 30}),
    (prompt(2, 40), {"max_new_tokens": 25}),
    (prompt(3, 16), {"max_new_tokens": 1}),
    (prompt(4, 33), {"max_new_tokens": 40, "stop_token_ids": [3]}),
]
WARM = {"temperature": 0.8, "max_new_tokens": 20}
SAMPLED = [
    (prompt(5, 12), WARM | {"seed": 3}),
    (prompt(6, 15), WARM | {"seed": 4, "top_k": 3, "stop_token_ids": [0]}),
    (prompt(7, 16), WARM | {"seed": 5, "top_p": 0.7, "max_new_tokens": 2}),
    (prompt(8, 2), WARM | {"seed": 6, "min_p": 0.1, "temperature": 1.4}),
]
MIXED = [case for pair in zip(GREEDY, SAMPLED, strict=True) for case in pair]


@pytest.fixture(scope="module")
def answers():
    """Requests of all kinds, more than slots, in one engine; and how many programs they took."""
    counts = [f._cache_size() for f in (prefill_chunk, decode, report)]
    engine = make()
    requests = [engine.submit(text, **arguments) for text, arguments in MIXED]
    assert engine.run() == requests
    assert not engine.step()
    programs = [f._cache_size() - n for f, n in zip((prefill_chunk, decode, report), counts, strict=True)]
    return requests, programs


# ---------------------------------------------------------------------------------------------------------------------
# Equal to generate


@pytest.mark.one_cell
def test_requests_equal_generate(answers):
    for request, (_, arguments) in zip(answers[0], MIXED, strict=True):
        assert_equals_generate(request, DENSE, DENSE_DRAFTER, arguments)
    assert {request.finish_reason for request in answers[0]} == {"stop", "length"}
    assert sum(request.stats.accepted for request in answers[0]) > 20


@pytest.mark.one_cell
def test_requests_of_all_kinds_share_their_programs(answers):
    assert max(answers[1]) <= 1, "prompt lengths, limits and samplings are data, not shapes"


def test_plain_decoding_equals_generate():
    target = small_table()
    engine = make(target, None)
    cases = [GREEDY[0], *SAMPLED]
    requests = [engine.submit(text, **arguments) for text, arguments in cases]
    engine.run()
    for request, (_, arguments) in zip(requests, cases, strict=True):
        assert_equals_generate(request, target, None, arguments)


@pytest.mark.one_cell
def test_limits():
    """The length cap of the engine ends an answer; a stop token may be the first token; each row has its own."""
    target = small_table(script={8: 2, 9: 1, 10: 3})
    engine = make(target, None, max_len=20)
    cut = engine.submit(prompt(1, 12), max_new_tokens=500)
    full = engine.submit(prompt(1, 19), max_new_tokens=500)
    at_once = engine.submit(prompt(1, 8), stop_token_ids=[2])
    later = engine.submit(prompt(1, 8), stop_token_ids=[3])
    engine.run()
    assert (len(cut.tokens), cut.finish_reason) == (8, "length")
    assert (len(full.tokens), full.finish_reason) == (1, "length")
    assert (at_once.tokens, at_once.finish_reason, at_once.stats.rounds) == ([2], "stop", 0)
    assert (later.tokens, later.finish_reason) == ([2, 1, 3], "stop")
    assert make(target, None, max_len=4096).max_len == CONTEXT


# ---------------------------------------------------------------------------------------------------------------------
# Independence


@pytest.mark.one_cell
def test_a_request_gets_the_same_bits_alone_and_in_company():
    """Alone in slot 0; then in slot 2 after another tenant, beside long sampled neighbours, admitted later."""
    text, arguments = prompt(9, 50), {"max_new_tokens": 40, "temperature": 0.8, "top_k": 3, "seed": 4}
    alone = make(reuse_prefixes=False)
    first = alone.submit(text, **arguments)
    alone.run()
    crowd = make(reuse_prefixes=False)
    others = [
        crowd.submit(prompt(seed, 40), new, temperature=1.0, top_p=0.9, seed=seed) for seed, new in ((20, 70), (21, 70), (22, 3))
    ]
    while not others[2].done:
        crowd.step()
    second = crowd.submit(text, **arguments)
    crowd.step()
    assert [slot.request is second for slot in crowd._slots] == [False, False, True]
    crowd.run()
    assert first.stats.accepted > 5
    assert outcome(first) == outcome(second)
    assert_same_bits(row_leaves(crowd, 2), row_leaves(alone, 0))


@pytest.mark.one_cell
def test_a_done_row_keeps_every_bit():
    engine = make(reuse_prefixes=False)
    short, long = engine.submit(prompt(1, 5), 2), engine.submit(prompt(2, 5), 40)
    while not short.done:
        engine.step()
    before = row_leaves(engine, 0)
    left = MAX_LEN - len(long.prompt) - len(long.tokens)
    engine.run()
    assert left > 20
    assert len(long.tokens) == 40
    assert_same_bits(row_leaves(engine, 0), before)


@pytest.mark.one_cell
def test_nothing_of_the_last_tenant_remains():
    """Not even numbers that are not finite."""
    engine = make(reuse_prefixes=False)
    spoil = lambda x: x * np.nan if x.dtype == np.float32 and x.ndim == 4 else x
    engine._state = jax.tree.map(spoil, engine._state)
    text, arguments = MIXED[1]
    request = engine.submit(text, **arguments)
    engine.run()
    assert_equals_generate(request, DENSE, DENSE_DRAFTER, arguments)


@pytest.mark.one_cell
def test_a_long_prompt_stalls_nobody():
    """Live rows get tokens in every step while it is read, and a short prompt that comes later waits for one piece of it."""
    engine = make(small_table(), None, reuse_prefixes=False)
    live = engine.submit(prompt(1, 4), 60)
    engine.step()
    long = engine.submit(prompt(2, 6 * CHUNK), 3)
    engine.step()
    late = engine.submit(prompt(3, 4), 60)
    steps = 1
    while not long.tokens:
        before = len(live.tokens), len(late.tokens)
        engine.step()
        steps += 1
        assert len(live.tokens) > before[0]
        assert len(late.tokens) > before[1] or steps == 2
        assert long.tokens or engine._state.done_B[1], "a row whose prompt is being read takes part in the decode loop"
    assert steps == 7


# ---------------------------------------------------------------------------------------------------------------------
# Prefix reuse

SYSTEM = prompt(30, 37)


def computed_anew(text, **arguments):
    engine = make(reuse_prefixes=False)
    request = engine.submit(text, **arguments)
    engine.run()
    return request


@pytest.mark.one_cell
@pytest.mark.parametrize("reach", [None, 7])
def test_the_next_turn_takes_the_caches_of_its_chat(monkeypatch, reach):
    """Tokens and acceptance are those without reuse. A drafter that keeps the newest positions only gets those filled again."""
    newest = []
    keep = lambda self, prefix, last: newest.append((prefix, last)) or max(0, prefix - (reach or 0))
    monkeypatch.setattr(Drafter, "kept_context", keep)
    engine = make()
    neighbour = engine.submit(prompt(31, 20), 70)
    first = engine.submit(SYSTEM, 20)
    while not first.done:
        engine.step()
    turn = SYSTEM + first.tokens + prompt(32, 10)
    second = engine.submit(turn, 25, temperature=0.8, seed=9)
    engine.run()
    assert first.reused_tokens == 0
    assert second.reused_tokens == len(SYSTEM) + len(first.tokens) - 1 - (reach or 0)
    assert outcome(second) == outcome(computed_anew(turn, max_new_tokens=25, temperature=0.8, seed=9))
    assert second.stats.accepted > 2
    assert engine._slots[2].used == 0, "it went on in its own row"
    length = len(SYSTEM) + len(first.tokens)
    assert (length - 1, length - 2 + BLOCK - 1) in newest, "the rejected end of the last block is written too"
    assert outcome(neighbour) == outcome(computed_anew(neighbour.prompt, max_new_tokens=70))


@pytest.mark.one_cell
def test_the_next_turn_with_a_windowed_drafter():
    """Its cache is a ring that forgets, so what a hit keeps must be filled again where it was overwritten."""
    window = 30
    drafter = dense_drafter(vocab_size=TOKENS, mask_token_id=4, num_draft_layers=1, sliding_window=(window,), causal=(False,))
    turns, seen = {True: [], False: []}, []
    for reuse, requests in turns.items():
        engine = make(drafter=drafter, reuse_prefixes=reuse, max_batch=2)
        requests.append(engine.submit(SYSTEM, 20))
        engine.run()
        for text in (SYSTEM + requests[0].tokens + prompt(32, 10), SYSTEM + prompt(33, 4)):
            requests.append(engine.submit(text, 5))
            engine.run()
        row = next(slot.row for slot in engine._slots if slot.old_text[: len(text)] == text)
        anchor = len(text) + len(requests[-1].tokens) - 1
        keys_BGRE = engine._state.draft_cache.keys[0]
        seen.append(np.asarray(keys_BGRE)[row, :, np.arange(anchor - window + 1, anchor) % keys_BGRE.shape[2]])
    assert [outcome(r) for r in turns[True]] == [outcome(r) for r in turns[False]]
    assert [r.reused_tokens for r in turns[True]] == [0, len(SYSTEM) + 19, len(SYSTEM) - window + 1]
    np.testing.assert_allclose(*seen, atol=1e-5)


@pytest.mark.one_cell
@pytest.mark.parametrize("pays", [False, True])
def test_steps_take_the_width_that_pays(pays, tmp_path, monkeypatch):
    # Before anything was seen the whole block looks best: only what the rows accept can tell that it is not.
    costs = dict.fromkeys(range(1, BLOCK), 9.0) | {BLOCK: 1.0} if pays else {1: 1.0, BLOCK: 3.0}
    monkeypatch.setattr(widths_module, "measure_widths", lambda *_: costs)
    engine = make(widths=widths_module.WidthTable(tmp_path / "widths.json"))
    requests = [engine.submit(text, **arguments) for text, arguments in GREEDY]
    engine.run()
    for request in requests:
        out = generate(DENSE, None, [request.prompt], max_new_tokens=request.max_length - len(request.prompt),
                       stop_token_ids=request.stop_token_ids)  # fmt: skip
        assert request.tokens == out.tokens[0]
    drafted, rounds = (sum(getattr(request.stats, name) for request in requests) for name in ("drafted", "rounds"))
    assert drafted == rounds * (BLOCK - 1) if pays else 0 < drafted < 2.5 * rounds


@pytest.mark.one_cell
@pytest.mark.parametrize("source", ["live", "free", "beside"])
def test_a_shared_beginning_is_copied(source):
    """From a row that decodes, from one that is free, and from one whose prompt is being read at the same time."""
    engine = make()
    texts = [SYSTEM + prompt(40 + i, 3 + i) for i in range(2)]
    first = engine.submit(texts[0], 40)
    while (source == "live" and len(first.tokens) < 5) or (source == "free" and not first.done):
        engine.step()
    second = engine.submit(texts[1], 30)
    engine.run()
    for request in (first, second):
        wanted = computed_anew(request.prompt, max_new_tokens=40 if request is first else 30)
        assert outcome(request) == outcome(wanted)
    assert first.reused_tokens + second.reused_tokens >= (2 * CHUNK if source == "beside" else len(SYSTEM))


@pytest.mark.one_cell
def test_audits_are_those_of_generate():
    """More requests than rows, so that a row begins anew; the greedy one counts nowhere."""
    engine = make(max_batch=2, verify="block", audit=True)
    cases = [(prompt(20 + i, 5), {"max_new_tokens": 30, "seed": i, "temperature": [0.8, 1.2, 0.0][i % 3]}) for i in range(5)]
    requests = [engine.submit(ids, **arguments) for ids, arguments in cases]
    engine.run()
    assert (requests[2].audit.tokens, np.isnan(requests[2].audit.z)) == (0, True)
    sampled = [case for case in zip(requests, cases, strict=True) if case[0] is not requests[2]]
    for request, (ids, how) in sampled:
        audit = generate(DENSE, DENSE_DRAFTER, [ids], **how, verify="block", audit=True).stats.audit
        assert request.audit.tokens == audit.tokens > 0
        np.testing.assert_allclose(request.audit.z, audit.z, rtol=1e-4)
    scores, variances, tokens = np.array([request.audit_sums for request in requests]).sum(0)
    np.testing.assert_allclose(engine.audit.z, scores / variances**0.5)
    assert engine.audit.tokens == tokens == sum(request.audit.tokens for request in requests)
    assert np.isnan(make().audit.z)
    with pytest.raises(ConfigError, match="leave out audit or widths"):
        make(audit=True, widths=widths_module.WidthTable("unused.json"))


@pytest.mark.one_cell
def test_the_same_prompt_again_reads_its_last_token():
    engine = make()
    first = engine.submit(SYSTEM, 10)
    engine.run()
    second = engine.submit(SYSTEM, 10)
    engine.run()
    assert outcome(first) == outcome(second)
    assert (second.reused_tokens, second.read_tokens) == (len(SYSTEM) - 1, 1)


# ---------------------------------------------------------------------------------------------------------------------
# Text


class Pieces(Tokenizer):
    """Tokens that end one thing and begin a character."""

    def __init__(self):
        self.pieces = [b"st", b"op\xc3", b"\xa9", b"s", b"top", b"\xc3", b"x"]

    def decode(self, ids, skip_special=True):
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


STRINGS = [("ll",), ("hello", "he"), ("é",), ("o\n",), ("\n\nh", "x"), ("stop",), ("sé", "op")]


@pytest.mark.one_cell
@pytest.mark.parametrize("strings", STRINGS, ids=repr)
def test_text_stops_where_decoding_everything_again_finds_the_string(strings):
    cut = strings in STRINGS[-2:]
    tokenizer = Pieces() if cut else tiny_tokenizer()
    random = np.random.default_rng(3)
    pool = range(7) if cut else [*tokenizer.encode("hello hé ll\n\nhello 12 x é é"), 4, 200]
    stopped = 0
    for _ in range(40):
        tokens = random.choice(pool, 25).tolist()
        wanted = next((n for n in range(1, 26) if any(s in tokenizer.decode(tokens[:n]) for s in strings)), None)
        text = tokenizer.decode(tokens[:wanted])
        text = text[: min(text.find(s) for s in strings if s in text)] if wanted else text
        watch, shown = TextWatch(tokenizer, strings), ""
        for n, token in enumerate(tokens, 1):
            found = watch.push(token)
            shown += watch.take()
            assert text.startswith(shown)
            assert found == (n == wanted)
            if found:
                break
        assert shown + watch.rest() == text
        stopped += wanted is not None
    assert stopped > 5


@pytest.fixture(scope="module")
def speaking():
    """A target that says a text, and a drafter that knows it."""
    tokenizer = tiny_tokenizer()
    said = tokenizer.encode("hello 12 and\n\nhé, then hello again and much more of this until the end")
    vocab = 270
    target = small_table(vocab, {4 + i: token for i, token in enumerate(said)}, tokenizer)
    return target, scripted_drafter([[0] * 4 + said] * 2, vocab_size=vocab, mask_token_id=3), tokenizer, said


@pytest.mark.one_cell
@pytest.mark.parametrize("rounds", [1, 4])
def test_stop_strings_do_not_depend_on_the_rounds(speaking, rounds):
    target, drafter, tokenizer, said = speaking
    engine = make(target, drafter, max_batch=2, rounds_per_step=rounds, verify="block")  # greedy rows of any rule are greedy
    one = engine.submit([7, 8, 9, 10], 40, stop=["then hell", "zzz"])
    two = engine.submit([7, 8, 9, 11], 40, stop="\nh")
    pieces = list(one.stream_text())
    engine.run()
    assert engine._state.done_B.all(), "a row goes on after its stop string"
    assert "".join(pieces) == one.text == "hello 12 and\n\nhé, "
    assert not any("t" in piece for piece in pieces)
    assert two.text == "hello 12 and\n"
    for request, string in ((one, "then hell"), (two, "\nh")):
        assert request.finish_reason == "stop"
        assert request.tokens == said[: len(request.tokens)]
        assert string in tokenizer.decode(request.tokens)
        assert string not in tokenizer.decode(request.tokens[:-1])
    after = engine.submit([7, 8, 9, 10], 5)
    assert not after.tokens
    engine.run()
    assert (after.text, after.reused_tokens) == (tokenizer.decode(said[:5]), 3)


@pytest.mark.one_cell
def test_streamed_ids_are_the_tokens(speaking):
    target, drafter, tokenizer, said = speaking
    engine = make(target, drafter, max_batch=2, rounds_per_step=1, verify="block")
    request = engine.submit([7, 8, 9, 10], 22)
    pieces = list(request.stream())
    assert [len(piece) for piece in pieces] == [7, 6, 6, 3]
    assert [token for piece in pieces for token in piece] == request.tokens == said[:22]
    assert list(request.stream()) == [request.tokens]
    assert "".join(request.stream_text()) == request.text == tokenizer.decode(said[:22])


# ---------------------------------------------------------------------------------------------------------------------
# Cancelling, threads, failures


@pytest.mark.one_cell
def test_cancelling():
    """Before admission, while the prompt is read, while decoding; the others go on, and what was read serves again."""
    engine = make(small_table(), None)
    decoding, reading = engine.submit(prompt(1, 4), 60), engine.submit(prompt(2, 5 * CHUNK), 5)
    other = engine.submit(prompt(3, 4), 30)
    waiting = engine.submit(prompt(4, 4), 5)
    for _ in range(4):
        engine.step()
    assert len(decoding.tokens) > 3
    assert not reading.tokens
    for request in (decoding, reading, waiting):
        request.cancel()
        assert not request.done
    engine.step()
    kept = decoding.tokens
    assert all(request.finish_reason == "cancelled" for request in (decoding, reading, waiting))
    assert (reading.tokens, waiting.tokens) == ([], [])
    assert list(waiting.stream()) == []
    engine.run()
    assert decoding.tokens == kept
    assert outcome(other)[1] == "length"
    other.cancel()
    assert other.finish_reason == "length"
    again = engine.submit(reading.prompt, 5)
    engine.run()
    assert 0 < again.reused_tokens < len(reading.prompt)
    assert_equals_generate(again, small_table(), None, {"max_new_tokens": 5})


@pytest.mark.one_cell
@pytest.mark.parametrize("served", [True, False])
def test_threads(served):
    """Two threads submit and stream; a third steps, or they drive the engine themselves."""
    target = small_table()
    engine = make(target, None)
    outs, stop = {}, threading.Event()

    def ask(first):
        for seed in range(first, first + 4):
            request = engine.submit(prompt(seed, 3 + seed % 5), 8 + seed % 3)
            outs[seed] = [token for piece in request.stream() for token in piece]

    def serve():
        while not stop.is_set():
            engine.step()

    threads = [threading.Thread(target=ask, args=(first,)) for first in (100, 200)]
    server = threading.Thread(target=serve)
    for thread in (*threads, server) if served else threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    stop.set()
    if served:
        server.join(60)
    assert len(outs) == 8
    for seed, tokens in outs.items():
        text = prompt(seed, 3 + seed % 5)
        while len(text) < 3 + seed % 5 + 8 + seed % 3:
            text.append(target.next_token(text))
        assert tokens == text[3 + seed % 5 :]


@pytest.mark.one_cell
@pytest.mark.parametrize("where", ["prefill_chunk", "decode", "report"])
def test_an_interrupt_loses_nothing(monkeypatch, where):
    """At every step: before the device takes the state, or when it has gone on and the host has not looked yet."""
    real, target, interrupts = getattr(engine_module, where), small_table(), 0
    for at in range(1, 9):
        engine, calls = make(target, None), []
        requests = [engine.submit(prompt(seed, 20), 7) for seed in (1, 2)]

        def interrupted(*args, at=at, calls=calls, **kwargs):
            calls.append(where)
            if len(calls) == at:
                raise KeyboardInterrupt
            return real(*args, **kwargs)

        monkeypatch.setattr(engine_module, where, interrupted)
        try:
            engine.run()
        except KeyboardInterrupt:
            interrupts += 1
            engine.run()
        for request in requests:
            assert_equals_generate(request, target, None, {"max_new_tokens": 7})
    assert interrupts > 3


@pytest.mark.one_cell
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")])
def test_an_engine_that_lost_its_state_says_so(monkeypatch, error):
    engine = make(small_table(), None)
    request = engine.submit(prompt(1, 4), 5)
    real = engine_module.decode

    def fails(*args, **kwargs):
        real(*args, **kwargs)
        raise error

    monkeypatch.setattr(engine_module, "decode", fails)
    with pytest.raises(type(error)):
        engine.step()
    monkeypatch.undo()
    for call in (engine.step, engine.run, lambda: engine.submit([1]), lambda: next(request.stream())):
        with pytest.raises(EngineError, match="make a new Engine"):
            call()


BAD_REQUESTS = [
    (dict(prompt_ids=[]), PromptError, "empty"),
    (dict(prompt_ids=[TOKENS]), PromptError, "ids lie in 0..4"),
    (dict(prompt_ids="text"), PromptError, "token ids"),
    (dict(prompt_ids=[1] * MAX_LEN), PromptError, f"has {MAX_LEN} tokens and the engine room for {MAX_LEN}"),
    (dict(max_new_tokens=0), ConfigError, "max_new_tokens is 0"),
    (dict(max_new_tokens=1.5), ConfigError, "max_new_tokens is 1.5"),
    (dict(temperature="hot"), ConfigError, "temperature is 'hot'"),
    (dict(temperature=-1.0), ConfigError, "temperature is -1.0"),
    (dict(top_k=2**40), ConfigError, "top_k"),
    (dict(top_p=0.0), ConfigError, "top_p is 0.0"),
    (dict(seed=-1), ConfigError, "seed is -1"),
    (dict(stop_token_ids=[7]), ConfigError, "stop token 7 is no token id"),
    (dict(stop_token_ids=3), ConfigError, "stop_token_ids is 3"),
    (dict(stop=["x"]), ConfigError, "tokenizer"),
    (dict(stop=3), ConfigError, "stop is 3"),
]


def test_what_cannot_be_decoded_is_refused_at_once():
    engine = make(small_table(), None)
    for changes, error, words in BAD_REQUESTS:
        with pytest.raises(error, match=words):
            inspect.unwrap(Engine.submit)(engine, **{"prompt_ids": [1, 2]} | changes)  # the tests' own type checks come before ours
    assert not engine.step()
    with pytest.raises(ConfigError, match="no tokenizer"):
        _ = engine.submit([1]).text
    many = make(small_table(vocab=61), None)
    with pytest.raises(ConfigError, match="room for 8"):
        many.submit([1], stop_token_ids=range(9))
    with pytest.raises(ConfigError, match="'' is no text"):
        make(small_table(270, tokenizer=tiny_tokenizer()), None).submit([1], stop=[""])


@pytest.mark.one_cell
@pytest.mark.parametrize("name", ["max_batch", "max_len", "rounds_per_step", "prefill_chunk"])
def test_an_engine_needs_whole_sizes(name):
    for number in (0, 1.5, None):
        with pytest.raises(ConfigError, match=name):
            inspect.unwrap(Engine.__init__)(object.__new__(Engine), small_table(), **{name: number})


# ---------------------------------------------------------------------------------------------------------------------
# Cost


@pytest.mark.one_cell
def test_programs_are_few_whatever_is_asked():
    counts = [f._cache_size() for f in (prefill_chunk, decode, report, freeze)]
    engine = make(small_table(), None, prefill_chunk=24)
    for length in (1, 2, 15, 16, 17, 31, 39, 40, 41, 79, 100):
        engine.submit(prompt(length, length), 1 + length % 9, temperature=length % 2 * 0.5, top_k=length % 3, stop_token_ids=[0])
    engine.submit(prompt(0, 3)).cancel()
    engine.run()
    programs = [f._cache_size() - n for f, n in zip((prefill_chunk, decode, report, freeze), counts, strict=True)]
    assert programs[0] <= 2, "16 and 24"
    assert all(n <= 1 for n in programs[1:])


@pytest.mark.one_cell
def test_reading_a_prompt_moves_one_row(monkeypatch):
    """The state is updated in place, and no more than a few rows exist beside it."""
    seen = []
    monkeypatch.setattr(engine_module, "prefill_chunk", lambda *args, **kwargs: seen.append((args, kwargs)) or 1 / 0)
    engine = make(drafter=None, max_batch=16)
    engine.submit([1, 2])
    with pytest.raises(ZeroDivisionError):
        engine.step()
    args, kwargs = seen[0]
    memory = prefill_chunk.lower(*args, **kwargs).compile().memory_analysis()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(engine._state))
    assert memory.alias_size_in_bytes >= size
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 2048, "an output has a buffer of its own"
    assert memory.temp_size_in_bytes < size / 4, "a copy of all rows"
