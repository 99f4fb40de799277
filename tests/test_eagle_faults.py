"""Faults planted into EAGLE: each turns a check red."""

import torch
from eagle_by_hand import agrees
from eagle_drafters import TREES, make, random_lines
from eagle_rounds import played
from zoo import tiny

from draftsmith.inference.verify import Verdict
from draftsmith.models import feature_drafter, vocab
from draftsmith.models.eagle import EagleModel
from draftsmith.models.target import Target
from draftsmith.train import eagle as train

plain_ahead, plain_training_time_test, plain_step = feature_drafter.shift_left, EagleModel.training_time_test, EagleModel.step


plain_accept, plain_encode, plain_loss = EagleModel.accept, EagleModel._encode, train.chunked_draft_loss


plain_recurring, plain_attend, plain_start = EagleModel.recurring, feature_drafter.attend, EagleModel.start


plain_positions = feature_drafter.TreeAttention.positions


def token_shift(rows, count, *rest):
    return plain_ahead(rows, count + 1, *rest)


def target_shift(*given, **more):
    return plain_loss(*given[:5], [shift + 1 for shift in given[5]], *given[6:], **more)


class Stuck:
    """Positions to which nothing can be added."""

    def __init__(self, positions) -> None:
        self.positions = positions

    def __add__(self, _):
        return self.positions


def rope_without_step(self, feature, ids, positions, *rest):
    return plain_training_time_test(self, feature, ids, Stuck(positions), *rest)


def nodes_at_one_position(self):
    return plain_positions(self) if self.visible is None else self.length[:, None].expand_as(self.depth)


def keep_drafts(self, round, tree, verdict, out):
    cache = self._state.cache
    if cache.drafted:
        cache.advance([cache.drafted if int(at) else 0 for at in round.positions])
    plain_accept(self, round, tree, verdict, out)


def first_nodes(self, round, tree, verdict, out):
    straight = torch.arange(verdict.path.shape[1]).expand_as(verdict.path)
    straightened = Verdict(torch.where(verdict.path < 0, -1, straight), verdict.length, verdict.next_token)
    plain_accept(self, round, tree, straightened, out)


def forget_the_bonus(self, round, tree, verdict, out):
    plain_accept(self, round, tree, Verdict(verdict.path, verdict.length, tree.tokens[:, 0]), out)


def swapped(self, output):
    return output if self.config.norm_output else self.norm(output)


def maps_off_by_one(self):
    return (torch.arange(self.size) + self.d2t + 1) % self.vocab_size


def no_earlier_drafts(query, keys, values, *rest, **named):
    return plain_attend(query, [keys[0], *keys[1:][-1:]], [values[0], *values[1:][-1:]], *rest, **named)


def prompt_not_shifted(self, rows, prompts, out):
    plain_start(self, rows, [[prompt[0], *prompt[:-1]] for prompt in prompts], out)


def padding_counts(self, rows, feature, tokens, counts):
    plain_encode(self, rows, feature, tokens, [max(counts)] * len(counts))


def oracle(name: str, loss: str = "kl") -> bool:
    """Whether the objective is the slow form."""
    try:
        agrees(name, loss, 3)
    except (AssertionError, ValueError, RuntimeError):
        return False
    return True


def parity(name: str, shape: str = "static") -> bool:
    """Whether decoding computes what training does. A crash counts as red."""
    target = Target.wrap(tiny("llama"))
    try:
        played(make(target, name).eval(), target, TREES[shape], random_lines(3), 2)
    except (AssertionError, ValueError, RuntimeError, IndexError):
        return False
    return True


FAULTS = {
    "token shift off by one": (feature_drafter, "shift_left", token_shift, oracle, "3"),
    "token shift off by one, in decoding's eyes": (feature_drafter, "shift_left", token_shift, parity, "3"),
    "target shift off by one": (train, "chunked_draft_loss", target_shift, oracle, "3"),
    "RoPE without + k": (EagleModel, "training_time_test", rope_without_step, oracle, "3"),
    "RoPE without + k, in decoding's eyes": (EagleModel, "training_time_test", rope_without_step, parity, "1"),
    "nodes of all depths at one position": (feature_drafter.TreeAttention, "positions", nodes_at_one_position, parity, "3"),
    "drafted KV not dropped": (EagleModel, "accept", keep_drafts, parity, "3"),
    "features of rejected nodes": (EagleModel, "accept", first_nodes, parity, "3"),
    "the bonus token is forgotten": (EagleModel, "accept", forget_the_bonus, parity, "1"),
    "recurring normed": (EagleModel, "recurring", swapped, oracle, "3"),
    "recurring not normed": (EagleModel, "recurring", swapped, oracle, "3.1"),
    "d2t off by one, in training": (vocab.DraftVocabulary, "targets", property(maps_off_by_one), oracle, "3, small"),
    "d2t off by one, in decoding": (vocab.DraftVocabulary, "targets", property(maps_off_by_one), parity, "3, small"),
    "own drafts forgotten": (feature_drafter, "attend", no_earlier_drafts, oracle, "3"),
    "the prompt is not shifted": (EagleModel, "start", prompt_not_shifted, parity, "3"),
    "padding is encoded": (EagleModel, "_encode", padding_counts, parity, "3"),
}


def test_every_fault_is_seen(monkeypatch):
    checks = {(check, name) for _, _, _, check, name in FAULTS.values()}
    assert all(check(name) for check, name in checks), "red before a fault was planted"
    missed = []
    for what, (owner, attribute, fault, check, name) in FAULTS.items():
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, fault)
            if check(name):
                missed.append(what)
    assert missed == []
    assert oracle("3") and parity("3"), "every fault was taken out again"
