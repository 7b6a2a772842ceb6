#!/usr/bin/env bash
# Print the path of a Python that has the named extras of setup.cfg; make the environment and install them where needed.
# usage: tests/venv.sh EXTRA...        PYTHON names the interpreter (default python3), TESTS_VENV the folder (default .venv)
set -euo pipefail
export LC_ALL=C # one sort order for comm
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$top/${TESTS_VENV:-.venv}
python=${PYTHON:-python3}

command -v "$python" >/dev/null || { echo "venv.sh: $python not found; install Python 3.10 or later, or set PYTHON" >&2; exit 1; }
requirements=$("$python" - "$top/setup.cfg" "$@" <<'PY'
import configparser, sys
if sys.version_info < (3, 10):
    sys.exit("venv.sh: Python 3.10 or later is needed, this is " + sys.version.split()[0] + "; set PYTHON")
parser = configparser.ConfigParser()
parser.read(sys.argv[1])
lines = "\n".join(parser["options.extras_require"][extra] for extra in sys.argv[2:]).splitlines()
print("\n".join(sorted({line for line in lines if line})))
PY
)
stamp=$venv/installed-requirements
if [ ! -f "$stamp" ] || [ -n "$(comm -13 "$stamp" <(echo "$requirements" | sort))" ]; then
  echo "setting up $venv for: $* (downloads PyTorch the first time)" >&2
  # Not whether it is there: one whose making was interrupted has no pip.
  "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$venv" >&2
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --requirement <(echo "$requirements") >&2
  { cat "$stamp" 2>/dev/null || true; echo "$requirements"; } | sort -u >"$stamp.new"
  mv "$stamp.new" "$stamp"
fi
echo "$venv/bin/python"
