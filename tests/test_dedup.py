"""What is dropped before training: exact and near duplicates against a brute-force oracle, and evaluation prompts at the rules' edges."""

import itertools
import pickle
import random
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from draftsmith.data.conversations import Conversation, Source, read
from draftsmith.data.dedup import COPIED, EQUAL, CONTAINED, PERMUTATIONS, DedupFilter, MinHasher, words

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
VOCABULARY = [f"word{n}" for n in range(5000)]
NONE = MinHasher([])


def text(words: str | list[str]) -> Conversation:
    return Conversation("a", "all", text=words if isinstance(words, str) else " ".join(words))


def chat(*contents: str) -> Conversation:
    roles = itertools.cycle(("user", "assistant"))
    return Conversation("a", "all", [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)])


def reasons(*rows: Conversation, minhasher: MinHasher = NONE, near: float = 0.8) -> list[str]:
    dedup = DedupFilter(near)
    return [dedup.keep(minhasher.sign(row)) for row in rows]


def shingles(found: list[str]) -> set[tuple[str, ...]]:
    return {tuple(found[at : at + 5]) for at in range(max(1, len(found) - 4))}


def jaccard(one: list[str], other: list[str]) -> float:
    a, b = shingles(one), shingles(other)
    return len(a & b) / len(a | b)


def test_words_are_the_same_by_either_way():
    mixed = "Don't_panic: 3.14 x+y ÄÖ ＡＢＣ１２ ﬁne naïve 漢字,かな İstanbul \u00a0 (C++)\t#2"
    assert words(mixed)[:6] == ["don", "t", "panic", "3", "14", "x"]
    assert "äö" in words(mixed) and "abc12" in words(mixed) and "fine" in words(mixed)
    every = "".join(f"{chr(code)}a{chr(code)}" for code in range(128))
    assert every.isascii() and words(every) == words(every + " ä")[:-1], "the quick way for ASCII agrees with the other"
    assert words("") == words(" ?! ") == words("…") == []


def test_exact_duplicates_are_of_words_and_of_turns():
    found = reasons(chat("Two?", "2"), chat("two", " 2!"), chat("Two? 2"), chat("2", "two"), text("two 2"), text("TWO: 2."), text("two ２"))
    assert found == ["", "exact duplicate", "", "", "exact duplicate", "exact duplicate", "exact duplicate"]


def test_calls_and_thoughts_tell_rows_apart():
    def called(**rest):
        return Conversation("a", "all", [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "", **rest}])

    one, two = ([{"function": {"name": "go", "arguments": {"to": place}}}] for place in ("north", "south"))
    rows = [called(tool_calls=one), called(tool_calls=two), called(tool_calls=one), called(reasoning_content="Hm."), called()]
    assert reasons(*rows) == ["", "", "exact duplicate", "", ""]
    assert reasons(called(name="x"), called(name="y")) == ["", "exact duplicate"], "a name is not said"


def test_empty_rows_are_duplicates_of_each_other_only():
    assert reasons(chat(), text("a"), text("?!"), chat("", "")) == ["", "", "exact duplicate", ""]


def test_short_texts_are_duplicates_only_if_equal():
    pairs = [
        ("Paris", "London"),
        ("yes it is", "yes it was"),
        ("What is 12+7?", "What is 13+7?"),
        ("a b c d", "d c b a"),
        ("a b", "a b a b"),
    ]
    for one, other in pairs:
        assert reasons(text(one), text(other), text(one), near=0.1) == ["", "", "exact duplicate"]
        assert reasons(chat("Capital?", one), chat("Capital?", other)) == ["", ""]
    template = "What is {} plus 7? Think step by step, and then give the answer as a number."
    assert jaccard(words(template.format(12)), words(template.format(13))) < 0.8
    assert reasons(text(template.format(12)), text(template.format(13))) == ["", ""]


def edited(rng: random.Random, found: list[str], edits: int) -> list[str]:
    copy = found[:]
    for at in rng.sample(range(len(copy)), edits):
        copy[at] = "edited" + str(rng.random())
    return copy


def test_near_duplicates_agree_with_brute_force():
    rng = random.Random(0)
    counted = {"caught": 0, "left": 0, "between": 0}
    for _ in range(60):
        base = rng.choices(VOCABULARY, k=rng.randint(60, 400))
        for edits in (1, 2, 4, 8, 16, 32):
            other = edited(rng, base, edits)
            true, found = jaccard(base, other), reasons(text(base), text(other))[1]
            if true >= 0.95:
                assert found == "near duplicate"
                counted["caught"] += 1
            elif true <= 0.6:  # four standard deviations below
                assert found == ""
                counted["left"] += 1
            else:
                counted["between"] += 1
    assert min(counted.values()) > 30, counted


