// The dot interaction, written once over the vector primitives of an instruction set.
//
// Included by interaction_avx512.cpp, interaction_avx2.cpp and interaction_portable.cpp inside the namespace of their vectors (vec_<isa>.h),
// after they define
//   kRowTile                     rows of a product whose sums fit the registers, two vectors of columns each
//
// A sample is V vectors of D floats, a few KiB that the first-level cache holds. Forward, T T' of it: T is transposed by tiles, so that a
// product's columns are vectors and its sums need no reduction. Backward, S T, where S has the gradient of <t_i, t_j> at (i, j) and (j, i).
// Both are sums of kRowTile x 2 vectors in registers, over k in ascending order: the same bits whoever computes them.
// Bytes of a sample: V*D*4 read, (D + P)*4 written; backward V*D*4 and (D + P)*4 read, V*D*4 written.

template <int R>
struct Rows {
    static constexpr int kCount = R;
};

/// Calls visit(Rows, first row) for tiles of nearly equal height that cover `count` rows.
template <typename Visit>
SL_INLINE void visit_row_tiles(int64_t count, const Visit& visit) {
    int64_t row = 0;
    for (int64_t tiles = (count + kRowTile - 1) / kRowTile; tiles > 0; --tiles) {
        const int64_t height = (count - row + tiles - 1) / tiles;
        if constexpr (kRowTile >= 8) {
            if (height == 8) visit(Rows<8>{}, row);
            if (height == 7) visit(Rows<7>{}, row);
        }
        if (height == 6) visit(Rows<6>{}, row);
        else if (height == 5) visit(Rows<5>{}, row);
        else if (height == 4) visit(Rows<4>{}, row);
        else if (height == 3) visit(Rows<3>{}, row);
        else if (height == 2) visit(Rows<2>{}, row);
        else if (height == 1) visit(Rows<1>{}, row);
        row += height;
    }
}

template <int R, int N>
struct Sums {
    Vec v[R][N];
};

template <int R, int N>
SL_INLINE Sums<R, N> zero_sums() {
    Sums<R, N> sums;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) sums.v[r][n] = zero();
    }
    return sums;
}

/// sums[r] += left[k * width + r] * right(k, n) for k in [0, count).
template <int R, int N, typename Right>
SL_INLINE void add_products(Sums<R, N>& sums, const float* left, int64_t width, int64_t count, const Right& right) {
    for (int64_t k = 0; k < count; ++k, left += width) {
        Vec columns[N];
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) columns[n] = right(k, n);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Vec factor = splat(left[r]);
#pragma GCC unroll 2
            for (int n = 0; n < N; ++n) sums.v[r][n] = multiply_add(factor, columns[n], sums.v[r][n]);
        }
    }
}

SL_INLINE void copy_floats(const float* from, float* to, int64_t count) {
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth) store(to + i, load(from + i));
    if (i < count) {
        const Mask mask = mask_for(count - i);
        store_part(to + i, mask, load_part(from + i, mask));
    }
}

SL_INLINE void add_floats(const float* from, float* to, int64_t count) {
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth) store(to + i, add(load(to + i), load(from + i)));
    if (i < count) {
        const Mask mask = mask_for(count - i);
        store_part(to + i, mask, add(load_part(to + i, mask), load_part(from + i, mask)));
    }
}

SL_INLINE int64_t whole_vectors(int64_t count) { return (count + kWidth - 1) / kWidth * kWidth; }

// ---------------------------------------------------------------------------------------------------- forward

/// transposed[c * width + v] = rows[v][first + c] for c in [0, count); zeros where v is no vector.
SL_INLINE void transpose_columns(const InteractionArgs& a, int64_t first, int64_t count) {
    const int64_t vectors = a.shape->num_vectors;
    for (int64_t v = 0; v < vectors; v += kWidth) {
        for (int64_t c = 0; c < count; c += kWidth) {
            const bool part = c + kWidth > count;
            const Mask mask = mask_for(part ? count - c : kWidth - 1);
            Vec tile[kWidth];
#pragma GCC unroll 16
            for (int r = 0; r < kWidth; ++r) {
                if (v + r >= vectors) tile[r] = zero();
                else tile[r] = part ? load_part(a.rows[v + r] + first + c, mask) : load(a.rows[v + r] + first + c);
            }
            transpose(tile);
            float* to = a.transposed + c * a.width + v;
            if (part) {
                for (int64_t k = 0; k < count - c; ++k) store(to + k * a.width, tile[k]);
            } else {
#pragma GCC unroll 16
                for (int k = 0; k < kWidth; ++k) store(to + k * a.width, tile[k]);
            }
        }
    }
}

/// Products of rows [row, row + R) with N vectors of columns from `column` on, of a block of `count` columns of T.
template <int R, int N>
static void multiply_tile(const InteractionArgs& args, int64_t row, int64_t column, int64_t count, bool is_first) {
    const InteractionArgs a = args;
    float* to = a.square + row * a.width + column;
    Sums<R, N> sums = zero_sums<R, N>();
    if (!is_first) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
            for (int n = 0; n < N; ++n) sums.v[r][n] = load(to + r * a.width + n * kWidth);
        }
    }
    const float* columns = a.transposed + column;
    add_products(sums, a.transposed + row, a.width, count,
                 [columns, width = a.width](int64_t k, int n) { return load(columns + k * width + n * kWidth); });
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) store(to + r * a.width + n * kWidth, sums.v[r][n]);
    }
}

