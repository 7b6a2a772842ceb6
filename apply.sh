#!/bin/sh
# Put JAGG into a DanceGRPO or Flow-GRPO checkout, look at it, take it out again, or run the demo: ./apply.sh --help
# The program is patches/patchset, which needs a Python from 3.10 on and nothing else; this finds one.
for python in ${PYTHON:+"$PYTHON"} python3 python python3.13 python3.12 python3.11 python3.10; do
  # The program's own path: what is found may be a wrapper that takes its time, as pyenv's.
  if found=$("$python" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 10) or print(sys.executable))' 2>/dev/null) && [ -x "$found" ]; then
    exec "$found" -I -S -B -X utf8 "$(dirname "$(readlink -f "$0")")/patches/patchset" "$@"
  fi
done
echo "apply.sh: there is no Python from 3.10 on" >&2
echo "  install one, or name it: PYTHON=/path/to/python3 $0" >&2
exit 1
