# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The CUDA kernels by address: integers in (pointers, sizes, a stream), work on the stream out. Nothing here knows torch, allocates
device memory or waits. Arguments are checked by `cuda.py`; whoever calls this module directly answers for them.
"""

from libc.stdint cimport int32_t, int64_t, uintptr_t
from libc.stdlib cimport free

from sparselift.kernels._cpu cimport sl_feature, sl_index_input, sl_matrix, sl_rule, sl_status
from sparselift.kernels._cuda_abi cimport (
    SL_BAD_ID, SL_CUDA_STATUS_BYTES, SL_OK, SL_RULE_ABSENT, sl_cuda_batch,
    sl_cuda_batch_bytes, sl_cuda_batch_destroy, sl_cuda_batch_indices, sl_cuda_batch_maxima, sl_cuda_batch_num_bags,
    sl_cuda_batch_num_lookups, sl_cuda_batch_offsets, sl_cuda_bucketize, sl_cuda_bucketize_workspace_bytes, sl_cuda_buffer_fault,
    sl_cuda_check_device, sl_cuda_clear_fault, sl_cuda_coalesced_grad, sl_cuda_context, sl_cuda_count_lookups, sl_cuda_dedup,
    sl_cuda_dedup_workspace_bytes, sl_cuda_default_shape, sl_cuda_device_type, sl_cuda_expanded_grad, sl_cuda_fault,
    sl_cuda_fault_create, sl_cuda_fault_destroy, sl_cuda_forward, sl_cuda_forward_workspace_bytes, sl_cuda_gradient_workspace_bytes,
    sl_cuda_interaction_backward, sl_cuda_interaction_forward, sl_cuda_interaction_workspace_bytes, sl_cuda_pack,
    sl_cuda_pack_workspace_bytes, sl_cuda_prepare, sl_cuda_program, sl_cuda_program_create, sl_cuda_program_destroy, sl_cuda_regroup,
    sl_cuda_regroup_workspace_bytes, sl_cuda_segment, sl_cuda_shape, sl_cuda_table, sl_cuda_unpack, sl_cuda_unpack_workspace_bytes,
    sl_cuda_update, sl_cuda_update_workspace_bytes, sl_cuda_weight_grad, sl_cuda_weights, sl_error_text,
)
from sparselift.kernels._exchange cimport sl_boundaries, sl_buckets, sl_ids, sl_owners, sl_part, sl_range, sl_term
from sparselift.kernels._interaction cimport sl_interaction, sl_pair_run
from sparselift.kernels._status cimport allocate, check, checked_size

STATUS_BYTES = SL_CUDA_STATUS_BYTES


def device_type() -> int:
    """The DLPack device type of the memory that kernels read: 2 (CUDA), or 1 (CPU) under the emulator."""
    return sl_cuda_device_type()


def check_device() -> None:
    """Raises KernelError where no kernel can run, with CUDA's name for the reason."""
    check(sl_cuda_check_device())


def default_shape() -> dict:
    """How kernels are laid out unless a program says otherwise: the fields of sl_cuda_shape."""
    return sl_cuda_default_shape()


cdef class Batch:
    """The ids of one batch, in memory that the caller keeps for as long as the batch is used."""

    cdef sl_cuda_batch* handle

    def __dealloc__(self):
        sl_cuda_batch_destroy(self.handle)

    def num_bags(self, Py_ssize_t feature) -> int:
        return sl_cuda_batch_num_bags(self.handle, feature)

    def num_lookups(self, Py_ssize_t feature) -> int:
        return sl_cuda_batch_num_lookups(self.handle, feature)


