#!/usr/bin/env bash
# Install what the tests need and run them.
# usage: tests/run.sh                 all of them, in two processes, file by file
#        tests/run.sh --quick [...]   while editing: tests/unit without test_apply.py, test_refresh.py and test_skip.py, its
#                                     slowest; so nothing that starts torchrun, no engine and no mini trainer
#        tests/run.sh ARGUMENTS...    for pytest: tests/run.sh tests/unit -k plan; those that name a file run in one process
# The tests under tests/upstream also need checkouts: upstream/DanceGRPO and upstream/flow_grpo, or DANCEGRPO_DIR and FLOW_GRPO_DIR.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras=(demo test)
if [ -n "${DANCEGRPO_DIR:-}${FLOW_GRPO_DIR:-}" ] || [ -d upstream/DanceGRPO ] || [ -d upstream/flow_grpo ]; then
  extras+=(upstream-test)
fi
python=$(tests/venv.sh "${extras[@]}")
bin=$(dirname "$python")

"$bin/flake8" jagg_patch patches/patchset upstream/*.py upstream/mini tests
"$bin/shellcheck" apply.sh tests/*.sh .ci/run upstream/mini/scripts/finetune/*.sh

arguments=(-n 2 --dist loadfile --no-loadscope-reorder)
case " $* " in
  *.py[\ :]*) arguments=(-n 0) ;;
esac
if [ "${1:-}" = --quick ]; then
  shift
  arguments+=(tests/unit)
  for name in apply refresh skip; do
    arguments+=("--ignore=tests/unit/test_$name.py")
  done
fi
exec "$python" -m pytest "${arguments[@]}" "$@"
