#include "llmc/device/cuda/lt_products.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/core/random.h"
#include "llmc/core/text.h"
#include "llmc/device/cuda/checksum.h"

namespace llmc::cuda {

namespace {

void check_lt(cublasStatus_t status, std::string_view call) {
    if (status != CUBLAS_STATUS_SUCCESS)
        programming_error(fmt::format("{}: cuBLASLt says {}", call, cublasLtGetStatusString(status)));
}

cudaDataType_t type_of(DType dtype) {
    switch (dtype) {
        case DType::fp32:
            return CUDA_R_32F;
        case DType::bf16:
            return CUDA_R_16BF;
        case DType::fp16:
            return CUDA_R_16F;
        case DType::fp64:
        case DType::int32:
        case DType::uint8:
            break;
    }
    programming_error("a product in a compute dtype");
}

cudaDataType_t type_of(const LtMatrix& matrix) {
    if (!matrix.bytes) return type_of(matrix.data.dtype);
    check(matrix.data.dtype == DType::uint8, "a matrix in 8 bits consists of bytes");
    return matrix.bytes->format == Fp8::e4m3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2;
}
bool is_fp8(cudaDataType_t type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }
std::size_t size_of(cudaDataType_t type) { return is_fp8(type) ? 1 : type == CUDA_R_32F ? 4 : 2; }

std::string_view name_of(cudaDataType_t type) {
    return is_fp8(type)          ? type == CUDA_R_8F_E4M3 ? "e4m3" : "e5m2"
           : type == CUDA_R_32F  ? llmc::name_of(DType::fp32)
           : type == CUDA_R_16BF ? llmc::name_of(DType::bf16)
                                 : llmc::name_of(DType::fp16);
}

// The alignment of an address, up to 256: the most that cuBLASLt's heuristics can use.
int alignment_of(const void* address) {
    const auto bits = reinterpret_cast<std::uintptr_t>(address);
    int alignment = 256;
    while (bits % static_cast<std::uintptr_t>(alignment) != 0) alignment /= 2;
    return alignment;
}

class Layout {
  public:
    Layout(cudaDataType_t type, std::int64_t rows, std::int64_t columns, std::int64_t leading) {
        check_lt(cublasLtMatrixLayoutCreate(&layout_, type, static_cast<std::uint64_t>(rows),
                                            static_cast<std::uint64_t>(columns), leading),
                 "cublasLtMatrixLayoutCreate");
    }
    ~Layout() { cublasLtMatrixLayoutDestroy(layout_); }
    Layout(const Layout&) = delete;
    Layout& operator=(const Layout&) = delete;
    cublasLtMatrixLayout_t get() const { return layout_; }

  private:
    cublasLtMatrixLayout_t layout_ = nullptr;
};

class Preference {
  public:
    Preference() { check_lt(cublasLtMatmulPreferenceCreate(&preference_), "cublasLtMatmulPreferenceCreate"); }
    ~Preference() { cublasLtMatmulPreferenceDestroy(preference_); }
    Preference(const Preference&) = delete;
    Preference& operator=(const Preference&) = delete;
    template <class T>
    void set(cublasLtMatmulPreferenceAttributes_t attribute, T value) {
        check_lt(cublasLtMatmulPreferenceSetAttribute(preference_, attribute, &value, sizeof value),
                 "cublasLtMatmulPreferenceSetAttribute");
    }
    cublasLtMatmulPreference_t get() const { return preference_; }

  private:
    cublasLtMatmulPreference_t preference_ = nullptr;
};

// The reductions that add the parts of a product that is split along k in a fixed order. The others add the
// parts in the order in which blocks finish, and give different bits each time.
constexpr std::uint32_t ordered_reductions =
    CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;

bool gives_the_same_bits(const cublasLtMatmulAlgo_t& algorithm) {
    std::uint32_t scheme = 0;
    check_lt(cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme,
                                                  sizeof scheme, nullptr),
             "cublasLtMatmulAlgoConfigGetAttribute");
    return (scheme & ~ordered_reductions) == 0;
}

}  // namespace

