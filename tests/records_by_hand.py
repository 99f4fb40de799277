"""Records without an evaluation: requests of given rounds, as `draftsmith eval` would have written them."""

import torch

from draftsmith.eval.records import PositionRecord, PromptRecord, Records, RequestRecord, Round

TARGET = {"name": "tiny", "revision": "", "dtype": "float32", "config_hash": "c" * 64, "tokenizer_hash": "t" * 64, "weights_hash": "w" * 64}
SETTINGS = {
    "max_new_tokens": 64,
    "dtype": "float32",
    "slots": 1,
    "timed": None,
    "exact": None,
    "adaptive_depth": False,
}


def request(prompt, committed, domain="d", setting="0", tokens=None, **fields):
    """A request whose rounds commit these numbers of tokens."""
    rounds = [Round(10 + sum(committed[:i]), 4, count, 0.001, 0.004, 0.0) for i, count in enumerate(committed)]
    tokens = list(range(sum(committed))) if tokens is None else tokens
    defaults = {"language": "", "turn": 1, "prompt_tokens": 10, "reason": "length", "plain_tokens": len(tokens), "checked": True}
    return RequestRecord(prompt=prompt, domain=domain, setting=setting, tokens=tokens, rounds=rounds, **defaults | fields)


def timed(prompt, committed, plain_s, drafted_s, **fields):
    """A request that was timed alone."""
    count = sum(committed)
    seconds, tokens = {"plain": plain_s, "drafted": drafted_s}, {"plain": count, "drafted": count}
    measured = {"seconds": seconds, "batch_tokens": tokens, "batch": 1, "plain_rounds": count, "plain_verify_s": 0.004 * count}
    return request(prompt, committed, **measured | fields)


def positions(prompt, known, setting="0", **fields):
    """Position records of depth 1 along the tokens 0, 1, …; those that are not known are outside the draft vocabulary."""
    log_probs = torch.where(torch.tensor(known), -1.0, -torch.inf)[:, None]
    return PositionRecord(
        prompt, "d", torch.zeros(len(known), 1, dtype=torch.int64), log_probs, setting, tokens=torch.arange(len(known)), **fields
    )


def records(requests, depth=3, prompts=None, **header):
    """Records of these requests, with prompts of these token ids."""
    entries = {"target": TARGET, "drafter": {"method": "medusa", "name": "runs/mine", "bytes": 1000}, "settings": SETTINGS, "skipped": {}}
    tree = {"tree": [[0] * (k + 1) for k in range(depth)], "nodes": depth + 1, "depth": depth}
    made = Records(entries | header, {1: 0.004, 4: 0.005}, {1: 0.001}, tree=tree, requests=list(requests))
    made.prompts = {name: PromptRecord(name, ids) for name, ids in (prompts or {}).items()}
    return made
