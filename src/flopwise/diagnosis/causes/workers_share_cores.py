"""D105 workers-share-cores: the loader's workers were born with fewer cores than the process began with."""

from __future__ import annotations

from flopwise.diagnosis.evidence import MEASURED, Evidence
from flopwise.records.finding import Finding
from flopwise.records.surroundings import CoreMask

#: Below this share of a step that waits for data the workers do not lack cores.
LEAST_FRAC = 0.05


def find(evidence: Evidence) -> list[Finding]:
    """Returns a finding where workers share fewer cores than there are workers, though more cores could be had."""
    facts, loader = evidence.surroundings, evidence.loader
    if facts is None or loader is None or not facts.masks or evidence.input_wait_frac < LEAST_FRAC:
        return []
    shared = {core for cores in loader.worker_cores for core in cores}
    workers, first = len(loader.worker_cores), facts.masks[0]
    shrunk = next((m for m in facts.masks[1:] if len(m.cores) < len(first.cores)), None)
    if shrunk is None and len(first.cores) > 1:
        return []  # what the launcher or the container gave it: not ours to call too few
    before = len(first.cores) if shrunk is not None else facts.machine_cores
    if not shared or len(shared) >= min(workers, before):
        return []
    return [
        Finding(
            code="D105",
            cause="workers-share-cores",
            share_frac=evidence.input_wait_frac,
            where=[shrunk.where] if shrunk is not None and shrunk.where else [],
            evidence=f"{workers} workers share {len(shared)} of {before} cores: {_change(first, shrunk)}",
            advice="give the process its cores back after the imports (os.sched_setaffinity), or unset what binds it "
            "(OMP_PROC_BIND, KMP_AFFINITY, GOMP_CPU_AFFINITY, the launcher's binding); more workers would not help",
            predicted_gain_frac=None,
            certainty=MEASURED,
        )
    ]


def _change(first: CoreMask, shrunk: CoreMask | None) -> str:
    if shrunk is None:
        return f"the process was started with {len(first.cores)}"
    return (
        f"the process began with {len(first.cores)} and was cut to {len(shrunk.cores)} ({shrunk.when}); "
        "workers inherit that"
    )