cdef class Program:
    """The compiled lookups of one group.

    Parameters
    ----------
    tables     (rows, dim, dtype, coalesce, vector_bytes, bags_per_group) a table; dtype 0 float32, 1 float16, 2 bfloat16; coalesce 0 what
               suits the update, 2 sort, 3 dense; the last two 0: as `shape` says
    features   (table, pooling, weighted, include_last_offset, padding_idx or -1) a feature; pooling 0 sum, 1 mean, 2 none, 3 max
    shape      fields of sl_cuda_shape that differ from the default
    status     device memory of STATUS_BYTES
    stream     where that memory is cleared
    """

    cdef sl_cuda_program* handle
    cdef sl_cuda_context context
    cdef Py_ssize_t num_tables, num_features
    # Filled anew in every call.
    cdef sl_index_input* inputs
    cdef sl_cuda_weights* weights
    cdef sl_rule* rules
    cdef sl_matrix* outputs
    cdef sl_cuda_segment* segments
    cdef sl_matrix* grads
    cdef float* scales
    cdef Py_ssize_t segment_capacity

    def __cinit__(self, tables, features, dict shape, uintptr_t status, uintptr_t stream):
        cdef Py_ssize_t i
        cdef sl_cuda_table* table_specs
        cdef sl_feature* feature_specs
        cdef sl_cuda_shape given
        self.num_tables, self.num_features = len(tables), len(features)
        self.inputs = <sl_index_input*>allocate(self.num_features, sizeof(sl_index_input))
        self.weights = <sl_cuda_weights*>allocate(self.num_tables, sizeof(sl_cuda_weights))
        self.rules = <sl_rule*>allocate(self.num_tables, sizeof(sl_rule))
        self.outputs = <sl_matrix*>allocate(self.num_features, sizeof(sl_matrix))
        given = sl_cuda_shape(shape.get("vector_bytes", 0), shape.get("block_threads", 0), shape.get("bags_per_group", 0),
                              shape.get("loads_in_flight", 0), shape.get("chunk_lookups", 0))
        table_specs = <sl_cuda_table*>allocate(self.num_tables, sizeof(sl_cuda_table))
        feature_specs = <sl_feature*>allocate(self.num_features, sizeof(sl_feature))
        try:
            for i in range(self.num_tables):
                (table_specs[i].rows, table_specs[i].dim, table_specs[i].dtype, table_specs[i].coalesce, table_specs[i].vector_bytes,
                 table_specs[i].bags_per_group) = tables[i]
            for i in range(self.num_features):
                (feature_specs[i].table, feature_specs[i].pooling, feature_specs[i].weighted, feature_specs[i].include_last_offset,
                 feature_specs[i].padding_idx) = features[i]
            check(sl_cuda_program_create(table_specs, self.num_tables, feature_specs, self.num_features, &given, &self.handle))
        finally:
            free(table_specs)
            free(feature_specs)
        check(sl_cuda_fault_create(&self.context.fault))
        self.context.status = <void*>status
        self.clear_fault(stream)

    def __dealloc__(self):
        sl_cuda_program_destroy(self.handle)
        if self.context.fault != NULL:
            sl_cuda_fault_destroy(self.context.fault)
        free(self.inputs)
        free(self.weights)
        free(self.rules)
        free(self.outputs)
        free(self.segments)
        free(self.grads)
        free(self.scales)

    def fault(self):
        """The first fault since the last `clear_fault` that the device has told of: None, or (whether it is an id, feature, position,
        value, previous, count)."""
        cdef sl_cuda_fault* fault = self.context.fault
        cdef int32_t status = (<volatile int32_t*>&fault.status)[0]
        if status == SL_OK:
            return None
        return status == SL_BAD_ID, fault.feature, fault.position, fault.value, fault.previous, fault.count

    def clear_fault(self, uintptr_t stream):
        self.context.stream = <void*>stream
        check(sl_cuda_clear_fault(&self.context))

    # ------------------------------------------------------------------------------------------------ batches

    cdef int _read_inputs(self, object inputs) except -1:
        cdef Py_ssize_t f
        cdef uintptr_t ids, offsets, weights
        cdef sl_index_input* given
        for f in range(self.num_features):
            given = self.inputs + f
            (ids, given.num_ids, given.id_stride, given.ids_are_64, offsets, given.num_offsets, given.offset_stride, given.offsets_are_64,
             given.bag_length, weights, given.weight_stride) = inputs[f]
            given.ids, given.offsets, given.weights = <const void*>ids, <const void*>offsets, <const float*>weights
        return 0

    def batch_bytes(self, inputs) -> int:
        """Device memory that `prepare` takes for these inputs: tuples of the fields of sl_index_input, one a feature."""
        self._read_inputs(inputs)
        return checked_size(sl_cuda_batch_bytes(self.handle, self.inputs))

    def prepare(self, inputs, uintptr_t memory, uintptr_t stream) -> Batch:
        cdef Batch batch = Batch.__new__(Batch)
        cdef sl_status status
        self._read_inputs(inputs)
        self._use(stream, 0, 0)
        with nogil:
            status = sl_cuda_prepare(self.handle, self.inputs, <void*>memory, &self.context, &batch.handle)
        check(status)
        return batch

    def read_indices(self, Batch batch not None, Py_ssize_t feature, uintptr_t out, uintptr_t stream):
        """(K,) int64 ids into device memory."""
        self._use(stream, 0, 0)
        check(sl_cuda_batch_indices(batch.handle, feature, <int64_t*>out, &self.context))

    def read_offsets(self, Batch batch not None, Py_ssize_t feature, uintptr_t out, uintptr_t stream):
        """(B + 1,) int64 boundaries into device memory."""
        self._use(stream, 0, 0)
        check(sl_cuda_batch_offsets(batch.handle, feature, <int64_t*>out, &self.context))

    def read_maxima(self, Batch batch not None, Py_ssize_t feature, uintptr_t out, uintptr_t stream):
        """(B, D) int64 positions into device memory; the feature's pooling is max."""
        self._use(stream, 0, 0)
        check(sl_cuda_batch_maxima(batch.handle, feature, <int64_t*>out, &self.context))

    cdef int _use(self, uintptr_t stream, uintptr_t workspace, int64_t workspace_bytes) except -1:
        self.context.stream, self.context.workspace, self.context.workspace_bytes = <void*>stream, <void*>workspace, workspace_bytes
        return 0

    # ------------------------------------------------------------------------------------------------ forward

    cdef int _read_matrix(self, object given, sl_matrix* matrix) except -1:
        """(pointer, row stride), or None."""
        cdef uintptr_t data = 0
        matrix.row_stride = 0
        if given is not None:
            data, matrix.row_stride = given
        matrix.data = <float*>data
        return 0

    def forward_workspace_bytes(self, Batch batch not None) -> int:
        return checked_size(sl_cuda_forward_workspace_bytes(self.handle, batch.handle))

    def forward(self, tables, Batch batch not None, outputs, uintptr_t workspace, int64_t workspace_bytes, uintptr_t stream):
        """`tables` are pointers, `outputs` (pointer, row stride) a feature."""
        cdef Py_ssize_t i
        cdef uintptr_t data
        cdef sl_status status
        for i in range(self.num_tables):
            data = tables[i]
            self.weights[i].data = <const void*>data
        for i in range(self.num_features):
            self._read_matrix(outputs[i], self.outputs + i)
        self._use(stream, workspace, workspace_bytes)
        with nogil:
            status = sl_cuda_forward(self.handle, self.weights, batch.handle, self.outputs, &self.context)
        check(status)

    def weight_grad(self, uintptr_t table, Batch batch not None, Py_ssize_t feature, grad, uintptr_t out, uintptr_t stream):
        cdef sl_matrix given
        cdef sl_status status
        self._read_matrix(grad, &given)
        self._use(stream, 0, 0)
        with nogil:
            status = sl_cuda_weight_grad(self.handle, <const void*>table, batch.handle, feature, given, <float*>out, &self.context)
        check(status)

    # ------------------------------------------------------------------------------------------------ gradients

    cdef Py_ssize_t _read_segments(self, object segments) except -1:
        """(batch, a matrix or None a feature, a scale a table or None) a segment."""
        cdef Py_ssize_t count = len(segments), s, i
        cdef sl_matrix* grads
        cdef float* scales
        self._reserve_segments(count)
        for s in range(count):
            batch, given_grads, given_scales = segments[s]
            grads, scales = self.grads + s * self.num_features, self.scales + s * self.num_tables
            for i in range(self.num_features):
                self._read_matrix(given_grads[i], grads + i)
            if given_scales is not None:
                for i in range(self.num_tables):
                    scales[i] = given_scales[i]
            self.segments[s].batch, self.segments[s].grads = (<Batch?>batch).handle, grads
            self.segments[s].scales = NULL if given_scales is None else scales
        return count

    cdef int _reserve_segments(self, Py_ssize_t count) except -1:
        if count <= self.segment_capacity:
            return 0
        free(self.segments)
        free(self.grads)
        free(self.scales)
        self.segments, self.grads, self.scales, self.segment_capacity = NULL, NULL, NULL, 0
        self.segments = <sl_cuda_segment*>allocate(count, sizeof(sl_cuda_segment))
        self.grads = <sl_matrix*>allocate(count * self.num_features, sizeof(sl_matrix))
        self.scales = <float*>allocate(count * self.num_tables, sizeof(float))
        self.segment_capacity = count
        return 0

    cdef int _read_rules(self, object rules) except -1:
        """The fields of sl_rule a table, in order, or None; kind 1 sgd, 2 adagrad, 3 rowwise_adagrad, 4 adam."""
        cdef Py_ssize_t t
        cdef sl_rule* rule
        for t in range(self.num_tables):
            rule = self.rules + t
            if rules[t] is None:
                rule.kind = SL_RULE_ABSENT
            else:
                rule.kind, rule.maximize, rule.lr, rule.eps, rule.weight_decay, rule.first_gain, rule.second_gain, \
                    rule.stochastic, rule.noise_key = rules[t]
        return 0

    def update_workspace_bytes(self, rules, segments) -> int:
        cdef Py_ssize_t count = self._read_segments(segments)
        self._read_rules(rules)
        return checked_size(sl_cuda_update_workspace_bytes(self.handle, self.rules, self.segments, count))

    def update(self, tables, states, rules, segments, uintptr_t workspace, int64_t workspace_bytes, uintptr_t stream):
        """`tables` are pointers and `states` two a table, 0 where there is none."""
        cdef Py_ssize_t t, count = self._read_segments(segments)
        cdef uintptr_t data, first, second
        cdef sl_status status
        self._read_rules(rules)
        for t in range(self.num_tables):
            data = tables[t]
            first, second = states[t]
            self.weights[t].data = <const void*>data
            self.weights[t].state.first, self.weights[t].state.second = <float*>first, <float*>second
        self._use(stream, workspace, workspace_bytes)
        with nogil:
            status = sl_cuda_update(self.handle, self.weights, self.rules, self.segments, count, &self.context)
        check(status)

    def count_lookups(self, Py_ssize_t table, segments) -> int:
        """How many rows the outputs of the two functions below must hold."""
        cdef Py_ssize_t count = self._read_segments(segments)
        return checked_size(sl_cuda_count_lookups(self.handle, table, self.segments, count))

    def gradient_workspace_bytes(self, Py_ssize_t table, segments) -> int:
        cdef Py_ssize_t count = self._read_segments(segments)
        return checked_size(sl_cuda_gradient_workspace_bytes(self.handle, table, self.segments, count))

    def gradient(self, Py_ssize_t table, segments, bint coalesced, uintptr_t ids, uintptr_t grads, uintptr_t total, uintptr_t workspace,
                 int64_t workspace_bytes, uintptr_t stream):
        """Ids, gradients and their number into device memory: of distinct rows (`coalesced`), or of every lookup."""
        cdef Py_ssize_t count = self._read_segments(segments)
        cdef sl_status status
        self._use(stream, workspace, workspace_bytes)
        with nogil:
            if coalesced:
                status = sl_cuda_coalesced_grad(self.handle, table, self.segments, count, <int64_t*>ids, <float*>grads, <int64_t*>total,
                                                &self.context)
            else:
                status = sl_cuda_expanded_grad(self.handle, table, self.segments, count, <int64_t*>ids, <float*>grads, <int64_t*>total,
                                               &self.context)
        check(status)


