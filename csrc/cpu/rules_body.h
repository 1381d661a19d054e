// The optimizers' formulas on one row. Included by kernel_body.h.
//
// They are float32. A row of 16-bit weights is widened into a buffer, stepped there and rounded once on its way back, which costs a few
// loads and stores in the first-level cache, and no copy of what is here.

/// out[c] = row[c], exactly.
template <typename Element>
static __attribute__((noinline)) void widen(const Element* row, int64_t dim, float* out) {
    int64_t column = 0;
    for (; column + kWidth <= dim; column += kWidth) store(out + column, load(row + column));
    if (column == dim) return;
    const Mask mask = mask_for(dim - column);
    store_part(out + column, mask, load_part(row + column, mask));
}

/// row[c] = values[c], to the nearest or by chance.
template <typename Element>
static __attribute__((noinline)) void narrow_row(const UpdateArgs& a, int64_t row, const float* values) {
    Element* out = static_cast<Element*>(a.table) + row * a.dim;
    const bool stochastic = a.stochastic;
    const RowNoise noise = stochastic ? noise_of(a.noise_key, row) : RowNoise{};
    const auto rounded = [&](Vec value, int64_t column) {
        return stochastic ? round_by_chance(value, chance(noise, column), Element{}) : value;
    };
    const int64_t dim = a.dim;
    int64_t column = 0;
    for (; column + kWidth <= dim; column += kWidth) store(out + column, rounded(load(values + column), column));
    if (column == dim) return;
    const Mask mask = mask_for(dim - column);
    store_part(out + column, mask, rounded(load_part(values + column, mask), column));
}

/// The weights of a row to step on: its own memory, or a wide copy.
SL_INLINE float* take_weights(const UpdateArgs& a, int64_t row) {
    if (a.dtype == SL_FLOAT32) return static_cast<float*>(a.table) + row * a.dim;
    if (a.dtype == SL_FLOAT16) widen(static_cast<const Float16*>(a.table) + row * a.dim, a.dim, a.wide);
    else widen(static_cast<const BFloat16*>(a.table) + row * a.dim, a.dim, a.wide);
    return a.wide;
}

/// After a step on what take_weights gave.
SL_INLINE void give_weights(const UpdateArgs& a, int64_t row) {
    if (a.dtype == SL_FLOAT32) return;
    if (a.dtype == SL_FLOAT16) narrow_row<Float16>(a, row, a.wide);
    else narrow_row<BFloat16>(a, row, a.wide);
}

template <typename S>
SL_INLINE void step_sgd(const UpdateArgs& a, float* weight, const Span<S>& grad, Mask mask) {
    Span<S> w = load_span<S>(weight, mask);
#pragma GCC unroll 16
    for (int i = 0; i < S::kVectors; ++i) w.v[i] = fma(splat(-a.lr), grad.v[i], w.v[i]);
    store_span(weight, w, mask);
}

/// The roundings of torch.optim.Adagrad: s + (g * g), then fma(-lr, g / (sqrt(s) + eps), w).
template <typename S>
SL_INLINE void step_adagrad(const UpdateArgs& a, float* weight, float* state, const Span<S>& grad, Mask mask) {
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
template <typename S>
SL_INLINE void step_adam(const UpdateArgs& a, float* weight, int64_t offset, const Span<S>& grad, Mask mask) {
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
template <typename S>
SL_INLINE void adjust(const UpdateArgs& a, const float* weight, Span<S>& grad, Vec& squares, Mask mask) {
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

template <typename S>
SL_INLINE void step_rowwise(float* weight, Vec scale, const Span<S>& grad, Mask mask) {
    Span<S> w = load_span<S>(weight, mask);
#pragma GCC unroll 16
    for (int i = 0; i < S::kVectors; ++i) w.v[i] = add(w.v[i], mul(grad.v[i], scale));
    store_span(weight, w, mask);
}

/// One step on a float32 row of a single block, given the sum of its gradients.
template <typename S>
SL_INLINE void apply_row(const UpdateArgs& a, int64_t row, Span<S> grad, Mask mask) {
    float* weight = static_cast<float*>(a.table) + row * a.dim;
    Vec squares = zero();
    adjust(a, weight, grad, squares, mask);
    if (a.kind == SL_SGD) step_sgd(a, weight, grad, mask);
    else if (a.kind == SL_ADAGRAD) step_adagrad(a, weight, a.first + row * a.dim, grad, mask);
    else if (a.kind == SL_ADAM) step_adam(a, weight, row * a.dim, grad, mask);
    else step_rowwise(weight, splat(rowwise_scale(a, row, squares)), grad, mask);
}

/// The same for a row of any dtype and number of blocks; sum_of(size, column, mask) gives the sum of its gradients in one of them. The
/// row-wise rule needs a sum over all blocks, so gradients go through `scratch`.
template <typename SumOf>
SL_INLINE void apply_wide_row(const UpdateArgs& a, int64_t row, const SumOf& sum_of) {
    float* weight = take_weights(a, row);
    Vec squares = zero();
    visit_blocks(a.dim, [&](auto size, int64_t column, Mask mask) {
        using S = decltype(size);
        Span<S> grad = sum_of(size, column, mask);
        adjust(a, weight + column, grad, squares, mask);
        if (a.kind == SL_SGD) step_sgd(a, weight + column, grad, mask);
        else if (a.kind == SL_ADAGRAD) step_adagrad(a, weight + column, a.first + row * a.dim + column, grad, mask);
        else if (a.kind == SL_ADAM) step_adam(a, weight + column, row * a.dim + column, grad, mask);
        else store_span(a.scratch + column, grad, mask);
    });
    if (a.kind == SL_ROWWISE_ADAGRAD) {
        const Vec scale = splat(rowwise_scale(a, row, squares));
        visit_blocks(a.dim, [&](auto size, int64_t column, Mask mask) {
            using S = decltype(size);
            step_rowwise(weight + column, scale, load_span<S>(a.scratch + column, mask), mask);
        });
    }
    give_weights(a, row);
}

/// One step on `count` rows of any dtype, from distinct row `first` downwards, given the sums of their gradients.
static __attribute__((noinline)) void apply_summed_rows(const UpdateArgs& args, int64_t first, int count, const float* sums, int stride) {
    const UpdateArgs a = args;
    for (int i = 0; i < count; ++i, sums += stride) {
        const auto sum_of = [&](auto size, int64_t column, Mask mask) { return load_span<decltype(size)>(sums + column, mask); };
        apply_wide_row(a, a.rows[first - i], sum_of);
    }
}
