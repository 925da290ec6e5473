// cublasLtMatmul: the CPU device's product (llmc/device/cpu/products.h). Sums are in fp32, and the result is
// rounded once.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <optional>
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

    bool has(unsigned bit) const { return problem.epilogue & bit; }
};

// The bits of cublasLtEpilogue_t.
constexpr unsigned relu = 2, add_bias = 4, relu_gradient = 8, gradient_of_bias = 16, gelu = 32,
                   gelu_gradient = 64, with_aux = 128, sum_of_a = 256, sum_of_b = 512;
constexpr unsigned uses_bias = add_bias | gradient_of_bias | sum_of_a | sum_of_b;

std::size_t size_of(cudaDataType_t type) { return type == CUDA_R_32F ? 4 : 2; }

float load(const std::byte* base, cudaDataType_t type, std::int64_t i) {
    if (type == CUDA_R_32F) return reinterpret_cast<const float*>(base)[i];
    return llmc::to_float(reinterpret_cast<const llmc::bfloat16*>(base)[i]);
}

void store(std::byte* base, cudaDataType_t type, std::int64_t i, float value) {
    if (type == CUDA_R_32F) {
        reinterpret_cast<float*>(base)[i] = value;
    } else {
        reinterpret_cast<llmc::bfloat16*>(base)[i] = llmc::to_bfloat16(value);
    }
}

// ---- refusals ----

cublasStatus_t check_operands(const Product& p, std::size_t workspace_bytes) {
    if (!p.a || !p.b || !p.d || (!p.c && p.beta != 0)) return CUBLAS_STATUS_INVALID_VALUE;
    const std::size_t needed = p.algorithm.workspace_bytes(p.problem);
    if (workspace_bytes < needed || (needed > 0 && !p.workspace)) return CUBLAS_STATUS_INVALID_VALUE;
    const std::array<const void*, 4> pointers = {p.a, p.b, p.c, p.d};
    for (std::size_t i = 0; i < pointers.size(); ++i) {
        if (reinterpret_cast<std::uintptr_t>(pointers[i]) % p.algorithm.alignment[i] != 0)
            return CUBLAS_STATUS_INVALID_VALUE;
    }
    if (reinterpret_cast<std::uintptr_t>(p.workspace) % 16 != 0) return CUBLAS_STATUS_INVALID_VALUE;
    if (p.has(relu | relu_gradient)) return CUBLAS_STATUS_NOT_SUPPORTED;
    const bool type_of_bias = p.bias_type == p.problem.d.type || p.bias_type == p.problem.a.type;
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
        if (operand.data == p.workspace || operand.data == p.bias || operand.data == p.aux) {
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

// A copy with TF32's significand of 10 bits.
std::vector<float> in_tf32(const std::byte* data, const Layout& layout) {
    const std::span values(reinterpret_cast<const float*>(data), layout.bytes() / sizeof(float));
    std::vector<float> rounded(values.begin(), values.end());
    for (float& x : rounded) {
        if (std::isfinite(x))
            x = std::bit_cast<float>((std::bit_cast<std::uint32_t>(x) + 0x1000u) & ~0x1fffu);
    }
    return rounded;
}

Matrix matrix(const void* data, const Layout& layout, bool transpose) {
    Matrix m(nullptr, layout.rows, layout.columns);
    m.data = const_cast<std::byte*>(static_cast<const std::byte*>(data));
    m.dtype = layout.type == CUDA_R_32F ? llmc::DType::fp32 : llmc::DType::bf16;
    m.row_stride = 1;
    m.column_stride = layout.leading;
    return transpose ? m.transposed() : m;
}

// op(A) op(B), in column-major order.
std::vector<float> product_of(const Product& p) {
    const Problem& problem = p.problem;
    std::optional<std::vector<float>> rounded_a, rounded_b;
    if (problem.description.compute == CUBLAS_COMPUTE_32F_FAST_TF32) {
        rounded_a = in_tf32(p.a, problem.a);
        rounded_b = in_tf32(p.b, problem.b);
    }
    const Matrix a =
        matrix(rounded_a ? static_cast<const void*>(rounded_a->data()) : p.a, problem.a, problem.transpose_a);
    const Matrix b =
        matrix(rounded_b ? static_cast<const void*>(rounded_b->data()) : p.b, problem.b, problem.transpose_b);
    // The points where k is cut. The in-place algorithm cuts at another point in each run.
    const std::int64_t parts = p.algorithm.splits;
    std::vector<std::int64_t> cuts{0};
    for (std::int64_t part = 1; part < parts; ++part) cuts.push_back(part * problem.k / parts);
    cuts.push_back(problem.k);
    if (p.algorithm.reduction == CUBLASLT_REDUCTION_SCHEME_INPLACE) {
        cuts = {0, 1 + std::random_device{}() % (problem.k - 1), problem.k};
    }
    std::vector<float> sum(static_cast<std::size_t>(problem.m * problem.n));
    // Computed by rows, as the transposed product: for products by columns, oneDNN only has its slow
    // reference. The last part comes first, so that another cut gives another order of the additions.
    const Matrix result(sum.data(), problem.n, problem.m);
    for (std::size_t part = cuts.size() - 1; part-- > 0;) {
        const std::int64_t first = cuts[part], count = cuts[part + 1] - cuts[part];
        products().multiply(
            result, b.part(first, count, 0, problem.n).transposed(),
            a.part(0, problem.m, first, count).transposed(),
            part + 2 == cuts.size() ? llmc::cpu::Into::overwrite : llmc::cpu::Into::accumulate);
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
    std::vector<float> row_sums(static_cast<std::size_t>(problem.m));
    for (std::int64_t j = 0; j < problem.n; ++j) {
        for (std::int64_t i = 0; i < problem.m; ++i) {
            float x = p.alpha * product[static_cast<std::size_t>(j * problem.m + i)];
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
    // Overwrites the workspace, so that other data kept in it is lost.
    if (p.workspace) std::memset(p.workspace, 0xff, p.algorithm.workspace_bytes(problem));
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
        p.algorithm = algo ? algorithm_in(*algo) : Algorithm{.id = 11, .alignment = {1, 1, 1, 1}};
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
        p.aux = attributes.as<std::byte*>(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER);
        p.aux_type = type(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE);
        p.aux_leading = attributes.as<std::int64_t>(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD);
        status = check_operands(p, workspace_bytes);
        if (status != CUBLAS_STATUS_SUCCESS) return status;
        check_memory(r.memory, operands_of(p));
        r.streams.add(
            stream, "cublasLtMatmul",
            [&r, p] {
                if (!r.strikes("launch")) compute_in_its_time(r, p);
                return true;
            },
            accesses_of(p));
        return CUBLAS_STATUS_SUCCESS;
    });
}
