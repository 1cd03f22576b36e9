"""Checkpoints: every step of the save protocol may fail or be the last thing a process does."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from unirl.config.errors import CheckpointError
from unirl.train.backend.checkpoint import Checkpoint, CheckpointStore, open_checkpoint, verify

WATCHED = ("open", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "link")


@pytest.fixture(scope="module")
def memory(tmp_path_factory):
    """A folder in memory, where the machine has one: nothing here is about how fast a disk is."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path_factory.mktemp("disk")
        return
    with tempfile.TemporaryDirectory(prefix="unirl-test-", dir=shared) as folder:
        yield Path(folder)


@pytest.fixture
def tmp_path(memory):
    return Path(tempfile.mkdtemp(dir=memory))


class Crash(BaseException):
    """The process is gone: nothing it would do afterwards happens."""


class FailingDisk:
    """Counts the calls that change the disk; call number `at` fails with `kind` (an errno, or "crash")."""

    def __init__(self, at: int | None = None, kind: int | str = "crash") -> None:
        self.at, self.kind, self.trace, self.dead = at, kind, [], False
        self.open_descriptors = set()

    def step(self, what: str, path: object) -> None:
        if self.dead:
            raise Crash
        self.trace.append((what, Path(str(path)).name if not isinstance(path, int) else path))
        if self.at is not None and len(self.trace) - 1 == self.at:
            if self.kind == "crash":
                self.dead = True
                raise Crash
            raise OSError(self.kind, os.strerror(self.kind), str(path))

    @contextmanager
    def mounted(self):
        with pytest.MonkeyPatch.context() as patch:
            for name in WATCHED:
                patch.setattr(os, name, self._watch(name, getattr(os, name)))
            patch.setattr(os, "close", self._close(os.close))
            patch.setattr(builtins, "open", self._open(builtins.open))
            yield self
        # The system closes the files that a dead process has open, and drops its locks. A number that was closed
        # before may belong to another file by now, so only the numbers that are still open are closed.
        for descriptor in self.open_descriptors if self.dead else ():
            os.close(descriptor)

    def _watch(self, name, call):
        def watched(path, *args, **kwargs):
            self.step(name, path)
            result = call(path, *args, **kwargs)
            if name == "open":
                self.open_descriptors.add(result)
            return result

        return watched

    def _close(self, call):
        def closed(descriptor):
            # First forgotten, then closed: another thread may get the number as soon as it is free.
            self.open_descriptors.discard(descriptor)
            call(descriptor)

        return closed

    def _open(self, call):
        def opened(path, mode="r", *args, **kwargs):
            file = call(path, mode, *args, **kwargs)
            if "w" in mode:
                file.write = self._half(file, path)
                try:
                    self.step("create", path)
                except BaseException:
                    file.close()
                    raise
            return file

        return opened

    def _half(self, file, path):
        def write(data):
            try:
                self.step("write-half", path)
            except BaseException:
                type(file).write(file, data[: len(data) // 2])
                raise
            return type(file).write(file, data)

        return write


def content(step: int) -> dict[str, bytes]:
    return {"weights.safetensors": bytes([step]) * 300, "state/trainer.json": json.dumps({"step": step}).encode()}


def save(store: CheckpointStore, step: int) -> None:
    with store.stage(step) as folder:
        for name, data in content(step).items():
            (folder / name).parent.mkdir(exist_ok=True)
            # A raw file object: an unwritten buffer must not reach the disk after the simulated death.
            with io.FileIO(folder / name, "w") as file:
                file.write(data)


def complete(store: CheckpointStore, step: int) -> None:
    """The end of a run: save the last step and publish it as `checkpoint-final`."""
    save(store, step)
    store.publish_final(step)


def read(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in content(0)}


def damage(folder: Path) -> None:
    (folder / "weights.safetensors").write_bytes(b"?" * 300)


def moved_aside(path: Path) -> None:
    """What a save leaves when it dies between moving the older folder of its name aside and publishing its own."""
    os.rename(path, path.with_name(f"{path.name}.replaced"))


def first_save(root: Path) -> tuple[CheckpointStore, int, set[int]]:
    return CheckpointStore(root / "checkpoints", keep=2), 1, set()


def save_that_prunes(root: Path) -> tuple[CheckpointStore, int, set[int]]:
    store = CheckpointStore(root / "checkpoints", keep=2)
    save(store, 1)
    save(store, 2)
    return store, 3, {2}


def save_over_a_damaged_one(root: Path) -> tuple[CheckpointStore, int, set[int]]:
    store = CheckpointStore(root / "checkpoints", keep=1)
    save(store, 2)
    damage(store.directory / "checkpoint-000002")
    save(store, 1)
    return store, 2, {1}


def save_over_the_only_one(root: Path) -> tuple[CheckpointStore, int, set[int]]:
    store = CheckpointStore(root / "checkpoints", keep=1)
    save(store, 2)
    return store, 2, {2}


def save_beside_leftovers(root: Path) -> tuple[CheckpointStore, int, set[int]]:
    store, step, valid = save_that_prunes(root)
    (store.directory / ".staging-checkpoint-000002").mkdir()
    (store.directory / ".staging-checkpoint-000002" / "half").write_bytes(b"h")
    (store.directory / ".removing-checkpoint-000000-abc").mkdir()
    moved_aside(store.directory / "checkpoint-000002")
    return store, step, valid


SCENARIOS = [first_save, save_that_prunes, save_over_a_damaged_one, save_over_the_only_one, save_beside_leftovers]


ALIKE = [pytest.param(kind, marks=pytest.mark.slow) for kind in (errno.EIO, errno.EACCES)]


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("kind", ["crash", errno.ENOSPC, *ALIKE])
def test_failure_at_any_disk_operation_leaves_a_newest_valid_checkpoint(scenario, kind, tmp_path):
    store, step, _ = scenario(tmp_path / "count")
    with FailingDisk().mounted() as disk:
        save(store, step)
    assert len(disk.trace) > 10
    for at in range(len(disk.trace)):
        root = tmp_path / str(at)
        store, step, valid = scenario(root)
        save_on(FailingDisk(at, kind), store, step)
        latest = store.latest_valid().checkpoint
        where = f"{kind} at {at}: {disk.trace[at]}"
        assert latest or not valid, where
        if latest:
            assert latest.step in valid | {step}, where
            assert read(latest.path) == content(latest.step), where
        save(store, step + 1)
        assert store.latest_valid().checkpoint.step == step + 1, where
        assert not [path.name for path in store.directory.iterdir() if path.name.startswith(".")], where
        shutil.rmtree(root)


def save_on(disk: FailingDisk, store: CheckpointStore, step: int) -> None:
    """Saves; the only ways out are success, the process's death, and our own error."""
    with disk.mounted():
        try:
            save(store, step)
        except Crash:
            assert disk.kind == "crash"
        except CheckpointError as error:
            assert error.code == 7003


def test_every_file_is_durable_before_the_rename_and_pruning_comes_last(tmp_path):
    store, step, _ = save_that_prunes(tmp_path)
    with FailingDisk().mounted() as disk:
        save(store, step)
    calls = [what for what, _ in disk.trace]
    renamed = {str(name).split("-")[0]: i for i, (what, name) in enumerate(disk.trace) if what == "rename"}
    publish, latest, prune = renamed[".staging"], calls.index("replace"), renamed["checkpoint"]
    opened = [name for what, name in disk.trace[:publish] if what == "open"]
    assert {"weights.safetensors", "trainer.json", "MANIFEST.json", "state"} <= set(opened)
    # two files, the manifest, the state folder and the staged folder
    assert calls[:publish].count("fsync") == 5
    # the parent folder becomes durable right after the rename
    assert calls[publish + 1 : publish + 3] == ["open", "fsync"]
    assert publish < latest < prune


def test_full_disk_error_says_needed_free_and_what_was_kept(tmp_path):
    store, step, _ = save_that_prunes(tmp_path)
    expected = r"Needed: about .*; free: .*checkpoint-000002 is untouched"
    with pytest.raises(CheckpointError, match=expected) as caught, store.stage(step) as folder:
        (folder / "half").write_bytes(b"h")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert caught.value.code == 7003
    assert caught.value.exit_status == 7
    assert {path.name for path in store.directory.iterdir()} == {"LATEST", "checkpoint-000001", "checkpoint-000002"}


def test_full_disk_reported_by_a_tensor_library_is_recognised(tmp_path):
    store, step, _ = save_that_prunes(tmp_path)
    with pytest.raises(CheckpointError, match="could not be saved"), store.stage(step):
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")


def test_other_errors_in_the_block_pass_unchanged_and_leave_nothing(tmp_path):
    store, step, _ = save_that_prunes(tmp_path)
    with pytest.raises(ZeroDivisionError), store.stage(step):
        raise ZeroDivisionError
    assert store.latest_valid().checkpoint.step == 2
    assert not list(store.directory.glob(".*"))


def test_saving_is_refused_before_writing_when_the_last_checkpoint_would_not_fit(tmp_path, monkeypatch):
    store, step, _ = save_that_prunes(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1000, 990, 10))
    with pytest.raises(CheckpointError, match="No space left"):
        save(store, step)


@pytest.fixture(scope="module")
def sealed(memory) -> Path:
    """A checkpoint, beside an older one."""
    store = CheckpointStore(memory / "sealed")
    save(store, 3)
    save(store, 7)
    return store.directory / "checkpoint-000007"


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_mutation_of_a_checkpoint_is_detected_and_the_fallback_taken(data, sealed):
    root = sealed.parent.parent / "mutated"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(sealed.parent, root)
    mutate(data, root / "checkpoint-000007")
    latest = CheckpointStore(root).latest_valid()
    assert verify(root / "checkpoint-000007")
    assert latest.checkpoint.step == 3
    assert [skipped.path.name for skipped in latest.skipped] == ["checkpoint-000007"]


def mutate(data: st.DataObject, folder: Path) -> None:
    names = [*content(0), "MANIFEST.json"]
    victim = folder / data.draw(st.sampled_from(names))
    kind = data.draw(st.sampled_from(["flip", "truncate", "append", "remove", "swap", "link", "extra"]))
    text = bytearray(victim.read_bytes())
    if kind == "flip":
        text[data.draw(st.integers(0, len(text) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        victim.write_bytes(text)
    elif kind == "truncate":
        victim.write_bytes(text[: data.draw(st.integers(0, len(text) - 1))])
    elif kind == "append":
        victim.write_bytes(bytes(text) + data.draw(st.binary(min_size=1, max_size=3)))
    elif kind == "remove":
        victim.unlink()
    elif kind == "swap":
        other = folder / data.draw(st.sampled_from([name for name in names if folder / name != victim]))
        swapped = other.read_bytes()
        other.write_bytes(text)
        victim.write_bytes(swapped)
    elif kind == "link" and victim.name != "MANIFEST.json":
        victim.unlink()
        victim.symlink_to("/etc/hostname")
    else:
        (folder / "extra.safetensors").write_bytes(b"x")


def test_each_kind_of_damage_is_named_in_plain_words(sealed, tmp_path):
    def damaged(change) -> str:
        folder = tmp_path / "checkpoint-000007"
        shutil.copytree(sealed, folder)
        change(folder)
        result = "\n".join(verify(folder))
        shutil.rmtree(folder)
        return result

    assert damaged(lambda f: (f / "weights.safetensors").unlink()) == "weights.safetensors is missing"
    assert "has 10 bytes instead of 300" in damaged(lambda f: (f / "weights.safetensors").write_bytes(b"1234567890"))
    assert "is damaged (checksum differs)" in damaged(damage)
    assert "not listed" in damaged(lambda f: (f / "ema.safetensors").touch())
    assert "writing the folder did not finish" in damaged(lambda f: (f / "MANIFEST.json").unlink())
    assert damaged(lambda f: (f / ".DS_Store").touch()) == ""


def test_renamed_checkpoint_is_not_taken_for_another_step(sealed, tmp_path):
    shutil.copytree(sealed, tmp_path / "checkpoint-000009")
    assert verify(tmp_path / "checkpoint-000009") == [
        "the folder's name says step 9 but its manifest says step 7: was it renamed?"
    ]


def test_manifest_of_a_newer_schema_is_refused_by_name(sealed, tmp_path, monkeypatch):
    folder = Path(shutil.copytree(sealed, tmp_path / "checkpoint-000007"))
    monkeypatch.setattr("unirl.train.backend.manifest.SCHEMA_VERSION", 2)
    assert verify(folder) == ["MANIFEST.json has schema 1, but this version of UniRL reads schema 2"]


def test_manifest_that_leads_out_of_its_folder_is_refused(tmp_path):
    from unirl.train.backend.manifest import FileEntry, Manifest, _with_digest

    (tmp_path / "outside").write_bytes(b"")
    folder = tmp_path / "checkpoint-000001"
    folder.mkdir()
    for name in ("../outside", "/etc/hostname"):
        (folder / "MANIFEST.json").write_bytes(_with_digest(Manifest(1, (FileEntry(name, 0, ""),), {})))
        assert verify(folder) == [f"{name!r} is not the path of a file inside the folder"]


class Pruning(RuleBasedStateMachine):
    """Saves, damage, crashes and rewinds in any order, with a model of what must survive."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(os.environ["PYTEST_PRUNING_ROOT"]) / str(time.monotonic_ns())
        self.keep, self.step, self.valid = 1, 0, set()

    def store(self) -> CheckpointStore:
        return CheckpointStore(self.root, keep=self.keep)

    @rule(keep=st.integers(1, 3))
    def restart_with(self, keep: int) -> None:
        self.keep = keep

    @rule(final=st.booleans())
    def save_next(self, final: bool) -> None:
        self.step += 1
        (complete if final else save)(self.store(), self.step)
        self.observe()
        assert self.step in self.valid
        numbered = [c for c in self.store().checkpoints() if c.path.name != "checkpoint-final"]
        assert len(numbered) <= self.keep + 1

    @rule(at=st.integers(0, 60), final=st.booleans())
    def crash_while_saving(self, at: int, final: bool) -> None:
        self.step += 1
        with FailingDisk(at).mounted(), suppress(Crash):
            (complete if final else save)(self.store(), self.step)
        self.observe()

    @precondition(lambda self: len(self.valid) > 1)
    @rule(data=st.data())
    def damage_one(self, data) -> None:
        step = data.draw(st.sampled_from(sorted(self.valid)))
        for checkpoint in self.store().checkpoints():
            if checkpoint.step == step:
                damage(checkpoint.path)
        self.valid.discard(step)

    @precondition(lambda self: self.valid)
    @rule()
    def rewind(self) -> None:
        self.step = min(self.valid)
        self.store().discard_after(self.step)
        self.valid = {self.step}

    def observe(self) -> None:
        """A crash may or may not have published or pruned; what was valid must not all be gone."""
        now = {checkpoint.step for checkpoint in self.store().checkpoints() if not verify(checkpoint.path)}
        assert now or not self.valid
        assert not self.valid or max(now) >= max(self.valid)
        self.valid = now

    @invariant()
    def newest_valid_is_found(self) -> None:
        latest = self.store().latest_valid().checkpoint
        assert (latest.step if latest else None) == max(self.valid, default=None)


def test_at_least_one_valid_checkpoint_survives_any_interleaving(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_PRUNING_ROOT", str(tmp_path))
    case = Pruning.TestCase
    case.settings = settings(max_examples=40, stateful_step_count=12, deadline=None)
    case("runTest").runTest()


def test_a_folder_that_a_dead_save_moved_aside_is_discarded_like_any_other(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    save(store, 2)
    moved_aside(tmp_path / "checkpoint-000002")
    assert store.latest_valid().checkpoint.step == 2  # readable where it lies
    store.discard_after(1)
    assert store.latest_valid().checkpoint.step == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "checkpoint-000001"]


def test_a_valid_final_one_that_a_dead_save_moved_aside_outlives_a_damaged_successor(tmp_path):
    store = two_final_ones(tmp_path)
    damage(tmp_path / "checkpoint-final")
    store.collect()  # every save begins with it
    assert store.latest_valid().checkpoint == Checkpoint(tmp_path / "checkpoint-final", 1)


def test_a_final_one_that_a_dead_save_moved_aside_is_kept_when_the_run_goes_back_to_it(tmp_path):
    store = two_final_ones(tmp_path)
    store.discard_after(1)
    assert store.latest_valid().checkpoint.step == 1


def two_final_ones(folder: Path) -> CheckpointStore:
    """A store with `checkpoint-final` of step 2 and the one of step 1 that was moved aside, and no numbered ones."""
    for step in (1, 2):
        complete(CheckpointStore(folder / str(step)), step)
        os.rename(folder / str(step) / "checkpoint-final", folder / "checkpoint-final")
        shutil.rmtree(folder / str(step))
        if step == 1:
            moved_aside(folder / "checkpoint-final")
    return CheckpointStore(folder)


def test_the_final_one_is_the_last_one_under_a_second_name_and_takes_no_space(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    complete(store, 3)
    final, numbered = tmp_path / "checkpoint-final", tmp_path / "checkpoint-000003"
    assert store.checkpoints() == [Checkpoint(numbered, 3), Checkpoint(final, 3)]
    assert verify(final) == [] and read(final) == content(3)
    assert all(path.samefile(numbered / path.relative_to(final)) for path in final.rglob("*") if path.is_file())
    assert (tmp_path / "LATEST").read_text() == "checkpoint-000003\n"
    assert open_checkpoint(final).step == 3


def test_the_final_one_is_a_copy_where_the_file_system_has_no_hard_links(tmp_path, monkeypatch):
    def refuse(source, target):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    complete(CheckpointStore(tmp_path), 3)
    damage(tmp_path / "checkpoint-000003")
    assert verify(tmp_path / "checkpoint-final") == []


def test_the_final_one_serves_when_the_numbered_one_was_deleted(tmp_path):
    store = CheckpointStore(tmp_path)
    complete(store, 3)
    shutil.rmtree(tmp_path / "checkpoint-000003")
    assert store.latest_valid().checkpoint == Checkpoint(tmp_path / "checkpoint-final", 3)
    store.publish_final(3)
    assert read(tmp_path / "checkpoint-final") == content(3)


def test_a_valid_final_one_is_not_replaced_by_a_damaged_numbered_one(tmp_path):
    store = CheckpointStore(tmp_path)
    complete(store, 3)
    (tmp_path / "checkpoint-000003" / "weights.safetensors").unlink()
    store.publish_final(3)
    assert verify(tmp_path / "checkpoint-final") == []


def test_a_damaged_final_one_is_replaced(tmp_path):
    store = CheckpointStore(tmp_path)
    complete(store, 3)
    (tmp_path / "checkpoint-final" / "weights.safetensors").unlink()
    store.publish_final(3)
    assert verify(tmp_path / "checkpoint-final") == []


@pytest.mark.parametrize("kind", ["crash", errno.ENOSPC])
def test_failure_at_any_disk_operation_of_the_final_one_leaves_the_numbered_one(kind, tmp_path):
    def saved(root: Path) -> CheckpointStore:
        store = CheckpointStore(root, keep=2)
        complete(store, 1)
        save(store, 2)
        return store

    store = saved(tmp_path / "count")
    with FailingDisk().mounted() as disk:
        store.publish_final(2)
    assert len(disk.trace) > 10
    for at in range(len(disk.trace)):
        store = saved(tmp_path / str(at))
        with FailingDisk(at, kind).mounted(), suppress(Crash, CheckpointError):
            store.publish_final(2)
        assert read(store.latest_valid().checkpoint.path) == content(2), disk.trace[at]
        assert not store.latest_valid().skipped
        store.publish_final(2)  # the run is started again, and has no step left
        assert verify(store.directory / "checkpoint-final") == [], disk.trace[at]
        save(store, 3)
        names = sorted(path.name for path in store.directory.iterdir())
        assert names == ["LATEST", "checkpoint-000002", "checkpoint-000003"], disk.trace[at]


def test_pruning_keeps_the_newest_and_the_final_one_until_the_run_continues(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3):
        complete(store, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "LATEST", "checkpoint-000002", "checkpoint-000003", "checkpoint-final",
    ]  # fmt: skip
    assert open_checkpoint(tmp_path / "checkpoint-final").step == 3
    save(store, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "checkpoint-000003", "checkpoint-000004"]
    assert (tmp_path / "LATEST").read_text() == "checkpoint-000004\n"


def test_an_old_final_one_is_kept_while_all_newer_ones_are_damaged(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    complete(store, 3)
    save(store, 4)
    complete(CheckpointStore(tmp_path / "elsewhere"), 3)
    os.rename(tmp_path / "elsewhere" / "checkpoint-final", tmp_path / "checkpoint-final")
    damage(tmp_path / "checkpoint-000004")
    assert store.prune() == []
    assert store.latest_valid().checkpoint.step == 3


def test_folders_of_other_makers_are_never_pruned(tmp_path):
    (tmp_path / "global_step_1").mkdir()
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 2)
    save(store, 3)
    assert (tmp_path / "global_step_1").is_dir()


def test_resume_path_accepts_a_checkpoint_a_run_and_global_step_folders(tmp_path):
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    save(store, 2)
    save(store, 10)
    for path in (tmp_path / "run", store.directory, store.directory / "checkpoint-000010"):
        assert open_checkpoint(path).step == 10
    os.rename(store.directory / "checkpoint-000002", store.directory / "global_step_2")
    os.rename(store.directory / "checkpoint-000010", store.directory / "global_step_10")
    assert open_checkpoint(store.directory).path.name == "global_step_10"
    damage(store.directory / "global_step_10")
    assert open_checkpoint(tmp_path / "run").path.name == "global_step_2"


def test_resume_path_that_cannot_be_used_says_why_and_what_could(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 2)
    save(store, 4)
    damage(tmp_path / "checkpoint-000004")
    expected = r"(?s)weights.safetensors is damaged .*checkpoint-000002"
    with pytest.raises(CheckpointError, match=expected) as caught:
        open_checkpoint(tmp_path / "checkpoint-000004")
    assert caught.value.code == 7001
    damage(tmp_path / "checkpoint-000002")
    with pytest.raises(CheckpointError, match=r"(?s)no valid checkpoint.*000004 was skipped.*000002 was skipped"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        open_checkpoint(tmp_path / "absent")


def test_keep_zero_keeps_all_and_less_is_refused(tmp_path):
    for step in range(1, 6):
        save(CheckpointStore(tmp_path, keep=0), step)
    assert len(CheckpointStore(tmp_path, keep=0).checkpoints()) == 5
    with pytest.raises(ValueError, match="keep must be >= 0"):
        CheckpointStore(tmp_path, keep=-1)


SAVE_FOREVER = """
import sys
from unirl.train.backend.checkpoint import CheckpointStore
store = CheckpointStore(sys.argv[1], keep=2)
step = int(sys.argv[2])
print("ready", flush=True)
while True:
    step += 1
    with store.stage(step) as folder:
        for part in range(4):
            (folder / f"{part}.bin").write_bytes(step.to_bytes(4, "big") * 2000)
"""


def test_kill_9_at_random_moments_of_saving_never_costs_a_published_checkpoint(tmp_path):
    store, last = CheckpointStore(tmp_path, keep=2), 0
    for delay_ms in (2, 5, 8, 13, 21, 34, 3, 11):
        child = subprocess.Popen([sys.executable, "-c", SAVE_FOREVER, str(tmp_path), str(last)], stdout=subprocess.PIPE)
        child.stdout.readline()
        while max((c.step for c in store.checkpoints()), default=0) <= last and delay_ms % 2:
            time.sleep(0.001)
        time.sleep(delay_ms / 1000)
        published = max((c.step for c in store.checkpoints()), default=0)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        latest = store.latest_valid()
        assert not latest.skipped
        last = latest.checkpoint.step if latest.checkpoint else 0
        assert last >= published
    store.collect()
    assert not list(tmp_path.glob(".staging-*"))
    assert last > 0


def test_a_simulated_death_closes_only_the_files_that_are_still_open(tmp_path):
    with FailingDisk(at=2).mounted() as disk:
        number = os.open(tmp_path / "closed", os.O_CREAT | os.O_RDWR)
        os.close(number)
        os.dup2(os.memfd_create("another file of the process"), number)
        still_open = os.open(tmp_path / "open", os.O_CREAT | os.O_RDWR)
        with suppress(Crash):
            os.mkdir(tmp_path / "folder")
    assert disk.dead
    os.fstat(number)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(still_open)
