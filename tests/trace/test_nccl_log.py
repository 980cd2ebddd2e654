"""Logs of NCCL: the formats of its versions, several ranks in one file, and lines that mean no good."""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from flopwise.trace import nccl_communicators, nccl_reader
from flopwise.trace.nccl_log import read_nccl_log
from flopwise.trace.nccl_records import Choice, NcclLog, Operation
from flopwise.trace.stream import TraceError


def lines(rank: int, *texts: str, host: str = "node1", tid: int | None = None) -> list[str]:
    """Lines as one rank writes them."""
    pid = 1000 + rank
    return [f"{host}:{pid}:{tid or pid} [{rank}] NCCL INFO {text}" for text in texts]


def start(rank: int, n: int = 2, comm: str = "0xabc", call: str = "ncclCommInitRankConfig ") -> list[str]:  # fmt: skip
    said = f"{call}comm 0x55{rank:02d} rank {rank} nranks {n} cudaDev {rank} nvmlDev {rank} busId {rank}d000 commId {comm}"
    return lines(
        rank,
        f"{said} - Init START",
        f"comm 0x55{rank:02d} rank {rank} nRanks {n} nNodes 1 localRanks {n} localRank {rank} MNNVL 0",
        f"{said} - Init COMPLETE",
    )


@pytest.fixture
def read(tmp_path: Path):  # type: ignore[no-untyped-def]
    def reader(*parts: list[str] | str) -> NcclLog:
        path = tmp_path / "nccl.log"
        text = "\n".join("\n".join(part) if isinstance(part, list) else part for part in parts)
        path.write_text(text + "\n")
        return read_nccl_log(path)

    return reader


def test_what_a_log_of_two_ranks_says(read) -> None:  # type: ignore[no-untyped-def]
    log = read(
        "NCCL version 2.28.9+cuda13.0",
        lines(0, "cudaDriverVersion 13000", "NET/IB : No device found.", "Using network Socket"),
        start(0),
        start(1),
        lines(0, "NVLS multicast support is available on dev 0 (NVLS_NCHANNELS 16)"),
        lines(0, "Channel 00/02 : 0 1", "Channel 01/02 :    0   1", "Trees [0] 1/-1/-1->0->-1 [1] -1/-1/-1->0->1"),
        lines(1, "Trees [0] -1/-1/-1->1->0 [1] 0/-1/-1->1->-1", "P2P Chunksize set to 524288"),
        lines(0, "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read", "Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read"),
        lines(1, "Channel 00/0 : 1[1] -> 0[0] via P2P/IPC", "Channel 01 : 1[1] -> 0[0] via SHM/direct/direct"),
        lines(0, "24 coll channels, 24 collnet channels, 16 nvls channels, 32 p2p channels, 32 p2p channels per peer"),
        lines(0, "NCCL_BUFFSIZE set by environment to 4194304.", "NCCL_ALGO set by environment to ring,tree"),
        "step 1 loss 3.2",
    )  # fmt: skip
    assert (log.versions, log.cuda_versions, log.hosts) == (("2.28.9+cuda13.0",), ("13.0",), ("node1",))  # fmt: skip
    (comm,) = log.communicators
    assert (comm.id, comm.nranks, comm.nodes, comm.missing, comm.incomplete) == ("0xabc", 2, 1, (), ())  # fmt: skip
    assert [(m.rank, m.pid, m.device, m.bus_id) for m in comm.members] == [(0, 1000, 0, "0d000"), (1, 1001, 1, "1d000")]  # fmt: skip
    assert (comm.channels, comm.collnet_channels, comm.nvls_channels, comm.p2p_channels) == (24, 24, 16, 32)  # fmt: skip
    assert comm.rings == {0: (0, 1), 1: (0, 1)}
    assert comm.trees == {0: {0: -1, 1: 0}, 1: {0: 1, 1: -1}}
    assert log.transports == {"P2P/CUMEM": 2, "P2P/IPC": 1, "SHM/direct/direct": 1}
    assert {one.communicator for one in log.connections} == {"0xabc"}
    assert log.connections[0].read
    assert (log.networks, log.nvls, log.gdrdma, log.rank) == (("Socket",), True, None, None)
    assert log.environment == {"NCCL_BUFFSIZE": ("4194304",), "NCCL_ALGO": ("ring,tree",)}
    assert (log.unreadable, log.unkept, log.ends_early) == (0, 0, None)
    assert (log.lines, log.nccl_lines) == (24, 23)


