"""The mirrors for real, without a network: what they keep on disk is read back by their own libraries."""

from __future__ import annotations

import importlib.util
import io
import json
import struct
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image, ImageSequence

from unirl.tracking.backends import MIRRORS, MirrorUnavailable, make_mirrors
from unirl.tracking.images import ImageMedia
from unirl.tracking.mirrors import Mirrors, Preview, RunInfo
from unirl.tracking.samples import MirroredPage, SampleRow, SampleTable
from unirl.tracking.videos import can_write_mp4, write_mp4, write_webp

METRICS = {1: {"rollout/reward_mean": 0.5, "train/loss": 1.25}, 2: {"rollout/reward_mean": 0.75, "train/loss": 1.0}}
CAPTION = "0.500  a [b]red[/b] circle"
FILM = np.stack([np.full((8, 8, 3), [60 * number, 255 - 60 * number, 9], np.uint8) for number in range(4)])
PAGE = "# evaluation after step 2\n\n    <script>alert(1)</script> \u732b 3 < 4\n"


def feed(name: str, root: Path, steps: tuple[int, ...] = (1, 2), resumed_step: int | None = None) -> None:
    """Drives that mirror through a run with two steps, an image, and a video with an MP4 and one without."""
    (mirror,) = make_mirrors([name])
    config = {"sampling": {"seed": 42}}
    mirror.start(
        RunInfo(root=root, project="demo", run_id="run-one", offline=True, config=config, resumed_step=resumed_step)
    )
    Image.new("RGB", (8, 8), "red").save(root / "p00-s00.webp", lossless=True)
    for film in ("film", "still"):
        write_webp(root / f"{film}.webp", FILM, 60, lossless=True)
    if can_write_mp4():
        write_mp4(root / "film.mp4", FILM, 16)
    for step in steps:
        mirror.log(step, METRICS[step])
    mirror.images(steps[-1], "samples", [Preview(root / "p00-s00.webp", CAPTION)])
    films = [Preview(root / f"{film}.webp", CAPTION) for film in ("film", "still")]
    mirror.videos(steps[-1], "samples", films)
    mirror.text(steps[-1], "eval", PAGE)
    mirror.finish(0)


def assert_film(gif: bytes) -> None:
    """That a GIF shows the four colours of FILM in their order."""
    with Image.open(io.BytesIO(gif)) as file:
        assert file.format == "GIF"
        colours = [frame.convert("RGB").getpixel((100, 100)) for frame in ImageSequence.Iterator(file)]
    assert colours == [tuple(frame[0, 0].tolist()) for frame in FILM]


