"""Shapes are told with what would make them fewer."""

from __future__ import annotations

from flopwise.kit.graph.shapes import Shape, StepReport, advice


def test_sizes_lead_to_buckets_and_numbers_to_tensors() -> None:
    sizes = [Shape(((4, n, 8), (4,)), {}, seen=2) for n in (5, 9, 15, 16)]
    assert advice(sizes) == (
        "; 4 sizes of dimension 1 were seen, and buckets=(8, 16) would make 2 of them, with 19.6 % of padding"
    )
    reads = [Shape(((4,),), {"epoch": k, "n": 1}) for k in range(3)]
    assert (
        advice(reads)
        == "; the step reads epoch, which changes from step to step: pass it as a tensor"
    )
    arguments = [Shape(((4,),), {}) for _ in range(3)]
    assert advice(arguments).startswith("; a number among the arguments changes")
    assert advice(arguments[:1]) == ""


def test_a_graph_is_forgotten_with_all_that_belongs_to_it() -> None:
    class Graph:
        resets = 0

        def replay(self) -> None: ...

        def reset(self) -> None:
            self.resets += 1

    graph = Graph()
    shape = Shape(((1,),), {}, seen=4, graph=graph, inputs=1, output=2)
    shape.forget()
    shape.forget()
    assert graph.resets == 1
    assert (shape.graph, shape.inputs, shape.output, shape.grads, shape.seen) == (
        None,
        None,
        None,
        [],
        4,
    )


def test_whole_texts() -> None:
    values = (2, 190, 12, 2, 0.5, 0, None, {((4,),): 200})
    assert str(StepReport(*values, None)) == (
        "2 graphs; 190 steps replayed, 12 eager, 2 captures in 0.5 s, 1 shapes"
    )
    assert str(StepReport(*values, "closed")).startswith("eager: closed; 190")
