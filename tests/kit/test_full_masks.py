from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
from hypothesis import given
from hypothesis import strategies as st

from flopwise.kit import full_masks
from flopwise.kit.full_masks import hides_nothing, is_full, watch_moves

# The meta device stands for a GPU: tensors on it have no values that could be read.
DEVICE = "meta"


@pytest.fixture
def _watched() -> Iterator[None]:
    end = watch_moves()
    yield
    end()


def ones(dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.ones(2, 5, dtype=dtype)


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), min_size=1, max_size=3),
    st.sampled_from([torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32]),
)
def test_full_is_all_ones(rows: list[list[int]], dtype: torch.dtype) -> None:
    mask = torch.tensor(rows).to(dtype)
    assert is_full(mask) is all(x == 1 for x in mask.flatten().tolist())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(5),
        torch.ones(2, 1, 5, 5),
        torch.ones(0, 5),
        torch.ones(2, 5, dtype=torch.float64),
        torch.ones(2, 5, requires_grad=True),
    ],
)
def test_what_is_no_mask_of_tokens_is_not_full(tensor: torch.Tensor) -> None:
    assert not is_full(tensor)


@pytest.mark.usefixtures("_watched")
class TestMoves:
    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
    def test_a_copy_of_a_full_mask_is_known(self, dtype: torch.dtype) -> None:
        assert hides_nothing(ones(dtype).to(DEVICE, non_blocking=True))
        assert hides_nothing(ones(dtype).to(device=DEVICE, dtype=torch.bool))

    def test_one_with_padding_is_not(self) -> None:
        mask = ones()
        mask[1, 3:] = 0
        assert not hides_nothing(mask.to(DEVICE))

    def test_one_made_on_the_device_is_not(self) -> None:
        assert not hides_nothing(torch.ones(2, 5, dtype=torch.int64, device=DEVICE))

    def test_what_is_made_of_a_known_one_is_not(self) -> None:
        mask = ones().to(DEVICE)
        assert not hides_nothing(mask[:, :3])
        assert not hides_nothing(mask.clone())

    def test_one_that_was_written_is_not(self) -> None:
        mask = ones().to(DEVICE)
        mask[0, 0] = 0
        assert not hides_nothing(mask)

    def test_a_device_copy_that_stays_where_it_is_stays_known(self) -> None:
        mask = ones().to(DEVICE)
        assert hides_nothing(mask.to(DEVICE))

    def test_on_the_host_it_is_simply_looked_at(self) -> None:
        assert hides_nothing(ones())
        assert not hides_nothing(torch.zeros(2, 5))

    def test_subclasses_and_parameters_pass_through(self) -> None:
        class Named(torch.Tensor):
            pass

        named = torch.ones(2, 5).as_subclass(Named)
        assert type(named.to(torch.float64)) is Named
        assert torch.nn.Parameter(torch.ones(2, 5)).to(DEVICE).device.type == DEVICE

    def test_functions_of_subclasses_are_found_as_before(self) -> None:
        seen = []

        class Sees(torch.Tensor):
            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                seen.append(func == torch.Tensor.to and func in {torch.Tensor.to})
                return super().__torch_function__(func, types, args, kwargs or {})

        torch.ones(2).as_subclass(Sees).to(torch.float64)
        assert True in seen

    def test_compiled_code_moves_and_casts_as_before(self) -> None:
        def run(x: torch.Tensor) -> torch.Tensor:
            return x.to(torch.float64).to("cpu") + x.to(dtype=torch.float64)

        torch._dynamo.reset()
        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(ones()), run(ones()))

    def test_errors_are_those_of_torch(self) -> None:
        with pytest.raises(RuntimeError):
            ones().to("no such device")
        with pytest.raises(TypeError):
            ones().to(1.5, 2.5)


def test_nothing_is_left_behind() -> None:
    before = torch.Tensor.to, torch.Tensor.cuda
    first, second = watch_moves(), watch_moves()
    assert torch.Tensor.to is not before[0]
    mask = ones().to(DEVICE)
    copies = copy.deepcopy(mask), pickle.loads(pickle.dumps(ones()))
    assert [vars(c) for c in copies] == [{}, {}]
    first()
    first()  # a second time does nothing
    assert hides_nothing(mask)
    second()
    assert "to" not in vars(torch.Tensor)
    assert "cuda" not in vars(torch.Tensor)
    assert before == (torch.Tensor.to, torch.Tensor.cuda)
    assert not hides_nothing(mask)


def test_what_others_put_there_stays() -> None:
    original = torch.Tensor.to

    def theirs(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return original(tensor, *args, **kwargs)  # type: ignore[call-overload]

    torch.Tensor.to = theirs  # type: ignore[method-assign, assignment]
    end = watch_moves()
    assert hides_nothing(ones().to(DEVICE))
    end()
    assert torch.Tensor.to is theirs
    del torch.Tensor.to

    end = watch_moves()
    under = torch.Tensor.to
    later = lambda tensor, *args: under(tensor, *args)  # noqa: E731
    torch.Tensor.to = later  # type: ignore[method-assign]
    end()
    assert torch.Tensor.to is later
    assert ones().to(DEVICE).device.type == DEVICE
    assert not len(full_masks._FULL)
    del torch.Tensor.to
