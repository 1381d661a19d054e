from __future__ import annotations

import copy
import gc
import pickle
import threading

import pytest
import torch

memory = pytest.importorskip("sparselift.memory")
pytest.importorskip("sparselift._memory", reason="the extension sparselift._memory is not built")

MIB = 1 << 20


@pytest.fixture
def ring():
    return memory.OutputRing()


class TestOutputRing:
    @pytest.mark.parametrize("shape", [(3, 4), (0, 5), (), (7,), (2, 3, 4), (1024, 1024)])
    def test_shape_and_layout(self, ring, shape):
        buffer = ring.take(shape)
        assert buffer.shape == shape and buffer.dtype is torch.float32 and buffer.is_contiguous() and buffer.data_ptr() % 64 == 0
        buffer.fill_(1)
        assert (buffer == 1).all()

    @pytest.mark.parametrize("shape", [(3, 5), (0, 5), (), (2, 3, 4)])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_buffers_of_sixteen_bits(self, ring, dtype, shape):
        buffer = ring.take(shape, dtype)
        assert buffer.shape == shape and buffer.dtype is dtype and buffer.is_contiguous() and buffer.data_ptr() % 64 == 0
        address = buffer.fill_(1).data_ptr()
        assert (buffer == 1).all()
        kept = buffer[..., :2] if shape else buffer
        del buffer
        assert not kept.numel() or ring.take(shape, dtype).data_ptr() != address

    @pytest.mark.parametrize("keep", [
        lambda buffer: buffer, lambda buffer: buffer[3:], lambda buffer: buffer.detach(), lambda buffer: buffer.numpy(),
        lambda buffer: buffer.untyped_storage(), lambda buffer: buffer.view(torch.int32), lambda buffer: [torch.nn.Parameter(buffer)],
    ], ids=["itself", "view", "detached", "numpy", "storage", "dtype view", "parameter"])
    def test_a_buffer_is_reused_only_when_nobody_owns_it(self, ring, keep):
        buffer = ring.take((100, 16))
        address = buffer.data_ptr()
        kept = keep(buffer)
        del buffer
        assert ring.take((100, 16)).data_ptr() != address
        del kept
        gc.collect()
        addresses = {taken.data_ptr() for taken in [ring.take((100, 16)) for _ in range(3)]}
        assert address in addresses

    def test_what_autograd_saves_stays(self, ring):
        buffer = ring.take((64,))
        buffer.copy_(torch.arange(64.0))
        address = buffer.data_ptr()
        factor = torch.ones(64, requires_grad=True)
        product = (buffer * factor).sum()
        del buffer
        other = ring.take((64,))
        assert other.data_ptr() != address
        other.fill_(-1)
        product.backward()
        assert torch.equal(factor.grad, torch.arange(64.0))
        del product, other
        assert address in {taken.data_ptr() for taken in [ring.take((64,)) for _ in range(3)]}

    def test_buffers_outlive_the_ring(self, ring):
        buffer = ring.take((MIB,))
        buffer.fill_(3)
        del ring
        gc.collect()
        assert (buffer == 3).all()

    def test_idle_bytes_are_bounded(self):
        ring = memory.OutputRing(max_idle_bytes=10 * MIB)
        buffers = [ring.take((MIB,)) for _ in range(5)]
        assert ring.idle_bytes == 0 and ring.total_bytes == 20 * MIB
        del buffers
        assert ring.idle_bytes == ring.total_bytes == 8 * MIB
        huge = ring.take((4 * MIB,))
        del huge
        assert ring.total_bytes == 8 * MIB

    def test_another_size_is_another_buffer(self, ring):
        small = ring.take((1024,))
        del small
        large = ring.take((2 * MIB,))
        large.fill_(1)
        assert ring.idle_bytes > 0 and ring.total_bytes >= 8 * MIB

    def test_taking_and_dropping_on_many_threads(self, ring):
        failures = []

        def work(number: int) -> None:
            for step in range(200):
                buffer = ring.take((50 + step % 3, 40))
                buffer.fill_(number)
                failures.extend([number] * bool((buffer != number).any()))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert ring.total_bytes == ring.idle_bytes

    def test_a_copy_of_a_ring_is_a_ring_of_its_own(self, ring):
        buffer = ring.take((1024,))
        for other in (copy.deepcopy(ring), pickle.loads(pickle.dumps(ring))):
            assert other.total_bytes == 0
            assert other.take((1024,)).data_ptr() != buffer.data_ptr()

    def test_wrong_shapes(self, ring):
        with pytest.raises(ValueError, match=r"must not be negative; got \(3, -1\)"):
            ring.take((3, -1))
        with pytest.raises(ValueError, match="at most 8 dimensions; got 9"):
            ring.take((1,) * 9)
        with pytest.raises(MemoryError, match="no memory for"):
            ring.take((2**40, 2**10))


