"""Episodes of a data set as arrays, and the readers that know its files: Minari and LeRobot."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from unirl.config.dependencies import need
from unirl.config.errors import DataError, NotFoundError

Array = NDArray[Any]
STATE = "state"
MINARI, LEROBOT = "data/metadata.json", "meta/info.json"
"""The file by which a folder is recognised."""
OBSERVATION = "observation."
"""The prefix of the names of observations in LeRobot's data sets."""
VERSIONS = ("v2.", "v3.")
"""Versions of LeRobot's format that are read."""


@dataclass(frozen=True, kw_only=True)
class RecordedEpisode:
    """One episode as a data set has it: L actions, and L or L + 1 observations."""

    name: str
    """The file and the episode, for messages."""
    observations: Mapping[str, Array]  # key -> [L or L + 1, *shape]
    actions: Array  # [L, *shape], in the units of the data set
    rewards: Array | None  # [L]; None: the data set has none
    terminated: bool
    """The last action ended the task: no reward can follow."""


@dataclass(frozen=True, kw_only=True)
class EpisodeSource:
    """An opened data set."""

    keys: tuple[str, ...]
    """The observations that it has."""
    key_of: Callable[[str], str]
    """The name in the data set of an observation of the policy, if the recipe maps none."""
    bounds: tuple[Array, Array] | None
    """Bounds of its actions. None: it names none."""
    first_action: int
    """The number of its first discrete action."""
    read: Callable[[Sequence[str]], Iterator[RecordedEpisode]]
    """Reads the episodes, with these observations."""


def open_episodes(path: Path) -> EpisodeSource:
    """The data set in a folder.

    Raises:
        NotFoundError: 4001, there is no data set in the folder.
        DependencyError: 3001, the library that reads it is missing.
        DataError: 4002, its files do not hold what the format says.
    """
    for mark, opened in ((MINARI, minari_episodes), (LEROBOT, lerobot_episodes)):
        if (path / mark).is_file():
            return opened(path)
    raise NotFoundError(
        f"stack.offline.path={path}: there is neither {MINARI} (Minari) nor {LEROBOT} (LeRobot) in this folder. Give "
        "the folder of a data set; scripts/record_demonstrations.py records one"
    )


def minari_episodes(path: Path) -> EpisodeSource:
    """A data set of Minari, https://minari.farama.org/content/dataset_standards/. Minari's own library reads it."""
    need("minari", "h5py", by=f"stack.offline.path={path}", extra="minari")
    from gymnasium import spaces
    from minari import MinariDataset

    try:
        data = MinariDataset(path / "data")
    except (ValueError, KeyError, OSError) as error:
        raise DataError(f"{path}: Minari cannot open this data set ({error}). Record or download it again") from error
    observed, acted = data.observation_space, data.action_space
    is_dict = isinstance(observed, spaces.Dict)

    def read(keys: Sequence[str]) -> Iterator[RecordedEpisode]:
        for episode in data.iterate_episodes():
            seen = cast(Any, episode.observations)
            yield RecordedEpisode(
                name=f"{path}, episode {episode.id}",
                observations={key: np.asarray(seen[key] if is_dict else seen) for key in keys},
                actions=np.asarray(episode.actions),
                rewards=np.asarray(episode.rewards),
                terminated=bool(len(episode.terminations) and episode.terminations[-1]),
            )

    return EpisodeSource(
        keys=tuple(observed.spaces) if isinstance(observed, spaces.Dict) else (STATE,),
        key_of=str,
        bounds=(acted.low, acted.high) if isinstance(acted, spaces.Box) else None,
        first_action=int(acted.start) if isinstance(acted, spaces.Discrete) else 0,
        read=read,
    )


def lerobot_episodes(path: Path) -> EpisodeSource:
    """A data set of LeRobot in format v2 or v3 (https://huggingface.co/docs/lerobot/lerobot-dataset-v3).

    Its parquet files have one row per frame. `next.done` without `next.truncated` means that the task ended. The last
    frame of any other episode only serves as the observation that followed, since no later one was recorded.
    """
    need("pyarrow", by=f"stack.offline.path={path}", extra="data")
    try:
        info = json.loads((path / LEROBOT).read_text(encoding="utf-8"))
        version, features = str(info["codebase_version"]), dict(info["features"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path / LEROBOT}: {type(error).__name__} {error}: the file must be a JSON object with codebase_version "
            "and features. Download the data set again"
        ) from error
    if not version.startswith(VERSIONS):
        raise DataError(
            f"{path / LEROBOT}: codebase_version is {version}, and this reader knows v2 and v3. Convert the data set "
            "with the scripts of LeRobot"
        )
    for needed in ("action", "episode_index", "frame_index"):
        if needed not in features:
            raise DataError(f"{path / LEROBOT}: the feature {needed} is missing. It has {', '.join(features)}")
    stored = {name: feature["dtype"] not in ("video", "image") for name, feature in features.items()}
    return EpisodeSource(
        keys=tuple(name for name, is_stored in stored.items() if is_stored and name.startswith(OBSERVATION)),
        key_of=lambda key: OBSERVATION + key,
        bounds=None,
        first_action=0,
        read=lambda keys: _frames_by_episode(path, features, keys),
    )


def _frames_by_episode(path: Path, features: Mapping[str, Any], keys: Sequence[str]) -> Iterator[RecordedEpisode]:
    optional = [name for name in ("next.reward", "next.done", "next.truncated") if name in features]
    table = _parquet_columns(path, ["episode_index", "frame_index", "action", *optional, *keys])
    order = np.lexsort((table["frame_index"], table["episode_index"]))
    table = {name: values[order] for name, values in table.items()}
    starts = np.flatnonzero(np.diff(table["episode_index"], prepend=-1))
    for start, stop in zip(starts, [*starts[1:], len(order)], strict=True):
        frames = {name: values[start:stop] for name, values in table.items()}
        name = f"{path}, episode {int(frames['episode_index'][0])}"
        if not np.array_equal(frames["frame_index"], np.arange(stop - start)):
            raise DataError(f"{name}: frame_index does not count from 0 to {stop - start - 1}. Download it again")
        done = "next.done" in frames and bool(frames["next.done"][-1])
        terminated = done and not ("next.truncated" in frames and bool(frames["next.truncated"][-1]))
        length = stop - start if terminated else stop - start - 1
        yield RecordedEpisode(
            name=name,
            observations={key: frames[key] for key in keys},
            actions=frames["action"][:length],
            rewards=frames["next.reward"][:length] if "next.reward" in frames else None,
            terminated=terminated,
        )


def _parquet_columns(path: Path, names: Iterable[str]) -> dict[str, Array]:
    """The columns of all data files of a LeRobot data set, frame by frame."""
    from pyarrow import ArrowException
    from pyarrow.parquet import read_table

    files = sorted((path / "data").glob("*/*.parquet"))
    if not files:
        raise DataError(f"{path}: there is no file data/CHUNK/*.parquet. Download the data set again")
    parts: dict[str, list[Array]] = {name: [] for name in names}
    for file in files:
        try:
            columns = read_table(file, columns=list(parts)).to_pydict()
        except (ArrowException, OSError) as error:
            raise DataError(f"{file} cannot be read ({error}). Download the data set again") from error
        for name, found in parts.items():
            if name not in columns:
                raise DataError(f"{file}: the column {name} is missing, which {LEROBOT} promises. Download it again")
            try:
                found.append(np.asarray(columns[name]))
            except ValueError as error:
                raise DataError(f"{file}: the rows of {name} have unequal lengths. Download it again") from error
    return {name: np.concatenate(found) for name, found in parts.items()}
