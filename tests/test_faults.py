"""Planted faults: each must turn a check red, or the check looks at nothing."""

import functools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from planting import PlantingDrafter
from zoo import VOCAB, reference, tiny

from draftsmith.data.prompts import Prompt
from draftsmith.eval import loading
from draftsmith.inference import attention, rules, sampler, verify
from draftsmith.inference.attention import TreeAttention
from draftsmith.inference.cache import TreeCache
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.sampler import Sampling, gumbel
from draftsmith.inference.tree import DraftTree
from draftsmith.inference.verify import Verdict
from draftsmith.models.target import Target

PROMPTS = [[5, 9, 1, 30, 22, 7, 7, 2, 40], [3], [11, 12, 13, 14], [8, 0, 8, 1, 8, 2]]
NEW = 18
SAMPLED = Sampling(temperature=1.0, top_p=0.95, seed=2)


@functools.cache
def oracle(name: str, how: Sampling) -> tuple[Target, list[list[int]]]:
    """The target and its answers, from before any fault is planted."""
    model = tiny(name)
    if how.greedy:
        return Target.wrap(model), [reference(model, prompt, NEW + 6) for prompt in PROMPTS]
    return Target.wrap(model), [answer.tokens for answer in Decoder(Target.wrap(model)).generate(PROMPTS, how, NEW + 6, ())]


def lossless(name: str = "llama", how: Sampling = Sampling(), rows: int = 3) -> bool:  # noqa: B008 (frozen)
    """Whether speculative decoding gives the oracle's tokens and every verdict that was planted. A crash counts as red."""
    target, answers = oracle(name, how)
    drafter = PlantingDrafter(PROMPTS, answers, VOCAB, duplicates=True, seed=1)
    try:
        out = Decoder(target, drafter, slots=rows, chunk=4).generate(PROMPTS, how, NEW, ())
    except (RuntimeError, IndexError, AssertionError, ValueError):
        return False
    return [answer.tokens for answer in out] == [answer[:NEW] for answer in answers] and drafter.mismatches == 0


def independent(how: Sampling = SAMPLED) -> bool:
    """Whether neighbouring positions get different noise."""
    zero, position = torch.zeros(64, dtype=torch.int64), torch.arange(64)
    noise = sampler.gumbel(how.seed, zero, position, VOCAB)
    return len(noise.unique(dim=0)) == 64


def one_beginning() -> bool:
    """Whether a conversation's ids begin with one beginning-of-text token, which the template writes and the tokenizer would too."""
    from conftest import byte_tokenizer
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    begin = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, 256)])
    tokenizer.chat_template = begin + "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert tokenizer.encode("a")[0] == 256, "the tokenizer writes one by itself"
    prompt = Prompt("p", "d", "hello", ({"role": "user", "content": "hello"},))
    return loading.encode(SimpleNamespace(tokenizer=tokenizer, require_tokenizer=lambda: tokenizer), prompt).count(256) == 1


def doubled_beginning(target, prompt):
    text = target.tokenizer.apply_chat_template(list(prompt.messages), tokenize=False)
    return target.tokenizer.encode(text)


greedy, sampled = lossless, functools.partial(lossless, how=SAMPLED)
plain_draw, plain_judge, plain_walk, plain_warp = rules.draw, verify.judge, verify.walk, sampler.warp
plain_allowed, plain_move, plain_commit = TreeAttention._allowed, TreeCache._move, TreeCache.commit
plain_forward = attention.tree_attention_forward


def same_noise_at_all_depths(logits, depth, how, request, position, max_depth):
    return plain_draw(logits, torch.zeros_like(depth), how, request, position, max_depth)


