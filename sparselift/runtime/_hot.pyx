"""The loops over tables that run in every step. In Python they cost more than the kernels of a small batch.

Nothing but step counts is read or written in memory of a tensor; every other fact comes through torch's public interfaces.
"""

from cpython.object cimport PyObject
from libc.stdint cimport int64_t

from sparselift._dlpack cimport (
    SL_DL_BFLOAT,
    SL_DL_FLOAT,
    View,
    exchange_of,
    has_memory,
    is_dense,
    is_float,
    is_table as is_rows,
    sl_dl_exchange,
)

from torch import Tensor, bfloat16, float32, is_grad_enabled, no_grad
from torch.nn import Parameter

from sparselift.dtypes import torch_dtype
from sparselift.grad import GradState, PendingGrad, accumulated


cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(PyObject*)


cdef sl_dl_exchange* exchange = exchange_of(Tensor)


cpdef long long version_of(tensor) except? -3:
    """How often a tensor was written to; -1 for None."""
    if tensor is None:
        return -1
    try:
        return tensor._version
    except RuntimeError:        # inference tensors have none: outside of inference mode they cannot be written to
        return -2


cdef bint same(a, b) except -1:
    """Whether two tensors are the same view of the same memory."""
    if a is b:
        return True
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return False
    return (a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
            and a.device == b.device)


cdef class Served:
    """A result of the prelude that waits for its module, and the tensors that it is the result for."""

    cdef object indices, offsets, sample_weights, weight, output
    cdef long long indices_version, offsets_version, sample_weights_version, weight_version
    cdef bint grad_mode

    cdef bint is_for(self, indices, offsets, sample_weights) except -1:
        """Whether these are the very tensors, none of them written to since."""
        return (same(indices, self.indices) and same(offsets, self.offsets) and same(sample_weights, self.sample_weights)
                and version_of(indices) == self.indices_version and version_of(offsets) == self.offsets_version
                and version_of(sample_weights) == self.sample_weights_version)


# What a lookup means, besides its arguments: attributes of nn.EmbeddingBag and nn.Embedding.
OPTIONS = ("mode", "padding_idx", "include_last_offset", "sparse", "max_norm", "scale_grad_by_freq")
cdef tuple names_of_options = OPTIONS


def options_of(module):
    """The options of an embedding module; None for those that it does not have."""
    return tuple([module.__dict__.get(name) for name in names_of_options])


cdef class Slots:
    """Results that wait for one module. `options` are those that it had when the plan was applied."""

    cdef list waiting
    cdef object module
    cdef tuple options

    def __init__(self, module, options):
        self.waiting = []
        self.module, self.options = module, options

    def __len__(self):
        return len(self.waiting)

    def clear(self):
        self.waiting.clear()

    def take(self, indices, offsets, sample_weights):
        """The result for these very tensors and the module's weight, none of them written to since; None if there is none.

        Each result is handed out once; none, if somebody changed an option of the module.
        """
        cdef Served served
        cdef Py_ssize_t place
        for place in range(len(self.waiting)):
            served = <Served>self.waiting[place]
            if (served.is_for(indices, offsets, sample_weights) and served.weight is self.module._parameters.get("weight")
                    and version_of(served.weight) == served.weight_version and served.grad_mode == is_grad_enabled()
                    and self.has_its_options()):
                del self.waiting[place]
                return served.output
        return None

    cpdef bint has_its_options(self) except -1:
        """Whether the module is still what it was when the plan was applied."""
        cdef dict now = self.module.__dict__
        cdef Py_ssize_t place
        for place in range(len(names_of_options)):
            option = now.get(names_of_options[place])
            if option is not self.options[place] and option != self.options[place]:
                return False
        return True


def clear_all(slots):
    """Drop what no module asked for."""
    for each in slots:
        if (<Slots>each).waiting:
            (<Slots>each).waiting.clear()


def serve(slots, indices, offsets, sample_weights, weights, outputs):
    """Leave each output with its module. All sequences have one entry a feature."""
    cdef Served served
    cdef Py_ssize_t place
    cdef bint grad_mode = is_grad_enabled()
    for place in range(len(outputs)):
        served = Served.__new__(Served)
        served.indices, served.offsets, served.sample_weights = indices[place], offsets[place], sample_weights[place]
        served.weight, served.output, served.grad_mode = weights[place], outputs[place], grad_mode
        served.indices_version = version_of(served.indices)
        served.offsets_version = version_of(served.offsets)
        served.sample_weights_version = version_of(served.sample_weights)
        served.weight_version = version_of(served.weight)
        (<Slots>slots[place]).waiting.append(served)


