"""Settings: flag beats environment beats default; whatever isn't valid stops the run and says what is."""

import argparse

import pytest

from jagg_patch import JaggConfig, JaggError
from jagg_patch.config import add_flags


def resolve(environ, *flags):
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return JaggConfig.from_env(environ).with_flags(parser.parse_args(flags))


def test_defaults():
    assert JaggConfig().as_dict() == {
        "enabled": True,
        "group_size": 4,
        "frac": 0.6,
        "cuts": (),
        "knots": "",
        "knots_at": (),
        "knots_cosine": 0.98,
        "schedule": "auto",
        "aggregation": "interpolate",
        "skip_forwards": False,
        "offload_records": False,
        "retain": False,
        "retain_on": "auto",
        "retain_gb": 0.0,
        "probe_every": 0,
        "self_check": True,
        "log": "",
    }


def test_flag_beats_environment_beats_default():
    environ = {"JAGG_GROUP_SIZE": "6", "JAGG_FRAC": "0.5", "OTHER": "1"}
    config = resolve(environ, "--jagg_frac", "1")
    assert (config.group_size, config.frac, config.aggregation) == (6, 1.0, "interpolate")
    assert resolve({"JAGG_ENABLED": "0"}).enabled is False
    assert resolve({"JAGG_ENABLED": "0"}, "--jagg_enabled", "1").enabled is True


@pytest.mark.parametrize(
    ("name", "value", "valid"),
    [
        ("enabled", "yes", "0 or 1"),
        ("enabled", "", "0 or 1"),
        ("group_size", "1", "at least 2"),
        ("group_size", "4.5", "whole number"),
        ("frac", "1.1", "0 to 1"),
        ("frac", "-0.1", "0 to 1"),
        ("frac", "nan", "0 to 1"),
        ("frac", "most", "0 to 1"),
        ("schedule", "both", "auto or joint or sequential"),
        ("aggregation", "mean", "interpolate or endpoints"),
        ("frac", "automatic", "or auto"),
        ("probe_every", "-1", "at least 0"),
        ("probe_every", "2.5", "whole number"),
        ("cuts", "0", "at least 1"),
        ("cuts", "5;9", "commas between"),
        ("self_check", "2", "0 or 1"),
        ("retain", "all", "0 or 1"),
        ("retain_on", "disk", "auto or device or host"),
        ("retain_gb", "-1", "at least 0"),
        ("retain_gb", "inf", "at least 0"),
        ("retain_gb", "80GB", "at least 0"),
    ],
)
def test_bad_values_name_the_setting_and_what_it_takes(name, value, valid):
    for source, call in {
        f"JAGG_{name.upper()}": lambda: resolve({f"JAGG_{name.upper()}": value}),
        f"--jagg_{name}": lambda: resolve({}, f"--jagg_{name}={value}"),
        name: lambda: JaggConfig(**{name: value}),
    }.items():
        with pytest.raises(JaggError) as error:
            call()
        text = str(error.value)
        assert f"{source}={value!r}" in text and valid in text
        assert len(text.splitlines()) == 2


def test_a_log_is_a_path():
    from pathlib import Path

    assert JaggConfig(log=Path("a/run.jsonl")).log == "a/run.jsonl" and JaggConfig(log=None).log == ""
    for value in (5, b"run.jsonl"):
        with pytest.raises(JaggError, match="log takes a path"):
            JaggConfig(log=value)


def test_cuts_are_sorted_positions():
    assert resolve({"JAGG_CUTS": "9, 5,9"}).cuts == resolve({}, "--jagg_cuts=5,9").cuts == JaggConfig(cuts=[5, 9]).cuts == (5, 9)
    assert resolve({"JAGG_CUTS": ""}).cuts == ()


def test_frac_may_be_auto_and_a_flag_may_bring_the_probe_that_it_needs():
    config = resolve({"JAGG_FRAC": "auto"}, "--jagg_probe_every", "10", "--jagg_log", "run.jsonl")
    assert (config.frac, config.probe_every, config.log) == ("auto", 10, "run.jsonl")


@pytest.mark.parametrize("value", [4.0, True, None])
def test_a_group_size_that_is_no_int_is_refused_in_python_too(value):
    with pytest.raises(JaggError, match="group_size"):
        JaggConfig(group_size=value)


def test_unknown_variables_are_refused_with_the_valid_names():
    with pytest.raises(JaggError, match="JAGG_FRACTION") as error:
        JaggConfig.from_env({"JAGG_FRACTION": "0.5"})
    assert "JAGG_FRAC," in str(error.value)
