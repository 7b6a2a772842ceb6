"""`install`: settings from the trainer's parser, then the wrappers into the trainer's namespace."""

import argparse
import functools
from contextlib import contextmanager
from dataclasses import asdict

from . import __version__
from .banner import FirstUpdate, banner, describe_knot_probe, describe_probe
from .config import AUTO, FLAG_PREFIX, JaggConfig, add_flags
from .errors import JaggError
from .evidence.log import Log
from .evidence.placement import Placement
from .evidence.probe import GroupProbe, KnotProbe
from .evidence.routing import Routing
from .evidence.self_check import SelfCheck
from .evidence.stats import Recorder, Stats
from .loop.recording import Recording
from .loop.retaining import Retaining
from .loop.schedule import Schedule
from .loop.session import Session
from .loop.skipping import Skipping
from .method.cost import StepCost
from .ranks import gathered, is_first_rank, may_be_first_rank
from .trainers import find_trainer
from .trainers.last_batch import LastBatch
from .trainers.intercept import require_contract, require_parameters

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
        self._log = None
        # Until the trainer's arguments are parsed.
        self._costs = {"sampled_steps": None, "step_cost": asdict(StepCost())}
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
        if config.enabled:
            require_contract(self._namespace, self._trainer.contract, config)
            self._trainer.check(self._namespace)
            if config.retain and self._trainer.no_retaining:
                raise JaggError(f"JAGG_RETAIN: no graphs can be retained: {self._trainer.no_retaining}\nrun without JAGG_RETAIN")
            if config.log or config.probe_every:
                # Who writes is asked at each record: some trainers find out their rank inside `main`.
                self._log = Log(config.log, is_checked=may_be_first_rank())
            session = make_session(config, self.stats, say_on_rank_zero, self._record)
            self._wrap(self._trainer.wrappers(self._namespace, session))
        # What needs the process group. Off is checked too: one rank with JAGG off among ranks with it on would deadlock.
        self._wrap(self._trainer.start(self._namespace, functools.partial(require_same_on_all_ranks, config)))

    def _activate_with(self, parser, config):
        """Give `parser` the `--jagg_*` flags, and have JAGG start when it parses."""
        try:
            add_flags(parser)
        except argparse.ArgumentError as error:
            raise JaggError(f"the trainer has a flag of that name already: {error}") from None
        self._parser = parser
        parse_known_args = parser.parse_known_args

        @functools.wraps(parse_known_args)
        def parse_and_activate(*args, **kwargs):
            parsed, rest = parse_known_args(*args, **kwargs)
            with self._start_or_leave_nothing(True):
                settings = (config or JaggConfig.from_env()).with_flags(parsed)
                for name, value in settings.as_dict().items():
                    setattr(parsed, FLAG_PREFIX + name, value)
                if self.config is None:
                    self._activate(settings)
                    self._announce(parsed)
                elif settings != self.config:
                    raise JaggError(f"the parser ran twice, with {self.config} and {settings}\ngive both the same JAGG settings")
            return parsed, rest

        parser.parse_known_args = parse_and_activate

    def _activate_in_main(self, config):
        """Have `main` start JAGG: what the plan depends on is parsed by then, and not before."""
        namespace, main = self._namespace, self._namespace.get("main")

        @functools.wraps(main)
        def started_main(*args, **kwargs):
            if namespace.get(MARK) is not self:  # uninstalled, and somebody kept this function
                return main(*args, **kwargs)
            if self.config is None:
                with self._start_or_leave_nothing(is_script(namespace)):
                    settings = namespace["FLAGS"].config
                    namespace["main"] = main
                    self._activate(config or JaggConfig.from_env(**self._trainer.defaults(settings)))
                    self._announce(settings)
            return namespace["main"](*args, **kwargs)

        require_parameters(namespace, "main", ())
        self._wrap({"main": started_main})

    @contextmanager
    def _start_or_leave_nothing(self, ends_program):
        """On an error before JAGG has started, uninstall; the program then ends with the message alone, without a traceback."""
        started = self.config is not None
        try:
            yield
        except BaseException as error:
            if not started:
                self.uninstall()
            if ends_program and isinstance(error, JaggError):
                raise SystemExit(f"jagg_patch: {error}") from None
            raise

    def _record(self, record):
        """At the end of a training step."""
        if record["probe"]:
            describe = describe_knot_probe if self.config.has_knots else describe_probe
            say_on_rank_zero(describe(record))
        if self._log is not None and is_first_rank():
            run = {"jagg": __version__, "trainer": self._trainer.name, "group_size": self.config.group_size}
            run |= {name: getattr(self.config, name) for name in ("aggregation", "cuts", "knots_at")}
            self._log.write(run | self._costs | record)

    def _announce(self, args):
        if self.config.enabled:
            require_placement(self._trainer, self.config, args)
            steps, cost = self._trainer.steps(args), self._trainer.step_cost(args)
            self._costs = {"sampled_steps": steps.sampled, "step_cost": asdict(cost)}
        say_on_rank_zero(banner(self._trainer, self.config, args))


