"""OpenAI-compatible servers on 127.0.0.1 for tests: they stream known words, count rounds as engines do, and have faults by prompt."""

import json
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def words_of(prompt: str) -> list[str]:
    """The answer to a prompt: 5 to 9 words, each a token."""
    return [f"{prompt.split()[-1]}-{number} " for number in range(5 + zlib.crc32(prompt.encode()) % 5)]


class FakeServer:
    """A server that drafts `depth` tokens a round and accepts all of them; depth 0 does not draft.

    faults: by the prompt's text, of those in `_stream`; "*" is of all prompts. engine: whose counters it has, "" for none.
    """

    def __init__(self, depth=0, engine="vllm", models=("m",), faults=None, key="", gate=None, answer=words_of):
        self.depth, self.engine, self.models, self.faults, self.key = depth, engine, models, faults or {}, key
        self.gate, self.answer = gate, answer  # gate: a barrier that requests wait at
        self.lock, self.inside, self.most = threading.Lock(), 0, 0
        self.asked, self.paths = [], []
        self.counts = {"drafts": 0, "drafted": 0, "accepted": 0, "generated": 0, "0": 0}
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                fake.paths.append(self.path)
                if fake.key and self.headers.get("Authorization") != f"Bearer {fake.key}":
                    return self.say(401, json.dumps({"error": {"message": f"bad key {self.headers.get('Authorization')}"}}))
                page = fake.page(self.path)
                return self.say(*page) if page else self.say(404, '{"detail": "Not Found"}')

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                prompt = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
                with fake.lock:
                    fake.asked.append((self.path, prompt, body))
                    fake.inside += 1
                    fake.most = max(fake.most, fake.inside)
                if fake.gate:
                    fake.gate.wait(10)
                fault = fake.faults.get(prompt, fake.faults.get("*", ""))
                with fake.lock:
                    fake.inside -= 1
                if fault in ("429", "500"):
                    return self.say(int(fault), '{"error": {"message": "slow\\ndown"}}')
                if fault == "slow":
                    time.sleep(0.6)
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()  # HTTP/1.0: the body ends with the connection
                for line in fake.stream(prompt, "messages" in body, fault):
                    self.wfile.write(line.encode())

            def say(self, status, text, location=""):
                self.send_response(status)
                if location:
                    self.send_header("Location", location)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format, *arguments):
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request, client_address):
                pass

        self.server = Quiet(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"

    def page(self, path):
        """Status and text of a GET, perhaps with where it leads; None for 404."""
        if path == "/v1/models" and self.faults.get("models"):
            return self.faults["models"]
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": name, "owned_by": self.engine, "root": f"/{name}"} for name in self.models]})
        if path == "/metrics" and self.engine == "vllm":
            names = {"drafts": "num_drafts", "drafted": "num_draft_tokens", "accepted": "num_accepted_tokens"} if self.depth else {}
            lines = [f'vllm:spec_decode_{name}_total{{engine="0",model_name="m"}} {float(self.counts[key])}' for key, name in names.items()]
            lines += [
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{depth}"}} {self.counts["drafts"]}'
                for depth in range(self.depth)
            ]
            lines += ["# HELP x y", f'vllm:generation_tokens_total{{engine="0"}} {self.counts["generated"]}']
            return 200, "\n".join(lines)
        if path == "/get_server_info" and self.engine == "sglang":
            return 200, json.dumps({"internal_states": [{"avg_spec_accept_length": 2.5}]})
        return None

    def stream(self, prompt, chat, fault):
        """The lines of an answer: the first token from prefill, then rounds."""
        answer = self.answer(prompt)
        size = self.depth + 1
        chunks = [answer[:1], *(answer[at : at + size] for at in range(1, len(answer), size))]
        with self.lock:
            rounds = len(chunks) - 1
            self.counts["generated"] += len(answer)
            if self.depth:
                self.counts["drafts"] += rounds
                self.counts["drafted"] += rounds * self.depth
                self.counts["accepted"] += len(answer) - 1 - rounds
        if chat:
            yield self.event([{"delta": {"role": "assistant", "content": ""}}])
        for number, chunk in enumerate(chunks):
            if fault == "cut" and number == 1:
                return
            if fault == "malformed" and number == 1:
                yield "x\n\n"
            if fault == "broken" and number == 1:
                yield 'data: {"choices": [\n\n'
            if fault == "dies" and number == 1:
                yield 'data: {"error": {"message": "engine died", "code": 500}}\n\n'
            text = "".join(chunk)
            choice = {"delta": {"content": text}} if chat else {"text": text}
            yield ": still there\n"
            yield self.event([choice | {"finish_reason": "length" if number == len(chunks) - 1 else None}])
        extra = {}
        if self.engine == "llamacpp":
            accepted = len(answer) - len(chunks)
            extra = {"timings": {"predicted_n": len(answer), "draft_n": self.depth * (len(chunks) - 1), "draft_n_accepted": accepted}}
        if fault != "no usage":
            yield self.event([], usage={"prompt_tokens": 10, "completion_tokens": len(answer)}, **extra)
        yield "data: [DONE]\n\n"

    def event(self, choices, **more):
        return f"data: {json.dumps({'choices': choices} | more)}\n\n"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
