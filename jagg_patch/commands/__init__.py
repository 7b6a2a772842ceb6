"""What `python -m jagg_patch` offers, a module a command: each has `add_arguments(parser)` and `run(args)`."""
