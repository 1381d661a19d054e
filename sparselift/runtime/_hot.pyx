"""The loops over tables that run in every step. In Python they cost more than the kernels of a small batch.

Nothing here touches memory of a tensor; every fact is read through torch's public attributes.
"""

from cpython.object cimport PyObject
from torch import Tensor
from torch.nn import Parameter

from sparselift.grad import GradState, PendingGrad


cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(PyObject*)


cdef long long version_of(tensor) except? -3:
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


cdef class Slots:
    """Results that wait for one module."""

    cdef list waiting

    def __init__(self):
        self.waiting = []

    def __len__(self):
        return len(self.waiting)

    def clear(self):
        self.waiting.clear()

    def take(self, indices, offsets, sample_weights, weight, bint grad_mode):
        """The result for these very tensors, none of them written to since; None if there is none.

        Each result is handed out once.
        """
        cdef Served served
        cdef Py_ssize_t place
        for place in range(len(self.waiting)):
            served = <Served>self.waiting[place]
            if (same(indices, served.indices) and same(offsets, served.offsets) and same(sample_weights, served.sample_weights)
                    and weight is served.weight and served.grad_mode == grad_mode
                    and version_of(indices) == served.indices_version and version_of(offsets) == served.offsets_version
                    and version_of(sample_weights) == served.sample_weights_version
                    and version_of(weight) == served.weight_version):
                del self.waiting[place]
                return served.output
        return None


def serve(slots, indices, offsets, sample_weights, weights, outputs, bint grad_mode):
    """Leave each output with its module. All sequences have one entry a feature."""
    cdef Served served
    cdef Py_ssize_t place
    for place in range(len(outputs)):
        served = Served.__new__(Served)
        served.indices, served.offsets, served.sample_weights = indices[place], offsets[place], sample_weights[place]
        served.weight, served.output, served.grad_mode = weights[place], outputs[place], grad_mode
        served.indices_version = version_of(served.indices)
        served.offsets_version = version_of(served.offsets)
        served.sample_weights_version = version_of(served.sample_weights)
        served.weight_version = version_of(served.weight)
        (<Slots>slots[place]).waiting.append(served)


def are_plain(weights):
    """Whether these are parameters whose gradient nobody watches: a hook must see it arrive, so torch has to carry it."""
    for weight in weights:
        if type(weight) is not Parameter or weight._backward_hooks or weight._post_accumulate_grad_hooks:
            return False
    return True


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
        self.state = GradState(table.name, (table.rows, table.dim), table.sparse)
        self.handle = PendingGrad(self.state)

    cdef bint is_held(self):
        """Whether anybody but us refers to the gradient while it is attached nowhere. Ours are `handle`, `state` and the handle's own."""
        return Py_REFCNT(<PyObject*>self.handle) > 1 or Py_REFCNT(<PyObject*>self.state) > 2

    def renew(self):
        """Leave the gradient to whoever holds it."""
        self.state = GradState(self.state.table, self.state.shape, self.state.sparse)
        self.handle = PendingGrad(self.state)

    def settle(self, weight):
        """Replace our pending gradient by the tensor that torch would have there."""
        if weight.grad is self.handle:
            weight.grad = self.state.keep()


def accumulate(places, weights, tables, arrival):
    """Add one backward's gradient to `.grad` of the tables at `places`, as AccumulateGrad does."""
    cdef TableGrad table
    cdef tuple alone = (arrival,)
    for place in places:
        table = <TableGrad>tables[place]
        weight = weights[place]
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
        else:
            extra = GradState(table.state.table, table.state.shape, table.state.sparse)
            extra.add(arrival)
            weight.grad = grad + extra.tensor()


def pending(params):
    """(weight, gradient, its state) of the parameters whose gradient is pending."""
    cdef list found = []
    for weight in params:
        grad = weight.grad
        if type(grad) is PendingGrad:
            found.append((weight, grad, grad._state))
    return found


def hide_all(found, fused, hidden):
    """Hide all gradients that `pending` found, if all are of `fused` tables and of the same backwards of one program; else none."""
    arrived = None
    for _, _, state in found:
        if arrived is None:
            if not consists_of_lookups(state):
                return False
            arrived = state.arrived
        if state.arrived is not arrived or state.value is not None or state.table not in fused:
            return False
    for weight, grad, _ in found:
        weight.grad = None
        hidden.append((weight, grad))
    return True


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