// The descriptors of a key, and the chosen algorithm.
class LtProducts::Plan {
  public:
    Plan(const Key& key, bool tf32)
        : a_(key.a, key.transpose_a ? key.k : key.m, key.transpose_a ? key.m : key.k, key.leading[0]),
          b_(key.b, key.transpose_b ? key.n : key.k, key.transpose_b ? key.k : key.n, key.leading[1]),
          d_(key.d, key.m, key.n, key.leading[2]),
          key_(key) {
        const bool rounds = tf32 && key.a == CUDA_R_32F;
        check_lt(cublasLtMatmulDescCreate(
                     &product_, rounds ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F),
                 "cublasLtMatmulDescCreate");
        set(CUBLASLT_MATMUL_DESC_TRANSA, key.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
        set(CUBLASLT_MATMUL_DESC_TRANSB, key.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
        if (!key.bias) return;
        set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
        set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, is_fp8(key.a) ? CUDA_R_16BF : key.a);
    }
    ~Plan() { cublasLtMatmulDescDestroy(product_); }
    Plan(const Plan&) = delete;
    Plan& operator=(const Plan&) = delete;

    const Key& key() const { return key_; }
    // The chosen algorithm; until it has run without being measured, those that may take its place.
    std::vector<cublasLtMatmulAlgo_t> algorithms;

    // What the library offers depends on the alignment of the bias too.
    std::vector<cublasLtMatmulAlgo_t> heuristic(cublasLtHandle_t handle, const Operands& operands,
                                                std::size_t workspace_bytes) const {
        constexpr int most = 32;
        if (key_.bias) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, operands.bias);
        Preference preference;
        preference.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes);
        preference.set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, ordered_reductions);
        const auto aligned = [&](cublasLtMatmulPreferenceAttributes_t attribute, int bytes) {
            preference.set(attribute, static_cast<std::uint32_t>(bytes));
        };
        aligned(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key_.alignment[0]);
        aligned(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key_.alignment[1]);
        aligned(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key_.alignment[2]);
        aligned(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key_.alignment[2]);
        std::array<cublasLtMatmulHeuristicResult_t, most> results;
        int found = 0;
        check_lt(cublasLtMatmulAlgoGetHeuristic(handle, product_, a_.get(), b_.get(), d_.get(), d_.get(),
                                                preference.get(), most, results.data(), &found),
                 "cublasLtMatmulAlgoGetHeuristic");
        std::vector<cublasLtMatmulAlgo_t> offered;
        for (const auto& result : std::span(results).first(static_cast<std::size_t>(found))) {
            if (result.state == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= workspace_bytes &&
                gives_the_same_bits(result.algo))
                offered.push_back(result.algo);
        }
        return offered;
    }

    // True if the library on this machine can run the algorithm.
    bool runs(cublasLtHandle_t handle, const cublasLtMatmulAlgo_t& candidate,
              std::size_t workspace_bytes) const {
        cublasLtMatmulHeuristicResult_t result{};
        return cublasLtMatmulAlgoCheck(handle, product_, a_.get(), b_.get(), d_.get(), d_.get(), &candidate,
                                       &result) == CUBLAS_STATUS_SUCCESS &&
               result.workspaceSize <= workspace_bytes && gives_the_same_bits(candidate);
    }

    // CUBLAS_STATUS_SUCCESS, or why the algorithm cannot run: the library checks only some of what it needs before.
    // Nothing is launched then.
    cublasStatus_t run(cublasLtHandle_t handle, const cublasLtMatmulAlgo_t& by, const Operands& operands,
                       void* workspace, std::size_t workspace_bytes, cudaStream_t stream) const {
        const float alpha = operands.scale, beta = key_.accumulate ? 1 : 0;
        if (key_.bias) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, operands.bias);
        if (is_fp8(key_.a)) {
            set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, operands.scale_a);
            set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, operands.scale_b);
        }
        const cublasStatus_t status = cublasLtMatmul(
            handle, product_, &alpha, operands.a, a_.get(), operands.b, b_.get(), &beta, operands.d, d_.get(),
            operands.d, d_.get(), &by, workspace, workspace_bytes, stream);
        if (status != CUBLAS_STATUS_SUCCESS) cudaGetLastError();  // the next launch would find it
        return status;
    }

  private:
    template <class T>
    void set(cublasLtMatmulDescAttributes_t attribute, T value) const {
        check_lt(cublasLtMatmulDescSetAttribute(product_, attribute, &value, sizeof value),
                 "cublasLtMatmulDescSetAttribute");
    }

    cublasLtMatmulDesc_t product_ = nullptr;
    Layout a_, b_, d_;
    Key key_;
};

LtProducts::LtProducts(CudaStreams& streams, std::string gpu, const Chip& chip, bool tf32, bool sync)
    : streams_(streams), gpu_(std::move(gpu)), chip_(chip), tf32_(tf32), sync_(sync) {
    check_lt(cublasLtCreate(&handle_), "cublasLtCreate");
}

LtProducts::~LtProducts() {
    plans_.clear();
    cublasLtDestroy(handle_);
}

