"""The file table of every package README lists exactly the files of its package.

The first cell of a row has names in backticks: `file.py`, `folder/file.py`, or `folder/` for everything below it.
A name without a slash after `folder/file.py` in the same row is in the same folder.
"""

import re
from pathlib import Path

import pytest

from tests.source_tree import ROOT

HEADING = re.compile(r"\| (file|files)\b.*\|")
READMES = [path for path in sorted((ROOT / "unirl").rglob("README.md")) if (path.parent / "__init__.py").exists()]


def listed(readme: Path) -> list[str]:
    """The names in the first column of the tables that are headed `file`, relative to the folder of the README."""
    lines = readme.read_text(encoding="utf-8").splitlines()
    starts = [number for number, line in enumerate(lines) if HEADING.match(line)]
    names: list[str] = []
    for start in starts:
        for line in lines[start + 2 :]:
            if not line.startswith("|"):
                break
            names += names_of_row(line.split("|")[1], readme.parent)
    return names


def names_of_row(cell: str, folder: Path) -> list[str]:
    names: list[str] = []
    for name in re.findall(r"`([\w./]+(?:\.py|/))`", cell):
        parent = names[-1].rpartition("/")[0] if names else ""
        beside = f"{parent}/{name}" if parent and "/" not in name else name
        names.append(beside if (folder / beside).exists() else name)
    return names


def present(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder)) for path in folder.rglob("*.py") if path.name != "__init__.py" or path.read_text()
    }


def mismatches(readme: Path) -> tuple[list[str], list[str]]:
    """Files that the table lacks, and names in the table that do not exist."""
    names, files = listed(readme), present(readme.parent)
    folders = [name for name in names if name.endswith("/")]
    covered = {file for file in files if file in names or any(file.startswith(folder) for folder in folders)}
    unknown = [name for name in names if not (readme.parent / name).exists()]
    return sorted(file for file in files - covered if not file.endswith("__init__.py")), unknown


@pytest.mark.parametrize("readme", READMES, ids=[str(path.parent.relative_to(ROOT)) for path in READMES])
def test_the_file_table_equals_the_folder(readme):
    absent, unknown = mismatches(readme)
    assert listed(readme), "the README has no table whose first column is headed `file`"
    assert absent == [], "files that the table does not list"
    assert unknown == [], "names in the table that do not exist"


def test_a_missing_and_an_unknown_file_are_found(tmp_path):
    for name in ("__init__.py", "a.py", "b.py", "deep/c.py", "deep/d.py", "other/e.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    readme = tmp_path / "README.md"
    readme.write_text(
        "| file | content |\n|---|---|\n| `a.py` | |\n| `deep/c.py`, `d.py`, `gone.py` | |\n| `other/` | |\n"
    )
    assert mismatches(readme) == (["b.py"], ["gone.py"])
