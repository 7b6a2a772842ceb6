"""What has to be so before --commit may change a checkout."""

import os

from . import git
from .errors import Refused


def require_committable(checkout, trainers):
    """Refuse unless git can commit these trainers now."""
    directory = checkout.directory
    if not git.succeeds(directory, "rev-parse", "--is-inside-work-tree"):
        raise Refused(f"{directory}: --commit needs a git checkout", "do it without --commit")
    if not git.succeeds(directory, "var", "GIT_COMMITTER_IDENT"):
        raise Refused(f"{directory}: git doesn't know who commits", "set user.name and user.email")
    if not trainers:
        return
    if any(os.path.isdir(checkout.git_path(name)) for name in ("rebase-apply", "rebase-merge")):
        raise Refused(f"{directory}: a git am or rebase is in progress", "finish or abort it, then try again")
    untracked = checkout.first_without(trainers, "ls-files", "--error-unmatch")
    if untracked:
        raise Refused(f"{checkout.path(untracked)}: not tracked by git", "do it without --commit")
    if not git.succeeds(directory, "diff", "--cached", "--quiet"):
        raise Refused(f"{directory}: the index has staged changes", "commit or unstage them, then try again")


def require_unedited(checkout, trainers):
    """Refuse unless these are as in the last commit."""
    edited = checkout.first_without(trainers, "diff", "--quiet", "HEAD", "--")
    if edited:
        raise Refused(f"{checkout.path(edited)}: has changes of yours", "commit or stash them, then try again")