@pytest.mark.parametrize("near", [0.3, 0.5, 0.8, 0.9, 1.0])
def test_the_table_finds_what_comparing_all_pairs_finds(near):
    """The oracle compares every row's MinHash with those of all rows kept; the table may lose one pair in a hundred."""
    rng = random.Random(1)
    bases = [rng.choices(VOCABULARY, k=rng.randint(5, 120)) for _ in range(300)]
    rows = bases + [edited(rng, base, min(len(base) - 1, edits)) for base in bases for edits in (1, 2, 3, 8, 20)]
    rng.shuffle(rows)
    signed = [NONE.sign(text(row)) for row in rows]
    dedup, kept, missed, dropped = DedupFilter(near), np.empty((0, PERMUTATIONS), np.uint32), 0, 0
    for signature in signed:
        truth = ((kept == signature.minhash).mean(1) >= near).any()
        found = dedup.keep(signature)
        dropped += found == "near duplicate"
        assert truth or not found, "never dropped without a like row among those kept"
        missed += truth and not found
        if not found:
            kept = np.vstack([kept, signature.minhash])
    assert dedup.kept_count == len(kept) > 299 and missed <= 0.01 * dropped
    assert dropped > (50 if near < 1 else -1)


def test_a_minhash_estimates_the_similarity():
    rng, errors = random.Random(2), []
    for _ in range(150):
        base = rng.choices(VOCABULARY, k=300)
        other = edited(rng, base, rng.choice((2, 6, 12, 25)))
        estimate = (NONE.sign(text(base)).minhash == NONE.sign(text(other)).minhash).mean()
        errors.append(estimate - jaccard(base, other))
    assert abs(np.mean(errors)) < 0.015, "no bias: three standard errors"
    assert np.std(errors) < 1.25 * (0.25 / PERMUTATIONS) ** 0.5


def test_a_long_text_is_signed_in_pieces_as_in_one():
    found = random.Random(3).choices(VOCABULARY, k=20_000)
    whole = NONE.sign(text(found)).minhash
    parts = [NONE.sign(text(found[max(0, at - 4) : at + 3000])).minhash for at in range(0, 20_000, 3000)]
    assert (whole == np.minimum.reduce(parts)).all()


def test_a_template_shared_by_all_hides_no_copy_and_costs_no_more():
    rng = random.Random(4)
    template, own = rng.choices(VOCABULARY, k=100), [rng.choices(VOCABULARY, k=60) for _ in range(3000)]
    dedup = DedupFilter()
    assert {dedup.keep(NONE.sign(text(template + row))) for row in own} == {""}
    copies = [dedup.keep(NONE.sign(text(template + edited(rng, row, 1)))) for row in own[::30]]
    assert copies.count("near duplicate") >= 99
    slots = [len(set(dedup._table[band].ravel().tolist()) - {-1}) for band in dedup._bands]
    assert dedup._table.shape[2] == 4 and min(slots) < 2500 < max(slots), "crowded slots were met, and pushed rows out"


