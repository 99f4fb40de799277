"""draftsmith publish: the folder that is sent, the model card, and the Hub with all its faults, which here is a server on this machine."""

import hashlib
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time

import huggingface_hub
import pytest
import torch
from commands import failing
from export_cases import CHAIN, save_drafter, save_target
from hub_server import TOKEN, Fault, HubServer, Repository
from huggingface_hub import ModelCard
from huggingface_hub import _commit_api as client
from safetensors.torch import load_file, save_file

from draftsmith.eval import acceptance, card
from draftsmith.inference.errors import exit_on_error
from draftsmith.models.formats.verify import faults
from draftsmith.models.target import Target
from draftsmith.train.exchange import hub, publish

REPO = "someone/small-drafter"
SECRET = "the password of the vault"


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """A target, and drafters for it; draftsmith eval measured the first."""
    root = tmp_path_factory.mktemp("workshop")
    target = Target.load(str(save_target(root / "target")))
    prompts = root / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{SECRET} {n}", "domain": "ab"[n % 2], "id": str(n)}) + "\n" for n in range(8)))
    for name in ("medusa", "eagle3", "student"):
        folder = save_drafter(name, target, root / name / "artifact")
        config = json.loads((folder / "config.json").read_text())
        entry = config.get("draftsmith", config)
        entry["training"] = {"steps": 3, "tokens": 96, "positions": 32, "data": [{"path": "chats.jsonl", "sha256": "ab" * 32}]}
        (folder / "config.json").write_text(json.dumps(config))
        card.write(folder, "draft model" if name == "student" else config["model_type"], entry["target"], entry["training"])
    words = ["--prompts", str(prompts), "--max-new-tokens", "8", "--temperature", "0", "--probe", "0", "--json"]
    exit_on_error(acceptance.main, [str(root / "medusa" / "artifact"), *words])
    return root


@pytest.fixture
def artifact(workshop, tmp_path):
    return shutil.copytree(workshop / "medusa" / "artifact", tmp_path / "artifact")


