"""A drafter's sinks and window: drafts equal those of an independent slow form, output stays plain decoding's, memory follows the window."""

from collections import Counter

import pytest
import torch
from decoding_cases import SAMPLED, drafted_children, relative, texts
from zoo import CONFIGS, VOCAB, tiny

from draftsmith.eval import evaluation, loading
from draftsmith.eval.settings import Settings
from draftsmith.inference import draft_window
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.draft_window import SINKS, WindowCache
from draftsmith.inference.drafts import Draft
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.hybrid import Hybrid
from draftsmith.inference.lookahead import Lookahead
from draftsmith.inference.lookup import Ngram
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.self_speculation import early_exit
from draftsmith.inference.tree import StaticTree
from draftsmith.models.drafter import new_drafter
from draftsmith.models.target import Target

LENGTHS = (1, 60, 5, 33, 12)
GENERATOR = torch.Generator().manual_seed(9)
PROMPTS = [torch.randint(VOCAB, (count,), generator=GENERATOR).tolist() for count in LENGTHS]
NEW = 24
TREES = {"chain": StaticTree.chain(3), "static": StaticTree.cartesian([2, 2, 1]), "dynamic": DynamicTree(3, 2, 8)}
PAIRS = {
    "eagle": {"taps": [0, 1], "num_heads": 4, "num_kv_heads": 2, "num_layers": 2},
    "peagle": {"taps": [0, 1], "num_heads": 4, "num_kv_heads": 2, "steps": 4},
    "mtp": {"layer": {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}},
    "hydra": {"num_heads": 3, "prefix": True, "attention_heads": 4, "kv_heads": 2},
    "dflash": {"taps": [0, 1]},
    "dspark": {"taps": [0, 1]},
}


@pytest.fixture
def tight(monkeypatch):
    """Rows are evicted every few positions."""
    monkeypatch.setattr(draft_window, "SPARE", 3)
    monkeypatch.setattr(draft_window, "DEEPEST", 0)


def pair_drafter(target, method, dtype=torch.float32):
    torch.manual_seed(0)
    drafter = new_drafter(method, target, dtype=dtype, **PAIRS[method])
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return drafter.eval()


def seen_from(size: int, prompt: int, window: int, sinks: int = SINKS, kept: int | None = None) -> torch.Tensor:
    """bool [size,size]: position p sees the sinks and the last `window` positions; of a prompt what `kept` leaves out was never encoded."""
    p, k = torch.arange(size)[:, None], torch.arange(size)
    skipped = (k >= SINKS) & (k < prompt - (window if kept is None else kept))
    return (k <= p) & ((k < sinks) | (p - k < window)) & ~skipped | (k == p)


