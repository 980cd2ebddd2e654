#!/bin/sh
# Everything about the ledger that is measured on an H200, in parts of under 9.5 minutes each.
#
#   OUT=results sh benchmarks/gpu/ledger_all.sh lines   each line against a known fault
#   OUT=results sh benchmarks/gpu/ledger_all.sh table   ledgers of well-known jobs
#   OUT=results sh benchmarks/gpu/ledger_all.sh gains   predicted gains against savings
#   OUT=results sh benchmarks/gpu/ledger_all.sh residue what the profiled windows leave
#
# PYTHON names the interpreter (default python3), LANES how many GPUs work side by side (default 1), LIMIT the seconds
# for the part (default 540), ONLY some of its names, with commas. The exit code is that of the part.
set -u
part=${1:?usage: ledger_all.sh lines|table|gains|residue}
cd "$(dirname "$0")/../.." || exit 1
python=${PYTHON:-python3}
OUT=${OUT:-benchmarks/results/ledger}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$OUT"
limit=${LIMIT:-540}
lanes=${LANES:-1}
only=${ONLY:+--only $ONLY}

case $part in
lines)
    # shellcheck disable=SC2086
    exec "$python" benchmarks/ledger_lines.py --lanes "$lanes" --budget "$limit" $only \
        --out "$OUT/ledger_lines.json"
    ;;
table | gains)
    prewarm=
    [ "$part" = table ] && prewarm=--prewarm
    # shellcheck disable=SC2086
    exec "$python" benchmarks/ledger_jobs.py --part "$part" $prewarm --lanes "$lanes" \
        --budget "$limit" $only --out "$OUT/ledger_$part.json"
    ;;
residue)
    # shellcheck disable=SC2086
    exec timeout -k 5 "$limit" "$python" benchmarks/profile_residue.py $only --lanes "$lanes" \
        --out "$OUT/profile_residue.json"
    ;;
*)
    echo "ledger_all.sh: no part $part; there are lines, table, gains and residue" >&2
    exit 2
    ;;
esac
