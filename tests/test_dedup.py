"""What is dropped before training: exact and near duplicates against a brute-force oracle, and evaluation prompts at the rules' edges."""

import itertools
import pickle
import random
import re
import subprocess
import sys
import tracemalloc
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from draftsmith.data.conversations import Conversation, Source, read
from draftsmith.data.dedup import CONTAINED, COPIED, EQUAL, PERMUTATIONS, DedupFilter, MinHasher, words

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
VOCABULARY = [f"word{n}" for n in range(5000)]
NONE = MinHasher([])


def text(words: str | list[str]) -> Conversation:
    return Conversation("a", "all", text=words if isinstance(words, str) else " ".join(words))


def chat(*contents: str) -> Conversation:
    roles = itertools.cycle(("user", "assistant"))
    return Conversation("a", "all", [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)])


def reasons(*examples: Conversation, minhasher: MinHasher = NONE, near: float = 0.8) -> list[str]:
    """Why each example is dropped; "" where it is kept."""
    dedup = DedupFilter(near)
    return [dedup.keep(minhasher.sign(example)) for example in examples]


def shingles(text: list[str]) -> set[tuple[str, ...]]:
    return {tuple(text[start : start + 5]) for start in range(max(1, len(text) - 4))}


def jaccard(first: list[str], second: list[str]) -> float:
    a, b = shingles(first), shingles(second)
    return len(a & b) / len(a | b)


def test_words_are_the_same_by_either_way():
    mixed = "Don't_panic: 3.14 x+y ÄÖ ＡＢＣ１２ ﬁne naïve 漢字,かな İstanbul \u00a0 (C++)\t#2"
    assert words(mixed)[:6] == ["don", "t", "panic", "3", "14", "x"]
    assert "äö" in words(mixed) and "abc12" in words(mixed) and "fine" in words(mixed)
    every = "".join(f"{chr(code)}a{chr(code)}" for code in range(128))
    assert every.isascii() and words(every) == words(every + " ä")[:-1], "the quick way for ASCII agrees with the slow one"
    assert words("") == words(" ?! ") == words("…") == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("हिन्दी की किताब!", ["हिन्दी", "की", "किताब"]),  # without its vowel signs it would be that of ह न द क त ब
        ("ที่ ดี", ["ที่", "ดี"]),
        ("မြန်မာ", ["မြ", "န်", "မာ"]),
        ("كِتَاب, כֹּל", ["كِتَاب", "כֹּל"]),
        ("\u0301 a", ["a"]),
    ],
)
def test_marks_belong_to_their_letters(text, expected):
    assert words(text) == [unicodedata.normalize("NFKC", word) for word in expected]


def test_exact_duplicates_are_of_words_and_of_turns():
    examples = [chat("Two?", "2"), chat("two", " 2!"), chat("Two? 2"), chat("2", "two"), text("two 2"), text("TWO: 2."), text("two ２")]
    assert reasons(*examples) == ["", "exact duplicate", "", "", "exact duplicate", "exact duplicate", "exact duplicate"]


def test_calls_and_reasoning_tell_examples_apart():
    def called(**keys):
        return Conversation("a", "all", [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "", **keys}])

    north, south = ([{"function": {"name": "go", "arguments": {"to": direction}}}] for direction in ("north", "south"))
    examples = [called(tool_calls=north), called(tool_calls=south), called(tool_calls=north), called(reasoning_content="Hm."), called()]
    assert reasons(*examples) == ["", "", "exact duplicate", "", ""]
    assert reasons(called(name="x"), called(name="y")) == ["", "exact duplicate"], "a name is not said"


def test_empty_examples_are_duplicates_of_each_other_only():
    assert reasons(chat(), text("a"), text(" "), chat("", "")) == ["", "", "exact duplicate", ""]


def test_examples_without_words_are_compared_as_they_are():
    assert reasons(chat("🙂", "🎉"), chat("?!", "…"), chat("?!", "..."), chat("+", "-")) == ["", "", "exact duplicate", ""]


def test_short_texts_are_duplicates_only_if_equal():
    pairs = [
        ("Paris", "London"),
        ("yes it is", "yes it was"),
        ("What is 12+7?", "What is 13+7?"),
        ("a b c d", "d c b a"),
        ("a b", "a b a b"),
    ]
    for first, second in pairs:
        assert reasons(text(first), text(second), text(first), near=0.1) == ["", "", "exact duplicate"]
        assert reasons(chat("Capital?", first), chat("Capital?", second)) == ["", ""]
    template = "What is {} plus 7? Think step by step, and then give the answer as a number."
    assert jaccard(words(template.format(12)), words(template.format(13))) < 0.8
    assert reasons(text(template.format(12)), text(template.format(13))) == ["", ""]