class Masked(DraftModel):
    """Compares every tree with a slow reference: transformers' own attention in float64 under a mask, over each complete path.

    Args:
        slow: the model in float64.
        orders: the reference's answers, for all drafters of one model and window: in each of them they are the same.
    """

    def __init__(self, *args, slow, orders, **options):
        super().__init__(*args, **options)
        self.slow, self.mixed, self.orders = slow, slow.config.model_type.startswith("gemma2"), orders

    def start(self, slots, prompts, out):
        super().start(slots, prompts, out)
        self.texts = getattr(self, "texts", {}) | {slot: list(prompt) for slot, prompt in zip(slots, prompts, strict=True)}
        self.prompts = getattr(self, "prompts", {}) | {slot: len(prompt) for slot, prompt in zip(slots, prompts, strict=True)}
        self.seen = getattr(self, "seen", Counter())

    def slow_order(self, ids: list[int], prompt: int, shift: int = 0) -> list[int]:
        key = *ids, prompt, shift
        if key not in self.orders:
            self.orders[key] = self.slow_forward(ids, prompt, shift)
        return self.orders[key]

    def slow_forward(self, ids: list[int], prompt: int, shift: int) -> list[int]:
        """The tokens after a text, the likeliest first."""
        own, window = getattr(self.slow.config, "sliding_window", None), self.window + shift
        masks = {"full_attention": seen_from(len(ids), prompt, window)}
        if own:
            shorter = own <= window
            masks["sliding_attention"] = seen_from(len(ids), prompt, own if shorter else window, 0 if shorter else SINKS, window)
        additive = {name: torch.where(mask, 0.0, -torch.inf).double()[None, None] for name, mask in masks.items()}
        mask = additive if self.mixed else additive.get("sliding_attention", additive["full_attention"])
        with torch.inference_mode():
            return self.slow(torch.tensor([ids]), attention_mask=mask).logits[0, -1].argsort(descending=True).tolist()

    def propose(self, round):
        tree = super().propose(round)
        for b, slot in enumerate(round.slots):
            for path, proposed in drafted_children(tree, b):
                ids, prompt = self.texts[slot] + path, self.prompts[slot]
                assert proposed == self.slow_order(ids, prompt)[: len(proposed)], (slot, len(ids), path)
                self.seen["compared"] += 1
                self.seen["others with another window"] += proposed != self.slow_order(ids, prompt, shift=1)[: len(proposed)]
        self.seen["evicted"] += int((self._state.cache.dropped > 0).sum())
        return tree

    def accept(self, round, tree, verdict, out):
        super().accept(round, tree, verdict, out)
        for slot, result in zip(round.slots, verdict.on_host(tree), strict=True):
            self.texts[slot] += result.tokens
            self.seen[f"accepted {result.length - 1}"] += 1


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("name, window", [("llama", 6), ("llama", 11), ("mistral", 5), ("mistral", 9), ("gemma2", 10)])
def test_a_draft_model_drafts_as_under_a_mask(name, window, shape, tight):
    target = Target.wrap(tiny(name))
    model = relative(name, 0.005)
    plain = texts(Decoder(target).generate(PROMPTS, max_new_tokens=NEW, stop_ids=()))
    seen, slow, orders = Counter(), relative(name, 0.005).model.double(), {}
    for slots in (1, 3):
        drafter = Masked(model, TREES[shape], chunk=5, window=window, slow=slow, orders=orders)
        assert texts(Decoder(target, drafter, slots=slots).generate(PROMPTS, max_new_tokens=NEW, stop_ids=())) == plain
        assert isinstance(drafter._state.cache, WindowCache) and drafter._state.cache.capacity < SINKS + window + 24
        seen += drafter.seen
    assert seen["compared"] > 100 and seen["evicted"] > 20 and seen["others with another window"] > 5, seen
    assert seen["accepted 0"] > 2 and seen["accepted 1"] > 2, seen


def slow_chain(drafter, text: list[int], prompt: int, depth: int, window: int) -> list[int]:
    """EAGLE's chain after a text: each step runs over all pairs again, in float64, with a mask."""
    out = drafter.target.forward(torch.tensor([text[:-1]]), taps=drafter.taps)
    feature, tokens, drafted = drafter.feature_of(out), list(text[1:]), []
    for _ in range(depth):
        size = len(tokens)
        mask = torch.where(seen_from(size, prompt - 1, window), 0.0, -torch.inf).double()

        def attend(layer, query, key, value, mask=mask):
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
            return (query @ key.mT * query.shape[-1] ** -0.5 + mask).softmax(-1) @ value

        output = drafter.step(feature, torch.tensor([tokens]), torch.arange(size)[None], attend)[:, -1:]
        drafted.append(int(drafter.logits_of(output).argmax()))
        feature, tokens = torch.cat((feature, drafter.recurring(output)), 1), [*tokens, drafted[-1]]
    return drafted


@pytest.mark.parametrize("slots", [1, 3])
def test_eagle_drafts_as_under_a_mask(target, slots, tight):
    drafter, slow = (pair_drafter(target, "eagle", dtype) for dtype in (torch.float32, torch.float64))
    slow.load_state_dict(drafter.state_dict())
    slow.attach(Target.wrap(tiny("llama"), name="small"))
    drafter.window, drafter.tree_spec = 6, TREES["chain"]
    plain = texts(Decoder(target).generate(PROMPTS, max_new_tokens=NEW, stop_ids=()))
    propose, compared = drafter.propose, Counter()

    def checked(round):
        tree = propose(round)
        for b, slot in enumerate(round.slots):
            position = int(round.positions[b])
            index = next(
                i for i, (a, c) in enumerate(zip(PROMPTS, plain, strict=True)) if (a + c)[: position + 1][-3:] == tails[slot, position]
            )
            text = (PROMPTS[index] + plain[index])[: position + 1]
            if position and len(PROMPTS[index]) > 1:
                with torch.no_grad():
                    expected = slow_chain(slow, text, len(PROMPTS[index]), 3, 6)
                    wider = slow_chain(slow, text, len(PROMPTS[index]), 3, 7)
                assert tree.tokens[b, 1:].tolist() == expected, (slot, position)
                compared["all"] += 1
                compared["others"] += wider != expected
        compared["evicted"] += int((drafter._state.cache.dropped > 0).sum())
        return tree

    drafter.propose = checked
    tails = Tails(PROMPTS, plain, drafter)
    out = Decoder(target, drafter, slots=slots).generate(PROMPTS, max_new_tokens=NEW, stop_ids=())
    assert texts(out) == plain
    assert compared["all"] > 40 and compared["others"] > 5 and compared["evicted"] > 20, compared


