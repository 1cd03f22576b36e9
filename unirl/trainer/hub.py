"""Uploads an export to the model hub."""

from __future__ import annotations

import shlex
from pathlib import Path

from unirl.config.errors import AddressError, InvalidValueError
from unirl.models.loading.hub import HUB_ID


def check_repo(repo: str) -> None:
    """Raises InvalidValueError (2004) if `repo` is not the id of a repository."""
    if not HUB_ID.fullmatch(repo):
        raise InvalidValueError(f"--push-to-hub {repo!r}: give the id of a repository, OWNER/NAME")


def push(folder: Path, repo: str, private: bool = True) -> str:
    """Uploads the files of a folder to a repository of the hub, which is made if it is missing. Returns its address.

    Args:
        private: of a repository that is made; one that exists stays as it is.

    Raises:
        AddressError: 3003 if the hub cannot be reached or refuses. The message says how to upload the folder later.
    """
    from httpx2 import TransportError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    hub = HfApi()
    try:
        hub.create_repo(repo, private=private, exist_ok=True)
        return str(hub.upload_folder(repo_id=repo, folder_path=folder, commit_message="Export of UniRL").repo_url)
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no status"
        why = f"the hub refused ({status}: {error.server_message or type(error).__name__}). Run `hf auth login`, or"
    except LocalTokenNotFoundError:
        why = "there is no token of the hub. Run `hf auth login`, then"
    except (ConnectionError, TransportError) as error:
        why = f"the hub cannot be reached ({type(error).__name__}). Once it can,"
    later = shlex.join(["hf", "upload", repo, str(folder), ".", *(["--private"] if private else [])])
    raise AddressError(f"nothing was pushed to {repo}: {why} push the folder, which is ready, by\n  {later}")
