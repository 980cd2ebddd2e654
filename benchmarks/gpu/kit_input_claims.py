"""What the input kit claims, held against a run's figures."""

from __future__ import annotations

from typing import Any

#: A step is at most so many times the one on data that is there already, where the workers' supply suffices.
MOST_RATIO = 1.02
#: Supply suffices where workers alone fill so many batches in the time of a step.
ENOUGH_SUPPLY = 1.1
#: Least share of a bare copy's bandwidth.
LEAST_BANDWIDTH = 0.95
#: Workers decode at most so many times what one alone decodes, times their number: above, batches that were queued were timed.
MOST_OF_WORKERS = 1.2


def broken_claims(figures: dict[str, Any], sizes_are_real: bool) -> list[str]:
    """Returns a line for each claim that the figures do not bear out; of times only where sizes are real ones."""
    found = []
    if "summary" in figures.get("correctness", {}):
        found += _correctness(figures["correctness"]["summary"])
    if sizes_are_real:
        for size, summary in figures.get("link", {}).get("summary", {}).items():
            found += _link(size, summary)
        if "summary" in figures.get("images", {}):
            found += _images(figures["images"]["summary"])
        if "summary" in figures.get("jpeg", {}):
            found += _jpeg(figures["jpeg"]["summary"])
    return found


def _correctness(summary: dict[str, Any]) -> list[str]:
    found = []
    if summary["wrong"] or summary["findings"]:
        found.append(
            f"correctness: {summary['wrong']} wrong batches, {summary['findings']} findings"
        )
    if not summary["complete"]:
        found.append("correctness: some path had no time for its part of the batches")
    for name, count in summary["broken"].items():
        if (count > 0) == name.startswith("not "):
            found.append(f"correctness: {count} findings where a fence was {name}")
    return found


def _link(size: str, summary: dict[str, Any]) -> list[str]:
    found = []
    if summary["supply_per_step"] >= ENOUGH_SUPPLY and summary["ours_to_synthetic"] > MOST_RATIO:
        found.append(
            f"link, {size}: the step takes {summary['ours_to_synthetic']:.3f} times the synthetic one"
        )
    if summary["bandwidth_ratio"] < LEAST_BANDWIDTH:
        found.append(f"link, {size}: {summary['bandwidth_ratio']:.3f} of a bare copy's bandwidth")
    copies = summary["host_copies_per_byte"]
    ordinary = copies.get("loader with pin_memory")
    if ordinary is not None and copies["ours"] > ordinary - 0.9:
        found.append(
            f"link, {size}: {copies['ours']:.2f} host copies a byte against {ordinary:.2f}"
        )
    return found


def _images(summary: dict[str, Any]) -> list[str]:
    ratio = summary["ratio_to_synthetic"]["ours"]
    if summary["supply_to_need"] >= ENOUGH_SUPPLY and ratio > MOST_RATIO:
        return [f"images: the step takes {ratio:.3f} times the synthetic one"]
    return []


def _jpeg(summary: dict[str, Any]) -> list[str]:
    found, most = [], summary["workers_can_images_per_s"] * MOST_OF_WORKERS
    for what in ("alone_images_per_s", "with_step_images_per_s"):
        rate = summary[what]["decoded on the workers"]
        if rate > most:
            found.append(
                f"jpeg: {rate:,.0f} images a second where workers can decode {most:,.0f} at most: not what workers decode"
            )
    return found