// A row-major matrix is the transpose of a column-major one. So the product is D^T = B^T A^T: b is cuBLASLt's
// A, and a is its B.
LtProducts::Key LtProducts::key_of(const LtMatrix& d, const LtMatrix& a, const LtMatrix& b,
                                   const Tensor& bias, bool accumulate) {
    const std::int64_t rows = a.transposed ? a.columns : a.rows;
    const std::int64_t depth = a.transposed ? a.rows : a.columns;
    const std::int64_t columns = b.transposed ? b.rows : b.columns;
    check(depth == (b.transposed ? b.columns : b.rows) && a.data.dtype == b.data.dtype &&
              a.bytes.has_value() == b.bytes.has_value(),
          "the factors of a product match");
    check(!a.bytes || (!a.transposed && b.transposed), "both factors in 8 bits are read along the sum");
    return {.m = columns,
            .n = rows,
            .k = depth,
            .transpose_a = b.transposed,
            .transpose_b = a.transposed,
            .a = type_of(b),
            .b = type_of(a),
            .d = type_of(d.data.dtype),
            .bias = static_cast<bool>(bias),
            .accumulate = accumulate,
            .alignment = {alignment_of(b.begin()), alignment_of(a.begin()), alignment_of(d.begin()),
                          alignment_of(bias.data)},
            .leading = {b.row, a.row, d.row}};
}

namespace {

std::int64_t extent(std::int64_t rows, std::int64_t columns, std::int64_t leading) {
    return (columns - 1) * leading + rows;
}

}  // namespace

std::int64_t LtProducts::extent_of_a(const Key& key) {
    return key.transpose_a ? extent(key.k, key.m, key.leading[0]) : extent(key.m, key.k, key.leading[0]);
}
std::int64_t LtProducts::extent_of_b(const Key& key) {
    return key.transpose_b ? extent(key.n, key.k, key.leading[1]) : extent(key.k, key.n, key.leading[1]);
}
std::size_t LtProducts::bytes_of_result(const Key& key) {
    return static_cast<std::size_t>(extent(key.m, key.n, key.leading[2])) * size_of(key.d);
}

std::string LtProducts::name_of(const Key& key) {
    const bool is_dense =
        extent_of_a(key) == key.m * key.k && extent_of_b(key) == key.n * key.k && key.leading[2] == key.m;
    return fmt::format("{}x{}x{} {}{} {}{}{}>{}{}{} align {}{}", key.m, key.n, key.k,
                       key.transpose_a ? 'T' : 'N', key.transpose_b ? 'T' : 'N', cuda::name_of(key.a),
                       key.a == key.b ? "" : "*", key.a == key.b ? "" : cuda::name_of(key.b),
                       cuda::name_of(key.d), key.bias ? " bias" : "", key.accumulate ? " add" : "",
                       fmt::join(key.alignment, ","),
                       is_dense ? "" : fmt::format(" leading {}", fmt::join(key.leading, ",")));
}

namespace {

// The whole of a result.
LtMatrix result(const Tensor& d, const LtMatrix& a, const LtMatrix& b) {
    return {d, a.transposed ? a.columns : a.rows, b.transposed ? b.rows : b.columns};
}

}  // namespace

void LtProducts::overwrite(const Tensor& d, const LtMatrix& a, const LtMatrix& b, const Tensor& bias) {
    multiply(result(d, a, b), a, b, bias, false, 1);
}

void LtProducts::accumulate(const Tensor& d, const LtMatrix& a, const LtMatrix& b) {
    multiply(result(d, a, b), a, b, {}, true, 1);
}

void LtProducts::accumulate(const LtMatrix& d, const LtMatrix& a, const LtMatrix& b, float scale) {
    multiply(d, a, b, {}, true, scale);
}

void LtProducts::multiply(const LtMatrix& d, const LtMatrix& a, const LtMatrix& b, const Tensor& bias,
                          bool accumulate, float scale) {
    const auto scale_of = [](const LtMatrix& matrix) {
        return matrix.bytes ? matrix.bytes->scale.data : nullptr;
    };
    const Key key = key_of(d, a, b, bias, accumulate);
    const Operands operands{.a = b.begin(),
                            .b = a.begin(),
                            .bias = bias.data,
                            .d = d.begin(),
                            .scale_a = scale_of(b),
                            .scale_b = scale_of(a),
                            .scale = scale};
    if (key.m == 0 || key.n == 0 || key.k == 0) return;
    Plan& plan = plan_for(key, operands);
    const auto run = [&] {
        return plan.run(handle_, plan.algorithms.front(), operands, workspace_, workspace_bytes,
                        streams_.selected());
    };
    for (cublasStatus_t status = run(); status != CUBLAS_STATUS_SUCCESS; status = run()) {
        last_status_ = cublasLtGetStatusString(status);
        if (plan.algorithms.size() == 1) refuse(key, last_status_);
        plan.algorithms.erase(plan.algorithms.begin());
        ++left_out_.failing;
    }
    plan.algorithms.resize(1);
    if (sync_) check_cuda(streams_.wait_until_empty(), "the product " + name_of(key));
}

