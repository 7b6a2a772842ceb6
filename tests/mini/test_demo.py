"""`./apply.sh --demo`: the two trainings take turns, the table compares what ran side by side, and no process is left behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import runs
from launch import ROOT

ARMS = {
    "off": ("JAGG off", {"JAGG_ENABLED": "0", "JAGG_SELF_CHECK": "0"}),
    "on": ("JAGG on", {"JAGG_ENABLED": "1", "JAGG_SELF_CHECK": "0"}),
}
# What the trainer is to the turns, without PyTorch: it writes when its steps and its end came, `[name, begun, ended]` a line.
TRAINER = """
import json, os, sys, time
from pathlib import Path
sys.path.insert(0, os.environ["MODULES"])
from turns import in_turn

folder = Path(os.environ["OUTPUT_DIR"])
folder.mkdir()
folder.with_suffix(".pid").write_text(str(os.getpid()))

def write(file, row):
    with open(file, "a") as lines:
        lines.write(json.dumps(row) + chr(10))

for step in in_turn(range(int(os.environ["STEPS"])), 0, lambda: None):
    began = time.monotonic()
    if [folder.name, step] == json.loads(os.environ["DIES_AT"]):
        print("out of luck", flush=True)
        os._exit(3)
    if [folder.name, step] == json.loads(os.environ["KILLS_AT"]):
        os.kill(int((folder.parent / "off.pid").read_text()), 9)
        time.sleep(30)
    time.sleep(0.05)
    write(folder / "metrics.jsonl", {"reward": step, "seconds": 0.05})
    write(folder.parent / "turns.jsonl", [folder.name, began, time.monotonic()])
