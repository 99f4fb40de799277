"""Constraints: grammars' masks against enumerated languages, decoding against a slow loop, every drafter against plain decoding, distributions."""

import itertools
import json
import re
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from commands import failing
from decoding_cases import GREEN, PROMPTS, SAMPLED, build_tree, p_value, relative, texts
from languages import PIECES, STOP, Enumerated, spell, tokenizer
from planted import Planted, seen_in
from planting import PlantingDrafter
from zoo import VOCAB

from draftsmith.data.datastore import sort_suffixes
from draftsmith.eval import acceptance, generate, settings
from draftsmith.inference import constraints, processors, rules
from draftsmith.inference.adaptive import AdaptiveDepth
from draftsmith.inference.constraints import constrain, mask_trees
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.drafter import TargetOutput
from draftsmith.inference.errors import exit_on_error
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.grammar import compile_grammar
from draftsmith.inference.hybrid import Hybrid
from draftsmith.inference.lookahead import Lookahead
from draftsmith.inference.lookup import Ngram, Suffix
from draftsmith.inference.recycling import Recycling
from draftsmith.inference.retrieval import Datastore, Rest
from draftsmith.inference.sampler import RULES, Sampling, penalise, sample
from draftsmith.inference.self_speculation import early_exit, skip_layers
from draftsmith.inference.tree import StaticTree
from draftsmith.models.drafter import architecture, new_drafter
from draftsmith.models.target import Target

pytest.importorskip("llguidance")

NEW = 16
TREES = {"chain": StaticTree.chain(3), "static": StaticTree.cartesian((3, 2, 1)), "dynamic": DynamicTree(3, 2, 10)}
COMPACT = {"x-guidance": {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}}
OBJECT = {
    "type": "object",
    "properties": {"a": {"enum": [0, 12]}, "b": {"enum": ["x", "xy"]}},
    "required": ["a"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"enum": ["a", "ab", "abc"]}, "minItems": 2, "maxItems": 4}


def strings(alphabet: str, longest: int) -> list[str]:
    return ["".join(letters) for length in range(longest + 1) for letters in itertools.product(alphabet, repeat=length)]


# Grammars, and all strings of their languages by other means.
LANGUAGES = {
    "regex": ("regex", "(ab?|c)[01]{0,2}", [text for text in strings("abc01", 4) if re.fullmatch("(ab?|c)[01]{0,2}", text)]),
    "empty": ("regex", "(aba?)?", ["", "ab", "aba"]),
    "GBNF": ("grammar", 'root ::= item ("," item)?\nitem ::= [ab] | "{" [0-2] "}"', [",".join(items) for count in (1, 2) for items in itertools.product(["a", "b", "{0}", "{1}", "{2}"], repeat=count)]),
    "Lark": ("grammar", 'start: "[" one "]"\none: two | "[" two? "]"\ntwo: "a" | "[" /[xy]{1,4}/ "]" "b"', []),
    "JSON": ("json_schema", json.dumps(OBJECT | COMPACT), ["{" + f'"a":{a}' + b + "}" for a in ("0", "12") for b in ("", ',"b":"x"', ',"b":"xy"')]),
}  # fmt: skip
INNER = ["a", *(f"[{text}]b" for text in strings("xy", 4) if text)]
LANGUAGES["Lark"] = (*LANGUAGES["Lark"][:2], [f"[{text}]" for text in [*INNER, "[]", *(f"[{text}]" for text in INNER)]])


def compiled(name: str):
    kind, text, _ = LANGUAGES[name]
    return compile_grammar(kind, text, tokenizer(), VOCAB, [STOP])


def enumerated(name: str) -> Enumerated:
    return Enumerated(frozenset(LANGUAGES[name][2]), VOCAB)


