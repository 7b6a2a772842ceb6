"""`python -m jagg_patch report`: the table and the recommendation that follow from a log's cosines."""

import json
import sys

import pytest

from jagg_patch import JaggConfig, plan_groups
from jagg_patch.__main__ import main
from jagg_patch.evidence.report_groups import as_frac, choices, cosines


def record(training_step, probes=None, **changes):
    """A record of a trainer with 9 of 15 steps, 16 sampled; `probes` is `{group_size: [(steps, cosine), …]}`."""
    groups = {}
    for size, values in (probes or {}).items():
        starts = [sum(steps for steps, _ in values[:n]) for n in range(len(values))]
        groups[size] = [
            {"start": start, "steps": steps, "routed": start == 0, "cosine": cosine}
            for start, (steps, cosine) in zip(starts, values, strict=True)
        ]
    return {
        "trainer": "train_grpo_flux",
        "aggregation": "interpolate",
        "training_step": training_step,
        "trajectory": 15,
        "visited": 9,
        "sampled_steps": 16,
        "step_cost": {"backward": 2.0, "recompute": 1.0, "reference": 0.0},
        "rollout_seconds": 1.0,
        "update_seconds": 2.0,
        "probe_seconds": 3.0 if probes else 0.0,
        "probe": [{"group_size": size, "groups": rows} for size, rows in groups.items()] or None,
    } | changes


