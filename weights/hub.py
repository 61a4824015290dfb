"""Models by name: from the Hugging Face hub, by way of its local cache."""

from pathlib import Path

from weights.huggingface_config import read_config

FILES = [
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
]


def fetch(name: str) -> Path:
    """The local folder of `owner/model` or `owner/model@revision`, downloaded if it is not there yet.

    Without a network the cache answers. Raises ValueError, in one line, for a model that cannot be had or is not supported;
    the latter before its weights are downloaded.
    """
    # Imported here: it takes half a second, and only the name of a model on the hub needs it.
    from huggingface_hub import constants, errors, hf_hub_download, snapshot_download
    from huggingface_hub.utils import validate_repo_id

    repo, _, revision = name.partition("@")
    endpoint = constants.ENDPOINT
    try:
        validate_repo_id(repo)
    except errors.HFValidationError:
        raise ValueError(f"{name} does not exist here, and is no name of a model on {endpoint} (owner/model)") from None
    offline = not answers(endpoint)
    try:
        config = Path(hf_hub_download(repo, "config.json", revision=revision or None, local_files_only=offline))
        read_config(config.parent)
        commit = config.parent.name  # the weights of the same revision, whatever is pushed in between
        return Path(
            snapshot_download(repo, revision=commit, allow_patterns=FILES, ignore_patterns=["*/*"], local_files_only=offline)
        )
    except errors.LocalEntryNotFoundError:
        why = "does not answer" if offline else "broke off"
        raise ValueError(f"{name} is no folder here and not in the hub's cache, and {endpoint} {why}: try again later") from None
    except errors.GatedRepoError:
        raise ValueError(f"{name} is gated: accept its terms on {endpoint}/{repo}, then run `hf auth login`") from None
    except errors.RepositoryNotFoundError:
        raise ValueError(f"{name} is no folder here and no model on {endpoint} (if it is private: run `hf auth login`)") from None
    except errors.RevisionNotFoundError:
        raise ValueError(f"{repo} on {endpoint} has no revision {revision}") from None
    except errors.EntryNotFoundError:
        raise ValueError(f"{repo} on {endpoint} has no config.json: it is no model for transformers") from None
    except ValueError:
        raise  # an unsupported model's
    except Exception as error:  # of the network library, which differs between versions of the client, or of the disk
        raise ValueError(f"{name} cannot be downloaded: {' '.join(str(error).split())}") from None


def answers(endpoint: str) -> bool:
    """Whether anything answers there within seconds: the client itself tries for much longer, or without an end."""
    from huggingface_hub.utils import get_session  # likewise

    try:
        get_session().head(endpoint, timeout=5)
    except Exception:  # as above
        return False
    return True