# ---------------------------------------------------------------------------------------------------- around an exchange


cdef sl_cuda_context context_of(uintptr_t workspace, int64_t workspace_bytes, uintptr_t stream):
    return sl_cuda_context(<void*>stream, NULL, NULL, <void*>workspace, workspace_bytes)


cdef class BufferFault:
    """Where `unpack` notes a header that is not the expected one.

    Parameters
    ----------
    status   device memory of STATUS_BYTES, which must live as long
    stream   where that memory is cleared
    """

    cdef sl_cuda_context context

    def __cinit__(self, uintptr_t status, uintptr_t stream):
        check(sl_cuda_fault_create(&self.context.fault))
        self.context.status = <void*>status
        self._clear(stream)

    def __dealloc__(self):
        if self.context.fault != NULL:
            sl_cuda_fault_destroy(self.context.fault)

    cdef int _clear(self, uintptr_t stream) except -1:
        self.context.stream = <void*>stream
        return check(sl_cuda_clear_fault(&self.context))

    def take(self, uintptr_t stream):
        """What the device has told of since the last call, in words, or None."""
        if sl_cuda_buffer_fault(self.context.fault) == SL_OK:
            return None
        text = sl_error_text().decode()
        self._clear(stream)
        return text


def dedup_workspace_bytes(int64_t num_ids) -> int:
    return checked_size(sl_cuda_dedup_workspace_bytes(num_ids))


