"""The engines under test, one small class each: how a model is wrapped, and what a loop calls instead of torch.

What a loop uses: `transformer`, `accumulate(closes)` around a micro-step, `backward(loss)`, `step(closes)`; `closes` says that
the micro-step is its accumulation window's last, of `n_micro_steps`. What the tests read: `scale`, the factor that `backward`
puts on a loss, and `trained_weights()`, those that aren't frozen, whole and flattened, as this rank has them.
"""

from contextlib import nullcontext

import torch
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.5
    from torch.distributed._composable.fsdp import fully_shard

LEARNING_RATE = 1e5  # the update is far above the weights, so that their rounding doesn't show in it


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def sgd(model):
    return torch.optim.SGD(trained(model), lr=LEARNING_RATE)


class Replicated:
    """DistributedDataParallel, and what the other engines of torch's own share with it."""

    Scaler = torch.amp.GradScaler

    def __init__(self, model, blocks, checkpoint, cell, n_micro_steps):
        self.accumulates = cell.accumulates
        self.wrap(model, blocks, checkpoint, cell)
        self.optimizer = sgd(self.transformer)
        self.scaler = self.Scaler("cpu", init_scale=2.0**10, enabled=cell.autocast == torch.float16)

    def wrap(self, model, blocks, checkpoint, cell):
        checkpoint(model)
        self.transformer = torch.nn.parallel.DistributedDataParallel(model)

    @property
    def scale(self):
        return self.scaler.get_scale()

    def accumulate(self, closes):
        return self.transformer.no_sync() if self.accumulates and not closes else nullcontext()

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def step(self, closes):
        if closes:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()

    def trained_weights(self):
        return torch.cat([p.detach().flatten() for p in trained(self.transformer)])


class FSDP1(Replicated):
    """Sharded block by block, activation checkpointing inside the blocks' wrappers: as DanceGRPO does it."""

    Scaler = ShardedGradScaler
    strategy = ShardingStrategy.FULL_SHARD
    mesh = None

    def wrap(self, model, blocks, checkpoint, cell):
        self.transformer = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy(blocks),
            sharding_strategy=self.strategy,
            device_mesh=self.mesh and torch.distributed.init_device_mesh("cpu", self.mesh, mesh_dim_names=("replicate", "shard")),
            device_id=torch.device("cpu"),
            use_orig_params=cell.lora,  # a frozen base and its adapters in one shard
        )
        checkpoint(self.transformer)

    def trained_weights(self):
        with FullyShardedDataParallel.summon_full_params(self.transformer, writeback=False):
            return super().trained_weights()


class ShardGradOp(FSDP1):
    strategy = ShardingStrategy.SHARD_GRAD_OP


class NoShard(FSDP1):
    strategy = ShardingStrategy.NO_SHARD
    trained_weights = Replicated.trained_weights


class HybridShard(FSDP1):
    """Two ranks make it one replica of two shards: FULL_SHARD's collectives, and an all-reduce over one rank.

    Of the other mesh, two replicas of one shard, FSDP1 makes NO_SHARD within each replica, and the replicas drift apart.
    """

    strategy = ShardingStrategy.HYBRID_SHARD
    mesh = (1, 2)


class FSDP2(Replicated):
    """`fully_shard` of each block and of the whole, over checkpointed blocks."""

    def wrap(self, model, blocks, checkpoint, cell):
        checkpoint(model)
        for stack in (model.transformer_blocks, model.single_transformer_blocks):
            for block in stack:
                fully_shard(block)
        self.transformer = fully_shard(model)

    def accumulate(self, closes):
        self.transformer.set_requires_gradient_sync(closes or not self.accumulates)
        return nullcontext()

    def trained_weights(self):
        return torch.cat([p.detach().full_tensor().flatten() for p in trained(self.transformer)])


class Accelerated(Replicated):
    """DDP as accelerate makes and drives it; it counts the micro-steps of a window by itself, and syncs at the last."""

    scale = None

    def __init__(self, model, blocks, checkpoint, cell, n_micro_steps):
        from accelerate import Accelerator

        checkpoint(model)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=n_micro_steps)
        self.transformer, self.optimizer = self.accelerator.prepare(model, sgd(model))
        self.scale = 1 / n_micro_steps

    def accumulate(self, closes):
        return self.accelerator.accumulate(self.transformer)

    def backward(self, loss):
        self.accelerator.backward(loss)

    def step(self, closes):
        self.optimizer.step()
        self.optimizer.zero_grad()


class Zero0(Replicated):
    """DeepSpeed without ZeRO, and its stages. It counts the micro-steps too; stage 3 here keeps no parameter, however small."""

    stage = 0
    scale = None
    precision = {}

    def __init__(self, model, blocks, checkpoint, cell, n_micro_steps):
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it compiles a faster one, for one machine
        checkpoint(model)
        settings = {"stage": self.stage}
        if self.stage == 3:
            names = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")
            settings |= {f"stage3_{name}": 0 for name in names}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": n_micro_steps,
            "zero_optimization": settings,
            "zero_allow_untested_optimizer": True,
            **self.precision,
        }
        self.transformer, self.optimizer, *_ = deepspeed.initialize(model=model, optimizer=sgd(model), config=config)
        self.scale = 1 / n_micro_steps

    def accumulate(self, closes):
        return nullcontext()

    def backward(self, loss):
        self.transformer.backward(loss)

    def step(self, closes):
        self.transformer.step()

    def trained_weights(self):
        import deepspeed

        weights = []
        for parameter in trained(self.transformer):  # of several at once, older DeepSpeeds wait for the last alone, on gloo
            with deepspeed.zero.GatheredParameters(parameter, enabled=self.stage == 3):
                weights.append(parameter.detach().flatten().clone())
        return torch.cat(weights)


class Zero1(Zero0):
    stage = 1


class Zero1Bf16(Zero1):
    """In bfloat16; gradients are added up in float32 when a backward has ended."""

    precision = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}

    def trained_weights(self):
        from deepspeed.utils import safe_get_full_fp32_param

        return torch.cat([safe_get_full_fp32_param(p).detach().flatten() for p in trained(self.transformer)])


class Zero2(Zero0):
    stage = 2


class Zero3(Zero0):
    stage = 3
