"""The stages of gpu.py: each measures one property of a model's graphs on a device."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rounds import environment
from transferry.build_model.train.corpus import builtin_pairs
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.search import pad_sources
from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import TransferryError
from transferry.runtime.ort.encoder import EncoderModel
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import Provider, SessionOptions

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = ("portable", "cuda-fp16", "cuda-bf16")
CUDA_TESTS = ("tests/runtime/ort/test_cuda.py", "tests/runtime/ort/test_session.py")
Work = Callable[[], Sequence[Sequence[int]]]


class Record(dict[str, Any]):
    """Results of a stage, written at every new one, so that a stage that is stopped still tells."""

    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self.path = path

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if self.path is not None:
            self.path.write_text(json.dumps(self, indent=1), encoding="utf-8")


@dataclass(frozen=True)
class Setup:
    """Settings of all stages.

    Attributes:
        rounds: Timed rounds; the median counts.
        path: File of the stage's record; None for no file.
    """

    folder: Path
    provider: Provider
    batches: Sequence[int]
    new_tokens: int
    rounds: int
    path: Path | None = None

    def record(self) -> Record:
        """Returns an empty record of a stage."""
        return Record(self.path)

    @property
    def options(self) -> SessionOptions:
        """Options of a session."""
        return SessionOptions(self.provider)

    @property
    def variants(self) -> Sequence[str]:
        """Variants that the provider runs; a CPU has no kernels in 16 bits."""
        return VARIANTS if self.provider == "cuda" else VARIANTS[:1]

    @property
    def kind(self) -> torch.dtype:
        """Type of the peers' weights."""
        return torch.float16 if self.provider == "cuda" else torch.float32

    def bundle(self, model: str) -> Path:
        """Folder of a bundle."""
        return self.folder / model / "bundle"

    def search(self, beam: int = 1) -> GenerationOptions:
        """Options of a search whose answers all have the same length."""
        length = self.new_tokens
        return GenerationOptions(beam=beam, max_length=length, min_length=length, scores=beam > 1)


def corpus(rows: int) -> list[str]:
    """Returns sentences of the built-in corpus."""
    return [pair.source for pair in builtin_pairs(rows, seed=3)]


