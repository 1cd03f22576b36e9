"""Secrets in texts: how they are recognised, and the one place where every text that a run writes loses them.

Three rules find a secret. Its value is known (`conceal`): that of a secret key of the recipe, or of an environment
variable whose name says so. Or it stands behind a name that says so, `api_key: ...`. Or it has the shape of one:
`Bearer ...`, a password in an address, a key of a known service.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated


class SecretMark:
    """Marks the type of a setting whose value is secret."""


Secret = Annotated[str, SecretMark()]
"""The type of a setting whose value is never written: `password: Secret`, or `Secret | None`."""
MASK = "***"
SHORTEST = 6
"""Letters of the shortest value that is replaced wherever it occurs. A shorter one occurs by chance."""
SECRET_WORD = r"(?:token|secret|password|passwd|api[_-]?key|access[_-]?key|credentials?|authorization)"
SECRET_NAME = rf"(?:[\w.-]*[_.-])?{SECRET_WORD}"
VALUE = r"""(?!\s|null\b|None\b|["']?\$\{|(?:Bearer )?<\w+>)("[^"]*"|'[^']*'|[^\s,}]+)"""
"""Not a secret: nothing, a variable, and a placeholder such as <token> in an instruction."""
ASSIGNMENT = re.compile(rf"""(?im)((?:^|[\s,{{"'+]){SECRET_NAME}["']?\s*[:=][ \t]*){VALUE}""")
SETTING = re.compile(rf"(?is)^([+~]*{SECRET_NAME}\s*[\s:=]).+")
"""A word of the command line for a secret key, even one that is written wrongly: all after the key may be secret."""
QUERY = re.compile(rf"""(?i)([?&](?:{SECRET_NAME}|(?:[\w-]*-)?sig(?:nature)?)=)[^&\s"']+""")
"""A parameter of an address, such as the signature of a presigned one."""
USER_INFO = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^\s/@]+@")
SCHEME = re.compile(r"(?i)\b(bearer|basic)[ \t]+(?=[\w.~+/=-]*[\d.~+/=_-])[\w.~+/=-]{6,}")
"""The value of an Authorization header. Words of a sentence, such as "basic settings", have no digit or sign."""
KEY_SHAPES = re.compile(
    r"\b(?:hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}"
    r"|AIza[\w-]{30,}|AKIA[A-Z0-9]{16}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)\b"
)
_values: set[str] = set()


def is_secret_name(name: str) -> bool:
    """True for the name of a key or variable that says that its value is secret."""
    return re.fullmatch(SECRET_NAME, name, re.IGNORECASE) is not None


def conceal(value: str) -> None:
    """From now on, replace this value in every text that this process writes."""
    if len(value) >= SHORTEST and value != MASK:
        _values.update((value, json.dumps(value)[1:-1]))


def conceal_environment(environment: Mapping[str, str]) -> None:
    """Conceal the values of all environment variables with secret-sounding names."""
    for name, value in environment.items():
        if is_secret_name(name):
            conceal(value)


def without_values(text: str) -> str:
    """`text` without the values that are concealed."""
    for value in sorted(_values, key=len, reverse=True):
        text = text.replace(value, MASK)
    return text


def redact(text: str) -> str:
    """`text` without secrets, by all three rules."""
    text = without_values(text)
    text = SCHEME.sub(rf"\1 {MASK}", text)
    text = USER_INFO.sub(rf"\1{MASK}@", text)
    text = QUERY.sub(rf"\1{MASK}", text)
    text = ASSIGNMENT.sub(rf"\1{MASK}", text)
    return KEY_SHAPES.sub(MASK, text)


def redact_setting(word: str) -> str:
    """A word of the command line without its secret."""
    return redact(SETTING.sub(rf"\1{MASK}", word))


def redacted(value: object, key: str = "") -> object:
    """JSON data with `redact` applied to every text, and texts whose keys have secret-sounding names masked."""
    if isinstance(value, str):
        return MASK if is_secret_name(str(key)) and "${" not in value else redact(value)
    if isinstance(value, Mapping):
        return {name: redacted(entry, name) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(entry) for entry in value]
    return value
