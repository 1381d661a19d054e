"""What is particular to the CPU backend. What every backend does is in tests/contract."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sparselift.dtypes import torch_dtype
from sparselift.errors import KernelError
from sparselift.kernels import BACKENDS, available_backends, cpu, get_backend
from sparselift.kernels.base import FeatureSpec, KernelBackend, Segment, TableKnobs, TableSpec, UpdateRule

needs_extension = pytest.mark.skipif(not cpu.runnable_isas(), reason="the CPU kernels are not built")
STARTS = torch.tensor([0, 2, 5])


@pytest.fixture
def backend() -> KernelBackend:
    return get_backend("cpu")


class TestNames:
    def test_the_reference_needs_nothing(self):
        assert get_backend("reference").name == get_backend("reference").variant() == "reference"
        assert available_backends()[0] == "reference"

    def test_an_unknown_name(self):
        with pytest.raises(ValueError, match=r"must be one of reference, cpu, .*; got 'gpu'"):
            get_backend("gpu")

    @needs_extension
    def test_every_available_name_gives_a_backend(self):
        assert set(available_backends()) <= set(BACKENDS)
        for name in available_backends():
            assert name in (get_backend(name).name, f"cpu-{get_backend(name).variant()}")

    @needs_extension
    def test_the_fastest_instruction_set_is_the_default(self, monkeypatch):
        monkeypatch.delenv(cpu.ISA_VARIABLE, raising=False)
        assert get_backend().variant() == cpu.runnable_isas()[-1]

    @needs_extension
    def test_the_environment_chooses_another(self, monkeypatch):
        monkeypatch.setenv(cpu.ISA_VARIABLE, "portable")
        assert get_backend().variant() == "portable"
        assert get_backend(f"cpu-{cpu.runnable_isas()[-1]}").variant() == cpu.runnable_isas()[-1]
        monkeypatch.setenv(cpu.ISA_VARIABLE, "mmx")
        with pytest.raises(KernelError, match=r"must be one that runs here \(portable.*\); got 'mmx'"):
            get_backend()

    def test_a_missing_extension_is_named(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "sparselift.kernels._cpu", None)
        monkeypatch.delattr("sparselift.kernels._cpu", raising=False)
        with pytest.raises(KernelError, match=r"sparselift\.kernels\._cpu cannot be imported.*pip install"):
            get_backend()
        assert available_backends() == ("reference",)


@needs_extension
class TestThreads:
    def test_they_are_torchs(self, backend):
        """One OpenMP runtime is loaded for both, and a region gets as many threads as torch's."""
        threadpoolctl = pytest.importorskip("threadpoolctl")
        extension = cpu.extension()
        torch.set_num_threads(2)
        torch.ones(1 << 20).add_(1)
        assert extension.probe_threads(2) == 2 and extension.probe_threads(1) == 1
        files = {pool["filepath"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "openmp"}
        assert backend.openmp_runtime() and any(same_file(backend.openmp_runtime(), file) for file in files)

    def test_no_thread_is_added(self, backend):
        torch.set_num_threads(2)
        torch.ones(1 << 20).add_(1)
        before = threads_of_this_process()
        program = backend.compile([TableSpec("t", 1000, 64)], [FeatureSpec("f", 0)])
        batch = program.prepare([torch.arange(4000) % 1000], [2])
        out = torch.empty(2000, 64)
        program.forward([torch.ones(1000, 64)], batch, out)
        program.update([torch.ones(1000, 64)], [None], [UpdateRule("sgd", 1.0)], [Segment(batch, out)])
        assert (out == 2).all() and threads_of_this_process() == before

    def test_programs_of_several_threads(self, backend):
        wrong = []

        def work() -> None:
            torch.set_num_threads(2)
            program = backend.compile([TableSpec("t", 500, 32)], [FeatureSpec("f", 0)])
            table = torch.ones(500, 32)
            for step in range(20):
                batch = program.prepare([torch.arange(3000) % 500], [6])
                out = torch.empty(500, 32)
                program.forward([table], batch, out)
                wrong.extend([step] * bool((out != 6 - 6 * 6 * step).any()))
                program.update([table], [None], [UpdateRule("sgd", 1.0)], [Segment(batch, torch.ones(500, 32))])

        workers = [threading.Thread(target=work) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not wrong


def same_file(one: str, other: str) -> bool:
    with open(one, "rb") as first, open(other, "rb") as second:
        return first.read() == second.read()


def threads_of_this_process() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))


