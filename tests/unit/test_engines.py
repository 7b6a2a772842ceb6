"""A way of replicating a model that JAGG doesn't know: refused in words."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed._composable import replicate

from jagg_patch import JaggError
from jagg_patch.engines import engine_of


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_composable_replicate_is_refused():
    with pytest.raises(JaggError, match="replicated by torch's composable `replicate`.*\nwrap it in DistributedDataParallel"):
        engine_of(replicate(torch.nn.Linear(2, 2)))
