"""The graphs of a variant against those that export makes of the checkpoint now.

A fault may wait for a batch or a pair of tokens that no case has, or hide in the tolerance of
a reduced precision. But the same run and versions give the same graphs, so that an operator, an
attribute or an edge that differs is a fault whatever it does to the answers. What export itself
gets wrong, the comparison with torch shows; that nothing waits for a token, `tokens_claim`.
"""

import importlib.metadata
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import onnx
import onnx_ir as ir

from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.transformer import Transformer
from transferry.export.make import add_one_graph, make
from transferry.export.recipes import RECIPES
from transferry.export.rewrite.calibration import Calibration
from transferry.export.trace.canonical import Canonical, GraphForm, NodeForm, label
from transferry.export.trace.editing import KERNELS, of_weights
from transferry.export.trace.graph import Graph, Traces
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import ONE_GRAPH, GraphSpec, Variant
from transferry.runtime.proof.certificates.strength import GRAPHS
from transferry.runtime.proof.one_graph import beams_of
from transferry.runtime.proof.report import Claim

UNLIKE = "holds a graph unlike the one that export writes"
MOST_SHOWN = 60  # characters of an attribute in a message
LEFT_OUT = "left out to save time"
TOKENS = "token ids"
# Operators that move token ids without looking at them.
MOVES = {"Cast", "Concat", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}
# Graphs that export makes now, by name; None if they are not compared.
Fresh = Mapping[str, Graph] | None
# Packages that decide the graphs.
WRITERS = ("transferry", "torch", "onnx", "onnxscript")


def fresh_graphs(
    model: Transformer,
    bundle: Bundle,
    variant: Variant,
    calibration: Calibration | None,
    traces: Traces | None = None,
) -> Fresh:
    """Exports the graphs of a variant anew, for `graphs_claim`.

    Returns:
        The graphs by name; None if the bundle was exported with other versions, whose graphs may
        differ.
    """
    if other_versions(bundle) or variant.name not in RECIPES:
        return None
    made = make(model, RECIPES[variant.name], traces, calibration)
    if whole := variant.graphs.get(ONE_GRAPH):
        special, generation = bundle.tokenizer.special, bundle.manifest.generation
        add_one_graph(made, model.config, special, generation, beams_of(whole))
    return made


def other_versions(bundle: Bundle) -> str:
    """Names the first package whose version here is not the one that wrote a bundle's graphs."""
    for name in WRITERS:
        written = bundle.manifest.versions.get(name, "an unknown version")
        here = importlib.metadata.version(name)
        if _release(written) != _release(here):
            return f"the bundle was exported with {name} {written}, here is {here}; export it again"
    return ""


def _release(version: str) -> str:
    """Returns a version without its local label: 2.13.0+cpu writes the graphs of 2.13.0+cu130."""
    return version.partition("+")[0]


def graphs_claim(fresh: Fresh, bundle: Bundle, variant: Variant) -> Claim:
    """Compares the graphs of a variant with those of `fresh_graphs`.

    Names and the order of independent nodes may differ. Large weights are left out:
    `weights_claim` compares them.
    """
    if fresh is None:
        return Claim(GRAPHS, skipped=other_versions(bundle) or LEFT_OUT)
    if fresh.keys() != variant.graphs.keys():
        return Claim(GRAPHS, f"expected {', '.join(fresh)}, found {', '.join(variant.graphs)}")
    opset = next(iter(fresh.values())).model.opset_imports[""]
    if variant.opset != opset:
        return Claim(GRAPHS, f"the manifest names opset {variant.opset}, export writes {opset}")
    for name, graph in fresh.items():
        if problem := _problem(graph, bundle, variant.graphs[name]):
            found = f"{name}: {problem}"
            return Claim(GRAPHS, found, f"{UNLIKE}: {found}; do not deploy it")
    return Claim(GRAPHS, "")


