"""The command line, and in which order the actions meet the checkouts."""

import importlib
import os
import signal
import sys
from contextlib import contextmanager, nullcontext

from . import demo, git
from .change import alone
from .checkout import Checkout, require_own_trainers
from .clone import clone_if_default, default_places
from .errors import BadUsage, Refused
from .upstreams import all_trainers, upstreams_in

USAGE = """\
usage: ./apply.sh [ACTION] [--commit] [--only TRAINER] [DIR]

DIR is a DanceGRPO or Flow-GRPO checkout or unpacked tarball; its files tell which. Without DIR: of upstream/DanceGRPO and
upstream/flow_grpo those that are there, or with --only those of the named trainers. Applying clones at the pinned commit what
is named in either way but absent, and upstream/DanceGRPO if nothing is named and neither is there.

  (no action)       apply the patches and put the module beside the trainers; applying again updates both
  --check           say what applying would do to each trainer; change nothing
  --status          say what is applied, and whether the module is this version
  --refresh         make patches, lock and pin anew from what DIR has committed, and show what changes (patches/README.md)
  --export          make the patches anew from the hooks as you have edited them in DIR
  --reverse         take everything out again
  --demo [OUT]      train a tiny model with JAGG off and on, and compare; files go to OUT (default demo-output)
  --help            this text

  --commit          apply or reverse as git commits, so that git rebase carries them to a later upstream
  --only TRAINER    one trainer, e.g. train_grpo_flux; may be repeated. Without it, all that the checkout has

exit status: 0 done, or already done; 1 refused, with the file and the reason, and nothing changed; 2 bad usage
"""
CHANGING = ("apply", "reverse")  # a checkout
ACTIONS = ("--check", "--status", "--reverse", "--demo", "--refresh", "--export")


class Options:
    """What the command line asks for."""

    def __init__(self):
        self.action, self.commit, self.only = "apply", False, []
        self.place = None  # DIR, or OUT


def parse(arguments):
    """`Options`, or None where --help is asked for."""
    options, places, left = Options(), [], iter(arguments)
    for argument in left:
        if argument in ACTIONS:
            if options.action not in ("apply", argument[2:]):
                raise BadUsage(f"{argument} and --{options.action} exclude each other")
            options.action = argument[2:]
        elif argument == "--commit":
            options.commit = True
        elif argument == "--only":
            options.only.append(_trainer(next(left, None)))
        elif argument in ("--help", "-h"):
            return None
        elif argument.startswith("-"):
            raise BadUsage(f"unknown option {argument}")
        elif not argument:
            raise BadUsage("the directory's name is empty")
        else:
            places.append(argument)
    if len(places) > 1:
        raise BadUsage(f"one directory at most, got {len(places)}")
    if options.commit and options.action not in CHANGING:
        raise BadUsage("--commit goes with applying and --reverse")
    options.place = places[0] if places else None
    return options


def _trainer(name):
    if name is None:
        raise BadUsage("--only needs a trainer")
    if name not in all_trainers():
        raise BadUsage(f"--only {name}: there is no patch of that name; there are {' '.join(all_trainers())}")
    return name


def run(options):
    """Do what is asked for."""
    git.prepare()
    if options.action == "demo":
        if options.only:
            raise BadUsage("--only doesn't go with --demo")
        demo.run(options.place)
    action, places = importlib.import_module(f".{options.action}", __package__), _places(options)
    if options.action not in CHANGING:
        _in_each(places, options, action.run)
        return
    for place in places:
        if options.action == "apply" and not os.path.exists(place):
            clone_if_default(place, options.only if len(places) == 1 else [])
    if len(places) > 1:
        _in_each(places, options, action.plan)  # before the first is changed
    for place in places:
        with _entered(place, places, options) as checkout:
            action.run(checkout, options)


def _places(options):
    if options.place is not None:
        return [options.place]
    if upstreams_in("."):
        script = sys.argv[0].removesuffix("patches/patchset") + "apply.sh"
        raise BadUsage(f"the current folder is a checkout: to mean it, name it ({script} … .)")
    return default_places(options.only)


def _in_each(places, options, action):
    """An action that changes no checkout, in every one; exit if it refuses one."""
    is_refused = False
    for place in places:
        if len(places) > 1 and options.action not in CHANGING:
            print(f"{place}:")
        try:
            with _entered(place, places, options) as checkout:
                action(checkout, options)
        except Refused as reason:
            reason.show()
            is_refused = True
    if is_refused:
        sys.exit(1)


@contextmanager
def _entered(place, places, options):
    checkout = Checkout(place, options.only)
    if len(places) == 1:
        require_own_trainers(place, checkout.upstream, options.only)
    with alone(checkout.directory) if options.action in CHANGING else nullcontext():
        yield checkout


def main(arguments):
    """For `__main__`: ends the process with the exit status that the usage names, or as what ends it does."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # as any other command ends
    sys.stdout.reconfigure(line_buffering=True)  # in one order with what git prints
    sys.stderr.reconfigure(errors=sys.stdout.errors)  # names that aren't text are printed as they are
    try:
        options = parse(arguments)
        if options is None:
            print(USAGE, end="")
        else:
            run(options)
    except Refused as reason:
        reason.show()
        sys.exit(reason.status)
    except BrokenPipeError:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)
    except OSError as error:
        what = ": ".join(str(one) for one in (error.filename, error.strerror or error) if one is not None)
        Refused(what, "make that possible, then try again").show()
        sys.exit(1)
