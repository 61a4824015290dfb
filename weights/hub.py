"""Models by name: from the Hugging Face hub, by way of its local cache."""

import time
from pathlib import Path

from weights.huggingface_config import read_config

FILES = ["*config.json", "tokenizer.json", "chat_template.jinja", "model*.safetensors*"]
PAUSES = (0.5, 1, 2, 4)  # seconds between questions to a busy hub
MEANING = {  # of the client's errors
    "GatedRepoError": "{name} is gated: accept its terms on {hub}/{repo}, then run `hf auth login`",
    "RepositoryNotFoundError": "{name} is no folder here and no model on {hub} (if it is private: run `hf auth login`)",
    "RevisionNotFoundError": "{repo} on {hub} has no revision {revision}",
    "LocalEntryNotFoundError": "{name} is no folder here, not in the hub's cache, and {hub} {trouble}: check it, or try later",
    "EntryNotFoundError": "{repo} on {hub} has no config.json: it is no model for transformers",
    "HFValidationError": "{name} does not exist here, and is no name of a model on {hub} (owner/model)",
    "Exception": "{name} cannot be downloaded: {error}",  # of the network or the disk
}


def fetch(name: str) -> Path:
    """The local folder of `owner/model` or `owner/model@revision`, downloaded if it is not there yet.

    Without a network the cache answers. Raises ValueError, in one line, for a model that cannot be had or is not supported;
    the latter before its weights are downloaded.
    """
    # Imported here: it takes half a second, and only the name of a model on the hub needs it.
    from huggingface_hub import constants, hf_hub_download, hf_hub_url, snapshot_download

    repo, _, revision = name.partition("@")
    asked, trouble = revision or None, ""
    try:
        trouble = trouble_with(hf_hub_url(repo, "config.json", revision=asked))
        offline = bool(trouble)
        folder = Path(hf_hub_download(repo, "config.json", revision=asked, local_files_only=offline)).parent
        read_config(folder)
        commit = folder.name  # the weights of the same one, whatever is pushed in between
        snapshot_download(repo, revision=commit, allow_patterns=FILES, ignore_patterns=["*/*"], local_files_only=offline)
        return folder
    except Exception as error:
        if type(error) is ValueError:  # an unsupported model's
            raise
        meaning = next(MEANING[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in MEANING)
        known = {"name": name, "repo": repo, "revision": revision, "hub": constants.ENDPOINT, "trouble": trouble or "broke off"}
        raise ValueError(meaning.format(**known, error=" ".join(str(error).split()))) from None


def trouble_with(url: str) -> str:
    """Why nothing can be had from there now, if so; known within seconds: the client itself tries for long, or without an end."""
    from huggingface_hub.utils import get_session  # likewise

    for pause in (*PAUSES, 0):
        try:
            status = get_session().head(url, timeout=5).status_code
        except Exception:  # of the network library, which differs between versions of the client
            return "does not answer"
        if status != 429 and status < 500:
            return ""
        time.sleep(pause)
    return f"is busy (it answers {status})"
