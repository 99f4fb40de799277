"""Tree attention inside real models against one plain forward per root-to-node path."""

import threading

import pytest
import torch
from planting import PlantingDrafter, round_context
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from zoo import CONFIGS, VOCAB, WINDOW, tiny

from draftsmith.inference.attention import TreeAttention, tree_attention, tree_attention_forward
from draftsmith.inference.cache import TreeCache
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.tree import DraftTree
from draftsmith.models.target import Target

# Architectures beside those of the lossless tests: other norms, rotary parts, learned positions, experts, and two whose
# attention does not get its sliding window.
_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
OTHERS = {
    "qwen2": {},
    "qwen3_moe": _EXPERTS,
    "qwen2_moe": _EXPERTS
    | {
        "shared_expert_intermediate_size": 16,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phimoe": {"num_local_experts": 4, "sliding_window": WINDOW},
    "mixtral": {"num_local_experts": 4, "sliding_window": WINDOW},
    "gemma": {},
    "phi": {},
    "phi3": {"pad_token_id": 0, "sliding_window": WINDOW},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "granite": {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "embedding_multiplier": 2.0},
    "gpt_neox": {"rotary_pct": 0.5},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "olmo2": {},
    "starcoder2": {"sliding_window": WINDOW},
    "smollm3": {"layer_types": ["full_attention", "full_attention"]},
}


def other(name: str) -> PreTrainedModel:
    keep = dict(_SMALL) if name != "gpt2" else {"vocab_size": VOCAB}
    config = AutoConfig.for_model(name, **keep | {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None} | OTHERS[name])
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
    return model


def plain(target: Target, tokens: list[int]) -> torch.Tensor:
    return target.forward(torch.tensor([tokens])).hidden[0]


def path_of(tree: DraftTree, b: int, i: int) -> list[int]:
    path: list[int] = []
    while i >= 0:
        path.insert(0, int(tree.tokens[b, i]))
        i = int(tree.parents[b, i])
    return path


@pytest.mark.parametrize("name", [*sorted(CONFIGS), *sorted(OTHERS)])
def test_nodes_see_their_path(name):
    """Ragged prefill in chunks, then trees on all rows, on a gathered selection, and on one row (the exact route)."""
    target = Target.wrap(tiny(name) if name in CONFIGS else other(name))
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(VOCAB, (count,), generator=generator).tolist() for count in (9, 2, 14, 4)]
    cache = TreeCache(4, 40)
    with torch.inference_mode():
        for start in range(0, 14, 5):
            counts = [min(max(len(prompt) - start, 0), 5) for prompt in prompts]
            ids = torch.tensor(
                [prompt[start : start + count] + [3] * (max(counts) - count) for prompt, count in zip(prompts, counts, strict=True)]
            )
            attention = TreeAttention.causal(cache, ids.shape[1])
            with tree_attention(target.model):
                hidden = target.forward(ids, position_ids=attention.positions(), cache=cache, tree=attention).hidden
            for b, count in enumerate(counts):
                if count:
                    torch.testing.assert_close(hidden[b, :count], plain(target, prompts[b])[start : start + count], rtol=1e-4, atol=2e-5)
            cache.advance(counts)
        drafter = PlantingDrafter(prompts, [[1]] * 4, VOCAB, max_nodes=13, max_depth=6, seed=7)
        drafter.bind(target, 4, 40)
        drafter.answers, drafter.offset = {row: [] for row in range(4)}, dict.fromkeys(range(4), 0)
        for rows in ([0, 1, 2, 3], [0, 2], [1]):
            cache.select(rows)
            tree = drafter.propose(round_context(rows, [5] * len(rows)))
            attention = TreeAttention.tree(cache, tree)
            with tree_attention(target.model):
                hidden = target.forward(tree.tokens, position_ids=attention.positions(), cache=cache, tree=attention).hidden
            for b, row in enumerate(rows):
                for i in range(int(tree.size[b])):
                    expected = plain(target, prompts[row] + path_of(tree, b, i))[-1]
                    torch.testing.assert_close(hidden[b, i], expected, rtol=1e-4, atol=2e-5)
            assert hidden.isfinite().all(), "padding nodes too"