def test_memory_for_a_hundred_thousand_rows_is_tens_of_megabytes():
    signature = NONE.sign(text("a"))
    rng = np.random.default_rng(0)
    tracemalloc.start()
    dedup = DedupFilter()
    for row in range(10_000):
        dedup.keep(signature._replace(digest=row.to_bytes(16), minhash=rng.integers(1 << 32, size=PERMUTATIONS, dtype=np.uint32)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert dedup.kept_count == 10_000 and peak * 10 < 200e6


def test_what_is_kept_depends_on_the_order_alone():
    rng = random.Random(5)
    base = rng.choices(VOCABULARY, k=100)
    rows = [text(edited(rng, base, rng.randint(0, 12))) for _ in range(200)] + [text(rng.choices(VOCABULARY, k=9)) for _ in range(2000)]
    assert reasons(*rows) == reasons(*rows, minhasher=MinHasher([]))
    one, other = text(base), text(edited(rng, base, 1))
    assert reasons(one, other) == reasons(other, one) == ["", "near duplicate"]


def test_signatures_agree_between_processes():
    minhasher, row = MinHasher(["one two three four five"]), chat("Who counts one, two, three, four, five?", "I do. " * 40)
    code = (
        "import pickle, sys; minhasher, row = pickle.load(sys.stdin.buffer); sign = minhasher.sign(row);"
        "print(sign.digest.hex(), sign.minhash.tobytes().hex(), sign.contamination, sep='|')"
    )
    found = subprocess.run([sys.executable, "-c", code], input=pickle.dumps((minhasher, row)), capture_output=True, check=True).stdout
    own = minhasher.sign(row)
    assert own.contamination == CONTAINED
    assert found.decode().strip() == f"{own.digest.hex()}|{own.minhash.tobytes().hex()}|{own.contamination}"
    again = pickle.loads(pickle.dumps(own))
    assert again.digest == own.digest and (again.minhash == own.minhash).all() and again.minhash.dtype == np.uint32


def test_counts_are_by_reason():
    dedup = DedupFilter()
    minhasher = MinHasher(["Name the capital of France."])
    long = " ".join(VOCABULARY[:100])
    for row in (text(long), text(long), text(long + " more"), text("Name the capital of France"), text("other"), text("other")):
        dedup.keep(minhasher.sign(row))
    assert dedup.counts == {"exact duplicate": 2, "near duplicate": 1, f"evaluation prompt: {EQUAL}": 1} and dedup.kept_count == 2
    for near in (0, -1, 1.01):
        with pytest.raises(ValueError, match=re.escape(f"near is {near}, expected a similarity above 0 and at most 1")):
            DedupFilter(near)


def test_a_contaminated_example_is_no_original():
    minhasher = MinHasher(["Name the capital of France."])
    contaminated, fine = chat("Name the capital of France.", "Paris"), chat("Capital of France", "Paris")
    assert reasons(contaminated, fine, contaminated, minhasher=minhasher)[::2] == [f"evaluation prompt: {EQUAL}"] * 2


PROMPT = VOCABULARY[:40]
BEFORE, AFTER = ["before"] * 7, ["after"] * 7


@pytest.mark.parametrize("start", [0, 11, 27])
@pytest.mark.parametrize(("run", "contamination"), [(12, ""), (13, COPIED), (14, COPIED)])
def test_thirteen_words_in_a_row(start, run, contamination):
    minhasher = MinHasher([" ".join(PROMPT), "another prompt that is not there"])
    shared = PROMPT[start : start + run]
    assert len(shared) == min(run, 40 - start) >= 12
    inside = " ".join(BEFORE + shared + AFTER)
    for row in (
        text(inside),
        chat("Hello.", inside),
        chat(inside.upper().replace(" ", ", "), "x"),
        text(shared),
        chat("x", " ".join(shared)),
    ):
        assert minhasher.sign(row).contamination == (contamination if len(shared) >= 13 else "")


@pytest.mark.parametrize(("length", "contamination"), [(1, ""), (4, ""), (5, CONTAINED), (12, CONTAINED), (13, COPIED)])
def test_a_short_prompt_held_whole(length, contamination):
    minhasher = MinHasher([" ".join(PROMPT[:length])])
    assert minhasher.sign(text(BEFORE + PROMPT[:length] + AFTER)).contamination == contamination
    assert minhasher.sign(text(BEFORE + PROMPT[: length - 1] + AFTER)).contamination == ""
    assert minhasher.sign(text(BEFORE + PROMPT[1:length] + AFTER)).contamination == ""
    assert minhasher.sign(text(PROMPT[:length])).contamination == EQUAL, "at any length"
    assert minhasher.sign(chat("Hello.", "Hi.", " ".join(PROMPT[:length]).upper() + "!")).contamination == EQUAL


def test_no_run_crosses_the_turns_but_in_the_text():
    minhasher = MinHasher([" ".join(PROMPT[:5]), " ".join(PROMPT[10:30])])
    halves = [" ".join(part) for part in (PROMPT[:3], PROMPT[3:5], PROMPT[10:20], PROMPT[20:30])]
    assert minhasher.sign(chat(*halves)).contamination == ""
    for asked, answered, contamination in (
        (halves[0], halves[1], EQUAL),
        ("so " + halves[0], halves[1], CONTAINED),
        (halves[2], halves[3] + " so", COPIED),
    ):
        row = chat(asked, answered)
        assert minhasher.sign(row).contamination == ""
        both = Conversation("a", "all", row.messages, text=f"{asked} {answered}", prompt=len(asked))
        assert minhasher.sign(both).contamination == contamination
        assert (minhasher.sign(both).minhash == minhasher.sign(row).minhash).all(), "the text beside messages is the same row"


def test_prompts_that_begin_alike_are_all_found():
    minhasher = MinHasher(
        [" ".join(PROMPT[:6]), " ".join([*PROMPT[:5], "else", "again"]), " ".join([*PROMPT[:5], *VOCABULARY[100:120]]), "", "?!"]
    )
    assert minhasher.sign(text(["so", *PROMPT[:6]])).contamination == CONTAINED
    assert minhasher.sign(text(["so", *PROMPT[:5], "else", "again"])).contamination == CONTAINED
    assert minhasher.sign(text(["so", *PROMPT[:5], *VOCABULARY[100:108]])).contamination == COPIED
    assert minhasher.sign(text(["so", *PROMPT[:5], *VOCABULARY[100:107]])).contamination == ""
    assert minhasher.sign(text("")).contamination == "", "a prompt without words equals nothing"


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data are not here")
def test_real_rows_were_cleared_and_planted_prompts_are_caught():
    tasks = read(Source(path=str(SHARED / "eval" / "spec_tasks.jsonl.gz")))
    prompts = [message["content"] for row in tasks for message in row.messages or ()]
    minhasher, rows = MinHasher(prompts), list(read(Source(path=str(SHARED / "chat" / "valid.jsonl.gz"))))
    assert len(prompts) == 724 and len(rows) == 1534
    dedup = DedupFilter()
    for row in rows:
        dedup.keep(minhasher.sign(row))
    assert dedup.counts.keys() <= {"near duplicate"} and dedup.kept_count > 0.97 * len(rows), dedup.counts
    for prompt in prompts:
        assert minhasher.sign(chat("Hello.", prompt)).contamination == EQUAL
        if len(words(prompt)) >= 5:
            assert minhasher.sign(chat(f"Please: {prompt} Thanks.", "No.")).contamination in (COPIED, CONTAINED)
    assert sum(len(words(prompt)) >= 5 for prompt in prompts) > 700
