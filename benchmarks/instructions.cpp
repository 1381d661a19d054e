// Runs CPU kernels over the C ABI for instructions.py, which counts what they take under callgrind.
//
//   instructions                     lists the kernels
//   instructions ISA DIMS NAME...    runs each of these at each dim; a line for each run: name, tab, dim, tab, lookups
//
// A kernel is called twice: the first call grows workspaces and binds symbols, the second goes through `counted`.
#include "instructions.h"

#include <cstring>
#include <sstream>

#include "cpu/kernels.h"

// Builds of the kernels that were not asked for are not linked: these stand in for them, and give way to those that are.
namespace sparselift {
namespace portable {
__attribute__((weak)) const Kernels* kernels() { return nullptr; }
}
#ifdef __x86_64__
namespace avx2 {
__attribute__((weak)) const Kernels* kernels() { return nullptr; }
}
namespace avx512 {
__attribute__((weak)) const Kernels* kernels() { return nullptr; }
}
#endif
}  // namespace sparselift

namespace {

constexpr int64_t kRows = 4096, kBags = 256, kMeanLength = 16;
constexpr int32_t kPrefetch = 64;      // the default knob

struct Setting;

/// One line of the result: a call of the ABI, and the table, feature and rule that it is made for.
struct Case {
    std::string name;
    void (*call)(Setting&);
    int32_t pooling = SL_SUM;
    int32_t weighted = 0;
    int32_t dedup = 0;
    int32_t coalesce = SL_COALESCE_CHAIN;
    int32_t rule = SL_RULE_ABSENT;
    int32_t dtype = SL_FLOAT32;
    int32_t stochastic = 0;
};

/// A program of one table and one feature, a batch, and every array that a kernel reads or writes. Pooled outputs and their
/// gradients are half the columns of a wider matrix, as in a group of features. Weights of 16 bits are halves of these floats.
struct Setting {
    const Case& kernel;
    int64_t dim;
    std::vector<int64_t> ids, offsets, rows;
    sl_program* program = nullptr;
    sl_batch* batch = nullptr;
    Floats table, first, second, weights, pooled, per_lookup;

    Setting(const Case& given, int64_t columns, int32_t isa) : kernel(given), dim(columns) {
        Random random;
        for (int64_t bag = 0; bag < kBags; ++bag) {
            offsets.push_back(static_cast<int64_t>(ids.size()));
            for (int64_t left = random.below(2 * kMeanLength + 1); left > 0; --left)
                ids.push_back(random.below(random.below(2) ? kRows : kRows / 16));      // every other one among a few rows
        }
        rows.resize(ids.size());
        table = floats(kRows * dim);
        first = floats(kRows * dim);
        second = floats(kRows * dim);
        weights = floats(lookups());
        pooled = floats(kBags * 2 * dim);
        per_lookup = floats(lookups() * dim);
        create(isa);
        prepare();
    }
    Setting(const Setting&) = delete;
    ~Setting() {
        sl_batch_destroy(batch);
        sl_program_destroy(program);
    }