@pytest.mark.parametrize(
    ("via", "transport", "how", "device", "gdrdma"),
    [
        ("P2P/direct pointer/read", "P2P", "direct pointer", "", None),
        ("P2P/MNNVL", "P2P", "MNNVL", "", None),
        ("P2P/indirect/2[2]", "P2P", "indirect/2[2]", "", None),
        ("P2P/IPC/CE", "P2P", "IPC", "", None),
        ("P2P/IPC comm 0x7f53bc000e50 nRanks 04", "P2P", "IPC", "", None),
        ("SHM/direct", "SHM", "direct", "", None),
        ("direct shared memory", "SHM", "", "", None),
        ("NET/IB/3/GDRDMA", "NET", "IB", "3", True),
        ("NET/IB/0(3)/GDRDMA(PCI)/Shared", "NET", "IB", "0", True),
        ("NET/Socket/0", "NET", "Socket", "0", False),
        ("NET/AWS Libfabric/0/Shared", "NET", "AWS Libfabric", "0", False),
        ("NET/IBext_v8/1/Shared", "NET", "IBext_v8", "1", False),
    ],
)  # fmt: skip
def test_ways_between_two_ranks(read, via, transport, how, device, gdrdma) -> None:  # type: ignore[no-untyped-def]
    (one,) = read(lines(0, f"Channel 03/1 : 0[1b000] -> 1[5] [send] via {via}")).connections
    assert (one.transport, one.how, one.device, one.gdrdma) == (transport, how, device, gdrdma)
    assert (one.channel, one.source, one.target, one.communicator) == (3, 0, 1, "")


def test_gdrdma_is_said_only_of_all(read) -> None:  # type: ignore[no-untyped-def]
    direct = lines(0, "Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA")
    staged = lines(0, "Channel 01/0 : 0[0] -> 8[0] [send] via NET/IB/1")
    assert read(direct).gdrdma is True
    assert read(direct, staged).gdrdma is False
    (collnet,) = read(lines(0, "CollNet 00/0 : 3 [send] via COLLNET/SHARP/0/GDRDMA")).connections
    assert (collnet.name, collnet.source, collnet.gdrdma) == ("COLLNET/SHARP", 3, True)


def test_one_ranks_log_says_whose_it_is(read) -> None:  # type: ignore[no-untyped-def]
    log = read(start(1, 8), start(1, 2, "0xdef", call=""))
    assert log.rank == 1
    assert [one.nranks for one in log.communicators] == [8, 2]
    log = read(start(5, 8))
    assert (log.rank, log.communicators[0].missing) == (5, (0, 1, 2, 3, 4, 6, 7))


def test_versions_without_ids_know_their_communicators_by_address(read) -> None:  # type: ignore[no-untyped-def]
    log = read(lines(0, "comm 0x7f30 rank 0 nranks 16 cudaDev 0 busId 64000 - Init COMPLETE"))
    assert (log.communicators[0].id, log.communicators[0].nranks) == ("node1:1000:0x7f30", 16)


def test_a_rank_whose_initialisation_did_not_end(read) -> None:  # type: ignore[no-untyped-def]
    log = read(start(0), start(1)[:2])
    assert log.communicators[0].incomplete == (1,)


def test_words_of_launchers_before_a_line(read) -> None:  # type: ignore[no-untyped-def]
    for before in ("[1,2]<stdout>:", "3: ", "\x1b[36m(RayTrainWorker pid=7, ip=10.0.0.2)\x1b[0m ", "2026-03-12 14:17:56 ", "[rank0]:"):  # fmt: skip
        log = read([before + line for line in start(0)])
        assert (log.hosts, log.communicators[0].nranks, log.unreadable) == (("node1",), 2, 0)


