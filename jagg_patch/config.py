"""Settings: a dataclass, the `JAGG_*` environment, the `--jagg_*` flags. Flag beats environment beats default."""

import math
import os
from dataclasses import dataclass, field, fields

from .errors import JaggError

ENV_PREFIX = "JAGG_"
FLAG_PREFIX = "jagg_"
AUTO = "auto"
KNOTS, GROUPS = ("knots", "knots_at"), ("group_size", "frac", "cuts")  # two ways of saying which steps get a backward pass


def _one_of(*choices):
    def check(value):
        if value not in choices:
            raise ValueError

    return check, " or ".join(choices)


def _at_least(low):
    def check(value):
        if value < low:
            raise ValueError

    return check, f"a whole number of at least {low}"


def _number_or_auto(value):
    return AUTO if value == AUTO else float(value)


def _not_negative(value):
    if not (math.isfinite(value) and value >= 0):
        raise ValueError


def _fraction(value):
    if value != AUTO and not (math.isfinite(value) and 0 <= value <= 1):
        raise ValueError


def _cosine(value):
    if not 0 < value < 1:
        raise ValueError


def _whole(value):
    """int() that refuses 4.7 and True instead of rounding them."""
    if isinstance(value, (bool, float)):
        raise ValueError
    return int(value)


def _path(value):
    return "" if value is None else os.fspath(value) + ""  # not bytes


def _switch(value):
    return {"0": False, "1": True, False: False, True: True}[value]


def _positions(value):
    """`"5,9"` as `(5, 9)`."""
    values = value.split(",") if isinstance(value, str) and value else value or ()
    return tuple(sorted({_whole(one) for one in values}))


def _after_the_first(positions):
    if positions and positions[0] < 1:
        raise ValueError


def _number_of_knots(value):
    return value if value in ("", AUTO) else _whole(value)


def _at_least_two(n_knots):
    if n_knots not in ("", AUTO) and n_knots < 2:
        raise ValueError


def _from_zero(positions):
    if positions and (positions[0] != 0 or len(positions) < 2):
        raise ValueError


ZERO_OR_ONE = (lambda value: None), "0 or 1"  # a rule: `_switch` knows no others


def _setting(default, convert, rule, help):
    check, accepts = rule
    return field(default=default, metadata=dict(convert=convert, check=check, accepts=accepts, help=help))


