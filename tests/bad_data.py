"""Bad data, prompts, tables, caches, feature stores, outputs and servers for `draftsmith data`, and for training from them."""

import fcntl
import gzip
import hashlib
import json
import os
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from bad_inputs import BadInput, Payload, both, changed, nothing, tensors, written

PREPARE = "data prepare medusa.yaml data.num_proc=1"
ROWS = f"{PREPARE} data.train=rows.jsonl"
SHOW = "data show medusa.yaml data.train=rows.jsonl data.num_proc=1 --examples 60"
CAPTURE = "data capture eagle.yaml features.precision=float32 features.store="
OFFLINE = "train medusa medusa.yaml features.mode=offline features.store=store"
CACHED = "train medusa medusa.yaml features.mode=cache features.precision=float32 features.store=store"
ANSWER = "data regenerate prompts.jsonl out.jsonl --target target --max-new-tokens 2"
DEEP = "[" * 5000 + "]" * 5000


def scaled(weights: dict) -> None:
    """Fine-tunes, so to speak."""
    weights["model.layers.1.mlp.down_proj.weight"].mul_(1.01)


BOMB = gzip.compress(b"a" * (1 << 20)) * 4096  # 4 GiB in 4 MiB
LINES = gzip.compress(b'{"text": "a"}\n' * 60_000) * 5000
CHAT = {"messages": [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Four, I think."}]}


def rows(*examples: Any, count: int = 60, **keys: Any) -> Callable[[Path], object]:
    """A damage: rows.jsonl has good conversations with these keys, and then `examples`, as JSON unless they are text."""
    good = [CHAT | {"id": f"c{n}"} | keys for n in range(count)]
    for n, chat in enumerate(good):
        chat["messages"] = [
            {"role": "user", "content": f"How many are {n} and {n * n}?"},
            {"role": "assistant", "content": f"{n + n * n}."},
        ]
    return written("rows.jsonl", "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in (*good, *examples)))


def turn(**message: Any) -> dict[str, Any]:
    return {"messages": [message, {"role": "assistant", "content": "Yes."}]}


def link(name: str, to: str) -> Callable[[Path], object]:
    """A damage: `name` is a link instead."""

    def damage(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(to)

    return damage


def fifo(name: str) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return damage


def corpus_file(change: Callable[[Path], object], part: str = "train") -> Callable[[Path], object]:
    """A damage: `change` is given the cached corpus."""
    return lambda folder: change(next((folder / "cache").glob(f"{part}-*.safetensors")))


def flip(file: Path) -> None:
    """One bit of the last tensor, not of the header."""
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)


def shard(change: Callable[[Path], object], ending: str = ".safetensors") -> Callable[[Path], object]:
    """A damage: `change` is given the store's shard, or its checksum file."""
    return lambda folder: change(next(file for file in (folder / "store").glob(f"*{ending}") if len(file.stem) == 16))


def side_file(sealed: bool = True, **entries: Any) -> Callable[[Path], object]:
    """A damage: these entries of a checksum file are changed, `...` takes one out. Sealed: its own checksum is right again."""

    def change(file: Path) -> None:
        changed(file.name, **entries)(file.parent)
        seal(file) if sealed else None

    return shard(change, ".json")


def seal(file: Path) -> None:
    facts = {key: value for key, value in json.loads(file.read_text()).items() if key != "checksum"}
    file.write_text(json.dumps(facts | {"checksum": hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()}))


def features(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """A damage: `change` alters the tensors of a shard, whose checksums are right again, as an attacker would have it."""

    def damage(file: Path) -> None:
        tensors(file.name, change)(file.parent)
        sealed_content(file)

    return shard(damage)


def sealed_content(file: Path, content: bytes | None = None) -> None:
    file.write_bytes(file.read_bytes() if content is None else content)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    changed(f"{file.stem}.json", sha256=digest, bytes=file.stat().st_size)(file.parent)
    seal(file.with_suffix(".json"))


def exchanged(file: Path) -> None:
    """Two samples of equal length exchange their keys."""
    keys, lengths = (json.loads(file.read_text())[key] for key in ("keys", "lengths"))
    first, second = next((a, b) for a in range(len(keys)) for b in range(a) if lengths[a] == lengths[b])
    keys[first], keys[second] = keys[second], keys[first]
    changed(file.name, keys=keys)(file.parent)
    seal(file)


def table(name: str, damage: Callable[[bytearray], object] = lambda content: None, **options: Any) -> Callable[[Path], object]:
    """A damage: `name` is a table of the texts in chats.jsonl; `damage` then alters its bytes."""

    def write(folder: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        texts = pa.table({"text": [json.loads(line)["messages"][0]["content"] * 4 for line in (folder / "chats.jsonl").open()]})
        if name.endswith(".parquet"):
            pq.write_table(texts, folder / name, compression="none", use_dictionary=False, **options)
        else:
            with pa.ipc.new_stream(folder / name, texts.schema) as stream:
                stream.write_table(texts)
        content = bytearray((folder / name).read_bytes())
        damage(content)
        (folder / name).write_bytes(content)

    return write


def replaced(old: bytes, new: bytes) -> Callable[[bytearray], object]:
    def damage(content: bytearray) -> None:
        assert old in content and len(old) == len(new)
        content[:] = content.replace(old, new, 1)

    return damage


def wide_table(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 2_000_000, pa.int32()), pa.array(["a text of some length " * 100]))
    pq.write_table(pa.table({"text": texts}), folder / "bomb.parquet")


def locked(name: str) -> Callable[[], object]:
    """Called in the process: another descriptor holds the lock, as another process would."""
    return lambda: fcntl.flock(os.open(name, os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)


def home() -> None:
    os.environ["HOME"] = os.getcwd()


# --- servers -----------------------------------------------------------------------------------------------------------

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    PORT = probe.getsockname()[1]
KEY = "sk-secret-0123456789abcdef"
SAYS: dict[str, tuple[int, bytes]] = {
    "deep": (200, b'{"choices": ' + DEEP.encode() + b"}"),
    "kinds": (200, b'{"choices": {"message": 3}}'),
    "thought": (200, b'{"choices": [{"message": {"content": "a", "reasoning": {"a": 1}}, "finish_reason": "stop"}]}'),
    "escape": (400, b'{"error": "\\u001b]0;owned\\u0007 [/] no such model"}'),
    "deep-error": (400, b'{"error": ' + DEEP.encode() + b"}"),
    "echo": (400, b'{"error": "Bearer ' + KEY.encode() + b' is wrong"}'),
    "store": (200, json.dumps({"choices": [{"message": {"content": f"Key {KEY}!"}, "finish_reason": "stop"}]}).encode()),
}


class BadServer(BaseHTTPRequestHandler):
    """Answers by the first word of the path."""

    def do_POST(self):
        kind = self.path.split("/")[1]
        status, body = SAYS.get(kind, (200, b""))
        self.send_response(status)
        if kind == "gzip":
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        try:
            for _ in range(1 << 14 if kind == "endless" else 0):
                self.wfile.write(b" " * (1 << 16))
            self.wfile.write(BOMB if kind == "gzip" else body)
        except OSError:
            pass

    def log_message(self, format, *args):
        pass


def serve() -> None:
    from draftsmith.data import server

    server.FIRST_WAIT = 0.0
    os.environ["OPENAI_API_KEY"] = KEY
    os.environ["NO_PROXY"] = "*"
    threading.Thread(target=ThreadingHTTPServer(("127.0.0.1", PORT), BadServer).serve_forever, daemon=True).start()


def ask(kind: str) -> str:
    return f"data regenerate chats.jsonl out.jsonl --model m --concurrency 2 --server http://127.0.0.1:{PORT}/{kind}"


# --- cases -------------------------------------------------------------------------------------------------------------

NO_ESCAPE = r"(?s)\A(?!.*\x1b).*"
STORE_MARK = ("store/.draftsmith.json",)
FOREIGN = "which no feature store of Draftsmith wrote"

LOST_FILES = [
    BadInput("lost files: a foreign file in a store", written("store/notes.json", "{}"), CAPTURE + "store", "shards", 0, STORE_MARK),
    BadInput("lost files: a foreign list in a store", written("store/notes.json", "[1]"), CAPTURE + "store", "shards", 0, STORE_MARK),
    BadInput("lost files: foreign text in a store", written("store/a.json", "mine"), CAPTURE + "store", "shards", 0, STORE_MARK),
    BadInput("lost files: a foreign .part in a store", written("store/.photo.part", "mine"), CAPTURE + "store", "shards", 0, STORE_MARK),
    BadInput("lost files: an index of somebody else", written("site/index.json", '{"name": "site"}'), CAPTURE + "site", FOREIGN),
    BadInput("lost files: names like shards", written("photos/0123456789abcdef.json", "{}"), CAPTURE + "photos", FOREIGN),
    BadInput(
        "lost files: a folder of another kind",
        written("run/.draftsmith.json", '{"kind": "training run"}'),
        CAPTURE + "run",
        "holds a training run, not a feature store",
    ),
    BadInput("lost files: a store that is a file", nothing, CAPTURE + "chats.jsonl", "chats.jsonl is a file; give a folder"),
    BadInput(
        "lost files: the mark of a store is a link", link("store/.draftsmith.json", "../chats.jsonl"), CAPTURE + "store", "symbolic link"
    ),
    BadInput(
        "lost files: the index of a store is a link",
        both(link("store/index.json", "../precious"), written("precious", "{}")),
        CAPTURE + "store",
        "index.json is broken",
        writes=STORE_MARK,
    ),
    BadInput(
        "lost files: cache mode in a foreign folder",
        written("site/index.json", "[]"),
        CACHED.replace("=store", "=site"),
        "index.json is broken .*give another folder",
    ),
    BadInput(
        "lost files: output of somebody else",
        written("out.jsonl", '{"id": "p1", "mine": 1}\n'),
        ANSWER,
        "out.jsonl:1: not a row that this command wrote",
    ),
    BadInput(
        "lost files: an unfinished line of somebody else",
        written("out.jsonl", '{"id": 3, "mine": "unfin'),
        ANSWER,
        "out.jsonl:1: not a row",
    ),
    BadInput(
        "lost files: an unfinished row of other ids", written("out.jsonl", '{"id": "q", "domain": "unfin'), ANSWER, "out.jsonl:1: not a row"
    ),
    BadInput("lost files: output is a deep row", written("out.jsonl", DEEP), ANSWER, "out.jsonl:1: not a row"),
    BadInput("lost files: output is a link", both(link("out.jsonl", "mine"), written("mine", "")), ANSWER, "is a link to mine"),
    BadInput("lost files: output is a link to nothing", link("out.jsonl", "elsewhere"), ANSWER, "is a link to elsewhere"),
    BadInput("lost files: output is the source", nothing, ANSWER.replace("out.jsonl", "prompts.jsonl"), "prompts.jsonl:1: not a row"),
    BadInput(
        "lost files: output within the source",
        written("rows/a.jsonl", '{"text": "a"}\n'),
        "data regenerate rows rows/out.jsonl --target target",
        "would be one of the files of rows",
    ),
    BadInput("lost files: output is a folder", nothing, ANSWER.replace("out.jsonl", "store"), "store is a folder"),
    BadInput("lost files: output is a FIFO", fifo("out.jsonl"), ANSWER, "out.jsonl is no regular file"),
    BadInput("lost files: output is a device", nothing, ANSWER.replace("out.jsonl", "/dev/zero"), "/dev/zero is no regular file"),
    BadInput("lost files: the cache is a file", nothing, f"{PREPARE} data.cache=chats.jsonl", "data.cache=chats.jsonl"),
    BadInput(
        "lost files: the cache is below a file",
        nothing,
        f"{PREPARE} data.cache=chats.jsonl/a/b",
        "data.cache=chats.jsonl/a/b: .*chats.jsonl is no folder",
    ),
    BadInput(
        "lost files: a cached corpus is a link",
        both(written("mine", "mine"), corpus_file(lambda file: link(file.name, "../mine")(file.parent))),
        PREPARE,
        "is damaged",
        0,
        ("cache/*",),
    ),
]

WRONG_RESULTS = [
    BadInput(
        "excluded prompts: a missing file", nothing, f"{PREPARE} data.exclude=[promts.jsonl]", "data.exclude 'promts.jsonl' not found"
    ),
    BadInput(
        "excluded prompts: a missing file in training",
        nothing,
        "train medusa medusa.yaml data.exclude=[promts.jsonl]",
        "data.exclude 'promts.jsonl' not found",
    ),
    BadInput(
        "excluded prompts: one of two is missing",
        nothing,
        f"{PREPARE} data.exclude=[prompts.jsonl,b.jsonl]",
        "data.exclude 'b.jsonl' not found",
    ),
    BadInput("excluded prompts: a folder", nothing, f"{PREPARE} data.exclude=[store]", "data.exclude 'store' is a folder"),
    BadInput("excluded prompts: a FIFO", fifo("p.jsonl"), f"{PREPARE} data.exclude=[p.jsonl]", "data.exclude 'p.jsonl' is a FIFO"),
    BadInput("excluded prompts: a device", nothing, f"{PREPARE} data.exclude=[/dev/zero]", "data.exclude '/dev/zero' is a device"),
    BadInput(
        "excluded prompts: a link to nothing",
        link("p.jsonl", "gone"),
        f"{PREPARE} data.exclude=[p.jsonl]",
        "'p.jsonl' is a link that leads to no file",
    ),
    BadInput(
        "excluded prompts: not UTF-8",
        written("p.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}\n'),
        f"{PREPARE} data.exclude=[p.jsonl]",
        r"p.jsonl:2: byte 13 of the line, 0xff, is not UTF-8",
    ),
    BadInput("excluded prompts: empty", written("p.jsonl", ""), f"{PREPARE} data.exclude=[p.jsonl]", "p.jsonl: no prompts in it"),
    BadInput(
        "excluded prompts: nested too deep",
        written("p.jsonl", DEEP),
        f"{PREPARE} data.exclude=[p.jsonl]",
        "p.jsonl:1: JSON of more than 100 levels",
    ),
    BadInput(
        "excluded prompts: a number",
        written("p.jsonl", '{"prompt": 3}'),
        f"{PREPARE} data.exclude=[p.jsonl]",
        "p.jsonl:1: `prompt` should be text, got an integer",
    ),
    BadInput(
        "excluded prompts: messages without role",
        written("p.jsonl", '{"messages": [{"content": "a"}]}'),
        f"{PREPARE} data.exclude=[p.jsonl]",
        "p.jsonl:1: `messages` 0: `role` should be text",
    ),
    BadInput(
        "excluded prompts: half a character",
        written("p.jsonl", '{"prompt": "\\ud800"}'),
        f"{PREPARE} data.exclude=[p.jsonl]",
        "p.jsonl:1: `prompt` has half a surrogate pair",
    ),
    BadInput(
        "excluded prompts: a bomb",
        written("p.jsonl.gz", BOMB),
        f"{PREPARE} data.exclude=[p.jsonl.gz]",
        "p.jsonl.gz: expands to more than 200 times",
    ),
    BadInput(
        "sections: misspelt", nothing, f"{PREPARE} dta.train=rows.jsonl", "unknown recipe key 'dta.train'; the nearest is 'data.train'"
    ),
    BadInput(
        "sections: misspelt in the file",
        lambda folder: (folder / "medusa.yaml").open("a").write("dat.exclude: [prompts.jsonl]\n"),
        PREPARE,
        "unknown recipe key 'dat.exclude'",
    ),
    BadInput("sections: misspelt for show", nothing, "data show medusa.yaml Data.train=rows.jsonl", "unknown recipe key 'Data.train'"),
    BadInput("sections: misspelt for capture", nothing, CAPTURE + "new feature.taps=[0]", "unknown recipe key 'feature.taps'"),
    BadInput("sections: no section", nothing, f"{PREPARE} train=rows.jsonl", "unknown recipe key 'train'"),
    BadInput("sections: of another method", nothing, f"{PREPARE} medusa.heads=3 eagle.steps=2", "examples read", 0),
    BadInput("cached corpora: a flipped bit", corpus_file(flip), PREPARE, "is damaged or without a checksum", 0, ("cache/*",)),
    BadInput("cached corpora: a flipped bit of the held-out part", corpus_file(flip, "valid"), PREPARE, "is damaged or", 0, ("cache/*",)),
    BadInput(
        "cached corpora: cut off",
        corpus_file(lambda file: file.write_bytes(file.read_bytes()[:-9])),
        PREPARE,
        "is damaged or",
        0,
        ("cache/*",),
    ),
    BadInput("cached corpora: empty", corpus_file(lambda file: file.write_bytes(b"")), PREPARE, "is damaged or", 0, ("cache/*",)),
    BadInput(
        "cached corpora: the other part",
        corpus_file(lambda file: file.write_bytes(next(file.parent.glob("valid-*")).read_bytes())),
        PREPARE,
        "is damaged or",
        0,
        ("cache/*",),
    ),
    BadInput(
        "cached corpora: ids of another vocabulary",
        corpus_file(lambda file: tensors(file.name, lambda t: t["ids"].add_(10_000))(file.parent)),
        PREPARE,
        "is damaged or",
        0,
        ("cache/*",),
    ),
    BadInput(
        "cached corpora: other tensors",
        corpus_file(lambda file: tensors(file.name, lambda t: t.pop("mask"))(file.parent)),
        PREPARE,
        "is damaged or",
        0,
        ("cache/*",),
    ),
    BadInput(
        "mixture: a weight of nothing",
        nothing,
        [*PREPARE.split(), "data.train=[{path: chats.jsonl, weight: 1.0}, {path: text.txt, weight: 1.0e-300}]"],
        "the weights repeat chats.jsonl more than",
    ),
    BadInput("mixture: an endless weight", nothing, [*PREPARE.split(), "data.train=[{path: chats.jsonl, weight: .inf}]"], "data.train"),
    BadInput("mixture: a weight that is none", nothing, [*PREPARE.split(), "data.train=[{path: chats.jsonl, weight: .nan}]"], "data.train"),
]

STORES = [
    BadInput("shards: a flipped bit", shard(flip), OFFLINE, "is damaged .its checksum"),
    BadInput("shards: cut off", shard(lambda file: file.write_bytes(file.read_bytes()[:-8])), OFFLINE, "bytes where .* were written"),
    BadInput("shards: missing", shard(Path.unlink), OFFLINE, "safetensors .* is missing"),
    BadInput("shards: of another target", side_file(store="0" * 64), OFFLINE, "belongs to another store"),
    BadInput(
        "shards: of another target, in cache mode",
        side_file(store="0" * 64),
        CACHED,
        "belongs to another store .*it is not read",
        0,
        ("store/*",),
    ),
    BadInput(
        "shards: a pickle",
        shard(lambda file: sealed_content(file, __import__("pickle").dumps(Payload()))),
        OFFLINE,
        "is no safetensors file",
    ),
    BadInput("shards: NaN", features(lambda t: t["hidden"].fill_(float("nan"))), OFFLINE, "`hidden` has an inf or a NaN"),
    BadInput("shards: inf", features(lambda t: t["hidden"].fill_(float("inf"))), OFFLINE, "`hidden` has an inf or a NaN"),
    BadInput("shards: integers", features(lambda t: t.update(hidden=t["hidden"].long())), OFFLINE, "has not the tensors of its"),
    BadInput("shards: half precision", features(lambda t: t.update(hidden=t["hidden"].half())), OFFLINE, "has not the tensors of its"),
    BadInput("shards: fewer rows", features(lambda t: t.update(hidden=t["hidden"][:-3].clone())), OFFLINE, "has not the tensors of its"),
    BadInput(
        "shards: taps that the index does not name",
        features(lambda t: t.update(taps=t["hidden"][:, None].clone())),
        OFFLINE,
        "has not the tensors of its",
    ),
    BadInput("shards: no ids", features(lambda t: t.pop("ids")), OFFLINE, "has not the tensors of its"),
    BadInput("shards: ids of other samples", features(lambda t: t["ids"].add_(1)), OFFLINE, "has token ids of other samples"),
    BadInput("checksum files: exchanged keys", shard(exchanged, ".json"), OFFLINE, "has token ids of other samples"),
    BadInput("checksum files: changed", side_file(sealed=False, store="0" * 64), OFFLINE, "has not the recorded `checksum`"),
    *(
        BadInput(f"checksum files: {name}", side_file(**entries), OFFLINE, rf"\.json is broken .*{says}")
        for name, entries, says in [
            ("negative lengths", {"lengths": [-5]}, "`lengths` should hold a number above 0"),
            ("lengths of text", {"lengths": ["5"]}, "`lengths` integers"),
            ("lengths of true", {"lengths": [True]}, "`lengths` integers"),
            ("lengths of fractions", {"lengths": [2.5]}, "`lengths` integers"),
            ("lengths of no list", {"lengths": 5}, "`lengths` should be a list"),
            ("no lengths", {"lengths": ...}, "`lengths` should be a list, got nothing"),
            ("keys of numbers", {"keys": [1]}, "`keys` should be texts"),
            ("no keys", {"keys": None}, "`keys` should be a list, got null"),
            ("bytes of text", {"bytes": "many"}, "`bytes` should be an integer"),
            ("an error of text", {"error": {"rows": "many"}}, "`error` should hold numbers"),
        ]
    ),
    BadInput(
        "checksum files: huge lengths",
        shard(
            lambda file: (changed(file.name, lengths=[1 << 80] * len(json.loads(file.read_text())["keys"]))(file.parent), seal(file)),
            ".json",
        ),
        OFFLINE,
        "has not the tensors",
    ),
    *(
        BadInput(
            f"checksum files: {name}",
            shard(lambda file, text=text: file.write_bytes(text), ".json"),
            OFFLINE,
            rf"\.json is broken .*{says}",
        )
        for name, text, says in [
            ("empty", b"", "not JSON"),
            ("a list", b"[]", "expected an object, got a list"),
            ("not UTF-8", b'{"keys": "\xff"}', "not UTF-8"),
            ("nested too deep", DEEP.encode() * 40, "nested too deep|not JSON"),
        ]
    ),
    BadInput(
        "checksum files: a broken one is not deleted",
        shard(lambda file: file.write_text("{"), ".json"),
        CAPTURE + "store",
        r"\.json is broken",
        writes=STORE_MARK,
    ),
    *(
        BadInput(f"index of a store: {name}", damage, OFFLINE, says)
        for name, damage, says in [
            ("taps of text", changed("store/index.json", taps=["0"]), r"index.json is broken .*taps \['0'\]"),
            ("no taps", changed("store/index.json", taps=...), "`taps` should be a list"),
            ("hidden_size true", changed("store/index.json", hidden_size=True), "`hidden_size` should be an integer"),
            ("hidden_size of another target", changed("store/index.json", hidden_size=8), "says hidden_size 8, the target has"),
            ("hidden_size 0", changed("store/index.json", hidden_size=0), "index.json is broken .*hidden_size 0"),
            ("an unknown precision", changed("store/index.json", precision="int3"), "index.json is broken .*'int3'"),
            ("no target", changed("store/index.json", target=None), "`target` should be an object"),
            ("a target of numbers", changed("store/index.json", **{"target.dtype": 3}), "`dtype` should be text"),
            ("another target", changed("store/index.json", **{"target.config_hash": "0" * 64}), "the target differs in its config"),
            ("a target of other weights", tensors("target/model.safetensors", scaled), "the target differs in its weights"),
            ("another name", changed("store/index.json", **{"target.name": "other"}), "belongs to another store"),
            ("a list", written("store/index.json", "[]"), "expected an object, got a list"),
            ("empty", written("store/index.json", ""), "index.json is broken .*not JSON"),
            ("nested too deep", written("store/index.json", DEEP * 40), "index.json is broken"),
        ]
    ),
    BadInput(
        "taps: a layer that is not there", nothing, CAPTURE + "new features.taps=[9]", "tap 9 of target .* expected a decoder layer 0"
    ),
    BadInput("taps: a negative layer", nothing, CAPTURE + "new features.taps=[-1]", "tap -1 of target"),
    BadInput("taps: a layer twice", nothing, CAPTURE + "new features.taps=[0,0]", "names a layer twice"),
    BadInput(
        "two writers: captures",
        nothing,
        CAPTURE + "store",
        r"store: process \d+ on .* is writing there",
        inside=locked("store/.draftsmith.json"),
    ),
    BadInput(
        "two writers: cache mode", nothing, CACHED, r"store: process \d+ on .* is writing there", inside=locked("store/.draftsmith.json")
    ),
    BadInput(
        "two writers: regenerate", written("out.jsonl", ""), ANSWER, r"out.jsonl: process \d+ .* is writing it", inside=locked("out.jsonl")
    ),
]

TEXT = f"{PREPARE} data.train=bad"
FILES = [
    *(
        BadInput(f"files: {name}", written(f"bad{ending}", content), f"{TEXT}{ending}", says)
        for name, ending, content, says in [
            ("not UTF-8", ".jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', r"bad.jsonl:2: byte 11 of the line, 0xe9, is not UTF-8"),
            ("a list that is not UTF-8", ".json", b'[{"text": "a"},\n {"text": "\xe9"}]', r"bad.json:2: byte 12 of the line, 0xe9"),
            ("UTF-16", ".txt", "Märchen".encode("utf-16"), "bad.txt:1: byte 1 of the line, 0xff"),
            ("UTF-16 without a mark", ".txt", "Tales".encode("utf-16-le"), "bad.txt:1: byte 2 of the line is 0"),
            ("NUL bytes", ".jsonl", b'{"text": "a"}\n\0\0\0\0\n', "bad.jsonl:2: byte 1 of the line is 0"),
            ("half a character", ".jsonl", b'{"text": "\\udc00"}\n', "bad.jsonl:1: .*half of a surrogate pair"),
            ("cut off in a character", ".json", b'[{"text": "\xc3', "bad.json:1: byte 12 of the line, 0xc3"),
            ("empty", ".jsonl", b"", "no examples to train on; the source is empty"),
            ("blanks", ".jsonl", b" \n\n\t\n", "no examples to train on; the source is empty"),
            ("an empty list", ".json", b"[]", "no examples to train on; the source is empty"),
            ("an object", ".json", b"{}", "bad.json:1: expected a list of examples"),
            ("nested too deep", ".jsonl", b'{"text": "a", "b": ' + DEEP.encode() + b"}", "bad.jsonl:1: JSON of more than 100 levels"),
            ("a list nested too deep", ".json", b"[" + DEEP.encode() + b"]", "bad.json:1: JSON of more than 100 levels"),
            ("200 levels", ".jsonl", b'{"text": "a", "b": ' + b"[" * 200 + b"]" * 200 + b"}", "bad.jsonl:1: JSON of more than 100 levels"),
            (
                "a key twice",
                ".jsonl",
                b'{"messages": [], "messages": [{"role": "user", "content": "a"}]}',
                "bad.jsonl:1: key 'messages' is given twice",
            ),
            ("a number of 5,000 digits", ".jsonl", b'{"text": ' + b"9" * 5000 + b"}", "bad.jsonl:1: not JSON"),
            ("a huge line", ".jsonl", b'{"text": "' + b"a" * (65 << 20) + b'"}\n', "bad.jsonl:1: a line of more than 67,108,864 bytes"),
            ("a huge example", ".json", b'[{"text": "' + b"a" * (70 << 20), "bad.json:1: an example of more than 67,108,864"),
            ("no JSON", ".jsonl", b"\x1b[31mred\n", r"bad.jsonl:1: not JSON .*got '\\x1b\[31mred"),
            ("a bomb in a line", ".jsonl.gz", BOMB, "bad.jsonl.gz: expands to more than 200 times"),
            ("a bomb in many lines", ".jsonl.gz", LINES, "bad.jsonl.gz: expands to more than 200 times"),
            (
                "a bomb of blanks",
                ".json.gz",
                gzip.compress(b" " * (1 << 20)) * 4096,
                "bad.json.gz: expands to more than 200 times",
            ),
            ("a bomb of a text", ".txt.gz", BOMB, "bad.txt.gz: expands to more than 200 times"),
            ("a bomb of texts", ".txt.gz", gzip.compress(b"a\n" * 60_000) * 30_000, "bad.txt.gz: expands to more than 200 times"),
            ("no gzip", ".jsonl.gz", b'{"text": "a"}\n', "bad.jsonl.gz:1: the gzip stream is cut off or damaged"),
            ("no parquet", ".parquet", b"PAR1" * 20, "bad.parquet: not a complete .parquet file"),
            ("an empty parquet", ".parquet", b"", "bad.parquet: not a complete .parquet file"),
            ("no arrow", ".arrow", b"\xff" * 99, "bad.arrow: not a complete .arrow file"),
            ("an empty arrow", ".arrow", b"", "bad.arrow: not a complete .arrow file"),
            ("one conversation", ".jsonl", json.dumps(CHAT).encode(), "no examples to train on"),
        ]
    ),
    BadInput(
        "tables: cut off",
        table("bad.parquet", lambda content: content.__delitem__(slice(-9, None))),
        f"{TEXT}.parquet",
        "bad.parquet: not a complete .parquet file",
    ),
    BadInput(
        "tables: text that is not UTF-8",
        table("bad.parquet", replaced(b"How many are 7 ", b"How many \xff\xff\xff 7 ")),
        f"{TEXT}.parquet",
        "bad.parquet: not a complete .parquet file .*(?i:utf)",
    ),
    BadInput(
        "tables: a page with another checksum",
        table("bad.parquet", replaced(b"How many are 7 ", b"Who many are 7 "), write_page_checksum=True),
        f"{TEXT}.parquet",
        "bad.parquet: not a complete .parquet file .*(?i:crc)",
    ),
    BadInput(
        "tables: arrow text that is not UTF-8",
        table("bad.arrow", replaced(b"How many are 7 ", b"How many \xff\xff\xff 7 ")),
        f"{TEXT}.arrow",
        "bad.arrow: not a complete .arrow file .*(?i:utf)",
    ),
    BadInput(
        "tables: arrow offsets out of bounds",
        table("bad.arrow", replaced((84).to_bytes(4, "little"), (1 << 30).to_bytes(4, "little"))),
        f"{TEXT}.arrow",
        "bad.arrow: not a complete .arrow file",
    ),
    BadInput(
        "tables: arrow cut off",
        table("bad.arrow", lambda content: content.__delitem__(slice(-2000, None))),
        f"{TEXT}.arrow",
        "bad.arrow: not a complete .arrow file",
    ),
    BadInput("tables: a bomb", wide_table, f"{PREPARE} data.train=bomb.parquet", "bomb.parquet: expands to more than 200 times"),
    BadInput("kinds of files: a FIFO", fifo("bad.jsonl"), f"{TEXT}.jsonl", "data file 'bad.jsonl' is a FIFO"),
    BadInput("kinds of files: a device", nothing, f"{PREPARE} data.train=/dev/zero", "data file '/dev/zero' is a device"),
    BadInput("kinds of files: a link to a device", link("bad.jsonl", "/dev/zero"), f"{TEXT}.jsonl", "data file 'bad.jsonl' is a device"),
    BadInput(
        "kinds of files: a link to nothing",
        link("bad.jsonl", "gone.jsonl"),
        f"{TEXT}.jsonl",
        "data file 'bad.jsonl' is a link that leads to no file",
    ),
    BadInput(
        "kinds of files: links in a circle",
        both(link("bad.jsonl", "b.jsonl"), link("b.jsonl", "bad.jsonl")),
        f"{TEXT}.jsonl",
        "'bad.jsonl' is a link that leads to no file",
    ),
    BadInput(
        "kinds of files: a folder with a link to nothing",
        both(written("d/a.jsonl", '{"text": "a"}'), link("d/b.jsonl", "gone")),
        f"{PREPARE} data.train=d",
        "'d/b.jsonl' is a link that leads to no file",
    ),
    BadInput(
        "kinds of files: a folder with a FIFO",
        both(written("d/a.jsonl", '{"text": "a"}'), fifo("d/b.jsonl")),
        f"{PREPARE} data.train=d",
        "'d/b.jsonl' is a FIFO",
    ),
    BadInput(
        "kinds of files: a folder of itself",
        both(
            rows(),
            lambda folder: (
                (folder / "d").mkdir(),
                (folder / "d/d.jsonl").symlink_to("."),
                (folder / "rows.jsonl").rename(folder / "d/a.jsonl"),
            ),
        ),
        f"{PREPARE} data.train=d",
        "60 examples read",
        0,
    ),
    BadInput("kinds of files: a folder without data", written("d/a.csv", "a"), f"{PREPARE} data.train=d", "folder 'd' holds no .json"),
    BadInput("kinds of files: a template that is a folder", nothing, f"{PREPARE} data.template=store", "data.template 'store' is a folder"),
    BadInput(
        "kinds of files: a template that is a FIFO",
        fifo("t.jinja"),
        f"{PREPARE} data.template=t.jinja",
        "data.template 't.jinja' is a FIFO",
    ),
    BadInput(
        "kinds of files: a template that is not UTF-8",
        written("t.jinja", b"{{ \xff }}"),
        f"{PREPARE} data.template=t.jinja",
        "t.jinja:1: byte 4 of the line, 0xff, is not UTF-8",
    ),
    BadInput(
        "good files: with a byte order mark",
        lambda folder: (folder / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + (folder / "chats.jsonl").read_bytes()),
        f"{PREPARE} data.train=b.jsonl",
        "60 examples read",
        0,
    ),
    BadInput(
        "good files: prompts with a byte order mark",
        lambda folder: (folder / "p.jsonl").write_bytes(b"\xef\xbb\xbf" + (folder / "prompts.jsonl").read_bytes()),
        f"{PREPARE} data.exclude=[p.jsonl]",
        "60 examples read",
        0,
    ),
    BadInput(
        "good files: with CRLF",
        lambda folder: (folder / "b.jsonl").write_bytes((folder / "chats.jsonl").read_bytes().replace(b"\n", b"\r\n")),
        f"{PREPARE} data.train=b.jsonl",
        "60 examples read",
        0,
    ),
    BadInput(
        "good files: ~ in every path",
        nothing,
        f"{PREPARE} data.train=~/chats.jsonl data.exclude=[~/prompts.jsonl] data.template=~/target/chat_template.jinja data.cache=~/cache",
        "60 examples read",
        0,
        inside=home,
    ),
    BadInput(
        "good files: ~ in regenerate",
        nothing,
        ANSWER.replace("prompts", "~/prompts").replace("out", "~/out"),
        "4 rows, 4 of them new",
        0,
        ("out.jsonl",),
        inside=home,
    ),
]

EXAMPLES = [
    *(
        BadInput(f"examples: {name}", rows(example), ROWS, f"rows.jsonl:61: .*{says}")
        for name, example, says in [
            ("a list", [1], "got .1., expected an object"),
            ("a number", 3, "got 3, expected an object"),
            ("null", None, "got None, expected an object"),
            ("no keys", {}, "got keys"),
            ("a number as content", turn(role="user", content=3), "has the content 3"),
            ("true as content", turn(role="user", content=True), "has the content True"),
            ("null as content", turn(role="user", content=None), "has the content None"),
            ("lists in lists as content", turn(role="user", content=[["a"]]), "has the content .*'a'"),
            ("an object as content", turn(role="user", content={"text": "a"}), "has the content"),
            ("a number as role", turn(role=3, content="a"), "has the role 3"),
            ("no role", turn(content="a"), "has the role None"),
            ("an empty role", turn(role="", content="a"), "has the role ''"),
            ("an unknown speaker", {"conversations": [{"from": "\x1b[1m", "value": "a"}]}, r"is from '\\x1b"),
            ("messages of text", {"messages": "a"}, "expected a list of messages"),
            ("a message of text", {"messages": ["a"]}, "expected an object with"),
            ("calls of text", turn(role="assistant", content="", tool_calls="add(1, 2)"), "has the tool_calls 'add"),
            ("calls of numbers", turn(role="assistant", content="", tool_calls=[1]), "has the tool_calls .1."),
            ("tools of text", {**CHAT, "tools": "add"}, "`tools`: not JSON"),
            ("tools nested too deep", {**CHAT, "tools": DEEP}, "`tools`: JSON of more than 100 levels"),
            ("a prompt of numbers", {"prompt": 3, "completion": "a"}, "`prompt` is 3"),
            ("turns of numbers", {"turns": [1, 2]}, "`turns` is"),
            ("text of a list", {"text": ["a"]}, "`text` is"),
            ("NaN", '{"text": NaN}', "`text` is nan"),
        ]
    ),
    BadInput(
        "supervision: no answers",
        rows(*({"messages": [{"role": "user", "content": f"{n}?"}]} for n in range(60)), count=0),
        ROWS,
        "60 of 60 conversations have no supervised token",
    ),
    BadInput(
        "supervision: unknown roles",
        rows(*({"messages": [{"role": "robot", "content": f"{n}!"}]} for n in range(60)), count=0),
        ROWS,
        "60 of 60 conversations have no supervised token",
    ),
    BadInput(
        "supervision: empty conversations",
        rows(*({"messages": []} for _ in range(60)), count=0),
        ROWS,
        "60 of 60 conversations have no supervised token",
    ),
    BadInput(
        "supervision: an id of escape sequences",
        rows(*({"id": f"\x1b[2J{n}", "messages": []} for n in range(60)), count=0),
        ROWS,
        NO_ESCAPE + r"\\x1b\[2J",
    ),
    BadInput(
        "supervision: held-out data are the training data",
        rows(),
        f"{ROWS} data.valid=rows.jsonl",
        r"no examples to train on; 60 of 120 dropped \(exact duplicate\)",
    ),
    BadInput(
        "supervision: all are excluded",
        both(rows(), written("p.jsonl", "".join(json.dumps({"prompt": f"How many are {n} and {n * n}?"}) + "\n" for n in range(60)))),
        f"{ROWS} data.exclude=[p.jsonl]",
        "no examples to train on; 60 of 60 dropped .evaluation prompt",
    ),
    BadInput(
        "sizes: too many domains",
        rows(*({"text": f"A tale of {n} and {n * n}.", "domain": f"d{n}"} for n in range(1200)), count=0),
        ROWS,
        "domains, such as .*expected at most 1,000",
    ),
    BadInput(
        "sizes: data.seq_len",
        nothing,
        f"{PREPARE} data.seq_len=1000000000000",
        "recipe key .data.seq_len.: input should be less than or equal to",
    ),
    BadInput("sizes: no examples to show", nothing, "data show medusa.yaml --examples 0", "--examples 0: expected 1 or more"),
    BadInput("sizes: a negative number to show", nothing, "data show medusa.yaml --examples -3", "--examples -3: expected 1 or more"),
]

TERMINAL = [
    *(
        BadInput(f"terminal: {name}", rows(domain=keys["domain"]), command, NO_ESCAPE + says, 0)
        for name, keys, command, says in [
            ("a domain of markup", {"domain": "[/]"}, ROWS, r"\[/\]"),
            ("a domain of a style", {"domain": "[bold"}, ROWS, r"\[bold"),
            ("a domain of escape sequences", {"domain": "\x1b[2J"}, ROWS, r"\\x1b\[2J"),
            ("a domain of an emoji's name", {"domain": ":smile:"}, ROWS, ":smile:"),
            ("a domain of markup, shown", {"domain": "[/red]"}, SHOW, r"60 of|sample \d+ of \d+, \[/red\]"),
            ("a domain of escape sequences, shown", {"domain": "\x1b[2J"}, SHOW, r"sample \d+ of \d+, \\x1b\[2J"),
        ]
    ),
    BadInput(
        "terminal: text of escape sequences, shown",
        rows(*({"text": f"tale {n} \x1b]0;owned\x07 {n * n}"} for n in range(60)), count=0),
        SHOW,
        NO_ESCAPE + r"\\x1b\]0;owned\\x07",
        0,
    ),
    BadInput(
        "terminal: text of markup, shown",
        rows(*({"text": f"tale {n} [/] {n * n}"} for n in range(60)), count=0),
        SHOW,
        NO_ESCAPE + r"tale \d+ \[/\]",
        0,
    ),
    BadInput(
        "terminal: ids of markup in the report",
        rows(*({"id": "[/]\x1b[2J", "text": "Once upon a time."} for n in range(9))),
        ROWS,
        NO_ESCAPE + r"exact duplicate \(for example \[/\]\\x1b\[2J",
        0,
    ),
    BadInput(
        "terminal: an unknown domain",
        rows(domain="\x1b[2J"),
        f"{SHOW} --domain other",
        NO_ESCAPE + r"--domain other: expected one of \\x1b\[2J",
    ),
]

SERVERS = [
    BadInput(
        "servers: an endless answer",
        nothing,
        ask("endless"),
        "an answer of more than 16,777,216 bytes",
        writes=("out.jsonl",),
        inside=serve,
    ),
    BadInput(
        "servers: a compressed answer",
        nothing,
        ask("gzip"),
        "an answer in gzip, which was not asked for",
        writes=("out.jsonl",),
        inside=serve,
    ),
    BadInput(
        "servers: an answer nested too deep",
        nothing,
        ask("deep"),
        "20 conversations failed one after the other, .*a broken answer",
        writes=("out.jsonl",),
        inside=serve,
    ),
    BadInput(
        "servers: an answer of other kinds",
        nothing,
        ask("kinds"),
        "20 conversations failed .*a broken answer",
        writes=("out.jsonl",),
        inside=serve,
    ),
    BadInput(
        "servers: thoughts of another kind",
        nothing,
        ask("thought"),
        "20 conversations failed .*a broken answer",
        writes=("out.jsonl",),
        inside=serve,
    ),
    BadInput(
        "servers: an empty answer",
        nothing,
        ask("nothing"),
        "20 conversations failed .*a broken answer",
        writes=("out.jsonl",),
        inside=serve,
    ),
    BadInput(
        "servers: an error of escape sequences",
        nothing,
        ask("escape"),
        NO_ESCAPE + r"400 \\x1b\]0;owned\\x07 \[/\] no such model",
        writes=("out.jsonl",),
        inside=serve,
    ),
    BadInput(
        "servers: an error nested too deep", nothing, ask("deep-error"), "chat/completions: 400 ", writes=("out.jsonl",), inside=serve
    ),
    BadInput(
        "servers: an error that holds the key", nothing, ask("echo"), r"400 Bearer \*\*\* is wrong", writes=("out.jsonl",), inside=serve
    ),
    BadInput(
        "servers: concurrency without bound",
        nothing,
        ask("kinds").replace("--concurrency 2", "--concurrency 1000000000"),
        "conversations failed",
        writes=("out.jsonl",),
        inside=serve,
    ),
    BadInput(
        "servers: none there",
        nothing,
        f"data regenerate chats.jsonl out.jsonl --model m --server http://127.0.0.1:{PORT}",
        "20 conversations failed .*ConnectError",
        writes=("out.jsonl",),
        inside=lambda: setattr(__import__("draftsmith.data.server").data.server, "FIRST_WAIT", 0.0),
    ),
    BadInput(
        "servers: a password in a bad address",
        nothing,
        "data regenerate chats.jsonl out.jsonl --model m --server http://me:pass@host:port/v1",
        r"\A(?!.*pass).*got a server's address with",
    ),
    BadInput(
        "servers: a key of two lines",
        nothing,
        ask("kinds"),
        "the key in .OPENAI_API_KEY has characters",
        inside=lambda: os.environ.__setitem__("OPENAI_API_KEY", "sk-1\nX: y"),
    ),
    BadInput(
        "servers: a call without a name",
        written(
            "rows.jsonl",
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": "a"},
                        {"role": "assistant", "content": "", "tool_calls": [{"id": "c"}]},
                        {"role": "tool", "content": "3"},
                    ]
                }
            ),
        ),
        ask("store").replace("chats", "rows"),
        "a tool call in it names no function",
        0,
        ("out.jsonl",),
        inside=serve,
    ),
    BadInput("servers: no time", nothing, f"{ask('kinds')} --timeout nan", "timeout", writes=("out.jsonl",), inside=serve),
]

SYNTHESISE = "data synthesise out.jsonl --target target --conversations 2 --max-new-tokens 2 --question-max-new-tokens 1"
OPENINGS = f"{SYNTHESISE} --openings o.jsonl"
TEMPLATE_FILE = "target/chat_template.jinja"
LONG_OPENING = written("o.jsonl", json.dumps("x" * 300))

SYNTHETIC = [
    BadInput(
        "synthesise: no template",
        lambda folder: (folder / TEMPLATE_FILE).unlink(),
        SYNTHESISE,
        "'target' prompts no question: there is none",
    ),
    BadInput(
        "synthesise: a template without the words",
        written(TEMPLATE_FILE, "{% for m in messages %}{{ m.role }}{% endfor %}"),
        SYNTHESISE,
        "'target' prompts no question: it writes the user's words nowhere",
    ),
    BadInput(
        "synthesise: a template without end",
        written(TEMPLATE_FILE, "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}"),
        SYNTHESISE,
        "'target' prompts no question: rendering takes more than",
    ),
    BadInput("synthesise: no openings there", nothing, OPENINGS, "openings 'o.jsonl' not found"),
    BadInput(
        "synthesise: openings of other keys", written("o.jsonl", '"Who"\n{"prompt": "Why"}\n'), OPENINGS, "o.jsonl:2: expected a text, or"
    ),
    BadInput("synthesise: a deep opening", written("o.jsonl", DEEP), OPENINGS, "o.jsonl:1: JSON of more than 100 levels"),
    BadInput("synthesise: openings are a FIFO", fifo("o.jsonl"), OPENINGS, "openings 'o.jsonl' is a FIFO"),
    BadInput(
        "synthesise: an opening beyond the context", LONG_OPENING, OPENINGS, "opening 'xxx.* tokens; expected fewer than 128; shorten"
    ),
    BadInput("synthesise: no prompts to exclude", nothing, f"{SYNTHESISE} --exclude p.jsonl", "prompt file 'p.jsonl' not found"),
    BadInput("synthesise: output of somebody else", written("out.jsonl", "my notes\n"), SYNTHESISE, "out.jsonl:1: not a row"),
    BadInput("synthesise: output is a link", both(link("out.jsonl", "mine"), written("mine", "")), SYNTHESISE, "is a link to mine"),
    BadInput(
        "synthesise: a target that asks nothing",
        nothing,
        SYNTHESISE,
        r"only 0 of \d+ candidates can be used \(question cut at its limit: \d+",
        writes=("out.jsonl",),
    ),
    BadInput(
        "synthesise: a server that speaks no JSON",
        nothing,
        f"{SYNTHESISE} --model m --concurrency 2 --server http://127.0.0.1:{PORT}/nothing",
        "conversations failed one after the other|40[04]",
        writes=("out.jsonl",),
        inside=serve,
    ),
]

CASES = [*LOST_FILES, *WRONG_RESULTS, *STORES, *FILES, *EXAMPLES, *TERMINAL, *SERVERS, *SYNTHETIC]
