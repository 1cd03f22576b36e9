"""Demonstrations: what Minari and LeRobot wrote is what the policy learns from, and everything else is refused."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from unirl.config.errors import DataError, InvalidValueError, NotFoundError, ResumeError
from unirl.data.demonstrations import Demonstrations, DemonstrationsConfig, load_demonstrations, toy_segment
from unirl.types.environments import ContinuousActions, DiscreteActions
from unirl.types.facts import ActionFacts

FACTS = ActionFacts(family="GaussianPolicy", observations={"state": (3,)}, actions=ContinuousActions(2))
CLICKS = replace(FACTS, actions=DiscreteActions(4))
Episode = tuple[np.ndarray, np.ndarray, np.ndarray, bool]
"""Observations [L + 1, 3], actions [L, 2], rewards [L], and whether the last action ended the task."""


def episodes(lengths: Sequence[int] = (4, 1, 6), discrete: bool = False) -> list[Episode]:
    draw = np.random.default_rng(0)
    return [
        (
            draw.normal(size=(length + 1, 3)).astype(np.float32),
            draw.integers(4, size=length) if discrete else draw.uniform(-1, 1, (length, 2)).astype(np.float32),
            draw.normal(size=length).astype(np.float32),
            number % 2 == 0,
        )
        for number, length in enumerate(lengths)
    ]


def write_minari(folder: Path, shown: list[Episode], monkeypatch: Any, low: float = -1, high: float = 1) -> str:
    import minari
    from gymnasium import spaces
    from minari.data_collector.episode_buffer import EpisodeBuffer

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(folder))
    buffers = [
        EpisodeBuffer(
            id=number,
            observations=seen,
            actions=actions,
            rewards=list(rewards),
            terminations=[False] * (len(actions) - 1) + [ended],
            truncations=[False] * (len(actions) - 1) + [not ended],
        )
        for number, (seen, actions, rewards, ended) in enumerate(shown)
    ]
    discrete = shown[0][1].ndim == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about an author and a link, which are missing
        minari.create_dataset_from_buffers(
            "made/points-v0",
            buffers,
            observation_space=spaces.Box(-np.inf, np.inf, (3,), np.float32),
            action_space=spaces.Discrete(4) if discrete else spaces.Box(low, high, (2,), np.float32),
            data_format="hdf5",
        )
    return str(folder / "made" / "points-v0")


def write_lerobot(folder: Path, shown: list[Episode], version: str = "v3.0", **columns: Any) -> str:
    """The layout of LeRobot: v2 has a file per episode, v3 has several episodes in a file. The last frame of an episode
    that was cut off is the observation after its last action."""
    tables = []
    for number, (seen, actions, rewards, ended) in enumerate(shown):
        total = len(actions) + (not ended)
        padded = [np.concatenate([values, np.zeros_like(values[:1])])[:total] for values in (actions, rewards)]
        frames: dict[str, Any] = {
            "observation.state": seen[:total].tolist(),
            "action": padded[0].tolist(),
            "next.reward": padded[1],
            "next.done": np.arange(total) == total - 1,
            "next.truncated": (np.arange(total) == total - 1) & (not ended),
            "frame_index": np.arange(total),
            "episode_index": np.full(total, number),
        }
        tables.append(pa.table(frames | {k: v[:total] for k, v in columns.items() if v is not None}))
    (folder / "data/chunk-000").mkdir(parents=True)
    (folder / "meta").mkdir()
    files = [pa.concat_tables(tables[:2]), *tables[2:]] if version.startswith("v3") else tables
    for number, table in enumerate(files):
        kept = [name for name in table.column_names if columns.get(name, 0) is not None]
        pq.write_table(table.select(kept), folder / f"data/chunk-000/file-{number:03d}.parquet")
    features = {name: {"dtype": "float32", "shape": [1]} for name in tables[0].column_names if name in kept}
    features["observation.images.top"] = {"dtype": "video", "shape": [3, 8, 8]}
    (folder / "meta/info.json").write_text(json.dumps({"codebase_version": version, "features": features}))
    return str(folder)


def load(path: str, facts: ActionFacts = FACTS, **settings: Any) -> Demonstrations:
    return load_demonstrations(DemonstrationsConfig(path=path, **settings), facts)


def check_equal(found: Demonstrations, shown: list[Episode], scale: float = 1.0) -> None:
    segment = found.segment
    assert len(segment) == len(shown)
    for row, (seen, actions, rewards, ended) in enumerate(shown):
        part = slice(int(segment.offsets[row]), int(segment.offsets[row + 1]))
        total = len(actions) + (not ended)
        assert segment.loss_mask[part].tolist() == [True] * len(actions) + [False] * (not ended)
        assert torch.equal(segment.observations["state"][part], torch.from_numpy(seen[:total]))
        mask = segment.loss_mask[part]
        assert torch.allclose(
            segment.actions[part][mask], torch.from_numpy(actions / scale).to(segment.actions.dtype), atol=1e-6
        )
        assert torch.equal(segment.rewards[part][mask], torch.from_numpy(rewards))
        assert bool(segment.terminated[part].any()) == ended and bool(segment.truncated[part].any()) == (not ended)
    assert segment.ends.sum() == len(shown)


def test_episodes_of_minari_are_read_as_they_were_written(tmp_path: Path, monkeypatch) -> None:
    shown = episodes()
    check_equal(load(write_minari(tmp_path, shown, monkeypatch)), shown)


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_episodes_of_lerobot_are_read_as_they_were_written(tmp_path: Path, version) -> None:
    shown = episodes()
    check_equal(load(write_lerobot(tmp_path, shown, version)), shown)


def test_discrete_actions_of_both_formats_are_numbers(tmp_path: Path, monkeypatch) -> None:
    shown = episodes(discrete=True)
    check_equal(load(write_minari(tmp_path / "a", shown, monkeypatch), CLICKS), shown)
    check_equal(load(write_lerobot(tmp_path / "b", shown), CLICKS), shown)


def test_actions_are_scaled_from_the_bounds_of_the_data_to_unit_bounds(tmp_path: Path, monkeypatch) -> None:
    shown = [(seen, 4 * actions, rewards, ended) for seen, actions, rewards, ended in episodes()]
    check_equal(load(write_minari(tmp_path / "a", shown, monkeypatch, -4, 4)), shown, scale=4)
    check_equal(load(write_lerobot(tmp_path / "b", shown), low=(-4, -4), high=(4, 4)), shown, scale=4)
    moved = load(write_minari(tmp_path / "c", shown, monkeypatch, -4, 4), low=(-4, -4), high=(12, 12))
    actions = torch.cat([torch.from_numpy(each[1]) for each in shown])
    assert torch.allclose(moved.segment.actions[moved.segment.loss_mask], (actions - 4) / 8, atol=1e-6)


def changed(shown: list[Episode], field: int, value: float) -> list[Episode]:
    """The episodes with a number of the second step of the first one replaced."""
    first = list(shown[0])
    first[field] = first[field].copy()
    first[field][1] = value
    return [tuple(first), *shown[1:]]  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        (0, np.nan, "episode 0: the observation 'state' of step 1 has numbers that are not finite"),
        (1, np.nan, "episode 0: the action of step 1 is not finite"),
        (1, 1.5, r"the action of step 1 is \[1.5, 1.5\], outside of the bounds .*stack.offline.clip=true"),
        (2, np.inf, "episode 0: the reward of step 1 is not finite"),
    ],
    ids=["observation", "action", "bounds", "reward"],
)
@pytest.mark.parametrize("form", ["minari", "lerobot"])
def test_bad_numbers_are_refused_with_their_episode_and_step(tmp_path: Path, monkeypatch, form, field, value, says):
    shown = changed(episodes(), field, value)
    path = write_minari(tmp_path, shown, monkeypatch) if form == "minari" else write_lerobot(tmp_path, shown)
    with pytest.raises(DataError, match=says):
        load(path)


def test_actions_outside_of_the_bounds_are_clipped_on_request(tmp_path: Path) -> None:
    found = load(write_lerobot(tmp_path, changed(episodes(), 1, 1.5)), clip=True)
    assert found.segment.actions[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"observations": {"state": (5,)}}, r"has shape \[3\], and the policy reads \[5\]"),
        ({"observations": {"goal": (3,)}}, r"no 'observation.goal' but observation.state.*keys=\{goal: NAME\}"),
        ({"observations": {"images.top": (3, 8, 8)}}, "frames of videos are not read"),
        ({"actions": ContinuousActions(3)}, "actions have 2 dimensions, and the policy has 3 continuous actions"),
        ({"actions": DiscreteActions(2)}, "actions are float64, and the policy has 2 discrete actions"),
    ],
    ids=["shape", "key", "video", "size", "kind"],
)
def test_data_of_another_environment_are_refused(tmp_path: Path, facts, says) -> None:
    with pytest.raises(DataError, match=says):
        load(write_lerobot(tmp_path, episodes()), replace(FACTS, **facts))


def test_a_key_is_mapped_and_single_numbers_are_vectors(tmp_path: Path) -> None:
    path = write_lerobot(tmp_path, episodes(), **{"observation.height": np.arange(7.0)})
    found = load(path, replace(FACTS, observations={"state": (3,), "z": (1,)}), keys={"z": "observation.height"})
    assert found.segment.observations["z"][:4].tolist() == [[0.0], [1.0], [2.0], [3.0]]


def test_files_that_are_missing_or_of_another_version_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"neither data/metadata.json .* nor meta/info.json"):
        load(str(tmp_path))
    with pytest.raises(DataError, match=r"codebase_version is v1\.6"):
        load(write_lerobot(tmp_path / "a", episodes(), "v1.6"))
    with pytest.raises(DataError, match="the feature action is missing"):
        load(write_lerobot(tmp_path / "b", episodes(), action=None))
    path = Path(write_lerobot(tmp_path / "c", episodes()))
    for file in path.glob("data/*/*"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DataError, match=r"file-000.parquet cannot be read"):
        load(str(path))
    gap = write_lerobot(tmp_path / "d", episodes(), frame_index=np.arange(1, 8))
    with pytest.raises(DataError, match="frame_index does not count from 0"):
        load(gap)


def test_data_without_rewards_say_so(tmp_path: Path) -> None:
    assert not load(write_lerobot(tmp_path, episodes(), **{"next.reward": None})).has_rewards
    assert Demonstrations(path="toy", segment=toy_segment(FACTS)).has_rewards


def test_settings_of_bounds_are_checked() -> None:
    for low, high in (((0.0,), None), ((0.0,), (0.0,)), ((0.0,), (1.0, 1.0))):
        with pytest.raises(InvalidValueError, match="low"):
            DemonstrationsConfig(path="x", low=low, high=high)


def test_the_digest_tells_every_change(tmp_path: Path) -> None:
    first = Demonstrations(path="toy", segment=toy_segment(FACTS))
    first.restore(first.state())
    for name in ("rewards", "actions", "terminated"):
        values = first.segment.packed_fields()[name].clone()
        values[0] = values[0] == 0
        with pytest.raises(ResumeError, match="differ from those of the checkpoint"):
            replace(first, segment=first.segment.replace(**{name: values})).restore(first.state())


def test_the_recorded_actions_of_the_shipped_demonstrations_lead_to_the_recorded_observations() -> None:
    from unirl.envs.metaworld import MetaWorldEnvironment
    from unirl.sde.noise import key_seed
    from unirl.types.environments import EpisodeStart

    env = MetaWorldEnvironment(task="push-v3", max_steps=100)
    facts = replace(FACTS, observations=env.spaces.observations, actions=env.spaces.actions)
    segment = load("datasets/metaworld_push", facts).segment
    seen = env.reset([0], [EpisodeStart(seed=key_seed(0, "demonstration0"))])["state"]
    for step in range(100):
        assert torch.allclose(seen[0], segment.observations["state"][step], atol=1e-4)
        after = env.step([0], segment.actions[step][None])
        seen = after.observations["state"]
        assert float(after.rewards) == pytest.approx(float(segment.rewards[step]), abs=1e-3)
