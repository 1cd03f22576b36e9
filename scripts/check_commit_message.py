"""Checks the message of a commit; pre-commit runs it as the commit-msg hook.

    python scripts/check_commit_message.py .git/COMMIT_EDITMSG

Rules: the subject reads `area: text` and has at most 72 characters; a blank line separates it from the body; the body
says why the change was made and how it was checked. Only a mechanical change needs no body.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

MAX_SUBJECT = 72
SUBJECT = re.compile(r"[a-z][\w./, -]*: \S.*")
MECHANICAL = ("rename", "move", "reformat", "delete", "bump")
"""First words of a subject's text that need no body: the diff says everything."""
WRITTEN_BY_GIT = ("Merge ", 'Revert "', "fixup! ", "squash! ")


def problems(message: str) -> list[str]:
    """Returns one message for each rule that is broken, with the way to fix it."""
    lines = [line for line in message.split("\n# ------------------------ >8")[0].splitlines() if line[:1] != "#"]
    subject, *rest = "\n".join(lines).strip().split("\n")
    if subject.startswith(WRITTEN_BY_GIT):
        return []
    broken = []
    if not SUBJECT.fullmatch(subject) or subject.endswith("."):
        broken.append(f"the subject {subject!r} must read `area: what the commit does`, without a full stop at its end")
    if len(subject) > MAX_SUBJECT:
        broken.append(f"the subject has {len(subject)} characters; use at most {MAX_SUBJECT} and explain in the body")
    if rest and rest[0]:
        broken.append("the second line must be empty")
    if not any(rest) and not is_mechanical(subject):
        broken.append(
            "the body is missing: say why, what was considered and how it was checked. Only a subject whose text "
            f"begins with {', '.join(MECHANICAL)} needs none"
        )
    return broken


def is_mechanical(subject: str) -> bool:
    """True if the subject announces a mechanical change, such as `models: move the loaders to loading/`."""
    return subject.partition(": ")[2].split(" ")[0] in MECHANICAL


def main() -> int:
    broken = problems(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for problem in broken:
        print(f"commit message: {problem}", file=sys.stderr)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
