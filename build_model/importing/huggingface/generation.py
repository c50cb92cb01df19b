"""Settings of generation_config.json as defaults of generation of a bundle.

Every key of transformers' GenerationConfig is treated here: it becomes a field of
GenerationOptions, changes no token, or is left out and reported with its value.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transferry.build_model.importing.huggingface.folder import CONFIG, PretrainedFolder, Settings
from transferry.build_model.model.config import ModelConfig

# transformers' own defaults where they differ from ours (_get_default_generation_params).
NEW_TOKENS, TOP_K = 20, 50
# Limit of max_length of GenerationOptions, which build_model does not know itself.
LONGEST = 1_000_000
UNSAMPLED = "no effect without do_sample"
# Fields of sampling, with the values that change nothing.
OF_SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
# Values of fields that need not be said; build_model does not know GenerationOptions itself.
PLAIN: Mapping[str, Any] = {
    **OF_SAMPLING,
    "sample": False,
    "beam": 1,
    "n_best": 1,
    "length_penalty": 1.0,
    "early_stopping": True,
    "min_length": 0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram": 0,
    "prompt_ngrams": False,
    "renormalise": False,
    "stop": (),
    "suppress": (),
    "suppress_sequences": (),
    "suppress_begin": (),
    "forced_end": (),
}

# Keys that become fields. Those of `_simple` say which, the others are read one by one.
CARRIED = (
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "early_stopping"),
    *("do_sample", "num_beams", "num_return_sequences", "length_penalty", "stop_strings"),
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty"),
    *("no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens"),
    *("forced_bos_token_id", "forced_eos_token_id", "renormalize_logits"),
)
# Keys of the tokenizer; see `vocabularies`.
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
# Keys of speed and memory, or of outputs beside the tokens.
# remove_invalid_values only hides an error of the model; diversity_penalty is of num_beam_groups.
SAME_TOKENS = (
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "use_mtp"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    *("return_dict_in_generate", "remove_invalid_values", "compile_config", "disable_compile"),
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
    *("assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind"),
    *("target_lookbehind", "prompt_lookup_num_tokens", "max_matching_ngram_size"),
    *("speculation_type", "low_memory", "prefill_chunk_size", "continuous_batching_config"),
    "diversity_penalty",
    *("transformers_version", "_from_model_config", "_commit_hash"),
)
# Keys that change tokens in an unsupported way, with the value that has no effect.
UNSUPPORTED: Mapping[str, Any] = {
    "assistant_ensemble_weight": None,
    "constraints": None,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "guidance_scale": 1.0,
    "max_time": None,
    "num_beam_groups": 1,
    "penalty_alpha": None,
    "sequence_bias": None,
    "token_healing": False,
    "top_h": None,
    "watermarking_config": None,
}
SAMPLING_ALONE = ("epsilon_cutoff", "eta_cutoff", "top_h")
SEARCH_SETTINGS = (*CARRIED, *UNSUPPORTED)

Fields = dict[str, Any]


def generation_defaults(pretrained: PretrainedFolder, shape: ModelConfig) -> tuple[Fields, Fields]:
    """Returns fields of GenerationOptions that search as `generate` does without options.

    As in transformers, generation_config.json replaces the settings of config.json as a whole; a
    folder of before there was such a file has them in config.json.

    Returns:
        The fields; and the settings that are left out, with value and reason.
    """
    settings, left_out = pretrained.config, Fields()
    if pretrained.generation.path.exists():
        settings = pretrained.generation
        for name in SEARCH_SETTINGS:
            old, value = pretrained.config.get(name), settings.get(name)
            if old is not None and old != value and old != UNSUPPORTED.get(name):
                left_out[f"config.json: {name}"] = f"{json.dumps(old)} (of before the other file)"
    reader = _Reader(settings, shape, pretrained.tokens("eos_token_id"), left_out)
    return reader.fields(), left_out


@dataclass
class _Reader:
    """Reads settings of one file; `left_out` are those not carried over, with value and reason."""

    settings: Settings
    shape: ModelConfig
    ends: list[int]
    left_out: Fields

    def __post_init__(self) -> None:
        self.has_encoder = bool(self.shape.encoder_layers)

    def fields(self) -> Fields:
        """Returns the fields of GenerationOptions that the file asks for."""
        settings = self.settings
        name, words = "early_stopping", {"true": True, "false": False, "never": "never"}
        said = isinstance(settings.get(name), str)
        stops = settings.choice(name, words, "false") if said else settings.flag(name, False)
        fields: Fields = {name: stops} | self._lengths() | self._search()
        fields |= self._rules() | self._tokens()
        for least, most in (("min_length", "max_length"), ("min_total_length", "max_total_length")):
            # max_new_tokens alone limits no total.
            if fields.get(least, 0) > (limit := fields.get(most, LONGEST)):
                fields[least] = limit  # such answers have the maximal length
                new = settings.get("min_new_tokens")
                name = "min_length" if new is None else "min_new_tokens"
                self._leave(name, settings.get(name), "limited to max_length")
        for name, nothing in UNSUPPORTED.items():
            if (value := settings.get(name)) in (None, nothing, [], {}):
                continue
            if name in SAMPLING_ALONE and not fields["sample"]:
                self._leave(name, value, UNSAMPLED)
            else:
                settings.refuse(name, value, f"null; generate without it: --ignore-setting {name}")
        for name in (*TOKENS, *SAME_TOKENS):
            settings.get(name)
        # None of the fields is None.
        return {name: value for name, value in fields.items() if value != PLAIN.get(name)}

    def _leave(self, name: str, value: Any, reason: str) -> None:
        self.left_out[name] = f"{json.dumps(value)} ({reason})"

    def _whole(self, name: str) -> int | None:
        # A limit may be beyond every length.
        return None if self.settings.get(name) is None else self.settings.whole(name, most=1 << 63)

    def _count(self, name: str) -> int | None:
        if (value := self._whole(name)) == 0:
            self.settings.refuse(name, value, "at least 1")
        return value

    def _number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.settings.number(name, default)
        if not low <= value <= high:
            self.settings.refuse(name, value, f"numbers from {low:g} to {high:g}")
        return value

    def _lengths(self) -> Fields:
        """Lengths; those of transformers count the prompt, or the begin token of a decoder."""
        fields: Fields = {}
        longest, new = self._count("max_length"), self._count("max_new_tokens")
        if new is not None and longest is not None:
            self._leave("max_length", longest, "max_new_tokens takes its place")
        if new is None and longest is not None:
            new = longest - self.has_encoder
            if not self.has_encoder:
                fields["max_total_length"] = min(longest, LONGEST)
        if new is None:
            new = min(NEW_TOKENS, self.shape.max_positions - self.has_encoder)
        if new < 1:
            self.settings.refuse("max_length", longest, "at least 2, the begin token counted")
        if new > self.shape.max_positions:
            reason = f"limited to the {self.shape.max_positions} positions of the model"
            name = "max_new_tokens" if self.settings.get("max_new_tokens") else "max_length"
            self._leave(name, self.settings.get(name), reason)
        fields["max_length"] = min(new, self.shape.max_positions, LONGEST)
        least, new = self._whole("min_length"), self._whole("min_new_tokens")
        if new is not None:
            fields["min_length"] = new
            if least:
                self._leave("min_length", least, "min_new_tokens takes its place")
        elif least:
            key = "min_length" if self.has_encoder else "min_total_length"
            fields[key] = least - self.has_encoder
        return fields

    def _search(self) -> Fields:
        """Beams or samples."""
        settings, number = self.settings, self._number
        sample, beam = settings.flag("do_sample", False), self._count("num_beams") or 1
        several = self._count("num_return_sequences") or 1
        if not sample and several > beam:
            self._leave("num_return_sequences", several, f"limited to num_beams, {beam}")
            several = beam
        fields: Fields = {
            "sample": sample,
            "beam": 1 if sample else beam,
            "n_best": several,
            "length_penalty": number("length_penalty", 1.0, -10.0, 10.0),
        }
        if not sample:
            for name, off in OF_SAMPLING.items():
                value = settings.get(name)
                if value is not None and value not in (off, {"top_k": TOP_K}.get(name)):
                    self._leave(name, value, UNSAMPLED)
            return fields
        if beam > 1:
            self._leave("num_beams", beam, "beams are not sampled; do_sample is kept")
        return fields | {
            "temperature": number("temperature", 1.0, 1e-6, 1e6),
            "top_k": settings.whole("top_k", TOP_K),
            "top_p": number("top_p", 1.0, 1e-9, 1.0),
            "min_p": number("min_p", 0.0, 0.0, 1.0),
            "typical_p": number("typical_p", 1.0, 1e-9, 1.0),
        }

    def _rules(self) -> Fields:
        """Rules that rate or forbid tokens."""
        settings = self.settings
        size = settings.whole("no_repeat_ngram_size", 0)
        stop = settings.get("stop_strings", [])
        stop = [stop] if isinstance(stop, str) else stop
        if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
            settings.refuse("stop_strings", stop, "a text or a list of texts")
        return {
            "repetition_penalty": self._number("repetition_penalty", 1.0, 1e-3, 1e3),
            "no_repeat_ngram": size,
            "prompt_ngrams": bool(size),
            "renormalise": settings.flag("renormalize_logits", False),
            "stop": tuple(stop),
        }

    def _tokens(self) -> Fields:
        """Tokens that are forced or forbidden."""
        words = self.settings.get("bad_words_ids", [])
        if not isinstance(words, list) or not all(
            isinstance(word, list) and word and self._known(word) for word in words
        ):
            self.settings.refuse("bad_words_ids", words, f"lists of {self._supported}")
        # transformers lets end tokens be: an answer could never end.
        single = {word[0] for word in words if len(word) == 1} - set(self.ends)
        suppressed, last = set(self._ids("suppress_tokens")), self._ids("forced_eos_token_id")
        fields: Fields = {
            "suppress": tuple(sorted(single | suppressed)),
            "suppress_sequences": tuple(tuple(word) for word in words if len(word) > 1),
            "suppress_begin": self._ids("begin_suppress_tokens"),
            # Of several, transformers suppresses some all the same.
            "forced_end": tuple(each for each in last if each not in suppressed) or last,
        }
        begin = self._ids("forced_bos_token_id")
        # As of a GenerationConfig that transformers makes of config.json.
        old = self.settings.path.name == CONFIG or self.settings.get("_from_model_config")
        if self.settings.flag("force_bos_token_to_be_generated", False) and old:
            begin = self._ids("bos_token_id")
        if begin:
            if self.has_encoder:
                if len(begin) > 1 or begin[0] in self.ends:
                    supported = "one token that ends no answer, else all are empty"
                    self.settings.refuse("forced_bos_token_id", [*begin], supported)
                fields["forced_begin"] = begin[0]
            else:
                self._leave("forced_bos_token_id", begin, "no effect on prompts of several tokens")
        return fields

    @property
    def _supported(self) -> str:
        return f"ids from 0 to {self.shape.vocabulary_size - 1}"

    def _known(self, ids: list[Any]) -> bool:
        return all(type(one) is int and 0 <= one < self.shape.vocabulary_size for one in ids)

    def _ids(self, name: str) -> tuple[int, ...]:
        """Returns the ids of a setting that is one id or a list of them."""
        value = self.settings.get(name, [])
        ids = value if isinstance(value, list) else [value]
        if not self._known(ids):
            self.settings.refuse(name, value, self._supported)
        return tuple(ids)
