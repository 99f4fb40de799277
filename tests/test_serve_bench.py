"""serve-bench: streams read exactly, servers asked under given loads, records that outlive a kill, and tables made from them alone."""

import asyncio
import json
import math
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import failing
from fake_servers import FakeServer, words_of
from load_records import CHAIN1, load_record, records, request

from draftsmith.data.prompts import Prompt
from draftsmith.eval.intervals import of_ratio, of_ratio_of_ratios
from draftsmith.eval.load import CostModel, predict
from draftsmith.eval.load_check import rounds_of
from draftsmith.eval.records import PositionRecord
from draftsmith.eval.servers import bench as serve_bench
from draftsmith.eval.servers import run as serve_run
from draftsmith.eval.servers.counters import difference, of_sglang, of_vllm
from draftsmith.eval.servers.records import (
    RECORDS,
    CountersRecord,
    Load,
    Measurement,
    ServedRequest,
    ServeRecords,
    read,
    records_of,
    request_line,
)
from draftsmith.eval.servers.report import report_of
from draftsmith.eval.servers.requests import RequestFailed, ask, open_benchmarked, read_stream
from draftsmith.eval.servers.run import ServeRun, ServeSettings, arrivals, order, plan, request_of
from draftsmith.eval.service import percentiles
from draftsmith.inference.errors import exit_on_error

PROMPTS = [f"say p{number}" for number in range(8)]


