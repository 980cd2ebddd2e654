"""Dense linear algebra and Fourier transforms, by their nominal operation counts.

Source: LAPACK Working Note 41 (Blackford & Dongarra), appendix C, leading terms; FFTW's convention of
5 n log2 n for a complex transform of length n and half of it for a real one (fftw.org/speed, "mflops").
Eigenvalues, singular values, least squares and matrix exponentials iterate: they have no count, and no formula here.
"""

from __future__ import annotations

import math

from flopwise.flops.call import Call, Cost, Operand


def cholesky(call: Call) -> Cost:
    """Returns n^3 / 3 for each matrix."""
    matrix = call.tensor("self", "A")
    return Cost.exactly(_matrices(matrix) * matrix.shape[-1] ** 3 // 3)


def inverse(call: Call) -> Cost:
    """Returns 2 n^3 for each matrix: its factors, the inverse of one, and the product."""
    matrix = call.tensor("self", "A")
    return Cost.exactly(_matrices(matrix) * 2 * matrix.shape[-1] ** 3)


def inverse_factored(call: Call) -> Cost:
    """Returns the inverse from a Cholesky factor, 2 n^3 / 3 for each matrix."""
    matrix = call.tensor("self")
    return Cost.exactly(_matrices(matrix) * 2 * matrix.shape[-1] ** 3 // 3)


def factor(call: Call) -> Cost:
    """Returns the LU factors of an m by n matrix, with the smaller k: m n k - (m + n) k^2 / 2 + k^3 / 3, twice."""
    matrix = call.tensor("self", "A")
    m, n = matrix.shape[-2:]
    k = min(m, n)
    return Cost.exactly(_matrices(matrix) * (6 * m * n * k - 3 * (m + n) * k**2 + 2 * k**3) // 3)


def solve(call: Call) -> Cost:
    """Returns a solution from scratch, 2 n^3 / 3 for the factors and 2 n^2 for each right-hand side."""
    matrix = call.tensor("self", "A")
    n, rows = matrix.shape[-1], call.out().numel
    return Cost.exactly(_matrices(matrix) * 2 * n**3 // 3 + 2 * n * rows)


def solve_factored(call: Call) -> Cost:
    """Returns a solution from LU or Cholesky factors, 2 n^2 for each right-hand side."""
    matrix = call.tensor("LU", "input2", "A")
    return Cost.exactly(2 * matrix.shape[-1] * call.out().numel)


def solve_triangular(call: Call) -> Cost:
    """Returns a solution of a triangular system, n^2 for each right-hand side."""
    matrix = (
        call.tensor("A", "self") if call.name.endswith("triangular_solve") else call.tensor("self")
    )
    return Cost.exactly(matrix.shape[-1] * call.out().numel)


def qr(call: Call) -> Cost:
    """Returns the QR factors of an m by n matrix: 2 k^2 (max(m, n) - k / 3) for R, as much again for Q."""
    matrix = call.tensor("A", "self", "input")
    m, n = matrix.shape[-2:]
    k = min(m, n)
    one = 2 * k**2 * (3 * max(m, n) - k) // 3
    only_one = call.name.endswith(("geqrf", "householder_product")) or call.args.get("mode") == "r"
    return Cost.exactly(_matrices(matrix) * one * (1 if only_one else 2))


def fft(call: Call) -> Cost:
    """Returns 5 n log2 n for each transform of length n (the product of the transformed sizes), half if real."""
    real = not call.name.endswith("_fft_c2c")
    signal = call.out() if call.name.endswith("_fft_c2r") else call.tensor("self")
    axes = call.args.get("dim")
    if not isinstance(axes, tuple) or not signal.numel:
        raise LookupError(f"{call.name}: transformed dimensions not known")
    length = math.prod(signal.shape[int(axis)] for axis in axes)
    flops = 5 * signal.numel * math.log2(max(length, 1)) * (0.5 if real else 1.0)
    return Cost.exactly(round(flops))


def _matrices(matrix: Operand) -> int:
    return math.prod(matrix.shape[:-2])
