#!/usr/bin/env bash
# Run the unit and engine tests in the environment that DanceGRPO publishes (torch 2.5.0): the extra `pinned` of setup.cfg, in
# .venv-torch2.5. Arguments go to pytest. Needs Python 3.10 to 3.12 (PYTHON names it); some 6 GB with torch's CUDA libraries.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$(TESTS_VENV=.venv-torch2.5 DS_BUILD_OPS=0 tests/venv.sh pinned)
"$python" -m pytest tests/unit tests/engines "$@"
