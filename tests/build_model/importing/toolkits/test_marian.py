"""Models of Marian give the numbers of its formulas, computed by numpy in float64."""

import datetime
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.commands import call, done
from tests.runtime.tokenizer.vocabularies import sentencepiece_model
from transferry.build_model.checkpoint import load_checkpoint
from transferry.build_model.importing.huggingface.importer import import_pretrained, read_pretrained
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.tokenizer.byte_pair import load_tokenizer

REASON = "a test dependency, which is not installed"
spm = pytest.importorskip("sentencepiece", reason=REASON)
yaml = pytest.importorskip("yaml", reason=REASON)

Array = NDArray[np.float64]
Weights = dict[str, Array]
WIDTH, HEADS, INNER, DEPTH = 16, 2, 24, 2
WORDS = ["the", "cat", "sat", "yes", "null", "1", "Straße", "日本", "a:b", '"quoted"', "~"]
TEXTS = [
    "the cat sat on the mat",
    "Straße über Häuser",
    "日本語 のテキスト",
    "yes null 1 </s> <pad>",
]


# --- the formulas ---------------------------------------------------------------------------------


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    shares: Array = e / e.sum(axis=-1, keepdims=True)
    return shares


def layer_norm(x: Array, scale: Array, bias: Array, epsilon: float) -> Array:
    mean = x.mean(axis=-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    normalised: Array = (x - mean) / np.sqrt(variance + epsilon) * scale + bias
    return normalised


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": lambda x: np.maximum(x, 0),
    "swish": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x / (1 + np.exp(-1.702 * x)),  # Marian's
}


class Formula:
    """A post-norm or pre-norm Transformer over one row, by Marian's names."""

    def __init__(self, weights: Weights, options: dict[str, Any]) -> None:
        self.weights = {name: value.astype(np.float64) for name, value in weights.items()}
        self.pre = options["transformer-preprocess"] == "n"
        self.activation = ACTIVATIONS[options["transformer-ffn-activation"]]

    def linear(self, base: str, letter: str, x: Array) -> Array:
        return x @ self.weights[f"{base}_W{letter}"] + self.weights[f"{base}_b{letter}"]

    def norm(self, name: str, x: Array) -> Array:
        ending = "_pre" if self.pre and not name.endswith("top") else ""
        scale, bias = (self.weights[f"{name}_ln_{kind}{ending}"] for kind in ("scale", "bias"))
        return layer_norm(x, scale, bias, 1e-6)

    def sublayer(self, name: str, x: Array, change: Callable[[Array], Array]) -> Array:
        if self.pre:
            return x + change(self.norm(name, x))
        return self.norm(name, x + change(x))

    def attention(self, base: str, x: Array, memory: Array, causal: bool) -> Array:
        query, key, value = (
            self.linear(base, letter, y).reshape(len(y), HEADS, -1).transpose(1, 0, 2)
            for letter, y in zip("qkv", (x, memory, memory), strict=True)
        )
        scores = query @ key.transpose(0, 2, 1) / math.sqrt(WIDTH // HEADS)
        if causal:
            scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        heads = (softmax(scores) @ value).transpose(1, 0, 2).reshape(len(x), WIDTH)
        return self.linear(base, "o", heads)

    def stack(self, stack: str, x: Array, memory: Array | None = None) -> Array:
        for layer in range(1, DEPTH + 1):
            x = self.layer(f"{stack}_l{layer}", x, memory)
        return self.norm(f"{stack}_top", x) if self.pre else x

    def layer(self, base: str, x: Array, memory: Array | None) -> Array:
        causal = memory is not None

        def feed_forward(y: Array) -> Array:
            return self.linear(
                f"{base}_ffn", "2", self.activation(self.linear(f"{base}_ffn", "1", y))
            )

        x = self.sublayer(
            f"{base}_self_Wo", x, lambda y: self.attention(f"{base}_self", y, y, causal)
        )
        if memory is not None:
            x = self.sublayer(
                f"{base}_context_Wo",
                x,
                lambda y: self.attention(f"{base}_context", y, memory, False),
            )
        return self.sublayer(f"{base}_ffn_ffn", x, feed_forward)


def sinusoids(length: int) -> Array:
    half = WIDTH // 2
    rates = 10000.0 ** -(np.arange(half) / (half - 1))
    angles = np.arange(length)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def require_close(found: Tensor, wanted: Array) -> None:
    """Marian computes positions in float32, so the formula agrees to six digits."""
    assert np.abs(wanted).max() > 0.5
    assert np.abs(found.numpy() - wanted).max() < 2e-5 * np.abs(wanted).max()


# --- Marian ---------------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {
    "type": "transformer",
    "dim-emb": WIDTH,
    "transformer-heads": HEADS,
    "transformer-dim-ffn": INNER,
    "enc-depth": DEPTH,
    "dec-depth": DEPTH,
    "transformer-preprocess": "",
    "transformer-postprocess": "dan",
    "transformer-postprocess-emb": "d",
    "transformer-postprocess-top": "",
    "transformer-ffn-activation": "swish",
    "transformer-decoder-autoreg": "self-attention",
    "transformer-no-projection": False,
    "transformer-dropout": 0.1,
    "transformer-tied-layers": [],
    "tied-embeddings-all": True,
    "tied-embeddings": False,
    "tied-embeddings-src": False,
    "max-length": 50,
    "skip": False,
    "right-left": False,
}
PRE = {"preprocess": "n", "postprocess": "da", "postprocess-top": "n"}
PRE_NORM = {f"transformer-{name}": value for name, value in PRE.items()}