@pytest.fixture(autouse=True)
def _without_proxies(monkeypatch):
    """Proxies that answer nothing: whoever is asked through them is not reached."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text, "id": text.split()[-1], "domain": "d"}) + "\n" for text in PROMPTS))
    return file


def words(*servers, prompts, **named):
    """The words of a command; options by name."""
    options = {"prompts": prompts, "limit": 99, "concurrency": 2, "timeout": 5} | named
    urls = [word for server in servers for word in ("--url", getattr(server, "address", server))]
    given = [word for name, value in options.items() if value is not None for word in (f"--{name.replace('_', '-')}", value)]
    return [str(word) for word in (*urls, *given)]


def measured(capsys, *servers, prompts, **named):
    """The JSON report of a benchmark."""
    exit_on_error(serve_bench.main, [*words(*servers, prompts=prompts, **named), "--json"])
    return json.loads(capsys.readouterr().out)


def refused(capsys, *servers, prompts, **named):
    return failing(capsys, serve_bench.main, words(*servers, prompts=prompts, **named))


# Streams


class Body:
    """A body that arrives in blocks at given times, and the clock that they move."""

    def __init__(self, *blocks):
        self.blocks, self.now = blocks, 0.0

    async def arriving(self):
        for at, block in self.blocks:
            self.now = at
            yield block

    def read(self):
        return asyncio.run(read_stream(self.arriving(), lambda: self.now))


def data(**content):
    return f"data: {json.dumps(content)}\n\n".encode()


def text(piece, **more):
    return data(choices=[{"text": piece, **more}])


USAGE = {"prompt_tokens": 3, "completion_tokens": 7}


def test_a_stream_is_timed_by_its_chunks_with_text():
    reply = Body(
        (1.0, data(choices=[{"delta": {"role": "assistant", "content": ""}}])),
        (2.0, b": comment\n\nevent: message\nid: 3\r\nunknown: x\ndata:\n\n" + text("a")),
        (3.5, text("b")[:9]),
        (4.0, text("b")[9:] + text("c")),
        (5.0, data(choices=[{"delta": {"reasoning_content": "d"}}])),
        (6.0, text("", finish_reason="stop")),
        (7.0, data(choices=[], usage=USAGE, timings={"draft_n": 4}).replace(b"\n", b"\r\n") + data(timings=[1]) + b"data: [DONE] \n\n"),
        (9.0, b"never read"),
    ).read()
    assert (reply.text, reply.chunks, reply.end, reply.reason) == ("abcd", [2.0, 4.0, 4.0, 5.0], 7.0, "stop")
    assert (reply.prompt_tokens, reply.tokens, reply.timings) == (3, 7, {"draft_n": 4})


@pytest.mark.parametrize(("pause", "timeout"), ((0.02, 10), (0.5, 0.4)))
def test_requests_of_one_client_share_a_connection(pause, timeout):
    """The end of a body may come after its last event; the next request waits for it, and needs no other connection. The answer is in time."""
    connections = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self):
            connections.append(1)
            super().setup()

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for part in (text("a", finish_reason="stop") + b"data: [DONE]\n\n", b""):
                if not part:
                    time.sleep(pause)
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                self.wfile.flush()

        def log_message(self, *words):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        server = open_benchmarked(f"http://127.0.0.1:{served.server_port}", timeout)

        async def ask_all():
            async with server.connected(1):
                return [await ask(server, "completions", "{}", time.perf_counter) for _ in range(4)]

        assert [reply.text for reply in asyncio.run(ask_all())] == ["a"] * 4
        served.shutdown()
    assert len(connections) == 1


def test_the_partsof_a_stream_may_end_anywhere():
    body = b"".join((text("äö"), text("ü", finish_reason="length"), data(choices=[], usage=USAGE), b"data: [DONE]\n"))
    for size in range(1, len(body)):
        parts = [(at, body[at : at + size]) for at in range(0, len(body), size)]
        reply = Body(*parts).read()
        assert (reply.text, reply.tokens, len(reply.chunks)) == ("äöü", 7, 2)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (text("a") + text("b"), "ended before its finish_reason, after 2 chunks"),
        (text("a")[:20], "ended before its finish_reason, after 0 chunks"),
        (b"garbage\n", "malformed line in the stream: 'garbage'"),
        (b'{"choices": []}\n', "malformed line"),
        (b"data: {\n\n", "malformed line"),
        (b"data: 3\n\n", "malformed line"),
        (data(choices=3), "malformed line"),
        (data(choices=[{"text": 3}]), "malformed line"),
        (data(choices=["x"]), "malformed line"),
        (data(usage={"prompt_tokens": 1, "completion_tokens": -1}), "malformed line"),
        (data(usage={"prompt_tokens": True, "completion_tokens": 1}), "malformed line"),
        (data(error={"message": "engine died"}), "an error in the stream: .*engine died"),
        (b"data: " + b"[" * 500 + b"]" * 500 + b"\n", "malformed line"),
    ],
)
def test_a_broken_stream_is_an_error_in_one_line(body, says):
    with pytest.raises(RequestFailed, match=says) as error:
        Body((1.0, body)).read()
    assert "\n" not in str(error.value)


def test_halves_of_surrogate_pairs_can_be_recorded():
    reply = Body((1.0, b'data: {"choices": [{"text": "\\ud83d", "finish_reason": "stop"}]}\n')).read()
    assert reply.text == "?"


# Loads


def test_the_servers_are_measured_in_alternation():
    settings = ServeSettings((Load("concurrency", 1), Load("concurrency", 4)), 2, 8, 0.0, 0)
    assert [tuple(each) for each in plan(settings, 2)] == [
        (load, repeat, server) for load in ("concurrency 1", "concurrency 4") for repeat in (0, 1) for server in (0, 1)
    ]


def test_arrivals_are_a_poisson_process_the_same_for_each_server():
    rate, count = 4.0, 20_000
    times = arrivals(rate, count, Measurement("4 requests/s", 1, 0), 7)
    assert times == arrivals(rate, count, Measurement("4 requests/s", 1, 1), 7)
    assert times != arrivals(rate, count, Measurement("4 requests/s", 0, 0), 7) and times != arrivals(
        rate, count, Measurement("4 requests/s", 1, 0), 8
    )
    gaps = torch.tensor(times, dtype=torch.float64).diff()
    assert times[0] == 0 and len(times) == count and (gaps > 0).all()
    # Of an exponential distribution: the mean is its standard deviation, and half of all are below ln 2 of the mean.
    assert abs(float(gaps.mean()) - 1 / rate) < 4 / rate / math.sqrt(count)
    assert abs(float(gaps.std()) - 1 / rate) < 8 / rate / math.sqrt(count)
    assert abs(float((gaps < math.log(2) / rate).double().mean()) - 0.5) < 2 / math.sqrt(count)
    draws = random.Random("arrivals 7 4 requests/s 1")
    assert times[:3] == pytest.approx([0.0, (first := -math.log(1 - draws.random()) / rate), first - math.log(1 - draws.random()) / rate])


def test_prompts_come_in_one_order_for_all_servers_and_in_another_in_each_repeat():
    prompts = [Prompt(str(number), "d", "x") for number in range(30)]
    first, second = (order(prompts, Measurement("l", repeat, 0), 0) for repeat in (0, 1))
    assert first == order(prompts, Measurement("l", 0, 1), 0) and first != second != prompts
    assert sorted(first, key=prompts.index) == sorted(second, key=prompts.index) == prompts


def test_a_request_says_how_it_is_answered():
    settings = ServeSettings((Load("concurrency", 1),), 2, 8, 0.7, 0)
    path, body = request_of(Prompt("a", "d", "hi", ({"role": "user", "content": "hi"},)), "m", Measurement("l", 0, 0), settings)
    chat = json.loads(body)
    assert path == "chat/completions" and chat["messages"] == [{"role": "user", "content": "hi"}] and "prompt" not in chat
    assert chat["stream"] is True and chat["stream_options"] == {"include_usage": True} and chat["max_tokens"] == 8
    assert chat == json.loads(request_of(Prompt("a", "d", "hi", chat["messages"]), "m", Measurement("other", 0, 1), settings)[1])
    assert chat["seed"] != json.loads(request_of(Prompt("a", "d", "hi"), "m", Measurement("l", 1, 0), settings)[1])["seed"]
    path, body = request_of(Prompt("a", "d", "hi"), "m", Measurement("l", 0, 0), replace(settings, temperature=0.0))
    assert path == "completions" and json.loads(body)["prompt"] == "hi" and "seed" not in json.loads(body)


def test_a_closed_loop_has_so_many_requests_under_way(prompts, capsys, monkeypatch):
    monkeypatch.setattr(serve_run, "WARM_UP", 0)
    with FakeServer(gate=threading.Barrier(4)) as server:
        report = measured(capsys, server, prompts=prompts, concurrency=4, repeats=1)
    assert report["rows"][0]["requests"] == 8 and server.most == 4


def test_an_open_loop_waits_for_no_answer(prompts, capsys, monkeypatch):
    """No request is answered before all of them have come."""
    monkeypatch.setattr(serve_run, "WARM_UP", 0)
    with FakeServer(gate=threading.Barrier(8)) as server:
        report = measured(capsys, server, prompts=prompts, concurrency=None, rate=500, repeats=1)
    assert report["rows"][0]["requests"] == 8 == server.most and report["rows"][0]["load"] == "500 requests/s"


# The command


def test_two_servers_are_measured_by_counts_that_are_known(prompts, capsys, tmp_path):
    with FakeServer() as plain, FakeServer(depth=2) as drafting:
        report = measured(capsys, plain, drafting, prompts=prompts, concurrency="1,4", repeats=2, out=tmp_path / "out")
        asked = [Counter(prompt for _, prompt, _ in server.asked) for server in (plain, drafting)]
        assert {path for path, _, _ in plain.asked} == {"/v1/completions"}
        assert {path for server in (plain, drafting) for path in server.paths} <= {
            "/v1/models",
            "/metrics",
            "/server_info",
            "/get_server_info",
        }
    lengths = {prompt: len(words_of(prompt)) for prompt in PROMPTS}
    for counts in asked:
        assert counts == Counter({prompt: 4 for prompt in PROMPTS}) + Counter(PROMPTS[: serve_run.WARM_UP])
    assert report["requests"] == report["planned"] == 2 * 2 * 2 * 8 and not report["errors"] and len(report["rows"]) == 4
    rounds = sum(math.ceil((length - 1) / 3) for length in lengths.values())
    accepted = sum(length - 1 for length in lengths.values()) - rounds
    for row in report["rows"]:
        assert (
            row["requests"] == 16 and row["tokens"] == 2 * sum(lengths.values()) and row["counted"] == "usage" and row["tokens_per_s"] > 0
        )
        chunks = sum(lengths.values()) if row["server"] == 0 else 8 + rounds
        assert row["tokens_per_chunk"] == pytest.approx(sum(lengths.values()) / chunks)
    assert [row["tau"] is None for row in report["rows"]] == [True, False, True, False]
    tau = report["rows"][1]["tau"]
    assert tau["tau"] == pytest.approx(1 + accepted / rounds) and tau["drafted"] == 2 and tau["survival"] == [1.0, 1.0]
    for row in report["speedups"]:
        assert row["prompts"] == 8 and row["decoding"]["low"] < row["decoding"]["estimate"] < row["decoding"]["high"]
        assert (row["equal"]["share"], row["equal"]["answers"], row["equal"]["own"], row["equal"]["own_compared"]) == (1.0, 16, 8, 8)
    assert not any("others used it" in note or "usage" in note for note in report["notes"])
    assert json.loads((tmp_path / "out" / serve_bench.REPORT).read_text()) == report
    exit_on_error(serve_bench.main, ["--from", str(tmp_path / "out"), "--json"])
    assert json.loads(capsys.readouterr().out) == report
    exit_on_error(serve_bench.main, ["--from", str(tmp_path / "out")])
    page = capsys.readouterr().out
    assert "Speedups over A" in page and "B, concurrency 1: 16 of 16 answers equal A's; A's equal its own in 8 of 8" in page
    assert "100% of rounds drafted, 2.00 tokens each, accepted at least 1, 2, …: 1.00, 1.00 (counters of vLLM)" in page


def test_the_same_command_again_asks_nothing_and_another_one_is_refused(prompts, capsys, tmp_path):
    with FakeServer() as server, FakeServer(models=("n",)) as moved:
        first = measured(capsys, server, prompts=prompts, out=tmp_path / "out")
        count, content = len(server.asked), (tmp_path / "out" / RECORDS).read_bytes()
        assert measured(capsys, server, prompts=prompts, out=tmp_path / "out") == first and len(server.asked) == count
        for change, says in (
            ({"concurrency": 3}, "another loads"),
            ({"temperature": 1}, "another temperature"),
            ({"max_new_tokens": 7}, "another max_new_tokens"),
            ({"limit": 3}, "another count"),
        ):
            line = refused(capsys, server, prompts=prompts, out=tmp_path / "out", **change)
            assert says in line and "give its options again" in line
        server.models = ("m2",)
        assert "another servers" in refused(capsys, server, prompts=prompts, out=tmp_path / "out")
        assert "another servers" in refused(capsys, moved, prompts=prompts, out=tmp_path / "out")
        assert (tmp_path / "out" / RECORDS).read_bytes() == content and len(server.asked) == count and not moved.asked


def test_a_folder_of_somebody_else_is_left_alone(prompts, capsys, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / RECORDS).write_text("mine\n")
    with FakeServer() as server:
        assert "holds requests.jsonl" in refused(capsys, server, prompts=prompts, out=tmp_path / "out")
    assert (tmp_path / "out" / RECORDS).read_text() == "mine\n" and not server.asked
    assert "no requests.jsonl" in failing(capsys, serve_bench.main, ["--from", tmp_path])
    assert "requests.jsonl:1: not JSON" in failing(capsys, serve_bench.main, ["--from", tmp_path / "out"])
    (tmp_path / "out" / RECORDS).write_text('{"kind": "header", "format": 1}\n{"kind": "commit"}\n')
    assert "no header that this draftsmith" in failing(capsys, serve_bench.main, ["--from", tmp_path / "out"])


def keys(folder):
    return [(*each.measurement, each.prompt) for each in read(folder).requests]


def test_it_continues_wherever_it_was_cut(prompts, capsys, tmp_path):
    """At each kind of place in the file: nothing is asked twice, and nothing is lost."""
    with FakeServer() as plain, FakeServer(depth=2) as drafting:
        measured(capsys, plain, drafting, prompts=prompts, out=tmp_path / "complete")
        content = (tmp_path / "complete" / RECORDS).read_bytes()
        complete = sorted(keys(tmp_path / "complete"))
        assert len(complete) == len(set(complete)) == 32
        ends = [place + 1 for place, byte in enumerate(content) if byte == 10]
        for cut in (0, 40, ends[1], ends[2] - 5, ends[2], ends[3] - 3, ends[20], ends[21] - 9, ends[34], ends[-1] - 1, ends[-1]):
            folder = tmp_path / f"cut{cut}"
            folder.mkdir()
            (folder / ".draftsmith.json").write_bytes((tmp_path / "complete" / ".draftsmith.json").read_bytes())
            (folder / RECORDS).write_bytes(content[:cut])
            before = content[:cut].count(b'{"kind": "commit"}\n')
            at_start, earlier = len(plain.asked) + len(drafting.asked), keys(folder) if before else []
            report = measured(capsys, plain, drafting, prompts=prompts, out=folder)
            assert sorted(keys(folder)) == complete and report["requests"] == 32, cut
            assert keys(folder)[: len(earlier)] == earlier
            new = len(plain.asked) + len(drafting.asked) - at_start
            assert new == (32 - len(earlier) + 2 * serve_run.WARM_UP if len(earlier) < 32 else 0), cut


@pytest.mark.faults
def test_a_killed_benchmark_goes_on(prompts, capsys, tmp_path):
    gate = threading.Event()

    class Gate:
        """Lets so many requests through, and the others after the kill."""

        def wait(self, _):
            if len(server.asked) > 14:
                gate.wait(30)

    with FakeServer(gate=Gate()) as server:
        command = [sys.executable, "-m", "draftsmith.train.cli", "serve-bench", *words(server, prompts=prompts, out=tmp_path / "out")]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while len(server.asked) <= 14 or len(recorded(tmp_path / "out")) < 10:  # 3 to warm up, 8 of the first repeat, some of the second
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        gate.set()
        earlier, asked = recorded(tmp_path / "out"), len(server.asked)
        line = failing(capsys, serve_bench.main, ["--from", tmp_path / "nowhere"])
        assert "no requests.jsonl" in line
        exit_on_error(serve_bench.main, ["--from", str(tmp_path / "out"), "--json"])
        partial = json.loads(capsys.readouterr().out)
        assert partial["requests"] == len(earlier) < 16 and any("the same command measures the others" in note for note in partial["notes"])
        report = measured(capsys, server, prompts=prompts, out=tmp_path / "out")
    assert report["requests"] == 16 and recorded(tmp_path / "out")[: len(earlier)] == earlier
    assert len(set(keys(tmp_path / "out"))) == 16 and len(server.asked) - asked == 16 - len(earlier) + serve_run.WARM_UP
    assert {each.segment for each in read(tmp_path / "out").requests} == {0, 1}


def recorded(folder):
    return keys(folder) if (folder / RECORDS).is_file() and b"commit" in (folder / RECORDS).read_bytes() else []


def test_a_disk_that_is_full_is_one_line_and_what_was_recorded_stays(prompts, capsys, tmp_path, monkeypatch):
    import os

    write, count = os.write, 0

    def full(descriptor, content):
        nonlocal count
        count += b'"kind": "request"' in content
        if count == 5:
            write(descriptor, content[: len(content) // 2])
            raise OSError(28, "No space left on device")
        return write(descriptor, content)

    with FakeServer() as server:
        with monkeypatch.context() as patch:
            patch.setattr("draftsmith.eval.record_store.os.write", full)
            line = refused(capsys, server, prompts=prompts, out=tmp_path / "out", concurrency=1)
        assert "No space left on device" in line and "give the same command again" in line and len(keys(tmp_path / "out")) == 4
        measured(capsys, server, prompts=prompts, out=tmp_path / "out", concurrency=1)
    assert len(set(keys(tmp_path / "out"))) == 16


def test_no_request_is_sent_after_the_duration(prompts, capsys, tmp_path, monkeypatch):
    with FakeServer() as server:
        monkeypatch.setattr(serve_run, "WARM_UP", 0)
        ends = iter(range(5))
        request = serve_run.ServeRun._request

        async def counted(run, *words):
            if next(ends) == 3:
                run.deadline = -math.inf
            await request(run, *words)

        with monkeypatch.context() as patch:
            patch.setattr(serve_run.ServeRun, "_request", counted)
            report = measured(capsys, server, prompts=prompts, out=tmp_path / "out", concurrency=1)
        assert report["requests"] == 4 == len(server.asked) and "4 of 16 requests were measured" in " ".join(report["notes"])
        assert measured(capsys, server, prompts=prompts, out=tmp_path / "out", concurrency=1)["requests"] == 16 == len(server.asked)


# Errors


def test_no_request_is_waited_for_until_after_the_duration():
    """The next arrival is a day away, the end is now."""
    run: Any = SimpleNamespace(settings=SimpleNamespace(seed=0), deadline=time.perf_counter() + 0.05)
    requests = []

    async def request(segment, prompt, due):
        requests.append(prompt)

    async def main():
        async with asyncio.TaskGroup() as tasks:
            segment: Any = SimpleNamespace(start=time.perf_counter(), measurement=Measurement("l", 0, 0), tasks=tasks)
            await ServeRun._open_loop(run, segment, ["a", "b"], 1 / 86_400)

    run._request = request
    asyncio.run(asyncio.wait_for(main(), 60))
    assert requests == ["a"]


def test_a_segment_that_goes_on_has_the_rate_of_the_load(prompts, capsys, tmp_path, monkeypatch):
    """Every second request is recorded already; the others arrive as if they were all."""
    monkeypatch.setattr(serve_run, "WARM_UP", 0)
    with FakeServer() as server:
        measured(capsys, server, prompts=prompts, out=tmp_path / "out", concurrency=None, rate=500, repeats=1)
        file = tmp_path / "out" / RECORDS
        kept = file.read_text().splitlines(keepends=True)
        asked = [number for number, line in enumerate(kept) if '"kind": "request"' in line]
        dropped = {*asked[::2], *(number + 1 for number in asked[::2]), len(kept) - 1, len(kept) - 2}
        file.write_text("".join(line for number, line in enumerate(kept) if number not in dropped))
        measured(capsys, server, prompts=prompts, out=tmp_path / "out", concurrency=None, rate=500, repeats=1)
    due = sorted(each.due_s for each in read(tmp_path / "out").requests if each.segment == 1)
    assert due == pytest.approx(arrivals(500, len(asked) // 2, Measurement("500 requests/s", 0, 0), 0), abs=1e-5)


def test_records_may_be_cut_inside_a_character(tmp_path):
    lines = [{"kind": "header", "format": 1} | header(), {"kind": "commit"}]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    (tmp_path / RECORDS).write_bytes(content + '{"text": "é'.encode()[:-1])
    assert read(tmp_path).header == header()


def test_errors_of_requests_are_counted_and_not_repeated(prompts, capsys, monkeypatch):
    faults = {"say p0": "500", "say p1": "429", "say p2": "cut", "say p3": "malformed", "say p4": "dies", "say p5": "slow"}
    monkeypatch.setattr(serve_run, "WARM_UP", 0)
    with FakeServer() as plain, FakeServer(faults=faults) as faulty:
        report = measured(capsys, plain, faulty, prompts=prompts, repeats=1, timeout=0.4)
        assert Counter(prompt for _, prompt, _ in faulty.asked) == Counter(PROMPTS)
    assert [row["errors"] for row in report["rows"]] == [0, 6] and report["rows"][1]["requests"] == 8
    assert report["rows"][1]["tokens"] == sum(len(words_of(prompt)) for prompt in PROMPTS[6:])
    (counts,) = report["errors"].values()
    assert counts == dict.fromkeys(counts, 1) and len(counts) == 6
    for says in (
        "500 slow down",
        "429 slow down",
        "after 1 chunks",
        "malformed line",
        "engine died",
        "no complete answer within 0.4 seconds",
    ):
        assert sum(says in reason for reason in counts) == 1, says
    (row,) = report["speedups"]
    assert row["prompts"] == 2 and row["decoding"]["low"] is None and row["equal"]["answers"] == 2


def test_a_server_that_fails_throughout_ends_the_benchmark(prompts, capsys, monkeypatch):
    with FakeServer(faults={"*": "500"}) as server:
        line = refused(capsys, server, prompts=prompts)
        assert "the first requests failed: 500 slow down" in line and len(server.asked) == 1
        monkeypatch.setattr(serve_run, "WARM_UP", 0)
        line = refused(capsys, server, prompts=prompts)
        assert f"{serve_run.DOWN} requests failed one after the other, the last with: 500 slow down" in line
        line = refused(capsys, server, prompts=prompts, repeats=1)
        assert "nothing was measured: none of 8 requests was answered; the last error: 500 slow down" in line


def test_the_requests_of_an_outage_are_asked_again(prompts, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(serve_run, "WARM_UP", 0)
    with FakeServer(faults={"*": "500"}) as server:
        refused(capsys, server, prompts=prompts, repeats=2, out=tmp_path / "measured")
        server.faults.clear()
        report = measured(capsys, server, prompts=prompts, repeats=2, out=tmp_path / "measured")
    assert [row["errors"] for row in report["rows"]] == [0] and report["rows"][0]["requests"] == 16


def test_a_duration_that_ends_before_the_first_request_says_so(prompts, capsys, monkeypatch):
    monkeypatch.setattr(serve_run, "WARM_UP", 0)
    with FakeServer() as server:
        assert "no request ended in time; raise --duration" in refused(capsys, server, prompts=prompts, repeats=1, duration="1e-9")


def test_a_stream_without_usage_is_counted_by_chunk_and_gives_no_speedup(prompts, capsys):
    with FakeServer() as plain, FakeServer(depth=2, engine="", faults={"*": "no usage"}) as drafting:
        report = measured(capsys, plain, drafting, prompts=prompts)
    assert [row["counted"] for row in report["rows"]] == ["usage", "chunks"]
    assert report["rows"][1]["tokens"] == 2 * sum(1 + math.ceil((len(words_of(prompt)) - 1) / 3) for prompt in PROMPTS)
    (row,) = report["speedups"]
    assert row["decoding"] is None and row["request"] is None and "sends no usage" in row["why_none"]
    assert any("counted by chunk" in note for note in report["notes"]) and report["rows"][1]["tau"] is None


def test_servers_that_cannot_be_measured_are_one_line_each(prompts, capsys, tmp_path, monkeypatch):
    with FakeServer() as server, FakeServer() as elsewhere:
        gone = FakeServer()
        gone.server.server_close()
        assert "no server answers there (ConnectError" in refused(capsys, gone, prompts=prompts)
        assert "404 Not Found; expected an OpenAI-compatible server" in refused(capsys, f"{server.address}/api", prompts=prompts)
        assert "serves m; expected 'x'; correct --model" in refused(capsys, server, prompts=prompts, model="x")
        server.models = ("a", "b\x1b")
        line = refused(capsys, server, prompts=prompts)
        assert "serves 2 models (a, b\\x1b); expected one; name it with --model" in line
        for page, says in (
            ((307, "", elsewhere.address + "/v1/models"), "307; expected an OpenAI-compatible server (redirects are not followed)"),
            ((200, "<html>"), "expected a list of models, got '<html>'"),
            ((200, '{"data": 3}'), "expected a list of models"),
            ((503, "loading"), "503 loading; see to the server"),
        ):
            server.faults = {"models": page}
            assert says in refused(capsys, server, prompts=prompts)
        assert not elsewhere.paths and not server.asked
    for url in ("localhost:8000", "ftp://x", "http://", "http://127.0.0.1:80000"):
        assert "expected an address such as" in refused(capsys, url, prompts=prompts)


def test_a_key_is_sent_and_never_shown(prompts, capsys, tmp_path, monkeypatch):
    with FakeServer(key="right-key-of-the-server") as server:
        assert "401" in (line := refused(capsys, server, prompts=prompts)) and "set OPENAI_API_KEY" in line
        monkeypatch.setenv("OPENAI_API_KEY", "wrong-key-of-the-server")
        line = refused(capsys, server, prompts=prompts)
        assert "bad key Bearer ***" in line and "wrong-key" not in line
        monkeypatch.setenv("OPENAI_API_KEY", " right-key-of-the-server\n")
        measured(capsys, server, prompts=prompts, out=tmp_path / "out")
    assert not any(b"right-key" in file.read_bytes() for file in (tmp_path / "out").iterdir())
    monkeypatch.setenv("OPENAI_API_KEY", "schlüssel")
    assert "characters that no HTTP header may hold" in refused(capsys, server, prompts=prompts)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rate": "2"}, "--rate and --concurrency are two kinds of load"),
        ({"concurrency": "1.5"}, "expected integers of 1 to 4,096"),
        ({"concurrency": "1,,2"}, "got ''"),
        ({"concurrency": None, "rate": "0"}, "expected numbers of 0.001 to 10,000"),
        ({"concurrency": "9"}, "--concurrency 9: got 8 prompts; expected as many at least"),
        ({"timeout": "0"}, "--timeout 0: expected seconds"),
        ({"duration": "inf"}, "--duration inf: expected seconds"),
        ({"repeats": "0"}, "--repeats 0: expected 1"),
        ({"temperature": "-1"}, "--temperature -1"),
        ({"predicted": "/nowhere"}, "--predicted: no records.jsonl"),
        ({"from": "x"}, "--from takes --json and --predicted only"),
    ],
)
def test_wrong_options_are_one_line(prompts, capsys, options, says):
    with FakeServer() as server:
        assert says in refused(capsys, server, prompts=prompts, **options)
    assert not server.paths and not server.asked
    assert "got no server; expected --url" in refused(capsys, prompts=prompts)


# Reports


def test_percentiles_are_the_smallest_values_that_so_many_do_not_exceed():
    values = [random.Random(3).random() for _ in range(37)] + [0.5, 0.5]
    for share, value in percentiles(values, (1, 50, 90, 99, 100)).items():
        reached = [each for each in values if 100 * sum(below <= each for below in values) >= int(share[1:]) * len(values)]
        assert value == min(reached)


SETTINGS = {"loads": [["concurrency", 2.0]], "repeats": 2, "max_new_tokens": 8, "temperature": 0.0, "seed": 0}


def header(**settings):
    servers = [{"name": name, "model": "m", "engine": "", "root": ""} for name in ("plain", "drafting")]
    return {"servers": servers, "settings": SETTINGS | settings, "prompts": {"count": 8, "hash": "ab"}, "versions": {}}


def served(server, prompt, start, chunks, tokens, repeat=0, segment=0, text="same", **more):
    """A request sent at `start` whose chunks come so many seconds later; it ends with the last of them."""
    times = [start + each for each in chunks]
    return ServedRequest("concurrency 2", repeat, server, segment, prompt, start, start, times[-1], times, text, "stop", 20, tokens, **more)


def by_hand():
    """8 prompts: the second server decodes twice as fast, and waits as long for the first token."""
    requests = []
    for number in range(8):
        steps = 1 + number / 10
        requests += [
            served(0, f"p{number}", 0.0, [1.0, 1.0 + 2 * steps, 1.0 + 4 * steps], 5),
            served(1, f"p{number}", 0.0, [1.0, 1.0 + 2 * steps], 5, text="same" if number else "different"),
        ]
    return ServeRecords(header(), requests)


def test_a_report_follows_from_its_records():
    report = report_of(by_hand())
    plain, drafting = report["rows"]
    steps = [1 + number / 10 for number in range(8)]
    assert plain["seconds"] == pytest.approx(1 + 4 * 1.7) and plain["tokens"] == 40
    assert plain["tokens_per_s"] == pytest.approx(40 / 7.8) and plain["running"] == pytest.approx(sum(1 + 4 * each for each in steps) / 7.8)
    assert plain["first_token_s"] == {"p50": 1.0, "p90": 1.0, "p99": 1.0}
    assert plain["token_s"] == pytest.approx({"p50": steps[3], "p90": steps[7], "p99": steps[7]})
    assert plain["gap_s"] == pytest.approx({"p50": 2 * steps[3], "p90": 2 * steps[7], "p99": 2 * steps[7]})
    assert drafting["latency_s"] == pytest.approx({"p50": 1 + 2 * steps[3], "p90": 1 + 2 * steps[7], "p99": 1 + 2 * steps[7]})
    assert drafting["tokens_per_chunk"] == 2.5 and plain["requests"] == 8
    (row,) = report["speedups"]
    assert list(row["decoding"].values()) == pytest.approx([2.0, 2.0, 2.0])
    latency = [[1 + 2 * each for each in steps], [1 + 4 * each for each in steps]]
    wanted = of_ratio_of_ratios(torch.full((2, 8), 5.0), torch.tensor(latency))
    assert tuple(row["request"].values()) == pytest.approx(tuple(wanted)) and wanted.estimate == pytest.approx(
        sum(latency[1]) / sum(latency[0])
    )
    assert row["equal"]["share"] == 7 / 8 and row["equal"]["own_compared"] == 0
    assert report["planned"] == 32 and report["notes"] == ["16 of 32 requests were measured; the same command measures the others"]


def test_the_seconds_of_a_load_are_those_of_its_segments():
    requests = [served(0, "p0", 1.0, [1.0, 2.0], 2), served(0, "p1", 0.0, [1.0, 5.0], 2), served(0, "p2", 0.0, [1.0, 4.0], 2, segment=1)]
    (row,) = report_of(ServeRecords(header(), [*requests, served(0, "p0", 0.0, [2.0], 1, repeat=1)]))["rows"]
    assert row["seconds"] == 5.0 + 4.0 + 2.0 and row["tokens"] == 7 and row["token_s"]["p99"] == 4.0


def test_what_makes_the_numbers_less_than_they_seem_is_said():
    late = replace(served(0, "p0", 0.0, [1.0, 2.0], 2), sent_s=0.5)
    counters = CountersRecord("concurrency 2", 0, 0, 0, {"generated": 100.0}, {"generated": 150.0})
    notes = " ".join(report_of(ServeRecords(header(), [late], [counters]))["notes"])
    for says in (
        "sent requests late (p99 500 ms)",
        "generated 50 tokens, 2 of them here; others used it too",
        "1.0 requests were under way",
    ):
        assert says in notes


def test_a_sampled_benchmark_compares_no_texts():
    assert report_of(replace_header(by_hand(), temperature=0.7))["speedups"][0]["equal"] is None


def replace_header(content, **settings):
    return ServeRecords(header(**settings), content.requests, content.counters)


def test_counters_are_summed_over_engines_and_taken_as_differences():
    page = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 1e1 1700000000
vllm:spec_decode_num_draft_tokens_total{engine="0"} 330
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 150.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 50.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 100.0
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9
not a sample
"""
    too_large = f'{{"internal_states": [{{"avg_spec_accept_length": {"9" * 400}}}]}}'
    counters = of_vllm(page)
    assert counters == {"engine": "vllm", "drafts": 110.0, "drafted": 330.0, "accepted": 150.0, "survivals": [100.0, 50.0]}
    after = of_vllm(page.replace("150.0", "153.0").replace(" 100.0", " 102.0"))
    assert difference(counters, after) == {"drafts": 2.0, "drafted": 0.0, "accepted": 3.0, "survivals": [2.0, 0.0]}
    assert difference(after, counters) == {} == difference({}, after) and of_vllm("# nothing") == {} == of_vllm("sglang:x 1")
    assert of_sglang('{"internal_states": [{"avg_spec_accept_length": 2.5}]}') == {"engine": "sglang", "accept_length": 2.5}
    assert of_sglang('{"decode": [{"internal_states": [{"avg_spec_accept_length": 3}]}]}') == {"engine": "sglang", "accept_length": 3.0}
    for nothing in ("", "[]", "{}", '{"internal_states": []}', '{"internal_states": [{"avg_spec_accept_length": null}]}', too_large):
        assert of_sglang(nothing) == {}


