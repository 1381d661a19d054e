// The epilogue kernels, included once an instruction set inside a namespace of its own. The compiler vectorises these loops as they are:
// an element needs none other, and a sum is one lane's.

template <bool kBias, bool kRelu>
static void finish_rows(const EpilogueArgs& args) {
    const EpilogueArgs a = args;
    const float* __restrict bias = a.bias;
    for (int64_t row = a.first_row; row < a.last_row; ++row) {
        float* __restrict out = a.out.data + row * a.out.row_stride;
        for (int64_t column = 0; column < a.columns; ++column) {
            float value = out[column];
            if constexpr (kBias) value += bias[column];
            if constexpr (kRelu) value = value < 0.0f ? 0.0f : value;
            out[column] = value;
        }
    }
}

static void forward(const EpilogueArgs& a) {
    if (a.bias) {
        if (a.relu) finish_rows<true, true>(a);
        else finish_rows<true, false>(a);
    } else if (a.relu) {
        finish_rows<false, true>(a);
    }
}

template <bool kRelu, bool kSums>
static inline void mask_row(const float* __restrict grad, const float* __restrict out, float* __restrict masked, float* __restrict sums,
                            int64_t columns) {
#pragma GCC ivdep
    for (int64_t column = 0; column < columns; ++column) {
        float value = grad[column];
        if constexpr (kRelu) {
            const float result = out[column];
            value = result <= 0.0f ? 0.0f : value;
            masked[column] = value;
        }
        if constexpr (kSums) sums[column] += value;
    }
}

template <bool kRelu, bool kSums>
static void mask_chunks(const EpilogueArgs& args) {
    const EpilogueArgs a = args;
    for (int64_t chunk = a.first_chunk; chunk < a.last_chunk; ++chunk) {
        float* sums = kSums ? a.sums + chunk * a.columns : nullptr;
        if (kSums) __builtin_memset(sums, 0, static_cast<std::size_t>(a.columns) * sizeof(float));
        const int64_t first = chunk * SL_EPILOGUE_ROWS, last = first + SL_EPILOGUE_ROWS < a.rows ? first + SL_EPILOGUE_ROWS : a.rows;
        for (int64_t row = first; row < last; ++row)
            mask_row<kRelu, kSums>(a.grad.data + row * a.grad.row_stride, kRelu ? a.out.data + row * a.out.row_stride : nullptr,
                                   kRelu ? a.masked.data + row * a.masked.row_stride : nullptr, sums, a.columns);
    }
}

static void backward(const EpilogueArgs& a) {
    if (a.out.data) {
        if (a.sums) mask_chunks<true, true>(a);
        else mask_chunks<true, false>(a);
    } else if (a.sums) {
        mask_chunks<false, true>(a);
    }
}

const EpilogueKernels* epilogue_kernels() {
    static const EpilogueKernels kernels = {forward, backward};
    return &kernels;
}
