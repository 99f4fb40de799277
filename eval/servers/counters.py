"""A server's own counters of speculation, read before and after a segment of requests.

vLLM counts rounds that drafted, drafted and accepted tokens (/metrics). SGLang has the mean tokens per round since the server started
(/server_info, earlier /get_server_info). llama.cpp reports drafted and accepted tokens in each answer, see `requests.Reply.timings`.
"""

import math
import re
from typing import Any

from draftsmith.data.server import Server
from draftsmith.data.text_files import parse
from draftsmith.eval.servers.requests import RequestFailed, get, root_of

Counters = dict[str, Any]

VLLM = {
    "drafts": "vllm:spec_decode_num_drafts_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "generated": "vllm:generation_tokens_total",
}
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
SGLANG_PATHS = ("server_info", "get_server_info")
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? +(\S+)(?: +\d+)?")
_POSITION = re.compile(r'position="(\d+)"')


async def read_counters(server: Server) -> Counters:
    """What a server says of its speculation so far.

    Returns:
        {} where it says nothing. engine: "vllm" with those of drafts, drafted, accepted and generated that it has, and survivals (accepted
        tokens by depth); or "sglang" with accept_length.
    """
    try:
        status, text = await get(server, f"{root_of(server)}/metrics")
        if status == 200 and (counters := of_vllm(text)):
            return counters
        for path in SGLANG_PATHS:
            status, text = await get(server, f"{root_of(server)}/{path}")
            if status == 200 and (counters := of_sglang(text)):
                return counters
    except RequestFailed:
        pass  # a server without counters is measured all the same
    return {}


def of_vllm(text: str) -> Counters:
    """The counters in vLLM's metrics (Prometheus' text format), summed over engines; {} where there is none."""
    sums: dict[str, float] = {}
    depths: dict[int, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.fullmatch(line.strip())
        if not match:
            continue
        name, labels, value = match[1], match[2] or "", _number(match[3])
        position = _POSITION.search(labels)
        if name == PER_POSITION and position:
            depths[int(position[1])] = depths.get(int(position[1]), 0.0) + value
        for key, counter in VLLM.items():
            if name == counter:
                sums[key] = sums.get(key, 0.0) + value
    if not sums:
        return {}
    return {"engine": "vllm", **sums} | ({"survivals": [depths[depth] for depth in sorted(depths)]} if depths else {})


def of_sglang(text: str) -> Counters:
    """The mean tokens per round in SGLang's server_info; {} where there is none."""
    try:
        content = parse(text, "", surrogates=True)
        content = content.get("decode", [content])[0]  # prefill and decoding in servers of their own
        length = content["internal_states"][0]["avg_spec_accept_length"]
        finite = isinstance(length, int | float) and math.isfinite(length)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError):
        return {}
    return {"engine": "sglang", "accept_length": float(length)} if finite else {}


def difference(before: Counters, after: Counters) -> Counters:
    """What vLLM counted between two readings; {} where a reading is missing, or the server started again between them."""
    names = [name for name in VLLM if name in before and name in after]
    values: Counters = {name: after[name] - before[name] for name in names}
    old, new = before.get("survivals", []), after.get("survivals", [])
    if len(old) == len(new) and new:
        values["survivals"] = [now - then for now, then in zip(new, old, strict=True)]
    counted = [*(values[name] for name in names), *values.get("survivals", [])]
    return values if counted and min(counted) >= 0 else {}


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0
