"""The one exception that this package raises on purpose."""


class JaggError(RuntimeError):
    """Training can't go on correctly: the message says what happened, where, and what to do."""
