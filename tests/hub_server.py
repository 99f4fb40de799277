"""A server on this machine that speaks the part of the Hub's API by which a folder is published, with faults where a test wants them."""

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_aTokenOfATestThatMustNeverBePrinted"
LARGE = (".safetensors", ".png", ".gguf")


@dataclass
class Fault:
    """What happens to requests of a method whose path has these words, so many times; later ones are answered as usual.

    Attributes:
        status: of the answer; 0 closes the connection after `cut` bytes of the body.
        lost: the request is carried out, and only then the connection is closed.
    """

    method: str
    path: str
    status: int = 0
    headers: dict = field(default_factory=dict)
    body: dict = field(default_factory=lambda: {"error": "as the test wants"})
    cut: int = 1000
    times: int = 1
    lost: bool = False


@dataclass
class Repository:
    """files: path -> content. commits: how many, the one that creates it included."""

    private: bool = False
    files: dict = field(default_factory=lambda: {".gitattributes": b"*.safetensors filter=lfs\n"})
    commits: int = 1

    @property
    def sha(self) -> str:
        return f"{self.commits:040x}"


class HubServer(ThreadingHTTPServer):
    """The state of the hub.

    Attributes:
        repositories: by name.
        blobs: large files by their SHA-256.
        requests: "METHOD path" of all requests, in order.
        received: bytes of large files by their SHA-256, those of uploads that were cut off included.
        part: bytes of a part, where large files are sent in parts.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.requests: list[str] = []
        self.received: Counter = Counter()
        self.faults: list[Fault] = []
        self.part = 0
        self.address = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def handle_error(self, request, client_address) -> None:
        """A connection that is cut is what a test wanted."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise every answer takes 40 ms
    server: HubServer

    def log_message(self, *_arguments) -> None:
        """Nothing goes to stderr."""

    def do_GET(self) -> None:
        self.answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def answer(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        fault = next((each for each in self.server.faults if each.method == self.command and each.path in self.path and each.times), None)
        if fault:
            fault.times -= 1
        if fault and not fault.status and not fault.lost:
            self.count(self.rfile.read(min(fault.cut, self.length)))
            return self.hang_up()
        body = self.read_body()
        if fault and fault.status:
            return self.reply(fault.body, fault.status, fault.headers)
        if "/api/" in self.path or "/info/lfs/" in self.path:
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self.reply({"error": "Invalid credentials in Authorization header"}, 401)
        status, content = self.dispatch(body)
        if fault and fault.lost:
            return self.hang_up()
        self.reply(content, status)

    @property
    def length(self) -> int:
        return int(self.headers.get("Content-Length") or 0)

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.close()

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(self.length)
        self.count(body)
        return body

    def count(self, body: bytes) -> None:
        if match := re.match(r"/lfs/([0-9a-f]{64})", self.path):
            if self.command == "PUT":
                self.server.received[match[1]] += len(body)

    def reply(self, content, status: int = 200, headers: dict | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "ETag": '"etag"', **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def dispatch(self, body: bytes) -> tuple[int, object]:
        path = self.path.partition("?")[0]
        routes = {
            r"/api/repos/create": self.create,
            r"/api/validate-yaml": lambda _: (200, {"errors": [], "warnings": []}),
            r"/api/models/([^/]+/[^/]+)(?:/revision/main)?": self.info,
            r"/api/models/([^/]+/[^/]+)/preupload/main": self.preupload,
            r"/api/models/([^/]+/[^/]+)/commit/main": self.commit,
            r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch": self.batch,
            r"/lfs/([0-9a-f]{64})(?:/(\d+))?": self.store,
            r"/lfs/([0-9a-f]{64})/complete": self.complete,
            r"/([^/]+/[^/]+)/resolve/main/(.+)": self.resolve,
        }
        for pattern, route in routes.items():
            if match := re.fullmatch(pattern, path):
                return route(body, *match.groups())
        return 404, {"error": f"no route {path}"}

    def create(self, body: bytes) -> tuple[int, object]:
        wanted = json.loads(body)
        name = f"{wanted['organization']}/{wanted['name']}"
        if name in self.server.repositories:
            return 409, {"error": "You already created this model repo", "url": f"{self.server.address}/{name}"}
        self.server.repositories[name] = Repository(private=wanted.get("visibility") == "private")
        return 200, {"url": f"{self.server.address}/{name}"}

    def info(self, _body: bytes, name: str) -> tuple[int, object]:
        repository = self.server.repositories.get(name)
        if repository is None:
            return 404, {"error": "Repository not found"}
        siblings = [{"rfilename": path} for path in repository.files]
        return 200, {"id": name, "sha": repository.sha, "private": repository.private, "siblings": siblings, "tags": []}

    def preupload(self, body: bytes, name: str) -> tuple[int, object]:
        there = self.server.repositories[name].files
        files = []
        for file in json.loads(body)["files"]:
            large, oid = file["path"].endswith(LARGE), None
            if (content := there.get(file["path"])) is not None:
                oid = hashlib.sha256(content).hexdigest() if large else hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            files.append({"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid})
        return 200, {"files": files}

    def batch(self, body: bytes, _name: str) -> tuple[int, object]:
        objects = []
        for wanted in json.loads(body)["objects"]:
            oid, size = wanted["oid"], wanted["size"]
            if oid in self.server.blobs:
                objects.append({"oid": oid, "size": size})
                continue
            upload = {"href": f"{self.server.address}/lfs/{oid}?X-Amz-Signature=0123456789abcdef"}
            if self.server.part:
                numbers = range(1, -(-size // self.server.part) + 1)
                header = {f"{number:05}": f"{self.server.address}/lfs/{oid}/{number}" for number in numbers}
                upload = {"href": f"{self.server.address}/lfs/{oid}/complete", "header": {"chunk_size": str(self.server.part), **header}}
            objects.append({"oid": oid, "size": size, "actions": {"upload": upload}})
        return 200, {"transfer": "multipart" if self.server.part else "basic", "objects": objects}

    def store(self, body: bytes, oid: str, part: str | None) -> tuple[int, object]:
        if part:
            self.server.parts.setdefault(oid, {})[int(part)] = body
        else:
            return self.keep(oid, body)
        return 200, {}

    def complete(self, _body: bytes, oid: str) -> tuple[int, object]:
        parts = self.server.parts.pop(oid)
        return self.keep(oid, b"".join(parts[number] for number in sorted(parts)))

    def keep(self, oid: str, content: bytes) -> tuple[int, object]:
        if hashlib.sha256(content).hexdigest() != oid:
            return 400, {"error": "not the file of this hash"}
        self.server.blobs[oid] = content
        return 200, {}

    def commit(self, body: bytes, name: str) -> tuple[int, object]:
        repository, lines = self.server.repositories[name], [json.loads(line) for line in body.splitlines()]
        if lines[0]["value"].get("parentCommit", repository.sha) != repository.sha:
            return 412, {"error": "A commit has happened since"}
        files = dict(repository.files)
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.blobs[value["oid"]]
            else:
                del files[value["path"]]
        repository.files, repository.commits = files, repository.commits + 1
        return 200, {"commitUrl": f"{self.server.address}/{name}/commit/{repository.sha}", "commitOid": repository.sha}

    def resolve(self, _body: bytes, name: str, path: str) -> tuple[int, object]:
        repository = self.server.repositories.get(name)
        if repository is None or path not in repository.files:
            return 404, {"error": "Entry not found"}
        return 200, repository.files[path]
