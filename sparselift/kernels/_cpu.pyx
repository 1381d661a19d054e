# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Python objects to pointers and back. What fits the C ABI goes straight through; `checks` explains everything else, or makes it fit."""

from cpython.long cimport PyLong_AsLongLong, PyLong_Check
from cpython.object cimport PyObject_TypeCheck, PyTypeObject
from cpython.sequence cimport PySequence_Fast, PySequence_Fast_GET_ITEM, PySequence_Fast_GET_SIZE
from libc.stdint cimport int32_t, int64_t, uintptr_t
from libc.stdlib cimport free

from sparselift._dlpack cimport (
    SL_DL_BFLOAT,
    SL_DL_FLOAT,
    View,
    exchange_of,
    has_memory,
    is_dense,
    is_float,
    is_int,
    is_matrix,
    is_table,
    sl_dl_exchange,
)
from sparselift.kernels._status cimport allocate, check

from threading import Lock

import torch
from torch import Tensor, get_num_threads

from sparselift.dtypes import torch_dtype
from sparselift.kernels import checks
from sparselift.kernels.base import COALESCE_METHODS, PARTITIONS, POOLINGS, STORES, UPDATE_RULES, WEIGHT_DTYPES

cdef sl_dl_exchange* exchange = exchange_of(Tensor)
cdef PyTypeObject* tensor_type = <PyTypeObject*>Tensor
cdef int64_t MAX_LOOKUPS = checks.MAX_LOOKUPS
cdef object CPU = torch.device("cpu")     # results are there, whatever the default device is


sl_openmp_runtime()      # found now, so that a later fork is noticed


def read_through_python(bint always):
    """Whether to read tensors through their Python attributes even where torch has the faster C table; for tests."""
    global exchange
    exchange = NULL if always else exchange_of(Tensor)


def runnable_isas() -> tuple:
    """Names of the instruction sets that run here, slowest first."""
    return tuple(sl_isa_name(isa).decode() for isa in range(SL_NUM_ISAS) if sl_isa_runnable(isa))


def openmp_runtime() -> str:
    """The file of the OpenMP runtime that kernels share with torch; "" where there is none and they run on one thread."""
    return sl_openmp_runtime().decode()


def probe_threads(int32_t threads) -> int:
    """How many threads a parallel region gets when it asks for `threads`."""
    cdef int32_t got
    with nogil:
        got = sl_probe_threads(threads)
    return got


cdef int32_t isa_number(str name) except -1:
    for isa in range(SL_NUM_ISAS):
        if sl_isa_name(isa).decode() == name:
            return isa
    raise ValueError(f"no instruction set is called {name!r}")


cdef object sequence(object given, str what, str unit, Py_ssize_t wanted):
    """`given` as a list or tuple with one entry a unit."""
    fast = PySequence_Fast(given, "a sequence is needed")
    if PySequence_Fast_GET_SIZE(fast) != wanted:
        checks.check_count(what, unit, PySequence_Fast_GET_SIZE(fast), wanted)
    return fast


cdef inline object item(object fast, Py_ssize_t position):
    return <object>PySequence_Fast_GET_ITEM(fast, position)


cdef inline bint viewed(object tensor, View* view) except -1:
    """Whether `tensor` is a tensor with plain memory on the CPU; then fills `view`."""
    return PyObject_TypeCheck(tensor, tensor_type) and has_memory(exchange, tensor, view)


def refuse(str what):
    raise TypeError(f"{what}: this tensor has no memory of its own (a fake tensor, or a subclass that wraps another)")


cdef class Batch:
    """See IndexBatch."""

    cdef sl_batch* handle
    cdef readonly Program program
    cdef tuple _num_bags, _num_lookups

    def __dealloc__(self):
        sl_batch_destroy(self.handle)

    @property
    def num_bags(self) -> tuple:
        if self._num_bags is None:
            self._num_bags = tuple([sl_batch_num_bags(self.handle, f) for f in range(self.program.num_features)])
        return self._num_bags

    @property
    def num_lookups(self) -> tuple:
        if self._num_lookups is None:
            self._num_lookups = tuple([sl_batch_num_lookups(self.handle, f) for f in range(self.program.num_features)])
        return self._num_lookups

    @property
    def nbytes(self) -> int:
        return sl_batch_bytes(self.handle)

    def indices(self, Py_ssize_t feature):
        ids = torch.empty(self.num_lookups[feature], dtype=torch.int64, device=CPU)
        sl_batch_indices(self.handle, feature, <int64_t*><uintptr_t>ids.data_ptr())
        return ids

    def offsets(self, Py_ssize_t feature):
        bounds = torch.empty(self.num_bags[feature] + 1, dtype=torch.int64, device=CPU)
        sl_batch_offsets(self.handle, feature, <int64_t*><uintptr_t>bounds.data_ptr())
        return bounds

    def maxima(self, Py_ssize_t feature):
        cdef Program program = self.program
        if program.feature_specs[feature].pooling != SL_MAX:
            checks.check_max(program.features[feature])
        dim = program.table_specs[program.feature_specs[feature].table].dim
        positions = torch.empty((self.num_bags[feature], dim), dtype=torch.int64, device=CPU)
        sl_batch_maxima(self.handle, feature, <int64_t*><uintptr_t>positions.data_ptr())
        return positions