def dedup(uintptr_t ids, int64_t num_ids, bint are_64, int64_t rows, uintptr_t distinct, uintptr_t slots, uintptr_t count,
          uintptr_t workspace, int64_t workspace_bytes, uintptr_t stream):
    """Distinct ids (int64), which of them each id is (int32), and how many there are (int64); see sparselift_exchange.h."""
    cdef sl_ids given = sl_ids(<const void*>ids, num_ids, rows, are_64)
    cdef sl_cuda_context context = context_of(workspace, workspace_bytes, stream)
    cdef sl_status status
    with nogil:
        status = sl_cuda_dedup(&given, <int64_t*>distinct, <int32_t*>slots, <int64_t*>count, &context)
    check(status)


def bucketize_workspace_bytes(int64_t num_ids) -> int:
    return checked_size(sl_cuda_bucketize_workspace_bytes(num_ids))


def bucketize(uintptr_t ids, int64_t num_ids, bint are_64, int64_t rows, uintptr_t bounds, int64_t num_bags, bint bounds_are_64,
              int64_t num_owners, int64_t rows_per_owner, bint modulo, uintptr_t owned_rows, uintptr_t sources, uintptr_t places,
              uintptr_t lengths, uintptr_t workspace, int64_t workspace_bytes, uintptr_t stream):
    """Rows (int64) by owner, where each came from and went to (int32), and lengths (owners, bags) int32; see sparselift_exchange.h."""
    cdef sl_ids given = sl_ids(<const void*>ids, num_ids, rows, are_64)
    cdef sl_boundaries bags = sl_boundaries(<const void*>bounds, num_bags, bounds_are_64)
    cdef sl_owners owners = sl_owners(num_owners, rows_per_owner, modulo)
    cdef sl_buckets buckets = sl_buckets(<int64_t*>owned_rows, <int32_t*>sources, <int32_t*>places, <int32_t*>lengths)
    cdef sl_cuda_context context = context_of(workspace, workspace_bytes, stream)
    cdef sl_status status
    with nogil:
        status = sl_cuda_bucketize(&given, &bags, &owners, &buckets, &context)
    check(status)


