"""The shortlist of a bundle: what is learned, and the graphs that score some tokens alone."""

import copy
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tests.export.conftest import Exporter
from transferry.build_model.checkpoint import Checkpoint
from transferry.build_model.corpus import builtin_pairs
from transferry.build_model.data import Pair
from transferry.export import shortlist as learning
from transferry.export import variants
from transferry.export.bundle import export_bundle
from transferry.export.fusion import FloatKernels, Fusion
from transferry.export.graphs import Graph, export_graph, silenced
from transferry.export.narrowing import narrow_graphs, require_narrow
from transferry.export.shortlist import Ids, LexicalTable, learn_shortlist
from transferry.export.slot_graphs import OPSET, HeadGraph
from transferry.export.variants import make_variant
from transferry.export.weights import WEIGHTS
from transferry.runtime.bundle import MANIFEST, SHORTLIST, Bundle, GraphSpec, TensorSpec
from transferry.runtime.errors import InputError, ParityError, UsageError
from transferry.runtime.options import GenerationOptions
from transferry.runtime.search import search
from transferry.runtime.session import SessionOptions
from transferry.runtime.shortlist import Shortlist
from transferry.runtime.slot_decoder import SlotDecoder

# the house, the book, a book; das Haus, das Buch, ein Buch (Koehn 2010, section 4.2.3)
THE, HOUSE, BOOK, A = range(4)
DAS, HAUS, BUCH, EIN = range(4, 8)
SENTENCES = [[THE, HOUSE], [THE, BOOK], [A, BOOK]]
TRANSLATIONS = [[DAS, HAUS], [DAS, BUCH], [EIN, BUCH]]
RIGHT = {THE: DAS, HOUSE: HAUS, BOOK: BUCH, A: EIN}


def probabilities(table: LexicalTable) -> dict[tuple[int, int], float]:
    found = zip(table.source.tolist(), table.target.tolist(), strict=True)
    return dict(zip(found, table.probability.tolist(), strict=True))


def plain_model_1(
    sources: Ids, targets: Ids, iterations: int
) -> tuple[dict[tuple[int, int], float], list[float]]:
    """Brown et al. (1993), equations 10 to 17, word by word; 8 stands for no source word."""
    pairs = [([*source, 8], target) for source, target in zip(sources, targets, strict=True)]
    t = {(f, e): 1 / 8 for source, target in pairs for f in source for e in target}
    likelihoods = []
    for _ in range(iterations):
        count, likelihood = dict.fromkeys(t, 0.0), 0.0
        for source, target in pairs:
            for e in target:
                total = sum(t[f, e] for f in source)
                likelihood += np.log(total / len(source))
                for f in source:
                    count[f, e] += t[f, e] / total
        of_source = defaultdict[int, float](float)
        for (f, _), expected in count.items():
            of_source[f] += expected
        t = {(f, e): expected / of_source[f] for (f, e), expected in count.items()}
        likelihoods.append(likelihood)
    return t, likelihoods


@pytest.mark.parametrize(
    ("sources", "targets"),
    [
        (SENTENCES, TRANSLATIONS),
        ([[0, 0, 1], [1, 2], [0, 2, 2, 2]], [[4, 5], [5, 5, 6], [4, 6, 4]]),  # words twice
    ],
)
def test_the_table_is_that_of_the_equations(sources: Ids, targets: Ids) -> None:
    table = LexicalTable(sources, targets, 8)
    likelihoods = [table.improve() for _ in range(6)]
    expected, their_likelihoods = plain_model_1(sources, targets, 6)
    assert probabilities(table) == pytest.approx(expected)
    assert likelihoods == pytest.approx(their_likelihoods)


def test_likelihood_rises_and_the_right_words_come_out() -> None:
    table = LexicalTable(SENTENCES, TRANSLATIONS, 8)
    likelihoods = [table.improve() for _ in range(30)]
    assert (np.diff(likelihoods) > 0).all()
    found = probabilities(table)
    for source, target in RIGHT.items():
        others = [p for (f, e), p in found.items() if f == source and e != target]
        assert found[source, target] > max(others)
    assert table.likeliest(8, 1, filling=7)[:, 0].tolist() == [DAS, HAUS, BUCH, EIN, 7, 7, 7, 7]


def test_equally_likely_tokens_come_in_the_order_of_their_ids() -> None:
    table = LexicalTable([[5]], [[4, 1, 3, 2]], 8)
    table.improve()
    assert table.likeliest(6, 3, filling=0).tolist() == [[0] * 3] * 5 + [[1, 2, 3]]


