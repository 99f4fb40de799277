"""Shared by the tests of regeneration: a target, conversations, a disk that fails, a server that misbehaves."""

import errno
import hashlib
import json
import os
import socket
import struct
import threading
import time
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from conftest import byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.data import server
from draftsmith.data.conversations import Conversation
from draftsmith.data.regenerate import Settings, with_decoder, with_server
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.sampler import Sampling
from draftsmith.models.target import Target

TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
    "{% if m.role == 'martian' %}{{ raise_exception('no martians') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


POSITIONS, NEW = 256, 12


SAMPLED = Settings(temperature=1.0, seed=5, max_new_tokens=NEW)


TOOLS = [{"type": "function", "function": {"name": "f"}}]


CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}


def make_target(template: str | None = TEMPLATE) -> Target:
    """A random Llama over bytes and three special tokens, whose end of turn is not too rare."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=259, max_position_embeddings=POSITIONS, eos_token_id=256, bos_token_id=None, pad_token_id=None, **sizes)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
        model.lm_head.weight[tokenizer.convert_tokens_to_ids("<|im_end|>")] *= 2.5
    return Target.wrap(model, tokenizer, "tiny-chat")


def chat(name: str, *turns: str, **more) -> Conversation:
    """Turns such as "user: Hi"."""
    messages = [dict(zip(("role", "content"), turn.split(": ", 1), strict=True)) for turn in turns]
    return Conversation(name, "chat", messages, **more)


# Not in the order of their ids, nor of their lengths; what is old must never come back.
CONVERSATIONS = [
    chat("c9", "system: Be brief.", "user: One?", "assistant: OLD", "user: Two?", "assistant: OLD", "user: Three?", "assistant: OLD"),
    chat("c10", "user: Hello", "assistant: OLD"),
    chat("c2", "user: First", "user: Second"),
    chat("b", "user: Yes?", "assistant: OLD", "user: And then?"),
    Conversation("t1", "code", text="def parse_options(arguments):\n    return", prompt=10),
    Conversation("t2", "prose", text="Ünï: the weather in all of the lands was fine and dry, and nobody minded it at all."),
    Conversation("tool", "agent", [{"role": "user", "content": "Go"}, CALL, {"role": "tool", "content": "42"}], TOOLS),
    chat("z", "user: " + "long words " * 4, "assistant: OLD", "user: Go on", "assistant: OLD"),
]


def halves(row):
    """The prompt and the continuation of a row that continues a text."""
    return row["text"][: row["given"]], row["text"][row["given"] :]


ROLES = {
    "c9": ["system", *["user", "assistant"] * 3],
    "c10": ["user", "assistant"],
    "c2": ["user", "assistant"] * 2,
    "b": ["user", "assistant"] * 2,
    "tool": ["user", "assistant", "tool", "assistant"],
    "z": ["user", "assistant"] * 2,
}


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().decode().splitlines()]


def render(messages, tools=None) -> str:
    """ChatML by hand."""
    text = f"<|im_start|>tools\n{json.dumps(tools)}<|im_end|>\n" if tools else ""
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        words = (message["content"] or "") + "".join(f"[{call['name']} {json.dumps(call['arguments'])}]" for call in calls)
        text += f"<|im_start|>{message['role']}\n{words}<|im_end|>\n"
    return text + "<|im_start|>assistant\n"


def alone(target: Target, settings: Settings, prompt: str, name: str, turn: int) -> tuple[str, str]:
    """The answer to one prompt by itself, plainly decoded, and why it ended."""
    key = int.from_bytes(hashlib.sha256(json.dumps([name, turn]).encode()).digest()[:4], "big")
    how = Sampling(temperature=settings.temperature, top_p=settings.top_p, seed=settings.seed)
    ids = target.tokenizer.encode(prompt, add_special_tokens=False)
    done = Decoder(target).generate([ids], how, settings.max_new_tokens, requests=[key])[0]
    tokens = done.tokens[:-1] if done.reason == "stop" else done.tokens
    text = target.tokenizer.decode(tokens, skip_special_tokens=False)
    return (text, "stop") if done.reason == "stop" else (text.rstrip("�"), "length")


def with_misfits() -> list[Conversation]:
    """Conversations too long at once (two of them a group's first and last) or later, refused by the template, or without anything to
    answer."""
    long = "x" * POSITIONS
    misfits = [chat("a0", f"user: {long}"), chat("c2x", f"user: {long}"), chat("c11", "martian: Hi", "user: Hm")]
    return [
        *CONVERSATIONS,
        *misfits,
        chat("m", "user: Hi", "user: " + long, "user: no more"),
        chat("s", "system: Alone"),
        Conversation("u", "d", text="half \ud83d"),
        chat("u2", "user: half \ud83d"),
        chat("v", "assistant: OLD", "user: Hi", "assistant: OLD"),
        Conversation("w", "d", text=""),
        chat("zz", f"user: {long}"),
        chat("edge", "user: " + "e" * (POSITIONS - 20), "user: more"),
    ]


class Disk:
    """Counts the calls that change files, and fails the n-th: once, or from then on. A write that fails has written half."""

    CALLS = ("write", "fsync", "ftruncate", "truncate", "replace", "rename")

    def __init__(self, monkeypatch, fail: int = 0, dead: bool = False) -> None:
        self.calls: list[str] = []
        self.fail, self.dead = fail, dead
        for name in self.CALLS:
            monkeypatch.setattr(os, name, self.wrap(name, getattr(os, name)))

    def wrap(self, name, real):
        def call(*arguments):
            self.calls.append(name)
            if len(self.calls) == self.fail or (self.dead and len(self.calls) > self.fail > 0):
                if name == "write" and len(self.calls) == self.fail:
                    real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*arguments)

        return call


def many() -> list[Conversation]:
    return [chat(f"n{n}", f"user: Number {n}", "assistant: OLD", "user: Why?", "assistant: OLD") for n in range(40)]


def decoding(jobs):
    torch.set_num_threads(1)
    target = make_target()
    return lambda path: with_decoder(jobs, path, target, Settings(temperature=1.0, max_new_tokens=4), group=2, show=False)


def asking(jobs, address):
    return lambda path: with_server(jobs, path, address, "m", Settings(max_new_tokens=4), concurrency=3, show=False)


def refused(path: Path, match: str, run) -> None:
    """It raises one line, and leaves the file as it was."""
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises((ValueError, OSError), match=match) as error:
        run()
    assert "\n" not in str(error.value)
    assert before is None or path.read_bytes() == before


class Stub:
    """An OpenAI-compatible server that answers with what it was asked, and has faults: by the last user's words, one for each attempt."""

    def __init__(self, faults: dict[str, list[str]] | None = None, hold: float = 0.01) -> None:
        self.faults, self.hold = faults or {}, hold
        self.lock, self.inside, self.most = threading.Lock(), 0, 0
        self.asked: list[tuple[str, dict, str]] = []
        self.times: dict[str, list[float]] = defaultdict(list)
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                with stub.lock:
                    stub.inside += 1
                    stub.most = max(stub.most, stub.inside)
                try:
                    body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                    status, answer, headers, slow = stub.reply(self.path, body, self.headers.get("Authorization", ""))
                    time.sleep(stub.hold)
                finally:
                    with stub.lock:  # before a slow answer: its client has given up by then, and asks again
                        stub.inside -= 1
                time.sleep(slow)
                if status == 0:
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.close_connection = True
                    self.connection.close()
                    return
                try:
                    self.send_response(status)
                    for name, value in {**headers, "Content-Length": str(len(answer))}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(answer)
                except OSError:
                    self.close_connection = True

            def finish(self):
                try:
                    super().finish()
                except (OSError, ValueError):
                    pass

            def log_message(self, format, *arguments):
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request, client_address):
                pass

        self.server = Quiet(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def reply(self, path: str, body: dict, key: str) -> tuple[int, bytes, dict, float]:
        words = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        with self.lock:
            self.asked.append((path, body, key))
            self.times[words].append(time.monotonic())
            waiting = self.faults.get(words, [])
            fault = waiting.pop(0) if waiting and waiting[0] != "always" else waiting[1] if waiting else ""
        reason = "length" if "cut" in words else "stop"
        answer = f"answer {len(body.get('messages', ()))} to {words}"
        choice = {"message": {"role": "assistant", "content": answer}} if "messages" in body else {"text": answer}
        good = json.dumps({"choices": [{**choice, "finish_reason": reason}]}).encode()
        return {
            "": (200, good, {}, 0.0),
            "500": (500, b'{"error": {"message": "engine died"}}', {}, 0.0),
            "429": (429, b"slow down", {"Retry-After": "1"}, 0.0),
            "slow": (200, good, {}, 1.0),
            "reset": (0, b"", {}, 0.0),
            "broken": (200, good[:20], {}, 0.0),
            "empty": (200, b"{}", {}, 0.0),
            "abort": (200, good.replace(b'"stop"', b'"abort"'), {}, 0.0),
            "400": (400, f'{{"error": {{"message": "no such\\nfield: {key}"}}}}'.encode(), {}, 0.0),
            "long": (400, b'{"message": "This model\'s maximum context length is 9 tokens.", "object": "error"}', {}, 0.0),
            "odd": (400, b'{"error": {"message": "Conversation roles must alternate user/assistant/..."}}', {}, 0.0),
        }[fault]

    def __enter__(self) -> "Stub":
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.server.shutdown()
        self.server.server_close()


def without_waits(monkeypatch):
    monkeypatch.setattr(server, "FIRST_WAIT", 0.01)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def ask(stub: Stub, out: Path, conversations, settings=SAMPLED, **more):
    return with_server(conversations, out, stub.address, "model", settings, **{"timeout": 0.4, "show": False} | more)


def asks(count: int) -> list[Conversation]:
    return [chat(f"q{n}", f"user: Question {n}", "assistant: OLD") for n in range(count)]
