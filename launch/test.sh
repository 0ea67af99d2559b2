#!/usr/bin/env bash
# Runs all tests on the CPU. Arguments go to pytest:  bash launch/test.sh tests/test_stages.py -k tied
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec python -m pytest "${@:-tests}"