cdef class Inputs:
    """The tensors that a batch was prepared from, as they were."""

    cdef list tensors
    cdef list versions

    def __init__(self, indices, offsets, sample_weights):
        self.tensors = [*indices, *offsets, *sample_weights]
        self.versions = [version_of(tensor) for tensor in self.tensors]

    def difference(self, indices, offsets, sample_weights):
        """How others differ from them; empty: they are the very tensors, none of them written to since."""
        cdef Py_ssize_t place = 0
        for group in (indices, offsets, sample_weights):
            for tensor in group:
                if not same(tensor, self.tensors[place]):
                    return "the forward was given other tensors"
                if version_of(tensor) != self.versions[place]:
                    return "its tensors were written to afterwards"
                place += 1
        return ""


def label(pieces, is_lookup, kind, buffer):
    """The pieces that are lookups, of class `kind` and knowing their place in `buffer`."""
    cdef Py_ssize_t place
    cdef list lookups = []
    for place in range(len(pieces)):
        if is_lookup[place]:
            piece = pieces[place]
            piece.__class__ = kind
            piece._part = (buffer, place)
            lookups.append(piece)
    return lookups


def are_labelled(parts, is_lookup, kind, buffer):
    """Whether these are all pieces of `buffer`, each in its place, as `label` left them; where no lookup belongs, anything may be."""
    cdef Py_ssize_t place
    cdef tuple own
    if len(parts) != len(is_lookup):
        return False
    for place in range(len(parts)):
        if is_lookup[place]:
            piece = parts[place]
            if type(piece) is not kind:
                return False
            own = piece._part
            if own[0] is not buffer or own[1] != place:
                return False
    return True


def plain_weights(owners):
    """The weights of these modules, if all are parameters whose gradient nobody watches; else None.

    A hook must see the gradient arrive, so torch has to carry it.
    """
    cdef list found = []
    for owner in owners:
        weight = owner._parameters.get("weight")
        if type(weight) is not Parameter or weight._backward_hooks or weight._post_accumulate_grad_hooks:
            return None
        found.append(weight)
    return found


def trainable(weights):
    """Positions of the weights that require a gradient."""
    cdef Py_ssize_t place
    return tuple([place for place in range(len(weights)) if weights[place].requires_grad])


cdef class TableGrad:
    """The persistent gradient of one table.

    The same `PendingGrad` is attached again after every `zero_grad(set_to_none=True)`, since making one costs as much as
    the rest of the backward. One that somebody else holds (logged, say) is left to them, and a new one made.
    """

    cdef readonly object handle, state

    def __init__(self, table):
        self.state = GradState(table.name, (table.rows, table.dim), table.sparse, torch_dtype(table.dtype))
        self.handle = PendingGrad(self.state)

    cdef bint is_held(self):
        """Whether anybody but us refers to the gradient while it is attached nowhere. Ours are `handle`, `state` and the handle's own."""
        return Py_REFCNT(<PyObject*>self.handle) > 1 or Py_REFCNT(<PyObject*>self.state) > 2

    def renew(self):
        """Leave the gradient to whoever holds it."""
        self.state = GradState(self.state.table, self.state.shape, self.state.sparse, self.state.dtype)
        self.handle = PendingGrad(self.state)

    def alone(self, arrival):
        """One backward's gradient as torch would have computed it."""
        state = GradState(self.state.table, self.state.shape, self.state.sparse, self.state.dtype)
        state.add(arrival)
        return state.tensor()

    def settle(self, weight):
        """Replace our pending gradient by the tensor that torch would have there."""
        if weight.grad is self.handle:
            weight.grad = self.state.keep()


def accumulate(places, weights, tables, arrival, bint may_be_watched):
    """Add one backward's gradient to `.grad` of the tables at `places`, as AccumulateGrad does.

    `may_be_watched`: a hook may have been registered since the forward, which looks up no weight that has one.
    """
    cdef TableGrad table
    cdef tuple alone = (arrival,)
    for place in places:
        table = <TableGrad>tables[place]
        weight = weights[place]
        if may_be_watched and (weight._backward_hooks or weight._post_accumulate_grad_hooks):
            watched(weight, table, arrival)
            continue
        grad = weight.grad
        if grad is None:
            if table.is_held():
                table.renew()
            state = table.state
            state.arrived = alone
            state.scales = None
            state.value = None
            weight.grad = table.handle
        elif grad is table.handle:
            table.state.add(arrival)
        elif type(grad) is PendingGrad and grad._state.table == table.state.table:
            grad._state.add(arrival)
        else:
            weight.grad = accumulated(grad, table.alone(arrival))


def watched(weight, TableGrad table, arrival):
    """Accumulate a gradient that hooks of the weight see, as torch's engine does."""
    new = table.alone(arrival)
    for hook in list((weight._backward_hooks or {}).values()):
        changed = hook(new)
        if changed is not None:
            new = changed
    grad = weight.grad
    weight.grad = new if grad is None else accumulated(grad, new)
    for hook in list((weight._post_accumulate_grad_hooks or {}).values()):
        hook(weight)


