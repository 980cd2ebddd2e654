from __future__ import annotations

import pickle

import pytest
import torch

from flopwise.errors import InputError
from flopwise.kit.input import PinnedPool, collate_into
from flopwise.kit.input.packed import POOLS, Packed


def test_a_batch_that_comes_out_of_a_queue_claims_its_slot_and_gives_it_back() -> None:
    pool = PinnedPool(1024, 2)
    made = collate_into(pool)([torch.ones(3)])
    made.window = None  # as in a worker: there the parent claims
    pool._held.clear()
    came = pickle.loads(pickle.dumps(made))
    assert pool.held == 1
    assert came.room().data_ptr() == came.header().data_ptr() + 256
    del came
    assert pool.held == 0


def test_it_is_claimed_once() -> None:
    pool = PinnedPool(1024, 2)
    made = collate_into(pool)([torch.ones(3)])
    with pytest.raises(InputError, match="taken back while its batch was on its way"):
        pickle.loads(pickle.dumps(made))


def test_a_pool_that_is_gone_is_told() -> None:
    pool = PinnedPool(1024, 2)
    packed = Packed(pool._name, 0, 0, None, 0, None)
    assert POOLS[pool._name] is pool
    pool.close()
    with pytest.raises(InputError, match="does not have, or has closed"):
        packed.claim()
