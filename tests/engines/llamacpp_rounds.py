"""What llama.cpp answers and drafts, through the wheel of xllamacpp: python llamacpp_rounds.py REQUEST.json REPLY.json

REQUEST has `target` (a GGUF file), `prompts` (token ids), `max_new_tokens`, and `draft` (a GGUF file), `kind` and `depth` for speculation.
REPLY gets `version`, `seconds` of all answers, and by prompt `tokens`, and of its drafts `drafted` and `accepted` tokens.
"""

import json
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp

KINDS = {"draft_simple": "COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE", "eagle3": "COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3"}


def main(request: dict[str, Any]) -> dict[str, Any]:
    """The reply; see above."""
    params = xllamacpp.CommonParams()
    params.model.path = request["target"]
    params.n_ctx = max(map(len, request["prompts"])) + request["max_new_tokens"] + 32
    params.n_parallel, params.cache_prompt, params.warmup = 1, False, False
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32  # half precision would make near ties differ
    params.cpuparams.n_threads = 1
    if request["draft"]:
        draft = params.speculative.draft
        draft.mparams.path, draft.n_max, draft.n_min, draft.p_min = request["draft"], request["depth"], 0, 0.0
        draft.cache_type_k = draft.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        draft.cpuparams.n_threads = 1
        params.speculative.types = [getattr(xllamacpp.common_speculative_type, KINDS[request["kind"]])]
    server = xllamacpp.Server(params)
    settings = {"n_predict": request["max_new_tokens"], "temperature": 0.0, "top_k": 1, "return_tokens": True, "ignore_eos": True}
    answers = []
    began = time.perf_counter()
    for prompt in request["prompts"]:
        content = json.dumps({"prompt": prompt, **settings}).encode()
        sent = urllib.request.Request(f"{server.listening_address}/completion", content, {"Content-Type": "application/json"})
        with urllib.request.urlopen(sent) as response:
            reply = json.load(response)
        timings = reply["timings"]
        answers.append({"tokens": reply["tokens"], "drafted": timings.get("draft_n", 0), "accepted": timings.get("draft_n_accepted", 0)})
    return {"version": str(xllamacpp.BUILD_INFO), "seconds": time.perf_counter() - began, "answers": answers}


if __name__ == "__main__":
    request_file, reply_file = map(Path, sys.argv[1:])
    reply_file.write_text(json.dumps(main(json.loads(request_file.read_text(encoding="utf-8")))), encoding="utf-8")
