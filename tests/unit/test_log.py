"""The log: a line of JSON a training step, and the trainer's own wandb run. tests/upstream has the real wandb."""

import json
import sys
from types import SimpleNamespace

import pytest

from jagg_patch import JaggError
from jagg_patch.evidence.log import Log

RECORD = {
    "training_step": 3,
    "schedule": "joint",
    "update_seconds": 1.5,
    "groups": [5],
    "probe": [{"group_size": 4, "groups": [{"cosine": 0.9}, {"cosine": None}]}, {"group_size": 6, "groups": [{"cosine": 0.8}]}],
}


def test_records_are_added_to_the_file_and_its_folder_made(tmp_path):
    path = tmp_path / "logs/run.jsonl"
    Log(str(path)).write(RECORD)
    Log(str(path)).write(RECORD | {"training_step": 4, "probe": None})  # the run goes on from a checkpoint
    assert [json.loads(line)["training_step"] for line in path.read_text().splitlines()] == [3, 4]


def test_a_path_that_cannot_be_written_is_refused_at_start(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file/run.jsonl", "~nobody-of-that-name/run.jsonl"):
        with pytest.raises(JaggError, match="the log can't be written"):
            Log(str(path))


def test_a_line_that_a_killed_run_left_unfinished_stays_one_line(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"training_step": 1}\n{"train')
    Log(str(path)).write(RECORD)
    Log(str(path)).write(RECORD)
    assert [line[:16] for line in path.read_text().splitlines()] == [
        '{"training_step"',
        '{"train',
        '{"training_step"',
        '{"training_step"',
    ]


def test_a_full_disk_ends_the_log_and_not_the_run(capsys):
    log = Log("/dev/full")
    log.write(RECORD)
    log.write(RECORD)
    assert capsys.readouterr().out.count("the log can't be written any more") == 1


def test_the_trainer_may_change_its_folder(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    log = Log("run.jsonl")
    monkeypatch.chdir(tmp_path / "elsewhere")
    log.write(RECORD)
    assert (tmp_path / "run.jsonl").read_text().count("\n") == 1


def test_a_wandb_that_raises_is_told_once_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    calls = []

    def fail(values, commit):
        calls.append(values)
        raise RuntimeError("broken pipe")

    run = SimpleNamespace(define_metric=lambda *args, **kwargs: None, log=fail)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
    log = Log(str(tmp_path / "run.jsonl"))
    log.write(RECORD)
    log.write(RECORD)
    assert len(calls) == 1 and capsys.readouterr().out.count("wandb doesn't take JAGG's numbers: RuntimeError: broken pipe") == 1
    assert (tmp_path / "run.jsonl").read_text().count("\n") == 2


def test_without_a_path_only_wandb_gets_it_and_without_a_run_nobody(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = []
    run = SimpleNamespace(
        define_metric=lambda *args, **kwargs: calls.append((args, kwargs)),
        log=lambda values, commit: calls.append((values, commit)),
    )
    wandb = SimpleNamespace(run=None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    log = Log("")
    log.write(RECORD)
    assert calls == []
    wandb.run = run
    log.write(RECORD)
    log.write(RECORD | {"probe": None})
    plain = {"jagg/training_step": 3, "jagg/update_seconds": 1.5}
    assert calls == [
        (("jagg/*",), {"step_metric": "jagg/training_step"}),
        (plain | {"jagg/cosine_W4/0": 0.9, "jagg/cosine_W6/0": 0.8}, False),
        (plain, False),
    ]
    assert list(tmp_path.iterdir()) == []


def test_wandb_gets_the_cosine_of_each_number_of_knots(monkeypatch):
    rows = []
    run = SimpleNamespace(define_metric=lambda *args, **kwargs: None, log=lambda values, commit: rows.append(values))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
    plans = [((0, 10, 13, 14), None, 0.97), ((0, 13, 14), None, None), ((0, 3, 4, 7), 4, 0.9), ((0, 7, 13, 14), None, 0.8)]
    probe = [{"knots": list(knots), "group_size": size, "cosine": cosine} for knots, size, cosine in plans]
    Log("").write({"training_step": 3, "probe": probe})
    assert rows == [{"jagg/training_step": 3, "jagg/cosine_knots4": 0.97, "jagg/cosine_W4": 0.9}]