def test_lines_that_run_into_each_other(read) -> None:  # type: ignore[no-untyped-def]
    a, b = start(0), start(1)
    log = read(a[:2], b[:2], a[2][:-25] + b[2])
    (comm,) = log.communicators
    assert [m.complete for m in comm.members] == [False, True]
    assert log.hosts == ("node1",)


def test_warnings_of_one_kind_are_counted(read) -> None:  # type: ignore[no-untyped-def]
    warn = "[2026-03-12 14:17:56] node1:7:{n} [0] enqueue.cc:1694 NCCL WARN Cuda failure {n} 'named symbol not found'"
    other = "node2:7:7 [0] transport/net_ib/p2p.cc:12 (ncclIbTest) NCCL WARN NET/IB : Got completion\x1b[2J"
    log = read([warn.format(n=n) for n in range(5)], other)
    first, second = log.warnings
    assert (first.count, first.where, first.text) == (5, "enqueue.cc:1694", "Cuda failure 0 'named symbol not found'")  # fmt: skip
    assert (second.count, second.where, second.first_host) == (1, "transport/net_ib/p2p.cc:12", "node2")  # fmt: skip
    assert "\x1b" not in second.text


def test_what_was_chosen(read) -> None:  # type: ignore[no-untyped-def]
    log = read(
        lines(
            0,
            "AllReduce: 4096 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..3}",
            "AllReduce: 1024 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}",
            "AllReduce: 268435456 Bytes -> Algo NVLS_TREE proto SIMPLE channel{Lo..Hi}={0..15}",
            "AllGather: 37756928 Bytes -> Algo 1 proto 2 time 2860.208008",
            "512 Bytes -> Algo 0 proto 1 time 2.5",
        )
    )
    assert log.choices == (
        Choice("AllReduce", "Ring", "LL", 2, 1024, 4096, 4),
        Choice("AllReduce", "NVLSTree", "Simple", 1, 268435456, 268435456, 16),
        Choice("AllGather", "Ring", "Simple", 1, 37756928, 37756928, None),
        Choice("", "Tree", "LL128", 1, 512, 512, None),
    )


def test_calls(read) -> None:  # type: ignore[no-untyped-def]
    said = "AllGather: opCount {n} sendbuff 0x93fd44a00 recvbuff 0x96d44e200 count 1000 datatype 7 op 0 root 0 comm 0x55 [nranks=4] stream 0x555e2b3a4370"
    log = read(lines(0, *[said.format(n=f"160{n:x}") for n in range(3)], said.replace("datatype 7", "datatype 99").format(n=5)))  # fmt: skip
    assert log.operations == (
        Operation("AllGather", "float32", 4, 3, 12000),
        Operation("AllGather", "type 99", 4, 1, 0),
    )


def test_ranks_that_differ_are_said(read) -> None:  # type: ignore[no-untyped-def]
    log = read("NCCL version 2.20.5+cuda12.4", "NCCL version 2.28.9+cuda13.0", lines(0, "NCCL_ALGO set by environment to ring"), lines(1, "NCCL_ALGO set by environment to tree"))  # fmt: skip
    assert "ranks run different versions of NCCL: 2.20.5+cuda12.4, 2.28.9+cuda13.0" in log.notes
    assert "NCCL_ALGO is not the same on all ranks: ring, tree" in log.notes


def test_lines_that_cannot_be_read_are_counted(read) -> None:  # type: ignore[no-untyped-def]
    log = read(
        start(0),
        lines(0, "Channel 00/0 : 0[0] -> 1[1] via", "Channel 00/0 : 0[0]", "Trees [0", "CollNet 00", "ncclCommInitRank comm (n", "a new thing"),
        lines(0, "ncclCommInitRank comm 0x1 rank 9 nranks 2 - Init START"),
        "NCCL INFO without its head",
    )  # fmt: skip
    assert log.unreadable == 7
    assert len(log.communicators) == 1


