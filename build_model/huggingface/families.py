"""All model types that can be imported."""

from __future__ import annotations

from collections.abc import Mapping

from transferry.build_model.huggingface import decoder_only, encoder_decoder, encoder_only
from transferry.build_model.huggingface.tables import Family

FAMILIES: Mapping[str, Family] = {
    **encoder_decoder.FAMILIES,
    **decoder_only.FAMILIES,
    **encoder_only.FAMILIES,
}
