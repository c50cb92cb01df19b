"""Weights are stored once, page-aligned, and byte for byte as in the checkpoint."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from transferry.export.trace.store import SMALLEST, WEIGHTS, Places, write_graphs

Place = tuple[int, int]


def places(path: Path) -> dict[str, Place]:
    """Offset and length of every initializer in weights.bin."""
    found = {}
    for tensor in onnx.load(path, load_external_data=False).graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entry = {item.key: item.value for item in tensor.external_data}
            assert entry["location"] == WEIGHTS
            found[tensor.name] = (int(entry["offset"]), int(entry["length"]))
    return found


def arrays(path: Path) -> dict[str, NDArray[np.generic]]:
    """Every initializer as onnx itself loads it."""
    tensors = onnx.load(path).graph.initializer
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in tensors}


def graph(**initializers: NDArray[np.generic]) -> ir.Model:
    """A graph whose outputs are its initializers."""
    helper = onnx.helper
    outputs, nodes, tensors = [], [], []
    for name, array in initializers.items():
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        outputs.append(helper.make_tensor_value_info(f"{name}_out", kind, array.shape))
        nodes.append(helper.make_node("Identity", [name], [f"{name}_out"]))
        tensors.append(onnx.numpy_helper.from_array(array, name))
    made = helper.make_graph(nodes, "graph", [], outputs, tensors)
    return ir.from_proto(helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)]))


def test_equal_bytes_share_a_place_whatever_their_shape(tmp_path: Path) -> None:
    values = np.arange(SMALLEST, dtype=np.float32).reshape(2, -1)
    other = values.reshape(-1, 4)
    one, two = tmp_path / "one.onnx", tmp_path / "two.onnx"
    write_graphs([(graph(a=values, other=values + 1), one), (graph(b=other), two)])
    assert places(one)["a"] == places(two)["b"] == (0, 4096)
    assert places(one)["other"] == (4096, 4096)
    assert (tmp_path / WEIGHTS).stat().st_size == 8192
    np.testing.assert_array_equal(arrays(one)["a"], values, strict=True)
    np.testing.assert_array_equal(arrays(two)["b"], other, strict=True)


def test_graphs_written_one_after_another_give_the_same_files(tmp_path: Path) -> None:
    """Beside each other, in two folders."""
    values = np.arange(SMALLEST, dtype=np.float32)

    def graphs(folder: Path) -> list[tuple[ir.Model, Path]]:
        folder.mkdir()
        one, two = graph(a=values, b=values[:300]), graph(c=values + 1, d=values)
        return [
            (one, folder / "x" / "one.onnx"),
            (graph(e=values), folder / "y" / "other.onnx"),
            (two, folder / "x" / "two.onnx"),
        ]

    write_graphs(graphs(tmp_path / "together"))
    written: dict[Path, Places] = {}
    for each in graphs(tmp_path / "apart"):
        write_graphs([each], written)
    files = [path for path in (tmp_path / "together").rglob("*") if path.is_file()]
    assert len(files) == 5
    for path in files:
        other = tmp_path / "apart" / path.relative_to(tmp_path / "together")
        assert other.read_bytes() == path.read_bytes(), path


def test_odd_lengths_are_followed_by_padding(tmp_path: Path) -> None:
    first, second = np.ones(300, np.float32), np.full(257, 2.0, np.float32)
    write_graphs([(graph(first=first, second=second), tmp_path / "graph.onnx")])
    assert places(tmp_path / "graph.onnx") == {"first": (0, 1200), "second": (4096, 1028)}
    np.testing.assert_array_equal(arrays(tmp_path / "graph.onnx")["second"], second, strict=True)


@pytest.mark.parametrize(("count", "outside"), [(SMALLEST // 4 - 1, False), (SMALLEST // 4, True)])
def test_a_page_is_spent_on_large_tensors_only(tmp_path: Path, count: int, outside: bool) -> None:
    values = np.arange(count, dtype=np.float32)
    write_graphs([(graph(values=values), tmp_path / "graph.onnx")])
    assert ("values" in places(tmp_path / "graph.onnx")) is outside
    np.testing.assert_array_equal(arrays(tmp_path / "graph.onnx")["values"], values, strict=True)
