"""`python upstream/quality.py` against gradients computed another way: the trainer's forward a sample, and `group_backward`."""

import argparse
import importlib
import json
import subprocess
import sys
from itertools import groupby

import pytest
import quality
import torch
from launch import ROOT
from quality_measure import VISITED, select, visited_steps
from quality_probe import AGGREGATIONS

from jagg_patch import JaggConfig, JaggError, group_backward, plan_groups

ETA, SHIFT, W, SEED, PROMPTS, SAMPLES = 0.7, 3.0, 4, 3, 2, 4
FLAGS = f"--etas {ETA} --shifts {SHIFT} --group-sizes 2 {W} --prompts {PROMPTS} --samples {SAMPLES} --seed {SEED}".split()
MINI = ROOT / "upstream/mini"


def parsed(*flags):
    parser = argparse.ArgumentParser()
    quality.add_arguments(parser)
    return parser.parse_args(flags)


@pytest.fixture(scope="module")
def run(tmp_path_factory, one_thread):
    """A function that runs the command and returns its output folder."""

    def run_it(*flags):
        out = tmp_path_factory.mktemp("probe")
        quality.run(parsed("--out", str(out), *flags))
        return out

    return run_it


@pytest.fixture(scope="module")
def out(run):
    return run(*FLAGS)


@pytest.fixture(scope="module")
def results(out):
    return json.loads((out / "probe.json").read_text())


def rows(results, kind, **wanted):
    found = select(results[kind], **wanted)
    assert found
    return found


def test_groups_of_two_are_exact(results):
    for row in rows(results, "groups", group_size=2) + rows(results, "updates", group_size=2):
        assert row["cosine"]["worst"] == pytest.approx(1, abs=1e-9)
        assert row["relative_error"]["worst"] <= 1e-6
        assert row["n"] == PROMPTS


def test_interpolation_is_better_than_endpoints_alone(results):
    for kind in ("groups", "updates"):
        for ends in rows(results, kind, group_size=W, aggregation="endpoints"):
            key = {name: value for name, value in ends.items() if name in ("visited", "frac", "positions")}
            (row,) = rows(results, kind, **key, group_size=W, aggregation="interpolate")
            assert ends["cosine"]["mean"] < row["cosine"]["mean"] < 0.9999
            assert ends["relative_error"]["worst"] > row["relative_error"]["worst"] > 0.005


def test_groups_cover_the_visited_steps(results):
    def key(row):
        return row["visited"], row["group_size"], row["aggregation"]

    cells = {cell: list(found) for cell, found in groupby(sorted(results["groups"], key=key), key)}
    assert len(cells) == 3 * 2 * 2
    for (visited, *_), found in cells.items():
        assert sum((row["positions"] for row in found), []) == list(range(15 if visited == "all" else 9))
    for row in results["steps_visited"]:
        assert sum(row["share_of_samples"]) == pytest.approx(15 if row["visited"] == "all" else 9)
    assert {tuple(row["positions"]) for row in results["per_sample"]} == {tuple(g) for g in plan_groups(15, JaggConfig(frac=1))}


def gradient(transformer, backward):
    transformer.zero_grad()
    backward()
    return torch.cat([p.grad.flatten() for p in transformer.parameters()]).double()


class Oracle:
    """One prompt group of the run: its rollout again, exact gradients sample by sample, JAGG's by `group_backward`."""

    def __init__(self, prompt, visited):
        from diffusers import FluxTransformer2DModel

        self.trainer, digits = map(importlib.import_module, ("train_grpo_flux", "digits"))  # as the command has imported them
        self.args = argparse.Namespace(eta=ETA)
        self.transformer = FluxTransformer2DModel.from_pretrained(MINI / "data/flux", subfolder="transformer")
        self.sigmas = self.trainer.sd3_time_shift(SHIFT, torch.linspace(1, 0, 17))
        torch.manual_seed(1000 * SEED + prompt)
        self.embeds = digits.prompt_embeds(torch.full([SAMPLES], prompt))
        with torch.no_grad():
            image, self.latents, self.old = self.trainer.run_sample_step(
                self.args, torch.randn(SAMPLES, 16, 4), range(16), self.sigmas, self.transformer, *self.embeds
            )
        rewards = digits.class_probabilities(digits.unpack_pixels(image))[:, prompt]
        self.advantages = (rewards - rewards.mean()) / rewards.std()
        for drawn in ("random", "window")[: ("all", "random", "window").index(visited)]:
            self.steps = visited_steps(drawn, 15, SAMPLES)
        if visited == "all":
            self.steps = torch.arange(15)[:, None].expand(15, SAMPLES)
        self.timesteps = (self.sigmas * 1000).int()[self.steps]

    def exact(self, positions):
        def backward():
            for p in positions:
                for sample, step in enumerate(self.steps[p].tolist()):
                    one = slice(sample, sample + 1)
                    log_prob = self.trainer.grpo_one_step(
                        self.args,
                        self.latents[one, step],
                        self.latents[one, step + 1],
                        *(embeds[one] for embeds in self.embeds),
                        self.transformer,
                        self.timesteps[p, one],
                        step,
                        self.sigmas,
                    )
                    ratio = torch.exp(log_prob - self.old[one, step])
                    (-self.advantages[sample] * ratio.sum() / SAMPLES).backward()

        return gradient(self.transformer, backward)

    def jagg(self, group, aggregation):
        def at(j, offset=0):
            return self.latents[torch.arange(SAMPLES), self.steps[group[j]] + offset]

        def velocity(j):
            return self.trainer.predict_velocity(self.transformer, at(j), self.timesteps[group[j]], *self.embeds)

        def loss(j, v_hat):
            total = 0
            for sample, step in enumerate(self.steps[group[j]].tolist()):
                one = slice(sample, sample + 1)
                _, _, log_prob = self.trainer.flux_step(
                    v_hat[one], at(j)[one], ETA, self.sigmas, step, at(j, 1)[one], grpo=True, sde_solver=True
                )
                total -= self.advantages[sample] * torch.exp(log_prob - self.old[one, step]).sum() / SAMPLES
            return total

        timesteps, config = self.timesteps[group.start : group.stop], JaggConfig(aggregation=aggregation)
        return gradient(self.transformer, lambda: group_backward(velocity, loss, timesteps, config))