def leveldb_records(log: bytes) -> Iterator[bytes]:
    """The records of a `.wandb` file: 7 bytes, then a LevelDB log (blocks of 32 KiB; crc, length, kind, data)."""
    at, parts = 7, b""
    while at + 7 <= len(log):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", log, at + 4)
        parts += log[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def test_tensorboard_reads_back_scalars_and_pictures_and_purges_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    feed("tensorboard", tmp_path)
    feed("tensorboard", tmp_path, steps=(2,), resumed_step=1)
    result = EventAccumulator(str(tmp_path / "tensorboard"))
    result.Reload()
    assert [(event.step, event.value) for event in result.Scalars("rollout/reward_mean")] == [(1, 0.5), (2, 0.75)]
    assert [event.step for event in result.Images("samples/0")] == [2]
    for number in (0, 1):
        (video,) = result.Images(f"samples_videos/{number}")
        assert (video.step, video.width, video.height) == (2, 256, 256)
        assert_film(video.encoded_image_string)
    text = result.Tensors("eval/text_summary")[-1]  # TensorBoard itself purges no texts
    assert (text.step, text.tensor_proto.string_val[0].decode()) == (2, PAGE)


@pytest.mark.slow
def test_wandb_offline_keeps_metrics_on_our_own_step_and_pictures_with_captions(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    feed("wandb", tmp_path)
    wandb.teardown()  # as at the exit of a process: the service has written everything
    (path,) = tmp_path.glob("wandb/offline-run-*-run-one/run-run-one.wandb")
    history = [Record.FromString(data).history.item for data in leveldb_records(path.read_bytes())]
    rows = [{item.key or "/".join(item.nested_key): item.value_json for item in items} for items in history if items]
    assert [(row["step"], row["rollout/reward_mean"]) for row in rows[:2]] == [("1", "0.5"), ("2", "0.75")]
    assert json.loads(rows[2]["media/samples/captions"]) == [CAPTION]
    assert list(tmp_path.glob("wandb/offline-run-*/files/media/images/**/*.webp")) != []
    captions = next(row["media/samples_videos/captions"] for row in rows if "media/samples_videos/captions" in row)
    assert json.loads(captions) == [CAPTION] * 2
    kept = {path.suffix: path for path in tmp_path.glob("wandb/offline-run-*/files/media/videos/**/*.*")}
    assert_film(kept[".gif"].read_bytes())
    assert not can_write_mp4() or kept[".mp4"].read_bytes() == (tmp_path / "film.mp4").read_bytes()
    (page,) = tmp_path.glob("wandb/offline-run-*/files/media/html/**/*.html")
    shown = page.read_text(encoding="utf-8")
    assert "&lt;script&gt;" in shown and "<script>" not in shown and "\u732b" in shown


def test_swanlab_offline_keeps_metrics_and_images(tmp_path, monkeypatch):
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_SAVE_DIR", str(tmp_path / "home"))
    feed("swanlab", tmp_path)
    (path,) = tmp_path.glob("swanlab/run-*/run-*.swanlab")
    kept = path.read_bytes()
    assert b"rollout/reward_mean" in kept
    assert CAPTION.encode() in kept
    files = [file for file in tmp_path.glob("swanlab/run-*/media/**/*") if file.is_file()]
    assert any(file.suffix == ".webp" or file.suffix == ".png" for file in files)
    for gif in (gifs := [file for file in files if file.suffix == ".gif"]):
        assert_film(gif.read_bytes())
    assert len(gifs) >= 1 and kept.count(CAPTION.encode()) >= 3
    assert PAGE in [file.read_text(encoding="utf-8") for file in files if file.suffix == ".txt"]


def test_trackio_keeps_metrics_captions_videos_and_texts_of_a_resumed_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage
    from trackio.utils import MEDIA_DIR

    feed("trackio", tmp_path, steps=(1,))
    feed("trackio", tmp_path, steps=(2,), resumed_step=1)
    rows = SQLiteStorage.get_logs("demo", "run-one")
    curve = [(row["step"], row["rollout/reward_mean"]) for row in rows if "rollout/reward_mean" in row]
    assert curve == [(1, 0.5), (2, 0.75)]
    media = {key: value for row in rows if row["step"] == 2 for key, value in row.items() if key.startswith("media/")}
    assert media["media/samples_0"]["caption"] == CAPTION
    with Image.open(MEDIA_DIR / media["media/samples_0"]["file_path"]) as image:
        assert image.convert("RGB").getpixel((4, 4)) == (255, 0, 0)
    films = [MEDIA_DIR / media[f"media/samples_videos_{number}"]["file_path"] for number in (0, 1)]
    assert not can_write_mp4() or films[0].read_bytes() == (tmp_path / "film.mp4").read_bytes()
    assert_film(films[1].read_bytes())
    assert media["media/eval"]["_value"] == PAGE
    assert SQLiteStorage.get_run_config("demo", "run-one")["sampling"] == {"seed": 42}


def test_trackio_sends_nothing_elsewhere_when_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"tracking.offline=true, but TRACKIO_SERVER_URL is set"):
        MIRRORS["trackio"]().start(RunInfo(root=tmp_path, project="demo", run_id="r", offline=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # those of its own libraries
def test_mlflow_offline_keeps_metrics_media_and_settings_of_a_resumed_run(tmp_path):
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    feed("mlflow", tmp_path, steps=(1,))
    feed("mlflow", tmp_path, steps=(2,), resumed_step=1)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    [run] = client.search_runs([client.get_experiment_by_name("demo").experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params) == ("run-one", "FINISHED", {"sampling.seed": "42"})
    history = client.get_metric_history(run.info.run_id, "rollout/reward_mean")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.5), (2, 0.75)]
    folder = Path(client.download_artifacts(run.info.run_id, "", str(tmp_path)))
    [shown] = folder.glob("images/samples~0+step+2+*.png")
    with Image.open(shown) as image:
        assert image.getpixel((4, 4)) == (255, 0, 0)
    assert json.loads((folder / "captions/samples/step-000002.json").read_text()) == {"samples/0": CAPTION}
    assert_film((folder / "videos/samples/step-000002/still.gif").read_bytes())
    if can_write_mp4():
        film = folder / "videos/samples/step-000002/film.mp4"
        assert film.read_bytes() == (tmp_path / "film.mp4").read_bytes()
    assert (folder / "texts/eval/step-000002.md").read_text(encoding="utf-8") == PAGE


def test_images_that_are_sent_together_have_one_size(tmp_path):
    """W&B warns otherwise, and shows them stretched."""
    rows = tuple(SampleRow(sample_id=f"s{i}", group_id="g", prompt="p", reward=0.5) for i in range(3))
    saved = SampleTable(rows, ImageMedia(np.zeros((3, 24, 32, 3), np.uint8))).saved(tmp_path)
    page = MirroredPage(2, "samples", "step 2", saved.media.page(saved, tmp_path, "step 2"))
    recorder = Mock()
    saved.media.mirror(Mirrors([recorder], RunInfo(root=tmp_path, project="p", run_id="r"), Mock()), page, saved.rows)
    sent = {call.args[1]: call.args[2] for call in recorder.images.call_args_list}
    assert {key: len(previews) for key, previews in sent.items()} == {"samples": 1, "samples_images": 3}
    for preview in sent["samples_images"]:
        with Image.open(preview.path) as image:
            assert image.size == (32, 24)


@pytest.mark.parametrize("spec", [None, ModuleSpec("wandb", None)], ids=["nothing", "a folder of that name"])
def test_mirror_without_its_library_is_refused_with_the_install_line(spec, monkeypatch):
    monkeypatch.setattr("unirl.tracking.backends.find_spec", lambda name: spec)
    with pytest.raises(MirrorUnavailable, match=r"pip install 'unirl\[wandb\]'"):
        make_mirrors(["wandb"])


def test_unknown_mirror_is_refused_by_name():
    with pytest.raises(
        ValueError, match="unknown mirror 'wandbb'; there are mlflow, swanlab, tensorboard, trackio, wandb"
    ):
        make_mirrors(["wandbb"])


def test_libraries_are_not_imported_before_a_mirror_starts():
    assert importlib.util.find_spec("unirl.tracking.tracker")
    before = set(sys.modules) & set(MIRRORS)
    make_mirrors([name for name in MIRRORS if importlib.util.find_spec(name)])
    assert set(sys.modules) & set(MIRRORS) == before
