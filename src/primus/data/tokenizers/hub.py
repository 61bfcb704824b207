"""Download tokenizer files of models from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from primus.data.retries import is_client_error, retry_request
from primus.errors import PrimusError, UsageError


def tokenizer_file(name: str) -> Path:
    """Path of the tokenizer.json of a model on the hub; downloaded if it is not in the local cache."""
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise UsageError(
            f"{name}: no such file, and names on the hub need the package huggingface_hub",
            "pip install huggingface_hub, or give the path of a tokenizer.json",
        ) from None
    try:
        return Path(retry_request(name, lambda: huggingface_hub.hf_hub_download(name, "tokenizer.json")))
    except errors.HFValidationError:
        raise UsageError(f"{name}: no such file, and no name on the hub", "give a path or OWNER/NAME") from None
    except errors.GatedRepoError:
        raise PrimusError(
            f"{name}: this model is available only after accepting its terms",
            f"accept them at https://huggingface.co/{name} and set HF_TOKEN",
        ) from None
    except errors.RepositoryNotFoundError:
        raise UsageError(
            f"{name}: neither a local file nor a model on the hub that you may see",
            "check the name; a private model needs HF_TOKEN",
        ) from None
    except errors.EntryNotFoundError as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise _build_unreachable_error(name, error) from None
        raise UsageError(f"{name}: this model has no tokenizer.json", "save one with transformers") from None
    except Exception as error:
        if not (isinstance(error, OSError) or is_client_error(error)):
            raise
        raise _build_unreachable_error(name, error) from None


def read_optional(name: str, file: str, ask_hub: bool) -> bytes | None:
    """Read an optional small file of a model; None if it does not exist or cannot be downloaded.

    Args:
        name: OWNER/NAME.
        file: Path in the repository.
        ask_hub: Whether to download the file if it is not in the local cache.
    """
    import huggingface_hub
    from huggingface_hub import errors

    try:
        if ask_hub:
            return Path(retry_request(name, lambda: huggingface_hub.hf_hub_download(name, file))).read_bytes()
        found = huggingface_hub.try_to_load_from_cache(name, file)
        return Path(found).read_bytes() if isinstance(found, str) else None
    except Exception as error:
        if not (isinstance(error, (errors.EntryNotFoundError, OSError)) or is_client_error(error)):
            raise
        return None


def _build_unreachable_error(name: str, error: Exception) -> PrimusError:
    reason = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
    return PrimusError(
        f"{name}: no such file, and the hub cannot be reached ({reason[0]})",
        "give the path of a tokenizer.json, or download it where there is a network and set HF_HOME to that cache",
    )
