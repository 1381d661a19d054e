# Tensors as pointers, in about 30 ns each: through torch's C exchange table where it has one (torch >= 2.10), else through Python.

from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t


cdef extern from "api/dlpack_abi.h" nogil:
    int SL_DLPACK_MAJOR
    int SL_DL_CPU
    int SL_DL_INT
    int SL_DL_FLOAT
    int SL_DL_BFLOAT

    ctypedef struct sl_dl_version:
        uint32_t major
        uint32_t minor

    ctypedef struct sl_dl_tensor:
        void* data
        int32_t device_type
        int32_t device_id
        int32_t ndim
        uint8_t dtype_code
        uint8_t dtype_bits
        uint16_t dtype_lanes
        int64_t* shape
        int64_t* strides
        uint64_t byte_offset

    ctypedef struct sl_dl_managed:
        sl_dl_version version
        void* manager_ctx
        void (*deleter)(sl_dl_managed* self) noexcept
        uint64_t flags
        sl_dl_tensor tensor

    ctypedef struct sl_dl_exchange:
        sl_dl_version version
        int (*object_from_managed)(sl_dl_managed* managed, void** object) except -1
        int (*tensor_from_object)(void* object, sl_dl_tensor* out) except -1


# A tensor of one or two dimensions. The fields of dimensions that it does not have are 0.
cdef struct View:
    char* data
    int32_t on_cpu
    int32_t code
    int32_t bits
    int32_t ndim
    int64_t[2] shape
    int64_t[2] strides


cdef inline sl_dl_exchange* exchange_of(object tensor_type):
    """The C table of a tensor type, or NULL where it has none of the major version that is known here."""
    cdef sl_dl_exchange* table
    capsule = getattr(tensor_type, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return NULL
    table = <sl_dl_exchange*>PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
    if table.version.major != SL_DLPACK_MAJOR or table.tensor_from_object == NULL:
        return NULL
    return table


cdef inline int view_tensor(sl_dl_exchange* exchange, object tensor, View* view) except -1:
    """Fills `view` from a torch tensor. Raises where it has no plain memory."""
    cdef sl_dl_tensor raw
    cdef int64_t expected = 1
    cdef int i
    if exchange == NULL:
        return view_through_python(tensor, view)
    exchange.tensor_from_object(<void*>tensor, &raw)
    view.data = <char*>raw.data + raw.byte_offset
    view.on_cpu = raw.device_type == SL_DL_CPU
    view.code, view.bits, view.ndim = raw.dtype_code, raw.dtype_bits, raw.ndim
    if raw.ndim > 2:
        return 0
    view.shape[0] = view.shape[1] = view.strides[0] = view.strides[1] = 0
    for i in range(raw.ndim - 1, -1, -1):
        view.shape[i] = raw.shape[i]
        view.strides[i] = expected if raw.strides == NULL else raw.strides[i]
        expected *= raw.shape[i]
    if raw.data == NULL and expected != 0:
        raise TypeError(f"a {type(tensor).__name__} has no memory")
    return 0


cdef inline int view_through_python(object tensor, View* view) except -1:
    from sparselift.arrays import as_array
    array = as_array(tensor)
    view.data = <char*><uintptr_t>array.pointer
    view.on_cpu = array.device == "cpu"
    view.ndim = len(array.shape)
    view.code = {"int32": SL_DL_INT, "int64": SL_DL_INT, "float32": SL_DL_FLOAT, "float16": SL_DL_FLOAT,
                 "bfloat16": SL_DL_BFLOAT}.get(array.dtype, -1)
    view.bits = 64 if array.dtype == "int64" else 16 if view.code >= 0 and array.dtype.endswith("16") else 32
    if view.ndim > 2:
        return 0
    view.shape[0] = view.shape[1] = view.strides[0] = view.strides[1] = 0
    for i, (size, stride) in enumerate(zip(array.shape, array.strides)):
        view.shape[i], view.strides[i] = size, stride
    return 0


cdef inline bint has_memory(sl_dl_exchange* exchange, object tensor, View* view) except -1:
    """Whether a torch tensor has plain memory on the CPU; then fills `view`."""
    try:
        view_tensor(exchange, tensor, view)
    except (RuntimeError, TypeError, BufferError):
        return False
    return view.on_cpu


cdef inline bint is_int(const View* view):
    return view.code == SL_DL_INT and (view.bits == 64 or view.bits == 32)


cdef inline bint is_float(const View* view):
    return view.code == SL_DL_FLOAT and view.bits == 32


cdef inline bint has_plain_rows(const View* view, int64_t rows, int64_t columns):
    """(rows, columns) with last stride 1; without rows, strides mean nothing."""
    return (view.ndim == 2 and view.shape[0] == rows and view.shape[1] == columns
            and (view.strides[1] == 1 or columns == 1 or rows == 0))


cdef inline bint is_matrix(const View* view, int64_t rows, int64_t columns):
    """(rows, columns) float32 with last stride 1."""
    return is_float(view) and has_plain_rows(view, rows, columns)


cdef inline bint is_table(const View* view, int32_t code, int32_t bits, int64_t rows, int64_t columns):
    """(rows, columns) of a dtype of DLPack, contiguous."""
    return (view.code == code and view.bits == bits and has_plain_rows(view, rows, columns)
            and (view.strides[0] == columns or rows <= 1))


cdef inline bint is_dense(const View* view, int64_t rows, int64_t columns):
    """(rows, columns) float32, contiguous; (rows,) where columns is 0."""
    if columns == 0:
        return is_float(view) and view.ndim == 1 and view.shape[0] == rows and (view.strides[0] == 1 or rows <= 1)
    return is_matrix(view, rows, columns) and (view.strides[0] == columns or rows <= 1)