@pytest.mark.parametrize("visited", VISITED)
def test_the_numbers_are_those_of_group_backward(results, visited):
    """All samples and digits of the JSON's means: of the groups' agreement, and of the whole update at frac 0.6."""
    groups = plan_groups(15 if visited == "all" else 9, JaggConfig(group_size=W, frac=1))
    routed = plan_groups(groups[-1].stop, JaggConfig(group_size=W))
    oracles = [Oracle(prompt, visited) for prompt in range(PROMPTS)]
    for aggregation in AGGREGATIONS:
        for group in groups:
            pairs = [(oracle.jagg(group, aggregation), oracle.exact(group)) for oracle in oracles]
            key = dict(visited=visited, group_size=W, aggregation=aggregation, positions=list(group))
            check(rows(results, "groups", **key), pairs)
        pairs = []
        for oracle in oracles:
            rest = oracle.exact(range(routed[-1].stop, groups[-1].stop))
            exact = sum(oracle.exact(group) for group in routed) + rest
            pairs.append((sum(oracle.jagg(group, aggregation) for group in routed) + rest, exact))
        check(rows(results, "updates", visited=visited, group_size=W, frac=0.6, aggregation=aggregation), pairs)


def check(rows, pairs):
    (row,) = rows
    cosines = [torch.cosine_similarity(found, exact, 0).item() for found, exact in pairs]
    errors = [((found - exact).norm() / exact.norm()).item() for found, exact in pairs]
    assert row["cosine"]["mean"] == pytest.approx(sum(cosines) / PROMPTS, rel=1e-5)
    assert row["cosine"]["worst"] == pytest.approx(min(cosines), rel=1e-5)
    assert row["relative_error"]["mean"] == pytest.approx(sum(errors) / PROMPTS, rel=1e-5)
    assert row["relative_error"]["worst"] == pytest.approx(max(errors), rel=1e-5)


def test_one_seed_gives_one_set_of_numbers_and_the_table_has_them(run, out, results, capsys):
    again = run(*FLAGS)
    numbers = json.loads((again / "probe.json").read_text())
    assert numbers == results
    printed = capsys.readouterr().out
    found = [row["cosine"]["mean"] for row in rows(results, "groups", visited="window", group_size=W, aggregation="interpolate")]
    (line,) = (line.split() for line in printed.splitlines() if "window" in line)
    assert line[:3] == ["3", "0.7", "window"]
    assert line[5] == f"{sum(found) / len(found):.3f}"
    for folder in (out, again):
        assert (folder / "probe.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_it_says_what_is_missing(tmp_path, monkeypatch):
    with pytest.raises(JaggError, match=r"no mini trainer in .*\n.*own checkout.*JAGG_PROBE_EVERY"):
        quality.run(parsed("--out", str(tmp_path / "out"), "--mini", str(tmp_path)))
    with pytest.raises(JaggError, match="at least"):
        quality.run(parsed("--out", str(tmp_path / "out"), "--prompts", "0"))
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(JaggError, match="needs diffusers\ninstall .* demo"):
        quality.run(parsed("--out", str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_the_module_needs_torch_alone_until_it_runs():
    script = "import sys, quality; print(*{'diffusers', 'matplotlib', 'sklearn'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT / "upstream", check=True, capture_output=True, text=True)
    assert done.stdout.split() == []
