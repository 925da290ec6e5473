// cublasLtMatmul: the CPU device's product (llmc/device/cpu/products.h). Sums are in fp32, and the result is
// rounded once.
#include <cuda_fp8.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <random>
#include <span>
#include <vector>

#include "llmc/core/dtype.h"
#include "llmc/device/cpu/products.h"
#include "simt/runtime/cublaslt.h"

namespace {

using namespace simt::runtime;
using llmc::cpu::Matrix;

// One call, with copies of all that the caller may change before the work runs.
struct Product {
    Problem problem;
    Algorithm algorithm;
    float alpha, beta;
    const std::byte *a, *b, *c;
    std::byte *d, *workspace;
    std::byte *bias, *aux;
    cudaDataType_t bias_type, aux_type;
    std::int64_t aux_leading;
    const std::byte *scale_a, *scale_b;  // of factors in 8 bits; null is 1

    bool has(unsigned bit) const { return problem.epilogue & bit; }
};

// The bits of cublasLtEpilogue_t.
constexpr unsigned relu = 2, add_bias = 4, relu_gradient = 8, gradient_of_bias = 16, gelu = 32,
                   gelu_gradient = 64, with_aux = 128, sum_of_a = 256, sum_of_b = 512;
constexpr unsigned uses_bias = add_bias | gradient_of_bias | sum_of_a | sum_of_b;

using llmc::DType;

// (fp16 of 8 bits, which are read into it.)
DType dtype_of(cudaDataType_t type) {
    return type == CUDA_R_32F ? DType::fp32 : type == CUDA_R_16BF ? DType::bf16 : DType::fp16;
}

float load(const std::byte* base, cudaDataType_t type, std::int64_t i) {
    if (is_fp8(type)) {
        const auto byte = static_cast<__nv_fp8_storage_t>(base[i]);
        return __half2float(
            __half(__nv_cvt_fp8_to_halfraw(byte, type == CUDA_R_8F_E4M3 ? __NV_E4M3 : __NV_E5M2)));
    }
    return llmc::with_dtype(dtype_of(type), [&](auto element) {
        return llmc::to_float(reinterpret_cast<const decltype(element)*>(base)[i]);
    });
}

void store(std::byte* base, cudaDataType_t type, std::int64_t i, float value) {
    llmc::with_dtype(dtype_of(type), [&](auto element) {
        using X = decltype(element);
        reinterpret_cast<X*>(base)[i] = llmc::from_float<X>(value);
    });
}

// ---- refusals ----

cublasStatus_t check_operands(const Product& p, std::size_t workspace_bytes) {
    if (!p.a || !p.b || !p.d || (!p.c && p.beta != 0)) return CUBLAS_STATUS_INVALID_VALUE;
    const std::size_t needed = p.algorithm.workspace_bytes(p.problem);
    if (workspace_bytes < needed || (needed > 0 && !p.workspace)) return CUBLAS_STATUS_INVALID_VALUE;
    const std::array<const void*, 5> pointers = {p.a, p.b, p.c, p.d, p.has(add_bias) ? p.bias : nullptr};
    for (std::size_t i = 0; i < pointers.size(); ++i) {
        if (reinterpret_cast<std::uintptr_t>(pointers[i]) % p.algorithm.alignment[i] != 0)
            return CUBLAS_STATUS_INVALID_VALUE;
    }
    if (reinterpret_cast<std::uintptr_t>(p.workspace) % 16 != 0) return CUBLAS_STATUS_INVALID_VALUE;
    if (p.has(relu | relu_gradient)) return CUBLAS_STATUS_NOT_SUPPORTED;
    const bool in_8_bits = is_fp8(p.problem.a.type);
    if (!in_8_bits && (p.scale_a || p.scale_b)) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (in_8_bits && ((p.problem.epilogue != CUBLASLT_EPILOGUE_DEFAULT && p.problem.epilogue != add_bias) ||
                      (p.has(add_bias) && p.problem.d.type == CUDA_R_32F)))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    const bool type_of_bias = p.bias_type == (in_8_bits ? CUDA_R_16BF : p.problem.a.type) ||
                              (!in_8_bits && p.bias_type == p.problem.d.type);
    if (p.has(uses_bias) && (!p.bias || !type_of_bias)) return CUBLAS_STATUS_INVALID_VALUE;
    const bool aux_fits = p.aux && p.aux_leading >= p.problem.m && p.aux_leading % 8 == 0;
    if (p.has(with_aux) && !aux_fits) return CUBLAS_STATUS_INVALID_VALUE;
    // In place with the same layout, or at another place.
    if (p.c == p.d && p.problem.c.leading != p.problem.d.leading) return CUBLAS_STATUS_INVALID_VALUE;
    if (p.algorithm.splits > p.problem.k) return CUBLAS_STATUS_NOT_SUPPORTED;
    return check_algorithm(p.algorithm);
}

struct Operand {
    const char* name;
    const std::byte* data;
    std::size_t bytes;
    bool written;
};

std::vector<Operand> operands_of(const Product& p) {
    const Problem& problem = p.problem;
    std::vector<Operand> operands{{"A", p.a, problem.a.bytes(), false},
                                  {"B", p.b, problem.b.bytes(), false},
                                  {"D", p.d, problem.d.bytes(), true}};
    if (p.beta != 0 && p.c != p.d) operands.push_back({"C", p.c, problem.c.bytes(), false});
    if (const std::size_t bytes = p.algorithm.workspace_bytes(problem)) {
        operands.push_back({"the workspace", p.workspace, bytes, true});
    }
    if (p.has(uses_bias)) {
        const auto n = static_cast<std::size_t>(p.has(sum_of_b) ? problem.n : problem.m);
        operands.push_back({"the bias", p.bias, n * size_of(p.bias_type), !p.has(add_bias)});
    }
    if (p.scale_a) operands.push_back({"the scale of A", p.scale_a, sizeof(float), false});
    if (p.scale_b) operands.push_back({"the scale of B", p.scale_b, sizeof(float), false});
    if (p.has(with_aux)) {
        const Layout aux{p.aux_type, problem.m, problem.n, p.aux_leading};
        operands.push_back({"the auxiliary matrix", p.aux, aux.bytes(), p.has(gelu)});
    }
    return operands;
}

// Checks for what would give an undefined result on a GPU. oneDNN is compiled without sanitizers, so this
// code checks the memory.
void check_memory(const Memory& memory, const std::vector<Operand>& operands) {
    for (const Operand& x : operands) {
        if (!memory.block_of(x.data) || !memory.is_one_piece(x.data, x.bytes)) {
            stop(std::string("cublasLtMatmul: ") + x.name + " is not, or not wholly, in allocated memory");
        }
        for (const Operand& y : operands) {
            const bool overlap = x.data < y.data + y.bytes && y.data < x.data + x.bytes;
            if (&x != &y && x.written && overlap) {
                stop(std::string("cublasLtMatmul: ") + x.name + " lies over " + y.name);
            }
        }
    }
}

// A matrix with gaps makes one access for each column.
std::vector<Access> accesses_of(const Product& p) {
    std::vector<Access> accesses;
    const auto add = [&](const std::byte* data, const Layout& layout, bool written) {
        const auto column = static_cast<std::size_t>(layout.leading) * layout.element_bytes();
        if (layout.leading == layout.rows) {
            accesses.push_back({data, layout.bytes(), written});
            return;
        }
        for (std::int64_t j = 0; j < layout.columns; ++j) {
            accesses.push_back({data + static_cast<std::size_t>(j) * column,
                                static_cast<std::size_t>(layout.rows) * layout.element_bytes(), written});
        }
    };
    add(p.a, p.problem.a, false);
    add(p.b, p.problem.b, false);
    if (p.beta != 0 && p.c != p.d) add(p.c, p.problem.c, false);
    add(p.d, p.problem.d, true);
    for (const Operand& operand : operands_of(p)) {
        if (operand.data == p.workspace || operand.data == p.bias || operand.data == p.aux ||
            operand.data == p.scale_a || operand.data == p.scale_b) {
            accesses.push_back({operand.data, operand.bytes, operand.written});
        }
    }
    return accesses;
}

// ---- the computation ----

llmc::cpu::Products& products() {
    static auto& instance = *new llmc::cpu::Products(1);
    return instance;
}

// A factor as the CPU device's products take it: fp32 with TF32's significand of 10 bits, if asked for; widened, if
// the processor does not multiply its type; else read in place.
class Factor {
  public:
    Factor(const std::byte* data, const Layout& layout, bool transpose, bool is_tf32)
        : matrix_(nullptr, layout.rows, layout.columns) {
        const DType dtype = dtype_of(layout.type);
        const bool is_copy = is_tf32 || dtype == DType::fp16 /* or 8 bits */ ||
                             (dtype == DType::bf16 && !llmc::cpu::processor_has_bf16());
        if (is_copy) {
            copy_.resize(layout.bytes() / size_of(layout.type));
            for (std::size_t i = 0; i < copy_.size(); ++i)
                copy_[i] = load(data, layout.type, static_cast<std::int64_t>(i));
        }
        for (float& x : copy_) {
            if (is_tf32 && std::isfinite(x))
                x = std::bit_cast<float>((std::bit_cast<std::uint32_t>(x) + 0x1000u) & ~0x1fffu);
        }
        matrix_.data = is_copy ? reinterpret_cast<std::byte*>(copy_.data()) : const_cast<std::byte*>(data);
        matrix_.dtype = is_copy ? DType::fp32 : dtype;
        matrix_.row_stride = 1;
        matrix_.column_stride = layout.leading;
        if (transpose) matrix_ = matrix_.transposed();
    }
    Factor(const Factor&) = delete;
    Factor& operator=(const Factor&) = delete;

