"""A module of the user's own becomes a bundle; a message names each breach of the protocol."""

import importlib
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.commands import call, done
from transferry.build_model.own.load import load_own
from transferry.build_model.own.model import refused_trace
from transferry.build_model.own.tokenizer import read_tokenizer
from transferry.export.checks.claims import manifest_claims
from transferry.export.checks.weights import weights_claim
from transferry.export.make import make
from transferry.export.recipes import RECIPES
from transferry.export.trace.graph import weights_of
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.errors import InputError, UsageError

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "export-a-module.md"
WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(36))]
LINES = ["w1 w2 w3", "w4 w5 w9 w9 w30", "w7"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's module, its words and lines."""
    blocks = re.findall(r"( *)```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    code = "\n".join(textwrap.dedent(block) for _, block in blocks)
    (tmp_path / "mine.py").write_text(code)
    (tmp_path / "words.txt").write_text("\n".join(WORDS))
    (tmp_path / "lines.txt").write_text("\n".join(LINES))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_page_from_a_module_to_answers(place: Path) -> None:
    out = "bundle"
    done("export", "mine:translator", "--tokenizer", "words.txt", "--out", out, "--quiet")
    bundle = Bundle.load(place / out)
    assert [*bundle.manifest.variants] == ["portable"]
    done("run", out, "lines.txt", "-o", "answers.txt", "--max-length", "9", "--quiet")
    mine: Any = importlib.import_module("mine")
    checkpoint = load_own(mine.translator, "mine:translator", bundle.tokenizer)
    model: Any = checkpoint.model
    special = bundle.tokenizer.special
    for line, answer in zip(LINES, (place / "answers.txt").read_text().splitlines(), strict=True):
        source = torch.tensor([special.wrap(bundle.tokenizer.encode(line))])
        mask, target = torch.ones_like(source).bool(), [special.bos_id]
        cross = model.cross(model.encode(source, mask))
        while len(target) < 10 and special.eos_id not in target[1:]:
            logits, _ = model.decode(torch.tensor([target]), mask, cross, model.empty_past(1))
            target.append(int(logits[0, -1].argmax()))
        assert answer == bundle.tokenizer.decode([t for t in target[1:] if t != special.eos_id])
    claim = weights_claim(model, bundle, bundle.variant(), None)
    assert not claim.problem
    claims = {each.name: each for each in manifest_claims(checkpoint, bundle)}
    assert "the bundle's own was used" in claims["tokenizer"].skipped
    model.module.generator.bias[0] += 1e-6
    assert "generator.bias" in weights_claim(model, bundle, bundle.variant(), None).problem
    refused = call("verify", out, "--checkpoint", "mine:translator", "--self-test")
    assert "--self-test knows the weights of the reference alone" in refused.stderr
    with pytest.raises(UsageError, match="cpu-fp32 writes the cache in place"):
        make(model, RECIPES["cpu-fp32"])


@pytest.mark.optional("x_transformers")
def test_the_page_wraps_x_transformers(place: Path) -> None:
    x_transformers: Any = importlib.import_module("x_transformers")
    mine: Any = importlib.import_module("mine")

    def wrapped(**options: Any) -> Any:
        layers = x_transformers.Decoder(dim=16, depth=1, heads=2, attn_dim_head=8, **options)
        given = {"num_tokens": len(WORDS), "max_seq_len": 64, "attn_layers": layers}
        return mine.Writer(x_transformers.TransformerWrapper(**given))

    for options in ({}, {"rotary_pos_emb": True, "use_rmsnorm": True}):
        model = loaded(wrapped(**options), place).model
        assert make(model, RECIPES["portable"])["decoder"].spec.names("logits")
    with pytest.raises(UsageError, match=r"docs/how-to/export-a-module.md lists"):
        wrapper = wrapped().wrapper
        wrapper.max_positions = 64
        loaded(wrapper, place)


class Encoder(nn.Module):
    """nn.TransformerEncoder; `change` breaks it."""

    max_positions = 16
    labels = ("a", "b", "c")

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor] = lambda x, mask: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(40, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.scores = nn.Linear(16, 3)
        self.change = change

    def forward(self, source: Tensor, source_mask: Tensor) -> Tensor:
        x = self.change(self.embedding(source), source_mask)
        encoded: Tensor = self.encoder(x, src_key_padding_mask=~source_mask)
        return encoded

    def head(self, hidden: Tensor, source_mask: Tensor) -> Tensor:
        scores: Tensor = self.scores(hidden[:, 0])
        return scores


class Decoder(nn.Module):
    """A GPT of one attention; `change` breaks its present, `seen` its mask."""

    max_positions = 16
    cache: Any = (1, 1, 16)

    def __init__(
        self,
        change: Callable[[Any], Any] = lambda present: present,
        seen: Callable[[Tensor], Tensor] = lambda seen: seen,
        vocabulary: int = 40,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.places = nn.Embedding(40, 16), nn.Embedding(16, 16)
        self.output = nn.Linear(16, vocabulary)
        self.change, self.seen = change, seen

    def decode(self, target: Tensor, mask: Tensor, cross: Any, past: Any) -> Any:
        new = target.shape[1]
        x = self.embedding(target) + self.places(mask.sum(1, keepdim=True) + torch.arange(new))
        keys, values = (torch.cat([each, x[:, None]], dim=2) for each in past[0])
        own = torch.ones(new, new).bool().tril().expand(len(target), -1, -1)
        seen = self.seen(torch.cat([mask[:, None].expand(-1, new, -1), own], dim=2))
        scores = (x[:, None] @ keys.transpose(-1, -2)).masked_fill(~seen[:, None], -1e9)
        mixed = (scores.softmax(dim=-1) @ values)[:, 0]
        return self.output(x + mixed), self.change([(keys, values)])


class NoPast(Decoder):
    """NaN for a row whose past is padding alone."""

    def decode(self, target: Tensor, mask: Tensor, cross: Any, past: Any) -> Any:
        logits, present = super().decode(target, mask, cross, past)
        seen = mask.any(dim=1) if mask.shape[1] else torch.ones(len(mask)).bool()
        return logits.where(seen[:, None, None], torch.nan), present


class NewAlone(Decoder):
    """Its present lacks the past."""

    def decode(self, target: Tensor, mask: Tensor, cross: Any, past: Any) -> Any:
        logits, present = super().decode(target, mask, cross, past)
        return logits, [tuple(each[:, :, -target.shape[1] :] for each in present[0])]


def loaded(module: nn.Module, place: Path) -> Any:
    return load_own(lambda: module, "mine:module", place / "words.txt")


def test_modules_that_keep_the_protocol(place: Path) -> None:
    checkpoint = loaded(Encoder(), place)
    assert checkpoint.head.labels == ("a", "b", "c")
    assert make(checkpoint.model, RECIPES["cpu-fp32"])["encoder"].spec.names("head")
    tied = Decoder()
    tied.second = tied.output  # the exporter chooses either name of a weight
    assert {"output.weight", "second.weight"} <= weights_of(tied).keys()
    assert loaded(tied, place).model.config.architecture == "decoder-only"
    compiled: Any = torch.compile(Decoder())
    assert isinstance(loaded(compiled, place).model.module, Decoder)


def in_place(present: Any) -> Any:
    present[0][0].zero_()
    return present


FAULTS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "dropout": (
        lambda: Encoder(lambda x, mask: nn.functional.dropout(x)),
        "differs between two runs on the same input, in float64; turn dropout off",
    ),
    "batch": (lambda: Encoder(lambda x, mask: x - x.mean()), "of a row alone, .* keep rows apart"),
    "float32": (lambda: Encoder(lambda x, mask: x.float()), "in float64: RuntimeError"),
    "labels": (
        lambda: type("Labels", (Encoder,), {"labels": ("a",)})(),
        "found 3 scores for 1 labels",
    ),
    "positions": (
        lambda: type("Long", (Encoder,), {"max_positions": None})(),
        "expected max_positions, .* found None",
    ),
    "too long": (
        lambda: type("Long", (Decoder,), {"max_positions": 17})(),
        "on 17 tokens, within its max_positions: IndexError",
    ),
    "cache": (lambda: type("Cache", (Decoder,), {"cache": (1, 2)})(), r"expected cache = \(layers"),
    "no value": (lambda: Decoder(lambda present: None), "return the cache as a value"),
    "one tensor": (lambda: Decoder(lambda p: [(p[0][0], p[0][0])]), "are one tensor, .*chunk"),
    "shape": (
        lambda: Decoder(lambda p: [tuple(each[..., :8] for each in p[0])]),
        r"present, keys of layer 0, of shape \[3, 1, 5, 16\], found \[3, 1, 5, 8\]",
    ),
    "new alone": (
        lambda: NewAlone(),
        r"present \(past included\), keys of layer 0, .* found \[3, 1, 3, 16\]",
    ),
    "scripted": (
        lambda: torch.jit.ScriptModule(),
        "expected a torch.nn.Module with weights, found .*ScriptModule",
    ),
    "vocabulary": (
        lambda: Decoder(vocabulary=39),
        r"logits of shape \[3, 5, 40\], found \[3, 5, 39",
    ),
    "future": (
        lambda: Decoder(seen=lambda seen: torch.ones_like(seen)),
        "of a row alone|let a token see itself, the past and no later token",
    ),
    "forgets": (
        lambda: Decoder(seen=lambda seen: seen & (torch.arange(seen.shape[2]) > 0)),
        "differ by .* in float64",
    ),
    "no past": (lambda: NoPast(), "logits is NaN, in float64; let each token see itself"),
    "present": (lambda: Decoder(in_place), "differ by|writes into"),
    "no module": (lambda: 3, "expected a torch.nn.Module with weights, found int"),  # type: ignore[return-value,dict-item]
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_protocol_is_told(fault: str, place: Path) -> None:
    make_module, message = FAULTS[fault]
    with pytest.raises(UsageError) as caught:
        load_own(make_module, "mine:module", place / "words.txt")
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_exporter_refuses_a_branch_on_content(place: Path) -> None:
    def branch(x: Tensor, mask: Tensor) -> Tensor:
        return x if float(x.sum()) > 1e9 else x * 1

    model = loaded(Encoder(branch), place).model
    with pytest.raises(UsageError, match=r"refuses the module: .*; use no branch or size"):
        make(model, RECIPES["portable"])
    error = refused_trace(ValueError("first\nsecond"))
    assert "ValueError: first; use" in str(error)


def test_without_a_tokenizer_and_without_a_function(place: Path) -> None:
    for command, message in {
        "mine:translator": "mine:translator is a module: give its vocabulary with --tokenizer",
        "mine:absent": "mine:absent: mine has no function 'absent'",
        "absent:f": "importing absent failed",
    }.items():
        refused = call("export", command, "--out", "bundle")
        assert (refused.exit_code, message in refused.stderr) == (2, True), refused.stderr
    assert not (place / "bundle").exists()


def test_tokenizers(place: Path, bundle_folder: Path) -> None:
    words = read_tokenizer(place / "words.txt", "encoder-decoder", None)
    assert words.special.wrap(words.encode("w0 w1 x")) == [4, 5, 3, 2]
    around = {"eos": 2, "before": ["<s>"], "after": []}
    given = read_tokenizer(place / "words.txt", "encoder-only", around)
    assert given.special.wrap(given.encode("w0")) == [1, 4]
    assert (
        read_tokenizer(bundle_folder, "encoder-decoder", None)
        == Bundle.load(bundle_folder).tokenizer
    )
    with pytest.raises(InputError, match="expected tokens of the vocabulary, found 'none'"):
        read_tokenizer(place / "words.txt", "encoder-only", {"eos": "none"})
    (place / "same.txt").write_text("a\na\n")
    with pytest.raises(InputError, match="expected a token on each line, all different"):
        read_tokenizer(place / "same.txt", "encoder-only", None)
    (place / "no.json").write_text("{}")
    with pytest.raises(InputError, match=r"expected a tokenizer\.json"):
        read_tokenizer(place / "no.json", "encoder-only", None)
    (place / "no.model").write_text("{}")
    with pytest.raises(InputError, match="is no SentencePiece model"):
        read_tokenizer(place / "no.model", "encoder-only", None)
