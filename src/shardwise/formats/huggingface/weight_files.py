"""The safetensors files of a Hugging Face folder: which there are, and what tensors they hold.
Imports no torch.

A folder holds either model.safetensors or several files with model.safetensors.index.json, which
says in which of them each tensor is. Format: https://huggingface.co/docs/safetensors
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from shardwise.formats.huggingface.quantized_tensors import Headers
from shardwise.formats.tensor_names import list_some

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder. Raises ValueError where there are none or the index makes
    no sense."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        if list(folder.glob("pytorch_model*.bin")):
            raise ValueError(
                f"{folder} holds its weights only as pytorch_model.bin, a format that can run code when opened; "
                "load and save_pretrained it once with transformers, which writes model.safetensors"
            )
        raise ValueError(f"{folder} holds no weights: expected {SINGLE} or {INDEX}")
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not an index of weights ({error!r}); get it again") from None
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ValueError(
            f"{index} should list files beside it, not {list_some(sorted(map(str, names))) or 'nothing'}"
        )
    return [folder / name for name in sorted(names)]


@contextmanager
def opened_slices(folder: Path, framework: Literal["np", "pt"]) -> Iterator[dict[str, Any]]:
    """Every tensor of a folder by its name, as safetensors' slices, of which nothing but headers is
    read yet. Raises ValueError for files that are missing or damaged, and for a tensor that is in
    two of them."""
    found: dict[str, Any] = {}
    with ExitStack() as opened:
        for file in weight_files(folder):
            try:
                handle = opened.enter_context(safe_open(file, framework=framework))
            except FileNotFoundError:
                raise ValueError(
                    f"{file} is missing, although {INDEX} beside it lists it; get it again"
                ) from None
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{file} is not a whole safetensors file ({error}); it may have been cut short, so get it again"
                ) from None
            for name in handle.keys():  # noqa: SIM118 (not a dict)
                if name in found:
                    raise ValueError(
                        f"{folder} holds the tensor {name} in two files, so it is unclear which is meant"
                    )
                found[name] = handle.get_slice(name)
        yield found


def headers_of(slices: Mapping[str, Any]) -> Headers:
    return {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}


def read_headers(folder: Path) -> Headers:
    """Dtype and shape of every tensor of a folder. Raises ValueError as `opened_slices` does."""
    with opened_slices(folder, "np") as slices:
        return headers_of(slices)