def log(tmp_path, *records, name="run.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(entry) + "\n" for entry in records))
    return path


@pytest.fixture
def report(monkeypatch, capsys):
    """`report(arguments)` is what the command prints, and `report(arguments, fails=True)` the message that it ends with."""

    def run(*arguments, fails=False):
        monkeypatch.setattr(sys, "argv", ["jagg_patch", "report", *map(str, arguments)])
        if not fails:
            main()
            return capsys.readouterr().out
        with pytest.raises(SystemExit) as error:
            main()
        return error.value.code

    return run


RUN = [record(1)] + [
    record(step, {4: [(5, 0.9 + step / 100), (4, last)], 3: [(3, 0.99), (3, 0.95), (3, 0.7)]})
    for step, last in ((2, 0.7), (3, 0.8), (4, 0.6))
]


def test_choices_stop_before_the_first_group_whose_mean_is_below_the_threshold():
    options = choices(cosines(RUN[1:]), RUN[1], threshold=0.8)
    told = [(o["group_size"], o["frac"], o["groups"], o["update"], o["training_step"], o["probes"]) for o in options]
    # by hand: 9 steps cost 9 * 4; a group of n saves n - 2 backward passes of 3
    assert told == [
        (4, 0.6, [5], [36, 27], [52, 43], 3),
        (3, 0.7, [3, 3], [36, 30], [52, 46], 3),
        (3, 0.4, [3], [36, 33], [52, 49], 3),
    ]
    assert options[0]["lowest_mean_cosine"] == pytest.approx(0.93)
    assert [o["groups"] for o in choices(cosines(RUN[1:]), RUN[1], threshold=0.7)][:2] == [[5, 4], [5]]
    assert choices(cosines(RUN[1:]), RUN[1], threshold=0.995) == []


def test_groups_that_were_cut_are_chosen_as_they_were_measured():
    """Nine steps with W=5 are five and four, cut at 3 three and six."""
    probed = record(1, {5: [(3, 0.9), (6, 0.9)]}, cuts=[3])
    assert [(o["frac"], o["groups"]) for o in choices(cosines([probed]), probed, threshold=0.8)] == [(1.0, [3, 6]), (0.4, [3])]
    assert [o["frac"] for o in choices(cosines([probed]), record(1), threshold=0.8)] == [0.4]


def test_with_skipped_forwards_the_costs_are_those_that_the_run_has_come_to(report, tmp_path):
    """By hand: 9 steps cost 9 * 4, the group of 5 takes 9 forwards looking ahead and 8 in the joint schedule."""
    for forwards, update in ((3, 4 * 4 + 9), (2, 4 * 4 + 8)):
        path = log(tmp_path, *(entry | {"forwards_a_group": 3} for entry in RUN[:-1]), RUN[-1] | {"forwards_a_group": forwards})
        printed = report(path)
        assert f"by the cost model ({forwards} a group, the others skipped)\n" in printed
        assert f" 5            lowest 0.930   update 36 -> {update} " in printed
    other = log(tmp_path, RUN[-1] | {"forwards_a_group": 3}, name="other.jsonl")
    assert "forwards_a_group is 2 and 3" in report(path, other, fails=True)
    assert "skipped" not in report(log(tmp_path, *RUN))


def test_a_group_without_a_cosine_ends_the_choices():
    run = [record(1, {4: [(5, None), (4, 0.99)]})]
    assert choices(cosines(run), run[0], threshold=0.8) == []


def test_a_share_that_would_be_grouped_otherwise_is_no_choice():
    """11 steps at frac 0.6 are 3 + 3, and 5 more: all 11 routed would be 4 + 4 + 3."""
    run = [record(1, {4: [(3, 0.9), (3, 0.9), (5, 0.9)]}, visited=11)]
    assert [option["groups"] for option in choices(cosines(run), run[0], threshold=0.8)] == [[3, 3], [3]]


@pytest.mark.parametrize("n_visited", range(2, 60))
def test_the_frac_that_is_told_routes_the_steps_that_were_meant(n_visited):
    for n_routed in range(2, n_visited + 1):
        groups = plan_groups(n_visited, JaggConfig(frac=as_frac(n_routed, n_visited)))
        assert sum(map(len, groups)) == n_routed


def test_the_command_prints_plots_and_recommends(tmp_path, report):
    out = tmp_path / "report"
    printed = report(log(tmp_path, *RUN), "--out", out)
    assert "train_grpo_flux: 4 training steps, 3 probed; 9 of 15 steps visited" in printed
    assert "the probes took 42.9% of the time" in printed  # 9 of 21 seconds
    assert "0.930 ± 0.008 (0.920)   0.700 ± 0.082 (0.600)   n=3" in printed
    assert printed.splitlines()[-2] == "recommended: JAGG_GROUP_SIZE=4 JAGG_FRAC=0.6"
    assert json.loads((out / "report.json").read_text())["choices"][0]["groups"] == [5]
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")


def test_what_was_measured_once_is_not_recommended_over_what_was_measured_often(tmp_path, report):
    once = record(5, {8: [(9, 0.99)]})
    often = report(log(tmp_path, *RUN, once))
    assert "recommended: JAGG_GROUP_SIZE=4 JAGG_FRAC=0.6\n  the cheaper ones were measured less than 3 times" in often
    alone = report(log(tmp_path, once))
    assert "recommended: JAGG_GROUP_SIZE=8 JAGG_FRAC=1\n  measured 1 times only" in alone


def test_logs_of_runs_alike_are_put_together_and_others_refused(tmp_path, report):
    assert "8 training steps, 6 probed" in report(log(tmp_path, *RUN, name="a"), log(tmp_path, *RUN, name="b"))
    other = log(tmp_path, record(1, {4: [(5, 0.9)]}, visited=5), name="c")
    assert "visited is 9 and 5" in report(log(tmp_path, *RUN, name="a"), other, fails=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("", "none of its 0 lines is a record"),
        (json.dumps(record(1)) + "\n", "1 training steps, none of them probed"),
        ('{"reward": 1}\n[]\n', "none of its 2 lines is a record"),
        (json.dumps(RUN[1] | {"update_seconds": None}), "the log isn't one of JAGG"),
        (json.dumps(RUN[1] | {"step_cost": {"newer": 1}}), "the log isn't one of JAGG"),
        (json.dumps(RUN[1]) + "\n" + json.dumps(record(1, visited=5)), "visited is 9 and 5"),
    ],
)
def test_what_is_no_log_of_a_probed_run_is_refused_in_two_lines(tmp_path, report, text, message):
    path = tmp_path / "run.jsonl"
    if text is not None:
        path.write_text(text)
    said = report(path, fails=True)
    assert message in said and len(said.splitlines()) == 2


def test_lines_that_a_kill_has_cut_off_are_passed_over(tmp_path, report):
    path = log(tmp_path, *RUN)
    path.write_text('{"trainer": "train_gr\n\n' + path.read_text() + '{"trainer": "train_gr')
    assert "4 training steps, 3 probed" in report(path)


def test_a_threshold_that_is_no_cosine_and_a_folder_that_cannot_be_made_are_refused(tmp_path, report):
    for threshold in ("nan", "2"):
        assert "--threshold takes" in report(log(tmp_path, *RUN), "--threshold", threshold, fails=True)
    for out in (log(tmp_path, *RUN) / "report", "/proc"):
        assert "the folder can't be made or written to" in report(log(tmp_path, *RUN), "--out", out, fails=True)


