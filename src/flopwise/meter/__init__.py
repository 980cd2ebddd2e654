"""The live run: steps, clocks, FLOPs, memory, tokens, energy. Runs inside the process that trains.

Standard library and torch only, so that any environment that trains can be measured.
"""