def tokens_claim(config: ModelConfig, bundle: Bundle, variant: Variant) -> Claim:
    """Requires that token ids choose rows of weights, and nothing else.

    A graph that compares them answers otherwise where some tokens meet, which no text may show. The
    tokens of the configuration that end segments, pad, or are unseen by all others are excepted,
    and so is the search in the graph `generate`.
    """
    marks = {config.padding_token, config.unseen_token}
    marks |= {config.segment_end} if config.segments else set()
    for name, spec in variant.graphs.items():
        if name == ONE_GRAPH:
            continue
        given = {*spec.names("source"), *spec.names("target")}
        inputs = ir.load(bundle.graph(spec)).graph.inputs
        waiting = [value for value in inputs if value.name in given]
        while waiting:
            for node, place in waiting.pop().uses():
                if node.op_type in MOVES and (place == 0 or node.op_type == "Concat"):
                    waiting += node.outputs
                elif not _harmless(node, place, marks):
                    found = f"{name}: {node.op_type} {node.outputs[0].name} reads token ids"
                    verdict = f"holds a graph that waits for tokens: {found}; do not deploy it"
                    return Claim(TOKENS, found, verdict)
    return Claim(TOKENS)


def _harmless(node: ir.Node, place: int, marks: Collection[int]) -> bool:
    """Whether a node that reads token ids looks up weights, sizes, or one of some marks."""
    other = node.inputs[1 - place] if node.op_type in ("Gather", "Equal") else None
    if node.op_type == "Gather":
        return place == 1 and other is not None and of_weights(other)
    if node.domain == KERNELS:  # a kernel that reads their shape, or rows of weights
        counted = bool(place) and not node.attributes.get_int("counted", 0)
        looks_up = node.op_type == "Embed" and not counted and all(map(of_weights, node.inputs[2:]))
        return looks_up or (node.op_type == "LinearToHeads" and place == len(node.inputs) - 1)
    constant = ir.convenience.get_const_tensor(other) if other is not None else None
    compared = constant is not None and constant.size == 1 and constant.numpy().item() in marks
    return compared or node.op_type == "Shape"


def _problem(graph: Graph, bundle: Bundle, spec: GraphSpec) -> str:
    """Describes the first difference of a stored graph; empty without one."""
    if graph.spec != spec:
        return "the manifest lists other inputs, outputs or another file than export writes"
    path = bundle.graph(spec)
    if problem := irregular(onnx.load(path, load_external_data=False)):
        return problem
    wanted = graph.canonical
    found = Canonical(ir.load(path), wanted)
    if problem := _difference(wanted.graph, found.graph):
        return problem
    differing = (part for part in wanted.rest if wanted.rest[part] != found.rest[part])
    if (part := next(differing, None)) is not None:
        return f"has another {part} than export writes"
    declared: dict[str, list[Any]] = {}
    for each in wanted.graph.everywhere():
        declared.setdefault(each.digest, []).extend(each.declared())
    for each in found.graph.everywhere():
        # Writers may leave types and shapes out; runtimes infer them.
        for value, kind in zip(each.node.outputs, each.declared(), strict=True):
            known = declared.get(each.digest, [])
            if any(kind) and not any(_fits(kind, one) for one in known):
                said = " ".join(filter(None, kind))
                return f"{_named(each)}: {value.name} is declared as {said}, unlike by export"
    return ""


def _fits(declared: Sequence[str], wanted: Sequence[str]) -> bool:
    both = zip_longest(declared, wanted, fillvalue="")
    return all(one in ("", other) for one, other in both)


