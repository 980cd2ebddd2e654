"""The parts that the fixes are made of, for use in anyone's own training loop.

Each room stands by itself: `flopwise.kit.input`, `flopwise.kit.precision`, `flopwise.kit.memory`, `flopwise.kit.graph`. They need
torch and the standard library, nothing else of flopwise runs, and importing one does not import the others. What rooms and fixes
both need lies beside the rooms, so that a run with fixes does not load a room for it: `nested`, `compiler`, `worker_count`.
"""