def test_sequences_outgrow_the_window():
    """The models of the test above are cut by their window: the wide ones would give other numbers."""
    model = tiny("mistral")
    target, tokens = Target.wrap(model), list(range(14))
    cut = plain(target, tokens)[-1]
    model.config.sliding_window = None
    assert not torch.allclose(cut, plain(target, tokens)[-1], atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("nodes", [1, 5, 20, 40])
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_forward_against_a_dense_formula(nodes, groups, dtype):
    """Every option at once or not, with value dimension and key dimension apart."""
    generator = torch.Generator().manual_seed(nodes)
    cache = TreeCache(2, 40)
    shape = (2, 2, 6)
    cache.update(torch.zeros(*shape, 4), torch.zeros(*shape, 3), 0)
    cache.advance([6, 2])
    parents = torch.tensor([[-1, *(i // 2 for i in range(nodes - 1))]] * 2)
    tree = DraftTree.build(torch.zeros(2, nodes, dtype=torch.int64), parents, torch.tensor([nodes, nodes]))
    attention = TreeAttention.tree(cache, tree)
    query, key, value = (
        torch.randn(2, heads, count, dim, dtype=torch.float64, generator=generator).to(dtype)
        for heads, count, dim in ((2 * groups, nodes, 4), (2, 6 + nodes, 4), (2, 6 + nodes, 3))
    )
    sinks = torch.randn(2 * groups, dtype=torch.float64, generator=generator)
    module = torch.nn.Identity()
    exact_query, exact_key, exact_value = (tensor.double() for tensor in (query, key, value))
    for window in (None, 4):
        for softcap, sink in ((None, None), (2.0, None), (None, sinks), (1.5, sinks)):
            got, _ = tree_attention_forward(
                module, query, key, value, None, 0.3, sliding_window=window, softcap=softcap, s_aux=sink, tree_attention=attention
            )
            assert got.shape == (2, nodes, 2 * groups, 3) and got.dtype == dtype
            expected = torch.zeros_like(got, dtype=torch.float64)
            for b, length in enumerate((6, 2)):
                depth = tree.depth[b].tolist()
                for i in range(nodes):
                    seen = [(s, s) for s in range(length)] + [
                        (length + j, length + depth[j]) for j in range(nodes) if tree.visible()[b, i, j]
                    ]
                    slots = [slot for slot, position in seen if window is None or length + depth[i] - position < window]
                    for h in range(2 * groups):
                        scores = exact_key[b, h // groups, slots] @ exact_query[b, h, i] * 0.3
                        scores = scores if softcap is None else (scores / softcap).tanh() * softcap
                        scores = scores if sink is None else torch.cat((scores, sink[h : h + 1]))
                        weights = F.softmax(scores, 0)[: len(slots)]
                        expected[b, i, h] = weights @ exact_value[b, h // groups, slots]
            tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 3e-2}
            torch.testing.assert_close(got.double(), expected, **tolerance)


def test_the_setting_is_restored_and_needed():
    target = Target.wrap(tiny("llama"))
    config = target.model.config
    with pytest.raises(RuntimeError, match="stop here"), tree_attention(target.model):
        assert config._attn_implementation == "tree"
        with tree_attention(target.model):
            pass
        assert config._attn_implementation == "tree", "an inner context must not end the outer one"
        with pytest.raises(ValueError, match="no tree data"):
            target.decoder(torch.tensor([[1, 2]]))
        raise RuntimeError("stop here")
    assert config._attn_implementation == "eager"
    first, second = tree_attention(target.model), tree_attention(target.model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert config._attn_implementation == "tree"
    second.__exit__(None, None, None)
    assert config._attn_implementation == "eager"


def test_features_while_another_thread_leaves_layers_out():
    target = Target.wrap(tiny("llama"))
    batch = {"input_ids": torch.arange(12)[None], "position_ids": torch.arange(12)[None]}
    hidden, features, begun = target.features(batch).hidden, [], threading.Event()
    thread = threading.Thread(target=lambda: begun.set() or features.append(target.features(batch).hidden))
    with target.without([1]):
        thread.start()
        begun.wait()
        thread.join(0.2)  # a forward takes some milliseconds
        assert not torch.equal(target.features(batch).hidden, hidden)
    thread.join()
    assert torch.equal(features[0], hidden)


def test_features_while_another_thread_decodes():
    """Each keeps its attention: as alone, the answers and the features, packed documents among them."""
    target = Target.wrap(tiny("llama"))
    target.model.set_attn_implementation("sdpa")
    prompts = [[1, 2, 3], [4, 5]]
    positions = torch.tensor([[*range(5), *range(7)]])
    batch = {"input_ids": torch.arange(12)[None], "position_ids": positions}
    hidden = target.features(batch).hidden
    expected = Decoder(target, slots=2).generate(prompts, None, 60, ())
    answers = []
    thread = threading.Thread(target=lambda: answers.extend(Decoder(target, slots=2).generate(prompts, None, 60, ())))
    with tree_attention(target.model):
        assert torch.equal(target.features(batch).hidden, hidden)
        thread.start()
        beside = [target.features(batch).hidden for _ in range(20)]
    thread.join()
    assert all(torch.equal(each, hidden) for each in beside)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    assert target.model.config._attn_implementation == "sdpa"
