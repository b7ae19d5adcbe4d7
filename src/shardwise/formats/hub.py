"""Models on the Hugging Face hub: what is in its local cache is used as it is, the rest is
downloaded.

huggingface_hub is imported by the functions that need it, so that a word that names no hub model
does not wait for it.
"""

import json
import socket
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import getproxies

MODEL_FILES = ("*.json", "*.safetensors", "tokenizer*", "vocab*", "merges.txt", "*.jinja")


def fetch_config(
    hub_id: str, cache_dir: Path | None = None, local_files_only: bool = False
) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(
            hf_hub_download(hub_id, "config.json", cache_dir=cache_dir, local_files_only=True)
        )
    except LocalEntryNotFoundError as error:
        if local_files_only or not hub_in_reach():
            raise hub_problem(hub_id, error) from error
    except ValueError as error:
        raise hub_problem(hub_id, error) from error
    try:
        return Path(hf_hub_download(hub_id, "config.json", cache_dir=cache_dir))
    except Exception as error:  # the client's HTTP library, and so its errors, differ by version
        raise hub_problem(hub_id, error) from error


def fetch_model(hub_id: str, cache_dir: Path | None = None, local_files_only: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    cached = fetch_config(hub_id, cache_dir, local_files_only).parent
    if is_whole(cached):
        return cached
    if local_files_only or not hub_in_reach():
        raise ValueError(
            f"{hub_id}: the hub's local cache lacks weights or tokenizer, and the hub is not reached"
        )
    try:
        folder = snapshot_download(
            hub_id,
            cache_dir=cache_dir,
            allow_patterns=list(MODEL_FILES),
            ignore_patterns=["*/*", "consolidated*"],
        )
    except Exception as error:
        raise hub_problem(hub_id, error) from error
    if not any(Path(folder).glob("*.safetensors")):
        raise ValueError(
            f"{hub_id}: the hub has no safetensors weights of it, and no other kind is read from there"
        )
    return Path(folder)


def is_whole(folder: Path) -> bool:
    """Whether a snapshot has a tokenizer and every file of its weights."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    else:
        files = {"model.safetensors"}
    has_tokenizer = any(
        (folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")
    )
    return has_tokenizer and all((folder / name).exists() for name in files)


def hub_in_reach() -> bool:
    """Whether the hub's name resolves, asked first because its client retries for half a minute
    where there is no network. A proxy resolves names by itself, so with one the client has to
    try."""
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return False
    try:
        return bool(getproxies() or socket.getaddrinfo(urlparse(ENDPOINT).hostname, None))
    except OSError:
        return False


def hub_problem(hub_id: str, error: Exception) -> ValueError:
    """One sentence for each way in which a download fails."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        page = f"https://huggingface.co/{hub_id}"
        return ValueError(f"{hub_id} is gated: accept its terms at {page}, then `hf auth login`")
    if isinstance(error, RepositoryNotFoundError):
        return ValueError(
            f"{hub_id}: there is no such folder here and no such public model on the hub"
        )
    if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        return ValueError(f"{hub_id} is on the hub, but without a config.json")
    if isinstance(error, LocalEntryNotFoundError | ConnectionError):
        return ValueError(
            f"{hub_id} is neither a folder here nor in the hub's local cache, and the hub is not reached"
        )
    reason = str(error).strip().splitlines()
    return ValueError(
        f"{hub_id} cannot be fetched from the hub: {reason[0] if reason else type(error).__name__}"
    )
