"""Hydra heads in their authors' folder: read from a module of the authors' structure, written so that it loads into that, and imported."""

import json

import pytest
import torch
from commands import failing
from export_cases import save_drafter, save_target
from random_targets import randomise
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaModel, PhiConfig, PhiForCausalLM

from draftsmith.inference.decoder import Decoder
from draftsmith.inference.sampler import Sampling
from draftsmith.models.drafter import load_drafter, new_drafter
from draftsmith.models.formats import published
from draftsmith.models.formats.hydra import HYDRA_FILE, write_hydra
from draftsmith.models.formats.verify import faults
from draftsmith.models.target import Target
from draftsmith.train.exchange import export, take_in

H, V, K = 32, 257, 3
PREFIX = {"prefix": True, "attention_heads": 4, "kv_heads": 2, "intermediate_size": 48}
CASES = {
    "one block": {},
    "two blocks, the target's output layer": {"num_layers": 2, "share_head": True},
    "++": {"num_layers": 2, "head_bias": True, **PREFIX},
}


class Block(nn.Module):
    """The authors' residual block over `inputs` vectors."""

    def __init__(self, inputs):
        super().__init__()
        self.linear = nn.Linear(inputs * H, H)
        self.res_connection = nn.Linear(inputs * H, H) if inputs > 1 else nn.Identity()

    def forward(self, x):
        return self.res_connection(x) + nn.functional.silu(self.linear(x))


class Authors(nn.Module):
    """Their heads: one block repeated after the first; dropouts, which count in the names, where a decoder layer comes first."""

    def __init__(self, target, blocks, prefix):
        super().__init__()
        between, self.prefix = [nn.Dropout(0.2)] if prefix else [], prefix
        self.hydra_mlp = nn.ModuleList(nn.Sequential(*between, Block(k + 2), *([*between, Block(1)] * (blocks - 1))) for k in range(K))
        outputs = [nn.Linear(H, V) for _ in range(K)]
        self.hydra_lm_head = nn.ModuleList(nn.Sequential(*between, output) if prefix else output for output in outputs)
        self.input_embed_fn = target.model.get_input_embeddings()
        if prefix:
            config = type(target.config)(**target.config.to_dict() | {"num_hidden_layers": 1})
            self.prefix_embeding_layer = LlamaModel(config)

    def forward(self, hidden, ids):
        """hidden [1,S,H] and ids [1,S] -> logits [K,S,V]; those of the last positions wrap round."""
        root = self.prefix_embeding_layer(inputs_embeds=hidden).last_hidden_state if self.prefix else hidden
        inputs, logits = [root], []
        for k in range(K):
            inputs.append(self.input_embed_fn(torch.roll(ids, -(k + 1), 1)))
            logits.append(self.hydra_lm_head[k](self.hydra_mlp[k](torch.cat(inputs, -1)))[0])
        return torch.stack(logits)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    root = tmp_path_factory.mktemp("hydra")
    save_target(root / "target")
    return root


@pytest.fixture(scope="module")
def target(workshop):
    return Target.load(str(workshop / "target"))


def folder_of(authors, folder, **changes):
    """Their config and state, which names every repetition of a block, as the command for pickles converts it."""
    folder.mkdir()
    blocks = len([each for each in authors.hydra_mlp[0] if isinstance(each, Block)])
    raw = {"hydra_num_heads": K, "hydra_num_layers": blocks, "hydra_head_arch": "prefix-mlp" if authors.prefix else "mlp"}
    raw |= {"grounded_heads": True, "hidden_state_offset": 0, "base_model_name_or_path": "somebody/target"}
    (folder / "config.json").write_text(json.dumps(raw | changes))
    save_file({name: tensor.contiguous().clone() for name, tensor in authors.state_dict().items()}, folder / "model.safetensors")
    return folder


def logits_of(drafter, target, ids):
    """[K,S,V] of Draftsmith's heads, from the target's hidden states [1,S,H] and tokens [1,S]."""
    out = target.forward(ids)
    rows = drafter.position_logits(drafter.position_features(ids[0], out), torch.arange(1, ids.shape[1]))
    return out.hidden, rows.transpose(0, 1)


