"""The one exception that this package raises on purpose."""


class JaggError(RuntimeError):
    """Training can't go on correctly: the message says what happened, where, and what to do."""


def no_probe(why):
    """The `JaggError` to raise where a probe is asked for, and the engine allows none."""
    return JaggError(f"the probe can't run: {why}\nunset JAGG_PROBE_EVERY, or probe a run of the same model without that")