@dataclass(frozen=True)
class JaggConfig:
    """How the update is grouped. Raises `JaggError` on a value out of range, naming what is valid.

    Values may be given as strings, as the environment has them.
    """

    enabled: bool = _setting(True, _switch, ZERO_OR_ONE, "0 leaves the trainer as it is")
    group_size: int = _setting(4, _whole, _at_least(2), "steps per group, W: their W backward passes become 2")
    frac: float | str = _setting(
        0.6,
        _number_or_auto,
        (_fraction, "a number from 0 to 1, or auto"),
        "share of a trajectory's visited steps, noisiest first, to group; auto follows the probe",
    )
    cuts: tuple = _setting(
        (),
        _positions,
        (_after_the_first, "whole numbers of at least 1, with commas between"),
        "visited steps, counted from 0, at which a new group begins: where the trainer goes on to other weights",
    )
    knots: int | str = _setting(
        "",
        _number_of_knots,
        (_at_least_two, "a whole number of at least 2, or auto"),
        "in place of groups: how many visited steps of a sample have a backward pass of their own; auto follows the probe",
    )
    knots_at: tuple = _setting(
        (),
        _positions,
        (_from_zero, "whole numbers with commas between, 0 and the last visited step among them"),
        "in place of groups: which visited steps have a backward pass of their own",
    )
    knots_cosine: float = _setting(
        0.98,
        float,
        (_cosine, "a number from 0 to 1, without these"),
        "what knots=auto keeps: the least cosine of an update's gradient to the exact one",
    )
    schedule: str = _setting(
        "auto",
        str,
        _one_of("auto", "joint", "sequential"),
        "run a group's two backward passes in one call, or one after the other with a single graph in memory",
    )
    aggregation: str = _setting(
        "interpolate",
        str,
        _one_of("interpolate", "endpoints"),
        "interpolate in t, or keep the endpoints' own gradients only (the ablation)",
    )
    skip_forwards: bool = _setting(
        False,
        _switch,
        ZERO_OR_ONE,
        "1 estimates a group's intermediate model outputs from those of the rollout instead of running the model",
    )
    offload_records: bool = _setting(
        False, _switch, ZERO_OR_ONE, "1 keeps the rollout's recorded outputs in the host's memory"
    )
    retain: bool = _setting(
        False,
        _switch,
        ZERO_OR_ONE,
        "1 has the rollout keep its graphs for the update, which then runs no forward before its first optimizer step",
    )
    retain_on: str = _setting(
        "auto",
        str,
        _one_of("auto", "device", "host"),
        "where retained graphs are kept; auto: on the device while it has room, then in the host's memory",
    )
    retain_gb: float = _setting(
        0.0, float, (_not_negative, "a number of at least 0"), "at most so many GB of retained graphs on a rank; 0 sets no limit"
    )
    probe_every: int = _setting(
        0,
        _whole,
        _at_least(0),
        "every so many training steps, measure how near each group's gradient is to the exact one; 0 never",
    )
    self_check: bool = _setting(
        True,
        _switch,
        ZERO_OR_ONE,
        "0 leaves out the check that computes each group's gradient once more, at a run's start, in the unpatched order",
    )
    _given = frozenset()  # no setting: the names of those that the environment has

    log: str = _setting("", _path, (lambda value: None, "a path"), "a file that gets a line of JSON a training step")

    def __post_init__(self):
        for setting in fields(self):
            value = convert(setting, getattr(self, setting.name), setting.name)
            object.__setattr__(self, setting.name, value)
        self._require_one_plan(setting.name for setting in fields(self) if getattr(self, setting.name) != setting.default)

    @property
    def is_auto(self):
        """Whether the plan follows the probe."""
        return AUTO in (self.frac, self.knots)

    @property
    def has_knots(self):
        """Whether knots are asked for, by number or by name, in place of groups."""
        return bool(self.knots or self.knots_at)

    @staticmethod
    def _require_one_plan(given):
        """Raise `JaggError` if of the settings that are `given` some ask for groups and some for knots, or for these twice."""
        given = set(given)
        knots, groups = [[name for name in names if name in given] for names in (KNOTS, GROUPS)]
        if len(knots) > 1 or (knots and groups):
            names = [ENV_PREFIX + name.upper() for name in knots + groups]
            raise JaggError(
                f"{' and '.join(names)} are set together, and each says which steps get a backward pass\n"
                "set JAGG_KNOTS or JAGG_KNOTS_AT alone, or the published groups (JAGG_GROUP_SIZE, JAGG_FRAC, JAGG_CUTS)"
            )

    @classmethod
    def from_env(cls, environ=os.environ, **defaults):
        """Settings from the `JAGG_*` variables of `environ`, else from `defaults`, else this class's own.

        Raises `JaggError` on an unknown name or a bad value.
        """
        names = {ENV_PREFIX + setting.name.upper(): setting for setting in fields(cls)}
        unknown = sorted(name for name in environ if name.startswith(ENV_PREFIX) and name not in names)
        if unknown:
            raise JaggError(
                f"unknown setting in the environment: {', '.join(unknown)}\nvalid are {', '.join(names)}: unset or rename it"
            )
        given = {names[name].name: convert(names[name], environ[name], name) for name in names if name in environ}
        chosen = [name for name, value in given.items() if value not in ("", ())]
        cls._require_one_plan(chosen)
        if set(KNOTS).intersection(chosen):
            defaults = {name: value for name, value in defaults.items() if name not in GROUPS}
        config = cls(**(defaults | given))
        object.__setattr__(config, "_given", frozenset(chosen))
        return config

    def with_flags(self, args):
        """These settings, overridden by the `jagg_*` attributes of the parsed `args` that aren't None."""
        flags = {setting: getattr(args, FLAG_PREFIX + setting.name, None) for setting in fields(self)}
        given = {
            setting.name: convert(setting, value, f"--{FLAG_PREFIX}{setting.name}")
            for setting, value in flags.items()
            if value is not None
        }
        # By name: a flag may contradict the environment's plan at its default's value too.
        chosen = {name for name, value in given.items() if value not in ("", ())}
        self._require_one_plan((self._given - given.keys()) | chosen)
        return type(self)(**(self.as_dict() | given))

    def as_dict(self):
        return {setting.name: getattr(self, setting.name) for setting in fields(self)}


def convert(setting, value, name):
    """`value` in the type of the dataclass field `setting`; `name` is what the user called it, for the message."""
    rule = setting.metadata
    try:
        converted = rule["convert"](value)
        rule["check"](converted)
    except (ValueError, TypeError, KeyError):
        raise JaggError(f"bad value {name}={value!r}\n{name} takes {rule['accepts']}: {rule['help']}") from None
    return converted


def add_flags(parser):
    """Add `--jagg_*` to an argparse parser, so that they show in `--help` and reach the trainer's `args`; once."""
    if getattr(parser, "has_jagg_flags", False):
        return
    group = parser.add_argument_group("JAGG", "grouped backward passes; each flag beats the JAGG_* variable of its name")
    for setting in fields(JaggConfig):
        rule = setting.metadata
        default = int(setting.default) if setting.type is bool else setting.default
        # No type and no default here: with_flags converts, so that a bad flag and a bad variable read the same,
        # and None tells "not given" from the default.
        group.add_argument(
            f"--{FLAG_PREFIX}{setting.name}",
            metavar=setting.name.upper(),
            help=f"{rule['help']}; {rule['accepts']} (default {'none' if default in ('', ()) else default})",
        )
    parser.has_jagg_flags = True
