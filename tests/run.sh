#!/usr/bin/env bash
# Install what the tests need and run them. Arguments go to pytest: tests/run.sh tests/unit -k plan
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
"$python" -m pytest "$@"
