"""What compiling a model came to, as numbers and as a few lines of text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from flopwise.kit.graph.buckets import suggest_buckets
from flopwise.kit.graph.events import GraphBreak, Recompile


@dataclass(frozen=True)
class CompileReport:
    """What became of a compilation so far."""

    modules: int  # compiled: 1 in place, or the number of regions
    shared: int  # pieces of code that they share
    cured: tuple[str, ...]  # modules on which module.compile() had had no effect
    frames: int  # frames that Dynamo compiled for them
    breaks: tuple[GraphBreak, ...]
    recompiles: tuple[Recompile, ...]
    compile_s: float  # by torch's own account, forward and backward
    eager_s: float | None  # forward and backward of one call; None: not measured
    compiled_s: float | None
    break_even_steps: int | None  # None: never, or not measured
    evaluation_frames: int
    limits: int  # how often Dynamo's limit of recompiles was met, after which it runs eagerly
    sizes: tuple[
        tuple[int, dict[int, int]], ...
    ]  # dimension -> how often each size of the inputs came
    cudagraph_skips: (
        int  # compiled regions that torch's own CUDA graphs (reduce-overhead) passed over
    )
    reason: str | None  # why the model runs eagerly; None while it is compiled
    evaluation_reason: str | None = None  # why it does so in evaluation only

    def __str__(self) -> str:
        lines = [self._verdict()]
        lines += [
            f"module.compile() had had no effect on {name or 'the model'}" for name in self.cured
        ]
        lines += [f"graph break at {b}" for b in self.breaks]
        lines += [f"recompiled for {r}" for r in self.recompiles]
        if self.evaluation_reason is not None:
            lines.append(f"eager in evaluation: {self.evaluation_reason}")
        if self.limits:
            lines.append(
                f"the limit of recompiles was met {self.limits} times: now running eager there"
            )
        if any(r.of_shape for r in self.recompiles):
            lines += [self._bucket_line(dim, counts) for dim, counts in self.sizes]
        if self.cudagraph_skips:
            lines.append(f"torch's CUDA graphs passed over {self.cudagraph_skips} compiled regions")
        return "\n".join(lines)

    def _verdict(self) -> str:
        if self.reason is not None:
            return f"eager: {self.reason}"
        text = f"compiled: {self.modules} modules, {self.frames} frames, {self.compile_s:.1f} s"
        if self.eager_s is None or self.compiled_s is None:
            return text
        text += f"; {self.eager_s * 1e3:.3g} ms eager, {self.compiled_s * 1e3:.3g} ms compiled"
        return (
            f"{text}, paid back after {self.break_even_steps} steps"
            if self.break_even_steps
            else text
        )

    @staticmethod
    def _bucket_line(dim: int, counts: dict[int, int]) -> str:
        chosen = suggest_buckets(counts)
        return f"{len(counts)} sizes of dimension {dim}: padded to {', '.join(map(str, chosen))}, at most a tenth would be padding"


def varying(seen: Counter[tuple[tuple[int, ...], ...]]) -> tuple[tuple[int, dict[int, int]], ...]:
    """Returns the dimensions whose sizes varied over the calls, with how often each size came."""
    by_place: dict[tuple[int, int], Counter[int]] = {}
    for shapes, times in seen.items():
        for i, shape in enumerate(shapes):
            for dim, n in enumerate(shape):
                by_place.setdefault((i, dim), Counter())[n] += times
    found: dict[int, dict[int, int]] = {}
    for (_, dim), counts in by_place.items():
        if len(counts) > 1 and len(counts) > len(found.get(dim, {})) and min(counts) > 0:
            found[dim] = dict(counts)
    return tuple(found.items())
