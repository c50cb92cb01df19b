"""Prints the least versions that pyproject.toml allows, for pip."""

import re
import tomllib
from pathlib import Path

EXTRAS = ("export", "jobs", "report")
# One version that fits; what transformers of the tests needs newer; gigabytes of CUDA.
LEFT_OUT = ("onnxruntime", "tokenizers", "safetensors", "pyyaml", "torch")


def main() -> None:
    """Prints a line for each package."""
    content = Path(__file__).parent.with_name("pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(content)["project"]
    extras = (project["optional-dependencies"][extra] for extra in EXTRAS)
    found = {line for lines in (project["dependencies"], *extras) for line in lines}
    for name, least in sorted(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(found), re.M)):
        if not name.startswith(LEFT_OUT):
            print(f"{name}=={least}")


if __name__ == "__main__":
    main()