def edited(rng: random.Random, text: list[str], edits: int) -> list[str]:
    copy = text[:]
    for index in rng.sample(range(len(copy)), edits):
        copy[index] = "edited" + str(rng.random())
    return copy


def test_near_duplicates_agree_with_brute_force():
    rng = random.Random(0)
    counted = {"dropped": 0, "kept": 0, "between": 0}
    for _ in range(60):
        base = rng.choices(VOCABULARY, k=rng.randint(60, 400))
        for edits in (1, 2, 4, 8, 16, 32):
            copy = edited(rng, base, edits)
            similarity, reason = jaccard(base, copy), reasons(text(base), text(copy))[1]
            if similarity >= 0.95:
                assert reason == "near duplicate"
                counted["dropped"] += 1
            elif similarity <= 0.6:  # four standard deviations below
                assert reason == ""
                counted["kept"] += 1
            else:
                counted["between"] += 1
    assert min(counted.values()) > 30, counted


@pytest.mark.parametrize("near", [0.3, 0.5, 0.8, 0.9, 0.98])
def test_the_table_drops_what_comparing_all_pairs_drops(near):
    """The oracle compares each example's MinHash with those of all examples kept; the table may lose one pair in a hundred."""
    rng = random.Random(1)
    bases = [rng.choices(VOCABULARY, k=rng.randint(5, 120)) for _ in range(300)]
    examples = bases + [edited(rng, base, min(len(base) - 1, edits)) for base in bases for edits in (1, 2, 3, 8, 20)]
    rng.shuffle(examples)
    dedup, minhashes, missed, dropped = DedupFilter(near), np.empty((0, PERMUTATIONS), np.uint32), 0, 0
    for signature in [NONE.sign(text(example)) for example in examples]:
        duplicate = ((minhashes == signature.minhash).mean(1) >= near).any()
        reason = dedup.keep(signature)
        dropped += reason == "near duplicate"
        assert duplicate or not reason, "never dropped without a near duplicate among those kept"
        missed += duplicate and not reason
        if not reason:
            minhashes = np.vstack([minhashes, signature.minhash])
    assert dedup.kept_count == len(minhashes) > 299 and missed <= 0.01 * dropped
    assert dropped > (50 if near < 0.98 else 0)


def test_at_1_only_equal_examples_go():
    """One word in 4,000 leaves the MinHash as it is for one text in three or so."""
    rng, dedup, equal = random.Random(3), DedupFilter(1.0), 0
    for _ in range(10):
        base = rng.choices(VOCABULARY, k=4000)
        pair = [NONE.sign(text(example)) for example in (base, [*base[:-1], "another"])]
        equal += bool((pair[0].minhash == pair[1].minhash).all())
        assert [dedup.keep(signature) for signature in (*pair, pair[1])] == ["", "", "exact duplicate"]
    assert equal > 0


def test_a_minhash_estimates_the_similarity():
    rng, errors = random.Random(2), []
    for _ in range(150):
        base = rng.choices(VOCABULARY, k=300)
        copy = edited(rng, base, rng.choice((2, 6, 12, 25)))
        estimate = (NONE.sign(text(base)).minhash == NONE.sign(text(copy)).minhash).mean()
        errors.append(estimate - jaccard(base, copy))
    assert abs(np.mean(errors)) < 0.015, "no bias: three standard errors"
    assert np.std(errors) < 1.25 * (0.25 / PERMUTATIONS) ** 0.5


def test_a_long_text_is_signed_in_pieces_as_at_once():
    long = random.Random(3).choices(VOCABULARY, k=20_000)
    parts = [NONE.sign(text(long[max(0, start - 4) : start + 3000])).minhash for start in range(0, 20_000, 3000)]
    assert (NONE.sign(text(long)).minhash == np.minimum.reduce(parts)).all()


