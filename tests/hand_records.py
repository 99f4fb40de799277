"""Records of an evaluation made by hand or by chance, without a model: what a tree accepts follows from the ranks alone."""

import math

import torch

from draftsmith.eval.records import Divergence, PositionRecord, QualityRecord, Records, RequestRecord, Round

PATHS = [[0], [0, 0], [1], [0, 1]]
NODES = len(PATHS) + 1
PROMPT_TOKENS = 60


def header(**settings):
    return {
        "target": {"name": "tiny", "revision": "", "dtype": "float32", "config_hash": "c0", "tokenizer_hash": "70", "weights_hash": "e1"},
        "drafter": {"method": "medusa", "name": "by hand", "hash": "4a", "bytes": 1234567},
        "settings": {"max_new_tokens": 48, "positions": 512, "dtype": "float32", "slots": 1, "timed": None, "exact": None}
        | {"adaptive_depth": False, "samplings": ["0"]}
        | settings,
        "prompts": {"count": 24, "hash": "ab12"},
        "skipped": {},
        "machine": {"device": "a CPU", "threads": 1},
        "versions": {"torch": "2.13.0"},
    }


def request(prompt, tokens, committed, domain="d", prompt_tokens=PROMPT_TOKENS, nodes=NODES, setting="0", **fields):
    """A timed request whose rounds committed so many tokens each."""
    rounds, position = [], prompt_tokens - 1
    for count in committed:
        rounds.append(Round(position, nodes, count, 0.01, 0.03, 0.002))
        position += count
    assert sum(committed) == len(tokens)
    seconds = {"plain": 0.025 * len(tokens), "drafted": 0.042 * len(rounds)}
    defaults = {"language": "", "turn": 1, "reason": "length", "plain_tokens": len(tokens), "checked": True, "batch": 1} | {
        "seconds": seconds,
        "batch_tokens": dict.fromkeys(seconds, len(tokens)),
        "plain_rounds": len(tokens),
        "plain_verify_s": 0.024 * len(tokens),
    }
    return RequestRecord(
        prompt=prompt, domain=domain, setting=setting, prompt_tokens=prompt_tokens, tokens=tokens, rounds=rounds, **defaults | fields
    )


def position_record(prompt, tokens, ranks, domain="d", setting="0", **fields):
    """ranks [S,K], with −1 past the end of the text; the drafted tokens are right where the rank is 0."""
    ranks = torch.tensor(ranks)
    steps = torch.arange(len(tokens))[:, None] + torch.arange(ranks.shape[1])
    inside = steps < len(tokens)
    truth = torch.tensor(tokens)[steps.clamp(max=len(tokens) - 1)]
    defaults = {
        "log_probs": torch.where(inside, -1.0 - ranks.clamp(min=-1), -torch.inf),
        "tokens": torch.tensor(tokens),
        "entropy": torch.arange(len(tokens)) / 10,
        "target_log_probs": torch.full((len(tokens),), -1.0),
        "drafted": torch.where(inside, torch.where(ranks == 0, truth, truth + 1), -1),
        "drafted_log_probs": torch.where(inside, math.log(0.6), -torch.inf),
    }
    return PositionRecord(prompt, domain, torch.where(inside, ranks, -1), setting=setting, **defaults | fields)


def walk(ranks, tree):
    """What each round of this tree commits along a text, by the ranks [S,K]."""
    committed, position = [], 0
    while position < len(ranks):
        accepted = max((len(path) for path in tree if ranks[position][: len(path)] == list(path)), default=0)
        committed.append(min(accepted + 1, len(ranks) - position))
        position += committed[-1]
    return committed


def by_chance(prompts=24, tokens=40, seed=0, domains=("code", "chat"), settings=("0",)):
    """Records of a static tree; half of the prompts chose it."""
    generator = torch.Generator().manual_seed(seed)
    chance = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.1])
    records = Records(header(samplings=list(settings)))
    records.forward, records.drafting = {1: 0.02, 2: 0.02, 4: 0.021, 8: 0.022}, {1: 0.004, 2: 0.008}
    records.tree = {"tree": PATHS, "nodes": NODES, "depth": 2}
    words = [" the", " tree", "_x", "(", "9", "\n", " Ada", ".", " of", "é"]
    records.pieces = dict(enumerate(words))
    for setting in settings:
        for i in range(prompts):
            text = torch.randint(len(words), (tokens,), generator=generator).tolist()
            ranks = torch.multinomial(chance, 3 * tokens, True, generator=generator).view(tokens, 3)
            ranks = torch.where(ranks == 4, -1, ranks).tolist()
            inside = [[rank if s + k < tokens else -1 for k, rank in enumerate(row)] for s, row in enumerate(ranks)]
            domain, prompt = domains[i // 2 % len(domains)], f"p{i}"
            records.positions.append(position_record(prompt, text, ranks, domain, setting, choosing=i % 2 == 0))
            if i % 2:
                records.requests.append(
                    request(prompt, text, walk(inside, PATHS), domain, setting=setting, language="en" if i % 4 == 1 else "de")
                )
    return records


def lossy_by_chance(settings=("0.7 rule=typical", "1 top_k=5 rule=membership"), references=True):
    """Records of lossy rules: plain decoding is right on every second prompt, the first rule on every fourth; the second accepts excluded tokens."""
    records = by_chance(settings=settings)
    for number, each in enumerate(records.requests):
        accepted = sum(round.accepted for round in each.rounds)
        records.qualities.append(
            QualityRecord(
                prompt=each.prompt,
                setting=each.setting,
                reference=["so\n#### 5"] if references else ["so"],
                text="it is 5" if number % 4 == 0 else "it is 6",
                plain_text="5." if number % 2 == 0 else "none",
                plain=each.tokens[::-1] + [number % 3],
                log_prob=-0.9 * len(each.tokens) - number % 5,
                plain_log_prob=-1.1 * len(each.tokens) - number % 7,
                kl=0.6 * accepted,
                outside=int(each.setting == settings[-1] and number % 5 == 0),
            )
        )
    return records


def divergence(prompt, bug=False):
    return Divergence(prompt, 3, 1, 2, 0.5 if bug else 0.01, 0.02)
