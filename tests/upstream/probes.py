"""What a run's probe should have found, and what the run wrote: JAGG_LOG's lines, and what wandb keeps when it is offline."""

import json
import math
import struct

import torch
import torch.distributed as dist
from observe import relative_error

from jagg_patch import JaggConfig

KEYS = {
    *("jagg", "trainer", "group_size", "aggregation", "sampled_steps", "step_cost", "forwards_a_group", "training_step", "frac"),
    *(
        "trajectory",
        "visited",
        "groups",
        "schedule",
        "backward_passes",
        "backward_passes_saved",
        "forward_passes_saved",
        "forwards_retained",
        "rollout_seconds",
    ),
    *("update_seconds", "probe_seconds", "self_check_seconds", "probe", "cuts", "knots", "knots_at"),
}


def read_log(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def agreements(probe, sample, gradient):
    """`[(expected, measured)]` of cosine and relative error in turn, for every group of a log's `probe`.

    Args:
        sample: the first sample's steps on this rank, in trajectory order.
        gradient: `gradient(steps, config)` is that of `group_backward` on them: this rank's shard, or the ranks' mean.
    """
    found = []
    for group in [group for entry in probe for group in entry["groups"]]:
        steps = sample[group["start"] : group["start"] + group["steps"]]
        configs = [JaggConfig(enabled=enabled, group_size=len(steps), frac=1) for enabled in (True, False)]
        jagg, exact = (gradient(steps, config).double() for config in configs)
        products = torch.stack([jagg @ exact, jagg @ jagg, exact @ exact])
        dist.all_reduce(products)
        found.append(((products[0] / (products[1] * products[2]).sqrt()).item(), group["cosine"]))
        found.append((relative_error(jagg, exact), group["relative_error"]))
    return found


def probe_passes(lines):
    """Backward passes that the probes of those lines took: one a step, two a group."""
    return sum(group["steps"] + 2 for line in lines for entry in line["probe"] for group in entry["groups"])


def check_passes(group, is_own):
    """Backward passes of a self-check of a group of that many steps: one a step, and as it was trained where that isn't known."""
    return group + (0 if is_own else 2)


def check_log(lines, stats, trainer, trajectory, visited, groups):
    """One line a training step, whose sums are the handle's `stats` and whose plan is the banner's."""
    assert [line["training_step"] for line in lines] == list(range(1, stats["training_steps"] + 1))
    for line in lines:
        assert line.keys() == KEYS
        plan = (line["trainer"], line["trajectory"], line["visited"], line["groups"])
        assert plan == (trainer, trajectory, visited, groups)
        assert line["frac"] == sum(groups) / visited
        assert all(line[f"{phase}_seconds"] > 0 for phase in ("rollout", "update", "probe"))
        own, *_ = line["probe"]
        routed = [group["steps"] for group in own["groups"] if group["routed"]]
        assert (own["group_size"], routed) == (line["group_size"], groups)
    passes, saved = (sum(line[name] for line in lines) for name in ("backward_passes", "backward_passes_saved"))
    assert (passes, passes + saved) == (stats["backward_passes"], stats["backward_passes_unpatched"])


def check_epochs(record):
    """The log's seconds are those of what ran: all of an epoch's rollouts, but no evaluation; then the update up to the next."""
    epochs = [[]]
    for event in sorted(record["events"], key=lambda event: event[1]):
        if event[0] == "eval" and any(name == "step" for name, _, _ in epochs[-1]):
            epochs.append([])
        epochs[-1].append(event)
    assert len(epochs) == len(record["log"]) == 2
    next_rollout = next(start for name, start, _ in epochs[1] if name == "rollout")
    for events, line, end_of_update in zip(epochs, record["log"], (next_rollout, math.inf), strict=True):
        evaluated = max((end for name, _, end in events if name == "eval"), default=-math.inf)
        rollouts = [(start, end) for name, start, end in events if name == "rollout" and start > evaluated]
        update = next(start for name, start, _ in events if name == "compute_log_prob")
        last_step = max(end for name, _, end in events if name == "step")
        assert len(rollouts) == 2
        assert sum(end - start for start, end in rollouts) <= line["rollout_seconds"] <= update - evaluated
        assert last_step - update <= line["update_seconds"] + line["probe_seconds"] <= end_of_update - rollouts[-1][1]


def wandb_history(folder):
    """`{step: values}` of the one offline run below `folder`, without wandb's own: a log in LevelDB's format of its records."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, place, whole, rows = path.read_bytes(), 7, b"", {}
    while place < len(data):
        if (left := 2**15 - place % 2**15) < 7:  # too little of a block for a header
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record, whole = Record.FromString(whole), b""
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            if row:
                rows[row["_step"]] = {name: value for name, value in row.items() if not name.startswith("_")}
    return rows
