"""The rules of the search once more, plainly: one row at a time, without a cache.

It follows docs/portability.md, and shares no code with the search that serves: `runtime/decoding`
gives the types of options and hypotheses alone. `PLAIN` and `OUTSIDE` name every option.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transferry.export.torch_model import TorchDecoder
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.hypothesis import Hypothesis
from transferry.runtime.tokenizer.byte_pair import Tokenizer
from transferry.runtime.tokenizer.special_tokens import AnyTokenizer
from transferry.runtime.tokenizer.third_party import HuggingFaceTokenizer, SentencePieceTokenizer

Doubles = NDArray[np.float64]
Tokens = tuple[int, ...]

FAILED = Hypothesis((), -np.inf, -np.inf, "error")

# Fields of GenerationOptions that have a rule here.
PLAIN = frozenset(
    (
        *("beam", "n_best", "length_penalty", "early_stopping", "renormalise"),
        *("max_length", "max_total_length", "min_length", "min_total_length"),
        *("sample", "seed", "temperature", "top_k", "top_p", "min_p", "typical_p"),
        *("repetition_penalty", "no_repeat_ngram", "prompt_ngrams"),
        *("suppress", "suppress_sequences", "suppress_begin"),
        *("prefix", "forced_begin", "forced_end"),
        *("stop", "split_lines"),
    )
)
# Fields without one: the engine is asked for scores here, and greedy search without them is
# compared by the search "greedy, screened".
OUTSIDE = frozenset({"scores"})


@dataclass(frozen=True)
class Row:
    """A source to answer.

    Attributes:
        logits: Returns the logits of the token after each of some answers of equal length
            `[answers, vocabulary]`.
        number: Seeds its samples.
        first: The begin token of an encoder-decoder; None without an encoder.
    """

    logits: Callable[[Sequence[Tokens]], NDArray[Any]]
    text: Callable[[Sequence[int]], str]
    source: Sequence[int]
    number: int
    first: int | None
    ends: Sequence[int]
    positions: int
    options: GenerationOptions

    @property
    def prompt(self) -> list[int]:
        """Tokens that the decoder reads before the answer."""
        return [*self.source] if self.first is None else [self.first]

    @property
    def limit(self) -> int:
        """Most tokens of an answer."""
        options, prompt = self.options, 0 if self.first is not None else len(self.source)
        most = options.max_length
        if options.max_total_length:
            most = min(most, options.max_total_length - prompt)
        return most if self.first is not None else max(1, min(most, self.positions - prompt + 1))

    def answers(self) -> list[Hypothesis]:
        """Returns the answers, best first."""
        if self.options.beam > 1:
            return self._beams()
        found = [self._one(sample) for sample in range(self.options.n_best)]
        return sorted(found, key=lambda one: -one.score)

    def shown(self, tokens: Sequence[int]) -> str:
        """Returns the text of an answer, which ends before the first stop string."""
        text = self.text(tokens)
        places = [text.index(stop) for stop in self.options.stop if stop in text]
        return text[: min(places)] if places else text

    def _reason(self, tokens: Tokens) -> str:
        """Why an answer ends with its last token; empty if it does not."""
        if tokens[-1] in self.ends:
            return "end"
        if self.options.stop and any(stop in self.text(tokens) for stop in self.options.stop):
            return "stop"
        return "length" if len(tokens) == self.limit else ""

    def _ended(self, tokens: Tokens, own: float, ranked: float, reason: Any) -> Hypothesis:
        score = ranked / len(tokens) ** self.options.length_penalty
        if reason == "end":
            return Hypothesis(tokens[:-1], own, score, "end", end=tokens[-1])
        return Hypothesis(tokens, own, score, reason)

    def _one(self, sample: int) -> Hypothesis:
        draws = _random_numbers(self.options.seed, self.number, sample)
        tokens: Tokens = ()
        total = 0.0
        while True:
            logits = self.logits([tokens])[0].astype(np.float64)
            values = self.rules(logits, tokens)
            if not np.isfinite(_log_sum_exp(logits)) or values.max() == -np.inf:
                return FAILED
            token = int(values.argmax())
            if self.options.sample:
                sums = weights(values, self.options).cumsum()
                token = int((sums > next(draws) * sums[-1]).argmax())
            total += float(logits[token] - _log_sum_exp(logits))
            tokens = *tokens, token
            if reason := self._reason(tokens):
                return self._ended(tokens, total, total, reason)

    def _beams(self) -> list[Hypothesis]:
        options, beam = self.options, self.options.beam
        count = (1 + len(self.ends)) * beam
        live: list[tuple[Tokens, float, float]] = [((), 0.0, 0.0)]  # totals: ranked by, and own
        kept: list[Hypothesis] = []
        while live:
            candidates = []
            scored = self.logits([tokens for tokens, _, _ in live]).astype(np.float64)
            for place, (logits, (tokens, ranked, own)) in enumerate(zip(scored, live, strict=True)):
                normalised = logits - _log_sum_exp(logits)
                if np.isnan(normalised).any():
                    return [FAILED]
                values = self.rules(normalised, tokens)
                best = np.argsort(-values, kind="stable")[:count]
                for token in best[values[best] > -np.inf].tolist():
                    total = ranked + float(values[token]), own + float(normalised[token])
                    candidates.append((-total[0], place, token, ((*tokens, token), *total)))
            candidates.sort(key=lambda each: each[:3])
            live = []
            for rank, (*_, (tokens, ranked, own)) in enumerate(candidates[:count]):
                reason = self._reason(tokens)
                if reason in ("", "length") and len(live) < beam:
                    live.append((tokens, ranked, own))
                if reason and rank < beam:
                    kept.append(self._ended(tokens, own, ranked, reason))
                    kept = sorted(kept, key=lambda one: -one.score)[:beam]
            if self._settled(live, kept):
                break
        return kept[: options.n_best] or [FAILED]

    def _settled(
        self, live: Sequence[tuple[Tokens, float, float]], kept: Sequence[Hypothesis]
    ) -> bool:
        """Whether no answer that goes on can matter."""
        options, full = self.options, len(kept) == self.options.beam
        if not live or len(live[0][0]) == self.limit:
            return True
        if options.early_stopping is True:
            return full
        length = len(live[0][0])
        if options.early_stopping == "never" and options.length_penalty > 0:
            length = self.limit
        best = max(ranked for _, ranked, _ in live)
        return full and best / length**options.length_penalty <= kept[-1].score

    def rules(self, values: Doubles, tokens: Tokens) -> Doubles:
        """Returns logits, or log-probabilities of beams, after all rules `[vocabulary]`."""
        options, before, values = self.options, values, values.copy()
        whole, length = (*self.prompt, *tokens), len(tokens)
        for token in {*whole} if options.repetition_penalty != 1 else ():
            value, by = values[token], options.repetition_penalty
            values[token] = value * by if value < 0 else value / by
        forbidden = {*options.suppress}
        if size := options.no_repeat_ngram:
            seen = whole if options.prompt_ngrams else tokens
            last = seen[len(seen) - size + 1 :]
            ngrams = (seen[first : first + size] for first in range(len(seen) - size + 1))
            forbidden |= {ngram[-1] for ngram in ngrams if ngram[:-1] == last}
        prompt = 0 if self.first is not None else len(self.source)
        if length < max(options.min_length, options.min_total_length - prompt):
            forbidden |= {*self.ends}
        for sequence in options.suppress_sequences:
            begun = len(sequence) - 1
            if len(whole) >= begun and whole[len(whole) - begun :] == tuple(sequence[:-1]):
                forbidden.add(sequence[-1])
        first = () if options.forced_begin is None else (options.forced_begin,)
        beginning = *first, *options.prefix
        if length == len(beginning):
            forbidden |= {*options.suppress_begin}
        values[[*forbidden]] = -np.inf
        if options.forced_end and length + 1 == self.limit:
            values = _only(options.forced_end, 0.0, values)
        if length < len(beginning):
            values = _only([beginning[length]], before[beginning[length]], values)
        if length == 0 and first:
            values = _only(first, 0.0, values)
        if options.renormalise and options.beam > 1 and np.isfinite(values).any():
            values -= _log_sum_exp(values)
        return values


def scorer(
    decoder: TorchDecoder, source: Sequence[int], first: int | None
) -> Callable[[Sequence[Tokens]], NDArray[Any]]:
    """Returns `Row.logits` of a model, which reads each answer whole, without a cache of it."""
    read, begin = (source, first) if first is not None else (source[:-1], source[-1])
    given = np.array([read], np.int64)
    state = decoder.start(given, np.ones_like(given, np.bool_))
    known: dict[Tokens, NDArray[Any]] = {}  # searches share beginnings

    def logits(answers: Sequence[Tokens]) -> NDArray[Any]:
        if new := [tokens for tokens in answers if tokens not in known]:
            rows = decoder.select(state, np.zeros(len(new), np.int64))
            fed = np.array([[begin, *tokens] for tokens in new], np.int64)
            known.update(zip(new, decoder.step(fed, rows)[0].all_logits[:, -1], strict=True))
        return np.stack([known[tokens] for tokens in answers])

    return logits


def plain_text(tokenizer: AnyTokenizer) -> Callable[[Sequence[int]], str]:
    """Returns the text of token ids by the tokenizer's own library, or from the bytes of tokens.

    MarianMT's tokenizers, of two models and a table, decode by themselves.
    """
    special = tokenizer.special.ids()
    if isinstance(tokenizer, HuggingFaceTokenizer):
        import tokenizers

        library = tokenizers.Tokenizer.from_buffer(*tokenizer.files.values())
        return lambda ids: library.decode([each for each in ids if each not in special])
    if isinstance(tokenizer, SentencePieceTokenizer):
        import sentencepiece

        (content,) = tokenizer.files.values()
        model = sentencepiece.SentencePieceProcessor(model_proto=content)
        unknown = range(tokenizer.pieces, tokenizer.vocabulary_size)
        skipped = special | {*unknown, *filter(model.is_unknown, range(tokenizer.pieces))}
        return lambda ids: model.decode([each for each in ids if each not in skipped])
    if not isinstance(tokenizer, Tokenizer):
        return tokenizer.decode
    spelled = {each: token for token, each in tokenizer.vocabulary().items()}
    return lambda ids: b"".join(spelled.get(each, b"") for each in ids).decode(errors="replace")


def _only(tokens: Sequence[int], value: float, values: Doubles) -> Doubles:
    found: Doubles = np.full_like(values, -np.inf)
    found[[*tokens]] = value
    return found


def _log_sum_exp(values: Doubles) -> float:
    largest = values.max()
    return float(largest + np.log(np.exp(values - largest).sum()))


def _random_numbers(seed: int, row: int, sample: int) -> Iterator[float]:
    """Yields u in [0, 1) for each step, from numpy's Philox."""
    counter, key = (np.array(words, np.uint64) for words in ([0, 0, 0, sample], [seed, row]))
    words = np.random.Philox(counter=counter, key=key)
    while True:
        yield (int(words.random_raw()) >> 11) * 2.0**-53


def weights(values: Doubles, options: GenerationOptions) -> Doubles:
    """Returns the probabilities of a sample up to a factor, 0 where cut off `[vocabulary]`."""
    found: Doubles = np.exp((values - values.max()) / options.temperature)

    def keep(order: Doubles, share: float) -> None:
        """Keeps the first in an order whose sum reaches a share, and ties of the last."""
        places = np.argsort(order, kind="stable")
        sums = found[places].cumsum()
        last = places[(sums < share * sums[-1]).sum()]
        found[order > order[last]] = 0.0

    if 0 < options.top_k < len(found):
        found[found < np.sort(found)[-options.top_k]] = 0.0
    if options.top_p < 1:
        keep(-found, options.top_p)
    if options.min_p > 0:
        found[found < options.min_p * found.max()] = 0.0
    if options.typical_p < 1:
        shares = found / found.sum()
        with np.errstate(divide="ignore"):
            information = np.where(shares > 0, -np.log(shares), np.inf)
        entropy = (shares[shares > 0] * information[shares > 0]).sum()
        keep(np.abs(information - entropy), options.typical_p)
    return found
