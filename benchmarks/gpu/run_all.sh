#!/bin/sh
# Everything that is measured on an H200, in three parts of under 9.5 minutes each.
#
#   OUT=results sh benchmarks/gpu/run_all.sh part1   ceilings; GPT-2, ResNet-50, CUDA graphs
#   OUT=results sh benchmarks/gpu/run_all.sh part2   Llama, EfficientNet-B4, a loader
#   OUT=results sh benchmarks/gpu/run_all.sh part3   FLOP counts, overhead
#
# PYTHON names the interpreter (default python3). A step that fails or runs over its limit does not
# stop the next one; the exit code is the number of steps that failed.
set -u
part=${1:?usage: run_all.sh part1|part2|part3}
cd "$(dirname "$0")/../.." || exit 1
python=${PYTHON:-python3}
OUT=${OUT:-benchmarks/results/$part}
export OUT
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
work=$(mktemp -d)
mkdir -p "$OUT"
failed=0

step() { # step LIMIT_S NAME COMMAND...
    limit=$1 name=$2
    shift 2
    echo "== $name: $*"
    began=$(date +%s)
    timeout -k 5 "$limit" "$@" && code=0 || code=$?
    [ "$code" = 0 ] || failed=$((failed + 1))
    echo "== $name: exit code $code after $(($(date +%s) - began)) s"
}

truth() { # truth LIMIT_S JOBS [FLAGS]
    limit=$1 jobs=$2
    shift 2
    step "$((limit + 15))" step-truth "$python" benchmarks/gpu/step_truth.py --only "$jobs" \
        --budget "$limit" --out "$OUT/step_truth_$part.json" --work "$work/jobs" "$@"
    tar -C "$work" -czf "$OUT/jobs_$part.tar.gz" jobs
}

case $part in
part1)
    step 90 ceilings "$python" -m flopwise ceilings --json "$OUT/ceilings.json"
    truth 440 'gpt2*,cudagraph-whole,resnet50,resnet50-compiled,cudagraph-compile'
    ;;
part2)
    truth 540 'llama*,efficientnet*,resnet50-loader' --prewarm
    ;;
part3)
    if [ -f benchmarks/gpu/count_check.py ]; then
        step 100 count-check "$python" benchmarks/gpu/count_check.py
    else
        echo "== count-check: benchmarks/gpu/count_check.py is not there"
        failed=$((failed + 1))
    fi
    step 460 overhead "$python" benchmarks/overhead.py --device cuda --seconds 60,60,120 \
        --detach-seconds 120 --out "$OUT/overhead.json"
    ;;
*)
    echo "run_all.sh: no part $part; there are part1, part2 and part3" >&2
    exit 2
    ;;
esac
rm -rf "$work"
exit "$failed"
