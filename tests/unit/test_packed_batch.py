"""PackedBatch: into packed form and back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.packed import PackedBatch


def masks():
    return st.integers(0, 5).flatmap(
        lambda rows: st.integers(0, 6).flatmap(
            lambda columns: st.lists(
                st.lists(st.booleans(), min_size=columns, max_size=columns), min_size=rows, max_size=rows
            ).map(lambda m: torch.tensor(m, dtype=torch.bool).reshape(rows, columns))
        )
    )


@given(mask=masks(), features=st.sampled_from([(), (3,), (2, 0)]))
@settings(max_examples=200, deadline=None)
def test_any_mask_there_and_back(mask, features):
    values = torch.randn(*mask.shape, *features)
    batch = PackedBatch.from_padded(values, mask)
    assert batch.lengths.tolist() == mask.sum(1).tolist()
    assert torch.equal(batch.values, values[mask])
    wide = mask.reshape(*mask.shape, *(1 for _ in features))
    assert torch.equal(batch.to_padded(), torch.where(wide, values, torch.zeros(())))
    assert torch.equal(batch.gather(values), batch.values)
    parts = batch.to_list()
    assert [len(p) for p in parts] == batch.lengths.tolist()
    if parts:
        again = PackedBatch.from_list(parts)
        assert torch.equal(again.values, batch.values)
        assert torch.equal(again.positions, batch.positions)
        assert torch.equal(again.columns, again.positions)
    for part, row, kept in zip(parts, values, mask, strict=True):
        assert torch.equal(part, row[kept])


@given(mask=masks())
@settings(max_examples=100, deadline=None)
def test_positions_columns_and_holes(mask):
    batch = PackedBatch.from_padded(torch.zeros(mask.shape), mask)
    assert batch.columns.tolist() == [c for row in mask for c in row.nonzero().flatten().tolist()]
    assert batch.positions.tolist() == [p for n in mask.sum(1).tolist() for p in range(n)]
    holes = any(r and r[-1] - r[0] + 1 != len(r) for r in (row.nonzero().flatten().tolist() for row in mask))
    assert batch.has_holes == holes


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.bool])
def test_masks_of_any_type(dtype):
    mask = torch.tensor([[1, 1, 0], [0, 1, 0]]).to(dtype)
    assert PackedBatch.from_padded(torch.arange(6).view(2, 3), mask).values.tolist() == [0, 1, 4]


def test_nested_there_and_back():
    parts = [torch.randn(n, 4) for n in (3, 0, 5)]
    for layout in (torch.jagged, torch.strided):
        batch = PackedBatch.from_nested(torch.nested.nested_tensor(parts, layout=layout))
        assert torch.equal(batch.values, torch.cat(parts))
        assert batch.padded_shape == (3, 5)
    back = batch.to_nested()
    assert back.layout == torch.jagged
    for got, want in zip(back.unbind(), parts, strict=True):
        assert torch.equal(got, want)


def test_nested_with_holes():
    dense = torch.randn(3, 6, 2)
    nested = torch.nested.narrow(dense, 1, torch.tensor([0, 1, 2]), torch.tensor([2, 0, 3]), layout=torch.jagged)
    batch = PackedBatch.from_nested(nested)
    assert torch.equal(batch.values, torch.cat([dense[0, :2], dense[2, 2:5]]))
    assert batch.lengths.tolist() == [2, 0, 3]


def test_gradients_pass():
    values = torch.randn(2, 3, 4, requires_grad=True)
    mask = torch.tensor([[1, 0, 1], [0, 0, 1]])
    batch = PackedBatch.from_padded(values, mask)
    batch.with_values(batch.values * 2).to_padded().sum().backward()
    assert torch.equal(values.grad, 2.0 * mask[..., None].expand_as(values))


def test_fill():
    batch = PackedBatch.from_list([torch.tensor([1, 2]), torch.tensor([3])])
    assert batch.to_padded(fill=-100).tolist() == [[1, 2], [3, -100]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PackedBatch.from_padded(torch.zeros(3)), r"shape \[batch, length, ...\], got \[3\]"),
        (
            lambda: PackedBatch.from_padded(torch.zeros(2, 3), torch.ones(3, 2)),
            r"\[2, 3\] like the values, got \[3, 2\]",
        ),
        (lambda: PackedBatch.from_list([]), r"at least one sequence"),
        (lambda: PackedBatch.from_list([torch.zeros(2, 3), torch.zeros(2, 4)]), r"the rest alike"),
        (lambda: PackedBatch.from_list([torch.tensor(1)]), r"each \[length, ...\]"),
        (lambda: PackedBatch.from_nested(torch.zeros(2, 2)), r"takes a nested tensor"),
        (lambda: PackedBatch.from_values(torch.zeros(3), torch.tensor([1, 1])), r"add up to the 3 values"),
        (lambda: PackedBatch.from_values(torch.zeros(3), torch.tensor([4, -1])), r">= 0"),
        (lambda: PackedBatch.from_list([torch.zeros(2)]).with_values(torch.zeros(3)), r"has 2 tokens"),
        (lambda: PackedBatch.from_list([torch.zeros(2)]).gather(torch.zeros(2, 2)), r"padded tensor \[1, 2"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