def test_rounds_without_drafts_count_where_all_tokens_are_known():
    """A look-up drafts in some rounds only: 5 tokens with 2 accepted are the first and those of two rounds, of which one drafted."""
    after = {"drafts": 1.0, "drafted": 3.0, "accepted": 2.0, "generated": 5.0}
    counters = CountersRecord("concurrency 2", 0, 1, 0, dict.fromkeys(after, 0.0), after)
    content = [served(1, "p", 0.0, [1.0, 2.0, 3.0], 5)]
    for requests, generated, tau in ((content, 5.0, 2.0), (content, 6.0, 3.0), ([replace(content[0], tokens=None)], 5.0, 3.0)):
        shared = replace(counters, after=after | {"generated": generated})
        (row,) = report_of(ServeRecords(header(), requests, [shared]))["rows"]
        assert (row["tau"]["tau"], row["tau"]["drafting"], row["tau"]["drafted"]) == (tau, 0.5 if tau == 2.0 else 1.0, 3.0)


def test_rates_that_print_the_same_are_one_load():
    chosen = serve_bench.parser().parse_args(["--url", "http://127.0.0.1:1", "--rate", "1.00000001,1.00000002,2"])
    assert [load.label for load in serve_bench._loads(chosen)] == ["1 requests/s", "2 requests/s"]


