"""The graphs of a bundle run by onnxruntime: sessions, decoders, the encoder, the LM head.

Importing this package turns off onnxruntime's telemetry, which starts with the first import of
onnxruntime and which `disable_telemetry_events` does not stop. So onnxruntime is imported only
within this package. A value of the variable that the user set stays.

Raises:
    ProviderError: onnxruntime cannot be imported.
"""

import os
import sys
import warnings

from transferry.runtime.errors import ProviderError
from transferry.runtime.installation import CPU, GPU, installed_versions, onnxruntime_fault

TELEMETRY_SWITCH = "ORT_DISABLE_TELEMETRY"

if "onnxruntime" in sys.modules and TELEMETRY_SWITCH not in os.environ:
    warnings.warn(
        "onnxruntime was imported before transferry and has started its telemetry; "
        f"set {TELEMETRY_SWITCH}=1 in the environment, or import transferry.runtime.ort first",
        RuntimeWarning,
        stacklevel=2,
    )
os.environ.setdefault(TELEMETRY_SWITCH, "1")

try:
    from onnxruntime import InferenceSession as InferenceSession
except (ImportError, OSError, AttributeError) as error:
    fault = onnxruntime_fault(installed_versions(CPU, GPU), " ".join(str(error).split()))
    found, remedy = fault or (str(error), "transferry doctor")
    raise ProviderError(f"onnxruntime: {found}; {remedy}") from error
