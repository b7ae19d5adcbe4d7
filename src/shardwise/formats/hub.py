"""Models on the Hugging Face hub: the local cache is used as it is, missing files are downloaded.

huggingface_hub is imported by the functions that need it, since its import takes long.
"""

import socket
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import getproxies

from shardwise.formats.config_files import read_json_object

MODEL_FILES = ("*.json", "*.safetensors", "tokenizer*", "vocab*", "merges.txt", "*.jinja")
WHAT_TO_DO = (
    "check the name, the network (a proxy, HF_ENDPOINT), and where the cache is (HF_HOME), or name "
    "a model folder"
)


def fetch_config(
    hub_id: str, cache_dir: Path | None = None, local_files_only: bool = False
) -> Path:
    """Return the path of a model's config.json, from the cache or downloaded.

    Raises ValueError, in one sentence, if that fails.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(
            hf_hub_download(hub_id, "config.json", cache_dir=cache_dir, local_files_only=True)
        )
    except LocalEntryNotFoundError as error:
        if local_files_only or not can_reach_hub():
            raise _hub_error(hub_id, error) from error
    except ValueError as error:
        raise _hub_error(hub_id, error) from error
    try:
        return Path(hf_hub_download(hub_id, "config.json", cache_dir=cache_dir))
    except Exception as error:  # the HTTP client, and so its errors, differ by version
        raise _hub_error(hub_id, error) from error


def fetch_model(hub_id: str, cache_dir: Path | None = None, local_files_only: bool = False) -> Path:
    """Return the folder of a model with its weights and tokenizer, from the cache or downloaded.

    Raises ValueError, in one sentence, if that fails.
    """
    from huggingface_hub import snapshot_download

    cached = fetch_config(hub_id, cache_dir, local_files_only).parent
    if is_complete(cached):
        return cached
    if local_files_only or not can_reach_hub():
        raise ValueError(
            f"{hub_id}: the local cache lacks its weights or tokenizer, and the hub cannot be "
            f"reached; {WHAT_TO_DO}"
        )
    try:
        folder = snapshot_download(
            hub_id,
            cache_dir=cache_dir,
            allow_patterns=list(MODEL_FILES),
            ignore_patterns=["*/*", "consolidated*"],
        )
    except Exception as error:
        raise _hub_error(hub_id, error) from error
    if not any(Path(folder).glob("*.safetensors")):
        raise ValueError(
            f"{hub_id} has no safetensors weights on the hub, the only kind that is downloaded"
        )
    return Path(folder)


def is_complete(folder: Path) -> bool:
    """Return True if a snapshot in the cache has a tokenizer and every file of its weights."""
    index = folder / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.is_file():
        files = set(read_json_object(index)["weight_map"].values())
    has_tokenizer = any(
        (folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")
    )
    return has_tokenizer and all((folder / name).exists() for name in files)


def can_reach_hub() -> bool:
    """Return True if the hub's host name resolves.

    Checked before the client is called, which retries for half a minute without a network. A proxy
    resolves names itself, so with one the client has to try.
    """
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return False
    try:
        return bool(getproxies() or socket.getaddrinfo(urlparse(ENDPOINT).hostname, None))
    except OSError:
        return False


def _hub_error(hub_id: str, error: Exception) -> ValueError:
    """Return one sentence for each way in which a download fails."""
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
            f"{hub_id} is neither a folder on this machine nor a public model on the hub; check "
            "the name, or `hf auth login` for a private model"
        )
    if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        return ValueError(f"{hub_id} has no config.json on the hub")
    if isinstance(error, LocalEntryNotFoundError | ConnectionError):
        return ValueError(
            f"{hub_id} is neither a folder on this machine nor in the hub's local cache, and the "
            f"hub cannot be reached; {WHAT_TO_DO}"
        )
    reason = str(error).strip().splitlines()
    return ValueError(
        f"{hub_id} cannot be downloaded: {reason[0] if reason else type(error).__name__}"
    )