def pack_workspace_bytes(int64_t num_parts) -> int:
    return checked_size(sl_cuda_pack_workspace_bytes(num_parts))


def pack(uintptr_t parts, int64_t num_parts, uintptr_t buffer, int64_t buffer_bytes, uintptr_t workspace, int64_t workspace_bytes,
         uintptr_t stream):
    """Rows of all parts into the buffer. `parts`: an array of sl_part in host memory."""
    cdef sl_cuda_context context = context_of(workspace, workspace_bytes, stream)
    cdef sl_status status
    with nogil:
        status = sl_cuda_pack(<const sl_part*>parts, num_parts, <void*>buffer, buffer_bytes, &context)
    check(status)


def unpack_workspace_bytes(int64_t num_parts) -> int:
    return checked_size(sl_cuda_unpack_workspace_bytes(num_parts))


def unpack(uintptr_t parts, int64_t num_parts, uintptr_t buffer, int64_t buffer_bytes, BufferFault fault not None, uintptr_t workspace,
           int64_t workspace_bytes, uintptr_t stream):
    """The reverse. What is wrong with the header goes to `fault`."""
    cdef sl_cuda_context context = context_of(workspace, workspace_bytes, stream)
    cdef sl_status status
    context.status, context.fault = fault.context.status, fault.context.fault
    with nogil:
        status = sl_cuda_unpack(<const sl_part*>parts, num_parts, <const void*>buffer, buffer_bytes, &context)
    check(status)


