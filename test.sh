#!/usr/bin/env bash
# Set everything up, then run the fast test tier. Arguments go to pytest: bash test.sh tests/sde -k kernel
set -euo pipefail
# Let .venv keep its compiled bytecode: without it every start compiles torch and diffusers again, 4 s on two cores.
unset PYTHONDONTWRITEBYTECODE
cd "$(dirname "${BASH_SOURCE[0]}")"
bash scripts/bootstrap.sh
# The models of the tests are tiny, and many run in several processes: threads would only wait for each other.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/python -m pytest "$@"
