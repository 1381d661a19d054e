# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The dot interaction: tensors to pointers, the lock dropped, the status checked."""

from cpython.object cimport PyObject_TypeCheck, PyTypeObject
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc

from sparselift._dlpack cimport SL_DL_FLOAT, View, exchange_of, sl_dl_exchange, view_tensor
from sparselift.kernels._cpu cimport SL_NUM_ISAS, sl_isa_name, sl_isa_runnable, sl_matrix, sl_openmp_runtime, sl_status
from sparselift.kernels._status cimport allocate, check

from torch import Tensor, get_num_threads

from sparselift.errors import KernelError

cdef sl_dl_exchange* exchange = exchange_of(Tensor)
cdef PyTypeObject* tensor_type = <PyTypeObject*>Tensor

sl_openmp_runtime()      # found now, so that a later fork is noticed


cdef int32_t isa_number(str name) except -1:
    for isa in range(SL_NUM_ISAS):
        if sl_isa_name(isa).decode() == name and sl_isa_runnable(isa):
            return isa
    raise KernelError(f"the instruction set {name!r} is missing here")


cdef int read_matrix(object tensor, str what, sl_matrix* matrix, int64_t* rows, int64_t* columns) except -1:
    """A float32 matrix on the CPU whose last stride is 1, and its size."""
    cdef View view
    if not PyObject_TypeCheck(tensor, tensor_type):
        raise TypeError(f"{what} must be a torch.Tensor; got {type(tensor).__name__}")
    view_tensor(exchange, tensor, &view)
    if not view.on_cpu or view.code != SL_DL_FLOAT or view.bits != 32:
        raise TypeError(f"{what} must be a float32 tensor on the CPU; got {tensor.dtype} on {tensor.device}")
    if view.ndim != 2:
        raise ValueError(f"{what} must have two dimensions; got shape {tuple(tensor.shape)}")
    if view.shape[1] > 1 and view.shape[0] > 0 and view.strides[1] != 1:
        raise ValueError(f"{what} must have a last stride of 1; got strides {tensor.stride()}")
    matrix.data, matrix.row_stride = <float*>view.data, view.strides[0]
    rows[0], columns[0] = view.shape[0], view.shape[1]
    return 0


cdef class Interaction:
    """See InteractionKernel. Calls share nothing: any number of threads may make them."""

    cdef readonly object spec
    cdef readonly str isa
    cdef int32_t number
    cdef int64_t width
    cdef sl_interaction shape
    cdef sl_pair_run* runs

    def __cinit__(self, spec, str isa):
        self.spec, self.isa, self.number, self.width = spec, isa, isa_number(isa), spec.width
        self.shape.num_vectors, self.shape.dim = spec.num_vectors, spec.dim
        self.shape.passed = -1 if spec.passed is None else spec.passed
        self.runs = <sl_pair_run*>allocate(spec.num_vectors, sizeof(sl_pair_run))
        column = 0 if spec.passed is None else spec.dim
        for place, (row, first, count) in enumerate(spec.runs()):
            self.runs[place] = sl_pair_run(row, first, count, column)
            self.shape.num_runs += 1
            column += count
        self.shape.runs = self.runs

    def __dealloc__(self):
        free(self.runs)

    def __reduce__(self):
        return Interaction, (self.spec, self.isa)

    cdef sl_matrix* _read_vectors(self, vectors, str what, int64_t* batch) except NULL:
        """V matrices (B, D). To be freed. `batch` -1: not known yet."""
        cdef int64_t v, count = 0, last, rows, columns, dim = self.shape.dim
        cdef sl_matrix whole
        cdef sl_matrix* found = <sl_matrix*>allocate(self.shape.num_vectors, sizeof(sl_matrix))
        try:
            for place, tensor in enumerate(vectors):
                read_matrix(tensor, f"{what}[{place}]", &whole, &rows, &columns)
                batch[0] = rows if batch[0] < 0 else batch[0]
                if rows != batch[0] or columns % dim:
                    raise ValueError(f"{what}[{place}] must have {batch[0]} rows, and columns of vectors of {dim}; got shape "
                                     f"{tuple(tensor.shape)}")
                last = count + columns // dim
                for v in range(count, min(last, self.shape.num_vectors)):
                    found[v].data, found[v].row_stride = whole.data + (v - count) * dim, whole.row_stride
                count = last
            if count != self.shape.num_vectors:
                raise ValueError(f"{what} must hold {self.shape.num_vectors} vectors; got {count}")
        except BaseException:
            free(found)
            raise
        return found

    cdef sl_matrix* _read_grads(self, vectors, vector_grads, int64_t* batch) except NULL:
        """The same for gradients, of which some may not be wanted."""
        cdef sl_matrix* found
        cdef int64_t v, count = 0
        found = self._read_vectors([vector if grad is None else grad for vector, grad in zip(vectors, vector_grads)], "vector_grads", batch)
        for vector, grad in zip(vectors, vector_grads):
            if grad is not None and grad.shape != vector.shape:
                free(found)
                raise ValueError(f"vector_grads must have the shapes of the vectors; got {tuple(grad.shape)} for {tuple(vector.shape)}")
            for v in range(count, count + vector.shape[1] // self.shape.dim):
                if grad is None:
                    found[v].data = NULL
            count += vector.shape[1] // self.shape.dim
        return found

    def forward(self, vectors, out):
        self._run(vectors, out, None)

    def backward(self, vectors, grad, vector_grads):
        self._run(vectors, grad, vector_grads)

    cdef int _run(self, vectors, output, vector_grads) except -1:
        cdef int32_t threads = get_num_threads(), isa = self.number
        cdef int64_t batch = -1, rows, columns
        cdef sl_interaction shape = self.shape
        cdef sl_matrix* grads = NULL
        cdef sl_matrix* given
        cdef sl_matrix whole
        cdef void* workspace = NULL
        cdef sl_status status
        given = self._read_vectors(vectors, "vectors", &batch)
        try:
            what = "out" if vector_grads is None else "grad"
            read_matrix(output, what, &whole, &rows, &columns)
            if rows != batch or columns != self.width:
                raise ValueError(f"{what} must have shape ({batch}, {self.width}); got {tuple(output.shape)}")
            if vector_grads is not None:
                grads = self._read_grads(vectors, vector_grads, &batch)
            shape.batch = batch
            workspace = malloc(sl_interaction_workspace_bytes(&shape, threads))
            if workspace == NULL:
                raise MemoryError()
            with nogil:
                if grads == NULL:
                    status = sl_interaction_forward(&shape, given, whole, workspace, isa, threads)
                else:
                    status = sl_interaction_backward(&shape, given, whole, grads, workspace, isa, threads)
            check(status)
        finally:
            free(workspace)
            free(grads)
            free(given)
        return 0
