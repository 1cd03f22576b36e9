"""Containers: joining and splitting are inverse, and nothing is merged that disagrees."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unirl.types.batch import Batch, compact, num_rows, packed, packed_offsets, row, shared
from unirl.types.primitives import Images, Texts, Videos
from unirl.types.rows import RemoteRows, StoredRows
from unirl.types.segments import TextSegment


@dataclass(kw_only=True, eq=False)
class Everything(Batch):
    values: torch.Tensor = row(heavy=True)
    names: list[str] = row()
    inner: dict[str, Any] = row()
    tokens: torch.Tensor = packed()
    bounds: torch.Tensor = packed_offsets()
    scale: float = shared()
    absent: torch.Tensor | None = row(optional=True)


def everything(lengths: list[int], start: int = 0) -> Everything:
    size = len(lengths)
    return Everything(
        values=torch.arange(start, start + size).float()[:, None].repeat(1, 2),
        names=[f"n{start + i}" for i in range(size)],
        inner={"a": torch.arange(start, start + size), "b": Texts(texts=[f"t{start + i}" for i in range(size)])},
        tokens=torch.cat([torch.full((n,), start + i) for i, n in enumerate(lengths)]) if size else torch.zeros(0),
        bounds=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]),
        scale=0.5,
    )


def assert_equal_rows(a: Everything, b: Everything) -> None:
    assert torch.equal(a.values, b.values)
    assert a.names == b.names
    assert torch.equal(a.inner["a"], b.inner["a"])
    assert a.inner["b"].texts == b.inner["b"].texts
    assert torch.equal(a.tokens, b.tokens)
    assert torch.equal(a.bounds, b.bounds)


def as_remote(value: object) -> RemoteRows:
    return RemoteRows((StoredRows("w", "k", tuple(range(num_rows(value) or 0))),))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.integers(1, 5))
def test_concat_of_chunks_is_the_identity(lengths: list[int], size: int) -> None:
    batch = everything(lengths)
    assert_equal_rows(Everything.concat(batch.chunk(size)), batch)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.data())
def test_selecting_by_a_permutation_and_back_is_the_identity(lengths: list[int], data: st.DataObject) -> None:
    batch = everything(lengths)
    order = data.draw(st.permutations(range(len(lengths))))
    back = [order.index(i) for i in range(len(lengths))]
    assert_equal_rows(batch.select(order).select(back), batch)


def test_selected_packed_rows_hold_their_own_entries() -> None:
    chosen = everything([2, 0, 3]).select([2, 0, 0, 1])
    assert chosen.tokens.tolist() == [2, 2, 2, 0, 0, 0, 0]
    assert chosen.bounds.tolist() == [0, 3, 5, 7, 7]


def test_copies_of_a_row_are_adjacent() -> None:
    assert everything([1, 2]).repeat_interleave(2).names == ["n0", "n0", "n1", "n1"]


def test_disagreeing_shared_fields_refuse_to_merge() -> None:
    with pytest.raises(
        ValueError, match=r"Everything.scale has one value for all rows, but the batches to join have 0.5 and 0.7"
    ):
        Everything.concat([everything([1]), everything([1]).replace(scale=0.7)])


def test_a_field_present_in_one_part_only_refuses_to_merge() -> None:
    with pytest.raises(ValueError, match=r"Everything.absent is None in some of the batches"):
        Everything.concat([everything([1]), everything([1]).replace(absent=torch.zeros(1))])


def test_a_mapping_with_other_entries_refuses_to_merge() -> None:
    other = everything([1])
    with pytest.raises(ValueError, match="entries"):
        Everything.concat([everything([1]), other.replace(inner={"a": other.inner["a"]})])


def test_fields_of_unequal_length_are_named() -> None:
    with pytest.raises(ValueError, match=r"Everything.names has 1 rows but Everything.values has 2"):
        everything([1, 1]).replace(names=["x"])


def test_offsets_that_do_not_fit_the_entries_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Videos.frames has 3 entries but the offsets end at 2"):
        Videos(frames=torch.zeros(3, 3, 2, 2), offsets=torch.tensor([0, 2]))


def test_a_field_without_a_kind_is_a_bug_of_the_class() -> None:
    @dataclass(kw_only=True, eq=False)
    class Undeclared(Batch):
        values: torch.Tensor

    with pytest.raises(TypeError, match=r"Undeclared.values has no declared kind"):
        Undeclared(values=torch.zeros(2))


def test_a_leading_dimension_is_never_taken_for_rows() -> None:
    @dataclass(kw_only=True, eq=False)
    class WithTable(Batch):
        values: torch.Tensor = row()
        table: torch.Tensor = shared()

    batch = WithTable(values=torch.arange(3), table=torch.arange(3))
    assert batch.select([1]).table.shape == (3,)


def test_rows_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows 1:9 do not lie within 0:2"):
        everything([1, 1]).slice(1, 9)


def test_only_heavy_fields_become_columns() -> None:
    marked = {"images": Images(pixels=torch.zeros(2, 3, 1, 1)), "text": Texts(texts=["a", "b"])}
    batch = everything([1, 1]).replace(inner=marked)
    heavy = batch.map_tensors(torch.clone, as_remote)
    assert type(heavy.values) is RemoteRows and type(heavy.inner["images"].pixels) is RemoteRows
    assert heavy.names == ["n0", "n1"] and heavy.inner["text"].texts == ["a", "b"]
    assert len(heavy.select([1, 1, 0])) == 3


def test_packed_columns_are_selected_and_joined_by_entries() -> None:
    column = RemoteRows((StoredRows("w", "k", (0, 1, 2, 3, 4)),))
    videos = Videos(frames=column, offsets=torch.tensor([0, 2, 5]))  # type: ignore[arg-type]
    last = videos.select([1])
    assert last.frames.stored == (StoredRows("w", "k", (2, 3, 4)),)  # type: ignore[attr-defined]
    joined = Videos.concat([last, videos.select([0])])
    assert joined.frames.stored == (StoredRows("w", "k", (2, 3, 4, 0, 1)),)  # type: ignore[attr-defined]


def text(lengths: list[int], start: int = 0) -> TextSegment:
    tokens = torch.cat([torch.full((n,), start + i) for i, n in enumerate(lengths)])
    return TextSegment(
        tokens=tokens,
        logp=-tokens.float(),
        loss_mask=tokens % 2 == 0,
        offsets=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]),
        finished=torch.tensor([n < 4 for n in lengths]),
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        anchors={"old_logp": tokens * 2.0, "old_pair": torch.stack([tokens, tokens], dim=1)},
    )


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.data())
def test_packed_mappings_are_selected_and_joined_by_entries(lengths: list[int], data: st.DataObject) -> None:
    segment = text(lengths)
    order = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=8))
    chosen = segment.select(order)
    assert chosen.lengths.tolist() == [lengths[i] for i in order]
    for part in (chosen, TextSegment.concat(segment.chunk(2))):
        assert torch.equal(part.anchors["old_logp"], part.tokens * 2.0)
        assert torch.equal(part.anchors["old_pair"], part.tokens[:, None].expand(-1, 2))
    assert torch.equal(TextSegment.concat(segment.chunk(2)).tokens, segment.tokens)


def test_packed_mappings_move_with_their_batch_and_are_heavy() -> None:
    segment = text([2, 1])
    doubled = segment.map_tensors(lambda tensor: tensor * 2)
    assert doubled.anchors["old_logp"].tolist() == [0.0, 0.0, 4.0] and doubled.offsets.tolist() == [0, 2, 3]
    columns = segment.map_tensors(lambda tensor: tensor, as_remote)
    assert type(columns.anchors["old_pair"]) is RemoteRows and columns.tokens is segment.tokens
    assert columns.select([1]).anchors["old_pair"].stored == (StoredRows("w", "k", (2,)),)  # type: ignore[attr-defined]


def test_an_entry_of_a_packed_mapping_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"TextSegment.anchors has 2 entries but the offsets end at 3"):
        text([2, 1]).replace(anchors={"old_logp": torch.zeros(2)})
    assert text([2, 1]).replace(anchors={}).anchors == {}


def test_a_compact_view_holds_its_own_rows_only() -> None:
    whole = Images(pixels=torch.arange(48.0).view(4, 3, 2, 2))
    view = whole.select([1])
    alone = compact({"images": view})["images"]
    assert view.pixels.untyped_storage().nbytes() == 48 * 4 and alone.pixels.untyped_storage().nbytes() == 12 * 4
    assert torch.equal(alone.pixels, view.pixels)
    assert compact(whole).pixels.data_ptr() == whole.pixels.data_ptr()


def test_a_column_cannot_be_read_on_the_driver() -> None:
    column = RemoteRows((StoredRows("worker", "key", (0, 1)),))
    with pytest.raises(AttributeError):
        column.mean()  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        column + 1  # type: ignore[operator]