cdef class Program:
    """See BagProgram."""

    cdef readonly tuple tables, features
    cdef readonly str isa
    cdef object busy                        # held while a kernel runs: what is below and the workspaces serve one call at a time
    cdef object preparing                   # the same for batches that are prepared, which another thread may do meanwhile
    cdef sl_program* handle
    cdef Py_ssize_t num_tables, num_features
    cdef int64_t width                      # columns that a shared output needs; -1: features overlap
    # Static specs, and what is filled anew in every call.
    cdef sl_table* table_specs
    cdef sl_feature* feature_specs
    cdef int64_t* columns
    cdef sl_index_input* inputs
    cdef void** weights
    cdef sl_state* states
    cdef sl_rule* rules
    cdef sl_matrix* outputs
    cdef sl_segment* segments
    cdef sl_matrix* grads
    cdef float* scales
    cdef Py_ssize_t segment_capacity

    def __cinit__(self, tables, features, str isa):
        cdef Py_ssize_t t, f
        cdef int32_t number
        cdef sl_status status
        checks.check_specs(tables, features)
        self.busy, self.preparing = Lock(), Lock()
        self.tables, self.features, self.isa = tuple(tables), tuple(features), isa
        self.num_tables, self.num_features = len(self.tables), len(self.features)
        self.table_specs = <sl_table*>allocate(self.num_tables, sizeof(sl_table))
        self.feature_specs = <sl_feature*>allocate(self.num_features, sizeof(sl_feature))
        self.columns = <int64_t*>allocate(self.num_features, sizeof(int64_t))
        self.inputs = <sl_index_input*>allocate(self.num_features, sizeof(sl_index_input))
        self.weights = <void**>allocate(self.num_tables, sizeof(void*))
        self.states = <sl_state*>allocate(self.num_tables, sizeof(sl_state))
        self.rules = <sl_rule*>allocate(self.num_tables, sizeof(sl_rule))
        self.outputs = <sl_matrix*>allocate(self.num_features, sizeof(sl_matrix))
        for t in range(self.num_tables):
            self._describe_table(self.tables[t], self.table_specs + t)
        for f in range(self.num_features):
            self._describe_feature(self.features[f], self.feature_specs + f)
            self.columns[f] = self.features[f].column
        self._measure_columns()
        number = isa_number(isa)
        status = sl_program_create(self.table_specs, self.num_tables, self.feature_specs, self.num_features, number, &self.handle)
        check(status)

    def __dealloc__(self):
        sl_program_destroy(self.handle)
        free(self.table_specs)
        free(self.feature_specs)
        free(self.columns)
        free(self.inputs)
        free(self.weights)
        free(self.states)
        free(self.rules)
        free(self.outputs)
        free(self.segments)
        free(self.grads)
        free(self.scales)

    def __reduce__(self):
        return Program, (self.tables, self.features, self.isa)

    cdef int _describe_table(self, object table, sl_table* spec) except -1:
        spec.rows, spec.dim = table.rows, table.dim
        spec.coalesce, spec.partition = COALESCE_METHODS.index(table.knobs.coalesce), PARTITIONS.index(table.knobs.partition)
        spec.prefetch, spec.dedup = min(table.knobs.prefetch, 2**20), table.knobs.dedup
        spec.stores, spec.dtype = STORES.index(table.knobs.stores), WEIGHT_DTYPES.index(table.dtype)
        return 0

    cdef int _describe_feature(self, object feature, sl_feature* spec) except -1:
        spec.table, spec.pooling, spec.weighted = feature.table, POOLINGS.index(feature.pooling), feature.weighted
        spec.include_last_offset = feature.include_last_offset
        spec.padding_idx = -1 if feature.padding_idx is None else feature.padding_idx
        return 0

    cdef int _measure_columns(self) except -1:
        self.width = 0
        for feature in sorted(self.features, key=lambda feature: feature.column):
            if feature.column < self.width:
                self.width = -1
                break
            self.width = feature.column + self.tables[feature.table].dim
        return 0

    @property
    def workspace_bytes(self) -> int:
        """Memory that the program keeps between calls, apart from its batches."""
        with self.busy, self.preparing:         # which both grow it; nobody takes one of them inside of the other
            return sl_program_workspace_bytes(self.handle)

    # ------------------------------------------------------------------------------------------------ prepare

    def prepare(self, indices, offsets, weights=None):
        with self.preparing:
            return self._prepare(indices, offsets, weights, get_num_threads())

    def prepare_ahead(self, indices, offsets, weights=None):
        cdef Batch batch
        cdef sl_status status
        with self.preparing:
            batch = self._prepare(indices, offsets, weights, 1)
            with nogil:
                status = sl_arrange(self.handle, batch.handle)
            check(status)
            return batch

    cdef Batch _prepare(self, object indices, object offsets, object weights, int32_t threads):
        cdef Py_ssize_t f
        cdef sl_status status
        cdef sl_fault fault
        cdef Batch batch = Batch.__new__(Batch)
        cdef object fast_weights = None
        fast_indices = sequence(indices, "indices", "feature", self.num_features)
        fast_offsets = sequence(offsets, "offsets", "feature", self.num_features)
        if weights is not None:
            fast_weights = sequence(weights, "weights", "feature", self.num_features)
        kept = []           # copies of inputs that could not be read where they are
        for f in range(self.num_features):
            self._read_ids(f, item(fast_indices, f))
            self._read_weights(f, None if fast_weights is None else item(fast_weights, f), kept)
            self._read_offsets(f, item(fast_offsets, f))
        with nogil:
            status = sl_prepare(self.handle, self.inputs, threads, &batch.handle, &fault)
        if status == SL_BAD_ID or status == SL_BAD_OFFSET:
            spec = self.features[fault.feature]
            if status == SL_BAD_ID:
                raise checks.id_error(spec, self.tables[spec.table], fault.position, fault.value)
            raise checks.offset_error(spec, fault.position, fault.value, fault.previous, self.inputs[fault.feature].num_ids)
        check(status)
        batch.program = self
        return batch

    cdef int _read_ids(self, Py_ssize_t f, object indices) except -1:
        cdef View view
        cdef sl_index_input* given = self.inputs + f
        if not viewed(indices, &view) or not is_int(&view) or view.ndim != 1 or view.shape[0] > MAX_LOOKUPS:
            name = self.features[f].name
            checks.check_vector(name, "indices", indices, checks.INDEX_DTYPES)
            checks.check_lookup_count(f"feature {name!r}", len(indices))
            refuse(f"feature {name!r}: indices")
        given.ids, given.num_ids, given.id_stride = view.data, view.shape[0], view.strides[0]
        given.ids_are_64 = view.bits == 64
        return 0

    cdef int _read_offsets(self, Py_ssize_t f, object offsets) except -1:
        cdef View view
        cdef sl_index_input* given = self.inputs + f
        if PyLong_Check(offsets):
            given.bag_length = PyLong_AsLongLong(offsets)
            if given.bag_length != 1:
                checks.check_bag_length(self.features[f], offsets, given.num_ids)
            return 0
        if not viewed(offsets, &view) or not is_int(&view) or view.ndim != 1:
            name = self.features[f].name
            checks.check_vector(name, "offsets", offsets, checks.INDEX_DTYPES)
            refuse(f"feature {name!r}: offsets")
        if view.shape[0] == 0 or self.feature_specs[f].pooling == SL_NONE:
            checks.check_offset_count(self.features[f], view.shape[0], given.num_ids)
        given.bag_length = 0
        given.offsets, given.num_offsets, given.offset_stride = view.data, view.shape[0], view.strides[0]
        given.offsets_are_64 = view.bits == 64
        return 0

    cdef int _read_weights(self, Py_ssize_t f, object weights, list kept) except -1:
        cdef View view
        cdef sl_index_input* given = self.inputs + f
        if weights is None and not self.feature_specs[f].weighted:
            return 0
        # Memory of a tensor with the negative bit set is not its values.
        if (not self.feature_specs[f].weighted or not viewed(weights, &view) or not is_float(&view) or view.ndim != 1
                or view.shape[0] != given.num_ids or weights.is_neg()):
            checks.check_weights(self.features[f], weights, given.num_ids)
            weights = weights.resolve_neg()
            kept.append(weights)
            if not viewed(weights, &view):
                refuse(f"feature {self.features[f].name!r}: per-sample weights")
        given.weights, given.weight_stride = <float*>view.data, view.strides[0]
        return 0

    # ------------------------------------------------------------------------------------------------ forward

    def forward(self, tables, Batch batch not None, out):
        with self.busy:
            self._check_batch(batch)
            self._read_tables(tables)
            self._forward(batch, out)

    cdef int _forward(self, Batch batch, object out) except -1:
        cdef int32_t threads = get_num_threads()
        cdef sl_status status
        self._read_outputs(batch, out)
        with nogil:
            status = sl_forward(self.handle, <const void* const*>self.weights, batch.handle, self.outputs, threads)
        check(status)
        return 0

    def look_up(self, tables, indices, offsets, weights=None):
        cdef Batch batch
        with self.preparing:
            batch = self._prepare(indices, offsets, weights, get_num_threads())
        with self.busy:
            self._read_tables(tables)
            out = torch.empty((sl_batch_num_bags(batch.handle, 0), self.width), dtype=torch.float32, device=CPU)
            self._forward(batch, out)
        return batch, out

    def fits(self, tables) -> bool:
        cdef View view
        cdef Py_ssize_t t
        fast = sequence(tables, "tables", "table", self.num_tables)
        for t in range(self.num_tables):
            if not self._read_table(item(fast, t), self.table_specs + t, &view):
                return False
        return True

    cdef bint _read_table(self, object tensor, const sl_table* spec, View* view) except -1:
        """Whether `tensor` holds the weights of a table; then fills `view`."""
        return viewed(tensor, view) and is_table(view, SL_DL_BFLOAT if spec.dtype == SL_BFLOAT16 else SL_DL_FLOAT,
                                                 32 if spec.dtype == SL_FLOAT32 else 16, spec.rows, spec.dim)

    cdef int _check_batch(self, Batch batch) except -1:
        if batch.program is not self:
            raise ValueError("the batch was not prepared by this program")
        return 0

    cdef int _read_tables(self, object tables, bint with_rule=False) except -1:
        """All of them, or those that the rules just read are for."""
        cdef View view
        cdef Py_ssize_t t
        fast = sequence(tables, "tables", "table", self.num_tables)
        for t in range(self.num_tables):
            if with_rule and self.rules[t].kind == SL_RULE_ABSENT:
                self.weights[t] = NULL
                continue
            tensor = item(fast, t)
            if not self._read_table(tensor, self.table_specs + t, &view):
                spec = self.tables[t]
                checks.check_dense(f"weight of table {spec.name!r}", tensor, (spec.rows, spec.dim), torch_dtype(spec.dtype))
                refuse(f"weight of table {spec.name!r}")
            self.weights[t] = view.data
        return 0

    cdef bint _one_batch_size(self, Batch batch, int64_t bags):
        cdef Py_ssize_t f
        for f in range(self.num_features):
            if sl_batch_num_bags(batch.handle, f) != bags:
                return False
        return True

    cdef bint _read_shared(self, Batch batch, object shared, sl_matrix* parts) except -1:
        """Whether `shared` is a (B, width) matrix that holds all features; then fills `parts`."""
        cdef View view
        cdef Py_ssize_t f
        if not viewed(shared, &view) or self.width < 0 or view.ndim != 2 or view.shape[1] < self.width:
            return False
        if not is_matrix(&view, view.shape[0], view.shape[1]) or not self._one_batch_size(batch, view.shape[0]):
            return False
        for f in range(self.num_features):
            parts[f].data = <float*>view.data + self.columns[f]
            parts[f].row_stride = view.strides[0]
        return True

    cdef bint _read_part(self, Batch batch, Py_ssize_t f, object tensor, sl_matrix* part) except -1:
        cdef View view
        if not viewed(tensor, &view):
            return False
        if not is_matrix(&view, sl_batch_num_bags(batch.handle, f), self.table_specs[self.feature_specs[f].table].dim):
            return False
        part.data, part.row_stride = <float*>view.data, view.strides[0]
        return True

    cdef int _read_outputs(self, Batch batch, object out) except -1:
        cdef Py_ssize_t f
        if isinstance(out, Tensor) and self._read_shared(batch, out, self.outputs):
            return 0
        outputs = out
        if isinstance(out, Tensor):
            outputs = checks.feature_outputs(self, batch, out)
        fast = sequence(outputs, "outputs", "feature", self.num_features)
        for f in range(self.num_features):
            if not self._read_part(batch, f, item(fast, f), self.outputs + f):
                checks.feature_outputs(self, batch, outputs)
                refuse(f"output of feature {self.features[f].name!r}")
        return 0

    def weight_grad(self, tables, Batch batch not None, Py_ssize_t feature, grad):
        cdef int32_t threads = get_num_threads()
        cdef sl_matrix part
        cdef sl_status status
        cdef float* out
        with self.busy:
            self._check_batch(batch)
            self._read_tables(tables)
            if not self._read_part(batch, feature, grad, &part):
                spec = self.features[feature]
                checks.check_rows(f"gradient of feature {spec.name!r}", grad, (batch.num_bags[feature], self.tables[spec.table].dim))
                grad = grad.detach().resolve_neg().contiguous()
                if not self._read_part(batch, feature, grad, &part):
                    refuse(f"gradient of feature {spec.name!r}")
            result = torch.empty(batch.num_lookups[feature], dtype=torch.float32, device=CPU)
            out = <float*><uintptr_t>result.data_ptr()
            with nogil:
                status = sl_weight_grad(self.handle, self.weights[self.feature_specs[feature].table], batch.handle, feature, part, out,
                                        threads)
            check(status)
            return result

    # ------------------------------------------------------------------------------------------------ update

    def update(self, tables, states, rules, segments):
        cdef int32_t threads = get_num_threads()
        cdef sl_status status
        cdef Py_ssize_t count
        with self.busy:
            self._read_rules(states, rules)
            self._read_tables(tables, True)
            kept = []
            count = self._read_segments(segments, kept)
            with nogil:
                status = sl_update(self.handle, self.weights, self.states, self.rules, self.segments, count, threads)
            check(status)

    cdef int _read_rules(self, object states, object rules) except -1:
        cdef Py_ssize_t t
        cdef object previous = None
        cdef sl_rule parsed
        if len(rules) != self.num_tables or len(states) != self.num_tables:
            checks.check_rules(self, states, rules)
        fast_rules, fast_states = PySequence_Fast(rules, "a sequence is needed"), PySequence_Fast(states, "a sequence is needed")
        for t in range(self.num_tables):
            rule = item(fast_rules, t)
            if rule is None:
                self.rules[t].kind = SL_RULE_ABSENT
                continue
            if rule is not previous:
                checks.check_rule(self.tables[t], rule)
                parsed.kind, parsed.maximize = 1 + UPDATE_RULES.index(rule.kind), rule.maximize
                parsed.lr, parsed.eps, parsed.weight_decay = rule.lr, rule.eps, rule.weight_decay
                parsed.first_gain, parsed.second_gain = 1 - rule.betas[0], 1 - rule.betas[1]
                parsed.stochastic, parsed.noise_key = rule.noise_key is not None, rule.noise_key or 0
                previous = rule
            if ((self.table_specs[t].coalesce == SL_COALESCE_NONE and parsed.kind != SL_SGD)
                    or (parsed.stochastic and self.table_specs[t].dtype == SL_FLOAT32)):
                checks.check_rule(self.tables[t], rule)
            self.rules[t] = parsed
            if parsed.kind != SL_SGD and not self._read_state(t, parsed.kind, item(fast_states, t)):
                checks.check_rules(self, states, rules)
                refuse(f"state of table {self.tables[t].name!r}")
        return 0

    cdef bint _read_state(self, Py_ssize_t t, int32_t kind, object state) except -1:
        """Whether `state` is what the rule keeps; then fills `states`."""
        cdef View view
        cdef int64_t rows = self.table_specs[t].rows, columns = 0 if kind == SL_ROWWISE_ADAGRAD else self.table_specs[t].dim
        first = state
        if kind == SL_ADAM:
            if not isinstance(state, tuple) or len(state) != 2:
                return False
            first = state[0]
            if not viewed(state[1], &view) or not is_dense(&view, rows, columns):
                return False
            self.states[t].second = <float*>view.data
        if not viewed(first, &view) or not is_dense(&view, rows, columns):
            return False
        self.states[t].first = <float*>view.data
        return True

    cdef Py_ssize_t _read_segments(self, object segments, list kept) except -1:
        cdef Py_ssize_t count, s
        fast = PySequence_Fast(segments, "a sequence is needed")
        count = PySequence_Fast_GET_SIZE(fast)
        self._reserve_segments(count)
        for s in range(count):
            self._read_segment(s, item(fast, s), kept)
        return count

    cdef int _reserve_segments(self, Py_ssize_t count) except -1:
        if count <= self.segment_capacity:
            return 0
        free(self.segments)
        free(self.grads)
        free(self.scales)
        self.segments, self.grads, self.scales, self.segment_capacity = NULL, NULL, NULL, 0
        self.segments = <sl_segment*>allocate(count, sizeof(sl_segment))
        self.grads = <sl_matrix*>allocate(count * self.num_features, sizeof(sl_matrix))
        self.scales = <float*>allocate(count * self.num_tables, sizeof(float))
        self.segment_capacity = count
        return 0

    cdef int _read_segment(self, Py_ssize_t s, object segment, list kept) except -1:
        cdef Py_ssize_t t
        cdef sl_matrix* parts = self.grads + s * self.num_features
        cdef float* scales = self.scales + s * self.num_tables
        cdef object batch = segment.batch
        if not isinstance(batch, Batch):
            raise ValueError("the batch was not prepared by this program")
        self._check_batch(batch)
        self.segments[s].batch, self.segments[s].grads, self.segments[s].scales = (<Batch>batch).handle, parts, NULL
        if segment.scales is not None:
            fast = sequence(segment.scales, "scales", "table", self.num_tables)
            for t in range(self.num_tables):
                scales[t] = item(fast, t)
            self.segments[s].scales = scales
        grad = segment.grad
        if not isinstance(grad, Tensor) or not self._read_shared(batch, grad, parts):
            self._read_grads(batch, segment, parts, kept)
        return 0

    cdef int _read_grads(self, Batch batch, object segment, sl_matrix* parts, list kept) except -1:
        """One gradient a feature; a copy of those whose last stride is not 1."""
        cdef Py_ssize_t f
        grads = segment.grad if not isinstance(segment.grad, Tensor) else checks.feature_grads(self, segment)
        fast = sequence(grads, "gradients", "feature", self.num_features)
        for f in range(self.num_features):
            grad = item(fast, f)
            if grad is None:
                parts[f].data = NULL
                continue
            if not self._read_part(batch, f, grad, parts + f):
                checks.feature_grads(self, segment)
                grad = grad.detach().resolve_neg().contiguous()
                kept.append(grad)
                if not self._read_part(batch, f, grad, parts + f):
                    refuse(f"gradient of feature {self.features[f].name!r}")
        return 0

    def expanded_grad(self, Py_ssize_t table, segments):
        kept = []
        with self.busy:
            return self._gradient(table, self._read_segments(segments, kept), False, False)

    def coalesced_grad(self, Py_ssize_t table, segments):
        kept = []
        with self.busy:
            return self._gradient(table, self._read_segments(segments, kept), True, False)

    def lookup_grads(self, Py_ssize_t table, Batch batch not None, grad):
        with self.busy:
            self._check_batch(batch)
            self._reserve_segments(1)
            if not self._read_shared(batch, grad, self.grads):
                checks.split_columns("the gradient", self, batch, grad)
                refuse("the gradient")
            self.segments[0].batch, self.segments[0].grads, self.segments[0].scales = batch.handle, self.grads, NULL
            return self._gradient(table, 1, False, True)

    cdef object _gradient(self, Py_ssize_t table, Py_ssize_t num_segments, bint coalesced, bint as_matrix):
        cdef int64_t count = 0
        cdef int32_t threads = get_num_threads()
        cdef sl_status status
        cdef int64_t* rows
        cdef float* grads
        with nogil:
            status = (sl_count_rows if coalesced else sl_count_lookups)(self.handle, table, self.segments, num_segments, &count)
        check(status)
        if as_matrix:
            ids = torch.empty((1, count), dtype=torch.int64, device=CPU)
        else:
            ids = torch.empty(count, dtype=torch.int64, device=CPU)
        values = torch.empty(count, self.table_specs[table].dim, dtype=torch.float32, device=CPU)
        rows, grads = <int64_t*><uintptr_t>ids.data_ptr(), <float*><uintptr_t>values.data_ptr()
        with nogil:
            if coalesced:
                status = sl_coalesced_grad(self.handle, table, self.segments, num_segments, rows, grads)
            else:
                status = sl_expanded_grad(self.handle, table, self.segments, num_segments, rows, grads, threads)
        check(status)
        return ids, values
