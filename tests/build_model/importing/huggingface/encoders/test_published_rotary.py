"""Rotary encoders as they were published, with code of their own that transformers replaced.

The settings are those of nomic-embed-text-v1.5 and gte-multilingual-base; transformers' own class
with the equivalent settings of its own is the reference. NTK scaling (kexue.fm/archives/9706) has
no name in transformers: the base times s, and rates divided by s^(2 / width), which is "linear".
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.build_model.importing.huggingface.drawn import VOCABULARY, Drawn, require_same_logits
from transferry.build_model.importing.huggingface.folder import CONFIG, PretrainedFolder, Settings
from transferry.build_model.importing.huggingface.importer import FAMILIES
from transferry.build_model.importing.huggingface.rope import FIXED_NTK, RotaryKeys, read_rotary
from transferry.build_model.importing.huggingface.settings_table import judge
from transferry.build_model.model.config import ModelConfig
from transferry.runtime.errors import InputError

NOMIC: dict[str, Any] = {
    **dict.fromkeys(("prenorm", "parallel_block", "use_rms_norm", "causal"), False),
    **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), False),
    **dict.fromkeys(("fused_bias_fc", "fused_dropout_add_ln", "use_flash_attn"), True),
    "rotary_emb_base": 500.0,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "n_positions": 64,
    "n_embd": 32,
    "n_head": 4,
    "n_inner": 48,
    "n_layer": 2,
    "layer_norm_epsilon": 1e-7,
    "max_trained_positions": 40,
    "pad_vocab_size_multiple": 1,
    "dense_seq_output": True,
    "activation_function": "swiglu",
    "use_xentropy": True,
    "vocab_size": VOCABULARY,
    "type_vocab_size": 2,
    "model_type": "nomic_bert",
    "auto_map": {"AutoModel": "a.B"},
}
GTE: dict[str, Any] = {
    "model_type": "new",
    "position_embedding_type": "rope",
    "pack_qkv": True,
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
    "unpad_inputs": True,
    "logn_attention_clip1": False,
    "use_memory_efficient_attention": True,
    "rope_theta": 200.0,
    "rope_scaling": {"type": "ntk", "factor": 8.0},
}
SIZES: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}


def rope(base: float, **scaling: Any) -> dict[str, Any]:
    return {"rope_theta": base, "rope_type": "linear" if scaling else "default", **scaling}


def shape_of(kind: str, folder: Path, record: dict[str, Any]) -> ModelConfig:
    """Returns the shape by the published settings; every one of them is read or known."""
    settings = Settings(folder / CONFIG, record)
    shape = FAMILIES[kind].shape(settings, PretrainedFolder(folder).names())
    judge(CONFIG, settings)
    return shape


@torch.inference_mode()
def test_nomic_embed_text_as_published(tmp_path: Path) -> None:
    own: dict[str, Any] = {"num_hidden_layers": 2, "layer_norm_eps": 1e-7, "hidden_act": "silu"}
    drawn = Drawn("nomic_bert", 0, tmp_path, rope_parameters=rope(500.0), **SIZES, **own)
    require_same_logits(drawn.ours, drawn.theirs)
    assert shape_of("nomic_bert", tmp_path, dict(NOMIC)) == drawn.shape
    longest = shape_of("nomic_bert", tmp_path, NOMIC | {"rotary_scaling_factor": 2.0}).max_positions
    assert longest == 40  # from there on, the rates depend on the length of a text


@torch.inference_mode()
def test_gte_as_published(tmp_path: Path) -> None:
    scaled = rope(200.0 * 8, factor=8 ** (2 / 8))
    drawn = Drawn("gte", 0, tmp_path, rope_parameters=scaled, hidden_act="gelu", **SIZES)
    require_same_logits(drawn.ours, drawn.theirs)
    record = {**drawn.settings.values, **GTE}
    del record["rope_parameters"]
    shape = shape_of("new", tmp_path, record)
    assert shape.rotary_rates == pytest.approx(drawn.shape.rotary_rates)
    same: dict[str, Any] = {
        "rotary_rates": drawn.shape.rotary_rates,
        "rotary_base": drawn.shape.rotary_base,
    }
    assert replace(shape, **same) == drawn.shape


def test_mixed_ntk_keeps_the_sum_of_its_logarithms() -> None:
    """Equation 13 chooses a so that the slowest pair is slowed down by the factor."""
    scaling = {"type": "ntk", "factor": 4.0, "mixed_b": 0.625}
    settings = Settings(Path(CONFIG), {"rope_scaling": scaling, "rope_theta": 100.0})
    keys = RotaryKeys(renamed={"ntk": FIXED_NTK})
    rates = read_rotary(settings, 16, 64, keys).rates
    usual = read_rotary(Settings(Path(CONFIG), {"rope_theta": 100.0}), 16, 64).rates
    slowed = [plain / rate for plain, rate in zip(usual, rates, strict=True)]
    assert slowed[-1] == pytest.approx(4.0)
    assert slowed[0] == pytest.approx(4.0 ** (1 / 8**0.625))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_every_n_layers", 2),
        ("prenorm", True),
        ("qkv_proj_bias", True),
        ("rotary_emb_interleaved", True),
        ("activation_function", "gelu"),
        ("rotary_scaling", 3),
    ],
)
def test_other_nomic_models_are_refused_by_name(name: str, value: Any, tmp_path: Path) -> None:
    def published(record: dict[str, Any]) -> None:
        record.update({name: value})

    with pytest.raises(InputError, match=name):
        drawn = Drawn("nomic_bert", 0, tmp_path, rewrite=published)
        judge(CONFIG, drawn.settings)
