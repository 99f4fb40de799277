"""Exact rounds: plain and drafted decoding give the same hidden states to the last bit in half precision, whatever the tree."""

import pytest
import torch
from decoding_cases import PROMPTS
from planting import PlantingDrafter
from zoo import VOCAB, reference, tiny

from draftsmith.eval.lossless import decode_recorded
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.sampler import Sampling
from draftsmith.models.target import Target

NEW, NODES, CONTEXT = 24, 16, 64
SAMPLINGS = (Sampling(), Sampling(temperature=0.9, top_k=20, top_p=0.95, seed=11))


def pairs(name: str, dtype: torch.dtype, exact: int | None):
    """Plain and planted answers with their hidden states, and the drafter that planted them."""
    target = Target.wrap(tiny(name).to(dtype))
    options = {"context": CONTEXT, "exact": exact}
    for sampling in SAMPLINGS:
        for request, prompt in enumerate(PROMPTS):
            plain = decode_recorded(target, None, [prompt], [request], sampling, NEW, **options)[0]
            drafter = PlantingDrafter([prompt], [plain.tokens], VOCAB, seed=request)
            yield plain, decode_recorded(target, drafter, [prompt], [request], sampling, NEW, **options)[0], drafter


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2", "gemma3"])
def test_hidden_states_are_equal_to_the_last_bit(name, dtype):
    moves = accepted = 0
    for plain, drafted, drafter in pairs(name, dtype, NODES):
        assert plain.tokens == drafted.tokens and len(plain.tokens) == NEW
        assert torch.equal(plain.hidden, drafted.hidden)
        moves += drafter.moves
        accepted += sum(depth * count for depth, count in drafter.accepted.items())
    assert moves >= 10 and accepted >= 50


def test_ordinary_rounds_are_not_equal():
    """Otherwise the test above would prove nothing."""
    assert any(
        not torch.equal(plain.hidden, drafted.hidden[: len(plain.hidden)]) for plain, drafted, _ in pairs("llama", torch.bfloat16, None)
    )


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_keys_by_position_give_the_answers_of_transformers(name):
    model = tiny(name)
    expected = [reference(model, prompt, NEW) for prompt in PROMPTS]
    target = Target.wrap(model)
    for rows, (prompt, answer) in enumerate(zip(PROMPTS, expected, strict=True)):
        drafter = PlantingDrafter([prompt], [answer], VOCAB, seed=rows)
        decoder = Decoder(target, drafter, context=CONTEXT, exact=NODES)
        assert decoder.generate([prompt], Sampling(), NEW, ())[0].tokens == answer


@pytest.mark.parametrize(
    "name, options, reason",
    [
        ("gpt_oss", {"exact": 16}, "expert"),
        ("deepseek_v3", {"exact": 16}, "expert"),
        ("llama", {"exact": 16, "slots": 2}, "2 slots; expected one slot"),
        ("llama", {"exact": 4}, "trees of .* nodes; expected 4 at most"),
        ("llama", {"exact": 0}, "got exact 0; expected at least 1"),
    ],
)
def test_what_cannot_be_exact_is_refused(name, options, reason):
    with pytest.raises(ValueError, match=reason):
        Decoder(Target.wrap(tiny(name)), PlantingDrafter([[1]], [[2]], VOCAB), **options)


def test_a_machine_with_unequal_rows_is_refused(monkeypatch):
    target = Target.wrap(tiny("llama"))
    logits = target.logits
    monkeypatch.setattr(target, "logits", lambda hidden: logits(hidden) + 1e-6 * torch.arange(hidden.shape[1])[:, None])
    with pytest.raises(ValueError, match="equal rows of a forward of 8 nodes differ"):
        Decoder(target, exact=8)
