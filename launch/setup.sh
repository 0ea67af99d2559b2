# shellcheck shell=bash
# Sourced by the other scripts: goes to the root of the repository and makes .venv there when there is none.
# Honours PYTHON (the interpreter that makes the environment) and VENV (an environment of your own, used as it is).
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
if [ -n "${VENV:-}" ]; then
  . "$VENV/bin/activate"
  return
fi
if [ ! -f .venv/complete ] || ! cmp -s requirements.txt .venv/complete; then
  echo "installing requirements.txt into .venv"
  "${PYTHON:-python3}" -m venv .venv
  # torch first: the wheels of the others then find the pinned one in place
  .venv/bin/python -m pip install --quiet --disable-pip-version-check "$(grep '^torch==' requirements.txt)"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
  cp requirements.txt .venv/complete
fi
. .venv/bin/activate