def bits(state) -> list[bool]:
    mask = state.allowed()
    return [bool(mask[token // 8] >> token % 8 & 1) for token in range(VOCAB)]


@pytest.mark.parametrize("name", LANGUAGES)
def test_masks_and_states_are_those_of_the_enumerated_language(name):
    """At every prefix that tokens reach in at most five steps, by every spelling, and after the end.

    Where the text is forced, as the names of a JSON object are, the library allows its usual spelling alone.
    """
    forced = name == "JSON"
    for text in LANGUAGES[name][2]:
        state = compiled(name).start()
        for token in [*tokenizer().encode(text), STOP, STOP]:
            assert bits(state)[token], (text, token)
            state = state.after(token)
    level, seen = [(compiled(name).start(), enumerated(name).start())], Counter()
    assert len(PIECES) + 1 < VOCAB, "some ids are no tokens"
    for _ in range(5):
        following = []
        for state, expected in level:
            allowed, wider = bits(state), expected.tokens()
            assert allowed == wider or (forced and all(wide or not allows for allows, wide in zip(allowed, wider, strict=True))), expected
            seen["ended" if expected.ended else "open"] += 1
            for token in range(VOCAB):
                pair = state.after(token), expected.after(token)
                assert forced or (pair[0] is None) == (pair[1] is None) == (not allowed[token]), (expected, token)
                if allowed[token] and len(following) < 100:
                    following.append(pair)
            assert bits(state) == allowed, "a state that was forked is as it was"
            assert Fresh(name, expected.path).tokens() == allowed, "nor does it matter which masks were made before"
        level = following
    assert seen["open"] >= 5 and (forced or seen["ended"] >= 1)


@dataclass(frozen=True)
class Fresh:
    """A constraint whose every state is a new matcher, which reads all tokens without a copy and without a mask on the way."""

    name: str
    path: tuple[int, ...] = ()

    def start(self) -> "Fresh":
        return self

    def after(self, token: int) -> "Fresh":
        return Fresh(self.name, (*self.path, token))

    def tokens(self) -> list[bool]:
        if STOP in self.path:
            return [token == STOP for token in range(VOCAB)]
        state = compiled(self.name).start()
        assert state.matcher.consume_tokens(list(self.path))
        return bits(state)


def slow_answer(target: Target, prompt: list[int], sampling: Sampling, key: int, language: Enumerated | Fresh, processor=None) -> list[int]:
    """Constrained decoding without cache, trees or library: a forward over the text for every token, and a mask by enumeration."""
    state, answer = language.start(), []
    while len(answer) < NEW and STOP not in answer:
        text = prompt + answer
        logits = target.logits(target.forward(torch.tensor([text])).hidden[0, -1]).float()
        logits[~torch.tensor(state.tokens())] = -torch.inf
        seen = torch.zeros(VOCAB, dtype=torch.bool)
        seen[text] = True
        logits = penalise(logits, seen, sampling.repetition_penalty)
        if processor:
            logits = processor(torch.tensor([text]), logits[None])[0]
        answer.append(int(sample(logits, sampling, torch.tensor(key), torch.tensor(len(text)))))
        state = state.after(answer[-1])
    return answer


HOWS = {
    "greedy": Sampling(),
    "sampled": SAMPLED,
    "shared-noise": Sampling(1.2, seed=5, rule="shared-noise"),
    "penalised": Sampling(0.9, repetition_penalty=1.3, seed=7),
}


def bias(history, scores):
    return scores + (history.sum(1, keepdim=True) + torch.arange(scores.shape[1])) % 7 * 0.5


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", LANGUAGES)
def test_decoding_is_that_of_a_slow_loop(target, name, how):
    slow, ends = Fresh(name) if name == "JSON" else enumerated(name), Counter()  # the library's JSON has fewer spellings
    for given in ((), (bias,)):
        expected = [slow_answer(target, prompt, HOWS[how], i, slow, *given) for i, prompt in enumerate(PROMPTS)]
        for constraint in (compiled(name), *([slow] if isinstance(slow, Enumerated) else [])):
            sampling = constrained(HOWS[how], constraint)
            assert texts(Decoder(target, slots=2).generate(PROMPTS, sampling, NEW, [STOP], processors=given)) == expected
            planting = PlantingDrafter(PROMPTS, expected, VOCAB, duplicates=True)
            out = Decoder(target, planting, slots=3).generate(PROMPTS, sampling, NEW, [STOP], processors=given)
            assert texts(out) == expected and planting.mismatches == 0
            ends.update(completion.reason for completion in out)
        assert all(spell(answer) in LANGUAGES[name][2] for answer in expected if answer[-1] == STOP)
    assert ends["stop"] >= 5


def constrained(sampling: Sampling, constraint) -> Sampling:
    return replace(sampling, constraint=constraint)


TRAINED = ("medusa", "hydra", "eagle", "mtp", "kangaroo", "dflash")


def store() -> Rest:
    """Looks up in random texts."""
    tokens = np.array([*torch.randint(1, VOCAB + 1, (20_000,), generator=torch.Generator().manual_seed(1)), 0], dtype=np.uint16)
    suffixes, spare = np.empty((2, len(tokens)), dtype=np.uint32)
    sort_suffixes(tokens, suffixes, spare, VOCAB + 1)
    return Rest(Datastore(tokens, suffixes, VOCAB))


def make(kind: str, tree, target: Target):
    if kind in TRAINED:
        drafter = new_drafter(kind, target, **next(iter(architecture(kind).Config.tiny_settings().values())))
        drafter.tree_spec = tree
        return drafter
    makers = {
        "draft model": lambda: DraftModel(relative("llama", 0.005), tree),
        "ngram": Ngram,
        "suffix": lambda: Suffix(memory=500),
        "recycling": Recycling,
        "rest": store,
        "lookahead": lambda: Lookahead(window=4),
        "early-exit": lambda: early_exit(target, 1),
        "skip": lambda: skip_layers(target, [0]),
        "hybrid": lambda: Hybrid(new_drafter("medusa", target, num_heads=3), Suffix(memory=500)),
    }
    drafter = makers[kind]()
    drafter.tree_spec = tree
    return drafter


@pytest.fixture(scope="module")
def plain_answers(target):
    """The sampling and plain decoding's answers, by how they are drawn."""
    grammar = compile_grammar("json_schema", json.dumps(LIST | COMPACT), tokenizer(), VOCAB, [STOP])
    answers = {}
    for name, how in HOWS.items():
        sampling = constrained(how, grammar)
        answers[name] = sampling, texts(Decoder(target).generate(PROMPTS, sampling, NEW, [STOP]))
    return answers


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(
    "kind", [*TRAINED, "draft model", "ngram", "suffix", "recycling", "rest", "lookahead", "early-exit", "skip", "hybrid"]
)
def test_output_is_that_of_constrained_plain_decoding(target, plain_answers, kind, tree):
    """Rows of different lengths, which end at different rounds; true tokens are planted into the trees of most drafters. Greedily alone and in
    batches; sampled in one of these ways, which differs by tree."""
    seen: Counter[object] = Counter()
    for number, (name, (sampling, expected)) in enumerate(plain_answers.items(), list(TREES).index(tree)):
        for answer in expected:
            if answer[-1] == STOP:
                items = json.loads(spell(answer))
                assert 2 <= len(items) <= 4 and set(items) <= {"a", "ab", "abc"}
                seen["complete"] += 1
        for rows in (1, 3) if sampling.greedy else ((1, 3)[number % 2],):
            drafter = make(kind, TREES[tree], target)
            if kind != "draft model" and kind != "lookahead":  # the others verify and learn what stands in the tree
                drafter.propose = Planted(drafter.propose, PROMPTS, expected, VOCAB)
            decoder = Decoder(target, drafter, slots=rows, chunk=7, adaptive=AdaptiveDepth() if rows == 3 else None)
            answers, counts = seen_in(decoder.stream(PROMPTS, sampling, NEW, [STOP]), len(PROMPTS))
            assert answers == expected, (kind, tree, name, rows)
            seen += counts
    assert seen["complete"] >= 8 and seen["drafted"] >= 20
    if kind not in ("draft model", "lookahead", "ngram"):
        assert seen[1] >= 3 and seen[2] >= 1, seen


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_that_is_not_allowed_is_never_accepted(target, rule):
    """Under lossy rules too. Random trees are nearly always forbidden; every answer is a beginning of some string of the language."""
    how = Sampling(1.5, top_k=30, seed=3, rule=rule, epsilon=0.0, delta=0.0)
    for name in LANGUAGES:
        language = enumerated(name)
        planting = PlantingDrafter(PROMPTS, [[1, 2, 3, 14, 24]] * len(PROMPTS), VOCAB)
        out = Decoder(target, planting, slots=3).generate(PROMPTS, constrained(how, compiled(name)), NEW, [STOP])
        for answer in texts(out):
            assert any(text.startswith(spell(answer)) for text in language.language)
            assert STOP not in answer or (spell(answer) in language.language and answer.index(STOP) == len(answer) - 1)


def test_a_mask_is_made_only_for_nodes_that_can_be_accepted(target):
    """At most one for each node, none for padding and none below a forbidden token."""
    language, expected, rounds = enumerated("regex"), [], []
    plain = texts(Decoder(target).generate(PROMPTS, constrained(SAMPLED, compiled("regex")), NEW, [STOP]))
    drafter = PlantingDrafter(PROMPTS, plain, VOCAB)
    prefixes: dict[int, list[int]] = {}
    start, accept = drafter.start, drafter.accept

    def note_start(slots, prompts, out):
        start(slots, prompts, out)
        prefixes.update({slot: [] for slot in slots})

    def note(round, tree, verdict, out):
        for row, slot in enumerate(round.slots):
            before = prefixes[slot]
            paths = [before]
            for i in range(1, int(tree.size[row])):
                paths.append([*paths[int(tree.parents[row, i])], int(tree.tokens[row, i])])
            expected.append(sum(reachable(language, path) for path in paths))
            rounds.append(len(paths))
            prefixes[slot] = before + verdict.on_host(tree)[row].tokens
        accept(round, tree, verdict, out)

    drafter.start, drafter.accept = note_start, note
    language.counts.masks = 0
    Decoder(target, drafter, slots=3).generate(PROMPTS, constrained(SAMPLED, language), NEW, [STOP])
    assert language.counts.masks == sum(expected) < sum(rounds) and drafter.padded > 3


def reachable(language: Enumerated, tokens: list[int]) -> bool:
    state = language.start()
    for token in tokens:
        state = state and state.after(token)
    return state is not None


def test_an_ended_state_allows_only_stop_tokens(target):
    """Several stop tokens; decoding goes on after them where nothing stops it."""
    grammar = compile_grammar("regex", "ab|c", tokenizer(), VOCAB, [STOP, 24])
    out = texts(Decoder(target, slots=2).generate(PROMPTS, constrained(Sampling(1.5, seed=1), grammar), 12, ()))
    drafter = PlantingDrafter(PROMPTS, out, VOCAB)
    assert texts(Decoder(target, drafter, slots=2).generate(PROMPTS, constrained(Sampling(1.5, seed=1), grammar), 12, ())) == out
    assert {token for answer in out for token in answer[3:]} == {STOP, 24}
    assert {spell([token for token in answer if token != 24]) for answer in out} <= {"ab", "c"}


def test_distribution_under_rejection_by_enumeration():
    """The joint distribution of the tokens of a round equals that of constrained plain decoding, to 1e-12; drafts are drawn without the mask."""
    generator = torch.Generator().manual_seed(0)
    words = 4  # stop, a, b, c
    for language in (["a", "ab", "b", "bab"], ["", "c", "cc", "ccc"], ["abc", "acb"]):
        constraint = Enumerated(frozenset(language), words)
        for _ in range(8):
            p, q = ([2 * torch.randn((words,) * k, generator=generator).double() for k in (1, 2, 3)] for _ in "pq")
            expected = torch.ones(words, words, words).double()
            for path in itertools.product(range(words), repeat=3):
                for k in range(3):
                    if reachable(constraint, list(path[:k])):
                        expected[path] *= constrain(p[k][path[:k]], constraint, path[:k]).softmax(-1)[path[k]]
                    else:
                        expected[path] = 0
            joint = torch.zeros_like(expected)
            for x, y in itertools.product(range(words), repeat=2):
                weight = q[0].softmax(-1)[x] * q[1][x].softmax(-1)[y]
                tree = build_tree(torch.tensor([[0, x, y]]), [-1, 0, 1], 3, False)
                scores = torch.stack((p[0], p[1][x], p[2][x, y]))[None].clone()
                mask_trees([constraint.start()], [([0, x, y], [-1, 0, 1])], scores)
                proposals = torch.stack((q[0], q[1][x], q[1][x])).softmax(-1)[None]
                probability, residual = rules.acceptance_probability(tree, scores.softmax(-1), proposals)
                for count in range(3):
                    left = weight * (1 - probability[0, count + 1]) if count < 2 else weight
                    for z in range(words):
                        path = (*(x, y)[:count], z)
                        if left * residual[0, count, z] > 0:
                            joint[path] += left * residual[0, count, z] * rest(p, constraint, path)
                    weight = weight * probability[0, count + 1] if count < 2 else 0
            assert (joint - expected).abs().max() < 1e-12


def rest(p: list[torch.Tensor], constraint: Enumerated, path: tuple[int, ...]) -> torch.Tensor:
    """The distribution of plain decoding after this path, up to three tokens: [V,…]."""
    if len(path) == 3:
        return torch.tensor(1.0).double()
    following = constrain(p[len(path)][path], constraint, path).softmax(-1)
    parts = [
        following[z] * rest(p, constraint, (*path, z)) if following[z] > 0 else torch.zeros([4] * (2 - len(path))).double()
        for z in range(4)
    ]
    return torch.stack(parts)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "rejection-replacement"])
def test_distribution_of_answers_under_rejection(target, rule):
    """Of complete answers from batches, with a draft model and a static tree, by a chi-square test."""
    prompt, count, language = [3, 5, 1], 1001, ["a", "ab", "abc", "ba", "bab"]
    constraint, how = Enumerated(frozenset(language), VOCAB), Sampling(2.0, seed=4, rule=rule)
    cells: dict[tuple[int, ...], float] = {}

    def walk(answer: list[int], weight: float) -> None:
        if STOP in answer:
            cells[tuple(answer)] = weight
            return
        logits = target.logits(target.forward(torch.tensor([prompt + answer])).hidden[0, -1])
        p = (constrain(logits, constraint, answer) / how.temperature).double().softmax(-1)
        for token in p.nonzero()[:, 0].tolist():
            walk([*answer, token], weight * float(p[token]))

    walk([], 1.0)
    grammar = compile_grammar("regex", "|".join(language), tokenizer(), VOCAB, [STOP])
    drafter = DraftModel(relative("llama", 0.05), StaticTree.from_paths([(k,) for k in range(6)] + [(0, 0), (0, 1), (1, 0), (1, 1)]))
    out = Decoder(target, drafter, slots=8).generate([prompt] * count, constrained(how, grammar), 6, [STOP])
    places = {answer: i for i, answer in enumerate(cells)}
    observed = torch.tensor([places[tuple(answer.tokens)] for answer in out])
    assert len(cells) >= 8 and p_value(observed, torch.tensor(list(cells.values()))) > GREEN
    assert Counter(round.accepted for answer in out for round in answer.rounds)[2] > 50


@pytest.mark.parametrize("fault", ["the root's mask at every node", "siblings share a state", "the state stays behind"])
def test_faults_are_seen(target, fault, monkeypatch):
    expected = texts(Decoder(target).generate(PROMPTS, constrained(SAMPLED, compiled("GBNF")), NEW, [STOP]))

    def faulty(states, trees, scores):
        if fault == "the root's mask at every node":
            trees = [(tokens, [0] * len(parents)) for tokens, parents in trees]
        if fault == "siblings share a state":
            trees = [(tokens, list(range(-1, len(parents) - 1))) for tokens, parents in trees]
        if fault == "the state stays behind":
            states = [compiled("GBNF").start() for _ in states]
        mask_trees(states, trees, scores)

    monkeypatch.setattr(processors, "mask_trees", faulty)
    drafter = PlantingDrafter(PROMPTS, expected, VOCAB)
    try:
        assert texts(Decoder(target, drafter).generate(PROMPTS, constrained(SAMPLED, compiled("GBNF")), NEW, [STOP])) != expected
    except ValueError as error:
        assert "which it does not allow" in str(error)


def test_processors_that_leave_no_allowed_token(target):
    def only(token):
        return lambda history, scores: scores.masked_fill(torch.arange(VOCAB) != token, -torch.inf)

    with pytest.raises(ValueError, match=r"^regex=\w+: got token \d+, which it does not allow; expected processors that leave"):
        Decoder(target).generate(PROMPTS, constrained(Sampling(), compiled("regex")), NEW, [STOP], processors=[only(40)])


@pytest.mark.parametrize("text", ['start: "a" start', 'start: "a" x | "b"\nx: "c" x'])
def test_a_grammar_that_the_library_gives_up_on_says_so(target, text):
    """After a token that it allows; not as if processors were at fault."""
    grammar = compile_grammar("grammar", text, tokenizer(), VOCAB, [STOP])
    with pytest.raises(ValueError, match=r"^the grammar cannot go on: .*; simplify it$"):
        Decoder(target).generate(PROMPTS, constrained(Sampling(3.0), grammar), NEW, [STOP])


BAD = {
    "schema type": ("json_schema", '{"type": "objec"}', "Invalid type: objec; correct it"),
    "schema syntax": ("json_schema", "{bad", "key must be a string at line 1"),
    "schema kind": ("json_schema", "[1]", "schema must be an object or boolean"),
    "schema elsewhere": ("json_schema", '{"$ref": "http://x/y"}', "retriever does not fetch"),
    "Lark rule": ("grammar", "start: foo", 'unknown name: "foo"'),
    "Lark syntax": ("grammar", 'start: "a', "lexer error"),
    "GBNF rule": ("grammar", 'root ::= "a" bad', "Rule 'bad' not found"),
    "expression": ("regex", "(a", "unclosed group"),
}


@pytest.mark.parametrize("case", BAD)
def test_malformed_grammars_say_why_in_one_line(case):
    kind, text, says = BAD[case]
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        compile_grammar(kind, text, tokenizer(), VOCAB, [STOP])
    assert "\n" not in str(error.value) and str(error.value).endswith("; correct it")


def test_what_a_grammar_needs(monkeypatch):
    for problem, arguments in (
        ("the target's tokenizer: vocab size too small; 20 vs 26", (tokenizer(), 20, [STOP])),
        ("the target's tokenizer: Only fast tokenizers", (object(), VOCAB, [STOP])),
        ("got a target without stop tokens", (tokenizer(), VOCAB, [])),
    ):
        with pytest.raises(ValueError, match=problem):
            compile_grammar("regex", "a", *arguments)
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"^grammars need the package llguidance, which is missing; pip install 'draftsmith\[grammar\]'$"):
        compile_grammar("regex", "a", tokenizer(), VOCAB, [STOP])