def regroup_workspace_bytes(int64_t num_ranges, int64_t num_terms) -> int:
    return checked_size(sl_cuda_regroup_workspace_bytes(num_ranges, num_terms))


def regroup(uintptr_t ranges, int64_t num_ranges, uintptr_t terms, int64_t num_terms, uintptr_t given, uintptr_t results, int64_t batch,
            uintptr_t workspace, int64_t workspace_bytes, uintptr_t stream):
    """Arrays of sl_range, sl_term and, twice, sl_matrix, in host memory."""
    cdef sl_cuda_context context = context_of(workspace, workspace_bytes, stream)
    cdef sl_status status
    with nogil:
        status = sl_cuda_regroup(<const sl_range*>ranges, num_ranges, <const sl_term*>terms, num_terms, <const sl_matrix*>given,
                                 <const sl_matrix*>results, batch, &context)
    check(status)


# ---------------------------------------------------------------------------------------------------- dot interaction


cdef sl_matrix* matrices_of(given) except NULL:
    """(pointer, row stride) each, or None. To be freed."""
    cdef Py_ssize_t i
    cdef uintptr_t data
    cdef sl_matrix* matrices = <sl_matrix*>allocate(len(given), sizeof(sl_matrix))
    for i, matrix in enumerate(given):
        if matrix is not None:
            data, matrices[i].row_stride = matrix
            matrices[i].data = <float*>data
    return matrices


cdef class Interaction:
    """The pairs of an interaction: see sparselift_cuda_interaction.h.

    Parameters
    ----------
    num_vectors, dim   V, D
    passed             a vector that is passed on, or -1
    runs               (row, first, count, column) a run of pairs
    """

    cdef sl_interaction shape
    cdef sl_pair_run* runs

    def __cinit__(self, int64_t num_vectors, int64_t dim, int64_t passed, runs):
        cdef Py_ssize_t i
        self.runs = <sl_pair_run*>allocate(len(runs), sizeof(sl_pair_run))
        for i, (row, first, count, column) in enumerate(runs):
            self.runs[i] = sl_pair_run(row, first, count, column)
        self.shape = sl_interaction(0, num_vectors, dim, passed, self.runs, len(runs))

    def __dealloc__(self):
        free(self.runs)

    def workspace_bytes(self) -> int:
        """Device memory that a call takes, of any batch size."""
        return checked_size(sl_cuda_interaction_workspace_bytes(&self.shape))

    def run(self, int64_t batch, vectors, out, vector_grads, uintptr_t workspace, int64_t workspace_bytes, uintptr_t stream):
        """`vectors` are V (pointer, row stride); `out` is one: written, or, with `vector_grads` (V of them, or None), the gradient."""
        cdef sl_interaction shape = self.shape
        cdef sl_cuda_context context = context_of(workspace, workspace_bytes, stream)
        cdef sl_matrix* given = NULL
        cdef sl_matrix* output = NULL
        cdef sl_matrix* grads = NULL
        cdef sl_status status
        shape.batch = batch
        try:
            given, output = matrices_of(vectors), matrices_of([out])
            if vector_grads is not None:
                grads = matrices_of(vector_grads)
            with nogil:
                if grads == NULL:
                    status = sl_cuda_interaction_forward(&shape, given, output[0], &context)
                else:
                    status = sl_cuda_interaction_backward(&shape, given, output[0], grads, &context)
            check(status)
        finally:
            free(given)
            free(output)
            free(grads)
