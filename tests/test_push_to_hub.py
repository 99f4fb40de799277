"""push_to_hub of a loaded drafter: the card and the measurements go along with the weights that they are of, without a network here."""

import json
from pathlib import Path

import pytest
import torch
from random_targets import random_model
from transformers import AutoConfig, AutoModel, PreTrainedModel

from draftsmith.models.drafter import load_drafter, new_drafter
from draftsmith.models.medusa import MedusaConfig, MedusaModel
from draftsmith.models.target import Target

EVIDENCE = {"README.md": "# A card with numbers", "recipe.yaml": "train.steps: 3\n"}
REPORT = {"tau": 2.5, "text": "an answer", "failures": {"kinds": [{"name": "rare", "examples": ["a context"]}]}}


@pytest.fixture
def artifact(tmp_path):
    """A drafter with its evidence, and what is not to be published."""
    folder = tmp_path / "artifact"
    new_drafter("medusa", Target.wrap(random_model("llama"), name="small"), num_heads=2).save_pretrained(folder)
    (folder / "acceptance.json").write_text(json.dumps(REPORT))
    for name, text in {**EVIDENCE, ".lock": "", "notes.txt": "mine", "records.jsonl": "texts", "report.html": "texts"}.items():
        (folder / name).write_text(text)
    (folder / "checkpoints").mkdir()
    return folder


@pytest.fixture
def uploaded(monkeypatch):
    """What would be uploaded: name -> content."""
    files: dict[str, bytes] = {}

    class Hub:
        repo_id = "someone/drafter"

        def create_repo(self, *_args, **_options):
            return self

        def save(self, path):
            Path(path).write_text("transformers' own card")

    def upload(self, working_dir, repo_id, *_args, **_options):
        assert repo_id == "someone/drafter"
        files.update({file.name: file.read_bytes() for file in Path(working_dir).iterdir()})

    monkeypatch.setattr(PreTrainedModel, "_upload_modified_files", upload)
    hub = Hub()
    for name, value in {"hf_api": lambda: hub, "create_repo": hub.create_repo, "create_and_tag_model_card": lambda *_a, **_o: hub}.items():
        monkeypatch.setattr(f"transformers.utils.hub.{name}", value, raising=False)
    return files


def test_card_and_measurements_go_along(artifact, uploaded):
    load_drafter(artifact).push_to_hub("someone/drafter")
    assert uploaded.keys() == {"config.json", "model.safetensors", "acceptance.json", *EVIDENCE}
    assert {name: uploaded[name].decode() for name in EVIDENCE} == EVIDENCE
    report = json.loads(uploaded["acceptance.json"])
    assert report == {"tau": 2.5, "text": None, "failures": {"kinds": [{"name": "rare", "examples": []}]}}
    assert uploaded["model.safetensors"] == (artifact / "model.safetensors").read_bytes()


def test_shards_are_the_same_weights(artifact, uploaded, tmp_path):
    drafter = load_drafter(artifact)
    drafter.push_to_hub("someone/drafter", max_shard_size="20KB")
    assert "model.safetensors" not in uploaded and sum(name.endswith(".safetensors") for name in uploaded) > 1
    assert {"acceptance.json", *EVIDENCE} <= uploaded.keys()
    drafter.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    (tmp_path / "sharded" / "README.md").write_text("# Of shards")
    uploaded.clear()
    load_drafter(tmp_path / "sharded").push_to_hub("someone/drafter")
    assert uploaded["README.md"] == b"# Of shards" and sum(name.endswith(".safetensors") for name in uploaded) == 1
    assert not any("index" in name for name in uploaded)


def test_measurements_of_other_weights_do_not(artifact, uploaded):
    drafter = load_drafter(artifact)
    with torch.no_grad():
        next(drafter.parameters()).add_(1)
    with pytest.warns(UserWarning, match="no longer those of .*artifact.* measure it with `draftsmith eval`.*`draftsmith publish`"):
        drafter.push_to_hub("someone/drafter")
    assert "acceptance.json" not in uploaded and b"numbers" not in uploaded.get("README.md", b"")


def test_transformers_loads_the_artifact(artifact):
    """Once draftsmith.models.medusa is imported."""
    assert type(AutoConfig.from_pretrained(artifact)) is MedusaConfig
    assert json.loads((artifact / "config.json").read_text())["model_type"] == "medusa"
    drafter = AutoModel.from_pretrained(artifact)
    assert type(drafter) is MedusaModel and drafter.config.num_heads == 2
    (artifact / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match="cut off"):
        AutoModel.from_pretrained(artifact)
