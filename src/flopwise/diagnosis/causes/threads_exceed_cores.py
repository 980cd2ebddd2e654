"""D104 threads-exceed-cores: ranks, workers and their thread pools together want more cores than there are."""

from __future__ import annotations

from flopwise.diagnosis.evidence import MEASURED, Evidence
from flopwise.records.finding import Finding
from flopwise.records.surroundings import Threads

#: Runnable threads a core, on average, from which on they hinder each other.
LEAST_RATIO = 1.1
#: Of the runnable time that waited for a core.
LEAST_WAITING_FRAC = 0.2


def find(evidence: Evidence) -> list[Finding]:
    """Returns a finding where this job's own threads exceed its cores; others' load on the machine is none."""
    seen = [
        r.surroundings.threads
        for r in evidence.ranks_here
        if r.surroundings is not None and r.surroundings.threads is not None
    ]
    if not seen:
        return []
    cores, ranks = evidence.cores, len(evidence.ranks_here)
    runnable, waiting = sum(t.runnable for t in seen), sum(t.waiting for t in seen)
    lead = max(seen, key=lambda t: t.runnable)
    several = lead.busy_worker > 1 or ranks * lead.workers > cores or ranks * lead.busy_main > cores
    crowded = runnable > LEAST_RATIO * cores and waiting > LEAST_WAITING_FRAC * runnable
    if not (several and crowded):
        return []
    return [
        Finding(
            code="D104",
            cause="threads-exceed-cores",
            share_frac=None,
            where=[],
            evidence=f"on average {runnable:.1f} threads of this job want a core, it has {cores}, and {waiting:.1f} of "
            f"them wait: {_product(ranks, lead)}. {_pools(lead)}",
            advice=_advice(ranks, lead, cores),
            predicted_gain_frac=None,
            certainty=MEASURED,
        )
    ]


def _product(ranks: int, threads: Threads) -> str:
    own = f"{ranks} rank{'s' if ranks > 1 else ''} x {_threads(max(1, threads.busy_main))}"
    if not threads.workers:
        return own
    workers = f"{threads.workers} worker{'s' if threads.workers > 1 else ''}"
    return f"{own} + {ranks} x {workers} x up to {_threads(threads.busy_worker)}"


def _threads(n: int) -> str:
    return f"{n} busy thread{'' if n == 1 else 's'}"


def _pools(threads: Threads) -> str:
    if not threads.libraries:
        return "No library with a thread pool was recognised"
    capped = ", ".join(f"{name}={value}" for name, value in threads.variables.items())
    return (
        f"Loaded with thread pools: {', '.join(threads.libraries)}; "
        f"{f'set: {capped}' if capped else 'no variable caps them'}"
    )


def _advice(ranks: int, threads: Threads, cores: int) -> str:
    cap = max(1, cores // max(1, ranks * max(1, threads.workers)))
    if threads.busy_worker > 1:
        return (
            f"at most {cap} thread{'s' if cap > 1 else ''} a worker, so that ranks x workers x threads <= cores: "
            f"OMP_NUM_THREADS, OPENBLAS_NUM_THREADS, MKL_NUM_THREADS={cap}, or the library's own call "
            f"(torch.set_num_threads, cv2.setNumThreads) in worker_init_fn"
        )
    if ranks * threads.workers > cores:
        return f"at most {max(1, cores // ranks)} workers a rank"
    return f"OMP_NUM_THREADS={max(1, cores // ranks)} for each rank"