DRAWS = np.random.default_rng(0)


def drawn(shape: tuple[int, ...], *, one: bool = False) -> Array:
    """Numbers that float32 holds."""
    values = DRAWS.normal(0, 0.3, shape) + one
    return values.astype(np.float32)


def marian_weights(size: int, options: dict[str, Any]) -> Weights:
    pre = options["transformer-preprocess"] == "n"
    found = {"Wemb": drawn((size, WIDTH)), "decoder_ff_logit_out_b": drawn((1, size))}
    if not (options["tied-embeddings-all"] or options["tied-embeddings"]):
        found["decoder_ff_logit_out_Wt"] = drawn((size, WIDTH))

    def norm(name: str) -> None:
        ending = "_pre" if pre and not name.endswith("top") else ""
        found[f"{name}_ln_scale{ending}"] = drawn((1, WIDTH), one=True)
        found[f"{name}_ln_bias{ending}"] = drawn((1, WIDTH))

    for stack in ("encoder", "decoder"):
        if pre:
            norm(f"{stack}_top")
        for layer in range(1, DEPTH + 1):
            base = f"{stack}_l{layer}"
            for attention in ("self", "context")[: 1 + (stack == "decoder")]:
                for letter in "qkvo":
                    found[f"{base}_{attention}_W{letter}"] = drawn((WIDTH, WIDTH))
                    found[f"{base}_{attention}_b{letter}"] = drawn((1, WIDTH))
                norm(f"{base}_{attention}_Wo")
            found[f"{base}_ffn_W1"], found[f"{base}_ffn_b1"] = (
                drawn((WIDTH, INNER)),
                drawn((1, INNER)),
            )
            found[f"{base}_ffn_W2"], found[f"{base}_ffn_b2"] = (
                drawn((INNER, WIDTH)),
                drawn((1, WIDTH)),
            )
            norm(f"{base}_ffn_ffn")
    return found


def marian_logits(
    weights: Weights, options: dict[str, Any], source: list[int], target: list[int]
) -> Array:
    """Of every position; a target begins with a zero vector, then its tokens follow."""
    formula = Formula(weights, options)
    embedding = formula.weights["Wemb"]

    def embed(rows: Array) -> Array:
        return math.sqrt(WIDTH) * rows + sinusoids(len(rows))

    encoded = formula.stack("encoder", embed(embedding[source]))
    shifted = np.concatenate([np.zeros((1, WIDTH)), embedding[target]])
    decoded = formula.stack("decoder", embed(shifted), encoded)
    output = formula.weights.get("decoder_ff_logit_out_Wt", embedding)
    return decoded @ output.T + formula.weights["decoder_ff_logit_out_b"]


