"""As qwenimage.py, with an image to edit."""

from functools import partial

from . import qwenimage

ARGS = qwenimage.ARGS
build = partial(qwenimage.build, edit=True)