def test_constrain_is_the_mask_after_an_answer():
    logits, language = torch.zeros(3, VOCAB), enumerated("regex")
    assert torch.isfinite(constrain(logits, language, [1]))[2].tolist() == language.start().after(1).tokens()
    with pytest.raises(ValueError, match="enumerated: got an answer that it does not allow"):
        constrain(logits, language, [40])
    assert constraints.mask_trees([], [], logits[None]) is None


def test_graphs_refuse(target):
    decoder = Decoder(target)
    assert decoder.refusal(Sampling(), True)  # no device here: kernels are off
    assert settings.label(constrained(SAMPLED, compiled("JSON"))).split()[-2].startswith("json-schema=")
    assert settings.greedy(settings.label(constrained(Sampling(), compiled("JSON"))))


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["def", "class", "return x"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
    **COMPACT,
}


@pytest.mark.slow
def test_generate_and_eval(tmp_path, capsys):
    schema, grammar, prompts = tmp_path / "schema.json", tmp_path / "grammar.gbnf", tmp_path / "prompts.jsonl"
    schema.write_text(json.dumps(SCHEMA))
    grammar.write_text('root ::= "self." ("a" | "b")+ " = " [0-9] [0-9]?\n')
    prompts.write_text("".join(json.dumps({"prompt": f"def parse_{i}(", "domain": "d"}) + "\n" for i in range(2)))
    written = set()
    for drafter in ("none", "tiny-draft"):
        for temperature in ("0", "1"):
            words = ["--json-schema", str(schema), "--drafter", drafter, "--target", "tiny", "--temperature", temperature, "def f("]
            exit_on_error(generate.main, words)
            written.add(capsys.readouterr().out)
    assert len(written) == 2, "the same text with any drafter"
    for text in written:
        content = json.loads(text)
        assert set(content) == {"name", "size"} and content["name"] in ("def", "class", "return x") and 0 <= content["size"] <= 99
    common = f"--target tiny --prompts {prompts} --max-new-tokens 12 --probe 0 --json --tree chain".split()
    exit_on_error(acceptance.main, ["tiny-draft", *common, "--grammar", str(grammar), "--out", str(tmp_path / "out")])
    report = json.loads(capsys.readouterr().out)
    assert report["divergences"] == [] and all(" grammar=" in label for label in report["settings"]["samplings"])
    requests = [json.loads(line) for line in (tmp_path / "out" / "records.jsonl").read_text().splitlines()]
    tokens = [each["tokens"] for each in requests if each["kind"] == "request"]
    assert len(tokens) == 4