def test_a_template_shared_by_all_hides_no_copy_and_costs_no_more():
    rng = random.Random(4)
    template, own = rng.choices(VOCABULARY, k=100), [rng.choices(VOCABULARY, k=60) for _ in range(3000)]
    dedup = DedupFilter()
    assert {dedup.keep(NONE.sign(text(template + example))) for example in own} == {""}
    copies = [dedup.keep(NONE.sign(text(template + edited(rng, example, 1)))) for example in own[::30]]
    assert copies.count("near duplicate") >= 99
    members = [len(set(dedup._table[band].ravel().tolist()) - {-1}) for band in dedup._bands]
    assert dedup._table.shape[2] == 4 and min(members) < 2500 < max(members), "full buckets were met, and examples replaced"


def test_a_shared_system_prompt_makes_no_near_duplicates():
    rng = random.Random(5)
    system, own = " ".join(rng.choices(VOCABULARY, k=800)), [" ".join(rng.choices(VOCABULARY, k=60)) for _ in range(40)]
    spoken = [chat(example, "yes").messages for example in own]
    rows = [Conversation("a", "all", [{"role": "system", "content": system}, *messages]) for messages in spoken]
    assert set(reasons(*rows)) == {""}
    assert reasons(*rows[:2], chat(own[0], "yes"), rows[0]) == ["", "", "near duplicate", "exact duplicate"]
    alone = [Conversation("a", "all", [{"role": "system", "content": f"{system} {n}"}]) for n in range(2)]
    assert reasons(*alone) == ["", "near duplicate"]
    assert MinHasher([system]).sign(rows[0]).contamination


