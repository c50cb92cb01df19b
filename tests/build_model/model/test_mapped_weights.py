"""Mapped weights are the same numbers, and take memory only between reading and release."""

import copy
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.mapped_weights import PAGE, MappedWeights
from transferry.build_model.model.transformer import Transformer


def mapped_bytes() -> int:
    """Bytes of mapped files in this process's memory."""
    found = re.search(r"RssFile:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(0)
    shape: dict[str, Any] = dict(vocabulary_size=3001, d_model=64, heads=2, d_ff=101)
    config = ModelConfig(**shape, encoder_layers=1, decoder_layers=1, max_positions=16)
    return Transformer(config).eval()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def require_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_values_and_identities_stay(model: Transformer, tmp_path: Path) -> None:
    before, parameters = values(model), list(model.parameters())
    model.mapped = MappedWeights(model.parameters(), tmp_path)
    assert not list(tmp_path.iterdir()), "the file has no name"
    require_equal(values(model), before)
    assert all(each is other for each, other in zip(model.parameters(), parameters, strict=True))
    large = [each for each in model.parameters() if each.nbytes >= PAGE]
    assert len(large) > 5
    assert all(each.data_ptr() % PAGE == 0 for each in large)
    model.mapped.release()
    require_equal(values(model), before)


def test_what_is_written_survives_release(model: Transformer, tmp_path: Path) -> None:
    model.mapped = MappedWeights(model.parameters(), tmp_path)
    with torch.no_grad():
        model.embedding.weight[7] = 3.0
    model.mapped.release()
    assert (model.embedding.weight[7] == 3).all()
    assert (model.embedding.weight[8] != 3).all()


def test_a_copy_is_independent(model: Transformer, tmp_path: Path) -> None:
    """And the weights live as long as a tensor does."""
    before = values(model)
    model.mapped = MappedWeights(model.parameters(), tmp_path)
    other, row = copy.deepcopy(model), model.embedding.weight.detach()[5]
    with torch.no_grad():
        other.embedding.weight.zero_()
    require_equal(values(model), before)
    del model, other
    assert torch.equal(row, before["embedding.weight"][5])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_count_between_reading_and_release(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(1 << 23))  # 32 MiB
    begun = mapped_bytes()
    mapped = MappedWeights([weight], tmp_path)
    assert mapped_bytes() - begun < weight.nbytes / 8
    assert float(weight.detach().sum()) == 1 << 23
    assert mapped_bytes() - begun > weight.nbytes * 7 / 8
    mapped.release()
    assert mapped_bytes() - begun < weight.nbytes / 8
