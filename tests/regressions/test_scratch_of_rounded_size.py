"""A scratch region was taken to be as long as the block under it, which is rounded up: the next, longer reduction that
fitted the block but not the region failed with "split_with_sizes expects split_sizes to sum exactly to 768".
"""

import torch

from ragged_shard.pool import Pool


def test_a_longer_reduction_gets_all_of_its_scratch() -> None:
    pool = Pool(torch.device("cpu"))
    for nbytes in (700, 1000, 1024, 1025, 3):
        scratch = pool.scratch(nbytes)
        assert scratch.tensor.numel() >= nbytes
        scratch.tensor.zero_()
        scratch.release()
    assert pool.ledger.held == 1536
