// cuBLASLt's handles: products, matrices and preferences as attributes, set and read by number. An attribute
// that is not here is reported as not supported.
#include "simt/runtime/cublaslt.h"

namespace simt::runtime {
namespace {

template <class T>
std::uint64_t bits_of(T value) {
    std::uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    return bits;
}

template <class T>
Attributes::Attribute attribute(int number, T otherwise) {
    return {number, sizeof(T), bits_of(otherwise)};
}

constexpr std::int32_t not_set = -1;

Attributes attributes_of_product() {
    return {attribute<std::int32_t>(CUBLASLT_MATMUL_DESC_POINTER_MODE, CUBLASLT_POINTER_MODE_HOST),
            attribute<std::int32_t>(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_N),
            attribute<std::int32_t>(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N),
            attribute<std::uint32_t>(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_DEFAULT),
            attribute<void*>(CUBLASLT_MATMUL_DESC_BIAS_POINTER, nullptr),
            attribute<std::int32_t>(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, not_set),
            attribute<void*>(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, nullptr),
            attribute<void*>(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, nullptr),
            attribute<void*>(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, nullptr),
            attribute<std::int64_t>(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, 0),
            attribute<std::int32_t>(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, not_set),
            attribute<std::int32_t>(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, 0)};
}

Attributes attributes_of_matrix(cudaDataType_t type, std::uint64_t rows, std::uint64_t columns,
                                std::int64_t leading) {
    return {attribute<std::uint32_t>(CUBLASLT_MATRIX_LAYOUT_TYPE, type),
            attribute<std::int32_t>(CUBLASLT_MATRIX_LAYOUT_ORDER, CUBLASLT_ORDER_COL),
            attribute<std::uint64_t>(CUBLASLT_MATRIX_LAYOUT_ROWS, rows),
            attribute<std::uint64_t>(CUBLASLT_MATRIX_LAYOUT_COLS, columns),
            attribute<std::int64_t>(CUBLASLT_MATRIX_LAYOUT_LD, leading),
            attribute<std::int32_t>(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, 1)};
}

Attributes attributes_of_preference() {
    return {
        attribute<std::uint64_t>(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, 0),
        attribute<std::uint32_t>(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, CUBLASLT_REDUCTION_SCHEME_MASK),
        attribute<std::uint32_t>(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, 256),
        attribute<std::uint32_t>(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, 256),
        attribute<std::uint32_t>(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, 256),
        attribute<std::uint32_t>(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, 256)};
}

}  // namespace

Attributes::Attributes(std::initializer_list<Attribute> attributes) {
    for (const Attribute& a : attributes) attributes_.emplace(a.number, a);
}

cublasStatus_t Attributes::set(int number, const void* from, std::size_t bytes) {
    const auto attribute = attributes_.find(number);
    if (attribute == attributes_.end()) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (from == nullptr || bytes != attribute->second.bytes) return CUBLAS_STATUS_INVALID_VALUE;
    attribute->second.value = 0;
    std::memcpy(&attribute->second.value, from, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t Attributes::get(int number, void* to, std::size_t bytes, std::size_t* written) const {
    const auto attribute = attributes_.find(number);
    if (attribute == attributes_.end()) return CUBLAS_STATUS_NOT_SUPPORTED;
    const std::size_t size = attribute->second.bytes;
    if (bytes == 0 ? written == nullptr : to == nullptr || bytes != size) return CUBLAS_STATUS_INVALID_VALUE;
    if (bytes > 0) std::memcpy(to, &attribute->second.value, size);
    if (written) *written = size;
    return CUBLAS_STATUS_SUCCESS;
}

MatmulDescription* of(cublasLtMatmulDesc_t handle) { return reinterpret_cast<MatmulDescription*>(handle); }
Attributes* of(cublasLtMatrixLayout_t handle) { return reinterpret_cast<Attributes*>(handle); }
Attributes* of(cublasLtMatmulPreference_t handle) { return reinterpret_cast<Attributes*>(handle); }

std::size_t Layout::bytes() const {
    return static_cast<std::size_t>((columns - 1) * leading + rows) * element_bytes();
}

Layout layout_of(const Attributes& attributes) {
    return {static_cast<cudaDataType_t>(attributes.as<std::uint32_t>(CUBLASLT_MATRIX_LAYOUT_TYPE)),
            attributes.as<std::int64_t>(CUBLASLT_MATRIX_LAYOUT_ROWS),
            attributes.as<std::int64_t>(CUBLASLT_MATRIX_LAYOUT_COLS),
            attributes.as<std::int64_t>(CUBLASLT_MATRIX_LAYOUT_LD)};
}

}  // namespace simt::runtime

using namespace simt::runtime;

// ---- the library ----

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
    return cublas_call([&](Runtime&) {
        if (handle == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
        *handle = reinterpret_cast<cublasLtHandle_t>(new char);
        return CUBLAS_STATUS_SUCCESS;
    });
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    delete reinterpret_cast<char*>(handle);
    return CUBLAS_STATUS_SUCCESS;
}

std::size_t cublasLtGetVersion() { return CUBLAS_VERSION; }

const char* cublasLtGetStatusName(cublasStatus_t status) {
    switch (status) {
        case CUBLAS_STATUS_SUCCESS:
            return "CUBLAS_STATUS_SUCCESS";
        case CUBLAS_STATUS_NOT_INITIALIZED:
            return "CUBLAS_STATUS_NOT_INITIALIZED";
        case CUBLAS_STATUS_INVALID_VALUE:
            return "CUBLAS_STATUS_INVALID_VALUE";
        case CUBLAS_STATUS_NOT_SUPPORTED:
            return "CUBLAS_STATUS_NOT_SUPPORTED";
        case CUBLAS_STATUS_EXECUTION_FAILED:
            return "CUBLAS_STATUS_EXECUTION_FAILED";
        default:
            return "CUBLAS_STATUS_INTERNAL_ERROR";
    }
}

const char* cublasLtGetStatusString(cublasStatus_t status) { return cublasLtGetStatusName(status); }

// ---- products ----

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* handle, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
    if (handle == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    runtime().counts.describes("products");
    *handle = reinterpret_cast<cublasLtMatmulDesc_t>(
        new MatmulDescription{compute, scale, attributes_of_product()});
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t handle) {
    delete of(handle);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t handle,
                                              cublasLtMatmulDescAttributes_t attribute, const void* from,
                                              std::size_t bytes) {
    return handle ? of(handle)->attributes.set(attribute, from, bytes) : CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulDescGetAttribute(cublasLtMatmulDesc_t handle,
                                              cublasLtMatmulDescAttributes_t attribute, void* to,
                                              std::size_t bytes, std::size_t* written) {
    return handle ? of(handle)->attributes.get(attribute, to, bytes, written) : CUBLAS_STATUS_INVALID_VALUE;
}

// ---- matrices ----

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* handle, cudaDataType type,
                                          std::uint64_t rows, std::uint64_t columns, std::int64_t leading) {
    if (handle == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    runtime().counts.describes("matrices");
    *handle = reinterpret_cast<cublasLtMatrixLayout_t>(
        new Attributes(attributes_of_matrix(type, rows, columns, leading)));
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t handle) {
    delete of(handle);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t handle,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void* from,
                                                std::size_t bytes) {
    return handle ? of(handle)->set(attribute, from, bytes) : CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatrixLayoutGetAttribute(cublasLtMatrixLayout_t handle,
                                                cublasLtMatrixLayoutAttribute_t attribute, void* to,
                                                std::size_t bytes, std::size_t* written) {
    return handle ? of(handle)->get(attribute, to, bytes, written) : CUBLAS_STATUS_INVALID_VALUE;
}

// ---- preferences ----

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* handle) {
    if (handle == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    runtime().counts.describes("preferences");
    *handle = reinterpret_cast<cublasLtMatmulPreference_t>(new Attributes(attributes_of_preference()));
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t handle) {
    delete of(handle);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t handle,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* from, std::size_t bytes) {
    return handle ? of(handle)->set(attribute, from, bytes) : CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulPreferenceGetAttribute(cublasLtMatmulPreference_t handle,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, void* to,
                                                    std::size_t bytes, std::size_t* written) {
    return handle ? of(handle)->get(attribute, to, bytes, written) : CUBLAS_STATUS_INVALID_VALUE;
}