def test_groups_of_two_are_no_choice(tmp_path, report):
    """They save nothing."""
    assert "recommended" not in report(log(tmp_path, *[record(step, {2: [(2, 1.0), (2, 1.0)]}) for step in (1, 2, 3)]))


def with_knots(step, *rows, **changes):
    """A record of all 15 steps; `rows` are `(knots, cosine)` or `(knots, cosine, size of the published groups)`."""
    keys = "knots", "cosine", "group_size"
    probe = [dict(zip(keys, (*row, None)[:3], strict=True)) | {"relative_error": 0.1} for row in rows]
    return record(step, visited=15, probe=probe or None, probe_seconds=3.0 * bool(rows), **changes)


FOUR, FIVE, SIX = (0, 10, 13, 14), (0, 9, 12, 13, 14), (0, 8, 11, 12, 13, 14)
KNOT_RUN = [with_knots(1)] + [
    with_knots(step, (FIVE, 0.985), (FOUR, 0.97 + step / 1000), (SIX, 0.995), ((0, 7, 8, 14), 0.914, 8)) for step in (2, 3, 4)
]


def test_the_fewest_knots_that_keep_the_cosine_are_recommended(tmp_path, report):
    out = tmp_path / "report"
    printed = report(log(tmp_path, *KNOT_RUN), "--out", out)
    assert "train_grpo_flux: 4 training steps, 3 probed; 15 of 15 steps visited" in printed
    # by hand: 15 steps cost 15 * 4; a step that is no knot saves a backward pass of 3
    assert "4 knots      0.973 ± 0.001 (0.972)   n=3    update 27 (2.22x)   0,10,13,14\n" in printed
    assert "4 with W=8   0.914 ± 0.000 (0.914)   n=3    update 27 (2.22x)   published groups of all steps\n" in printed
    assert "  a training step with sampling 76 -> 46 (1.65x)\nrecommended: JAGG_KNOTS=5\n" in printed
    assert "recommended: JAGG_KNOTS=4" in report(log(tmp_path, *KNOT_RUN), "--threshold", 0.97)
    assert "recommended: JAGG_KNOTS=6" in report(log(tmp_path, *KNOT_RUN), "--threshold", 0.99)
    assert "none of these" in report(log(tmp_path, *KNOT_RUN), "--threshold", 0.999)
    assert json.loads((out / "report.json").read_text())["choices"][0]["passes"] == 5
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")


def test_fewer_knots_that_were_measured_once_are_not_recommended_over_more_that_were_measured_often(tmp_path, report):
    printed = report(log(tmp_path, *KNOT_RUN, with_knots(5, (FOUR[:1] + FOUR[2:], 0.99))))
    assert "recommended: JAGG_KNOTS=5\n  fewer were measured less than 3 times" in printed


def test_an_update_without_a_cosine_counts_for_nothing(tmp_path, report):
    printed = report(log(tmp_path, with_knots(1, (FOUR, None), (FIVE, 0.99))))
    assert "4 knots      unknown" in printed and "JAGG_KNOTS=5\n  measured 1 times only" in printed


def test_places_that_were_named_are_recommended_by_name(tmp_path, report):
    run = [with_knots(step, (FOUR, 0.99), knots_at=list(FOUR)) for step in range(3)]
    assert f"recommended: JAGG_KNOTS_AT={','.join(map(str, FOUR))}\n" in report(log(tmp_path, *run))


def test_a_picture_without_a_cosine_is_drawn_without_a_word(tmp_path, report, recwarn):
    report(log(tmp_path, with_knots(1, (FOUR, None))), "--out", tmp_path / "out")
    assert (tmp_path / "out/report.png").exists() and not [str(one.message) for one in recwarn if "legend" in str(one.message)]


def test_a_record_that_somebody_has_changed_is_told(tmp_path, report):
    assert "the log isn't one of JAGG" in report(log(tmp_path, record(1) | {"probe": {"a": 1}}), fails=True)


def test_logs_with_groups_and_with_knots_are_not_put_together(tmp_path, report):
    groups = log(tmp_path, record(1, {4: [(15, 0.9)]}, visited=15), name="a")
    assert "of runs with groups and of runs with knots" in report(groups, log(tmp_path, *KNOT_RUN, name="b"), fails=True)