def make_session(config, stats=None, say=lambda line: None, write=lambda record: None):
    """A `Session` with everyone who watches one.

    Args:
        stats: a `Stats` to count in.
        say: called with what users should know, on every rank.
        write: called at the end of each training step with its record, a dict.
    """
    stats = Stats() if stats is None else stats
    probe = (KnotProbe if config.has_knots else GroupProbe)(config, stats, say)
    planner = (Placement if config.has_knots else Routing)(config, say, probe)
    check = SelfCheck(config, say)
    recorder = Recorder(stats, (probe, check), write, waits=bool(config.log or config.probe_every))
    # In this order: who changes an update's plan, what counts, who reads the counts, what measures, who writes that down, who
    # changes the next plan by it.
    watchers = [LastBatch(say), stats, FirstUpdate(stats, say), check, probe, recorder, planner]
    recording = Recording(config.offload_records)
    skipping, retaining = Skipping(config, recording, say), Retaining(config, recording, say)
    return Session(config, planner, Schedule(config.schedule, say), recording, skipping, retaining, watchers)


def require_placement(trainer, config, args):
    """Raise `JaggError` where knots are to be placed, and nothing is known of the trainer's noise levels ahead."""
    why = trainer.no_placement(args)
    n_visited = trainer.steps(args).visited
    is_chosen = config.knots == AUTO or (config.knots and 2 < config.knots < n_visited)
    if why is not None and is_chosen:
        raise JaggError(
            f"JAGG_KNOTS={config.knots}: knots can't be placed: {why}\n"
            f"name those of the {n_visited} visited steps that are to be knots: JAGG_KNOTS_AT=0,…,{n_visited - 1}"
        )


def is_script(namespace):
    return namespace.get("__name__") == "__main__"


def say_on_rank_zero(text):
    if is_first_rank():
        print(text, flush=True)


def require_same_on_all_ranks(config):
    """Raise `JaggError` on every rank unless all ranks of the default process group have the same version and settings."""
    mine = {"version": __version__} | config.as_dict()
    del mine["log"]  # the first rank's alone
    settings = gathered(mine)
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
            settings are then attributes of the parsed arguments. Without it JAGG starts now, or, in a trainer whose loop is
            inside `main`, when `main` is called.
        config: a `JaggConfig` in place of the `JAGG_*` environment. Flags beat it.

    Returns:
        A `Handle` with `.stats` and `.uninstall()`.

    Raises:
        JaggError: unknown trainer, bad setting, or upstream functions that aren't as expected.
        SystemExit: the same, with a parser or in a script: at start-up that should end with the message alone.
    """
    handle = None
    try:
        trainer = find_trainer(namespace)
        handle = Handle(namespace, trainer)
        if trainer.in_main:
            handle._activate_in_main(config)
        elif parser is not None:
            handle._activate_with(parser, config)
        else:
            handle._activate(config or JaggConfig.from_env())
    except BaseException as error:
        if handle is not None:
            handle.uninstall()
        if isinstance(error, JaggError) and (parser is not None or is_script(namespace)):
            raise SystemExit(f"jagg_patch: {error}") from None
        raise
    return handle
