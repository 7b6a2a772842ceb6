"""`install`: settings from the trainer's parser, then the wrappers into the trainer's namespace."""

import argparse
import functools
import inspect
import os

import torch.distributed as dist

from .banner import banner
from .config import FLAG_PREFIX, JaggConfig, add_flags
from .errors import JaggError
from .session import Session, Stats
from .trainers import find_trainer

MARK = "__jagg__"  # in a namespace that JAGG is installed in


class Handle:
    """What `install` returns. `stats` counts since then; `uninstall()` puts back every name."""

    def __init__(self, namespace, trainer):
        self._namespace = namespace
        self._trainer = trainer
        if MARK in namespace:
            raise JaggError("JAGG is already installed in this trainer\nis the hook in the file twice? Run apply.sh --status")
        namespace[MARK] = self
        self._originals = {}
        self._parser = None
        self._announced = False
        self.config = None
        self.stats = Stats()

    def uninstall(self):
        """Restore every wrapped name and the parser. Calling it again does nothing."""
        self._namespace.update(self._originals)
        if self._namespace.get(MARK) is self:
            del self._namespace[MARK]
        self._originals = {}
        if self._parser is not None:
            vars(self._parser).pop("parse_known_args", None)
            self._parser = None

    def _wrap(self, replacements):
        for name, replacement in replacements.items():
            self._originals.setdefault(name, self._namespace[name])
            self._namespace[name] = replacement

    def _activate(self, config):
        self.config = config
        try:
            if config.enabled:
                self._trainer.check(self._namespace)
                session = Session(config)
                self.stats = session.stats
                self._wrap(self._trainer.wrappers(self._namespace, session))
            if "train_one_step" in self._namespace:
                self._wrap({"train_one_step": self._with_first_step_checks(self._namespace["train_one_step"])})
        except BaseException:
            self.uninstall()
            raise

    def _with_first_step_checks(self, train_one_step):
        """What can't be done before the first training step, since it needs the process group: compare the ranks.

        Off is checked too: one rank with JAGG off among ranks with it on would deadlock.
        """
        checked = reported = False

        @functools.wraps(train_one_step)
        def wrapped_train_one_step(*args, **kwargs):
            nonlocal checked, reported
            if not checked:
                require_same_on_all_ranks(self.config)
                self._announce(inspect.signature(train_one_step).bind(*args, **kwargs).arguments.get("args"))
                checked = True
            result = train_one_step(*args, **kwargs)
            if not reported and self.stats.groups and is_rank_zero():
                passes = f"{self.stats.backward_passes} transformer backward passes"
                unpatched = self.stats.backward_passes_unpatched
                print(f"JAGG: first training step done with {passes} instead of {unpatched}", flush=True)
            reported = True
            return result

        return wrapped_train_one_step

    def _announce(self, args):
        if not self._announced and is_rank_zero() and not (self.config.enabled and args is None):
            print(banner(self._trainer, self.config, args), flush=True)
        self._announced = True


def is_rank_zero():
    return int(os.environ.get("RANK", "0")) == 0


def require_same_on_all_ranks(config):
    """Raise `JaggError` on every rank unless all ranks of the default process group have the same version and settings."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    from . import __version__

    mine = {"version": __version__} | config.as_dict()
    settings = [None] * dist.get_world_size()
    dist.all_gather_object(settings, mine)
    for rank, other in enumerate(settings):
        differing = {name: value for name, value in other.items() if settings[0].get(name) != value}
        if differing:
            raise JaggError(
                f"rank {rank} has {differing}, rank 0 has { ({name: settings[0].get(name) for name in differing}) }\n"
                "ranks with different plans deadlock: export the same JAGG_* on every node and run apply.sh on each checkout"
            )


def install(namespace, parser=None, config=None):
    """Put JAGG into a trainer.

    Args:
        namespace: the trainer's `globals()`.
        parser: its argparse parser, not yet used. It gets the `--jagg_*` flags; JAGG starts when it parses, and the resolved
            settings are then attributes of the parsed arguments. Without it JAGG starts now.
        config: a `JaggConfig` in place of the `JAGG_*` environment. Flags beat it.

    Returns:
        A `Handle` with `.stats` and `.uninstall()`.

    Raises:
        JaggError: unknown trainer, bad setting, or upstream functions that aren't as expected.
        SystemExit: the same, with a parser: a script at start-up should end with the message alone.
    """
    if parser is None:
        settings = config or JaggConfig.from_env()
        handle = Handle(namespace, find_trainer(namespace))
        handle._activate(settings)
        return handle

    try:
        handle = Handle(namespace, find_trainer(namespace))
    except JaggError as error:
        raise SystemExit(f"jagg_patch: {error}") from None
    try:
        add_flags(parser)
    except argparse.ArgumentError as error:
        handle.uninstall()
        raise SystemExit(f"jagg_patch: the trainer has a flag of that name already: {error}") from None
    handle._parser = parser
    parse_known_args = parser.parse_known_args

    @functools.wraps(parse_known_args)
    def parse_and_activate(*args, **kwargs):
        parsed, rest = parse_known_args(*args, **kwargs)
        try:
            settings = (config or JaggConfig.from_env()).with_flags(parsed)
            for name, value in settings.as_dict().items():
                setattr(parsed, FLAG_PREFIX + name, value)
            if handle.config is None:
                handle._activate(settings)
                handle._announce(parsed)
            elif settings != handle.config:
                raise JaggError(f"the parser ran twice, with {handle.config} and {settings}\ngive both the same JAGG settings")
        except JaggError as error:
            if handle.config is None:
                handle.uninstall()
            raise SystemExit(f"jagg_patch: {error}") from None
        return parsed, rest

    parser.parse_known_args = parse_and_activate
    return handle