def test_a_segment_without_drafts_counts():
    """A look-up drafts nothing for the first answer, 10 rounds after its first token; the second has 4 rounds, 6 tokens accepted."""
    times, names = [0.1 * number for number in range(1, 12)], ("drafts", "drafted", "accepted", "generated")
    readings = [dict(zip(names, values, strict=True)) for values in ((0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 11.0), (4.0, 8.0, 6.0, 22.0))]
    counters = [CountersRecord("concurrency 2", 0, 1, segment, *readings[segment : segment + 2]) for segment in (0, 1)]
    requests = [replace(served(1, "p", 0.0, times, 11), segment=segment) for segment in (0, 1)]
    (row,) = report_of(ServeRecords(header(), requests, counters))["rows"]
    assert row["tau"]["tau"] == pytest.approx(20 / 14) and row["tau"]["drafting"] == pytest.approx(4 / 14) and row["tau"]["drafted"] == 2


@pytest.mark.parametrize("engine", ["sglang", "llamacpp"])
def test_other_engines_say_their_acceptance_in_their_own_way(engine, prompts, capsys):
    with FakeServer(depth=2, engine=engine) as server:
        (row,) = measured(capsys, server, prompts=prompts)["rows"]
    if engine == "sglang":
        assert row["tau"]["tau"] == 2.5 and "since the server started" in row["tau"]["source"]
        return
    later = torch.tensor([2.0 * (len(words_of(prompt)) - 1) for prompt in PROMPTS])
    rounds = torch.tensor([2.0 * math.ceil((len(words_of(prompt)) - 1) / 3) for prompt in PROMPTS])
    wanted = of_ratio(later, rounds)
    assert (row["tau"]["tau"], row["tau"]["low"], row["tau"]["high"]) == pytest.approx(tuple(wanted)) and wanted.low is not None


