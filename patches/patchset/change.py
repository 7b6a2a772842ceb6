"""All or nothing: what may change in a checkout is kept first, and put back unless the change is finished."""

import fcntl
import os
import shutil
import signal
import tempfile
from contextlib import contextmanager
from pathlib import Path

from . import git, module
from .checkout import give
from .errors import Refused

SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


@contextmanager
def alone(directory):
    """Refuse if another apply.sh changes this checkout. On a file system without locks, go on."""
    lock = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"{directory}: another apply.sh is at work there", "let it end, then try again") from None
        except OSError:
            pass
        yield
    finally:
        os.close(lock)


def replace(path, text):
    """As a new file, with the mode and owner of the old one."""
    old = path.stat()
    descriptor, new = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)  # a name that no file of the user's has
    new = Path(new)
    try:
        with open(descriptor, "wb") as file:
            file.write(text)
        give(new, old, old.st_mode)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


class Change:
    """What is done `with` it to those `trainers`, the module and the exclude file of a checkout, and if `commits` to its HEAD.

    A signal waits until git has ended, and then for all to be put back.
    """

    def __init__(self, checkout, trainers, commits):
        self._checkout, self._trainers, self._commits = checkout, trainers, commits
        self._new, self._old = (module.beside(checkout, age) for age in ("new", "old"))
        self._received = []

    def __enter__(self):
        for path in (self._new, self._old):
            if path.is_dir():  # of a run that was killed
                shutil.rmtree(path)
        checkout = self._checkout
        paths = [*map(checkout.path, self._trainers), *([checkout.exclude] if checkout.exclude else [])]
        self._kept = {path: (path.read_bytes(), path.stat()) for path in paths if path.is_file()}
        self._head = self._read_head() if self._commits else None
        self._had_module = os.path.lexists(checkout.module)
        self._handlers = {number: signal.getsignal(number) for number in SIGNALS}
        for number, handler in self._handlers.items():
            if handler == signal.SIG_DFL:
                signal.signal(number, lambda number, frame: self._received.append(number))
        return self

    def __exit__(self, kind, error, traceback):
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        try:
            if kind is not None or self._received:
                self._put_back()
            elif self._old.is_dir():
                shutil.rmtree(self._old)
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        for number in self._received:
            os.kill(os.getpid(), number)

    def keep_modes(self, trainers):
        """git gives a file its default mode, and whoever runs it."""
        for path in map(self._checkout.path, trainers):
            status = self._kept[path][1]
            give(path, status, status.st_mode)

    def _read_head(self):
        return git.output(self._checkout.directory, "rev-parse", "HEAD")

    def _put_back(self):
        checkout = self._checkout
        for path, (text, status) in self._kept.items():
            if not path.is_file() or path.read_bytes() != text:
                path.write_bytes(text)
                give(path, status, status.st_mode)
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        if checkout.exclude and checkout.exclude not in self._kept and checkout.exclude.is_file():
            checkout.exclude.unlink()
        shutil.rmtree(self._new, ignore_errors=True)
        if self._old.is_dir() or not self._had_module:
            shutil.rmtree(checkout.module, ignore_errors=True)
        if self._old.is_dir():
            self._old.rename(checkout.module)
        if self._head and (checkout.git_path("rebase-apply").is_dir() or self._read_head() != self._head):
            self._put_head_back()

    def _put_head_back(self):
        """Not by git am --abort: it wants a clean tree, and objects that a partial clone may lack."""
        directory = self._checkout.directory
        git.run(directory, "am", "--quit")
        git.passes_on(directory, "update-ref", "HEAD", self._head.strip())
        for trainer in self._trainers:
            git.run(directory, "reset", "--quiet", "--", self._checkout.file(trainer))