@pytest.fixture
def server(monkeypatch):
    """The Hub of these tests; waits are noted instead of taken."""
    server = HubServer()
    server.waits = []
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.address)
    monkeypatch.setattr(
        huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # a dry run sets it
    monkeypatch.setattr(time, "sleep", server.waits.append)
    yield server
    server.shutdown()
    server.server_close()


def run(artifact, *words, repo=REPO):
    exit_on_error(publish.main, [str(artifact), repo, *words])
    return artifact.with_name(f"{artifact.name}-published")


def files_of(folder):
    """Path -> content of all files that are not hidden."""
    files = [file for file in folder.rglob("*") if file.is_file() and not file.name.startswith(".")]
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def there(server, repo=REPO):
    return {path: content for path, content in server.repositories[repo].files.items() if path != ".gitattributes"}


def digest(content):
    return hashlib.sha256(content).hexdigest()


def puts(server):
    return [request for request in server.requests if request.startswith("PUT")]


def refused(capsys, artifact, *words, repo=REPO):
    """The one line of a call that fails; neither stream has the token or a signed address."""
    with pytest.raises(SystemExit) as exit:
        exit_on_error(publish.main, [str(artifact), repo, *words])
    captured = capsys.readouterr()
    assert exit.value.code == 2 and TOKEN not in captured.out + captured.err and "0123456789abcdef" not in captured.err
    (line,) = [line for line in captured.err.splitlines() if line.startswith("error:")]
    return line


def test_a_dry_run_writes_what_is_sent_and_asks_no_network(server, artifact, capsys, monkeypatch):
    before = files_of(artifact)
    with monkeypatch.context() as patch:
        patch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection"))
        folder = run(artifact, "--dry-run", "--formats", "vllm")
    said, staged = capsys.readouterr().out, files_of(folder)
    assert server.requests == [] and files_of(artifact) == before
    for path, content in staged.items():
        assert f"{len(content):>16,}  {path}\n" in said
    assert f"to {server.address}/{REPO}, from {folder}:" in said and f"  bytes of {len(staged)} files" in said
    assert "not sent  records.jsonl (texts of prompts and answers; --records sends it)" in said
    assert {"model.safetensors", "config.json", "acceptance.json", "survival.png", "tokenizer.json", "README.md"} <= staged.keys()
    run(artifact, "--formats", "vllm")
    assert there(server) == files_of(folder) == staged and server.repositories[REPO].commits == 2
    assert f"{server.address}/{REPO}: published" in capsys.readouterr().out


@pytest.mark.slow
def test_a_dry_run_does_not_ask_the_hub_for_the_target_either(server, artifact):
    config = json.loads((artifact / "config.json").read_text())
    config["target"]["name"] = "owner/absent"
    (artifact / "config.json").write_text(json.dumps(config))
    words = [sys.executable, "-m", "draftsmith.train.cli", "publish", str(artifact), REPO, "--dry-run"]
    environment = {**os.environ, "HF_ENDPOINT": server.address, "HF_HOME": str(artifact.parent / "cache")}
    del environment["HF_HUB_OFFLINE"]
    for more, status in (["--formats", "vllm"], 2), ([], 0):
        done = subprocess.run([*words, *more], capture_output=True, text=True, env=environment, timeout=120)
        assert done.returncode == status and done.stderr.count("\n") == (status > 0), done.stderr
    assert server.requests == []
    assert ModelCard.load(artifact.with_name("artifact-published") / "README.md").data.base_model == "owner/absent"


def test_the_card_has_what_the_hub_and_a_stranger_ask(server, artifact):
    folder = run(artifact, "--dry-run")
    measured = json.loads((artifact / "acceptance.json").read_text())
    read = ModelCard.load(folder / "README.md")
    results = {(each.dataset_config, each.metric_type): each for each in read.data.eval_results}
    for domain, row in [*measured["domains"]["0"].items(), ("all", measured["overall"]["0"])]:
        assert results[domain, "tokens_per_round"].metric_value == pytest.approx(row["tau"], abs=1e-4)
        assert "T=0" in results[domain, "tokens_per_round"].metric_name
    assert {key[0] for key in results} == {"a", "b", "all"} and ("all", "speedup") in results
    assert read.data.tags == ["speculative-decoding", "draftsmith", "medusa"] and read.data.pipeline_tag == "text-generation"
    assert read.data.library_name == "draftsmith" and read.data.license == "mit" and read.data.base_model is None
    config = json.loads((artifact / "config.json").read_text())
    facts = (config["target"]["config_hash"], config["target"]["tokenizer_hash"], "chats.jsonl", "ab" * 32, "recipe.yaml", REPO)
    for words in (*facts, "| a | 0 |", "![survival by depth](survival.png)", "Measured on", "answers equal plain decoding's"):
        assert words in read.text, words
    assert "<this folder>" not in read.text and [read.text.count(f"\n## {name}\n") for name in ("Limits", "Serve", "Target")] == [1, 1, 1]
    assert "vllm serve" in read.text and f"draftsmith export {REPO} --to tgi" in read.text and "sglang" not in read.text


def test_a_target_of_the_hub_is_the_base_model():
    fields = card.front_matter("eagle", {"name": "owner/target"}, {"data": [{"path": "owner/chats", "hub": True}, {"path": "mine"}]})
    assert fields["base_model"] == "owner/target" and fields["base_model_relation"] == "adapter" and fields["datasets"] == ["owner/chats"]
    assert "base_model_relation" not in card.front_matter("draft model", {"name": "owner/target"}, {})
    for name in ("/home/me/target", "tiny", "a/b/c", ""):
        assert "base_model" not in card.front_matter("eagle", {"name": name}, {})


def test_what_a_person_wrote_into_the_card_stays(server, artifact):
    file = artifact / "README.md"
    text = file.read_text().replace("license: mit", "license: apache-2.0\nlanguage: de").replace("## Limits\n", "## Limits\n\nBy hand.\n")
    file.write_text(text.replace("tags:\n", "tags:\n- mine\n").replace("\n## Target\n", "\n## Other\n"))
    read = ModelCard.load(run(artifact, "--dry-run") / "README.md")
    assert read.data.license == "apache-2.0" and read.data.to_dict()["language"] == "de"
    assert read.data.tags == ["mine", "speculative-decoding", "draftsmith", "medusa"]
    assert "By hand." in read.text and "\n## Target\n" in read.text and read.data.eval_results
    file.write_text("---\n[a: b\n---\n" + text.split("---\n", 2)[2])
    with pytest.raises(ValueError, match="no YAML object"):
        publish.main([str(artifact), REPO, "--dry-run"])


def test_texts_of_prompts_and_answers_stay_unless_asked_for(server, artifact):
    source = json.loads((artifact / "acceptance.json").read_text())
    assert source["text"]["pieces"] and SECRET not in str(source)
    source["failures"]["kinds"] = [{"name": "name", "share": 1.0, "examples": [{"before": SECRET, "token": "x"}]}]
    (artifact / "acceptance.json").write_text(json.dumps(source))
    (artifact / "report.html").write_text(f"<p>{SECRET}</p>")
    folder = run(artifact, "--dry-run", "--formats", "vllm")
    assert not [path for path, content in files_of(folder).items() if SECRET.encode() in content]
    shown = json.loads((folder / "acceptance.json").read_text())
    assert shown["text"] is None and not any(kind["examples"] for kind in shown["failures"]["kinds"])
    assert shown["overall"] == source["overall"] and shown["drafter"]["name"] == REPO
    run(artifact)
    assert not {"records.jsonl", "report.html"} & there(server).keys()
    run(artifact, "--records")
    assert {"records.jsonl", "report.html"} <= there(server).keys()
    assert json.loads(there(server)["acceptance.json"])["text"] == source["text"]
    run(artifact)  # sent by mistake, say
    assert not {"records.jsonl", "report.html"} & there(server).keys()


def test_only_what_belongs_to_an_artifact_is_sent(server, artifact, tmp_path, capsys):
    before = set(files_of(run(artifact, "--dry-run")))
    capsys.readouterr()
    outside = tmp_path / "outside"
    outside.write_text("private")
    strays = {
        "pytorch_model.bin": "can run code",
        "scaler.pt": "can run code",
        "optimizer.safetensors": "no part of an artifact",
        "notes.txt": "no part of an artifact",
        "tokenizer.json.part": "unfinished, or a lock",
        "data.lock": "unfinished, or a lock",
        ".env": "hidden",
        "checkpoints/step-3/model.safetensors": "no part of an artifact",
        ".cache/model.safetensors": "hidden",
    }
    for path in strays:
        (artifact / path).parent.mkdir(parents=True, exist_ok=True)
        (artifact / path).write_text("x")
    (artifact / "LICENSE").symlink_to(outside)
    (artifact / "merges.txt").symlink_to("tokenizer.json")
    (artifact / "adapter").symlink_to(tmp_path)
    folder = run(artifact, "--dry-run")
    said = capsys.readouterr().out
    assert set(files_of(folder)) == {*before, "merges.txt"} and not (folder / "merges.txt").is_symlink()
    for path, why in strays.items():
        path = f"{path.split('/')[0]}/" if "/" in path else path
        assert any(f"not sent  {path} (" in line and why in line for line in said.splitlines()), path
    assert "LICENSE (a link out of the folder)" in said and "adapter/ (a link to a folder)" in said


def test_weights_that_are_a_link_out_of_the_folder_are_refused(server, artifact, tmp_path, capsys):
    (artifact / "model.safetensors").rename(tmp_path / "weights")
    (artifact / "model.safetensors").symlink_to(tmp_path / "weights")
    refused(capsys, artifact, "--dry-run")
    assert not artifact.with_name("artifact-published").exists()


def test_an_artifact_without_an_evaluation_is_refused(server, artifact, capsys):
    for name in ("acceptance.json", "records.jsonl", "report.html", "survival.png"):
        (artifact / name).unlink()
    assert "has no evaluation; run `draftsmith eval" in refused(capsys, artifact)
    assert server.requests == []
    assert "model-index" in (artifact / "README.md").read_text()
    run(artifact, "--without-evaluation")
    sent = there(server)
    assert "acceptance.json" not in sent and b"model-index" not in sent["README.md"] and b"Not measured yet" in sent["README.md"]


def test_what_nobody_could_load_is_refused(server, workshop, artifact, tmp_path, capsys):
    for name in ("acceptance.json", "records.jsonl"):
        (artifact / name).unlink()
    good, config = load_file(artifact / "model.safetensors"), json.loads((artifact / "config.json").read_text())
    first = next(iter(good))
    for change, says in (({first: good[first] * float("nan")}, "has NaN or infinite weights in"), ({first: good[first][:1]}, first)):
        save_file(good | {name: tensor.contiguous() for name, tensor in change.items()}, artifact / "model.safetensors", {"format": "pt"})
        assert says in refused(capsys, artifact, "--without-evaluation")
    save_file(good, artifact / "model.safetensors", {"format": "pt"})
    adapted = config | {"target": config["target"] | {"adapter_hash": "a" * 64}}
    (artifact / "config.json").write_text(json.dumps(adapted))
    assert "adapter" in refused(capsys, artifact, "--without-evaluation") and server.requests == []


def test_an_evaluation_of_other_weights_is_refused(server, artifact, capsys):
    tensors = load_file(artifact / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, artifact / "model.safetensors", {"format": "pt"})
    for words in ((), ("--without-evaluation",)):
        assert "was measured with other weights" in refused(capsys, artifact, *words)


@pytest.mark.parametrize(
    "repo", ["name", "a/b/c", "someone/", "/name", "some one/x", "someone/x--y", "someone/x.git", "someone/é", "../x", "a/" + 97 * "b"]
)
def test_a_wrong_name_is_refused(server, artifact, capsys, repo):
    assert "expected USER/NAME" in refused(capsys, artifact, repo=repo)


def test_mistakes_are_one_line(server, artifact, workshop, tmp_path, capsys):
    assert "--formats vlm: no such engine" in refused(capsys, artifact, "--formats", "vlm")
    assert "SGLang does not serve Medusa" in refused(capsys, artifact, "--formats", "sglang")
    assert "no folder" in refused(capsys, tmp_path / "nowhere")
    assert "is no drafter of Draftsmith" in refused(capsys, workshop / "target")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    assert "did not write" in refused(capsys, artifact, "--output", str(tmp_path / "mine"))
    assert "within the artifact" in refused(capsys, artifact, "--output", str(artifact / "out"))
    (artifact / "README.md").write_text("# Mine\n")
    assert "is no model card" in refused(capsys, artifact)
    assert server.requests == [] and (tmp_path / "mine" / "thesis.txt").exists()


@pytest.mark.parametrize("name, engines", [("medusa", "vllm,tgi"), ("eagle3", "vllm,tensorrt-llm,gguf"), ("student", "vllm")])
def test_formats_are_exported_and_checked(server, workshop, tmp_path, name, engines):
    artifact = shutil.copytree(workshop / name / "artifact", tmp_path / "artifact")
    folder = run(artifact, "--dry-run", "--without-evaluation", "--formats", engines)
    target, text = Target.load(str(workshop / "target")), (folder / "README.md").read_text()
    for engine in engines.split(","):
        assert faults(folder / "engines" / engine, target) == []
        assert f"small-drafter/engines/{engine}" in text and f"--to {engine} " not in text
        assert not {"records.jsonl", "report.html"} & {file.name for file in (folder / "engines" / engine).iterdir()}
    assert len(CHAIN) == 4 and not [path for path, content in files_of(folder / "engines").items() if str(folder).encode() in content]
    if name == "eagle3":
        assert "speculative_model: small-drafter/engines/tensorrt-llm\n" in (folder / "engines/tensorrt-llm/tensorrt-llm.yaml").read_text()


def test_the_same_again_sends_nothing(server, artifact, capsys):
    run(artifact)
    sent = len(puts(server))
    assert sent == 2
    run(artifact)
    assert len(puts(server)) == sent and server.repositories[REPO].commits == 2
    assert "all of it was there already" in capsys.readouterr().out


def test_files_of_an_earlier_publication_go_and_other_files_stay(server, artifact, capsys):
    run(artifact, "--formats", "vllm")
    by_hand = {"images/mine.jpg": b"x", "notes.txt": b"y", "engines/mine/a.txt": b"z", "LICENSE": b"MIT"}
    server.repositories[REPO].files |= by_hand
    folder = run(artifact)
    assert there(server) == files_of(folder) | by_hand
    assert "deleted there, being of an earlier publication: engines/vllm/config.json" in capsys.readouterr().out


def config_of(method, target_hash):
    return json.dumps({"model_type": method, "target": {"name": "big", "config_hash": target_hash}}).encode()


@pytest.mark.parametrize(
    "files, says",
    [
        ({"config.json": config_of("hydra", "same")}, "holds hydra for big"),
        ({"config.json": config_of("medusa", "0" * 64)}, r"holds medusa for big \(000000000000\), this is medusa for"),
        ({"config.json": b"[1]"}, "holds something"),
        ({"config.json": b'{"model_type": "llama"}'}, "holds llama for no target"),
        ({"pytorch_model.bin": b"x"}, "holds pytorch_model.bin and no config.json"),
    ],
)
def test_a_name_that_is_taken_is_refused(server, artifact, capsys, files, says):
    made_for = json.loads((artifact / "config.json").read_text())["target"]["config_hash"].encode()
    files = {path: content.replace(b"same", made_for) for path, content in files.items()}
    server.repositories[REPO] = Repository(files=dict(files))
    line = refused(capsys, artifact)
    assert f"{REPO} is taken: it " in line and re.search(says, line)
    assert there(server) == files and not puts(server)


def test_an_empty_repository_is_taken_over(server, artifact):
    server.repositories[REPO] = Repository(files={"README.md": b"# soon", ".gitattributes": b""})
    assert there(server) == {"README.md": b"# soon"}
    folder = run(artifact)
    assert there(server) == files_of(folder)


def test_private(server, artifact, capsys):
    run(artifact, "--private")
    assert server.repositories[REPO].private and "(private)" in capsys.readouterr().out
    run(artifact)
    assert server.repositories[REPO].private
    server.repositories[REPO].private = False
    assert "is there and public, got --private" in refused(capsys, artifact, "--private")


INFO, CREATE, COMMIT = f"/api/models/{REPO}", "/api/repos/create", f"/api/models/{REPO}/commit"


@pytest.mark.parametrize(
    "method, path, status, says",
    [
        ("GET", INFO, 401, "does not accept the token"),
        ("GET", INFO, 403, "may not write to"),
        ("POST", CREATE, 401, "does not accept the token"),
        ("POST", CREATE, 403, "give one with write access to someone"),
        ("POST", "/preupload/", 403, "may not write to"),
        ("POST", "/objects/batch", 401, "does not accept the token"),
        ("POST", COMMIT, 403, "may not write to"),
        ("POST", COMMIT, 409, "changed or created by someone else meanwhile"),
        ("POST", COMMIT, 412, "changed or created by someone else meanwhile"),
        ("POST", COMMIT, 400, "refused"),
    ],
)
def test_a_refusal_is_one_line_and_loses_nothing(server, artifact, capsys, method, path, status, says):
    server.faults = [Fault(method, path, status, body={"error": f"no, {TOKEN}"})]
    line = refused(capsys, artifact)
    assert says in line and str(status) in line and "***" in line
    assert server.waits == [] and (REPO not in server.repositories or there(server) == {})
    folder = run(artifact)
    assert there(server) == files_of(folder)


def test_a_name_that_somebody_takes_meanwhile(server, artifact, capsys):
    server.faults = [Fault("GET", INFO, 404, times=2), Fault("POST", CREATE, 409)]
    assert "is taken, and the token may not see what it holds" in refused(capsys, artifact)


def test_without_a_token(server, artifact, capsys, monkeypatch):
    monkeypatch.setattr(hub, "get_token", lambda: None)
    assert "no token of the Hub" in refused(capsys, artifact)
    assert server.requests == []
    monkeypatch.setattr(hub, "get_token", lambda: "hf_another")
    assert "401" in refused(capsys, artifact)


BUSY = [("GET", INFO), ("POST", CREATE), ("POST", "/preupload/"), ("POST", "/objects/batch"), ("PUT", "/lfs/"), ("POST", COMMIT)]


@pytest.mark.parametrize("method, path", BUSY)
@pytest.mark.parametrize("status", [429, 500, 503, 0])
def test_a_busy_hub_is_asked_again(server, artifact, method, path, status):
    server.faults = [Fault(method, path, status, {"Retry-After": "7"} if status == 429 else {}, times=2)]
    folder = run(artifact)
    assert there(server) == files_of(folder) and len(server.waits) == 2 and server.repositories[REPO].commits == 2
    assert all(7 <= wait <= 8 for wait in server.waits) if status == 429 else server.waits[1] == 2 * server.waits[0] <= 2


@pytest.mark.parametrize("method, path", BUSY)
@pytest.mark.parametrize("status", [429, 503, 0])
def test_it_gives_up_in_the_end_and_goes_on_later(server, artifact, capsys, method, path, status):
    server.faults = [Fault(method, path, status, times=1000)]
    line = refused(capsys, artifact)
    assert "run the same command again" in line and (f"busy or down ({status}" in line or not status)
    assert 4 <= len(server.waits) <= 5 and 1000 - server.faults[0].times == len(server.waits) + 1
    assert REPO not in server.repositories or there(server) == {}
    server.faults = []
    folder = run(artifact)
    assert there(server) == files_of(folder)


def test_warnings_of_the_client_have_no_signed_address(server, artifact):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger("huggingface_hub").addHandler(handler)
    try:
        server.faults = [Fault("PUT", "/lfs/", 503)]
        run(artifact)
    finally:
        logging.getLogger("huggingface_hub").removeHandler(handler)
    assert "X-Amz-Signature=<redacted>" in stream.getvalue() and "0123456789abcdef" not in stream.getvalue()


def test_a_retry_after_of_a_day_is_no_day(server, artifact):
    server.faults = [Fault("POST", COMMIT, 429, {"Retry-After": "86400"})]
    run(artifact)
    assert server.waits == [600]


def test_what_arrived_before_a_cut_is_not_sent_again(server, artifact, capsys):
    weights, picture = ((artifact / name).read_bytes() for name in ("model.safetensors", "survival.png"))
    server.faults = [Fault("PUT", digest(picture), cut=3000, times=1000)]
    assert "connection to" in refused(capsys, artifact)
    assert server.blobs == {digest(weights): weights} and there(server) == {} and server.received[digest(picture)] == 6 * 3000
    server.faults = []
    folder = run(artifact)
    assert server.received[digest(weights)] == len(weights) and server.received[digest(picture)] == 6 * 3000 + len(picture)
    assert there(server) == files_of(folder)


def test_of_a_file_in_parts_one_part_is_sent_again(server, artifact):
    weights, server.part = (artifact / "model.safetensors").read_bytes(), 5000
    server.faults = [Fault("PUT", f"{digest(weights)}/3", cut=1234)]
    folder = run(artifact)
    assert len(weights) > 3 * 5000 and there(server) == files_of(folder)
    assert server.received[digest(weights)] == len(weights) + 1234


def test_a_commit_whose_answer_was_lost_is_not_made_twice(server, artifact, capsys):
    server.faults = [Fault("POST", COMMIT, lost=True)]
    assert "run the same command again" in refused(capsys, artifact)
    assert server.repositories[REPO].commits == 2
    folder = run(artifact)
    assert server.repositories[REPO].commits == 2 and there(server) == files_of(folder)
    assert "all of it was there already" in capsys.readouterr().out


def test_a_commit_of_somebody_else_is_not_overwritten(server, artifact, capsys, monkeypatch):
    send = hub._send_large

    def meanwhile(*arguments):
        server.repositories[REPO].commits = 9
        send(*arguments)

    monkeypatch.setattr(hub, "_send_large", meanwhile)
    assert "changed or created by someone else meanwhile (412" in refused(capsys, artifact)
    assert there(server) == {}


def test_with_xet(server, artifact, capsys, monkeypatch):
    """hf_xet sends large files in a way of its own, by which a server of Xet would be needed; that it is asked, and what its errors become."""
    monkeypatch.setattr(client, "is_xet_available", lambda: True)
    errors = [RuntimeError(f"no route; {TOKEN}"), PermissionError(f"no write token {TOKEN}"), ConnectionError("reset")]

    def upload(*, additions, **_options):
        if errors:
            raise errors.pop(0)
        for addition in additions:
            addition.upload_info.sha256 = hashlib.sha256(open(addition.path_or_fileobj, "rb").read()).digest()
            server.blobs[addition.upload_info.sha256.hex()] = open(addition.path_or_fileobj, "rb").read()

    monkeypatch.setattr(client, "_upload_xet_files", upload)
    for words in ("no route; ***", "no write token ***", "reset"):
        assert words in refused(capsys, artifact) and there(server) == {}
    folder = run(artifact)
    assert there(server) == files_of(folder) and not puts(server)


def test_xet_as_it_is_installed_ends_in_one_line_where_the_hub_has_none(server, artifact, capsys, monkeypatch):
    pytest.importorskip("hf_xet")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
    refused(capsys, artifact)
    assert there(server) == {}


def test_a_published_drafter_is_loaded_and_published_again(server, artifact, tmp_path):
    folder = run(artifact)
    again = shutil.copytree(folder, tmp_path / "again")
    (again / publish.MARK).unlink()
    second = run(again, "--dry-run")
    assert files_of(second) == files_of(folder)
    assert torch.equal(load_file(folder / "model.safetensors")["0.1.weight"], load_file(artifact / "model.safetensors")["0.1.weight"])


def test_the_line_of_a_missing_argument(capsys):
    assert "USER/NAME" in failing(capsys, publish.main, ["artifact"])


def test_the_card_of_a_parallel_draft_model_says_that_vllm_reads_its_folder():
    entry = {"parallel": 4, "target": {"name": "org/model"}}
    (text,) = publish._to_export("draft model", entry, 4, [], "me/pard")
    adapted = {"target": {"name": "org/model", "adapter_hash": "ab"}}
    assert publish._to_export("medusa", adapted, 3, [], "me/heads") == []  # an export of it is refused
    assert "vllm serve org/model --speculative-config" in text and "draftsmith export" not in text
    config = json.loads(re.search(r"'({.*})'", text)[1])
    assert config == {"method": "draft_model", "model": "me/pard", "num_speculative_tokens": 4, "parallel_drafting": True}
