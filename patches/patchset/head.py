"""What a checkout has committed: all that the patches are made from."""

import re

from . import git
from .contracts import CONTRACTS, modules
from .errors import Refused
from .hooks import HOOK


class Head:
    """The last commit of a checkout. Refused unless it can be one of upstream's own."""

    def __init__(self, checkout):
        self._checkout = checkout
        self.commit = (git.output(checkout.directory, "rev-parse", "HEAD") or "").strip()
        if not self.commit:
            raise Refused("there is no commit to compare with", "it has to be a git clone")
        if checkout.prefix:
            raise Refused("it is a folder in another repository, whose commit isn't upstream's", "use a git clone of upstream")

    def read(self, file):
        """The text of a file, or None."""
        return git.output(self._checkout.directory, "show", f"HEAD:./{file}")

    def trainer(self, trainer):
        """The text of a trainer, or None if it isn't there."""
        file = self._checkout.file(trainer)
        text = self.read(file)
        if text is not None and HOOK.decode() in text:
            raise Refused(
                f"{file}: the commit has JAGG's hook already", "check out the commit of upstream's own that it is on"
            )
        return text

    def find(self, module):
        """The text of a module that a trainer imports, or None."""
        return modules(self.read, self._checkout.upstream.pin("module").rpartition("/")[0])(module)

    def is_of(self, url):
        """Whether a branch that the clone has fetched from there has it."""
        directory, found = self._checkout.directory, []
        remotes = git.output(directory, "config", "--get-regexp", "-z", r"^remote\..*\.url$") or ""
        for key, _, value in (entry.partition("\n") for entry in remotes.split("\0")):
            if _place(value) == _place(url):
                name = key.removeprefix("remote.").removesuffix(".url")
                found.append(git.output(directory, "for-each-ref", "--contains", "HEAD", f"refs/remotes/{name}/"))
        return any(found)


def _place(url):
    """What is the same however a URL is written: by https or ssh, with a user or without, with .git or without."""
    place = re.sub(r"^(\w+://)?([^/@]*@)?", "", url).replace(":", "/")
    return place.rstrip("/").removesuffix(".git").lower()


def contract_of(trainer, file):
    """The trainer's contract."""
    if trainer not in CONTRACTS:
        raise Refused(f"{file}: {trainer} is not in CONTRACTS", "jagg_patch/contract has to say what is relied on")
    return CONTRACTS[trainer]
