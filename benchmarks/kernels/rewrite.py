"""Rewrites the graphs of a bundle's variant cpu-int8 to the custom operators of this folder.

    python benchmarks/kernels/rewrite.py bundles/small bundles/kernels

OUT is a copy of BUNDLE in which chains of standard operators are one node of domain
transferry.kernels each. A chain that the kernels cannot compute stays as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import GraphProto, NodeProto, helper, numpy_helper

from transferry.runtime.bundle.bundle import read_manifest
from transferry.runtime.errors import TransferryError, UsageError

DOMAIN, VARIANT = "transferry.kernels", "cpu-int8"
# Sizes that are multiples of 16 fill the vectors of the kernels.
LANES, MAX_HEAD_WIDTH = 16, 256
# Operators of a decoder's attention for several tokens or beams: without rotations, or biases
# other than the mask.
PRODUCTS = ("Transpose", "MatMul", "Add", "Softmax", "Cast", "MatMul", "Transpose", "Reshape")
SELF_ATTENTION = (
    *("Split", "Reshape", "Reshape", "QuantizeLinear", "ScatterND", "QuantizeLinear", "ScatterND"),
    *("Reshape", "Transpose", "Cast", *PRODUCTS),
)
CROSS_ATTENTION = ("Reshape", "Transpose", "Cast", *PRODUCTS, "Identity", "Identity")
# Attributes of attention that the kernels compute, beside the numbers of heads.
PLAIN_ATTENTION = {
    "scale": 1.0,
    "local_window_size": -1,
    "softcap": 0.0,
    "kv_cache_bit_width": 8,
    "k_quant_type": b"PER_TENSOR",
    "v_quant_type": b"PER_TENSOR",
}


class Rewriter:
    """Replaces chains of nodes of one graph, from its first node to its last."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model, self.graph = model, model.graph
        self.producers = {name: node for node in self.graph.node for name in node.output}
        self.users: dict[str, list[NodeProto]] = {}
        for node in self.graph.node:
            for name in node.input:
                self.users.setdefault(name, []).append(node)
        self.outputs = {value.name: value for value in self.graph.output}
        self.constants = constants(self.graph)
        self.new: dict[str, NDArray[Any]] = {}
        self.nodes: list[NodeProto] = []
        self.replaced: set[str] = set()  # outputs of nodes within a chain

    def rewrite(self) -> Counter[str]:
        """Rewrites the graph; returns the number of its custom operators, by name."""
        for node in self.graph.node:
            if node.output[0] not in self.replaced and not self.replace(node):
                self.nodes.append(node)
        del self.graph.node[:]
        self.graph.node.extend(live(self.nodes, set(self.outputs)))
        used = set(inputs(self.graph)) | set(self.outputs)
        kept = [one for one in self.graph.initializer if one.name in used - self.new.keys()]
        del self.graph.initializer[:]
        self.graph.initializer.extend(kept)
        self.graph.initializer.extend(
            numpy_helper.from_array(np.ascontiguousarray(value), name)
            for name, value in self.new.items()
            if name in used
        )
        self.model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
        return Counter(node.op_type for node in self.graph.node if node.domain == DOMAIN)

    def replace(self, node: NodeProto) -> bool:
        """Appends the custom operator of the chain that begins, or for If is, at a node."""
        match node.op_type:
            case "MatMulIntegerToFloat":
                return self.linear(node)
            case "If":
                return self.decoder_attention(node)
            case "Attention":
                return self.encoder_attention(node)
            case "Reshape":
                return self.embedding(node)
        return False

    def linear(self, node: NodeProto) -> bool:
        """Adds a linear layer, with the nodes after it that can join it."""
        quantizer = self.producers[node.input[0]]
        weight = self.constants.get(node.input[1])
        if quantizer.op_type != "QuantizeLinear" or weight is None or leaves_lanes(*weight.shape):
            return False
        given = [quantizer.input[0], *self.weights(quantizer, node)]
        following = self.following(node.output[0])
        match [one.op_type for one in following[:3]]:
            case ["Add", "LayerNormalization", *_]:
                self.norm(given, node.output[0], *following[:2])
            case ["QuantizeLinear", "Reshape", "Transpose"] if self.is_cache(following):
                width = self.shape(following[2].output[0])[3]
                self.add("LinearToHeads", [*given, "source"], following[2].output, width=width)
                self.replaced |= {one.output[0] for one in following[:3]}
            case _:
                self.add("Linear", given, node.output)
        return True

    def norm(self, given: list[str], product: str, add: NodeProto, norm: NodeProto) -> None:
        """Joins a linear layer, the residual and a normalisation; of an FFN, both layers."""
        residual = next(name for name in add.input if name != product)
        epsilon, gamma_beta = attributes(norm)["epsilon"], norm.input[1:3]
        self.replaced |= {add.output[0], norm.output[0]}
        inner = next((one for one in self.nodes if given[0] in one.output), None)
        alone = len(self.users[given[0]]) == 1
        if inner and alone and (inner.op_type, inner.input[0]) == ("Linear", residual):
            self.nodes.remove(inner)
            given = [*inner.input, *given[1:], *gamma_beta]
            self.add("FeedForward", given, norm.output, epsilon=epsilon)
        else:
            self.add("LinearNorm", [*given, residual, *gamma_beta], norm.output, epsilon=epsilon)

    def is_cache(self, following: list[NodeProto]) -> bool:
        """Whether QuantizeLinear, Reshape, Transpose are the encoder's output to the cache."""
        width = self.shape(following[2].output[0])[3:]
        return self.rounds(following[0]) and bool(width) and is_head_width(width[0])

    def decoder_attention(self, node: NodeProto) -> bool:
        """Adds self- or cross-attention over the int8 cache, both branches of it."""
        branches = attributes(node)
        several = tuple(one.op_type for one in branches["else_branch"].node)
        single = branches["then_branch"].node
        attention = next((one for one in single if one.op_type == "GroupQueryAttention"), None)
        if attention is None or several not in (SELF_ATTENTION, CROSS_ATTENTION):
            return False
        width = self.shape(attention.input[3])[3]
        rounds = all(self.rounds(one) for one in branches["else_branch"].node)
        if not (rounds and is_plain(attention) and is_head_width(width)):
            return False
        query = next(one for one in single if one.op_type == "Reshape").input[0]
        given = [query, *attention.input[3:5]]
        if several == SELF_ATTENTION:
            given += ["positions", "cells", "bias", "single"]
            self.add("SelfAttention", given, node.output, width=width)
        else:
            self.add("CrossAttention", [*given, "source_bias"], node.output, width=width)
        return True

    def encoder_attention(self, node: NodeProto) -> bool:
        """Adds attention over the source, without padding."""
        mask = self.chain(node.input[3], "Expand", "Unsqueeze", "Where", "Not")
        following = self.following(node.output[0])
        if not mask or mask[-1].input[0] != "source_mask" or not is_plain(node):
            return False
        given = [self.producers[name].input[0] for name in node.input[:3]]
        layer = self.producers.get(given[1])
        if layer is None or layer.op_type != "MatMulIntegerToFloat":
            return False
        d_model = self.constants[layer.input[1]].shape[1]
        width = d_model // attributes(node)["q_num_heads"]
        if [one.op_type for one in following[:1]] != ["Reshape"] or not is_head_width(width):
            return False
        self.replaced.add(following[0].output[0])
        given.append("source_mask")
        self.add("EncoderAttention", given, following[0].output, width=width)
        return True

    def embedding(self, node: NodeProto) -> bool:
        """Adds lookups in the int8 table and in the positions' table, and their sum."""
        chain = self.chain(node.input[0], "Add", "Mul", "Mul", "Cast", "Gather")
        if not chain:
            return False
        total, factor, scaled, _, table = chain
        scales = self.producers[scaled.input[1]]
        places = self.chain(total.input[1], "Gather")
        if not places or leaves_lanes(self.constants[table.input[0]].shape[1]):
            return False
        counted = bool(self.chain(places[0].input[1], "Range"))
        ids = table.input[1]
        given = [
            *(ids, ids if counted else places[0].input[1], table.input[0]),
            self.constant(scales.input[0] + ".flat", self.constants[scales.input[0]].ravel()),
            *(factor.input[1], places[0].input[0]),
        ]
        self.add("Embed", given, node.output, counted=int(counted))
        return True

    def weights(self, quantizer: NodeProto, product: NodeProto) -> list[str]:
        """Inputs of a linear layer: scale and zero of x, weights, scales of products, bias."""
        _, weight, input_scale, scales, _, _, *bias = product.input
        value = self.constants[weight].T
        none = np.zeros(len(value), np.float32)
        name = product.output[0]
        return [
            *(quantizer.input[1], quantizer.input[2], self.constant(f"{name}.weight", value)),
            self.constant(f"{name}.scales", self.constants[input_scale] * self.constants[scales]),
            self.constant(f"{name}.bias", self.constants[bias[0]] if any(bias) else none),
        ]

    def constant(self, name: str, value: NDArray[Any]) -> str:
        """Adds an initializer; returns its name."""
        self.new[name] = value
        return name

    def add(self, kind: str, given: list[str], outputs: Iterable[str], **settings: Any) -> None:
        """Appends a custom operator."""
        self.nodes.append(helper.make_node(kind, given, list(outputs), domain=DOMAIN, **settings))

    def chain(self, name: str, *kinds: str) -> list[NodeProto]:
        """Nodes of these operators that make a value, each the first input of the one before."""
        found: list[NodeProto] = []
        for kind in kinds:
            node = self.producers.get(name)
            if node is None or node.op_type != kind:
                return []
            found.append(node)
            name = node.input[0]
        return found

    def following(self, name: str) -> list[NodeProto]:
        """Up to three nodes after a value, each the only user of the one before."""
        found: list[NodeProto] = []
        while len(found) < 3 and name not in self.outputs and len(self.users.get(name, [])) == 1:
            found.append(self.users[name][0])
            name = found[-1].output[0]
        return found

    def rounds(self, node: NodeProto) -> bool:
        """Whether a node, if it is a QuantizeLinear, rounds to int8 with scale 1 and zero 0."""
        if node.op_type != "QuantizeLinear":
            return True
        scale, zero = (self.constants[name] for name in node.input[1:3])
        return bool(np.all(scale == 1) and np.all(zero == 0) and zero.dtype == np.int8)

    def shape(self, name: str) -> list[int]:
        """Sizes of an input or output of the graph; 0 for a symbolic one."""
        values = {value.name: value for value in (*self.graph.input, *self.graph.output)}
        dims = values[name].type.tensor_type.shape.dim if name in values else ()
        return [dim.dim_value for dim in dims]