def test_memory_for_a_hundred_thousand_examples_is_tens_of_megabytes():
    signature = NONE.sign(text("a"))
    rng = np.random.default_rng(0)
    tracemalloc.start()
    dedup = DedupFilter()
    for number in range(10_000):
        dedup.keep(signature._replace(digest=number.to_bytes(16), minhash=rng.integers(1 << 32, size=PERMUTATIONS, dtype=np.uint32)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert dedup.kept_count == 10_000 and peak * 10 < 200e6


def test_what_is_kept_depends_on_the_order_alone():
    rng = random.Random(5)
    base = rng.choices(VOCABULARY, k=100)
    examples = [text(edited(rng, base, rng.randint(0, 12))) for _ in range(200)] + [text(rng.choices(VOCABULARY, k=9)) for _ in range(2000)]
    assert reasons(*examples) == reasons(*examples, minhasher=MinHasher([]))
    first, second = text(base), text(edited(rng, base, 1))
    assert reasons(first, second) == reasons(second, first) == ["", "near duplicate"]


def test_signatures_agree_between_processes():
    minhasher, example = MinHasher(["one two three four five"]), chat("Who counts one, two, three, four, five?", "I do. " * 40)
    code = (
        "import pickle, sys; minhasher, example = pickle.load(sys.stdin.buffer); sign = minhasher.sign(example);"
        "print(sign.digest.hex(), sign.minhash.tobytes().hex(), sign.contamination, sep='|')"
    )
    sent = pickle.dumps((minhasher, example))
    printed = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True).stdout.decode()
    own = minhasher.sign(example)
    assert own.contamination == CONTAINED
    assert printed.strip() == f"{own.digest.hex()}|{own.minhash.tobytes().hex()}|{own.contamination}"
    copy = pickle.loads(pickle.dumps(own))
    assert copy.digest == own.digest and (copy.minhash == own.minhash).all() and copy.minhash.dtype == np.uint32


def test_counts_are_by_reason():
    dedup = DedupFilter()
    minhasher = MinHasher(["Name the capital of France."])
    long = " ".join(VOCABULARY[:100])
    for example in (text(long), text(long), text(long + " more"), text("Name the capital of France"), text("other"), text("other")):
        dedup.keep(minhasher.sign(example))
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
    for example in (
        text(inside),
        chat("Hello.", inside),
        chat(inside.upper().replace(" ", ", "), "x"),
        text(shared),
        chat("x", " ".join(shared)),
    ):
        assert minhasher.sign(example).contamination == (contamination if len(shared) >= 13 else "")


@pytest.mark.parametrize(("length", "contamination"), [(1, ""), (4, ""), (5, CONTAINED), (12, CONTAINED), (13, COPIED)])
def test_a_short_prompt_is_contained_completely(length, contamination):
    minhasher = MinHasher([" ".join(PROMPT[:length])])
    assert minhasher.sign(text(BEFORE + PROMPT[:length] + AFTER)).contamination == contamination
    assert minhasher.sign(text(BEFORE + PROMPT[: length - 1] + AFTER)).contamination == ""
    assert minhasher.sign(text(BEFORE + PROMPT[1:length] + AFTER)).contamination == ""
    assert minhasher.sign(text(PROMPT[:length])).contamination == EQUAL, "at any length"
    assert minhasher.sign(chat("Hello.", "Hi.", " ".join(PROMPT[:length]).upper() + "!")).contamination == EQUAL


WITHOUT_BLANKS = (
    "请解释量子纠缠的基本原理，并举一个日常生活中的例子说明它为什么违反直觉。",
    "量子もつれの基本をわかりやすく説明してください",
    "ช่วยอธิบายหลักการพื้นฐานของการพัวพันเชิงควอนตัม",
)


@pytest.mark.parametrize("prompt", WITHOUT_BLANKS)
def test_prompts_in_scripts_without_blanks_are_detected(prompt):
    minhasher = MinHasher([prompt])
    assert minhasher.sign(chat(f"好，{prompt}吗", "No.")).contamination == COPIED
    assert minhasher.sign(chat("今天天气很好，我们去公园散步吧", "No.")).contamination == ""


def test_near_duplicates_in_scripts_without_blanks():
    signed = [MinHasher([]).sign(chat("".join(WITHOUT_BLANKS) + end, "No.")) for end in ("x", "y")]
    dedup = DedupFilter()
    assert [dedup.keep(signature) for signature in signed] == ["", "near duplicate"]


def test_no_run_crosses_the_turns_but_in_the_text():
    minhasher = MinHasher([" ".join(PROMPT[:5]), " ".join(PROMPT[10:30])])
    halves = [" ".join(part) for part in (PROMPT[:3], PROMPT[3:5], PROMPT[10:20], PROMPT[20:30])]
    assert minhasher.sign(chat(*halves)).contamination == ""
    for question, answer, contamination in (
        (halves[0], halves[1], EQUAL),
        ("so " + halves[0], halves[1], CONTAINED),
        (halves[2], halves[3] + " so", COPIED),
    ):
        example = chat(question, answer)
        assert minhasher.sign(example).contamination == ""
        both = Conversation("a", "all", example.messages, text=f"{question} {answer}", prompt=len(question))
        assert minhasher.sign(both).contamination == contamination
        assert (minhasher.sign(both).minhash == minhasher.sign(example).minhash).all(), "the text beside messages is the same example"


def test_prompts_with_the_same_beginning_are_all_detected():
    minhasher = MinHasher(
        [" ".join(PROMPT[:6]), " ".join([*PROMPT[:5], "else", "again"]), " ".join([*PROMPT[:5], *VOCABULARY[100:120]]), "", "?!"]
    )
    assert minhasher.sign(text(["so", *PROMPT[:6]])).contamination == CONTAINED
    assert minhasher.sign(text(["so", *PROMPT[:5], "else", "again"])).contamination == CONTAINED
    assert minhasher.sign(text(["so", *PROMPT[:5], *VOCABULARY[100:108]])).contamination == COPIED
    assert minhasher.sign(text(["so", *PROMPT[:5], *VOCABULARY[100:107]])).contamination == ""
    assert minhasher.sign(text("")).contamination == "", "a prompt without words equals nothing"


@pytest.mark.skipif(not SHARED.is_dir(), reason="no shared data")
def test_real_examples_were_cleared_and_planted_prompts_are_detected():
    tasks = read(Source(path=str(SHARED / "eval" / "spec_tasks.jsonl.gz")))
    prompts = [message["content"] for task in tasks for message in task.messages or ()]
    minhasher, examples = MinHasher(prompts), list(read(Source(path=str(SHARED / "chat" / "valid.jsonl.gz"))))
    assert len(prompts) == 724 and len(examples) == 1534
    dedup = DedupFilter()
    for example in examples:
        dedup.keep(minhasher.sign(example))
    assert dedup.counts.keys() <= {"near duplicate"} and dedup.kept_count > 0.97 * len(examples), dedup.counts
    for prompt in prompts:
        assert minhasher.sign(chat("Hello.", prompt)).contamination == EQUAL
        if len(words(prompt)) >= 5:
            assert minhasher.sign(chat(f"Please: {prompt} Thanks.", "No.")).contamination in (COPIED, CONTAINED)
    assert sum(len(words(prompt)) >= 5 for prompt in prompts) > 700
