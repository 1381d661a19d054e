// The optimizers' formulas on one row. Included by kernel_body.h.
//
// They are float32. Weights are stepped on in memory; those of 16 bits in registers, as float32, and rounded once on their way back.

template <typename Weights, typename S>
SL_INLINE void step_sgd(const UpdateArgs& a, Weights& weight, const Span<S>& grad, Mask mask) {
    Span<S> w = load_span<S>(weight, mask);
#pragma GCC unroll 16
    for (int i = 0; i < S::kVectors; ++i) w.v[i] = fma(splat(-a.lr), grad.v[i], w.v[i]);
    store_span(weight, w, mask);
}

/// The roundings of torch.optim.Adagrad: s + (g * g), then fma(-lr, g / (sqrt(s) + eps), w).
template <typename Weights, typename S>
SL_INLINE void step_adagrad(const UpdateArgs& a, Weights& weight, float* state, const Span<S>& grad, Mask mask) {
    Span<S> w = load_span<S>(weight, mask), s = load_span<S>(state, mask);
#pragma GCC unroll 16
    for (int i = 0; i < S::kVectors; ++i) {
        s.v[i] = add(s.v[i], mul(grad.v[i], grad.v[i]));
        w.v[i] = fma(splat(-a.lr), div(grad.v[i], add(sqrt(s.v[i]), splat(a.eps))), w.v[i]);
    }
    store_span(state, s, mask);
    store_span(weight, w, mask);
}

/// The roundings of torch.optim.SparseAdam: m + (g - m) * (1 - beta1), v + (g * g - v) * (1 - beta2), w + -lr * (m / (sqrt(v) + eps)).
/// Vector by vector: rows of three tables do not fit the registers.
template <typename Weights, typename S>
SL_INLINE void step_adam(const UpdateArgs& a, Weights& weight, int64_t offset, const Span<S>& grad, Mask mask) {
    float* first = a.first + offset;
    float* second = a.second + offset;
#pragma GCC unroll 16
    for (int i = 0; i < S::kVectors; ++i) {
        Vec m = load_vector<S>(first, i, mask), v = load_vector<S>(second, i, mask);
        const Vec g = grad.v[i], w = load_vector<S>(weight, i, mask);
        m = add(m, mul(sub(g, m), splat(a.first_gain)));
        v = add(v, mul(sub(mul(g, g), v), splat(a.second_gain)));
        store_vector<S>(first, i, mask, m);
        store_vector<S>(second, i, mask, v);
        store_vector<S>(weight, i, mask, add(w, mul(splat(-a.lr), div(m, add(sqrt(v), splat(a.eps))))));
    }
}

/// The gradient as the rule wants it: sign and weight decay applied. Adds its squares to `squares`.
template <typename Weights, typename S>
SL_INLINE void adjust(const UpdateArgs& a, const Weights& weight, Span<S>& grad, Vec& squares, Mask mask) {
    if (a.maximize) scale_span(grad, -1.0f);
    if (a.kind != SL_ROWWISE_ADAGRAD) return;
    if (a.weight_decay != 0.0f) add_scaled_row<S, false>(grad, splat(a.weight_decay), weight, mask);
#pragma GCC unroll 16
    for (int i = 0; i < S::kVectors; ++i) squares = add(squares, mul(grad.v[i], grad.v[i]));
}

/// Adds the mean square to the row's state. Returns what the gradient is multiplied by.
SL_INLINE float rowwise_scale(const UpdateArgs& a, int64_t row, Vec squares) {
    const float state = a.first[row] + sum(squares) / static_cast<float>(a.dim);
    a.first[row] = state;
    return -a.lr / (__builtin_sqrtf(state) + a.eps);
}

template <typename Weights, typename S>
SL_INLINE void step_rowwise(Weights& weight, Vec scale, const Span<S>& grad, Mask mask) {
    Span<S> w = load_span<S>(weight, mask);
#pragma GCC unroll 16
    for (int i = 0; i < S::kVectors; ++i) w.v[i] = add(w.v[i], mul(grad.v[i], scale));
    store_span(weight, w, mask);
}

/// One step on the columns of one block, whose state begins at `offset`. The row-wise rule needs the squares of all of them first: its gradient
/// waits in `scratch`.
template <typename Weights, typename S>
SL_INLINE void step_block(const UpdateArgs& a, Weights& weight, int64_t offset, Span<S>& grad, Vec& squares, float* scratch, Mask mask) {
    adjust(a, weight, grad, squares, mask);
    if (a.kind == SL_SGD) step_sgd(a, weight, grad, mask);
    else if (a.kind == SL_ADAGRAD) step_adagrad(a, weight, a.first + offset, grad, mask);
    else if (a.kind == SL_ADAM) step_adam(a, weight, offset, grad, mask);
    else store_span(scratch, grad, mask);
}