def test_mistakes_on_the_command_line(tmp_path, capsys):
    broken, binary = tmp_path / "broken.json", tmp_path / "binary"
    broken.write_text('{"type": "objec"}')
    binary.write_bytes(b"\xff\xfe")
    for words, says in (
        (["--json-schema", broken], f"--json-schema {broken}: Invalid type: objec; correct it"),
        (["--json-schema", tmp_path / "none"], "none: No such file or directory; give a file that can be read"),
        (["--grammar", binary], "not UTF-8 text (byte 0); convert it"),
        (["--grammar", tmp_path], "Is a directory"),
        (["--regex", "(a"], "--regex (a: "),
        (["--regex", "a", "--grammar", binary], "not allowed with argument"),
    ):
        assert says in failing(capsys, generate.main, ["--target", "tiny", *words, "x"]), words


def test_a_divergence_is_judged_under_the_constraint(target):
    """A margin counts the tokens that are allowed alone, so that a forbidden one is no tie."""
    from draftsmith.eval import lossless

    constraint = enumerated("regex")
    hidden = target.forward(torch.tensor([[5, 6, 1]])).hidden[0, -1:]
    logits = lossless._logits(target, hidden, [5, 6], [1], constrained(Sampling(repetition_penalty=1.3), constraint))
    assert torch.isfinite(logits)[0].tolist() == constraint.start().after(1).tokens()
    assert isinstance(target.forward(torch.tensor([[1]])), TargetOutput)
