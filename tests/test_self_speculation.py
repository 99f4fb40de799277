"""A target that drafts with some of its layers: its trees are those of a slow reference over the target's own KV, and it keeps nothing."""

from collections import Counter

import pytest
import torch
from decoding_cases import PROMPTS, SHAPES, DepthPattern, drafted_children, texts
from transformers import DynamicCache
from zoo import WINDOW, tiny

from draftsmith.eval import loading
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.hybrid import Hybrid
from draftsmith.inference.self_speculation import SelfSpeculation, early_exit, skip_layers
from draftsmith.inference.tree import StaticTree
from draftsmith.models.target import Target

KINDS = {"early-exit": lambda target: early_exit(target, 1), "skip": lambda target: skip_layers(target, [0])}


def reference_logits(target, skipped, text, path):
    """All layers over text[:-1], then the others alone over its last token and a path, with transformers' own cache -> logits at the end."""
    cache = DynamicCache(config=target.model.config)
    if len(text) > 1:
        target(torch.tensor([text[:-1]]), cache=cache)
    drafted = torch.tensor([[text[-1], *path]])
    positions = torch.arange(len(text) - 1, len(text) + len(path))[None]
    hidden = torch.nn.functional.embedding(drafted, target.model.get_input_embeddings().weight)
    with target.without(skipped):
        hidden = target(drafted, cache=cache, position_ids=positions).hidden
    return target.logits(hidden)[0, -1]


class Checked(SelfSpeculation):
    """Compares the children of every node with `reference_logits`."""

    def start(self, slots, prompts, out):
        self.texts = getattr(self, "texts", {}) | {slot: list(prompt) for slot, prompt in zip(slots, prompts, strict=True)}
        self.seen = getattr(self, "seen", Counter())

    def propose(self, round):
        implementation = self.target.model.config._attn_implementation
        tree = super().propose(round)
        tree.validate()
        assert round.cache is not None and round.cache.drafted == 0 and round.cache.selected == round.slots
        self.target.model.set_attn_implementation("eager")
        for b, slot in enumerate(round.slots):
            for path, proposed in drafted_children(tree, b):
                if not path or self.seen["checked"] < 150:
                    order = reference_logits(self.target, self.skipped, self.texts[slot], path).argsort(descending=True).tolist()
                    assert proposed == order[: len(proposed)], (slot, path)
                    self.seen["checked"] += 1
        self.target.model.set_attn_implementation(implementation)
        return tree

    def accept(self, round, tree, verdict, out):
        for slot, result in zip(round.slots, verdict.on_host(tree), strict=True):
            self.texts[slot] += result.tokens
            self.seen[f"accepted {result.length - 1}"] += 1
            self.seen["moved"] += not result.in_place
            self.seen["no draft"] += tree.tokens.shape[1] == 1


@pytest.mark.parametrize(
    "name, kind, shape",
    [("llama", "early-exit", "chain"), ("llama", "early-exit", "dynamic"), ("gemma3", "skip", "static"), ("mistral", "skip", "deep")],
)
def test_every_tree_equals_the_targets_own_layers_over_its_kv(name, kind, shape):
    """Alone and in ragged batches, with rounds that draft less or nothing, whatever was accepted; windows cut by positions."""
    seen: Counter[str] = Counter()
    target = Target.wrap(tiny(name))
    plain = texts(Decoder(target).generate(PROMPTS, max_new_tokens=16, stop_ids=()))
    for slots, adaptive in ((1, None), (3, DepthPattern())):
        tree = SHAPES.get(shape, StaticTree.chain(WINDOW + 2))
        drafter = Checked(target, KINDS[kind](target).skipped, kind, tree)
        out = Decoder(target, drafter, slots=slots, chunk=5, adaptive=adaptive).generate(PROMPTS, max_new_tokens=16, stop_ids=())
        assert texts(out) == plain
        seen += drafter.seen
    assert seen["checked"] >= 60 and seen["no draft"] >= 5 and all(seen[f"accepted {count}"] >= 1 for count in range(3)), seen
    assert seen["moved"] >= 1 or shape in ("chain", "deep")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_position_records_rank_what_is_drafted_along_the_text(name, kind):
    target = Target.wrap(tiny(name))
    drafter = KINDS[kind](target)
    text = torch.randint(48, (40,), generator=torch.Generator().manual_seed(2))
    features = drafter.position_features(text, target.forward(text[None]))
    roots = torch.arange(3, 39)
    for _ in range(2):  # the second time in the same cache
        logits = drafter.position_logits(features, roots)
        assert logits.shape == (36, drafter.depth_limit, 48)
        for root, depth in ((3, 0), (3, 7), (19, 4), (20, 1), (38, 0)):
            expected = reference_logits(target, drafter.skipped, text[: root + 1].tolist(), text[root + 1 : root + 1 + depth].tolist())
            torch.testing.assert_close(logits[root - 3, depth], expected, atol=1e-4, rtol=1e-4)