    const Matrix& matrix() const { return matrix_; }

  private:
    std::vector<float> copy_;
    Matrix matrix_;
};

// Hopper's tensor cores keep some 14 significant bits of a sum of products in 8 bits (DeepSeek-V3, section 3.3.2),
// and add those of every 128 to a sum in fp32.
constexpr std::int64_t fp8_run = 128;
float with_14_bits(float x) { return std::bit_cast<float>(std::bit_cast<std::uint32_t>(x) & ~0x3ffu); }

// op(A) op(B), in column-major order.
std::vector<float> product_of(const Product& p) {
    const Problem& problem = p.problem;
    const bool is_tf32 = problem.description.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    const Factor first(p.a, problem.a, problem.transpose_a, is_tf32),
        second(p.b, problem.b, problem.transpose_b, is_tf32);
    const Matrix &a = first.matrix(), &b = second.matrix();
    // The points where k is cut. The in-place algorithm cuts at another point in each run.
    const std::int64_t parts = p.algorithm.splits;
    std::vector<std::int64_t> cuts{0};
    for (std::int64_t part = 1; part < parts; ++part) cuts.push_back(part * problem.k / parts);
    cuts.push_back(problem.k);
    if (p.algorithm.reduction == CUBLASLT_REDUCTION_SCHEME_INPLACE) {
        cuts = {0, 1 + std::random_device{}() % (problem.k - 1), problem.k};
    }
    const bool in_8_bits = is_fp8(problem.a.type);
    for (std::int64_t k = fp8_run; in_8_bits && k < problem.k; k += fp8_run) cuts.push_back(k);
    std::ranges::sort(cuts);
    std::vector<float> sum(static_cast<std::size_t>(problem.m * problem.n));
    std::vector<float> of_part(in_8_bits ? sum.size() : 0);
    // Computed by rows, as the transposed product: for products by columns, oneDNN only has its slow
    // reference. The last part comes first, so that another cut gives another order of the additions.
    const Matrix result(in_8_bits ? of_part.data() : sum.data(), problem.n, problem.m);
    for (std::size_t part = cuts.size() - 1; part-- > 0;) {
        const std::int64_t begin = cuts[part], count = cuts[part + 1] - cuts[part];
        if (count == 0) continue;
        const bool adds = !in_8_bits && part + 2 < cuts.size();
        products().multiply(result, b.part(begin, count, 0, problem.n).transposed(),
                            a.part(0, problem.m, begin, count).transposed(),
                            adds ? llmc::cpu::Into::accumulate : llmc::cpu::Into::overwrite);
        for (std::size_t i = 0; i < of_part.size(); ++i) sum[i] += with_14_bits(of_part[i]);
    }
    return sum;
}

float gelu_of(float x) {
    const float t = std::tanh(0.7978845608f * (x + 0.044715f * x * x * x));
    return 0.5f * x * (1 + t);
}

float gelu_gradient_of(float x) {
    const float t = std::tanh(0.7978845608f * (x + 0.044715f * x * x * x));
    return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * 0.7978845608f * (1 + 3 * 0.044715f * x * x);
}

void compute(const Product& p) {
    const Problem& problem = p.problem;
    const std::vector<float> product = product_of(p);
    float scale = p.alpha;
    for (const std::byte* of_factor : {p.scale_a, p.scale_b})
        if (of_factor) scale *= load(of_factor, CUDA_R_32F, 0);
    std::vector<float> row_sums(static_cast<std::size_t>(problem.m));
    for (std::int64_t j = 0; j < problem.n; ++j) {
        for (std::int64_t i = 0; i < problem.m; ++i) {
            float x = scale * product[static_cast<std::size_t>(j * problem.m + i)];
            if (p.beta != 0) x += p.beta * load(p.c, problem.c.type, j * problem.c.leading + i);
            if (p.has(add_bias)) x += load(p.bias, p.bias_type, i);
            const std::int64_t in_aux = j * p.aux_leading + i;
            if (p.has(gelu) && p.has(with_aux)) store(p.aux, p.aux_type, in_aux, x);
            if (p.has(gelu)) x = gelu_of(x);
            if (p.has(gelu_gradient)) x *= gelu_gradient_of(load(p.aux, p.aux_type, in_aux));
            store(p.d, problem.d.type, j * problem.d.leading + i, x);
            row_sums[static_cast<std::size_t>(i)] += x;
        }
    }
    const auto sum_k = [&](const std::byte* data, const Layout& layout, std::int64_t stride,
                           std::int64_t along, std::int64_t count) {
        for (std::int64_t i = 0; i < count; ++i) {
            float sum = 0;
            for (std::int64_t k = 0; k < problem.k; ++k)
                sum += load(data, layout.type, i * stride + k * along);
            store(p.bias, p.bias_type, i, sum);
        }
    };
    const std::int64_t a_leading = problem.a.leading, b_leading = problem.b.leading;
    if (p.has(gradient_of_bias)) {
        for (std::int64_t i = 0; i < problem.m; ++i) {
            store(p.bias, p.bias_type, i, row_sums[static_cast<std::size_t>(i)]);
        }
    }
    if (p.has(sum_of_a)) {
        problem.transpose_a ? sum_k(p.a, problem.a, a_leading, 1, problem.m)
                            : sum_k(p.a, problem.a, 1, a_leading, problem.m);
    }
    if (p.has(sum_of_b)) {
        problem.transpose_b ? sum_k(p.b, problem.b, 1, b_leading, problem.n)
                            : sum_k(p.b, problem.b, b_leading, 1, problem.n);
    }
    if (p.algorithm.varies()) {
        // The last bit of the first number that is not 0: sums of zeros are the same in any order.
        static unsigned runs = 0;
        const auto bytes = static_cast<std::int64_t>(size_of(problem.d.type));
        const std::int64_t elements = problem.m * problem.n;
        std::int64_t place = 0;
        while (place < elements && load(p.d, problem.d.type, place) == 0) ++place;
        if (place < elements) p.d[place * bytes] ^= static_cast<std::byte>(++runs % 2);
    }
    // Overwrites the workspace, so that other data kept in it is lost.
    if (p.workspace) std::memset(p.workspace, 0xff, p.algorithm.workspace_bytes(problem));
}

// The code of an algorithm for one kind of product.
std::string code_of(const Product& p) {
    std::string code = "algorithm " + std::to_string(p.algorithm.id);
    for (const int part : {static_cast<int>(p.problem.a.type), static_cast<int>(p.problem.b.type),
                           static_cast<int>(p.problem.d.type), static_cast<int>(p.problem.epilogue),
                           static_cast<int>(p.problem.transpose_a), static_cast<int>(p.problem.transpose_b)})
        code += " " + std::to_string(part);
    return code;
}

// Computes, and adjusts the clock of events to the algorithm's speed, because algorithms are chosen by that
// clock. Every fifth product takes a second longer, as if the GPU had other work.
void compute_in_its_time(Runtime& r, const Product& p) {
    using std::chrono::steady_clock;
    static int products = 0;
    if (++products % 5 == 0) r.streams.add_time(std::chrono::seconds(1));
    const auto start = steady_clock::now();
    compute(p);
    r.counts.multiplies(p.algorithm.id);
    switch (p.algorithm.speed()) {
        case Speed::takes_no_time:
            return r.streams.add_time(start - steady_clock::now());
        case Speed::as_it_is:
            return;
        case Speed::slow:
            return r.streams.add_time(std::chrono::milliseconds(50));
    }
}

}  // namespace

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t description, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t c_layout, void* d, cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t* algo, void* workspace, std::size_t workspace_bytes,
                              cudaStream_t stream) {
    return cublas_call([&](Runtime& r) {
        if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
        if (!alpha || !beta) return CUBLAS_STATUS_INVALID_VALUE;
        Product p{};
        cublasStatus_t status = make_problem(description, a_layout, b_layout, c_layout, d_layout, &p.problem);
        if (status != CUBLAS_STATUS_SUCCESS) return status;
        // Without an algorithm, the library takes one that always works.
        p.algorithm = algo ? algorithm_in(*algo) : Algorithm{.id = 11, .alignment = {1, 1, 1, 1, 1}};
        p.alpha = *static_cast<const float*>(alpha);
        p.beta = *static_cast<const float*>(beta);
        p.a = static_cast<const std::byte*>(a);
        p.b = static_cast<const std::byte*>(b);
        p.c = static_cast<const std::byte*>(c);
        p.d = static_cast<std::byte*>(d);
        p.workspace = static_cast<std::byte*>(workspace);
        const Attributes& attributes = p.problem.description.attributes;
        const auto type = [&](int number) {
            const auto given = attributes.as<std::int32_t>(number);
            return given < 0 ? p.problem.d.type : static_cast<cudaDataType_t>(given);
        };
        p.bias = attributes.as<std::byte*>(CUBLASLT_MATMUL_DESC_BIAS_POINTER);
        p.bias_type = type(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE);
        p.scale_a = attributes.as<std::byte*>(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER);
        p.scale_b = attributes.as<std::byte*>(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER);
        p.aux = attributes.as<std::byte*>(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER);
        p.aux_type = type(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE);
        p.aux_leading = attributes.as<std::int64_t>(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD);
        status = check_operands(p, workspace_bytes);
        if (status != CUBLAS_STATUS_SUCCESS) return status;
        check_memory(r.memory, operands_of(p));
        if (p.algorithm.fails()) {
            last_error() = cudaErrorInvalidConfiguration;
            return CUBLAS_STATUS_EXECUTION_FAILED;
        }
        r.load(code_of(p), "a product's first launch");
        Multiprocessors& on = r.multiprocessors(r.streams.get(stream).device);
        r.streams.add(
            stream, "cublasLtMatmul",
            [&r, &on, p] {
                if (!on.has_free()) return false;
                r.counts.runs_beside(on.held());
                if (!r.strikes("launch")) compute_in_its_time(r, p);
                return true;
            },
            accesses_of(p), [&on] { return on.why_none_is_free(); });
        return CUBLAS_STATUS_SUCCESS;
    });
}
