"""Imported models answer as transformers does; nothing is half-written."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.build_model.importing.huggingface.drawn import on_a_grid, transformers
from tests.build_model.importing.huggingface.small_models import (
    KINDS,
    LINES,
    Copies,
    Made,
    Makes,
    change,
    edited,
    listing,
    save,
)
from tests.commands import FEW, call, done
from transferry.build_model.checkpoint import load_checkpoint
from transferry.build_model.importing.huggingface.encoder_decoder import marian_positions
from transferry.build_model.importing.huggingface.importer import (
    import_pretrained,
    read_pretrained,
)
from transferry.build_model.model.config import ModelConfig
from transferry.runtime.bundle.specs import REFERENCE
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.proof.recorded import Reference
from transferry.runtime.tokenizer.byte_pair import load_tokenizer


def test_the_position_table_is_theirs_number_by_number() -> None:
    kind = transformers.models.marian.modeling_marian.MarianSinusoidalPositionalEmbedding
    for length, width in ((512, 512), (40, 32)):
        config = ModelConfig(9, width, 4, 1, 1, 8, max_positions=length, positions="learned")
        assert torch.equal(
            marian_positions(config)["positions"], kind(length, width).create_weight()
        )


def test_a_position_table_of_the_file_is_taken(tmp_path: Path) -> None:
    """opus-mt checkpoints of older versions hold it, once for either side."""
    save("marian", tmp_path)
    table = on_a_grid(torch.randn(64, 32))
    with edited(tmp_path) as tensors:
        for side in ("encoder", "decoder"):
            tensors[f"model.{side}.embed_positions.weight"] = table.clone()
    converted = read_pretrained(tmp_path).weights
    assert torch.equal(converted.state["positions"], table)
    assert converted.computed == {}
    with edited(tmp_path) as tensors:
        tensors["model.decoder.embed_positions.weight"] = table + 1
    converted = read_pretrained(tmp_path).weights
    with pytest.raises(InputError, match=r"embed_positions.weight and .* differ"):
        converted.write({})


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_imported_and_left_out_is_told(kind: str, made: Makes) -> None:
    (said,) = made(kind).said
    total = sum(parameter.numel() for parameter in made(kind).model.parameters())
    if kind == "marian":
        # Two tables of positions are theirs, as numbers that are not trained; the bias is ours.
        total += made(kind).model.final_logits_bias.numel() - 2 * 64 * 32
        assert f"computed: positions {64 * 32:,}\n" in said
        last = made(kind).model.config.vocab_size - 1
        defaults = f"early_stopping False, max_length 20, suppress ({last},)"
        assert f"generation defaults: {defaults}" in said
    assert f"{kind}, {load_checkpoint(made(kind).run).model.config.architecture}: " in said
    assert f" of {total:,} parameters\n" in f"{said}\n"
    if kind == "bert":
        assert "left out: token types (the first is in the positions) 64, " in said
        assert "pooler 1,056" in said
        assert "next-sentence head 66" in said
        assert f"imported {total - 64 - 1056 - 66:,} of" in said
    else:
        assert "left out" not in said


def test_tensors_are_counted_while_they_are_copied(made: Makes) -> None:
    weights = read_pretrained(made("gpt2").folder).weights
    shown: list[tuple[str, int, int]] = []
    weights.write({}, lambda *state: shown.append(state))
    total = len(shown) - 1
    assert shown == [("copying tensors", number, total) for number in range(total + 1)]
    assert total > 20


def test_what_has_no_effect_is_told_and_an_unknown_setting_refused(
    copied: Copies, tmp_path: Path
) -> None:
    theirs, said = copied("llama"), list[str]()
    change(theirs / "config.json", attention_dropout=0.1, initializer_range=0.02, novelty="x" * 99)
    tokenizer_config = theirs / "tokenizer_config.json"
    tokenizer_config.write_text(tokenizer_config.read_text().replace("model_max_length", "max_len"))
    change(tokenizer_config, max_len=12, sp_model_kwargs={}, added=None)
    message = r"config\.json: .* found novelty \(\"x+\), .* add --ignore-setting novelty"
    with pytest.raises(InputError, match=message):
        import_pretrained(theirs, tmp_path / "run")
    import_pretrained(theirs, tmp_path / "run", ignored=["novelty"], say=said.append)
    config, ignored, tokenizer = said[0].splitlines()[-3:]
    for name in ("attention_dropout", "initializer_range"):
        assert re.search(rf"{name}[^;]*\(of training\)", config)
    assert "hidden_size" not in config
    assert ignored == f'config.json, ignored by --ignore-setting: novelty "{"x" * 39}…'
    assert 'ignore_setting = ["novelty"]' in (tmp_path / "run" / "settings.toml").read_text()
    assert "sp_model_kwargs (not read by the class of the tokenizer" in tokenizer
    assert "added" not in tokenizer
    assert load_tokenizer(tmp_path / "run").special.longest == 12
    with pytest.raises(UsageError, match="other, which no file has"):
        read_pretrained(theirs, ignored=["novelty", "other"])


def test_several_end_tokens_are_kept_in_their_order(copied: Copies, tmp_path: Path) -> None:
    theirs = copied("llama")
    change(theirs / "generation_config.json", eos_token_id=[7, 2, 7, 5])
    import_pretrained(theirs, tmp_path / "run")
    special = load_tokenizer(tmp_path / "run").special
    assert (special.ends, special.ids() & {5}) == ((7, 2, 5), set())
    for ids, ends in (([7, 10**6], (7,)), (10**6, (2,)), ([7, -1], (7,)), (-1, (2,))):
        change(theirs / "generation_config.json", eos_token_id=ids)
        found = read_pretrained(theirs)
        assert found.tokenizer.special.ends == ends
        assert any("left out, being no token" in note for note in found.notes)
    for wrong in ([2, "x"], [-3]):
        change(theirs / "generation_config.json", eos_token_id=wrong)
        with pytest.raises(InputError, match=r"eos_token_id must be .*, found ('x'|-3)"):
            read_pretrained(theirs)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_what_older_versions_wrote_is_read(kind: str, copied: Copies, made: Makes) -> None:
    """Names without the prefix of a head, norms as gamma and beta, buffers, and tied copies."""
    theirs = copied(kind)
    wanted = read_pretrained(made(kind).folder).weights.state
    with edited(theirs) as tensors:
        for name in list(tensors):
            old = name.removeprefix("transformer.")
            if "LayerNorm" in name:
                old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
                old = old.replace("LayerNorm.bias", "LayerNorm.beta")
            tensors[old] = tensors.pop(name)
        if kind == "gpt2":
            tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.bool)
            tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
            # Of other types; no type reads these names.
            tensors["embeddings.position_ids"] = torch.arange(64)[None]
            tensors["layers.0.rotary_emb.inv_freq"] = torch.ones(2)
            tensors["lm_head.weight"] = tensors["wte.weight"].clone()
            tensors["v_head.summary.weight"] = torch.ones(1, 32)  # of TRL
        else:
            tensors["bert.embeddings.position_ids"] = torch.arange(64)[None]
            tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()
    found = read_pretrained(theirs).weights.state
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_kept_as_it_is(
    kind: str, dtype: torch.dtype, made: Makes, copied: Copies
) -> None:
    """The run takes half the room, and the model has the same numbers in float32."""
    theirs = copied(kind)
    copy.deepcopy(made(kind).model).to(dtype).save_pretrained(theirs)
    with edited(theirs) as tensors:
        assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    run = theirs.parent / "run"
    import_pretrained(theirs, run)
    stored = load_file(run / "model.safetensors")
    # Sums and formulas are float32.
    own = {"bert": {"positions"}, "marian": {"positions"}}.get(kind, set())
    assert {name for name in stored if stored[name].dtype == torch.float32} == own
    state = load_checkpoint(run).model.state_dict()
    assert all(torch.equal(state[name], stored[name].float()) for name in state)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    size = (run / "model.safetensors").stat().st_size
    assert size < 0.6 * (made(kind).run / "model.safetensors").stat().st_size


def test_nothing_is_half_written(
    made: Makes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(
        "transferry.build_model.importing.formats.tensors.TensorWriter.__setitem__", full
    )
    with pytest.raises(InputError, match="No space left on device; nothing was written"):
        import_pretrained(made("gpt2").folder, tmp_path / "run")
    assert listing(tmp_path) == set()


def test_a_run_is_replaced_with_force_only(made: Makes, tmp_path: Path) -> None:
    out = tmp_path / "run"
    import_pretrained(made("gpt2").folder, out)
    with pytest.raises(UsageError, match="is not empty; replace it with --force"):
        import_pretrained(made("bert").folder, out)
    assert load_checkpoint(out).model.config.architecture == "decoder-only"
    import_pretrained(made("bert").folder, out, force=True)
    assert load_checkpoint(out).model.config.architecture == "encoder-only"
    assert listing(tmp_path) == {"run", *(f"run/{name}" for name in listing(out))}
    (out / "settings.toml").unlink()
    with pytest.raises(UsageError, match="is not a checkpoint"):
        import_pretrained(made("gpt2").folder, out, force=True)
    with pytest.raises(InputError, match="it is a file"):
        import_pretrained(made("gpt2").folder, out / "config.json", force=True)


@pytest.mark.parametrize("kind", KINDS)
def test_an_imported_run_has_no_training(kind: str, made: Makes) -> None:
    run = made(kind).run
    assert load_checkpoint(run).config is None
    record = json.loads((run / "config.json").read_text())
    assert record["train"] is None
    wanted: dict[str, Any] = {"early_stopping": False, "max_length": 20}
    if kind == "marian":
        wanted["suppress"] = [record["model"]["vocabulary_size"] - 1]
    assert record.get("generation", {}) == ({} if kind == "bert" else wanted)
    result = call("train", "--out", run, "--resume")
    assert result.exit_code == 2
    assert "was imported, so it has no training to continue" in result.stderr


def test_targets_and_prefixes_are_split_by_their_own_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By target.spm, sources by source.spm; the defaults of the search are recorded."""
    monkeypatch.setattr("transferry.export.oracle.effort.RECORDED_LENGTH", 6)
    made = Made("marian", tmp_path, depth=1)  # the time that export takes grows with the layers
    run, bundle, lines = tmp_path / "imported", tmp_path / "bundle", tmp_path / "lines.txt"
    lines.write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    result = done("import", made.folder, "--out", run)
    assert ("marian, " in result.stderr, result.stdout) == (True, "")
    assert call("import", made.folder, "--out", run).exit_code == 2
    assert done("import", made.folder, "--out", run, "--force", "--quiet").stderr == ""
    done("export", run, "--out", bundle, "--text", lines, "--variant", "portable")
    report = done("verify", bundle, *FEW, "--checkpoint", run, "--text", lines).stdout
    assert all(name in report for name in ("greedy", "beam 4"))
    recorded = Reference.load(bundle / REFERENCE).searches
    assert recorded
    assert all("suppress" in item.options for item in recorded)
    engine, scores = Engine(bundle), tmp_path / "scores.jsonl"
    tokenizer, prefix = engine.bundle.tokenizer, "hello world"
    assert tokenizer.encode(prefix) != tokenizer.encode_target(prefix)
    done("score", bundle, lines, "--target", lines, "-o", scores)
    for line, row in zip(LINES, scores.read_text(encoding="utf-8").splitlines(), strict=True):
        assert json.loads(row)["tokens"] == [*tokenizer.encode_target(line), 0]
    options_said = ("--prefix", prefix, "--max-length", "20", "--format", "jsonl")
    given = done("run", bundle, lines, *options_said).stdout.splitlines()
    options = GenerationOptions(
        max_length=20,
        prefix=tuple(tokenizer.encode_target(prefix)),
        suppress=engine.default_options().suppress,
    )
    answers = [row.hypotheses[0].score for row in engine.generate(LINES, options)]
    assert [json.loads(line)["score"] for line in given] == answers
