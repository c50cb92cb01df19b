"""Searches of an engine: greedy, with beams, and sampling."""

import pytest

from transferry.runtime.decoding.generation_options import GenerationOptions

Tokens = tuple[int, ...]

# A random model would say one token again and again.
GREEDY = GenerationOptions(max_length=12, no_repeat_ngram=1)
BEAM = GenerationOptions(max_length=12, no_repeat_ngram=1, beam=4, n_best=4, length_penalty=0.6)
SAMPLING = GenerationOptions(max_length=12, sample=True, n_best=2, top_k=50, top_p=0.9, seed=3)
SEARCHES = pytest.mark.parametrize(
    "options", [GREEDY, BEAM, SAMPLING], ids=["greedy", "beam", "sampling"]
)