/// One step on a row of a single block.
template <typename Weights, typename S>
SL_INLINE void step_row(const UpdateArgs& a, int64_t row, Weights& weight, Span<S> grad, Mask mask) {
    Vec squares = zero();
    adjust(a, weight, grad, squares, mask);
    if (a.kind == SL_SGD) step_sgd(a, weight, grad, mask);
    else if (a.kind == SL_ADAGRAD) step_adagrad(a, weight, a.first + row * a.dim, grad, mask);
    else if (a.kind == SL_ADAM) step_adam(a, weight, row * a.dim, grad, mask);
    else step_rowwise(weight, splat(rowwise_scale(a, row, squares)), grad, mask);
}

/// row[c] = values[c] from `column` on, to the nearest or by chance.
template <typename S, typename Weight>
SL_INLINE void narrow_span(const UpdateArgs& a, Weight* weight, int64_t row, int64_t column, Span<S>& values, Mask mask) {
    if (a.stochastic) round_by_chance(values, noise_of(a.noise_key, row), column, Weight{});
    store_span(weight, values, mask);
}

/// One step on a row of a single block, given the sum of its gradients.
template <typename S>
SL_INLINE void apply_row(const UpdateArgs& a, float* weight, int64_t row, const Span<S>& grad, Mask mask) {
    step_row(a, row, weight, grad, mask);
}

template <typename S, typename Weight>
SL_INLINE void apply_row(const UpdateArgs& a, Weight* weight, int64_t row, const Span<S>& grad, Mask mask) {
    Span<S> wide = load_span<S>(weight, mask);
    step_row(a, row, wide, grad, mask);
    narrow_span(a, weight, row, 0, wide, mask);
}

/// One step on one block of a wider row, but for the row-wise rule's own.
template <typename S>
SL_INLINE void apply_block(const UpdateArgs& a, float* weight, int64_t row, int64_t column, Span<S> grad, Vec& squares, Mask mask) {
    step_block(a, weight, row * a.dim + column, grad, squares, a.scratch + column, mask);
}

template <typename S, typename Weight>
SL_INLINE void apply_block(const UpdateArgs& a, Weight* weight, int64_t row, int64_t column, Span<S> grad, Vec& squares, Mask mask) {
    if (a.kind == SL_ROWWISE_ADAGRAD) {
        adjust(a, weight, grad, squares, mask);
        store_span(a.scratch + column, grad, mask);
        return;
    }
    Span<S> wide = load_span<S>(weight, mask);
    step_block(a, wide, row * a.dim + column, grad, squares, a.scratch + column, mask);
    narrow_span(a, weight, row, column, wide, mask);
}

/// What the row-wise rule does with one block once it has the squares of the whole row.
template <typename S>
SL_INLINE void finish_block(const UpdateArgs&, float* weight, int64_t, int64_t, Vec scale, const Span<S>& grad, Mask mask) {
    step_rowwise(weight, scale, grad, mask);
}

template <typename S, typename Weight>
SL_INLINE void finish_block(const UpdateArgs& a, Weight* weight, int64_t row, int64_t column, Vec scale, const Span<S>& grad, Mask mask) {
    Span<S> wide = load_span<S>(weight, mask);
    step_rowwise(wide, scale, grad, mask);
    narrow_span(a, weight, row, column, wide, mask);
}

/// One step on a row of any number of blocks; sum_of(size, column, mask) gives the sum of its gradients in one of them.
template <typename Weight, typename SumOf>
SL_INLINE void apply_wide_row(const UpdateArgs& a, int64_t row, const SumOf& sum_of) {
    Weight* weight = static_cast<Weight*>(a.table) + row * a.dim;
    Vec squares = zero();
    visit_blocks(a.dim, [&](auto size, int64_t column, Mask mask) {
        using S = decltype(size);
        apply_block<S>(a, weight + column, row, column, sum_of(size, column, mask), squares, mask);
    });
    if (a.kind != SL_ROWWISE_ADAGRAD) return;
    const Vec scale = splat(rowwise_scale(a, row, squares));
    visit_blocks(a.dim, [&](auto size, int64_t column, Mask mask) {
        using S = decltype(size);
        finish_block<S>(a, weight + column, row, column, scale, load_span<S>(a.scratch + column, mask), mask);
    });
}