/// Every product that a pair names, of a block of columns of T.
SL_INLINE void multiply_block(const InteractionArgs& a, int64_t count, bool is_first) {
    visit_row_tiles(a.shape->num_vectors, [&](auto rows, int64_t row) {
        constexpr int R = decltype(rows)::kCount;
        int64_t first = a.width, last = 0;
        for (int64_t r = row; r < row + R; ++r) {
            const ProductRange range = a.ranges[r];
            if (range.first == range.last) continue;
            if (range.first < first) first = range.first;
            if (range.last > last) last = range.last;
        }
        int64_t column = first / kWidth * kWidth;
        for (; column + kWidth < last; column += 2 * kWidth) multiply_tile<R, 2>(a, row, column, count, is_first);
        if (column < last) multiply_tile<R, 1>(a, row, column, count, is_first);
    });
}

static void interact(const InteractionArgs& a) {
    const sl_interaction shape = *a.shape;
    for (int64_t sample = a.first_sample; sample < a.last_sample; ++sample) {
        for (int64_t v = 0; v < shape.num_vectors; ++v) a.rows[v] = a.vectors[v].data + sample * a.vectors[v].row_stride;
        for (int64_t first = 0; first < shape.dim; first += kInteractionColumns) {
            const int64_t count = shape.dim - first < kInteractionColumns ? shape.dim - first : kInteractionColumns;
            transpose_columns(a, first, count);
            multiply_block(a, count, first == 0);
        }
        float* out = a.output.data + sample * a.output.row_stride;
        if (shape.passed >= 0) copy_floats(a.rows[shape.passed], out, shape.dim);
        for (int64_t i = 0; i < shape.num_runs; ++i) {
            const sl_pair_run run = shape.runs[i];
            copy_floats(a.square + run.row * a.width + run.first, out + run.column, run.count);
        }
    }
}

// ---------------------------------------------------------------------------------------------------- backward

/// square = S: the gradient of every pair (i, j) at (i, j), plus the transpose of that.
SL_INLINE void spread_gradient(const InteractionArgs& a, const float* grad) {
    const sl_interaction shape = *a.shape;
    const int64_t size = whole_vectors(shape.num_vectors);
    for (int64_t row = 0; row < size; ++row) {
        for (int64_t column = 0; column < size; column += kWidth) store(a.square + row * a.width + column, zero());
    }
    for (int64_t i = 0; i < shape.num_runs; ++i) {
        const sl_pair_run run = shape.runs[i];
        add_floats(grad + run.column, a.square + run.row * a.width + run.first, run.count);
    }
    for (int64_t row = 0; row < size; row += kWidth) {
        for (int64_t column = row; column < size; column += kWidth) {
            float* here = a.square + row * a.width + column;
            float* there = a.square + column * a.width + row;
            Vec tile[kWidth], mirrored[kWidth];
#pragma GCC unroll 16
            for (int r = 0; r < kWidth; ++r) {
                tile[r] = load(here + r * a.width);
                mirrored[r] = load(there + r * a.width);
            }
            transpose(mirrored);
#pragma GCC unroll 16
            for (int r = 0; r < kWidth; ++r) {
                tile[r] = add(tile[r], mirrored[r]);
                store(here + r * a.width, tile[r]);
            }
            transpose(tile);
#pragma GCC unroll 16
            for (int r = 0; r < kWidth; ++r) store(there + r * a.width, tile[r]);
        }
    }
}

/// Gradients of vectors [row, row + R) in N vectors of columns from `column` on; the last columns where kPart, as many as `mask` has.
template <int R, int N, bool kPart>
static void grad_tile(const InteractionArgs& args, int64_t row, int64_t column, Mask mask, const float* passed_grad) {
    const InteractionArgs a = args;
    Sums<R, N> sums = zero_sums<R, N>();
    const float* const* rows = a.rows;
    add_products(sums, a.square + row, a.width, a.shape->num_vectors, [rows, column, mask](int64_t k, int n) {
        (void)mask;
        return kPart ? load_part(rows[k] + column, mask) : load(rows[k] + column + n * kWidth);
    });
    const int64_t passed = a.shape->passed - row;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        float* to = a.grad_rows[row + r];
        if (!to) continue;
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) {
            const int64_t at = column + n * kWidth;
            Vec sum = sums.v[r][n];
            if (r == passed) sum = add(sum, kPart ? load_part(passed_grad + at, mask) : load(passed_grad + at));
            if (kPart) store_part(to + at, mask, sum);
            else store(to + at, sum);
        }
    }
}

static void differentiate(const InteractionArgs& a) {
    const sl_interaction shape = *a.shape;
    for (int64_t sample = a.first_sample; sample < a.last_sample; ++sample) {
        for (int64_t v = 0; v < shape.num_vectors; ++v) {
            a.rows[v] = a.vectors[v].data + sample * a.vectors[v].row_stride;
            const sl_matrix grads = a.vector_grads[v];
            a.grad_rows[v] = grads.data ? grads.data + sample * grads.row_stride : nullptr;
        }
        const float* grad = a.output.data + sample * a.output.row_stride;
        spread_gradient(a, grad);
        visit_row_tiles(shape.num_vectors, [&](auto rows, int64_t row) {
            constexpr int R = decltype(rows)::kCount;
            const Mask mask = mask_for(shape.dim % kWidth);
            int64_t column = 0;
            for (; column + 2 * kWidth <= shape.dim; column += 2 * kWidth) grad_tile<R, 2, false>(a, row, column, mask, grad);
            if (column + kWidth <= shape.dim) {
                grad_tile<R, 1, false>(a, row, column, mask, grad);
                column += kWidth;
            }
            if (column < shape.dim) grad_tile<R, 1, true>(a, row, column, mask, grad);
        });
    }
}

const InteractionKernels* interaction_kernels() {
    static const InteractionKernels kernels = {interact, differentiate};
    return &kernels;
}