def save_marian(
    folder: Path, changes: dict[str, Any] | None = None, words: list[str] | None = None
) -> tuple[Weights, dict[str, Any]]:
    """model.npz, a vocabulary of words, and decoder.yml."""
    folder.mkdir(exist_ok=True)
    tokens = ["</s>", "<unk>", *(WORDS if words is None else words)]
    options = OPTIONS | {"dim-vocabs": [len(tokens)] * 2} | (changes or {})
    weights = marian_weights(len(tokens), options)
    write_marian(folder, weights, options)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    # Without quotes around "yes", as Marian's own library writes it.
    lines = [
        f"{token}: {number}\n" if token.isalnum() else yaml.safe_dump({token: number})
        for token, number in vocabulary.items()
    ]
    (folder / "vocab.yml").write_text("".join(lines), encoding="utf-8")
    decoding = {"models": ["/their/model.npz"], "vocabs": ["/their/vocab.yml"] * 2, "beam-size": 6}
    (folder / "decoder.yml").write_text(yaml.safe_dump(decoding))
    return weights, options


def write_marian(folder: Path, weights: Weights, options: dict[str, Any]) -> None:
    text = np.frombuffer(yaml.safe_dump(options).encode() + b"\0", dtype=np.int8)
    arrays: dict[str, Any] = {**weights, "special:model.yml": text}
    np.savez(folder / "model.npz", **arrays)


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)
MARIANS: dict[str, dict[str, Any]] = {
    "post": {},
    "pre": PRE_NORM,
    "pre without top": PRE_NORM | {"transformer-postprocess-top": ""},
    "relu, untied": {
        "transformer-ffn-activation": "relu",
        "tied-embeddings-all": False,
        "tied-embeddings-src": True,
    },
    "gelu, tied twice": {
        "transformer-ffn-activation": "gelu",
        "tied-embeddings-all": False,
        "tied-embeddings-src": True,
        "tied-embeddings": True,
    },
}


@torch.inference_mode()
@pytest.mark.parametrize("name", [name for name in MARIANS if name != "pre without top"])
def test_marian_s_logits_are_the_formula_s(name: str, tmp_path: Path) -> None:
    weights, options = save_marian(tmp_path / "theirs", MARIANS[name])
    import_pretrained(tmp_path / "theirs", tmp_path / "run")
    model = load_checkpoint(tmp_path / "run").model.double()
    start = model.config.vocabulary_size - 1
    source, target = [3, 9, 2, 5, 0], [4, 7, 7, 2]
    rows = torch.tensor([source])
    found = model(rows, torch.ones_like(rows).bool(), torch.tensor([[start, *target]]))[0]
    require_close(found[:, :-1], marian_logits(weights, options, source, target))
    # The beginning of a target weighs nothing among the tokens.
    assert found.softmax(dim=-1)[:, -1].max() < 1e-30


@torch.inference_mode()
def test_learned_positions_and_no_top_are_followed(tmp_path: Path) -> None:
    options = PRE_NORM | {"transformer-postprocess-top": "", "transformer-train-positions": True}
    weights, full = save_marian(tmp_path, options)
    for stack in ("encoder", "decoder"):
        for kind in ("scale", "bias"):
            del weights[f"{stack}_top_ln_{kind}"]
    weights["Wpos"] = drawn((20, WIDTH))
    write_marian(tmp_path, weights, full)
    imported = read_pretrained(tmp_path)
    assert not imported.config.final_norm
    assert not imported.config.scale_embedding
    assert imported.config.max_positions == 20
    assert torch.equal(imported.weights.state["positions"], torch.from_numpy(weights["Wpos"]))


def test_marian_s_words_are_texts(tmp_path: Path) -> None:
    """YAML's yes, null and 1 too; text that looks like the end does not end."""
    save_marian(tmp_path / "theirs")
    result = done("import", tmp_path / "theirs", "--out", tmp_path / "run")
    assert "marian, encoder-decoder" in result.stderr
    assert "tokens of vocab.yml between blanks" in result.stderr
    assert "beam-size 6" in result.stderr
    tokenizer = load_tokenizer(tmp_path / "run")
    text = " ".join(WORDS)
    assert tokenizer.encode(text) == list(range(2, 2 + len(WORDS)))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("</s> other") == [1, 1]
    special = tokenizer.special
    assert special.wrap([5]) == [5, 0]
    assert special.bos_id == special.pad_id == len(WORDS) + 2
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert record["generation"] == {"suppress": [1, len(WORDS) + 2]}


