"""L111 nchw-layout: images lie channel by channel, and convolutions convert them each time."""

from __future__ import annotations

from flopwise.diagnosis.ledger.layouts import CONVERTS, channel_by_channel
from flopwise.diagnosis.ledger.predict import Predict
from flopwise.diagnosis.ledger.scene import MEASURED, Scene
from flopwise.records.finding import Finding
from flopwise.units import percent

LEAST_FRAC = 0.01  # of the step, in conversions


def find(scene: Scene, predict: Predict) -> Finding | None:
    """Returns a finding with the time of conversions, and of other kernels above what their bytes need.

    The gain: no conversions, and of the others what they take beyond three times their floor, as in the other layout.
    """
    found = channel_by_channel(scene)
    converting_ns = sum(scene.owned_ns[k] for k in found.conversions)
    if scene.frac(converting_ns) < LEAST_FRAC:
        return None
    above_ns = sum(found.above_ns.values())
    names = [scene.job.events.name_of(int(scene.job.work.rows[k])) for k in found.conversions]
    kinds = sorted({m.group(0) for name in names if (m := CONVERTS.search(name))})
    costliest = max(found.convolutions, key=lambda call: call.ns)
    n = scene.steps
    return Finding(
        code="L111",
        cause="nchw-layout",
        share_frac=scene.frac(converting_ns + above_ns),
        where=scene.where(found.convolutions),
        evidence=f"{len(names) / n:.0f} kernels a step ({', '.join(kinds)}) convert what {len(found.convolutions) / n:.0f} convolutions read "
        f"and write: {scene.ms(converting_ns):.3g} ms, {percent(scene.frac(converting_ns))}; {len(found.others) / n:.0f} normalisations "
        f"and poolings on this layout are {scene.ms(above_ns):.3g} ms above what their bytes need; the costliest convolution: "
        f"{costliest.name} {costliest.shapes}",
        advice="model.to(memory_format=torch.channels_last), and the images: x.to(memory_format=torch.channels_last)",
        predicted_gain_frac=predict.faster(
            {**found.elsewhere, **dict.fromkeys(found.conversions, 0.0)}
        ),
        certainty=MEASURED,
    )
