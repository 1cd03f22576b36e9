#!/usr/bin/env bash
# Set everything up, then run the fast test tier in several processes. Arguments go to pytest:
#   bash test.sh tests/sde -k kernel        bash test.sh -n 0 --pdb        (-n 0: all in one process)
set -euo pipefail
# Let .venv keep its compiled bytecode: without it every start compiles torch and diffusers again, 4 s on two cores.
unset PYTHONDONTWRITEBYTECODE
cd "$(dirname "${BASH_SOURCE[0]}")"
bash scripts/bootstrap.sh
# The models of the tests are tiny, and many run in several processes: threads would only wait for each other.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# conftest.py says what stays together. Who switches xdist off gets none of its options.
shared=(-n auto --dist loadfile --no-loadscope-reorder --max-worker-restart=0)
case " $* " in *" -p no:xdist "* | *" -pno:xdist "*) shared=() ;; esac
exec .venv/bin/python -m pytest ${shared[@]+"${shared[@]}"} "$@"