class Tails:
    """The last three tokens of the text in a slot at a position."""

    def __init__(self, prompts, answers, drafter):
        self.prompts, self.answers, self.index, start = prompts, answers, {}, drafter.start

        def started(slots, prompts, out):
            self.index.update((slot, self.prompts.index(prompt)) for slot, prompt in zip(slots, prompts, strict=True))
            start(slots, prompts, out)

        drafter.start = started

    def __getitem__(self, at):
        slot, position = at
        index = self.index[slot]
        return (self.prompts[index] + self.answers[index])[: position + 1][-3:]


def rounds_of(out):
    return [[(each.size, each.accepted, each.position) for each in answer.rounds] for answer in out]


def drafters(target):
    yield lambda: DraftModel(relative("llama", 0.005), TREES["static"])
    for method in PAIRS:
        yield lambda method=method: pair_drafter(target, method)


@pytest.mark.parametrize("number", [pytest.param(n, marks=[pytest.mark.slow] * (n > 0 and n % 2 == 0)) for n in range(1 + len(PAIRS))])
def test_every_kind_is_lossless_and_a_long_window_changes_nothing(target, number, tight):
    make = list(drafters(target))[number]
    for how, slots in ((Sampling(), 3), (SAMPLED, 1)):
        plain = texts(Decoder(target).generate(PROMPTS, how, NEW, ()))
        proposals, states = {}, {}
        for window in (None, 200, 6):
            drafter = make()
            drafter.window = window
            proposals[window] = trees = []
            propose = drafter.propose
            drafter.propose = lambda round, propose=propose, trees=trees: trees.append(propose(round)) or trees[-1]
            out = Decoder(target, drafter, slots=slots, chunk=7).generate(PROMPTS, how, NEW, ())
            assert texts(out) == plain, (window, slots, how)
            states[window] = rounds_of(out)
            assert drafter.capturable == (window is None)
        assert states[None] == states[200] and len(proposals[None]) == len(proposals[200])
        assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(proposals[None], proposals[200], strict=True))
        assert any(
            a.tokens.shape != b.tokens.shape or not torch.equal(a.tokens, b.tokens)
            for a, b in zip(proposals[None], proposals[6], strict=False)
        ), "the window does nothing"