def same_noise_at_two_positions(seed, request, position, vocab, purpose=0, copy=0):
    return gumbel(seed, request, position // 2, vocab, purpose, copy)


def noise_by_batch_place(logits, depth, how, request, position, max_depth):
    return plain_draw(logits, depth, how, torch.arange(len(request)), position, max_depth)


def noise_of_the_root(logits, depth, how, request, position, max_depth):
    return plain_draw(logits, depth, how, request, position * 0, max_depth)


def drop_the_bonus(tree, accepted, y, max_depth=None):
    verdict = plain_judge(tree, accepted, y, max_depth)
    return Verdict(verdict.path, torch.where(verdict.length > 1, verdict.length - 1, verdict.length), verdict.next_token)


def last_index_is_minus_one(tree, accepted, y, max_depth=None):
    path, length = plain_walk(tree, accepted, max_depth)
    return Verdict(path, length, y.gather(1, path[:, -1:] % y.shape[1])[:, 0])


def bonus_of_the_root(tree, accepted, y, max_depth=None):
    path, length = plain_walk(tree, accepted, max_depth)
    return Verdict(path, length, y[:, 0])


def positions_by_index(self):
    return self.length[:, None] + torch.arange(self.nodes)


def window_by_index(self, window, sinks):
    depth, self.depth = self.depth, torch.arange(self.nodes).expand_as(self.depth)
    try:
        return plain_allowed(self, window, sinks)
    finally:
        self.depth = depth


def no_window(self, window, sinks):
    return plain_allowed(self, None, sinks)


def every_earlier_node_visible(self):
    nodes = self.tokens.shape[1]
    return torch.ones(nodes, nodes).tril().bool().expand(len(self.tokens), -1, -1)


def stale_slots_visible(self, window, sinks):
    allowed = plain_allowed(self, window, sinks)
    slots = torch.arange(allowed.shape[-1])
    return allowed | (slots >= self.length[:, None] + self.nodes)[:, None, :]


def never_move(self, verdict, host_counts=None, in_place=False):
    return plain_commit(self, verdict, host_counts, True)


def keep_all_nodes(self, verdict, host_counts=None, in_place=False):
    self._move(verdict.path[:, 1:], 1)
    self.length.index_add_(0, self.index, torch.full_like(verdict.length, verdict.path.shape[1]))
    for row in self.selected:
        self._bounds[row] += verdict.path.shape[1]
    self._lengths_changed()


def move_in_the_wrong_order(self, slots, first):
    plain_move(self, slots.flip(1), first)


def forget_to_reset(self, rows=None):
    for row in range(self.rows) if rows is None else rows:
        self._bounds[row] = int(self.length[row])


def advance_by_width(self, counts):
    self.length.index_add_(0, self.index, torch.full((len(self.selected),), max(counts)))
    for row in self.selected:
        self._bounds[row] += max(counts)
    self._lengths_changed()


def forget(option: str) -> Callable:
    return lambda *args, **kwargs: plain_forward(*args, **kwargs | {option: None})


def equal_siblings_both_count(self):
    line = self.visible().float()
    line[:, :, 0] = 0.0
    return line


def wrong_warp(logits, how):
    return plain_warp(logits, Sampling(how.temperature, seed=how.seed))


@pytest.fixture
def register():
    """Registers another function under the name "tree", and the right one afterwards."""
    yield lambda function: attention.AttentionInterface.register("tree", function)
    attention.AttentionInterface.register("tree", plain_forward)


FAULTS = {
    "same noise at all depths": (rules, "draw", same_noise_at_all_depths, sampled),
    "same noise at two positions": (sampler, "gumbel", same_noise_at_two_positions, independent),
    "noise keyed by the place in the batch": (rules, "draw", noise_by_batch_place, sampled),
    "noise keyed without the position": (rules, "draw", noise_of_the_root, sampled),
    "the processors are skipped": (rules, "warp", wrong_warp, sampled),
    "the bonus token is dropped": (verify, "judge", drop_the_bonus, greedy),
    "index -1 is read as the last row": (verify, "judge", last_index_is_minus_one, greedy),
    "the bonus is read at the root": (verify, "judge", bonus_of_the_root, greedy),
    "equal siblings both count": (DraftTree, "walk_matrix", equal_siblings_both_count, greedy),
    "positions by index": (TreeAttention, "positions", positions_by_index, greedy),
    "window by index": (TreeAttention, "_allowed", window_by_index, functools.partial(greedy, "mistral")),
    "no window": (TreeAttention, "_allowed", no_window, functools.partial(greedy, "mistral")),
    "every earlier node is visible": (DraftTree, "visible", every_earlier_node_visible, greedy),
    "stale slots are visible": (TreeAttention, "_allowed", stale_slots_visible, greedy),
    "accepted rows do not move": (TreeCache, "commit", never_move, functools.partial(greedy, rows=1)),
    "accepted rows move to the wrong slots": (TreeCache, "_move", move_in_the_wrong_order, greedy),
    "rejected rows are kept": (TreeCache, "commit", keep_all_nodes, greedy),
    "a replaced row keeps its prefix": (TreeCache, "reset", forget_to_reset, functools.partial(greedy, rows=1)),
    "short prompts keep their padding": (TreeCache, "advance", advance_by_width, greedy),
    "the beginning-of-text token is doubled": (loading, "encode", doubled_beginning, one_beginning),
    "no soft-capping": (None, "softcap", forget("softcap"), functools.partial(greedy, "gemma2")),
    "no sinks": (None, "s_aux", forget("s_aux"), functools.partial(greedy, "gpt_oss")),
}


def test_every_fault_is_seen(monkeypatch, register):
    checks = {name: check for name, (_, _, _, check) in FAULTS.items()}
    seen: dict[object, bool] = {}
    for name, check in checks.items():
        key = (check.func, check.args, tuple(check.keywords)) if isinstance(check, functools.partial) else check
        if key not in seen:
            seen[key] = check()
        assert seen[key], f"red before a fault was planted: {name}"
    missed = []
    for name, (owner, attribute, fault, check) in FAULTS.items():
        with monkeypatch.context() as patch:
            if owner is None:
                register(fault)
            else:
                patch.setattr(owner, attribute, fault)
            if check():
                missed.append(name)
        if owner is None:
            register(plain_forward)
    assert missed == []
    assert len(FAULTS) == 22 and len(seen) == 8
    assert all(check() for check in (greedy, sampled, independent)), "every fault was taken out again"
