"""Layout of a folder of foreign graphs: purposes of graphs, and meanings of their tensors."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypedDict

import onnx_ir as ir
from msgspec import defstruct
from msgspec.structs import asdict

from transferry.runtime.errors import InputError
from transferry.runtime.io.documents import checked, read_document
from transferry.runtime.precision import FLOAT32, PRECISIONS
from transferry.runtime.settings import read_toml

# Names as optimum and the builder of onnxruntime-genai write them.
INPUTS = {
    "input_ids": "tokens",
    "decoder_input_ids": "tokens",
    "attention_mask": "mask",
    "position_ids": "positions",
    "token_type_ids": "segments",
    "encoder_hidden_states": "states",
    "encoder_attention_mask": "states_mask",
    "use_cache_branch": "use_cache",
}
OUTPUTS = {
    "logits": "logits",
    "last_hidden_state": "hidden",
    "token_embeddings": "hidden",
    "sentence_embedding": "head",
}
PAST, PRESENT = "past_key_values", "present"
# Tables of a TOML file: names by meaning.
TABLES = [
    defstruct(
        side,
        [
            *((role, str, "") for role in dict.fromkeys(roles.values())),
            (cache, str | list[str], []),
        ],
        forbid_unknown_fields=True,
    )
    for side, roles, cache in (("Inputs", INPUTS, "past"), ("Outputs", OUTPUTS, "present"))
]
NAMES = defstruct(
    "Names", [*zip(("inputs", "outputs"), TABLES, strict=True)], forbid_unknown_fields=True
)
# Files by purpose, the first that exists; a merged decoder does both steps.
ENCODERS = ("encoder_model.onnx",)
DECODERS = ("decoder_model_merged.onnx", "decoder_model.onnx")
STEPS = ("decoder_with_past_model.onnx",)
ALONE = ("model.onnx", "decoder_model_merged.onnx", "decoder_model.onnx")
GENAI = "genai_config.json"
CTRANSLATE2 = "model.bin"  # its file of weights
# Operators that read weights of few bits, and which input these are; `bits` says how many.
BITS = "MatMulNBits"
PACKED = {BITS: 1, "GatherBlockQuantized": 0}
LINEAR = frozenset({"QuantizeLinear", "DequantizeLinear"})
EIGHT_BITS = frozenset({ir.DataType.INT8, ir.DataType.UINT8})
FOUR_BITS = frozenset({ir.DataType.INT4, ir.DataType.UINT4})
COUNTING = "GroupQueryAttention"  # reads the number of tokens of each row, no mask
# Operators whose products are of integers.
PRODUCTS = frozenset(
    {"MatMulInteger", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QLinearMatMul", "QGemm"}
    | {"QAttention", "ConvInteger", "QLinearConv", "DynamicQuantizeLinear"}
)


class GenaiDecoder(TypedDict, total=False):
    """The parts of a decoder in genai_config.json that are read."""

    filename: str
    num_hidden_layers: int


class GenaiModel(TypedDict, total=False):
    """Likewise of a model."""

    decoder: GenaiDecoder
    vocab_size: int
    context_length: int
    eos_token_id: int | list[int]


class Genai(TypedDict, total=False):
    """Likewise of the whole file."""

    model: GenaiModel


@dataclass(frozen=True)
class GraphFile:
    """A foreign graph.

    Attributes:
        path: The file; external weights lie beside it.
        inputs: Name of each input by meaning; see `INPUTS`.
        past: The output that continues each input of the cache, by the input's name; empty where
            that input stays as it is. A graph of first steps may lack these inputs.
    """

    path: Path
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    past: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """Foreign graphs that together are a model.

    Attributes:
        decoder: The only graph, or the one that reads the first tokens of an answer.
        step: The graph of later steps; None where `decoder` does both.
        config: `model` of `genai_config.json`; empty without one.
    """

    writer: str
    decoder: GraphFile
    encoder: GraphFile | None = None
    step: GraphFile | None = None
    config: GenaiModel = field(default_factory=lambda: GenaiModel())

    @property
    def graphs(self) -> list[GraphFile]:
        """All graphs, in the order in which they run."""
        return [each for each in (self.encoder, self.decoder, self.step) if each is not None]

    def files(self) -> set[str]:
        """Returns the names of the graphs and of the files of their weights."""
        named = (name for graph in self.graphs for name in _weights(_load(graph.path)))
        return {*(graph.path.name for graph in self.graphs), *named}

    def moved(self, folder: Path) -> Self:
        """Returns the same graphs in a copy of their folder."""

        def move(graph: GraphFile) -> GraphFile:
            return replace(graph, path=folder / graph.path.name)

        return replace(
            self,
            decoder=move(self.decoder),
            encoder=self.encoder and move(self.encoder),
            step=self.step and move(self.step),
        )

    def precision(self) -> str:
        """Returns the precision of the products: the coarsest of the graphs."""
        found = self.precisions()
        return next((name for name in reversed(PRECISIONS) if name in found), FLOAT32.name)

    def precisions(self) -> set[str]:
        """Returns the precisions of all products and weights."""
        return {each for graph in self.graphs for each in _precisions(graph.path)}

    @cached_property
    def from_left(self) -> bool:
        """Whether an operator takes as many tokens from the left edge as the mask counts."""
        nodes = (node for graph in self.graphs for node in ir.load(graph.path).graph.all_nodes())
        return any(node.op_type == COUNTING for node in nodes)

    def in_integers(self) -> float:
        """Returns the share of the weights that integers hold, of all matrices."""
        sizes = [_matrices(graph.path) for graph in self.graphs]
        return sum(integers for integers, _ in sizes) / max(1, sum(map(sum, sizes)))


def _precisions(path: Path) -> Iterator[str]:
    model = ir.load(path)
    for node in model.graph.all_nodes():
        if node.op_type in PACKED:
            yield "int8" if bits(node) == 8 else "int4"
        elif node.op_type in LINEAR:
            read = node.inputs[0]
            yield "int4" if read is not None and read.dtype in FOUR_BITS else "int8"
        elif node.op_type in PRODUCTS:
            yield "int8"
    types = {"FLOAT16": "float16", "BFLOAT16": "bfloat16"}
    for tensor in stored(model):
        if tensor.dtype in FOUR_BITS and len(tensor.shape) > 1:
            yield "int4"
        elif tensor.dtype in EIGHT_BITS and len(tensor.shape) > 1:
            yield "int8"  # weights that a Cast turns into floats
        elif tensor.size > 1:
            yield types.get(tensor.dtype.name, "float32")


def stored(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    """Yields all constants of a graph and of the graphs within it."""
    for graph in (model.graph, *model.graph.subgraphs()):
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value.const_value
    for node in model.graph.all_nodes():
        if node.op_type == "Constant" and "value" in node.attributes:
            yield node.attributes["value"].as_tensor()


def bits(node: ir.Node) -> int:
    """Returns the bits of a number of the weights that an operator of `PACKED` reads."""
    given = node.attributes.get("bits")
    return 4 if given is None else int(given.value)


def _matrices(path: Path) -> tuple[int, int]:
    """Returns how many numbers the matrices of integers hold, and those of floats."""
    model = ir.load(path)
    packed: dict[str | None, int] = {}  # bits of a number, by the name of the weights
    scales: set[str | None] = set()
    for node in model.graph.all_nodes():
        names = [None if value is None else value.name for value in node.inputs]
        if node.op_type in PACKED:
            packed[names[PACKED[node.op_type]]] = bits(node)
            scales |= {*names[2:]}  # zero points too
        elif node.op_type in LINEAR:
            scales |= {*names[1:]}
    sizes = [0, 0]
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or len(tensor.shape) < 2 or name in scales:
            continue
        width = tensor.dtype.bitwidth
        if tensor.dtype.is_floating_point():
            sizes[1] += tensor.size
        elif width <= 8:
            sizes[0] += tensor.size * (width // packed.get(name, width))
    return sizes[0], sizes[1]


def read_layout(folder: Path, names: Path | None = None, suffix: str = "") -> Layout:
    """Finds the graphs of a folder, or the purpose of one graph.

    Args:
        folder: A folder of optimum or onnxruntime-genai, or one ONNX file.
        names: TOML file that names inputs and outputs of one graph.
        suffix: What precedes `.onnx` in the names of the graphs, as `_quantized` does; a graph
            without it is taken only where `suffix` is empty.

    Raises:
        InputError: There is no graph, or a graph has a tensor of unknown meaning.
    """
    if names is not None:
        return _named(folder, names)
    if folder.is_file():
        return Layout("one file", described(folder))
    if not folder.is_dir():
        raise InputError(f"{folder}: expected a folder of ONNX graphs or an ONNX file, found none")
    if (folder / CTRANSLATE2).is_file() and not list(folder.glob("*.onnx")):
        raise InputError(
            f"{folder} holds a model of CTranslate2 ({CTRANSLATE2}), expected ONNX graphs; export "
            "the model with optimum and audit that folder"
        )
    if (folder / GENAI).exists():
        config = read_document(folder / GENAI, Genai, "write the model again").get("model", {})
        file = config.get("decoder", {}).get("filename", "model.onnx")
        if Path(file).name != file or not (folder / file).is_file():
            raise InputError(f"{folder / file}: expected the graph that {GENAI} names, in {folder}")
        return Layout("onnxruntime-genai", described(folder / file), config=config)
    encoder = _first(folder, ENCODERS, suffix)
    decoder = _first(folder, DECODERS if encoder else ALONE, suffix)
    if decoder is None:
        paths = [path for part in ("", "onnx") for path in (folder / part).glob("*.onnx")]
        files = sorted(str(path.relative_to(folder)) for path in paths)
        expected = [name.replace(".onnx", f"{suffix}.onnx") for name in ALONE]
        raise InputError(
            f"{folder}: expected {' or '.join(expected)}, found "
            f"{', '.join(files) if files else 'no ONNX file'}; choose with --suffix, or name one "
            "file, with --names if its tensors have other names than optimum gives them"
        )
    if encoder is None:
        return Layout("optimum", described(decoder))
    step = _first(folder, STEPS, suffix)
    graph = described(decoder)
    split = described(step) if step is not None and "use_cache" not in graph.inputs else None
    return Layout("optimum", graph, described(encoder), split)


def read_whole(path: Path) -> Layout:
    """Returns one graph, whatever its tensors mean.

    Raises:
        InputError: It is no ONNX file, or a folder without a single one.
    """
    files = sorted(path.glob("*.onnx")) if path.is_dir() else [path]
    if len(files) != 1 or not files[0].is_file():
        raise InputError(f"{path}: expected one ONNX file, found {len(files)}; name the file")
    _load(files[0])
    return Layout("one file", GraphFile(files[0], {}, {}))


def _load(path: Path) -> ir.Model:
    try:
        model = ir.load(path)
    except Exception as error:  # onnx_ir raises protobuf's errors, which share no base class
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{path}: expected an ONNX graph, found: {reason}; write it again"
        ) from error
    for name in _weights(model):
        inside = not Path(name).is_absolute() and ".." not in Path(name).parts
        if not inside or not (path.parent / name).is_file():
            raise InputError(f"{path}: expected its weights in {name}, a file beside it")
    return model


def _weights(model: ir.Model) -> set[str]:
    outside = (tensor for tensor in stored(model) if isinstance(tensor, ir.ExternalTensor))
    return {str(tensor.location) for tensor in outside}


def _first(folder: Path, files: Sequence[str], suffix: str) -> Path | None:
    names = [file.replace(".onnx", f"{suffix}.onnx") for file in files]
    places = (folder / part / name for name in names for part in ("", "onnx"))
    return next((path for path in places if path.is_file()), None)


def _named(path: Path, names: Path) -> Layout:
    """Returns one graph with the meanings of a TOML file.

    Raises:
        InputError: The graph lacks a tensor of such a name, or a meaning is unknown.
    """
    if not path.is_file():
        raise InputError(f"{path}: expected one ONNX file beside --names, found a folder")
    remedy = "give one name, in quotation marks, for each meaning; docs/audit.md lists them"
    given: Any = checked(read_toml(names), NAMES, str(names), remedy)
    graph = _load(path).graph
    (inputs, past), (outputs, present) = (
        _side(path, kind, asdict(side), cache, {str(value.name) for value in values})
        for kind, side, cache, values in (
            ("input", given.inputs, "past", graph.inputs),
            ("output", given.outputs, "present", graph.outputs),
        )
    )
    if "tokens" not in inputs or not outputs or len(past) != len(present):
        raise InputError(
            f"{names}: expected tokens under [inputs], at least one output under [outputs] and as "
            f"many names under past as under present, found {len(past)} and {len(present)}; the "
            "nth output continues the nth input, and docs/audit.md has an example"
        )
    cache = dict(zip(past, present, strict=True))
    return Layout("a TOML file", GraphFile(path, inputs, outputs, cache))


def _side(
    path: Path, kind: str, given: dict[str, Any], cache: str, there: set[str]
) -> tuple[dict[str, str], list[str]]:
    listed = given.pop(cache)
    past = [listed] if isinstance(listed, str) else listed
    meant = {role: name for role, name in given.items() if name}
    if missing := [name for name in [*meant.values(), *past] if name not in there]:
        raise InputError(f"{path} has no {kind} {missing[0]!r}; it has {', '.join(sorted(there))}")
    return meant, past


def described(path: Path) -> GraphFile:
    """Reads the meanings of a graph's tensors, by the names that optimum and genai give.

    Raises:
        InputError: The file is no graph, or an input has a name without a known meaning.
    """
    graph = _load(path).graph
    outputs = [str(value.name) for value in graph.outputs]
    inputs: dict[str, str] = {}
    past: dict[str, str] = {}
    for value in graph.inputs:
        name = str(value.name)
        if (role := INPUTS.get(name)) in inputs:
            raise InputError(
                f"{path} reads {inputs[str(role)]} and {name}: encoder and decoder in one graph "
                "are not audited; export them apart (optimum: without --monolith)"
            )
        if role is not None:
            inputs[role] = name
        elif name.startswith(f"{PAST}.") and (after := name.replace(PAST, PRESENT, 1)):
            past[name] = after if after in outputs else ""
        else:
            raise InputError(
                f"{path}: the meaning of input {name!r} is unknown; say it with --names"
            )
    meant = {OUTPUTS[name]: name for name in outputs if name in OUTPUTS}
    # The cache that a first step begins has no input.
    begun = {
        name.replace(PRESENT, PAST, 1): name for name in outputs if name.startswith(f"{PRESENT}.")
    }
    return GraphFile(path, inputs, meant, past or begun)
