"""Hand-made records of a load, whose times follow a formula."""

from draftsmith.eval.records import Records, RequestRecord, Round

CHAIN1, CHAIN4 = [[0]], [[0] * k for k in range(1, 5)]


def verifying(batch, context, nodes):
    """Seconds: a plain round of batch 1 at context 100 takes one."""
    return (1 + context / 1000) / 1.1 * (1 + 0.05 * (batch - 1)) * (1 + 0.02 * batch * (nodes - 1))


def load_record(batches=(1, 2, 8), contexts=(100, 400), sizes=(1, 2, 8, 16), noise=(1.0, 1.0, 1.0, 1.3, 0.9), draft=0.1, rest=0.05):
    """noise: each repeat is so much slower, all sizes equally. Drafting a level costs `draft` plain rounds of its batch."""
    verify = [
        {"batch": b, "context": c, "nodes": n, "seconds": [verifying(b, c, n) * factor for factor in noise]}
        for b in batches
        for c in contexts
        for n in sizes
    ]
    rounds = []
    for batch in (batches[0], batches[-1]):
        plain = verifying(batch, contexts[0], 1)
        for tree in (CHAIN1, CHAIN4):
            depth = len(tree)
            parts = {"draft": draft * depth * plain, "verify": verifying(batch, contexts[0], depth + 1), "other": rest * plain}
            parts |= {"plain": plain, "plain_other": rest * plain}
            entry = {"batch": batch, "tree": tree, "depth": depth, "nodes": depth + 1.0}
            rounds.append(entry | {name: [value] * 6 for name, value in parts.items()})
    return {
        "kernels": False,
        "graphs": False,
        "sampling": "0",
        "left_out": [],
        "verify": verify,
        "rounds": rounds,
        "prefill_s_per_token": {"plain": 0.01, "drafted": 0.02},
        "kv_bytes": {"target": 100, "drafter": 10},
        "took_s": 1.0,
        "size": {"weights": 8e9, "bytes_per_weight": 2, "kv_bytes": 100, "attention_flops": 0.0},
    }


def request(prompt, committed, domain="d", setting="0", **fields):
    """A timed request of batch 1 that committed so many tokens in each round, of one second drafting, two verifying and half of the rest."""
    rounds = [Round(10 + i, 3, count, 1.0, 2.0, 0.5) for i, count in enumerate(committed)]
    total = sum(committed)
    usual = {
        "seconds": {"plain": 4.0 * total, "drafted": 4.0 + 3.5 * len(rounds)},
        "batch_tokens": {"plain": total, "drafted": total},
        "batch": 1,
        "prefill_s": 4.0,
        "plain_rounds": total,
        "plain_verify_s": 3.0 * total,
        "plain_other_s": 0.5 * total,
    }
    return RequestRecord(prompt, domain, "", setting, 1, 20, list(range(total)), "length", rounds, total, True, **usual | fields)


def records(requests, load=None, positions=(), tree=(), slots=1):
    header = {"target": {"name": "t"}, "drafter": {"method": "m", "bytes": 1000}, "settings": {"slots": slots}, "skipped": {}}
    paths = [list(path) for path in tree]
    shape = {"tree": paths, "nodes": len(paths) + 1, "depth": max(map(len, paths), default=0)}
    return Records(header, load=load or {}, tree=shape, positions=list(positions), requests=list(requests))
