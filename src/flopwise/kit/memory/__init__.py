"""Memory: where it goes, what the allocator makes of it, and tensors whose layout costs time."""