def pending(params):
    """(weight, gradient, its state) of the parameters whose gradient is pending."""
    cdef list found = []
    for weight in params:
        grad = weight.grad
        if type(grad) is PendingGrad:
            found.append((weight, grad, grad._state))
    return found


cdef class Arranged:
    """The pending tables of one param group, arranged for one call of their program: a place a table of the program."""

    cdef readonly tuple arrived
    cdef readonly list pairs        # (weight, gradient)
    cdef readonly list weights      # a place; None where a table is not among them
    cdef readonly list states       # a place; what the rule keeps: a tensor, Adam's two, or None
    cdef readonly list steps        # a place; how many a table has had before, where the rule keeps a state, else None
    cdef readonly list counters     # the optimizer's step counts that are tensors,
    cdef readonly list numbered     # and its states in which they are numbers
    cdef readonly bint sparse


def is_table(weight, state):
    """Whether a weight is what kernels update by a gradient's state: a contiguous matrix of its shape and dtype on the CPU."""
    return holds_rows(weight, state.dtype, state.shape[0], state.shape[1])


cdef bint holds_rows(tensor, dtype, int64_t rows, int64_t columns) except -1:
    """Whether a tensor has the memory of a contiguous (rows, columns) of one of the kernels' dtypes on the CPU."""
    cdef View view
    if dtype is float32:
        return holds(tensor, rows, columns)
    return has_memory(exchange, tensor, &view) and is_rows(&view, SL_DL_BFLOAT if dtype is bfloat16 else SL_DL_FLOAT, 16, rows, columns)


cdef bint holds(tensor, int64_t rows, int64_t columns) except -1:
    """Whether a tensor has the memory of a contiguous float32 (rows, columns) on the CPU, or (rows,) where columns is 0."""
    cdef View view
    return has_memory(exchange, tensor, &view) and is_dense(&view, rows, columns)


def arrange(params, states, keys, dims, fused):
    """The usual step of a param group: every pending gradient is what the same backwards of one program left, and is of a fused table.

    None where there is any other pending gradient, or none at all: then each table takes a decision of its own. `states` is the
    optimizer's; `keys` names what the rule keeps there, in tensors of the weight's first `dims` dimensions.
    """
    cdef Arranged group = Arranged.__new__(Arranged)
    cdef dict place
    cdef int64_t rows, columns
    group.pairs, group.counters, group.numbered = [], [], []
    for weight in params:
        grad = weight.grad
        if type(grad) is not PendingGrad:
            continue
        state = grad._state
        if group.arrived is None:
            if not state.arrived or not consists_of_lookups(state):
                return None
            group.arrived, group.sparse = state.arrived, state.sparse
            place = group.arrived[0].place
            group.weights, group.states, group.steps = [None] * len(place), [None] * len(place), [None] * len(place)
        if (state.arrived is not group.arrived or state.value is not None or state.scales is not None or state.sparse != group.sparse
                or state.table not in fused):
            return None
        position = place[state.table]
        rows, columns = state.shape
        # Somebody gave two parameters one table's gradient, or moved a table (to another dtype, say) since its backward.
        if group.weights[position] is not None or not holds_rows(weight, state.dtype, rows, columns):
            return None
        if keys:
            own = states.get(weight)
            if own is None or "step" not in own:
                return None
            parts = [own.get(key) for key in keys]
            for part in parts:
                if type(part) is not Tensor or not holds(part, rows, columns if dims == 2 else 0):
                    return None
            step = own["step"]
            group.states[position] = parts[0] if len(parts) == 1 else tuple(parts)
            if isinstance(step, Tensor):
                group.counters.append(step)
            else:
                group.numbered.append(own)
            group.steps[position] = step
        group.weights[position] = weight
        group.pairs.append((weight, grad))
    return group if group.pairs else None


def count(counters):
    """Add a step to step counts, each a tensor. torch takes half a microsecond for one. Their versions are the caller's to raise."""
    cdef View view
    cdef list others = []
    for counter in counters:
        if has_memory(exchange, counter, &view) and is_float(&view) and view.ndim == 0:
            (<float*>view.data)[0] += 1
        else:
            others.append(counter)
    for counter in others:
        with no_grad():
            counter += 1


def hide(pairs):
    """Take pending gradients out of torch's sight."""
    for weight, _ in pairs:
        weight.grad = None


def show(pairs):
    """Put them back."""
    for weight, grad in pairs:
        weight.grad = grad


def consists_of_lookups(state):
    """Whether a gradient is still what arrived, and all of that by one program."""
    cdef tuple arrived = state.arrived
    cdef Py_ssize_t place
    if state.value is not None:
        return False
    for place in range(1, len(arrived)):
        if arrived[place].program is not arrived[0].program:
            return False
    return True