def constants(graph: GraphProto) -> dict[str, NDArray[Any]]:
    """Values of initializers, and of the nodes that depend on them alone."""
    found = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    for node in graph.node:
        if not node.input or not all(name in found for name in node.input):
            continue
        values = [found[name] for name in node.input]
        match node.op_type:
            case "Div":
                found[node.output[0]] = values[0] / values[1]
            case "Mul":
                found[node.output[0]] = values[0] * values[1]
            case "Concat":
                found[node.output[0]] = np.concatenate(values, attributes(node)["axis"])
            case "Transpose":
                found[node.output[0]] = values[0].T
    return found


def attributes(node: NodeProto) -> dict[str, Any]:
    """Returns the attributes by name."""
    return {one.name: helper.get_attribute_value(one) for one in node.attribute}


def is_plain(attention: NodeProto) -> bool:
    """Whether each query head has its own keys, and nothing but a scale of 1 besides."""
    found = attributes(attention)
    heads = {found.pop(name, None) for name in ("num_heads", "q_num_heads", "kv_num_heads")}
    return len(heads - {None}) == 1 and found.items() <= PLAIN_ATTENTION.items()


def leaves_lanes(*sizes: int) -> bool:
    """Whether a size does not fill the kernels' vectors."""
    return any(size % LANES for size in sizes)