def test_a_shortlist_has_the_most_frequent_and_the_likeliest() -> None:
    found = learn_shortlist(SENTENCES, TRANSLATIONS, 8, frequent=2, likeliest=1)
    assert found.frequent.tolist() == [DAS, BUCH]
    assert found.likeliest[:4, 0].tolist() == [DAS, HAUS, BUCH, EIN]
    assert set(found.likeliest[4:, 0].tolist()) <= {DAS, BUCH}
    assert found.likeliest.dtype == np.uint8


def test_sentences_without_tokens_teach_nothing() -> None:
    empty = learn_shortlist([[], *SENTENCES, [1]], [[1], *TRANSLATIONS, []], 8, likeliest=1)
    assert empty.likeliest[:4, 0].tolist() == [DAS, HAUS, BUCH, EIN]
    with pytest.raises(InputError, match="found none whose target has tokens"):
        learn_shortlist([[1], [2]], [[], []], 8)


def test_of_much_text_some_is_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """18 meetings, of which 9 at most are wanted: each second sentence."""
    monkeypatch.setattr(learning, "MEETINGS", 9)
    found = learn_shortlist(SENTENCES, TRANSLATIONS, 8, likeliest=2)
    assert set(found.likeliest.ravel().tolist()) == {DAS, HAUS, EIN, BUCH}
    assert found.frequent.tolist()[:1] == [0]  # as many as there are, those that never occur too
    assert set(found.likeliest[THE].tolist()) == {DAS, HAUS}


# The graphs