LtProducts::Plan& LtProducts::plan_for(const Key& key, const Operands& operands) {
    std::unique_ptr<Plan>& plan = plans_[key];
    if (plan) return *plan;
    auto made = std::make_unique<Plan>(key, tf32_);
    const auto earlier = adopted_.find(name_of(key));
    if (earlier != adopted_.end() && made->runs(handle_, earlier->second, workspace_bytes)) {
        made->algorithms = {earlier->second};
    } else {
        made->algorithms = made->heuristic(handle_, operands, workspace_bytes);
        if (made->algorithms.empty())
            programming_error("cuBLASLt has no algorithm for the product " + name_of(key));
        if (measures_) {
            // A product of zeros has the same bits by any algorithm. Weights may begin as zeros, as do other ranks'
            // numbers until they are sent.
            const std::string call = "timing the product " + name_of(key);
            const bool zero_a = make_up_zeros(operands.a, extent_of_a(key), key.a, call);
            const bool zero_b = make_up_zeros(operands.b, extent_of_b(key), key.b, call);
            made->algorithms = {fastest(*made, operands)};
            if (zero_a) clear(operands.a, extent_of_a(key), key.a);
            if (zero_b) clear(operands.b, extent_of_b(key), key.b);
        }
    }
    plan = std::move(made);
    return *plan;
}

// Ranks share their choices, so that none takes another algorithm than the others.
void LtProducts::refuse(const Key& key, const std::string& why) const {
    std::size_t free = 0, total = 0;
    check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    user_error(
        "cuBLASLt cannot compute the product {} on this GPU: {} ({} of its memory are free); see whether "
        "other programs use it, or give a smaller --micro-batch-size",
        name_of(key), why, human_bytes(free));
}

// If a factor of `elements` numbers is zeros, fills it with random ones; returns whether.
bool LtProducts::make_up_zeros(const void* factor, std::int64_t elements, cudaDataType_t type,
                               const std::string& call) const {
    const std::size_t size = size_of(type), bytes = static_cast<std::size_t>(elements) * size;
    const unsigned signs = is_fp8(type) ? 0x80808080U : type == CUDA_R_32F ? 0x80000000U : 0x80008000U;
    if (checksum_of(factor, bytes, call, signs) != 0) return false;
    const std::size_t count = std::min<std::size_t>(bytes / size, 1 << 16);
    const RandomStream random(0, "autotune");
    std::vector<std::byte> values(count * size);
    for (std::size_t i = 0; i < count; ++i) {
        const auto x = static_cast<float>(random.normal(i));
        const auto put = [&](auto number) { std::memcpy(&values[i * size], &number, size); };
        if (is_fp8(type)) {
            put(static_cast<std::uint8_t>(0x28U + i % 16 +
                                          (x < 0 ? 0x80U : 0U)));  // numbers up to 1 of both formats
        } else if (type == CUDA_R_32F) {
            put(x);
        } else {
            type == CUDA_R_16BF ? put(to_bfloat16(x)) : put(to_float16(x));
        }
    }
    auto* const to = static_cast<std::byte*>(const_cast<void*>(factor));
    const cudaStream_t stream = streams_.selected();
    check_cuda(cudaMemcpyAsync(to, values.data(), values.size(), cudaMemcpyHostToDevice, stream), call);
    for (std::size_t done = values.size(); done < bytes; done *= 2)
        check_cuda(
            cudaMemcpyAsync(to + done, to, std::min(done, bytes - done), cudaMemcpyDeviceToDevice, stream),
            call);
    streams_.finish();
    return true;
}

void LtProducts::clear(const void* factor, std::int64_t elements, cudaDataType_t type) const {
    check_cuda(cudaMemsetAsync(const_cast<void*>(factor), 0,
                               static_cast<std::size_t>(elements) * size_of(type), streams_.selected()),
               "cudaMemsetAsync");
}