    int64_t lookups() const { return static_cast<int64_t>(ids.size()); }
    /// (B, D), or (K, D) where every lookup is a bag of its own.
    sl_matrix output() const { return kernel.pooling == SL_NONE ? sl_matrix{per_lookup.get(), dim} : sl_matrix{pooled.get(), 2 * dim}; }
    void create(int32_t isa) {
        sl_table spec{};
        spec.rows = kRows;
        spec.dim = dim;
        spec.coalesce = kernel.coalesce;
        spec.prefetch = kPrefetch;
        spec.dedup = kernel.dedup;
        spec.dtype = kernel.dtype;
        sl_feature feature{};
        feature.pooling = kernel.pooling;
        feature.weighted = kernel.weighted;
        feature.padding_idx = -1;
        check(sl_program_create(&spec, 1, &feature, 1, isa, &program));
    }
    void prepare() {
        sl_batch_destroy(batch);
        batch = nullptr;
        sl_index_input input{};
        input.ids = ids.data();
        input.num_ids = lookups();
        input.id_stride = input.offset_stride = input.weight_stride = 1;
        input.ids_are_64 = input.offsets_are_64 = 1;
        input.offsets = offsets.data();
        input.num_offsets = kBags;
        input.bag_length = kernel.pooling == SL_NONE ? 1 : 0;
        input.weights = weights.get();
        sl_fault fault;
        check(sl_prepare(program, &input, 1, &batch, &fault));
    }
};

// ---------------------------------------------------------------------------------------------------- what is counted

void prepare(Setting& s) { s.prepare(); }

void prepare_ahead(Setting& s) {
    s.prepare();
    check(sl_arrange(s.program, s.batch));
}

void forward(Setting& s) {
    const sl_matrix output = s.output();
    const void* table = s.table.get();
    check(sl_forward(s.program, &table, s.batch, &output, 1));
}

/// Of a batch that was arranged before: in the first call, which is not counted.
void forward_ahead(Setting& s) {
    check(sl_arrange(s.program, s.batch));
    forward(s);
}

void weight_grad(Setting& s) { check(sl_weight_grad(s.program, s.table.get(), s.batch, 0, s.output(), s.weights.get(), 1)); }

sl_segment segment_of(const Setting& s, const sl_matrix& grad) {
    sl_segment segment{};
    segment.batch = s.batch;
    segment.grads = &grad;
    return segment;
}

void update(Setting& s) {
    const sl_matrix grad = s.output();
    const sl_segment segment = segment_of(s, grad);
    sl_rule rule{};
    rule.kind = s.kernel.rule;
    rule.lr = 0.01f;
    rule.eps = 1e-8f;
    rule.first_gain = 0.1f;
    rule.second_gain = 0.001f;
    rule.stochastic = s.kernel.stochastic;
    void* table = s.table.get();
    const sl_state state{s.first.get(), s.second.get()};
    check(sl_update(s.program, &table, &state, &rule, &segment, 1, 1));
}

/// As forward_ahead.
void update_ahead(Setting& s) {
    check(sl_arrange(s.program, s.batch));
    update(s);
}

void coalesced_grad(Setting& s) {
    const sl_matrix grad = s.output();
    const sl_segment segment = segment_of(s, grad);
    check(sl_coalesced_grad(s.program, 0, &segment, 1, s.rows.data(), s.per_lookup.get()));
}

void expanded_grad(Setting& s) {
    const sl_matrix grad = s.output();
    const sl_segment segment = segment_of(s, grad);
    check(sl_expanded_grad(s.program, 0, &segment, 1, s.rows.data(), s.per_lookup.get(), 1));
}

/// A new kernel, rule or coalesce method is a line here.
std::vector<Case> cases() {
    std::vector<Case> all = {
        {"prepare", prepare},
        {"prepare ahead", prepare_ahead, SL_SUM, 0, 0, SL_COALESCE_SORT},
        {"forward sum", forward},
        {"forward mean", forward, SL_MEAN},
        {"forward none", forward, SL_NONE},
        {"forward max", forward, SL_MAX},
        {"forward weighted", forward, SL_SUM, 1},
        {"forward sum dedup", forward, SL_SUM, 0, 1},
        {"forward sum dedup ahead", forward_ahead, SL_SUM, 0, 1},
        {"weight_grad", weight_grad, SL_SUM, 1},
    };
    const struct { const char* name; int32_t kind; } rules[] = {
        {"sgd", SL_SGD}, {"adagrad", SL_ADAGRAD}, {"rowwise_adagrad", SL_ROWWISE_ADAGRAD}, {"adam", SL_ADAM}};
    const struct { const char* name; int32_t method; bool sums; } methods[] = {
        {"chain", SL_COALESCE_CHAIN, true}, {"sort", SL_COALESCE_SORT, true}, {"dense", SL_COALESCE_DENSE, true},
        {"none", SL_COALESCE_NONE, false}};
    for (const auto& rule : rules)
        for (const auto& method : methods)
            if (method.sums || rule.kind == SL_SGD)      // the others need a row's whole gradient
                all.push_back({std::string("update ") + rule.name + ' ' + method.name, update, SL_SUM, 0, 0, method.method, rule.kind});
    all.push_back({"update rowwise_adagrad ahead", update_ahead, SL_SUM, 0, 0, SL_COALESCE_SORT, SL_ROWWISE_ADAGRAD});
    const struct { const char* name; int32_t dtype; } halves[] = {{"float16", SL_FLOAT16}, {"bfloat16", SL_BFLOAT16}};
    for (const auto& half : halves) {
        const auto named = [&](const char* kernel) { return std::string(kernel) + ' ' + half.name; };
        all.push_back({named("forward sum"), forward, SL_SUM, 0, 0, SL_COALESCE_CHAIN, SL_RULE_ABSENT, half.dtype});
        all.push_back({named("update sgd chain"), update, SL_SUM, 0, 0, SL_COALESCE_CHAIN, SL_SGD, half.dtype});
        all.push_back({named("update sgd chain stochastic"), update, SL_SUM, 0, 0, SL_COALESCE_CHAIN, SL_SGD, half.dtype, 1});
        all.push_back({named("update rowwise_adagrad sort"), update, SL_SUM, 0, 0, SL_COALESCE_SORT, SL_ROWWISE_ADAGRAD, half.dtype});
    }
    all.push_back({"update sgd chain of maxima", update, SL_MAX, 0, 0, SL_COALESCE_CHAIN, SL_SGD});
    all.push_back({"coalesced_grad", coalesced_grad});
    all.push_back({"expanded_grad", expanded_grad});
    return all;
}

int32_t isa_of(const char* name) {
    for (int32_t isa = 0; isa < SL_NUM_ISAS; ++isa)
        if (std::strcmp(sl_isa_name(isa), name) == 0) return isa;
    std::fprintf(stderr, "instructions: there is no instruction set %s\n", name);
    std::exit(2);
}

}  // namespace

/// Where callgrind counts: by its name, which no optimization may change.
extern "C" __attribute__((noipa)) void counted(const Counted& kernel) { kernel.call(); }

/// Once uncounted, once counted.
void run(const std::string& name, const std::string& dim, const Counted& kernel) {
    kernel.call();
    counted(kernel);
    std::printf("%s\t%s\t%lld\n", name.c_str(), dim.c_str(), static_cast<long long>(kernel.units));
}

int main(int count, char** arguments) {
    const std::vector<Case> all = cases();
    const std::vector<FreeCase> others = free_cases();
    if (count < 3) {
        for (const Case& kernel : all) std::printf("%s\n", kernel.name.c_str());
        for (const FreeCase& kernel : others) std::printf("%s\n", kernel.name.c_str());
        return 0;
    }
    const int32_t isa = isa_of(arguments[1]);
    std::istringstream dims(arguments[2]);
    for (std::string dim; std::getline(dims, dim, ',');) {
        for (int i = 3; i < count; ++i) {
            for (const Case& kernel : all) {
                if (kernel.name != arguments[i]) continue;
                Setting setting(kernel, std::stoll(dim), isa);
                run(kernel.name, dim, {[&] { kernel.call(setting); }, setting.lookups()});
            }
            for (const FreeCase& kernel : others)
                if (kernel.name == arguments[i]) run(kernel.name, dim, kernel.make(std::stoll(dim), isa));
        }
    }
    return 0;
}
