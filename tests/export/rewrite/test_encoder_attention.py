"""Each attention of an encoder becomes one operator, and results stay the same."""

from pathlib import Path
from typing import Any

import pytest

from tests.export.conftest import graphs_of, opened, random_reader, require_torchs_answers, written
from transferry.export.bundle import check_graphs
from transferry.export.rewrite import fused
from transferry.runtime.errors import ParityError
from transferry.runtime.tokenizer.byte_pair import PASSAGES


@pytest.mark.parametrize(
    "changes, fused",
    [
        pytest.param({}, 2, id="padding"),
        pytest.param(dict(positions="none", relative_buckets=8), 2, id="distances"),
        pytest.param(dict(windows=(3, 0), query_key_norm="head"), 2, id="windows"),
        pytest.param(dict(positions="rotary"), 0, id="rotary"),
        pytest.param(dict(key_value_heads=1), 0, id="grouped", marks=pytest.mark.thorough),
        pytest.param(dict(attention_softcap=5.0), 0, id="capped", marks=pytest.mark.thorough),
    ],
)
def test_an_encoder_of_fused_attentions_answers_as_torch(
    changes: dict[str, Any], fused: int, tmp_path: Path
) -> None:
    model = random_reader(**changes)
    graphs = graphs_of(model)
    operators = [node.op_type for node in graphs["encoder"].model.graph]
    assert operators.count("Attention") == fused
    assert operators.count("Softmax") == 2 - fused
    if fused:
        assert operators.count("MatMul") == 0
        assert operators.count("Expand") <= 2  # the bias is repeated once, not in every layer
    bundle = written(tmp_path, model, "cpu-fp32", graphs)
    check_graphs(bundle, bundle.variant())
    sizes = [(1, 1, 0), (3, 7, 0), (2, 13, 2)]
    require_torchs_answers(model, opened(bundle), PASSAGES, sizes)


def test_an_attention_written_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "KEYS_IN_HEADS", [0, 2, 1, 3])
    with pytest.raises(ParityError, match=r"cpu-fp32: expected 2 attentions of the enc.*found 0"):
        graphs_of(random_reader())


def test_a_variant_for_a_gpu_keeps_what_every_provider_has() -> None:
    graphs = graphs_of(random_reader(), "cuda-fp16")
    operators = {node.op_type for node in graphs["encoder"].model.graph}
    assert "Softmax" in operators
    assert "Attention" not in operators
