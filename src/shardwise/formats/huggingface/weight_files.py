"""The safetensors files of a Hugging Face folder, and the tensors in them. Imports no torch.

A folder has either model.safetensors, or several files and model.safetensors.index.json, which maps
each tensor to its file. Format: https://huggingface.co/docs/safetensors
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from shardwise.formats.config_files import read_json_object
from shardwise.formats.huggingface.quantized_tensors import Headers
from shardwise.formats.tensor_names import list_some

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder. Raises ValueError if it has none, if its index is
    malformed, or if it also has the weights of an adapter, which change the model."""
    adapter = next((folder / name for name in ADAPTERS if (folder / name).is_file()), None)
    if adapter is not None:
        raise ValueError(
            f"{adapter} is an adapter (LoRA), which is not supported; merge it into the weights "
            "with merge_and_unload of peft, or remove it to use the model without it"
        )
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        if list(folder.glob("pytorch_model*.bin")):
            raise ValueError(
                f"{folder} has its weights only as pytorch_model.bin, a format that can run code "
                "when opened; load and save_pretrained it once with transformers, which writes "
                f"{SINGLE}"
            )
        raise ValueError(f"{folder} has no weights: expected {SINGLE} or {INDEX}")
    try:
        names = set(read_json_object(index)["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{index} is not an index of weights ({error!r}); download it again"
        ) from None
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        listed = list_some(sorted(map(str, names))) or "nothing"
        raise ValueError(f"{index} must list files of its folder, not {listed}")
    return [folder / name for name in sorted(names)]


@contextmanager
def open_slices(folder: Path, framework: Literal["np", "pt"]) -> Iterator[dict[str, Any]]:
    """Yield every tensor of a folder by name, as a safetensors slice; only headers are read.

    Raises ValueError for files that are missing or damaged, and for a tensor that is in two of
    them.
    """
    slices: dict[str, Any] = {}
    with ExitStack() as opened:
        for file in weight_files(folder):
            try:
                handle = opened.enter_context(safe_open(file, framework=framework))
            except FileNotFoundError:
                raise ValueError(
                    f"{file} is missing, although {INDEX} lists it; download it again"
                ) from None
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{file} is not a complete safetensors file ({error}); it may be truncated, so "
                    "download it again"
                ) from None
            for name in handle.keys():  # noqa: SIM118 (not a dict)
                if name in slices:
                    raise ValueError(f"{folder} has the tensor {name} in two files")
                slices[name] = handle.get_slice(name)
        yield slices


def headers_of(slices: Mapping[str, Any]) -> Headers:
    """Return dtype and shape of every tensor."""
    return {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}


def read_headers(folder: Path) -> Headers:
    """Return dtype and shape of every tensor of a folder. Raises ValueError as `open_slices`
    does."""
    with open_slices(folder, "np") as slices:
        return headers_of(slices)