def pieces(size: int = 60, **settings: Any) -> bytes:
    return sentencepiece_model(TEXTS * 20, vocab_size=size, **settings)


def test_marian_s_own_sentencepiece_model_gives_the_ids(tmp_path: Path) -> None:
    content = pieces(bos_id=-1, eos_id=0, unk_id=1)
    model = spm.SentencePieceProcessor(model_proto=content)
    save_marian(tmp_path, words=[f"w{number}" for number in range(model.get_piece_size() - 2)])
    (tmp_path / "vocab.yml").unlink()
    (tmp_path / "decoder.yml").write_text("vocabs: [vocab.spm, vocab.spm]\nallow-unk: true\n")
    (tmp_path / "vocab.spm").write_bytes(content)
    imported = read_pretrained(tmp_path)
    for text in TEXTS:
        assert imported.tokenizer.encode(text) == model.encode(text)
    assert imported.tokenizer.special.after == (0,)
    assert imported.generation == {"suppress": (model.get_piece_size(),)}


def test_pieces_and_a_table_of_ids_give_marian_s_ids(tmp_path: Path) -> None:
    content = pieces()
    model = spm.SentencePieceProcessor(model_proto=content)
    words = [model.id_to_piece(number) for number in range(3, model.get_piece_size())]
    save_marian(tmp_path, words=words)
    for side in ("source", "target"):
        (tmp_path / f"{side}.spm").write_bytes(content)
    tokenizer = read_pretrained(tmp_path).tokenizer
    ids = {piece: number + 2 for number, piece in enumerate(words)}
    for text in TEXTS[:3]:
        wanted = [ids.get(piece, 1) for piece in model.encode(text, out_type=str)]
        assert tokenizer.encode(text) == wanted
        assert tokenizer.decode(wanted) == text


def test_pieces_under_other_names_are_refused_with_these(tmp_path: Path) -> None:
    """Without them, text would be split at blanks, and most of it be unknown."""
    save_marian(tmp_path)
    for name in ("source.spm", "en.spm32k"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "opus.de.spm").write_bytes(b"")
    found = "found opus.de.spm, source.spm; name them so, twice the same file"
    with pytest.raises(InputError, match=f"source.spm and target.spm beside vocab.yml, {found}"):
        read_pretrained(tmp_path)


def test_a_shortlist_is_left_out_by_name(tmp_path: Path) -> None:
    save_marian(tmp_path)
    decoding = "vocabs: [vocab.yml, vocab.yml]\nshortlist: [lex.s2t.bin, 50, 50]\n"
    (tmp_path / "decoder.yml").write_text(decoding)
    assert read_pretrained(tmp_path).ignored == {"shortlist": ["lex.s2t.bin", 50, 50]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "amun"}, 'type is "amun", which cannot be imported; supported: transformer'),
        ({"transformer-decoder-autoreg": "rnn"}, "transformer-decoder-autoreg is"),
        ({"transformer-postprocess": "dar"}, "transformer-preprocess is"),
        ({"transformer-postprocess-emb": "n"}, "transformer-postprocess-emb is"),
        ({"tied-embeddings-all": False}, "tied-embeddings-all is false"),
        ({"transformer-ffn-depth": 3}, "transformer-ffn-depth is 3"),
        ({"transformer-decoder-dim-ffn": 99}, "transformer-decoder-dim-ffn is 99"),
        ({"transformer-ffn-activation": "tanh"}, "transformer-ffn-activation is"),
        ({"transformer-tied-layers": [1, 1]}, "transformer-tied-layers is"),
        ({"transformer-unheard-of": 3}, "transformer-unheard-of is 3"),
        ({"right-left": True}, "right-left is true"),
        ({"lemma-dependency": datetime.date(2020, 1, 2)}, 'lemma-dependency is "2020-01-02"'),
        ({"input-types": CIRCLE}, r"input-types is \[\[\.\.\.\]\]"),
        ({"dim-vocabs": [13, 14]}, "dim-vocabs is"),
        ({"transformer-heads": 3}, "a multiple of heads"),
    ],
)
def test_an_option_of_marian_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_marian(tmp_path, changes)
    with pytest.raises(InputError, match=rf"model\.npz: .*{message}"):
        read_pretrained(tmp_path)