@pytest.fixture(scope="module")
def listed(export_all: Callable[..., Bundle], tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("bundles") / "listed"
    return export_all(folder, shortlist=builtin_pairs(200, seed=3))


def test_a_bundle_without_a_shortlist_has_nothing_of_it(
    all_variants: Bundle, listed: Bundle
) -> None:
    assert SHORTLIST not in all_variants.manifest.files
    for name, variant in listed.manifest.variants.items():
        more = variant.graphs.keys() - all_variants.variant(name).graphs.keys()
        assert more == ({"part", "narrow"} if variant.in_place else set())
    without, grown = (
        (each.folder / "portable" / WEIGHTS).stat().st_size for each in (all_variants, listed)
    )
    assert grown == without, "the weights are the output layer's"


@pytest.mark.parametrize("name", ["cpu-fp32", "cpu-int8"])
def test_tokens_scored_alone_score_as_among_all(
    listed: Bundle, sources: list[list[int]], name: str
) -> None:
    decoder = SlotDecoder(listed, listed.variant(name), SessionOptions())
    special = listed.tokenizer.special
    require_narrow(decoder, sources, special)
    part = listed.variant(name).graphs["part"]
    expected = {"cpu-fp32": ["part.weight"], "cpu-int8": ["part.weight", "part.scales"]}
    assert part.names("part") == expected[name]


@pytest.mark.parametrize("name", ["cpu-fp32", "cpu-int8"])
def test_another_token_is_caught(
    listed: Bundle, sources: list[list[int]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = SlotDecoder(listed, listed.variant(name), SessionOptions())
    right = decoder.part
    monkeypatch.setattr(decoder, "part", lambda tokens: right(tokens + (tokens == 100)))
    with pytest.raises(ParityError, match=f"variant {name}: tokens that are scored alone differ"):
        require_narrow(decoder, sources, listed.tokenizer.special)


def test_an_export_whose_narrow_graph_is_wrong_leaves_nothing(
    calm: Checkpoint,
    texts: list[str],
    portable_traced: Exporter,
    slots_traced: Exporter,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def wrong(head: Graph) -> dict[str, Graph]:
        graphs = narrow_graphs(head)
        product = next(node for node in graphs["narrow"].model.graph if node.op_type == "Gemm")
        product.attributes["alpha"] = ir.AttrFloat32("alpha", 1.01)
        return graphs

    monkeypatch.setattr(variants, "export_graphs", portable_traced)
    monkeypatch.setattr(variants, "export_slot_graphs", slots_traced)
    monkeypatch.setattr(variants, "narrow_graphs", wrong)
    with pytest.raises(ParityError, match=r"scored alone differ by 1\.0e-02"):
        export_bundle(
            calm, tmp_path / "out", variants=["cpu-fp32"], shortlist=[Pair("one", "eins")]
        )
    assert list(tmp_path.iterdir()) == []


def test_an_output_layer_may_have_a_bias_and_a_divisor(
    calm: Checkpoint, slots_traced: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the graphs have it: of both, whatever is of single tokens comes with these tokens."""
    monkeypatch.setattr(variants, "export_slot_graphs", slots_traced)
    head = make_variant(calm.model, "cpu-fp32").graphs["head"]
    product = head.model.graph[0]
    bias = ir.Value(
        name="bias", shape=ir.Shape([400]), const_value=ir.tensor(np.arange(400, dtype=np.float32))
    )
    bias.dtype = ir.DataType.FLOAT
    head.model.graph.register_initializer(bias)
    product.resize_inputs(3)
    product.replace_input_with(2, bias)
    product.attributes["alpha"] = ir.AttrFloat32("alpha", 0.5)
    part, narrow = (narrow_graphs(head)[name] for name in ("part", "narrow"))
    assert [spec.name for spec in part.spec.outputs] == ["part.weight", "part.bias"]
    assert [spec.shape for spec in part.spec.outputs] == [(32, "tokens"), ("tokens",)]
    assert [spec.name for spec in narrow.spec.inputs] == ["hidden", "part.weight", "part.bias"]
    (found,) = narrow.model.graph
    assert (found.attributes.get_float("alpha"), found.attributes.get_int("transB")) == (0.5, 0)
    assert not narrow.model.graph.initializers


def test_a_head_without_a_product_is_refused(listed: Bundle) -> None:
    spec = listed.variant("cpu-fp32").graphs["head"]
    head = Graph(ir.load(listed.graph(spec)), spec)
    before = ir.to_proto(head.model).SerializeToString()
    narrow_graphs(head)
    assert ir.to_proto(head.model).SerializeToString() == before, "it stays as it is"
    head.model.graph[0].op_type = "MatMul"
    with pytest.raises(ParityError, match=r"expected a linear layer in .*, found none"):
        narrow_graphs(head)


def test_int8_answers_the_same_bit_for_bit_in_any_batch(
    listed: Bundle, sources: list[list[int]]
) -> None:
    decoder = SlotDecoder(listed, listed.variant("cpu-int8"), SessionOptions())
    special, table = listed.tokenizer.special, Shortlist.of(listed)
    # Of few tokens, so that lists differ.
    table = Shortlist(table.frequent[:9], table.likeliest[:, :5])
    for options in (
        GenerationOptions(max_length=20, shortlist=True),
        GenerationOptions(max_length=20, beam=4, n_best=4, shortlist=True),
    ):
        together = search(decoder, sources, options, special, shortlist=table)
        for source, found in zip(sources, together, strict=True):
            assert search(decoder, [source], options, special, shortlist=table) == [found]
            (allowed,) = table.allowed([source], [[]], special.eos_id)
            assert allowed[[token for item in found for token in item.tokens]].all()


def test_the_same_text_gives_the_same_bytes(
    export_all: Callable[..., Bundle], listed: Bundle, tmp_path: Path
) -> None:
    again = export_all(tmp_path / "again", shortlist=builtin_pairs(200, seed=3))
    assert again.manifest.files == listed.manifest.files


def test_a_shortlist_without_its_graphs_is_no_bundle(listed: Bundle) -> None:
    record = json.loads(listed.manifest.to_json())
    del record["variants"]["cpu-int8"]["graphs"]["narrow"]
    with pytest.raises(InputError, match="variant 'cpu-int8' has no graph 'narrow'"):
        type(listed.manifest).from_json(json.dumps(record), MANIFEST)


def test_only_an_encoder_decoder_has_one(writer_run_folder: Path, tmp_path: Path) -> None:
    from transferry.build_model.checkpoint import load_checkpoint

    with pytest.raises(UsageError, match="the run is decoder-only; leave --shortlist out"):
        export_bundle(
            load_checkpoint(writer_run_folder), tmp_path / "out", shortlist=[Pair("a", "b")]
        )


def test_half_precision_has_narrow_graphs_too(calm: Checkpoint) -> None:
    model = copy.deepcopy(calm.model).half()
    hidden = TensorSpec("hidden", "hidden", "float16", ("rows", 32))
    logits = TensorSpec("logits", "logits", "float32", ("rows", 400))
    with silenced():
        head = export_graph(HeadGraph(model), GraphSpec("head.onnx", (hidden,), (logits,)), OPSET)
    Fusion(head.model, FloatKernels(with_relu=False), ["logits"]).run()
    graphs = narrow_graphs(head)
    assert [spec.type for spec in graphs["part"].spec.outputs] == ["float16"]
    assert [spec.type for spec in graphs["narrow"].spec.outputs] == ["float32"]
    assert [node.op_type for node in graphs["narrow"].model.graph] == ["Gemm", "Cast"]