def test_records_survive_their_lines_and_damage_is_one_line():
    requests = [replace(served(0, "p", 0.125, [1.0, 2.0], None), error="x", drafting={"draft_n": 3}), served(1, "p", 0.0, [1.0], 1)]
    lines = [{"kind": "header", "format": 1} | header(), *map(request_line, requests)]
    rows = [(f"f:{number}", json.loads(json.dumps(line))) for number, line in enumerate(lines, 1)]
    content = records_of(rows, "f")
    assert content.requests == requests and content.header == header() and content.planned == 32
    for damage, says in (
        ({"tokens": "3"}, "f:2: `tokens` should be an integer or null"),
        ({"chunks_s": 3}, "f:2: `chunks_s` should be a list"),
        ({"kind": "other"}, "f:2: not a line that draftsmith serve-bench wrote"),
    ):
        with pytest.raises(ValueError, match=says):
            records_of([rows[0], ("f:2", rows[1][1] | damage)], "f")


# Predicted against measured


def evaluated(load=True, positions=True):
    """An evaluation whose drafter has two of three tokens right, of a chain of one."""
    requests = [request(f"p{number}", [2, 1, 2]) for number in range(8)]
    tokens = torch.arange(9)
    ranks = torch.tensor([[0, 0], [0, 5], [5, 5]] * 3)
    ranks[-1] = -1
    recorded_positions = [
        PositionRecord(f"p{number}", "d", ranks, torch.zeros(ranks.shape), tokens=tokens, choosing=False) for number in range(8)
    ]
    return records(requests, load_record() if load else None, recorded_positions if positions else (), CHAIN1)