@needs_extension
class TestTensors:
    @pytest.fixture
    def through_python(self) -> Iterator[None]:
        cpu.extension().read_through_python(True)
        yield
        cpu.extension().read_through_python(False)

    def test_without_the_c_table_of_torch(self, backend, through_python):
        program = backend.compile([TableSpec("t", 9, 3)], [FeatureSpec("f", 0, weighted=True)])
        table = torch.nn.Parameter(torch.arange(27.0).view(9, 3))
        ids, weights = torch.tensor([[1, 0], [8, 0], [2, 0], [2, 0], [0, 0]])[:, 0], torch.tensor([1.0, 2, 3, 4, 5])
        batch = program.prepare([ids], [STARTS[:2].int()], [weights])
        out = torch.empty(2, 5)
        program.forward([table], batch, out[:, 1:4])
        assert out[:, 1:4].tolist() == [[51, 54, 57], [42, 54, 66]]
        program.update([table], [None], [UpdateRule("sgd", 1.0)], [Segment(batch, torch.ones(2, 3))])
        assert table[:, 0].tolist() == [-5, 2, -1, 9, 12, 15, 18, 21, 22]
        for wrong in (ids.half(), ids.bool(), torch.eye(3).to_sparse()):
            with pytest.raises(TypeError):
                program.prepare([wrong], [STARTS], [weights])

    def test_tensors_without_memory(self, backend):
        program = backend.compile([TableSpec("t", 9, 3)], [FeatureSpec("f", 0)])
        with FakeTensorMode():
            fake = torch.zeros(5, dtype=torch.int64)
        with pytest.raises(TypeError, match="feature 'f': indices: this tensor has no memory"):
            program.prepare([fake], [STARTS])
        with pytest.raises(TypeError, match=r"indices must be strided; got torch\.sparse_coo"):
            program.prepare([torch.eye(3, dtype=torch.int64).to_sparse()[0]], [STARTS])
        batch = program.prepare([torch.arange(5)], [STARTS])
        with pytest.raises(TypeError, match=r"weight of table 't' must be strided; got torch\.sparse_coo"):
            program.forward([torch.zeros(9, 3).to_sparse()], batch, torch.empty(3, 3))

    def test_lazily_negated_tensors(self, backend):
        """Their memory holds the opposite of their values."""
        program = backend.compile([TableSpec("t", 9, 2)], [FeatureSpec("f", 0, weighted=True)])
        negated = torch.tensor([1j, 2j, 3j, 4j, 5j]).conj().imag
        assert negated.is_neg()
        batch = program.prepare([torch.arange(5)], [STARTS], [negated])
        table, out = torch.ones(9, 2), torch.empty(3, 2)
        program.forward([table], batch, out)
        assert out[:, 0].tolist() == [-3, -12, 0]
        grad = torch.full((3, 2), 1j).conj().imag
        program.update([table], [None], [UpdateRule("sgd", 1.0)], [Segment(batch, [grad])])
        assert table[:, 0].tolist() == [0, -1, -2, -3, -4, 1, 1, 1, 1]


class TestHalfRows:
    @pytest.mark.parametrize("rule", [UpdateRule("sgd", 0.1), UpdateRule("adagrad", 0.1), UpdateRule("rowwise_adagrad", 0.1),
                                      UpdateRule("adam", 0.1)], ids=lambda rule: rule.kind)
    @pytest.mark.parametrize("isa", [name for name in BACKENDS if name.startswith("cpu-")])
    def test_rows_of_every_width_are_stepped_as_float32_and_rounded_once(self, isa, rule):
        """A row is covered by blocks of 1 to 16 vectors, with code of their own each."""
        if isa not in available_backends():
            pytest.skip(f"{isa}: its instruction set is missing here")
        for dim in (*range(1, 34), 40, 41, 48, 49, 56, 57, 64, 65, 72, 80, 100, 112, 128, 144, 200, 256, 257, 300):
            grad = torch.randn(6, dim, generator=torch.Generator().manual_seed(dim))
            for name, coalesce in itertools.product(("float16", "bfloat16"), ("chain", "dense")):
                half = torch.linspace(-1, 1, 4 * dim).view(4, dim).to(torch_dtype(name))
                stepped = []
                for table, dtype in ((half.clone(), name), (half.float(), "float32")):
                    program = get_backend(isa).compile([TableSpec("t", 4, dim, dtype, TableKnobs(coalesce))], [FeatureSpec("f", 0)])
                    state = [torch.ones(4) if rule.kind == "rowwise_adagrad" else torch.ones(4, dim) for _ in range(2)]
                    given = {"sgd": None, "adam": tuple(state)}.get(rule.kind, state[0])
                    batch = program.prepare([torch.tensor([0, 2, 3, 0, 2, 2])], [1])
                    program.update([table], [given], [rule], [Segment(batch, grad)])
                    stepped.append((table.to(half.dtype), *state))
                assert all(map(torch.equal, *stepped)) and not torch.equal(stepped[0][0], half)


@needs_extension
def test_more_lookups_than_positions_are_refused(backend: KernelBackend) -> None:
    """The same backward again and again: no row is touched."""
    program = backend.compile([TableSpec("t", 3, 4)], [FeatureSpec("f", 0)])
    table = torch.ones(3, 4)
    segments = [Segment(program.prepare([torch.zeros(1 << 17, dtype=torch.int64)], [1 << 17]), torch.ones(1, 4))] * (1 << 14)
    with pytest.raises(ValueError, match=r"more than 2\*\*31 - 2 lookups of one table in one update"):
        program.update([table], [None], [UpdateRule("sgd", 1.0)], segments)
    assert (table == 1).all()


@needs_extension
class TestMemory:
    def test_a_program_grows_no_further(self, backend):
        program = backend.compile([TableSpec("t", 5000, 16, knobs=TableKnobs(dedup=True))], [FeatureSpec("f", 0)])
        assert program.workspace_bytes == 0
        table, sizes = torch.zeros(5000, 16), set()
        for seed in range(6):
            ids = torch.randint(0, 5000, (4000,), generator=torch.Generator().manual_seed(seed))
            batch = program.prepare([ids], [4])
            out = torch.empty(1000, 16)
            program.forward([table], batch, out)
            program.update([table], [None], [UpdateRule("sgd", 1.0)], [Segment(batch, out)])
            sizes.add(program.workspace_bytes)
        assert len(sizes) == 1 and 4 * 5000 <= sizes.pop() < 10 * 4 * 5000 * 16

    def test_a_batch_outlives_its_program(self, backend):
        program = backend.compile([TableSpec("t", 50, 16)], [FeatureSpec("f", 0)])
        batch = program.prepare([torch.arange(50)], [5])
        del program
        assert batch.indices(0).tolist() == list(range(50)) and batch.offsets(0).tolist() == list(range(0, 51, 5))
