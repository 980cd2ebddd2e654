"""How lines of NCCL's log look.

Formats of NCCL 2.7 to 2.30. Source: NVIDIA/nccl, src/debug.cc, src/init.cc, src/transport/, src/graph/, src/enqueue.cc; logs in
its issues.
"""

from __future__ import annotations

import re

#: Numbers of older versions. Source: NCCL_ALGO_* and NCCL_PROTO_* in NVIDIA/nccl src/include/nccl_common.h, from 2.13 on.
ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
PROTOCOLS = ("LL", "LL128", "Simple")
#: Bytes an element by number. Source: ncclDataType_t in NVIDIA/nccl src/nccl.h.in.
DATATYPES = (
    ("int8", 1), ("uint8", 1), ("int32", 4), ("uint32", 4), ("int64", 8), ("uint64", 8),
    ("float16", 2), ("float32", 4), ("float64", 8), ("bfloat16", 2), ("float8e4m3", 1), ("float8e5m2", 1),
)  # fmt: skip

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
NOT_SHOWN = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
#: What precedes a message: host, process, thread and device, of a warning the line of the source; launchers put words of their
#: own before it, and in published logs a host may be a word in angle brackets.
PREFIX = re.compile(
    r"(?<![^\s:<>\[\]()|,\"'])(?P<host><[\w.-]{1,64}>|[^\s:<>\[\]()|,\"']{1,255}):(?P<pid>\d{1,10}):(?P<tid>\d{1,10}) \[(?P<device>\d{1,5})\]"
    r"(?P<where>.{0,200}?) ?NCCL (?P<level>INFO|WARN|TRACE|ABORT) ?"
)
#: Messages are cut off here but for trees, characters.
LONGEST_MESSAGE = 2_000
#: File, or of plugins function, and line of a warning; from 2.30 on a function may follow.
SPOT = re.compile(
    r"(?:^|[\s)])([\w./:~<>-]{1,200}?(?:\([\w ,*&:<>]{0,200}\))?:\d{1,7})(?: \([^()]*\))?\s*$"
)
SIGN = re.compile(r"\bNCCL (?:INFO|WARN|version)\b")
VERSION = re.compile(r"[NR]CCL version (\d[\w.+-]{0,60})")
INIT = re.compile(
    r"(?:\[Rank \d+\] )?(?P<call>\w+ )?comm (?P<address>0x[0-9a-f]{1,16}|\(nil\)) rank (?P<rank>\d{1,9}) n[rR]anks (?P<n>\d{1,9})"
    r"(?P<more>.{0,400})"
)
#: The line behind that which says that a communicator is there, from 2.22 on.
READY = re.compile(r"Init timings(?: - \w+)?: rank (?P<rank>\d{1,9}) nranks (?P<n>\d{1,9}) total ")
BUS = re.compile(r"busId (\w{1,20})")
DEVICE = re.compile(r"cudaDev (\d{1,5})")
ID = re.compile(r"commId (0x[0-9a-f]{1,16})")
#: Of a communicator split from another one; no version gives it an id in these lines. From 2.28 on it is a count of children.
PARENT = re.compile(
    r"parent (?P<parent>0x[0-9a-f]{1,16}) (?:split|child)Count (?P<count>\d{1,9}) color (?P<color>-?\d{1,11})"
)
NODES = re.compile(r"nNodes (\d{1,7})")
CHANNEL = re.compile(
    r"Channel (?P<channel>\d{1,4})(?:/\d{1,4})? : (?P<source>\d{1,9})\[\w+\] -> (?P<target>\d{1,9})\[\w+\] "
    r"(?:\[(?:send|receive)\] )?via (?P<via>\S.{0,120})"
)
RING = re.compile(r"Channel (?P<channel>\d{1,4})(?:/\d{1,4})? :(?P<ranks>(?:\s+\d{1,9})+)\s*$")
NET = re.compile(
    r"NET/(?P<name>[^/]{1,60})/(?P<device>\w+)(?:\(\w+\))?(?P<gdr>/GDRDMA(?:\(\w+\))?)?(?:/Shared)?"
)
COLLNET = re.compile(
    r"CollNet (?P<channel>\d{1,4})(?:/\d{1,4})? : (?P<rank>\d{1,9}) \[(?:send|receive)\] via "
    r"COLLNET/(?P<name>[^/]{1,60})/(?P<device>\w+)(?P<gdr>/GDRDMA)?"
)
TREE = re.compile(r"\[(\d{1,4})\] (?:-?\d+/)*-?\d+->(\d{1,9})->(-?\d{1,9})")
COUNTS = re.compile(
    r"(?P<coll>\d{1,4}) coll channels(?:, (?P<collnet>\d{1,4}) collnet channels)?(?:, (?P<nvls>\d{1,4}) nvls channels)?"
    r"(?:, (?P<p2p>\d{1,4}) p2p channels)?"
)
SET = re.compile(r"(?P<name>(?:NCCL|RCCL)_\w{1,80}) set (?:by environment )?to (?P<value>.{0,400})")
NETWORK = re.compile(r"Using network (\S.{0,59})")
NVLS = re.compile(r"NVLS multicast support is (not )?available")
CUDA = re.compile(r"cudaDriverVersion (\d{4,6})")
CHOICE = re.compile(
    r"(?:(?P<op>\w+): )?(?P<bytes>\d{1,18}) Bytes -> Algo (?P<algorithm>\w+) proto (?P<protocol>\w+)"
    r"(?:.*?channel\{Lo\.\.Hi\}=\{(?P<low>\d{1,4})\.\.(?P<high>\d{1,4})\})?"
)
CALL = re.compile(
    r"(?P<op>\w+): opCount \w+ .*?count (?P<count>\d{1,18}) datatype (?P<type>\d{1,3}) .*?(?:\[nranks=(?P<n>\d{1,9})\])?"
    r"(?: stream.*)?$"
)
#: Beginnings of messages that are to be read; what begins so and is not is counted.
KNOWN = re.compile(r"Channel \d|CollNet \d|Trees \[|\d+ coll channels|ncclCommInit\w* comm ")


def named(value: str, names: tuple[str, ...]) -> str:
    """Returns an algorithm's or protocol's name: older versions write numbers, newer ones capitals."""
    if value.isdecimal():
        return names[int(value)] if len(value) < 3 and int(value) < len(names) else value
    like = value.replace("_", "").lower()
    return next((name for name in names if name.lower() == like), value)
