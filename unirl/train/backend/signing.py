"""Signed manifests: HMAC-SHA256 (RFC 2104) of MANIFEST.json with a secret key, in MANIFEST.hmac beside it.

The manifest holds the SHA-256 of every file, so the signature covers the whole checkpoint. Whoever may write to the
folder but does not have the key cannot make a checkpoint that a run with the key continues.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from pathlib import Path

from unirl.config.errors import InvalidValueError
from unirl.types.secrets import conceal

SIGNATURE = "MANIFEST.hmac"
FROM_ENVIRONMENT = "env:"
SHORTEST = 16
"""Bytes of the shortest key that is accepted."""
LONGEST = 4096
"""Bytes that are read of a key or a signature."""


def read_key(source: str, setting: str) -> bytes:
    """The key in an environment variable (`env:NAME`) or in a file that only its owner may read.

    Args:
        setting: what names the source, for messages.

    Raises:
        ConfigError: 2004.
    """
    make = "Make a key with: openssl rand -hex 32"
    if source.startswith(FROM_ENVIRONMENT):
        name = source.removeprefix(FROM_ENVIRONMENT)
        if name not in os.environ:
            raise InvalidValueError(f"{setting}={source}: the environment variable {name} is not set. {make}")
        key = os.environ[name].strip().encode()
    else:
        path = Path(source).expanduser()
        try:
            with open(path, "rb") as file:
                mode, key = os.fstat(file.fileno()).st_mode, file.read(LONGEST).strip()
        except OSError as error:
            raise InvalidValueError(
                f"{setting}={source}: the file cannot be read ({error.strerror}). Name a file, or env:NAME for an "
                f"environment variable. {make}"
            ) from error
        if stat.S_IMODE(mode) & 0o077:
            raise InvalidValueError(
                f"{setting}={source}: the file has mode {stat.S_IMODE(mode):o}, so other users may read the key. Run: "
                f"chmod 600 {path}"
            )
    if len(key) < SHORTEST:
        raise InvalidValueError(f"{setting}={source}: the key has {len(key)} bytes, and needs {SHORTEST}. {make}")
    conceal(key.decode("utf-8", "replace"))
    return key


def signature_of(manifest: bytes, key: bytes) -> str:
    """The content of MANIFEST.hmac for the content of a manifest."""
    return hmac.new(key, manifest, hashlib.sha256).hexdigest() + "\n"


def is_signed(folder: Path) -> bool:
    """True if the checkpoint has a signature, valid or not."""
    return (folder / SIGNATURE).exists()


def signature_problems(folder: Path, manifest: bytes, key: bytes) -> list[str]:
    """The reason why the manifest of `folder` is not one that was signed with `key`. Empty if it is."""
    try:
        with open(folder / SIGNATURE, "rb") as file:
            found = file.read(LONGEST)
    except OSError:
        return [f"{SIGNATURE} is missing: the checkpoint was saved without checkpoint.signing_key"]
    if hmac.compare_digest(found, signature_of(manifest, key).encode()):
        return []
    return [
        f"{SIGNATURE} does not fit: the manifest was changed, or signed with another key. Give the key of the run that "
        "saved it"
    ]
