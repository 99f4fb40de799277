"""What vLLM proposes and computes, round by round: a script for the environment of vLLM, which need not have Draftsmith.

python vllm_rounds.py REQUEST.json REPLY.json

REQUEST has `target`, `dtype`, `prompts` (token ids), `max_new_tokens` and `speculative` (vLLM's speculative config, null for plain decoding),
and perhaps the target's `revision` and `trust_remote_code`.
REPLY gets `version`, `seconds` of all answers, `counters` (vLLM's own, of speculation) and by prompt `tokens` (the answer) and `proposals`
(of each round, in order). Beside it, REPLY.features.npz holds the hidden states that the drafter was given for each prompt,
by the prompt's number, [S,T·H] or [1,H], in float32.

One request runs at a time, greedily, in this process, so that what `propose` returns belongs to it.
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
SETTINGS |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
# Where vLLM's drafters propose: modules and classes.
PROPOSERS = (("llm_base_proposer", "SpecDecodeBaseProposer"), ("medusa", "MedusaProposer"))
COUNTERS = "vllm:spec_decode_"


def main(request: dict[str, Any], features: Path) -> dict[str, Any]:
    """The reply; see above."""
    os.environ.update({name: value for name, value in SETTINGS.items() if name not in os.environ})
    import numpy as np
    import torch
    import vllm  # pyright: ignore[reportMissingImports]

    seen: list[tuple[list[int], Any]] = []  # proposal and hidden states of each round
    for module, name in PROPOSERS:
        _watch(getattr(importlib.import_module(f"vllm.v1.spec_decode.{module}"), name), seen)
    longest = max(map(len, request["prompts"])) + request["max_new_tokens"]
    model = vllm.LLM(
        request["target"],
        dtype=request["dtype"],
        revision=request.get("revision"),
        tokenizer_revision=request.get("revision"),
        trust_remote_code=request.get("trust_remote_code", False),
        speculative_config=request["speculative"],
        max_model_len=longest + 32,
        max_num_batched_tokens=max(2048, longest + 32),
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
    )
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=request["max_new_tokens"], ignore_eos=True, detokenize=False)

    def answer(prompt: list[int]) -> list[int]:
        output = model.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
        return list(output.outputs[0].token_ids)

    answer(request["prompts"][0])  # warms up
    before, answers, hidden = _counters(model), [], {}
    began = time.perf_counter()
    for number, prompt in enumerate(request["prompts"]):
        seen.clear()
        tokens = answer(prompt)
        answers.append({"tokens": tokens, "proposals": [proposal for proposal, _ in seen]})
        if seen:
            hidden[str(number)] = seen[0][1].float().cpu().numpy()
    seconds = time.perf_counter() - began
    np.savez(features, **hidden)
    after = _counters(model)
    counters = {name: after[name] - before.get(name, 0) for name in after}
    return {"version": vllm.__version__, "torch": torch.__version__, "seconds": seconds, "counters": counters, "answers": answers}


def _watch(proposer: Any, seen: list[tuple[list[int], Any]]) -> None:
    original = proposer.propose

    def propose(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = original(self, *args, **kwargs)
        hidden = kwargs.get("target_hidden_states")
        seen.append((drafts[0].tolist(), args[1] if hidden is None else hidden))
        return drafts

    proposer.propose = propose


def _counters(model: Any) -> dict[str, float]:
    return {
        metric.name: float(metric.value) for metric in model.get_metrics() if metric.name.startswith(COUNTERS) and hasattr(metric, "value")
    }


if __name__ == "__main__":
    request_file, reply_file = map(Path, sys.argv[1:])
    reply = main(json.loads(request_file.read_text(encoding="utf-8")), reply_file.with_suffix(".features.npz"))
    reply_file.write_text(json.dumps(reply), encoding="utf-8")
