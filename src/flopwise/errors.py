"""What can go wrong, as one tree.

FlopwiseError                 anything that is ours to explain; the command line prints it as one message, exit code 2
├── UsageError                the command line does not make sense
├── RunFolderError            a run folder is missing, unreadable, unwritable or not one of ours
├── RecordError               a stored record is damaged, or of a version that this flopwise does not read
├── HardwareError             a device, or its row in the table of accelerators, cannot be used as asked
├── NothingMeasuredError      the script ran, and there was no training step to measure
├── PlanError                 a plan does not fit the script, the device or this flopwise
├── PatchError                a script cannot be read or patched (patching)
├── TraceError                a trace cannot be read (trace.stream)
├── SourceError               nothing that can be read is at a path (trace.sources)
│   └── SourceConflict        two files are of the same rank
├── LedgerError               a trace has nothing that a ledger could be made of (diagnosis.ledger.build)
├── ComparisonError           there is nothing to compare at a path (diagnosis.comparison.sides)
├── AttachError               a hook that the meter leans on is not there in this torch
├── PrecisionError            a precision cannot be used as asked (kit.precision)
├── GraphError                a step or model cannot be captured, compiled or folded as asked (kit.graph)
└── InputError                batches cannot be moved, handed out or resumed as asked (kit.input)
    └── ConsistencyError      a batch on the device is not the one that was sent

FlopwiseWarning               something is done the plain way, or works, but not as one would think: said once
├── PrecisionWarning          a precision does not take effect, or numbers may suffer from it (kit.precision)
├── GraphWarning              a step or a module runs eagerly after all (kit.graph)
└── MemoryWarning             a model was run to be measured and is not what it was (kit.memory)

A message says where, what was seen, what still holds, and what to do.
"""

from __future__ import annotations


class FlopwiseError(Exception):
    """Base of every error that is reported to the user without a traceback."""

    exit_code = 2


class UsageError(FlopwiseError):
    """The command line does not make sense."""


class RunFolderError(FlopwiseError):
    """A run folder is missing, unreadable, unwritable or not one of ours."""


class RecordError(FlopwiseError):
    """A stored record is damaged, or of a version that this flopwise does not read."""


class HardwareError(FlopwiseError):
    """A device, or its row in the table of accelerators, cannot be used as asked."""


class NothingMeasuredError(FlopwiseError):
    """The script ran, and there was no training step to measure."""


class PlanError(FlopwiseError):
    """A plan does not fit the script, the device or this flopwise."""


class PatchError(FlopwiseError):
    """A script cannot be read or patched."""


class AttachError(FlopwiseError):
    """A hook that the meter leans on is not there in this torch."""


class PrecisionError(FlopwiseError):
    """A precision cannot be used as asked, or its protocol was broken in a way that would give wrong numbers."""


class InputError(FlopwiseError):
    """Batches cannot be moved, handed out or resumed as asked (kit.input)."""


class ConsistencyError(InputError):
    """A batch on the device is not the batch that was sent there."""


class FlopwiseWarning(UserWarning):
    """Something is done the plain way, or works, but not as one would think; each is said once."""


class PrecisionWarning(FlopwiseWarning):
    """A precision does not take effect, or numbers may suffer from it (kit.precision)."""


class MemoryWarning(FlopwiseWarning):
    """A model was run to be measured and is not what it was, and this says in what (kit.memory)."""


class GraphWarning(FlopwiseWarning):
    """A step or a module runs eagerly after all, and this says why (kit.graph)."""


class GraphError(FlopwiseError):
    """A step cannot be captured, compiled or folded as asked, and running it otherwise would be wrong (kit.graph)."""