write(folder.parent / "turns.jsonl", [folder.name, time.monotonic(), time.monotonic()])
"""


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """A folder with the stand-in in the place of the trainer's script."""
    script = tmp_path / "trainer/scripts/finetune/finetune_flux_grpo.sh"
    script.parent.mkdir(parents=True)
    (tmp_path / "stand_in.py").write_text(TRAINER)
    script.write_text(f"python {tmp_path / 'stand_in.py'}\n")
    settings = {"MODULES": str(ROOT / "upstream/mini/fastvideo"), "STEPS": "3", "DIES_AT": "null", "KILLS_AT": "null"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "trainer"


@pytest.fixture
def in_turn(monkeypatch):
    """The trainer's side of the turns."""
    monkeypatch.syspath_prepend(ROOT / "upstream/mini/fastvideo")
    from turns import in_turn

    return in_turn


def wanted(folder):
    return {folder / name: arm for name, arm in ARMS.items()}


def left_over(folder):
    """The processes that were started to write into `folder`, workers in sessions of their own included."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"OUTPUT_DIR={folder}".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text())
        except OSError:  # it has ended meanwhile, or is another user's
            continue
    return found


def test_runs_train_strictly_in_turn(trainer, tmp_path):
    off, on = runs.train_in_turn(trainer, wanted(tmp_path), 1)
    assert [row["reward"] for row in off] == [row["reward"] for row in on] == [0, 1, 2]
    turns = [json.loads(line) for line in (tmp_path / "turns.jsonl").read_text().splitlines()]
    assert [name for name, _, _ in turns] == ["off", "on"] * (3 + 1)  # the end is a turn as well
    assert all(ended <= begun for (_, _, ended), (_, begun, _) in zip(turns, turns[1:], strict=False))
    assert not left_over(tmp_path)


def test_without_a_referee_nothing_waits(in_turn, monkeypatch):
    monkeypatch.delenv("MINI_TURNS", raising=False)
    assert list(in_turn(range(3), 0, lambda: pytest.fail("waited"))) == [0, 1, 2]


def test_a_run_ends_when_nobody_hands_out_turns(in_turn, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("MINI_TURNS", "{}:{}".format(*listener.getsockname()))

        def referee():
            connection, _ = listener.accept()
            with connection:
                assert [connection.recv(9), connection.send(b"."), connection.recv(9)] == [b"2\n", 1, b"1\n"]

        thread = threading.Thread(target=referee)
        thread.start()
        done = []
        with pytest.raises(SystemExit, match="hands out the turns has gone\n"):
            for step in in_turn(range(2), 0, lambda: None):
                done.append(step)
        thread.join()
    assert done == [0]


@pytest.mark.parametrize(("name", "step"), [("off", 0), ("on", 1), ("off", 2)])
def test_a_run_that_dies_ends_the_other(trainer, tmp_path, monkeypatch, capsys, name, step):
    monkeypatch.setenv("DIES_AT", json.dumps([name, step]))
    with pytest.raises(SystemExit) as failed:
        runs.train_in_turn(trainer, wanted(tmp_path), 1)
    other = "on" if name == "off" else "off"
    assert str(failed.value).splitlines() == [
        f"the training run with JAGG {name} failed (exit status 3), so JAGG {other} was ended too",
        f"the last that it printed stands above, all of it in {tmp_path / name}.log",
    ]
    assert "out of luck" in capsys.readouterr().err
    assert not left_over(tmp_path)


def test_a_run_that_dies_while_it_waits_ends_the_other_at_once(trainer, tmp_path, monkeypatch):
    monkeypatch.setenv("KILLS_AT", json.dumps(["on", 1]))
    began = time.monotonic()
    with pytest.raises(SystemExit, match=r"JAGG off failed \(exit status 137\), so JAGG on was ended too\n"):
        runs.train_in_turn(trainer, wanted(tmp_path), 1)
    assert time.monotonic() - began < 25  # the step that JAGG on was at takes 30 s
    assert not left_over(tmp_path)


def launch(trainer, out):
    """Another process that lets the trainer's script train in turn, for longer than any test if the script takes the flags."""
    flags = "--max_train_steps 10000 --num_generations 2 --train_batch_size 1 --micro_batch_size 2 --sampling_steps 5"
    script = f"import runs; runs.train_in_turn({str(trainer)!r}, {wanted(out)!r}, 1, *{flags.split()!r})"
    script = f"from pathlib import Path, PosixPath; {script}"
    env = os.environ | {"PYTHONPATH": str(ROOT / "upstream")}
    process = subprocess.Popen([sys.executable, "-c", script], env=env, stderr=subprocess.PIPE, text=True)
    until(lambda: (out / "on/metrics.jsonl").exists())
    return process


def until(condition, seconds=240):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_after_ctrl_c_no_process_of_torchrun_s_is_left(patched, tmp_path):
    process = launch(patched, tmp_path)
    assert len(left_over(tmp_path)) == 2 * 4  # script, torchrun, two workers in sessions of their own
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert said.rstrip().endswith("KeyboardInterrupt")
    assert not left_over(tmp_path)


def test_if_the_demo_is_killed_its_runs_end_by_themselves(trainer, tmp_path, monkeypatch):
    monkeypatch.setenv("STEPS", "10000")
    process = launch(trainer, tmp_path)
    assert len(left_over(tmp_path)) == 2 * 2  # script and trainer
    process.kill()
    process.communicate(timeout=60)
    until(lambda: not left_over(tmp_path), 60)


def test_a_run_in_turn_is_the_run_alone(patched, tmp_path):
    """To the last digit: a turn takes no random number. One run is enough: that two take turns is tested above."""
    flags = "--max_train_steps 2 --num_generations 2 --train_batch_size 2 --micro_batch_size 2 --gradient_accumulation_steps 2"
    (in_turn,) = runs.train_in_turn(patched, {tmp_path / "on": ARMS["on"]}, 3, *flags.split())
    alone = runs.train(patched, tmp_path / "alone", "JAGG on", 3, ARMS["on"][1], *flags.split())
    for row, expected in zip(in_turn, alone, strict=True):
        assert row == expected | {key: row[key] for key in ("seconds", "update_seconds")}
        assert row["backward_passes"] == 2 * 6  # two micro-batches


def rows(seconds):
    """Metrics of training steps that take `seconds`, half of it the update."""
    row = {"reward": 0.5, "reward_sem": 0.1, "backward_passes": 27, "first_ratio_error": 0.0}
    return [row | {"seconds": value, "update_seconds": value / 2} for value in seconds]


def test_the_ratio_is_the_median_of_the_pairs():
    """A disturbance that meets all runs for a while leaves it; the ratio of the medians would be 6 / 5."""
    import demo

    off, on = [99, 50, 3, 6, 6, 60, 30], [1, 7, 2, 3, 5, 40, 25]
    metrics = {"off": rows(off), "on": rows(on), "retained": rows([seconds / 2 for seconds in on])}
    assert demo.paired_ratios(metrics["off"], metrics["on"], "seconds") == [1.5, 2.0, 1.2, 1.5, 1.2]
    results = demo.compare(metrics)
    for name, factor in (("on", 1), ("retained", 2)):
        for key in demo.SECONDS:
            assert results[name]["times_faster"][key] == [factor * 1.2, factor * 1.5, factor * 1.5]
    assert [results[name]["times_faster"]["update_by_arithmetic"] for name in ("on", "retained")] == [36 / 27, 3.0]
    assert results["off"]["seconds_per_training_step"] == [6, 6, 30]
    seconds, faster, *_ = demo.table(results).splitlines()[1:]
    assert seconds.split()[4:] == ["6.00", "(6.00-30.00)", "5.00", "(3.00-25.00)", "2.50", "(1.50-12.50)"]
    assert faster.split()[4:] == ["1.50", "(1.20-1.50)", "3.00", "(2.40-3.00)"]


def test_the_committed_result_is_what_its_training_steps_come_to():
    import demo

    results = json.loads((ROOT / "upstream/demo-results/comparison.json").read_text())
    metrics = {
        name: [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        for name, columns in results["runs"].items()
    }
    again = json.loads(json.dumps(demo.compare(metrics)))
    assert again == {key: results[key] for key in again}