def test_verification_overwrites_what_drafting_wrote():
    """After a round the target's cache holds what plain decoding's holds, and no layer beyond the drafting ones was drafted into."""
    target = Target.wrap(tiny("llama"))
    plain, drafted = Decoder(target, context=64), Decoder(target, early_exit(target, 1), context=64)
    outs = [decoder.generate(PROMPTS[2:3], max_new_tokens=12, stop_ids=()) for decoder in (plain, drafted)]
    assert texts(outs[0]) == texts(outs[1])
    filled = len(PROMPTS[2]) + 12 - 1
    for layer in range(2):
        stores = [decoder._reusable.cache._stores[layer] for decoder in (plain, drafted)]
        torch.testing.assert_close(stores[0].keys[:, :, :filled], stores[1].keys[:, :, :filled], atol=1e-5, rtol=1e-5)


def test_exact_rounds_stay_exact_in_half_precision():
    target = Target.wrap(tiny("llama").bfloat16())
    answers = [
        texts(Decoder(target, drafter, exact=8, context=64).generate(PROMPTS, max_new_tokens=16, stop_ids=()))
        for drafter in (None, early_exit(target, 1), skip_layers(target, [0]))
    ]
    assert answers[0] == answers[1] == answers[2]


def test_a_small_dynamic_tree_has_space_for_what_is_encoded():
    """Up to the last position of the target, while the tree that is kept is far smaller than the levels that were encoded."""
    target = Target.wrap(tiny("llama"))
    prompts = [(prompt * 120)[:110] for prompt in PROMPTS[1:3]]
    plain = texts(Decoder(target, slots=2).generate(prompts, max_new_tokens=40, stop_ids=()))
    assert [len(answer) for answer in plain] == [18, 18]
    for drafter in (early_exit(target, 1), Hybrid(early_exit(target, 1))):
        drafter.tree_spec = DynamicTree(4, 4, 3)
        assert drafter.max_nodes >= 13
        assert texts(Decoder(target, drafter, slots=2).generate(prompts, max_new_tokens=40, stop_ids=())) == plain


@pytest.mark.parametrize(
    "word, message",
    [
        ("early-exit:x", "got 'x'; expected how many decoder layers draft"),
        ("early-exit:", "got ''; expected how many decoder layers draft"),
        ("early-exit:2,3", "got '2,3'; expected how many decoder layers draft"),
        ("early-exit:-1", "got '-1'; expected how many"),
        ("skip:", "got ''; expected decoder layers counted from 0"),
        ("skip:1,,2", "got '1,,2'; expected decoder layers"),
        ("skip:²", "expected decoder layers"),
        ("hybrid:skip:one", "got 'one'; expected decoder layers"),
        ("early-exit:99", "drafter 'early-exit:99': expected 1 to 7 of the target's 8 layers"),
        ("early-exit:8", "drafter 'early-exit:8': expected 1 to 7 of the target's 8 layers"),
        ("early-exit:0", "drafter 'early-exit:0': expected 1 to 7 of the target's 8 layers"),
        ("skip:3,8", r"'skip:3,8': got layers to skip \[3, 8\]; expected some, not all, of 0 to 7"),
        ("skip:0,1,2,3,4,5,6,7", "expected some, not all"),
    ],
)
def test_words_that_name_no_layers_end_in_one_line(word, message):
    with pytest.raises(ValueError, match=message) as error:
        loading.open_models("tiny", [word], "float32")
    assert "\n" not in str(error.value)


def test_a_drafter_of_layers_belongs_to_its_target():
    target, stranger = Target.wrap(tiny("llama")), Target.wrap(tiny("llama"))
    with pytest.raises(ValueError, match="got another target to draft for"):
        Decoder(stranger, early_exit(target, 1)).generate(PROMPTS[1:2], max_new_tokens=4)


def test_names_open_drafters_with_their_layers():
    target, named = loading.open_named("tiny", ["early-exit:3", "skip:5,2,2", "early-exit:6"], "float32")
    assert {name: sorted(drafter.skipped) for name, drafter in named.items()} == {
        "early-exit:3": [3, 4, 5, 6, 7],
        "skip:2,5": [2, 5],
        "early-exit:6": [6, 7],
    }
    assert all(loading.weightless(word) for word in ("early-exit:3", "skip:1")) and loading.provenance("early-exit:3")["hash"] == ""
    assert StaticTree.chain(4).paths == named["skip:2,5"].tree_spec.paths
