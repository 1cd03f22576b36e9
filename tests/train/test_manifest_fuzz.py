"""Manifests with a right checksum and any content: a checkpoint is valid, or its problems are sentences.

A checksum proves that nothing flipped. It does not prove that a program wrote the file.
"""

import hashlib
import json
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.fuzzing import short
from unirl.train.backend.checkpoint import CheckpointStore, verify
from unirl.train.backend.manifest import MANIFEST, SCHEMA_VERSION

CONTENT = b"weights"
ENTRY = {"name": "weights.bin", "size": len(CONTENT), "sha256": hashlib.sha256(CONTENT).hexdigest()}
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8
)
names = st.text() | st.sampled_from(["weights.bin", "", ".", "..", "a/../../b", "/etc/passwd", "\0", "a" * 5000, "a/b"])
named = st.fixed_dictionaries(
    {"name": names, "size": st.integers(0, 20) | st.integers(), "sha256": st.just(ENTRY["sha256"]) | st.text()}
)
entries = st.fixed_dictionaries({}, optional={key: st.just(ENTRY[key]) | values for key in ENTRY} | {"name": names})
well_formed = st.fixed_dictionaries(
    {
        "schema_version": st.just(SCHEMA_VERSION),
        "step": st.just(3) | st.integers(),
        "files": st.lists(st.just(ENTRY) | named, max_size=3),
        "versions": st.just({}),
    }
)
loose = st.fixed_dictionaries(
    {"schema_version": st.just(SCHEMA_VERSION) | values},
    optional={
        "step": st.integers() | values,
        "files": st.lists(entries | values, max_size=3) | values,
        "versions": st.dictionaries(st.text(), st.text(), max_size=2) | values,
        "other": values,
    },
)


def canonical(data: object) -> bytes:
    return (json.dumps(data, sort_keys=True, indent=1) + "\n").encode()


@short
@given(data=well_formed | loose)
def test_a_manifest_with_a_right_checksum_and_any_content_is_valid_or_has_named_problems(data):
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root, "checkpoint-000003")
        folder.mkdir()
        (folder / "weights.bin").write_bytes(CONTENT)
        digest = hashlib.sha256(canonical(data)).hexdigest()
        (folder / MANIFEST).write_bytes(canonical({**data, "sha256": digest}))
        damage = verify(folder)
        latest = CheckpointStore(Path(root)).latest_valid().checkpoint
        assert all(isinstance(problem, str) and problem for problem in damage)
        assert (latest is None) == bool(damage)
        assert damage or (data["step"], data["files"]) == (3, [ENTRY])