class TestHugePages:
    def test_on_and_off_keep_pointer_and_values(self):
        tensor = torch.arange(4 * MIB, dtype=torch.float32)
        address, values = tensor.data_ptr(), tensor.clone()
        for on in (True, True, False, False, True):
            result = memory.set_huge_pages(tensor, on)
            assert 12 * MIB <= result.requested_bytes <= 16 * MIB
            assert 0 <= result.huge_bytes <= result.requested_bytes
            assert result.huge_bytes == 0 or on
            assert memory.huge_pages(tensor) == result
            assert tensor.data_ptr() == address and torch.equal(tensor, values)

    def test_the_kernel_really_gives_them(self):
        tensor = torch.zeros(4 * MIB)
        if memory.set_huge_pages(tensor, True).huge_bytes == 0:
            pytest.skip("the kernel gives no huge pages here")
        assert memory.set_huge_pages(tensor, True).huge_bytes >= 2 * MIB
        memory.set_huge_pages(tensor, False)
        assert memory.huge_pages(tensor).huge_bytes == 0

    def test_a_set_moves_back_what_it_moved(self):
        mine, given, gone = (torch.zeros(4 * MIB) for _ in range(3))
        if memory.set_huge_pages(given, True).huge_bytes == 0:
            pytest.skip("the kernel gives no huge pages here")
        memory.set_huge_pages(mine, False)
        pages = memory.HugePageSet()
        pages.add({"gone": gone})
        del gone
        pages.replace({"mine": mine, "given": given})
        assert list(pages.found) == ["mine", "given"] and all(each.prevail for each in pages.found.values())
        assert not copy.deepcopy(pages).found
        pages.replace({"given": given})
        assert memory.huge_pages(mine).huge_bytes == 0 and memory.huge_pages(given).prevail
        pages.replace({})
        assert memory.huge_pages(given).prevail and not pages.found

    def test_both_sources_agree(self):
        tensor = torch.zeros(4 * MIB)
        memory.set_huge_pages(tensor, True)
        begin, end = memory._interior(tensor)
        smaps = memory.SMAPS.read_text()
        assert memory._huge_bytes_of_mappings(begin, end, smaps) == memory.huge_pages(tensor).huge_bytes

    def test_bytes_of_mappings(self):
        smaps = ("00001000-00003000 rw-p 00000000 00:00 0 [heap]\nAnonHugePages:         4 kB\n"
                 "00003000-00009000 rw-p 00000000 00:00 0\nSize: 24 kB\nAnonHugePages:        20 kB\n")
        assert memory._huge_bytes_of_mappings(0x1000, 0x9000, smaps) == 24 * 1024
        assert memory._huge_bytes_of_mappings(0x4000, 0x5000, smaps) == 4096
        assert memory._huge_bytes_of_mappings(0xA000, 0xB000, smaps) == 0

    def test_small_and_empty_tensors_have_none(self):
        for tensor in (torch.zeros(1000), torch.zeros(0), torch.zeros(0, 64)):
            assert memory.set_huge_pages(tensor, True) == memory.HugePages(0, 0) == memory.huge_pages(tensor)

    def test_wrong_tensors(self):
        with pytest.raises(ValueError, match="contiguous tensors; got strides"):
            memory.set_huge_pages(torch.zeros(4, 5).t(), True)
        with pytest.raises(TypeError, match="CPU tensors; got one on meta"):
            memory.set_huge_pages(torch.zeros(4, device="meta"), True)