def same(drafter, authors, target):
    ids = torch.arange(20)[None] * 7 % V
    hidden, ours = logits_of(drafter, target, ids)
    theirs = authors.eval()(hidden, ids)
    assert ours.abs().max() > 0.5
    for k in range(K):  # a round whose root is at i reads the hidden state at i − 1; k tokens before the end the text is over
        torch.testing.assert_close(ours[k][: 19 - k], theirs[k][: 19 - k], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize("prefix", [False, True])
def test_the_authors_folder_is_read(tmp_path, target, blocks, prefix):
    authors = randomise(Authors(target, blocks, prefix), 0.2).requires_grad_(False)
    folder = folder_of(authors, tmp_path / "theirs")
    assert published.format_of(str(folder)) == "hydra" and published.target_of(str(folder)) == {"name": "somebody/target"}
    drafter = published.read_published(str(folder), target)
    same(drafter, authors, target)
    prompts = [[256, 5, 9, 30], [77, 12, 256, 8]]
    plain = [answer.tokens for answer in Decoder(target).generate(prompts, Sampling(), 12, ())]
    assert [answer.tokens for answer in Decoder(target, drafter, slots=2).generate(prompts, Sampling(), 12, ())] == plain


@pytest.mark.parametrize("name", CASES)
def test_an_export_loads_into_the_authors_code(tmp_path, workshop, target, name, capsys):
    settings = CASES[name]
    artifact = save_drafter("hydra", target, tmp_path / "artifact", **settings)
    given = ["--to", "hydra", "--output", str(tmp_path / "out"), "--target", str(workshop / "target")]
    export.main([str(artifact), *given])
    assert "checked by reading it; README.md has the command" in capsys.readouterr().out
    authors = Authors(target, settings.get("num_layers", 1), "prefix" in settings).requires_grad_(False)
    loaded = authors.load_state_dict(load_file(tmp_path / "out" / HYDRA_FILE), strict=False)
    assert not loaded.unexpected_keys and all(
        "embed" in name and name.endswith(("fn.weight", "tokens.weight")) for name in loaded.missing_keys
    )
    drafter = load_drafter(artifact, target)
    same(drafter, authors, target)
    assert "torch.save" in (tmp_path / "out" / "README.md").read_text() and faults(tmp_path / "out", target) == []
    take_in.main([str(tmp_path / "out"), "--output", str(tmp_path / "again"), "--target", str(workshop / "target")])
    again = load_drafter(tmp_path / "again", target)
    assert again.config.tree == drafter.config.tree and again.config.target == drafter.config.target
    same(again, authors, target)


def test_a_shared_head_s_bias_goes_along(tmp_path):
    sizes = {"hidden_size": H, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    target = Target.wrap(randomise(PhiForCausalLM(PhiConfig(vocab_size=V, **sizes)), 0.2).eval(), name="somebody/target")
    assert target.head.bias.abs().max() > 0
    drafter = randomise(new_drafter("hydra", target, num_heads=2, share_head=True), 0.2).eval()
    write_hydra(drafter, tmp_path, torch.float32)
    again = published.read_published(str(tmp_path), target)
    ids = torch.arange(24)[None] * 7 % V
    torch.testing.assert_close(logits_of(again, target, ids)[1], logits_of(drafter, target, ids)[1], rtol=1e-4, atol=1e-4)


def test_blocks_that_differ_have_no_place_there(tmp_path, workshop, target, capsys):
    artifact = save_drafter("hydra", target, tmp_path / "artifact", num_layers=3)
    given = ["--to", "hydra", "--output", tmp_path / "out", "--target", workshop / "target"]
    assert "repeats one block after the first" in failing(capsys, export.main, [artifact, *given])
    medusa = save_drafter("medusa", target, tmp_path / "medusa")
    assert "--to hydra is for Hydra; got Medusa" in failing(capsys, export.main, [medusa, *given])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hydra_head_arch": "eagle-attn"}, "`hydra_head_arch` is 'eagle-attn'"),
        ({"grounded_heads": False}, "`grounded_heads` is False"),
        ({"hidden_state_offset": 1}, "`hidden_state_offset` is 1"),
        ({"hydra_num_heads": 0}, "got 0 heads"),
        ({"hydra_num_layers": 2}, "hydra_mlp.0.1"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, target, changes, message):
    folder = folder_of(Authors(target, 1, False), tmp_path / "theirs", **changes)
    with pytest.raises(ValueError, match=message):
        published.read_published(str(folder), target)


def test_a_pickle_is_named_with_the_command_that_converts_it(tmp_path, target):
    folder = folder_of(Authors(target, 1, False), tmp_path / "theirs")
    (folder / "model.safetensors").rename(folder / "hydra_lm_head.pt")
    with pytest.raises(ValueError, match=r"only pickled weights \(hydra_lm_head.pt\).*model.safetensors"):
        published.read_published(str(folder), target)
