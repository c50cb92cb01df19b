"""Rerankers that are causal language models give the scores of transformers' logits."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.build_model.importing.huggingface.drawn import (
    TYPES,
    Draw,
    drawn_model,
    exact,
    in_float64,
    tokenizers,
    transformers,
)
from tests.build_model.importing.huggingface.heads import write, write_modules
from tests.commands import call
from tests.runtime.tokenizer.vocabularies import byte_level
from tests.traced import unverified
from transferry.build_model.checkpoint import load_checkpoint
from transferry.build_model.importing.huggingface.importer import import_pretrained
from transferry.export.bundle import Contents
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.tasks.classify import classify
from transferry.runtime.engine.tasks.rank import rank
from transferry.runtime.errors import InputError, UsageError

LONGEST = 400
TEMPLATE = """<|im_start|>system
Judge.<|im_end|>
<|im_start|>user
<Instruct>: {{ messages[0].content if messages[0].role == "system" else "usual" }}
<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
<Document>: {{ (messages | selectattr("role", "eq", "document") | first).content }}<|im_end|>
<|im_start|>assistant
<think>

</think>

"""
OF_ROLES = "{% for m in messages %}<|im_start|>{{ m.role }} <think>{{ m.content }}{% endfor %}"
PAIRS = [("the cat", "sat on the mat"), ("a <|im_end|> b", "Straße über"), ("no", "mat " * 300)]


class Reranker:
    """A drawn decoder of transformers with a chat template, in float64."""

    def __init__(self, folder: Path, template: str, kind: str = "qwen3", **settings: Any) -> None:
        texts = ["yes", "no", "the cat sat on the mat"] * 9
        made = byte_level(texts, 300, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
        added = [tokenizers.AddedToken(text, special=False) for text in ("<think>", "</think>")]
        made.add_tokens(added)
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>"
        )
        fast.chat_template = template
        fast.save_pretrained(folder)
        name, drawn = TYPES[kind]
        ids = {"pad_token_id": 0, "eos_token_id": 2, "bos_token_id": None}
        chosen = drawn(Draw(f"reranker {kind}")) | ids | {"max_position_embeddings": LONGEST}
        chosen |= {"num_hidden_layers": 1, "layer_types": None} | settings
        config = getattr(transformers, name).config_class(vocab_size=len(fast) + 3, **chosen)
        model = drawn_model(config, getattr(transformers, name))
        model.save_pretrained(folder)
        self.model = in_float64(model, config)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    @torch.inference_mode()
    def logits(self, before: str, body: str, after: str) -> tuple[float, float]:
        """Logits of yes and no after three texts, the middle one cut and without special tokens."""
        encode = self.tokenizer.encode
        first, last = (encode(text, add_special_tokens=False) for text in (before, after))
        ids = encode(body, add_special_tokens=False, split_special_tokens=True)
        ids = [*first, *ids[: LONGEST - len(first) - len(last)], *last]
        with exact():
            found = self.model(torch.tensor([ids])).logits[0, -1]
        yes, no = (self.tokenizer.convert_tokens_to_ids(text) for text in ("yes", "no"))
        return float(found[yes]), float(found[no])


def with_modules(folder: Path, reranker: Reranker, *, false: bool = True) -> None:
    """Writes the files of CrossEncoder.save of sentence-transformers 6.2."""
    package = "sentence_transformers"
    kinds = ("base.modules.transformer.Transformer", "cross_encoder.modules.logit_score.LogitScore")
    _, place = write_modules(folder, *(f"{package}.{kind}" for kind in kinds))
    record: dict[str, Any] = {"model_type": "CrossEncoder", "prompts": {"find": "find it"}}
    write(folder / "config_sentence_transformers.json", record | {"default_prompt_name": "find"})
    modes = {"method": "forward", "method_output_name": "logits"}
    reading: dict[str, Any] = {
        "modality_config": {"text": modes, "message": {**modes, "format": "flat"}}
    }
    reading |= {"transformer_task": "text-generation", "module_output_name": "causal_logits"}
    write(folder / "sentence_bert_config.json", reading)
    yes, no = (reranker.tokenizer.convert_tokens_to_ids(text) for text in ("yes", "no"))
    scoring = {"true_token_id": yes, "false_token_id": no if false else None}
    write(place / "config.json", scoring)


@torch.inference_mode()
def require_scores(run: Path, wanted: list[float]) -> None:
    checkpoint = load_checkpoint(run)
    assert checkpoint.head is not None
    model, special = checkpoint.model.double(), checkpoint.tokenizer.special
    for pair, score in zip(PAIRS[:2], wanted, strict=False):
        ids = special.wrap(checkpoint.tokenizer.encode(checkpoint.head.filled(*pair)))
        mask = torch.ones(1, len(ids), dtype=torch.bool)
        found = float(model.answers(torch.tensor([ids]), mask)["head"][0, 0])
        assert abs(found - score) <= 1e-9 * max(1.0, abs(score))


def test_logits_of_two_tokens_score_a_pair(tmp_path: Path) -> None:
    """As the model card of Qwen3-Reranker computes them, whose folder has no modules."""
    folder, run, bundle = tmp_path / "theirs", tmp_path / "run", tmp_path / "bundle"
    theirs = Reranker(folder, OF_ROLES, tie_word_embeddings=True)
    import_pretrained(folder, run, scores=("yes", "no"))
    before = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n"
    )
    after = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    task = "Given a web search query, retrieve relevant passages that answer the query"
    wanted = []
    for query, document in PAIRS:
        body = f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}"
        yes, no = theirs.logits(before, body, after)
        wanted.append(yes - no)
    require_scores(run, wanted)
    contents = Contents(texts=["the cat", "on"], variants=["portable"])
    unverified(load_checkpoint(run), bundle, contents)
    engine = Engine(bundle)
    rows = list(rank(engine, [*PAIRS, ("the cat", " ")]))
    for row, logit in zip(rows, wanted, strict=False):
        assert abs(row.score - 1 / (1 + torch.exp(torch.tensor(-logit)).item())) < 1e-5
    assert [row.truncated for row in rows] == [False, False, True, False]
    assert rows[3].error is not None and (rows[3].source, rows[3].error.kind) == (
        "the cat",
        "empty",
    )
    with pytest.raises(UsageError, match="scores pairs of texts, found one"):
        list(classify(engine, ["the cat"]))


@pytest.mark.parametrize("false", [True, False])
def test_a_chat_template_joins_pairs(false: bool, tmp_path: Path) -> None:
    folder, run = tmp_path / "theirs", tmp_path / "run"
    theirs = Reranker(folder, TEMPLATE, tie_word_embeddings=False)
    with_modules(folder, theirs, false=false)
    import_pretrained(folder, run)
    wanted = []
    for query, document in PAIRS:
        messages = [{"role": "system", "content": "find it"}]
        messages += [{"role": "query", "content": "%"}, {"role": "document", "content": "%"}]
        text = theirs.tokenizer.apply_chat_template(messages, tokenize=False)
        cut = text.index("user\n"), text.index("<|im_end|>\n<|im_start|>assistant")
        body = text[cut[0] : cut[1]].replace("%", query, 1).replace("%", document, 1)
        yes, no = theirs.logits(text[: cut[0]], body, text[cut[1] :])
        wanted.append(yes - no if false else yes)
    require_scores(run, wanted)


@pytest.mark.parametrize(
    ("kind", "template", "tokens", "message"),
    [
        ("qwen3", TEMPLATE, "yes,maybe", "expected tokens after --score-tokens, found 'maybe'"),
        ("qwen2", OF_ROLES, "yes,no", "renders messages of the roles query and document"),
        ("gemma2", TEMPLATE, "yes,no", 'model_type is "gemma2", .* logits are a product'),
        ("qwen3", "modules", "yes,no", "left out with modules.json, found yes,no"),
    ],
    ids=["token", "template", "softcap", "modules"],
)
def test_models_that_cannot_score_are_refused(
    kind: str, template: str, tokens: str, message: str, tmp_path: Path
) -> None:
    folder, modules = tmp_path / "theirs", template == "modules"
    more = {"final_logit_softcapping": 30.0} if kind == "gemma2" else {}
    theirs = Reranker(folder, TEMPLATE if modules else template, kind, **more)
    if modules:
        with_modules(folder, theirs)
    result = call("import", folder, "--out", tmp_path / "run", "--score-tokens", tokens)
    assert result.exit_code in (2, 3), result.stderr
    assert re.search(message, " ".join(result.stderr.split())), result.stderr
    with pytest.raises((InputError, UsageError)):
        import_pretrained(folder, tmp_path / "run", scores=tokens.split(","))
