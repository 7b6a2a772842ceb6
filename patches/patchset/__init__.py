"""The program behind apply.sh: puts JAGG's hooks into a checkout, looks at them, takes them out, and makes the patches anew.

The standard library and git alone. Each action is the module of its name; `cli` says in which order they meet the checkouts.
"""