def is_head_width(width: int) -> bool:
    """Whether the kernels have heads of this width."""
    return 0 < width <= MAX_HEAD_WIDTH and not leaves_lanes(width)


def inputs(graph: GraphProto) -> Iterator[str]:
    """Names that the nodes read, within branches too."""
    for node in graph.node:
        yield from node.input
        for value in attributes(node).values():
            if isinstance(value, GraphProto):
                yield from inputs(value)
                yield from (one.name for one in value.output)


def live(nodes: list[NodeProto], outputs: set[str]) -> list[NodeProto]:
    """The nodes on which outputs depend."""
    kept, used = [], set(outputs)
    for node in reversed(nodes):
        if used.intersection(node.output):
            kept.append(node)
            used.update(inputs(helper.make_graph([node], "", [], [])))
    return kept[::-1]


def rewrite(bundle: Path, out: Path) -> None:
    """Copies a bundle and rewrites its int8 graphs.

    Raises:
        UsageError: OUT exists, or BUNDLE is no encoder-decoder with a variant cpu-int8.
    """
    if out.exists():
        raise UsageError(f"expected a new folder, found {out}")
    manifest = json.loads(read_manifest(bundle))
    if manifest["architecture"] != "encoder-decoder" or VARIANT not in manifest["variants"]:
        raise UsageError(
            f"expected an encoder-decoder with the variant {VARIANT}, found {bundle}; export "
            "another bundle"
        )
    shutil.copytree(bundle, out)
    for name in ("encoder", "decoder", "lm_head"):
        file = manifest["variants"][VARIANT]["graphs"][name]["file"]
        model = onnx.load(bundle / file)  # with external weights
        before = len(model.graph.node)
        counts = Rewriter(model).rewrite()
        onnx.save(model, out / file)
        content = (out / file).read_bytes()
        manifest["files"][file] = {
            "sha256": hashlib.sha256(content).hexdigest(),
            "size": len(content),
        }
        made = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        print(f"{name}: {before} nodes to {len(model.graph.node)}, of them {made or 'no kernels'}")
    text = json.dumps(manifest, indent=1)
    (out / "manifest.json").write_text(text, encoding="utf-8")


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], epilog=f"example: {__doc__.splitlines()[2].strip()}"
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="with a variant cpu-int8")
    parser.add_argument("out", type=Path, metavar="OUT", help="new folder")
    arguments = parser.parse_args()
    try:
        rewrite(arguments.bundle, arguments.out)
    except TransferryError as error:
        parser.exit(error.exit_code, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
