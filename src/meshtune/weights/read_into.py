"""Reads tensors from files into the shards of a model, block by block, several at a time."""

from __future__ import annotations

import dataclasses
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from meshtune.families.tensors import TensorMap, by_name
from meshtune.weights.broadcast_reader import BroadcastReader
from meshtune.weights.finite import check_finite
from meshtune.weights.read_plan import Block, read_plan
from meshtune.weights.safetensors_files import BLOCK_BYTES, DTYPES, TensorInfo
from meshtune.weights.shards import Shards
from meshtune.weights.tensor_reader import TensorReader

Progress = Callable[[int, int], None]
THREADS = max(3, min(4, os.cpu_count() or 1))  # each holds a block; more than cores, since some wait for a device


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """One tensor of a file: the parts of leaves that are views of it, and the blocks it is read in."""

    info: TensorInfo
    entries: tuple[TensorMap, ...]
    blocks: list[Block]

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.info.dtype]

    def check(self, numbers: np.ndarray) -> None:
        """Raises UserError where a block that was read has a number that is not finite."""
        check_finite(numbers, self.entries[0].name, self.info.file)

    def nbytes(self, block: Block) -> int:
        return int(np.prod(block.shape, dtype=np.int64)) * self.dtype.itemsize


def read_into(
    shards: Shards,
    table: Iterable[TensorMap],
    infos: Mapping[str, TensorInfo],
    reader: TensorReader,
    broadcaster: BroadcastReader | None = None,
    progress: Progress | None = None,
) -> None:
    """Writes the tensors of a table into the shards, in place, in the order of the files.

    With a `broadcaster` one process of its group reads and broadcasts every block, and all must make the same calls.
    `progress(done, total)` counts bytes of files. Host memory: THREADS + 1 blocks; with a broadcaster two.
    """
    tensors = _in_file_order(shards, table, infos)
    total = sum(tensor.nbytes(block) for tensor in tensors for block in tensor.blocks)
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        if progress:
            progress(done, total)

    if broadcaster is None:
        _read_in_threads(shards, tensors, reader, advance)
    else:
        _read_broadcast(shards, tensors, reader, broadcaster, advance)


def _in_file_order(shards: Shards, table: Iterable[TensorMap], infos: Mapping[str, TensorInfo]) -> list[_Tensor]:
    tensors = []
    for name, entries in by_name(table).items():
        info = infos[name]
        quantised = any(shards.is_quantised(entry.path) for entry in entries)
        # Quantising takes several times a block, in float32.
        limit = BLOCK_BYTES // 4 if quantised else BLOCK_BYTES
        plan = read_plan(entries, shards.boxes, DTYPES[info.dtype].itemsize, limit, whole_rows=quantised)
        tensors.append(_Tensor(info, tuple(entries), plan))
    return sorted(tensors, key=lambda tensor: (str(tensor.info.file), tensor.info.start))


def _read_in_threads(
    shards: Shards, tensors: Iterable[_Tensor], reader: TensorReader, advance: Callable[[int], None]
) -> None:
    """Threads read blocks and write them where they belong; tensors are begun and ended here, in order."""

    def move(tensor: _Tensor, block: Block) -> None:
        memory = shards.memory_of(block, tensor.dtype)
        if memory is not None:
            reader.read_into(memory, tensor.info, block.split_shape, _ranges(block))
            tensor.check(memory)
        else:
            numbers = reader.box(tensor.info, block.split_shape, _ranges(block))
            tensor.check(numbers)
            shards.put(block, numbers)

    pending: deque[tuple[_Tensor, Block | None, Future[None] | None]] = deque()

    def finish_one() -> None:
        tensor, block, future = pending.popleft()
        if future is None or block is None:
            for entry in tensor.entries:
                shards.end(entry)
            return
        future.result()
        advance(tensor.nbytes(block))

    with ThreadPoolExecutor(THREADS, "read") as threads:
        try:
            for tensor in tensors:
                for entry in tensor.entries:
                    shards.begin(entry)
                for block in tensor.blocks:
                    while len(pending) > THREADS:
                        finish_one()
                    pending.append((tensor, block, threads.submit(move, tensor, block)))
                pending.append((tensor, None, None))
            while pending:
                finish_one()
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise


def _read_broadcast(
    shards: Shards,
    tensors: list[_Tensor],
    reader: TensorReader,
    broadcaster: BroadcastReader,
    advance: Callable[[int], None],
) -> None:
    """Blocks in the same order on every process of the group, the next one being read while one is broadcast."""
    order = [(tensor, block) for tensor in tensors for block in tensor.blocks]

    def read(number: int) -> np.ndarray | None:
        if not broadcaster.reads or number >= len(order):
            return None
        tensor, block = order[number]
        numbers = reader.box(tensor.info, block.split_shape, _ranges(block))
        tensor.check(numbers)
        return numbers

    with ThreadPoolExecutor(1, "read") as thread:
        following, number = thread.submit(read, 0), 0
        for tensor in tensors:
            for entry in tensor.entries:
                shards.begin(entry)
            for block in tensor.blocks:
                numbers, number = following.result(), number + 1
                following = thread.submit(read, number)
                size = tensor.nbytes(block)
                shards.put(block, broadcaster.broadcast(numbers, size).view(tensor.dtype).reshape(block.shape))
                del numbers
                advance(size)
            for entry in tensor.entries:
                shards.end(entry)


def _ranges(block: Block) -> list[tuple[int, int, int]]:
    return [(start, stop, 1) for start, stop in block.box]