def test_a_damaged_folder_of_marian_is_refused(tmp_path: Path) -> None:
    weights, options = save_marian(tmp_path)

    def refused(message: str) -> None:
        with pytest.raises(InputError, match=message):
            read_pretrained(tmp_path).weights.write({})

    def write(**changes: Any) -> None:
        write_marian(tmp_path, weights | changes, options)

    name = "encoder_l1_self_Wq"
    write(**{name: weights[name][:, :8]})
    refused(rf"the tensor {name} of shape \[16, 8\] does not fit")
    write(**{name: weights[name] * np.float32("nan")})
    refused(f"finite numbers in the tensor {name}")
    write(**{name: weights[name].astype(np.int8)})
    refused(f"found int8 in the tensor {name}: they are quantised")
    write(other=weights[name])
    refused("the tensor other is unknown")
    write(**{name: np.array([print], dtype=object)})
    refused(rf"model\.npz: expected numbers in {name}")
    write_marian(tmp_path, {key: each for key, each in weights.items() if key != name}, options)
    refused(f"the tensor {name} is missing")
    write()
    (tmp_path / "vocab.yml").write_text("</s>: 0\n<unk>: 1\nx: 3\n")
    refused(r"vocab\.yml: expected the ids 0 to 2")
    (tmp_path / "vocab.yml").write_text("</s>: 0\n<unk>: 1\nx: 2\n")
    refused(r"vocab\.yml: expected 13 tokens")
    (tmp_path / "vocab.yml").write_text("{: [")
    refused(r"vocab\.yml is not YAML")
    (tmp_path / "vocab.yml").unlink()
    refused(r"expected the vocabulary vocab\.yml, found none")
    (tmp_path / "decoder.yml").write_text("models: [a.npz, b.npz]\n")
    refused("one model, not an ensemble")
    (tmp_path / "decoder.yml").unlink()
    (tmp_path / "model.npz").write_bytes((tmp_path / "model.npz").read_bytes()[:-99])
    refused(r"model\.npz is no whole \.npz archive")
    (tmp_path / "model.npz").rename(tmp_path / "a.npz")
    (tmp_path / "b.npz").write_bytes(b"")
    refused(r"expected one model, found a\.npz, b\.npz")


# --- the folder as a whole ------------------------------------------------------------------------


def test_an_adapter_is_for_transformers_alone(tmp_path: Path) -> None:
    save_marian(tmp_path / "theirs")
    (tmp_path / "adapter").mkdir()
    settings = {"peft_type": "LORA", "r": 2}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    torch.save({"x": torch.ones(2)}, tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(UsageError, match="--adapter must be left out"):
        read_pretrained(tmp_path / "theirs", tmp_path / "adapter")


def test_from_their_folder_to_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transferry.export.oracle.effort.RECORDED_LENGTH", 6)
    # The time that export takes grows with the layers.
    monkeypatch.setitem(globals(), "DEPTH", 1)
    save_marian(tmp_path / "theirs", {"enc-depth": 1, "dec-depth": 1})
    lines, bundle = tmp_path / "lines.txt", tmp_path / "bundle"
    lines.write_text("the cat sat\nStraße 日本 yes\n", encoding="utf-8")
    done("import", tmp_path / "theirs", "--out", tmp_path / "run")
    done("export", tmp_path / "run", "--out", bundle, "--text", lines, "--variant", "portable")
    out = tmp_path / "answers.txt"
    assert call("run", bundle, lines, "-o", out, "--beam", "2").exit_code == 0
    assert set(out.read_text(encoding="utf-8").split()) <= {*WORDS, "<unk>"}