def _difference(wanted: GraphForm, found: GraphForm) -> str:
    """Describes the first node that differs, or an end of the graph."""
    missing = Counter(each.digest for each in wanted.nodes)
    missing.subtract(each.digest for each in found.nodes)
    extra = {digest for digest, count in missing.items() if count < 0}
    # Digests hold all that lies before a node, so the first one differs in itself.
    wrong = next((each for each in found.nodes if each.digest in extra), None)
    lacking = [each for each in wanted.nodes if missing[each.digest] > 0]
    if wrong is not None:
        names = {value.name for value in wrong.node.outputs}
        likely = (each for each in lacking if names & {value.name for value in each.node.outputs})
        right = next(likely, lacking[0] if lacking else None)
        return f"{_named(wrong)}: {_parts(right, wrong) if right else 'export writes no such node'}"
    if lacking:
        return f"lacks {_named(lacking[0])}, which export writes"
    differing = (part for part in wanted.ends if wanted.ends[part] != found.ends[part])
    part = next(differing, "")
    return f"has other {part} than export writes" if part else ""


def _parts(wanted: NodeForm, found: NodeForm) -> str:
    """Describes the first part in which two nodes differ."""
    for part in (*wanted.parts, *found.parts):
        if wanted.parts.get(part) == found.parts.get(part):
            continue
        if part in wanted.bodies and part in found.bodies:
            inside = _difference(wanted.bodies[part], found.bodies[part])
            return f"{part}: {inside}"
        kind, _, number = part.partition(" ")
        if kind == "input":
            shown = [
                label(dict(enumerate(each.node.inputs)).get(int(number)))
                for each in (wanted, found)
            ]
        elif kind == "operator":
            shown = [each.node.op_type for each in (wanted, found)]
        else:
            shown = [_shown(each.node.attributes.get(number)) for each in (wanted, found)]
        if shown[0] == shown[1]:
            return f"{part} differs from export's"
        return f"{part} is {shown[1]}, export writes {shown[0]}"
    return "export writes it another number of times"


def _named(form: NodeForm) -> str:
    return f"{form.node.op_type} {form.node.outputs[0].name if form.node.outputs else ''}".strip()


def _shown(attribute: ir.Attr | None) -> str:
    text = "absent" if attribute is None else str(attribute.value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def irregular(model: onnx.ModelProto) -> str:
    """Describes content of a file that readers understand differently; empty without any.

    onnx_ir drops fields that onnxruntime reads, and of two entries of one name takes either.
    """
    known = onnx.ModelProto()
    known.CopyFrom(model)
    known.DiscardUnknownFields()
    if known.ByteSize() != model.ByteSize():
        return "holds fields that onnx does not know"
    if model.training_info or model.configuration:
        return "holds a training or a configuration of devices"
    for graph in _graphs(model):
        named = [each.name for each in graph.initializer]
        values = [each.name for each in graph.value_info]
        if graph.sparse_initializer or graph.quantization_annotation:
            return "holds sparse or annotated tensors"
        if any(len({*names}) < len(names) or "" in names for names in (named, values)):
            return "names two tensors alike"
        tensors = [*graph.initializer]
        for node in graph.node:
            names = [each.name for each in node.attribute]
            if len({*names}) < len(names):
                return f"{node.op_type} {node.name} has an attribute twice"
            tensors += [each for one in node.attribute for each in (one.t, *one.tensors)]
        for tensor in tensors:
            keys = sorted(each.key for each in tensor.external_data)
            if keys not in ([], ["length", "location", "offset"]):
                return f"{tensor.name} lies outside of the graph at {', '.join(keys)}"
            kinds = tensor.raw_data, tensor.float_data, tensor.int32_data, tensor.int64_data
            if sum(map(bool, (*kinds, tensor.double_data, tensor.uint64_data, keys))) > 1:
                return f"{tensor.name} has its content twice"
    return ""


def _graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    waiting = [model.graph]
    # Functions have no tensors of their own besides those of their nodes.
    waiting += [onnx.GraphProto(node=function.node) for function in model.functions]
    while waiting:
        graph = waiting.pop()
        yield graph
        for node in graph.node:
            for attribute in node.attribute:
                waiting += attribute.graphs
                if attribute.type == onnx.AttributeProto.GRAPH:
                    waiting.append(attribute.g)