def test_no_log_no_file(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("hello\nNCCL is nice\n")
    with pytest.raises(TraceError, match="none of its 2 lines is NCCL's"):
        read_nccl_log(path)
    with pytest.raises(TraceError, match="cannot be read"):
        read_nccl_log(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="cannot be read"):
        read_nccl_log(tmp_path)


def test_compressed_and_cut(tmp_path: Path) -> None:
    text = "\n".join(line for rank in range(64) for line in start(rank, 64)).encode()
    path = tmp_path / "a.log.gz"
    packed = gzip.compress(text)
    path.write_bytes(packed)
    told: list[int] = []
    assert read_nccl_log(path, told.append).communicators[0].missing == ()
    assert told[-1] == len(text)
    path.write_bytes(packed[: len(packed) // 2])
    log = read_nccl_log(path)
    assert log.ends_early == "the compressed data is cut off"
    assert log.communicators[0].missing != ()


def test_lines_that_ranks_tear_apart(read) -> None:  # type: ignore[no-untyped-def]
    """As eight processes of one machine write them to one pipe: the end of a line comes later, without its beginning."""
    said = "ncclCommInitRankConfig comm 0x55{0} rank {0} nranks 3 cudaDev {0} nvmlDev {0} busId {0}a000"
    begins = [f"gpu-1:{100 + r}:{100 + r} [{r}] NCCL INFO {said.format(r)}" for r in range(3)]
    ready = "gpu-1:{0}:{0} [{1}] NCCL INFO Init timings - ncclCommInitRankConfig: rank {1} nranks 3 total 3.69 (kernels 0.35, alloc "
    log = read(
        *(f"{line} commId 0xfc - Init START" for line in begins),
        begins[0].removesuffix("00") + begins[1].removesuffix("00") + begins[2] + " commId 0xfc - Init COMPLETE",
        "00 commId 0xfc - Init COMPLETE",
        "00 commId 0xfc - Init COMPLETE",
        ready.format(100, 0) + ready.format(101, 1) + "2.16, bootstrap 0.06, allgathers 0.01, rest 0.01)",
        "2.16, bootstrap 0.06, allgathers 0.01, rest 0.01)",
    )  # fmt: skip
    (comm,) = log.communicators
    assert (comm.id, comm.missing, comm.incomplete) == ("0xfc", (), ())
    assert (log.hosts, log.unreadable) == (("gpu-1",), 0)


def test_a_communicator_is_ready_only_where_its_own_rank_says_so(read) -> None:  # type: ignore[no-untyped-def]
    begin = start(0)[0]
    for text in ("rank 1 nranks 2 total 1.0", "rank 0 nranks 4 total 1.0"):
        log = read(begin, lines(0, f"Init timings - ncclCommInitRankConfig: {text} (kernels 0.3)"))
        assert log.communicators[0].incomplete == (0,)


def test_what_launchers_and_collectors_put_before_a_line(read) -> None:  # type: ignore[no-untyped-def]
    via = "host-{0}:10:12 [3] NCCL INFO Channel 00/0 : {0}[3] -> 11[3] [send] via NET/IB/3/GDRDMA"
    before = ["", "[2026-04-28 14:14:48] ", "# ", "0: ", "[default3]:", "[1,3]<stdout>:", "(RayWorker pid=7, ip=10.0.0.1) ", "2025-01-01T00:00:00Z stderr F "]  # fmt: skip
    log = read(
        *(prefix + via.format(n) for n, prefix in enumerate(before)),
        '{"ts": 1, "log": "' + via.format(8) + '\\n"}',
        '{"log": "' + via.format(9),  # cut off
        via.format(10).replace("host-10", "<host-10>"),
    )
    assert log.hosts == (*(f"host-{n}" for n in range(10)), "<host-10>")
    assert [(one.source, one.name, one.gdrdma) for one in log.connections] == [
        (n, "NET/IB", True) for n in range(11)
    ]
    assert log.unreadable == 0


def test_communicators_that_are_split_from_another_are_one_over_their_ranks(read) -> None:  # type: ignore[no-untyped-def]
    """As versions 2.18 to 2.27 write them, and 2.28: ranks 0 and 2 are one half, 1 and 3 the other, and 0 and 2 once more."""
    child = "ncclCommSplit comm 0x66{0}{1} rank {2} nranks 2 cudaDev {0} nvmlDev {0} busId {0}d000 parent 0x55{0:02d} {4}Count {1} color {3} key {2}"
    parts: list[list[str] | str] = [start(rank, 4) for rank in range(4)]
    for rank in range(4):
        for number in (1, 2) if rank in (0, 2) else (1,):
            said = child.format(
                rank, number, rank // 2, 900 + rank % 2, "split" if rank < 2 else "child"
            )
            parts.append(lines(rank, f"{said}- Init START", f"{said} - Init COMPLETE"))
    parts.append(lines(2, "Channel 00/0 : 0[0] -> 1[2] via P2P/IPC"))
    log = read(*parts)
    assert {one.id: [m.pid for m in one.members] for one in log.communicators} == {
        "0xabc": [1000, 1001, 1002, 1003],
        "0xabc/1/900": [1000, 1002],
        "0xabc/1/901": [1001, 1003],
        "0xabc/2/900": [1000, 1002],
    }
    assert all(one.missing == one.incomplete == () for one in log.communicators)
    assert (log.connections[0].communicator, log.unreadable) == ("0xabc/2/900", 0)


def test_a_communicator_that_is_split_from_one_before_the_log_is_its_ranks_own(read) -> None:  # type: ignore[no-untyped-def]
    said = "ncclCommSplit comm 0x661 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId d000 parent 0x55 splitCount 1 color 9 key 0 - Init COMPLETE"
    (comm,) = read(lines(0, said)).communicators
    assert (comm.id, comm.missing) == ("node1:1000:0x661", (1,))


def test_prose_about_versions_names_none(read) -> None:  # type: ignore[no-untyped-def]
    assert read("Both have the same NCCL version and driver.", "NCCL version 2.21.5+cuda12.4").versions == ("2.21.5+cuda12.4",)  # fmt: skip


def test_where_a_warning_comes_from(read) -> None:  # type: ignore[no-untyped-def]
    where = {
        "init.cc:12": "init.cc:12",
        "transport/net_ib/p2p.cc:269 (ncclIbTest)": "transport/net_ib/p2p.cc:269",
        "ncclResult_t nccl_net_ofi_init_v2(ncclDebugLogger_t):155": "nccl_net_ofi_init_v2(ncclDebugLogger_t):155",
        "": "",
    }
    for before, spot in where.items():
        log = read(f"h:1:2 [0] {before} NCCL WARN NET/OFI Initializing plugin failed")
        assert [(one.where, one.text) for one in log.warnings] == [(spot, "NET/OFI Initializing plugin failed")]  # fmt: skip


def test_a_communicator_that_is_revoked_is_no_new_one(read) -> None:  # type: ignore[no-untyped-def]
    log = read(
        lines(
            1,
            "[Rank 1] ncclCommInitRankConfig comm 0x5501 rank 1 nranks 2 cudaDev 1 nvmlDev 1 busId d000 commId 0xabc - Init START",
            "comm 0x5501 rank 1 nRanks 2 cudaDev 1 busId d000 - Revoke START",
            "comm 0x5501 rank 1 nRanks 2 cudaDev 1 busId d000 - Revoke COMPLETE, result 0",
        )
    )
    (comm,) = log.communicators
    assert (comm.id, comm.incomplete, log.unreadable) == ("0xabc", (1,), 0)


def test_limits(read, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(nccl_communicators, "MOST_KEPT", 5)
    monkeypatch.setattr(nccl_reader, "MOST_WARNINGS", 5)
    texts = [line for n in range(9) for line in start(0, 2, hex(n + 1))]
    texts += lines(0, *[f"Channel {n:02d} : 0[0] -> 1[1] via SHM/direct" for n in range(9)])
    texts += lines(0, *[f"NCCL_{'ABCDEFGHI'[n]} set by environment to 1" for n in range(9)])
    texts += [f"node1:1:1 [0] a.cc:{n} NCCL WARN {'x' * n}" for n in range(9)]
    texts += lines(0, *[f"{'ABCDEFGHI'[n]}: 8 Bytes -> Algo Ring proto LL" for n in range(9)])
    log = read(texts)
    assert len(log.communicators) == len(log.connections) == len(log.environment) == 5
    assert len(log.warnings) == len(log.choices) == 5
    assert log.unkept > 0
    assert any("beyond the limits" in note for note in log.notes)


def test_long_lines_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    good = start(0)[2].encode()
    hostile = [
        b"NCCL " * 3_000_000,
        b"a:1:1 [0] NCCL INFO " * 200_000,
        b"a:1:1 [0]" * 200_000 + b"NCCL INFO",
        b"a" * 2_000_000 + b":1:1 [0] NCCL INFO x",
        b"h:1:1 [0] NCCL INFO Trees " + b"[0] " + b"1/" * 2_000_000,
        b"h:1:1 [0] NCCL INFO AllReduce: opCount 0 " + b"count 1 datatype 1 " * 100_000 + b"!",
        b"h:1:1 [0] NCCL INFO comm 0x1 rank 0 nranks 999999999 - Init COMPLETE",
        b"h:1:1 [0] NCCL INFO Channel 00/01 :" + b" 1" * 2_000_000,
        b"\xff\xfe\0" * 1_000_000 + b"NCCL INFO",
        b"\xd0" * 99 + b":1:1 [0] NCCL INFO \xff\xfe",
    ]
    path.write_bytes(b"\n".join([*hostile, good]))
    log = read_nccl_log(path)
    assert log.lines == len(hostile) + 1
    assert log.communicators[-1].id == "0xabc"
    assert log.communicators[0].missing == ()  # of a billion


def test_random_damage(tmp_path: Path) -> None:
    coin = random.Random(0)
    path = tmp_path / "a.log"
    sound = "\n".join([*start(0), *start(1), *lines(0, "Channel 00/0 : 0[0] -> 1[1] via NET/IB/3/GDRDMA")]).encode()  # fmt: skip
    for _ in range(300):
        data = bytearray(sound)
        for _ in range(coin.choice((1, 10, 100))):
            data[coin.randrange(len(data))] = coin.randrange(256)
        path.write_bytes(data)
        try:
            log = read_nccl_log(path)
        except TraceError:
            continue
        assert log.lines >= log.nccl_lines > 0


def test_variables_that_differ_without_end_are_some_and_a_number(read) -> None:  # type: ignore[no-untyped-def]
    texts = [
        line
        for n in range(nccl_reader.MOST_DIFFERING + 2)
        for value in ("A" * 300, "B")
        for line in lines(0, f"NCCL_V{n} set by environment to {value}")
    ]
    notes = [note for note in read(texts).notes if "not the same" in note]
    assert notes[0] == f"NCCL_V0 is not the same on all ranks: {'A' * 100}, B"
    assert notes[nccl_reader.MOST_DIFFERING :] == ["2 more variables are not the same on all ranks"]


class Hosts(dict[str, None]):
    """Hosts that count how often they are gone through."""

    times = 0

    def __iter__(self) -> Iterator[str]:
        self.times += 1
        return super().__iter__()


def test_many_hosts_take_no_time() -> None:
    reader = nccl_reader.Reader()
    reader._hosts = hosts = Hosts()
    for n in range(50):
        reader.line(f"x other{n}z:1:2 [0] NCCL INFO Using network IB")
    reader.line("tornother7z:1:2 [0] NCCL INFO Using network IB")
    reader.line("x tornother7z:1:2 [0] NCCL INFO Using network IB")
    assert hosts.times == 0
    assert "other7z" in hosts
    assert len(hosts) == 51  # with the one that begins a line