def with_counters(content, drafted):
    after = {"drafts": 100.0, "drafted": 100.0 * drafted, "accepted": 70.0}
    return replace_counters(content, [CountersRecord("concurrency 2", 0, 1, 0, dict.fromkeys(after, 0.0), after)])


def replace_counters(content, counters):
    return ServeRecords(content.header, content.requests, counters)


def test_the_prediction_is_of_the_servers_chain_batch_and_context():
    report = report_of(with_counters(by_hand(), 1), evaluated(positions=False))
    (row,) = report["speedups"]
    assert report["rows"][1]["tau"]["tau"] == pytest.approx(1.7)
    rounds = rounds_of(evaluated().requests, 1)
    wanted = predict(CostModel(load_record()), rounds, 2, 100, CHAIN1)  # a context of 22.5 is shorter than the shortest
    values = row["predicted"]
    assert (values["tau"], values["depth"], values["batch"], values["context"]) == (pytest.approx(5 / 3), 1, 2, 100)
    assert (values["speedup"], values["low"], values["high"]) == pytest.approx((wanted.speedup, wanted.low, wanted.high))
    assert row["unpredicted"] == "" and "other prompts than this benchmark" in " ".join(report["notes"])
    # The positions say what a chain of two accepts: from row 0 both, from row 1 one, from row 2 none.
    deeper = report_of(with_counters(by_hand(), 2), evaluated())["speedups"][0]["predicted"]
    assert deeper["depth"] == 2 and deeper["tau"] == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("drafted", "evaluation", "settings", "says"),
    [
        (3, {}, {}, "neither positions 3 deep nor a chain of 3"),
        (2, {"positions": False}, {}, "neither positions 2 deep nor a chain of 2"),
        (1.5, {}, {}, "drafts 1.50 tokens a round on average"),
        (1, {}, {"temperature": 0.5}, "the evaluation has no sampling 0.5, only 0"),
    ],
)
def test_where_no_prediction_is_possible_the_reason_is_said(drafted, evaluation, settings, says):
    content = with_counters(replace_header(by_hand(), **settings), drafted)
    (row,) = report_of(content, evaluated(**evaluation))["speedups"]
    assert row["predicted"] is None and says in row["unpredicted"]


def test_without_a_speedup_the_prediction_of_tau_stands():
    (row,) = report_of(with_counters(by_hand(), 1), evaluated(load=False))["speedups"]
    assert row["predicted"]["speedup"] is None and "timed no loads" in row["predicted"]["why_none"]
    many = ServeRecords(header(loads=[["concurrency", 9.0]]), [replace(each, load="concurrency 9") for each in by_hand().requests])
    (row,) = report_of(many, evaluated())["speedups"]
    assert "got batch 9; expected 1 to 8" in row["predicted"]["why_none"] and row["predicted"]["tau"] == pytest.approx(5 / 3)
    rated = ServeRecords(header(loads=[["rate", 9.0]]), [replace(each, load="9 requests/s") for each in by_hand().requests])
    (row,) = report_of(rated, evaluated())["speedups"]
    assert "with a rate" in row["predicted"]["why_none"]
