// cuBLASLt's algorithms. There are five, so that a program can choose. By default the first permitted one is
// not the fastest by the clock of events, and the fastest of all is not to be trusted:
//   44  one sum over k; it is offered first of all, passes cublasLtMatmulAlgoCheck, and fails in cublasLtMatmul, with
//       an error that the next call of cudaGetLastError finds
//   11  one sum over k; takes 50 ms longer than the computation; SIMT_SLOW_ALGORITHM can name another as the slow one
//   22  k in two parts that are added in the result, in an order that differs from run to run: it is offered first,
//       takes no time, and gives other bits each time
//   33  k in two parts that are added in a fixed order, in a workspace
//   55  one sum over k; it is offered last, takes no time, and gives other bits each time, though its attributes
//       promise the same
#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

#include "simt/runtime/cublaslt.h"

namespace simt::runtime {
namespace {

constexpr int plain = 11, split_in_place = 22, split_in_workspace = 33, failing = 44, varying = 55;

bool is_known(int id) {
    return id == plain || id == split_in_place || id == split_in_workspace || id == failing || id == varying;
}
constexpr std::size_t counters = 4096;  // bytes of algorithm 22's counters, in the workspace

using Opaque = cublasLtMatmulAlgo_t;
static_assert(sizeof(Algorithm) <= sizeof(Opaque));

void store(const Algorithm& algorithm, Opaque* algo) {
    *algo = {};
    std::memcpy(algo, &algorithm, sizeof(algorithm));
}

Algorithm algorithm_of(int id) {
    Algorithm algorithm{.id = id};
    if (id == split_in_place) {
        algorithm.splits = 2;
        algorithm.reduction = CUBLASLT_REDUCTION_SCHEME_INPLACE;
    }
    if (id == split_in_workspace) {
        algorithm.splits = 2;
        algorithm.reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    }
    return algorithm;
}

// Calls f with the member for an attribute.
template <class A, class F>
cublasStatus_t with_attribute(A& algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute, const F& f) {
    switch (attribute) {
        case CUBLASLT_ALGO_CONFIG_ID:
            return f(algorithm.id);
        case CUBLASLT_ALGO_CONFIG_TILE_ID:
            return f(algorithm.tile);
        case CUBLASLT_ALGO_CONFIG_SPLITK_NUM:
            return f(algorithm.splits);
        case CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME:
            return f(algorithm.reduction);
        case CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING:
            return f(algorithm.swizzling);
        case CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION:
            return f(algorithm.option);
        case CUBLASLT_ALGO_CONFIG_STAGES_ID:
            return f(algorithm.stages);
        case CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID:
            return f(algorithm.inner_shape);
        case CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID:
            return f(algorithm.cluster_shape);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

// What the library takes of 8 bits: from sm_89 on, with both factors along k, and columns of whole 16 bytes.
bool fits_fp8(const Problem& p) {
    const bool is_one_kind = is_fp8(p.a.type) && is_fp8(p.b.type);
    const bool both_e5m2 = p.a.type == CUDA_R_8F_E5M2 && p.b.type == CUDA_R_8F_E5M2;
    const bool is_whole = p.a.leading % 16 == 0 && p.b.leading % 16 == 0 &&
                          p.d.leading * static_cast<std::int64_t>(size_of(p.d.type)) % 16 == 0;
    return runtime().settings.chip.architecture >= 89 && is_one_kind && !both_e5m2 && p.transpose_a &&
           !p.transpose_b && is_whole;
}

}  // namespace

std::size_t Algorithm::workspace_bytes(const Problem& problem) const {
    if (reduction == CUBLASLT_REDUCTION_SCHEME_INPLACE) return counters;
    if (reduction == CUBLASLT_REDUCTION_SCHEME_NONE) return 0;
    return static_cast<std::size_t>(problem.m * problem.n * splits) * sizeof(float);
}

bool Algorithm::fails() const { return id == failing; }
bool Algorithm::varies() const { return id == varying; }

Speed Algorithm::speed() const {
    if (id == split_in_place || id == varying) return Speed::takes_no_time;
    return id == runtime().settings.slow_algorithm ? Speed::slow : Speed::as_it_is;
}

Algorithm algorithm_in(const cublasLtMatmulAlgo_t& algo) {
    Algorithm algorithm{.id = 0};
    std::memcpy(static_cast<void*>(&algorithm), &algo, sizeof(algorithm));
    return algorithm;
}

cublasStatus_t check_algorithm(const Algorithm& algorithm) {
    const bool split = algorithm.reduction != CUBLASLT_REDUCTION_SCHEME_NONE;
    if (!is_known(algorithm.id)) return CUBLAS_STATUS_INVALID_VALUE;
    if (std::ranges::find(algorithm.alignment, 0) != algorithm.alignment.end())
        return CUBLAS_STATUS_INVALID_VALUE;
    const bool is_of_splits = algorithm.id == split_in_place || algorithm.id == split_in_workspace;
    return split == is_of_splits && split == (algorithm.splits > 1) ? CUBLAS_STATUS_SUCCESS
                                                                    : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t make_problem(cublasLtMatmulDesc_t description, cublasLtMatrixLayout_t a,
                            cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                            Problem* problem) {
    if (!description || !a || !b || !c || !d) return CUBLAS_STATUS_INVALID_VALUE;
    const Attributes& attributes = of(description)->attributes;
    Problem p{.description = *of(description),
              .transpose_a = attributes.as<std::int32_t>(CUBLASLT_MATMUL_DESC_TRANSA) != CUBLAS_OP_N,
              .transpose_b = attributes.as<std::int32_t>(CUBLASLT_MATMUL_DESC_TRANSB) != CUBLAS_OP_N,
              .epilogue = attributes.as<cublasLtEpilogue_t>(CUBLASLT_MATMUL_DESC_EPILOGUE),
              .a = layout_of(*of(a)),
              .b = layout_of(*of(b)),
              .c = layout_of(*of(c)),
              .d = layout_of(*of(d)),
              .m = 0,
              .n = 0,
              .k = 0};
    for (const Attributes* matrix : {of(a), of(b), of(c), of(d)}) {
        const Layout layout = layout_of(*matrix);
        if (layout.rows < 1 || layout.columns < 1 || layout.leading < layout.rows)
            return CUBLAS_STATUS_INVALID_VALUE;
        if (matrix->as<std::int32_t>(CUBLASLT_MATRIX_LAYOUT_ORDER) != CUBLASLT_ORDER_COL ||
            matrix->as<std::int32_t>(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) != 1) {
            return CUBLAS_STATUS_NOT_SUPPORTED;
        }
    }
    p.m = p.transpose_a ? p.a.columns : p.a.rows;
    p.k = p.transpose_a ? p.a.rows : p.a.columns;
    p.n = p.transpose_b ? p.b.rows : p.b.columns;
    const std::int64_t k_of_b = p.transpose_b ? p.b.columns : p.b.rows;
    const bool fits =
        k_of_b == p.k && p.c.rows == p.m && p.c.columns == p.n && p.d.rows == p.m && p.d.columns == p.n;
    if (!fits) return CUBLAS_STATUS_INVALID_VALUE;

    const bool eighth = is_fp8(p.a.type) || is_fp8(p.b.type);
    const bool half = p.a.type == CUDA_R_16BF || p.a.type == CUDA_R_16F;
    const bool of_16_or_32 = p.b.type == p.a.type && (half || p.a.type == CUDA_R_32F) &&
                             (p.d.type == CUDA_R_32F || p.d.type == p.a.type);
    const bool types = p.c.type == p.d.type && !is_fp8(p.d.type) && (eighth ? fits_fp8(p) : of_16_or_32);
    const auto compute = p.description.compute;
    const bool computes = p.description.scale == CUDA_R_32F &&
                          (compute == CUBLAS_COMPUTE_32F ||
                           (compute == CUBLAS_COMPUTE_32F_FAST_TF32 && p.a.type == CUDA_R_32F));
    const bool host_scalars =
        attributes.as<std::int32_t>(CUBLASLT_MATMUL_DESC_POINTER_MODE) == CUBLASLT_POINTER_MODE_HOST;
    if (!types || !computes || !host_scalars) return CUBLAS_STATUS_NOT_SUPPORTED;
    *problem = std::move(p);
    return CUBLAS_STATUS_SUCCESS;
}

}  // namespace simt::runtime

using namespace simt::runtime;

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t description,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t results[], int* found) {
    return cublas_call([&](Runtime&) {
        if (!handle || !preference || !results || !found || wanted < 1) return CUBLAS_STATUS_INVALID_VALUE;
        *found = 0;
        Problem problem{};
        const cublasStatus_t status = make_problem(description, a, b, c, d, &problem);
        if (status != CUBLAS_STATUS_SUCCESS) return status;
        const auto allowed = of(preference)->as<std::uint64_t>(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
        const auto schemes = of(preference)->as<std::uint32_t>(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK);
        // Here each algorithm requires the whole alignment that the caller promises. The library requires
        // less. A false promise thus fails here.
        constexpr std::array promises = {
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
        std::array<std::uint16_t, promises.size() + 1> alignment{};
        for (std::size_t i = 0; i < promises.size(); ++i)
            alignment[i] = static_cast<std::uint16_t>(of(preference)->as<std::uint32_t>(promises[i]));
        // The bias is promised by its address. A null one promises the most.
        const auto bias =
            problem.description.attributes.as<std::uintptr_t>(CUBLASLT_MATMUL_DESC_BIAS_POINTER);
        alignment.back() =
            static_cast<std::uint16_t>(std::min<std::uintptr_t>(256, bias ? bias & -bias : 256));
        for (const int id : {failing, split_in_place, plain, split_in_workspace, varying}) {
            Algorithm algorithm = algorithm_of(id);
            algorithm.alignment = alignment;
            const bool split = algorithm.splits > 1;
            if (*found == wanted || (split && (problem.k < 2 || !(schemes & algorithm.reduction))) ||
                algorithm.workspace_bytes(problem) > allowed) {
                continue;
            }
            cublasLtMatmulHeuristicResult_t& result = results[(*found)++];
            result = {};
            store(algorithm, &result.algo);
            result.workspaceSize = algorithm.workspace_bytes(problem);
            result.state = CUBLAS_STATUS_SUCCESS;
            result.wavesCount = 1;
        }
        return *found > 0 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
    });
}

cublasStatus_t cublasLtMatmulAlgoInit(cublasLtHandle_t handle, cublasComputeType_t, cudaDataType_t,
                                      cudaDataType_t, cudaDataType_t, cudaDataType_t, cudaDataType_t, int id,
                                      cublasLtMatmulAlgo_t* algo) {
    if (!handle || !algo) return CUBLAS_STATUS_INVALID_VALUE;
    const Algorithm algorithm{.id = id};  // not yet configured
    if (!is_known(id)) return CUBLAS_STATUS_INVALID_VALUE;
    store(algorithm, algo);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t description,
                                       cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                       cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t* algo,
                                       cublasLtMatmulHeuristicResult_t* result) {
    return cublas_call([&](Runtime&) {
        if (!handle || !algo || !result) return CUBLAS_STATUS_INVALID_VALUE;
        Problem problem{};
        const Algorithm algorithm = algorithm_in(*algo);
        cublasStatus_t status = make_problem(description, a, b, c, d, &problem);
        if (status == CUBLAS_STATUS_SUCCESS) status = check_algorithm(algorithm);
        if (status == CUBLAS_STATUS_SUCCESS && algorithm.splits > problem.k)
            status = CUBLAS_STATUS_NOT_SUPPORTED;
        result->state = status;
        if (status == CUBLAS_STATUS_SUCCESS) result->workspaceSize = algorithm.workspace_bytes(problem);
        result->wavesCount = 1;
        return status;
    });
}

cublasStatus_t cublasLtMatmulAlgoConfigSetAttribute(cublasLtMatmulAlgo_t* algo,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute,
                                                    const void* from, std::size_t bytes) {
    if (!algo || !from || attribute == CUBLASLT_ALGO_CONFIG_ID) return CUBLAS_STATUS_INVALID_VALUE;
    Algorithm algorithm = algorithm_in(*algo);
    const cublasStatus_t status = with_attribute(algorithm, attribute, [&](auto& member) {
        if (bytes != sizeof(member)) return CUBLAS_STATUS_INVALID_VALUE;
        std::memcpy(&member, from, bytes);
        return CUBLAS_STATUS_SUCCESS;
    });
    store(algorithm, algo);
    return status;
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* algo,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute, void* to,
                                                    std::size_t bytes, std::size_t* written) {
    if (!algo) return CUBLAS_STATUS_INVALID_VALUE;
    const Algorithm algorithm = algorithm_in(*algo);
    return with_attribute(algorithm, attribute, [&](const auto& member) {
        if (bytes == 0 ? !written : !to || bytes != sizeof(member)) return CUBLAS_STATUS_INVALID_VALUE;
        if (bytes > 0) std::memcpy(to, &member, bytes);
        if (written) *written = sizeof(member);
        return CUBLAS_STATUS_SUCCESS;
    });
}