def test_a_long_window_gives_the_same_bits(target):
    """What EAGLE keeps of a prompt and of what it drafts, and its keys."""
    states = []
    for window in (None, 64):
        drafter = pair_drafter(target, "eagle")
        drafter.window, drop, kept = window, drafter.drop, []
        drafter.drop = lambda slots, drafter=drafter, drop=drop, kept=kept: (
            kept.append(drafter._state.last_output.clone()) if drafter._state.ready_slots else None,
            drop(slots),
        )
        Decoder(target, drafter, chunk=7).generate(PROMPTS[2:], max_new_tokens=20, stop_ids=())
        states.append((kept, [store.keys[:, :, :40] for store in drafter._state.cache._stores.values()]))
    assert len(states[0][0]) >= 3
    for ours, theirs in zip(*states, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.slow
def test_when_rows_are_evicted_does_not_matter(target, monkeypatch):
    for make in drafters(target):
        runs = []
        for spare in (3, 256):
            monkeypatch.setattr(draft_window, "SPARE", spare)
            drafter = make()
            drafter.window = 7
            runs.append(rounds_of(Decoder(target, drafter, slots=2).generate(PROMPTS, max_new_tokens=NEW, stop_ids=())))
        assert runs[0] == runs[1]


def test_memory_follows_the_window(target):
    drafter = pair_drafter(target, "eagle")
    drafter.window, capacities, caches = 512, set(), set()
    for context in (2048, 1 << 16, 1 << 20):
        drafter.bind(target, 2, context)
        capacities.add(drafter._state.cache.capacity)
        caches.add(id(drafter._state.cache))
    assert len(capacities) == len(caches) == 1 and capacities.pop() < SINKS + 512 + 512
    drafter.window = None
    drafter.bind(target, 2, 2048)
    assert not isinstance(drafter._state.cache, WindowCache) and drafter._state.cache.capacity > 2048
    drafter.window = 8
    drafter.bind(target, 2, 2048)
    assert isinstance(drafter._state.cache, WindowCache)


def test_a_row_keeps_its_sinks_and_its_last_positions(tight):
    cache, text = WindowCache(2, SINKS + 5 + 3, 4, 5), [[], []]
    number = 0
    for turn in range(30):
        rows = [[0, 1], [1], [0]][turn % 3]
        cache.select(rows)
        count = turn % 4 + 1
        written = [[number + place * 50 + each for each in range(count)] for place in range(len(rows))]
        number += 100
        states = torch.tensor(written, dtype=torch.float64)[:, None, :, None].expand(-1, 2, -1, 3)
        cache.update(states, states + 0.5, 0)
        counts = [count - (turn + place) % 2 for place in range(len(rows))]
        cache.advance(counts)
        for place, row in enumerate(rows):
            text[row] += written[place][: counts[place]]
        for row in (0, 1):
            stored, dropped = int(cache.length[row]), int(cache.dropped[row])
            assert stored + dropped == len(text[row]) and stored <= cache.limit
            expected = text[row][:SINKS] + text[row][SINKS + dropped :] if dropped else text[row]
            assert cache._stores[0].keys[row, 1, :stored, 2].tolist() == expected
            assert len(text[row]) < SINKS + 5 or stored >= SINKS + 5
        for row in (0, 1):  # cut to so many positions, it still has the window of the next one, or what was evicted is missing
            for length in range(len(text[row]) + 1):
                seen = range(max(SINKS, length + 1 - 5), length)
                complete = all(position >= SINKS + int(cache.dropped[row]) for position in seen)
                if length > SINKS + int(cache.dropped[row]):
                    assert cache.reaches(row, length) == (complete or not cache.dropped[row])
    assert min(cache.dropped.tolist()) > 5
    cache.reset([1])
    assert cache.length.tolist()[1] == cache.dropped.tolist()[1] == 0 and cache.dropped.tolist()[0] > 0


def test_the_option_is_for_drafters_with_kv_of_their_own(target):
    inner = pair_drafter(target, "eagle")
    loading.set_draft_window(Hybrid(inner), 32)
    assert inner.window == 32
    draft_model = DraftModel(relative("llama"), TREES["chain"])
    loading.set_draft_window(draft_model, None)
    assert draft_model.window is None
    settings = Settings(16, [Sampling()], 8)
    assert evaluation._settings(target, Hybrid(inner), settings)["draft_window"] == 32
    assert "draft_window" not in evaluation._settings(target, Lookahead(), settings)  # whose window is no KV
    heads = new_drafter("medusa", target, num_heads=2)
    for drafter in (heads, Ngram(), early_exit(target, 1), None, new_drafter("hydra", target, num_heads=2)):
        with pytest.raises(ValueError, match=r"--draft-window 32: .* has no KV that can be bounded here; expected a draft model"):
            loading.set_draft_window(drafter, 32)


def test_a_look_up_beside_it_may_be_accepted_further(target, monkeypatch):
    """A hybrid's look-up commits more tokens at once than the trained drafter drafts, just before a row is evicted too."""
    monkeypatch.setattr(draft_window, "SPARE", 3)
    plain = texts(Decoder(target).generate(PROMPTS[3:4], max_new_tokens=60, stop_ids=()))

    class Knowing(Ngram):
        def _draft(self, slot, depth):
            rest = plain[0][len(self._texts[slot]) - len(PROMPTS[3]) :][:depth]
            return Draft(rest, list(range(len(rest))), 9.0)

    inner = pair_drafter(target, "eagle")
    inner.window = 5
    out = Decoder(target, Hybrid(inner, Knowing())).generate(PROMPTS[3:4], max_new_tokens=60, stop_ids=())
    assert texts(out) == plain and max(each.accepted for each in out[0].rounds) > 12


@pytest.mark.parametrize("kind", ["eagle", "hydra"])
def test_a_conversation_goes_on_with_a_turn_that_is_longer_than_the_space_behind_the_window(kind):
    config = CONFIGS["llama"]()
    config.max_position_embeddings = 1024
    target = Target.wrap(tiny("llama", config=config))
    drafter = new_drafter(kind, target, **PAIRS[kind])
    drafter.tree_spec, drafter.window = StaticTree.chain(3), 20
    decoder = Decoder(target, drafter, context=1000, keep=True)
    first = PROMPTS[3] + decoder.generate([PROMPTS[3]], None, 180, ())[0].tokens
    second = first + torch.randint(VOCAB, (230,), generator=GENERATOR).tolist()
    assert texts(decoder.generate([second], None, 20, ())) == texts(Decoder(target).generate([second], None, 20, ()))