cublasLtMatmulAlgo_t LtProducts::fastest(const Plan& plan, const Operands& operands) {
    const cublasLtMatmulAlgo_t* best = nullptr;
    float best_time = 0;
    const LeftOut before = left_out_;
    for (const cublasLtMatmulAlgo_t& candidate : plan.algorithms) {
        const std::optional<float> time = measure(plan, candidate, operands);
        if (!time || (best && *time >= best_time)) continue;
        best = &candidate;
        best_time = *time;
    }
    if (best) return *best;
    std::string why = left_out_.failing > before.failing ? last_status_ : "";
    if (left_out_.varying > before.varying)
        why += why.empty() ? "other bits each time" : ", or other bits each time";
    refuse(plan.key(), why);
}

// The first run loads the algorithm's code, and is not timed. Whether an algorithm's bits vary is seen from its
// results: one attribute of it says so too (gives_the_same_bits), but not for all of them.
std::optional<float> LtProducts::measure(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm,
                                         const Operands& operands) {
    constexpr int rounds = 7;  // the median counts
    const cudaStream_t stream = streams_.selected();
    const EventOwner start(true), end(true);
    const std::string timing = "timing the product " + name_of(plan.key());
    std::array<float, rounds> times{};
    std::uint64_t bits = 0;
    for (int round = -1; round < rounds; ++round) {
        if (plan.key().accumulate)
            check_cuda(cudaMemsetAsync(operands.d, 0, bytes_of_result(plan.key()), stream), timing);
        check_cuda(cudaEventRecord(start.get(), stream), timing);
        const cublasStatus_t status =
            plan.run(handle_, algorithm, operands, workspace_, workspace_bytes, stream);
        if (status != CUBLAS_STATUS_SUCCESS) {
            ++left_out_.failing;
            last_status_ = cublasLtGetStatusString(status);
            return std::nullopt;
        }
        check_cuda(cudaEventRecord(end.get(), stream), timing);
        const std::uint64_t own_bits = checksum_of(operands.d, bytes_of_result(plan.key()), timing);
        if (round < 0) {
            bits = own_bits;
            continue;
        }
        if (own_bits != bits) {
            ++left_out_.varying;
            return std::nullopt;
        }
        check_cuda(cudaEventElapsedTime(&times[static_cast<std::size_t>(round)], start.get(), end.get()),
                   timing);
    }
    std::ranges::nth_element(times, times.begin() + rounds / 2);
    return times[rounds / 2];
}

// Waits for the product. Its workspace is free again then, and has the sum.
std::uint64_t LtProducts::checksum_of(const void* data, std::size_t bytes, const std::string& call,
                                      unsigned ignored) const {
    // Of whole 16 bytes: columns of wider rows may begin and end within. What lies beside them does not change.
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    const std::size_t before = address % 16, whole = (before + bytes + 15) / 16 * 16;
    const auto* const begin = static_cast<const std::byte*>(data) - before;
    const cudaStream_t stream = streams_.selected();
    auto* const sum = static_cast<unsigned long long*>(workspace_);
    unsigned long long value = 0;
    if (sync_) check_cuda(streams_.wait_until_empty(), call);
    check_cuda(cudaMemsetAsync(sum, 0, sizeof value, stream), call);
    add_checksum({.chip = chip_, .stream = stream}, sum, begin, static_cast<std::int64_t>(whole), ignored);
    check_cuda(cudaMemcpyAsync(&value, sum, sizeof value, cudaMemcpyDeviceToHost, stream), call);
    check_cuda(cudaStreamSynchronize(stream), call);
    return value;
}

// The GPU and the library for which choices are valid: algorithms mean something only to one version of the
// library, and times only on one kind of GPU.
std::string LtProducts::library() const {
    return fmt::format("{}, cuBLASLt {}{}", gpu_, cublasLtGetVersion(), tf32_ ? ", TF32" : "");
}

// A line for the GPU and the library, then a line per product: its name, and the words of the algorithm.
std::string LtProducts::choices() const {
    std::string text = library() + "\n";
    for (const auto& [key, plan] : plans_) {
        if (!plan) continue;
        text += name_of(key) + ":";
        for (const std::uint64_t word : plan->algorithms.front().data) text += fmt::format(" {:x}", word);
        text += '\n';
    }
    return text;
}

void LtProducts::adopt_choices(std::string_view text) {
    std::istringstream lines{std::string(text)};
    const std::string own = library();
    bool begins = true, is_own = false;
    for (std::string line; std::getline(lines, line); begins = line.empty()) {
        if (begins) is_own = line == own;
        const std::size_t colon = line.find(':');
        if (begins || !is_own || colon == std::string::npos) continue;
        std::istringstream words(line.substr(colon + 1));
        cublasLtMatmulAlgo_t algorithm{};
        for (std::uint64_t& word : algorithm.data) words >> std::hex >> word;
        if (words) adopted_[line.substr(0, colon)] = algorithm;
    }
}

}  // namespace llmc::cuda
