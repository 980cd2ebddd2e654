"""Six N beside the count."""

from __future__ import annotations

from flopwise.flops.estimate import against_count, six_n


def test_untied_embedding_is_why_six_n_is_too_much() -> None:
    vocab, width, tokens = 50257, 64, 32
    parameters = 2 * vocab * width  # a table and a head
    counted = 3 * 2 * vocab * width * tokens
    assert counted == 3 * 205_852_672
    assert six_n(parameters, tokens) == 2 * counted
    assert against_count(counted, parameters, vocab * width, tokens) == (
        "6 N D = 1.24 GFLOP for 6.43 M parameters, counted 617.6 MFLOP; "
        "3.22 M of them are only looked up: without them 6 N D = 617.6 MFLOP"
    )


def test_tied_embedding_is_multiplied_and_attention_comes_on_top() -> None:
    n, tokens, core = 123_532_032, 1024, 12 * 12 * 768 * 1024 * 1024
    counted = 6 * n * tokens + core
    text = against_count(counted, n + 786_432, 786_432, tokens)
    assert "786.4 k of them are only looked up" in text
    assert text.endswith("the other 116 GFLOP are attention scores and what else has no weights")


def test_frozen_weights_make_it_less() -> None:
    text = against_count(9_699_328, 65_536 + 4096, 0, 64)
    assert "FLOP less, as not every weight is trained" in text
