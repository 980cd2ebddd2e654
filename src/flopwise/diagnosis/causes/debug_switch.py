"""D301 debug-switch: a switch for debugging was left on. D302 deterministic-algorithms: a choice that costs."""

from __future__ import annotations

from flopwise.diagnosis.evidence import SEEN, Evidence
from flopwise.records.finding import Finding
from flopwise.records.surroundings import Switch

_EFFECT = {
    "autograd anomaly detection": "every forward op keeps its stack and every gradient is searched for NaN",
    "blocking kernel launches": "the host waits for every kernel",
    "no caching of device memory": "every allocation asks the driver, and every free waits",
    "a profiler": "every op is recorded",
    "CUDA sync debug mode": "every wait for the device is reported",
}
_RESULTS = {"autograd anomaly detection": "; results do not change where nothing is NaN"}


def find(evidence: Evidence) -> list[Finding]:
    """Returns a finding for every switch; its factor was not measured, so none is given."""
    facts = evidence.surroundings
    return [_finding(switch, evidence) for switch in facts.switches] if facts else []


def _finding(switch: Switch, evidence: Evidence) -> Finding:
    setting = switch.setting
    called = setting.endswith(")")
    variable = "" if called else setting.partition("=")[0]
    idle = " (no effect on a CPU)" if evidence.on_cpu and "CUDA" in variable else ""
    where = [switch.where] if switch.where else []
    if variable and switch.where:
        where = [f"{variable} ({switch.where})"]
    if switch.name == "deterministic algorithms":
        return Finding(
            code="D302",
            cause="deterministic-algorithms",
            share_frac=None,
            where=where,
            evidence=f"{setting}: some ops take slower kernels; the factor was not measured",
            advice="leave it if runs must repeat to the bit; else switch it off",
            predicted_gain_frac=None,
            certainty=SEEN,
        )
    effect = _EFFECT.get(switch.name, switch.name)
    return Finding(
        code="D301",
        cause="debug-switch",
        share_frac=None,
        where=where,
        evidence=f"{switch.name} is on, {setting}{idle}: {effect}. The factor was not measured; "
        "all figures of this run were taken with it on",
        advice=f"switch it off outside of debugging, and measure again{_RESULTS.get(switch.name, '')}",
        predicted_gain_frac=None,
        certainty=SEEN,
    )