def transferry(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a command of transferry in a process of its own."""
    command = [sys.executable, "-m", "transferry", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def stage_doctor(setup: Setup) -> dict[str, Any]:
    """Checks of the machine."""
    from transferry.runtime.doctor import diagnose

    checks = {check.name: f"{check.status}: {check.found}" for check in diagnose()}
    return {**checks, "environment": environment("torch", "transformers", "onnxscript")}


def stage_tests(setup: Setup) -> dict[str, Any]:
    """The tests that need a GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *CUDA_TESTS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {"exit": done.returncode, "last": done.stdout.splitlines()[-12:]}


def stage_recorded(setup: Setup, model: str) -> dict[str, Any]:
    """The answers recorded at export, by variant: the faults, at most three."""
    from transferry.runtime.proof.recorded import verify_recorded

    bundle, found = Bundle.load(setup.bundle(model)), setup.record()
    for name in setup.variants:
        served = open_model(bundle, bundle.variant(name), setup.options)
        report = verify_recorded(bundle, served)
        found[name] = {"passed": report.passed, "faults": [str(x) for x in report.faults[:3]]}
    return found


def stage_verify(setup: Setup, model: str) -> dict[str, Any]:
    """The whole verification against torch, on few lines: exit codes and last lines."""
    found = setup.record()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("\n".join(corpus(16)) + "\n", encoding="utf-8")
        for name in setup.variants:
            started = time.perf_counter()
            done = transferry(
                *("verify", setup.bundle(model), "--variant", name, "--text", text),
                *("--checkpoint", setup.folder / model / "checkpoint", "--quiet"),
                *("--provider", setup.provider),
            )
            last = [*done.stdout.splitlines()[-6:], *done.stderr.splitlines()[-6:]]
            seconds = round(time.perf_counter() - started, 1)
            found[name] = {"exit": done.returncode, "seconds": seconds, "last": last}
            print(f"  {name}: exit {done.returncode}, {seconds} s", flush=True)
    return found


def sources_of(bundle: Bundle, rows: int) -> list[list[int]]:
    """Token ids of sources or prompts, all equally long, so that no peer pads."""
    ids = bundle.tokenizer.encode(" ".join(corpus(4000)))
    special, length = bundle.tokenizer.special, min(12, int(bundle.manifest.model["max_positions"]))
    inner = length - len(special.wrap([]))
    starts = (row * inner % (len(ids) - inner) for row in range(rows))
    return [special.wrap(list(ids[start : start + inner])) for start in starts]


def run_model(setup: Setup, model: Any, bundle: Bundle, rows: int, beam: int = 1) -> Any:
    """Answers or encodes so many rows in one batch."""
    sources = sources_of(bundle, rows)
    if isinstance(model, EncoderModel):
        return model.encode(*pad_sources(sources, bundle.tokenizer.special.pad_id))
    from transferry.runtime.decoding.search import search

    return search(model, sources, setup.search(beam), bundle.tokenizer.special)


def stage_nodes(setup: Setup, model: str) -> dict[str, Any]:
    """Nodes of each graph on the CPU, by operator, and the share of time that they take."""
    bundle, found = Bundle.load(setup.bundle(model)), setup.record()
    for name in setup.variants:
        with tempfile.TemporaryDirectory() as folder:
            options = SessionOptions(setup.provider, profile=Path(folder))
            served = open_model(bundle, bundle.variant(name), options)
            run_model(setup, served, bundle, setup.batches[-1])
            del served  # a session writes its trace when it is deleted
            found[name] = {
                path.name.partition("_2")[0]: nodes_on_cpu(json.loads(path.read_text()))
                for path in sorted(Path(folder).glob("*.json"))
            }
    return found


def nodes_on_cpu(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Nodes on the CPU by operator, and their microseconds of those of all nodes."""
    names, spent = defaultdict[str, set[str]](set), Counter[bool]()
    for event in events:
        if event["cat"] == "Node" and event["name"].endswith("_kernel_time"):
            on_cpu = event["args"]["provider"] == "CPUExecutionProvider"
            spent[on_cpu] += event["dur"]
            if on_cpu:
                names[event["args"]["op_name"]].add(event["name"])
    counts = {name: len(nodes) for name, nodes in sorted(names.items())}
    return {"nodes": counts, "microseconds": spent[True], "of": spent.total()}


def timed(setup: Setup, work: Work) -> dict[str, float]:
    """Tokens a second of a side, by the median round, and by the slowest and fastest."""
    count = sum(map(len, work()))  # warms up
    seconds = []
    for _ in range(setup.rounds):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    rates = [round(count / each, 1) for each in (statistics.median(seconds), *seconds)]
    return {"per_second": rates[0], "least": min(rates), "most": max(rates), "tokens": count}


def memory(setup: Setup) -> int:
    """Megabytes of the GPU in use, by all; 0 on a CPU."""
    if setup.provider == "cpu":
        return 0
    left, whole = torch.cuda.mem_get_info()
    return (whole - left) >> 20


def engine_tokens(engine: Engine, search: GenerationOptions, sources: Any, rows: int) -> Any:
    """Answers of the engine in one batch."""
    engine.batches = BatchOptions(rows=rows * search.beam, tokens=rows * search.beam << 9)
    return [result.hypotheses[0].tokens for result in engine.generate(sources, search)]


def stage_speed(setup: Setup, model: str) -> dict[str, Any]:
    """Tokens a second, and embedded tokens a second, at each batch, beside the peers.

    The engine's rows come first: torch keeps the memory that it once took.
    """
    bundle, cells = Bundle.load(setup.bundle(model)), setup.record()
    sides: dict[str, Callable[[], Callable[[int, int], Work]]] = {
        name: partial(open_engine, setup, model, name) for name in setup.variants
    }
    sides["transformers"] = partial(open_peer, setup, model, bundle)
    if model == "small":
        sides["reference"] = partial(open_reference, setup, model, bundle)
    for side, opening in sides.items():
        work_of = opening()
        for beam in (1,) if model == "bert" or side == "reference" else (1, 4):
            for rows in setup.batches:
                cell = f"{side}, beam {beam}, {rows} rows"
                try:
                    cells[cell] = {**timed(setup, work_of(rows, beam)), "mb": memory(setup)}
                except (TransferryError, RuntimeError) as error:  # memory, above all
                    cells[cell] = {"error": " ".join(str(error).split())[:300]}
                print(f"  {cell}: {cells[cell]}", flush=True)
    return cells


def open_engine(setup: Setup, model: str, variant: str) -> Callable[[int, int], Work]:
    """Opens the engine; returns its work for rows and beams."""
    bundle = Bundle.load(setup.bundle(model))
    served = open_model(bundle, bundle.variant(variant), setup.options)
    if isinstance(served, EncoderModel):

        def encode(rows: int, beam: int) -> Work:
            sources = sources_of(bundle, rows)
            ids, mask = pad_sources(sources, bundle.tokenizer.special.pad_id)
            return lambda: [list(row) for row in served.encode(ids, mask)["hidden"][:, :, 0]]

        return encode
    engine = Engine.of(bundle, served)

    def generate(rows: int, beam: int) -> Work:
        return partial(engine_tokens, engine, setup.search(beam), prompts_of(bundle, rows), rows)

    return generate


def prompts_of(bundle: Bundle, rows: int) -> Any:
    """Rows of the engine: texts for an encoder-decoder, else ids of prompts."""
    sources, special = sources_of(bundle, rows), bundle.tokenizer.special
    if bundle.manifest.architecture != "encoder-decoder":
        return sources
    ids = {special.pad_id, special.bos_id, special.eos_id}
    return [bundle.tokenizer.decode([each for each in row if each not in ids]) for row in sources]


def open_peer(setup: Setup, model: str, bundle: Bundle) -> Callable[[int, int], Work]:
    """Opens the same weights in transformers, on the GPU in float16."""
    import transformers

    kinds = {
        "small": transformers.AutoModelForSeq2SeqLM,
        "llama": transformers.AutoModelForCausalLM,
        "bert": transformers.AutoModel,
    }
    folder = setup.folder / model / "model"
    return partial(_torch_work, setup, _loaded(kinds[model], setup, folder), bundle)


def _loaded(kind: Any, setup: Setup, folder: Path) -> Any:
    return kind.from_pretrained(folder, dtype=setup.kind).to(setup.provider).eval()


def _torch_work(setup: Setup, opened: Any, bundle: Bundle, rows: int, beam: int) -> Work:
    ids = torch.tensor(sources_of(bundle, rows), device=setup.provider)
    new, shown = setup.new_tokens, torch.ones_like(ids)

    @torch.inference_mode()
    def work() -> Sequence[Sequence[int]]:
        if not opened.can_generate():
            hidden = opened(input_ids=ids, attention_mask=shown).last_hidden_state
            return hidden[:, :, 0].tolist()  # type: ignore[no-any-return]
        found = opened.generate(
            ids,
            attention_mask=shown,
            num_beams=beam,
            do_sample=False,
            min_new_tokens=new,
            max_new_tokens=new,
            pad_token_id=0,
        )
        return found[:, -new:].tolist()  # type: ignore[no-any-return]

    return work


def open_reference(setup: Setup, model: str, bundle: Bundle) -> Callable[[int, int], Work]:
    """Opens our torch model with its greedy loop, for an encoder-decoder."""
    from transferry.build_model.checkpoint import load_checkpoint
    from transferry.build_model.model.transformer import greedy

    opened = load_checkpoint(setup.folder / model / "checkpoint").model
    opened.to(setup.provider, setup.kind)
    special, most = bundle.tokenizer.special, setup.new_tokens

    def work_of(rows: int, beam: int) -> Work:
        ids = torch.tensor(sources_of(bundle, rows), device=setup.provider)
        given = opened, ids, torch.ones_like(ids, dtype=torch.bool)
        # No token ends an answer, as in the engine.
        return lambda: greedy(*given, bos_id=special.bos_id, eos_id=-1, max_length=most)

    return work_of


def stage_compiled(setup: Setup, model: str) -> dict[str, Any]:
    """Transformers with a static cache and a compiled step, greedy, at the middle batch."""
    bundle, rows = Bundle.load(setup.bundle(model)), setup.batches[len(setup.batches) // 2]
    import transformers

    folder = setup.folder / model / "model"
    opened = _loaded(transformers.AutoModelForCausalLM, setup, folder)
    opened.generation_config.cache_implementation = "static"
    return {f"{rows} rows": timed(setup, _torch_work(setup, opened, bundle, rows, 1))}


def stage_profile(setup: Setup, model: str) -> dict[str, Any]:
    """Kernels, copies, waits and gaps of one greedy search, by CUPTI through torch."""
    from torch.profiler import ProfilerActivity, profile

    bundle, found = Bundle.load(setup.bundle(model)), setup.record()
    rows = setup.batches[len(setup.batches) // 2]
    on_gpu = setup.provider == "cuda"
    kinds = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    for name in setup.variants:
        served = open_model(bundle, bundle.variant(name), setup.options)
        run_model(setup, served, bundle, rows)  # warms up
        if on_gpu:
            torch.zeros(1, device="cuda")  # torch's own context, before the clock
        started = time.perf_counter()
        with profile(activities=kinds) as traced:
            run_model(setup, served, bundle, rows)
        wall = time.perf_counter() - started
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            traced.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        found[name] = {"rows": rows, "steps": setup.new_tokens, **summary(events, wall)}
    return found


def summary(events: Sequence[Mapping[str, Any]], wall: float) -> dict[str, Any]:
    """Sums of a trace: microseconds and calls by kind, the longest kernels, the gaps between."""
    spent, calls, kernels = Counter[str](), Counter[str](), Counter[str]()
    busy, until = 0.0, 0.0
    for event in sorted((e for e in events if e.get("ph") == "X"), key=lambda e: float(e["ts"])):
        kind, began, took = event.get("cat", ""), float(event["ts"]), float(event["dur"])
        if kind in ("cuda_runtime", "cuda_driver"):
            kind = str(event["name"])
        spent[kind] += round(took)
        calls[kind] += 1
        if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            busy += max(0.0, began + took - max(until, began))
            until = max(until, began + took)
        if kind == "kernel":
            kernels[str(event["name"])[:90]] += round(took)
    return {
        "wall_microseconds": round(wall * 1e6),
        "busy_microseconds": round(busy),
        "kinds": {kind: [calls[kind], took] for kind, took in spent.most_common(12)},
        "kernels": dict(kernels.most_common(12)),
    }


def stage_alone(setup: Setup, model: str) -> dict[str, Any]:
    """Whether a row's logits depend on the rows beside it, and its answers."""
    bundle, found = Bundle.load(setup.bundle(model)), setup.record()
    most = setup.batches[-1]
    ids, mask = pad_sources(sources_of(bundle, most), bundle.tokenizer.special.pad_id)
    for name in setup.variants:
        served: Any = open_model(bundle, bundle.variant(name), setup.options)
        logits, answers = {}, {}
        for rows in setup.batches:
            state = served.start(ids[:rows], mask[:rows])
            output, _ = served.step(ids[:rows, :1], state)
            logits[rows] = output.all_logits[0, 0].astype(np.float64)
            answers[rows] = run_model(setup, served, bundle, rows)[0][0].tokens
        first = setup.batches[0]
        largest = float(np.abs(logits[first]).max())
        found[name] = {
            f"{rows} rows": {
                "logits": float(np.abs(logits[rows] - logits[first]).max()) / largest,
                "same_answer": answers[rows] == answers[first],
            }
            for rows in setup.batches[1:]
        }
    return found


def run_stage(setup: Setup, stage: str) -> dict[str, Any]:
    """Runs a stage in this process."""
    model, _, name = stage.rpartition("-")
    work = globals()[f"stage_{name}"]
    return dict(work(setup, model) if model else work(setup))
