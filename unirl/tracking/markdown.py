"""Text that somebody else wrote, set into a Markdown page so that it is read and never interpreted.

Every line of it stands four columns in (an indented code block): no fence that it could close, no heading that it could
begin, no HTML. What has no glyph is spelled out, so that it moves no cursor and hides nothing.
"""

from __future__ import annotations

import re
import unicodedata

from unirl.tracking.lines import printable

MAX_LINES = 120
"""Lines of one text on a page; a longer one loses its middle."""
MAX_INLINE = 80


def block(text: str, limit: int) -> str:
    """The text as a block of a page, at most about `limit` characters of it, and a blank line after it."""
    if not text.strip():
        return "*(empty)*\n\n" if not text else f"*({len(text)} characters of white space)*\n\n"
    return "".join(f"    {line}\n" for line in visible(shortened(text, limit)).split("\n")) + "\n"


def shortened(text: str, limit: int) -> str:
    """The text; of one that is longer, or has too many lines, the beginning and the end."""
    lines = text.split("\n")
    if len(lines) > MAX_LINES:
        head, tail = "\n".join(lines[: 2 * MAX_LINES // 3]), "\n".join(lines[-MAX_LINES // 3 :])
    else:
        head, tail = text, ""
    room = limit if not tail else limit * len(head) // (len(head) + len(tail))
    if len(head) > room:
        head, tail = head[: 2 * room // 3], tail[-(limit - room) :] if tail else head[-(room // 3) :]
    left_out = len(text) - len(head) - len(tail)
    return text if left_out <= 0 else f"{head}\n[... {left_out} characters that this page leaves out ...]\n{tail}"


def visible(text: str) -> str:
    """The text with every character that has no glyph (controls, surrogates, marks of direction) as <U+0000>."""
    return "".join(c if c in "\n\t" or _has_glyph(c) else f"<U+{ord(c):04X}>" for c in text.replace("\r\n", "\n"))


def inline(text: str, limit: int = MAX_INLINE) -> str:
    """A short text within a line, as code."""
    said = printable(text).strip()[:limit]
    longest = max((len(run) for run in re.findall("`+", said)), default=0)
    fence, pad = "`" * (longest + 1), " " if said[:1] == "`" or said[-1:] == "`" else ""
    return f"{fence}{pad}{said}{pad}{fence}" if said else ""


def _has_glyph(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"
