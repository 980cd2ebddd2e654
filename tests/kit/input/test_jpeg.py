"""Encoded images; where torchvision is not installed a decoder stands in that notes what it was asked."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from flopwise.errors import FlopwiseWarning, InputError
from flopwise.kit.input import JpegBatch, Prefetcher, collate_jpegs, decode_jpegs, jpeg


def file_of(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


class Decoder:
    """Makes an image (3, n, 1) of n bytes, as torchvision.io.decode_jpeg is called."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, str]] = []
        self.refuses = False
        self.during: Any = None

    def decode_jpeg(self, files: Any, mode: Any, device: Any = "cpu") -> Any:
        assert mode == "RGB"
        if isinstance(files, list):
            self.asked.append((len(files), str(device)))
            if self.during is not None:
                self.during()
            if self.refuses:
                raise RuntimeError("nvJPEG is not available\nwith more lines")
            return [self._image(f) for f in files]
        self.asked.append((1, "cpu"))
        return self._image(files)

    def _image(self, file: torch.Tensor) -> torch.Tensor:
        return file.view(1, -1, 1).repeat(3, 1, 1)


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    made = Decoder()
    io = types.ModuleType("torchvision.io")
    io.decode_jpeg = made.decode_jpeg  # type: ignore[attr-defined]
    io.ImageReadMode = types.SimpleNamespace(RGB="RGB")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.io", io)
    return made


def test_on_the_host_they_are_decoded_one_by_one(decoder: Decoder) -> None:
    got = decode_jpegs([file_of(1, 2), file_of(3)], "cpu")
    assert [g.shape for g in got] == [(3, 2, 1), (3, 1, 1)]
    assert decoder.asked == [(1, "cpu"), (1, "cpu")]


@pytest.fixture
def device(surface: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device that notes what waits for what, in place of CUDA."""
    monkeypatch.setattr(jpeg, "CudaSurface", lambda _: surface)
    monkeypatch.setattr(jpeg, "_decoding", {})
    return surface


def test_on_a_device_they_are_decoded_in_one_call_whose_memory_is_kept_apart(
    decoder: Decoder, device: Any
) -> None:
    streams = []
    decoder.during = lambda: streams.append(device.current.name)
    images = decode_jpegs([file_of(1, 2), file_of(3)], "cuda:0")
    assert len(images) == 2
    assert decoder.asked == [(2, "cpu:0")]
    assert streams == ["apart"]  # not the stream that the images are for
    assert device.log == [
        ("host", "waits for stream", "apart"),  # its memory is nobody's any more
        ("compute", "waits for stream", "apart"),
    ]
    assert device.recorded == [(i.data_ptr(), "compute") for i in images]
    decode_jpegs([file_of(1)], "cuda:0")
    assert len(jpeg._decoding) == 1


@pytest.mark.usefixtures("device")
def test_a_device_that_cannot_is_said_once_and_the_host_decodes(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder.refuses = True
    monkeypatch.setattr(torch.Tensor, "to", lambda self, where: self)
    with pytest.warns(
        FlopwiseWarning, match=r"nvJPEG did not decode a batch \(nvJPEG is not available\)"
    ) as said:
        assert (
            len(decode_jpegs([file_of(1)], "cuda")) == len(decode_jpegs([file_of(1)], "cuda")) == 1
        )
    assert len(said) == 1


def test_without_torchvision_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.io", None)
    with pytest.raises(InputError, match="pip install torchvision"):
        decode_jpegs([file_of(1)], "cpu")


@pytest.mark.usefixtures("decoder")
def test_a_batch_is_one_tensor_of_files_and_becomes_images_where_it_goes() -> None:
    batch, labels = collate_jpegs([(bytes([1, 2, 3]), 7), (file_of(9), 8)])
    assert isinstance(batch, JpegBatch)
    assert len(batch) == 2
    assert batch.data.tolist() == [1, 2, 3, 9]
    assert labels.tolist() == [7, 8]
    images = batch.to("cpu", non_blocking=True)
    assert [i[0, :, 0].tolist() for i in images] == [[1, 2, 3], [9]]


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("thread", [True, False])
def test_a_prefetcher_decodes(thread: bool) -> None:
    loader = [collate_jpegs([(bytes([k, k]), k)]) for k in range(4)]
    got = list(Prefetcher(loader, "cpu", thread=thread))
    assert [int(images[0][0, 0, 0]) for images, _ in got] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([], "are meant"),
        ([b"ab"], "are meant"),
        ([(b"ab", 1), (b"ab",)], "2, 1 parts"),
        ([(b"ab", 1), (b"", 1)], "file 1 of the batch: it is empty"),
        ([(3, 1)], "file 0 of the batch: int"),
    ],
)
def test_samples_that_are_no_files_are_told(samples: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        collate_jpegs(samples)
