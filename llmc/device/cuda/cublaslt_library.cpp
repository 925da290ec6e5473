// The functions of cublasLt.h that LtProducts calls. Each calls the library's function of the same name.
// Linking the library would cost 0.1 s at every start of the program, to relocate its addresses, even without
// a GPU.
#include <cublasLt.h>

#include "llmc/device/cuda/shared_library.h"

namespace {

const llmc::cuda::SharedLibrary& library() {
    static const llmc::cuda::SharedLibrary loaded(LLMC_LIBRARY_FILE("cublasLt", CUBLAS_VER_MAJOR),
                                                  {.needed_by = "--device cuda",
                                                   .source = "the CUDA toolkit has it, and PyTorch for CUDA",
                                                   .instead = "--device cpu"});
    return loaded;
}

}  // namespace

// Parameter names are those of cublasLt.h.
extern "C" {
cublasStatus_t cublasLtCreate(cublasLtHandle_t* lightHandle) {
    return library().call<cublasLtCreate>(__func__, lightHandle);
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t lightHandle) {
    return library().call<cublasLtDestroy>(__func__, lightHandle);
}
const char* cublasLtGetStatusString(cublasStatus_t status) {
    return library().call<cublasLtGetStatusString>(__func__, status);
}
size_t cublasLtGetVersion() { return library().call<cublasLtGetVersion>(__func__); }
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* matmulDesc, cublasComputeType_t computeType,
                                        cudaDataType_t scaleType) {
    return library().call<cublasLtMatmulDescCreate>(__func__, matmulDesc, computeType, scaleType);
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t matmulDesc) {
    return library().call<cublasLtMatmulDescDestroy>(__func__, matmulDesc);
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t matmulDesc,
                                              cublasLtMatmulDescAttributes_t attr, const void* buf,
                                              size_t sizeInBytes) {
    return library().call<cublasLtMatmulDescSetAttribute>(__func__, matmulDesc, attr, buf, sizeInBytes);
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* matLayout, cudaDataType type, uint64_t rows,
                                          uint64_t cols, int64_t ld) {
    return library().call<cublasLtMatrixLayoutCreate>(__func__, matLayout, type, rows, cols, ld);
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t matLayout) {
    return library().call<cublasLtMatrixLayoutDestroy>(__func__, matLayout);
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* pref) {
    return library().call<cublasLtMatmulPreferenceCreate>(__func__, pref);
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t pref) {
    return library().call<cublasLtMatmulPreferenceDestroy>(__func__, pref);
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t pref,
                                                    cublasLtMatmulPreferenceAttributes_t attr,
                                                    const void* buf, size_t sizeInBytes) {
    return library().call<cublasLtMatmulPreferenceSetAttribute>(__func__, pref, attr, buf, sizeInBytes);
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t lightHandle,
                                              cublasLtMatmulDesc_t operationDesc,
                                              cublasLtMatrixLayout_t Adesc, cublasLtMatrixLayout_t Bdesc,
                                              cublasLtMatrixLayout_t Cdesc, cublasLtMatrixLayout_t Ddesc,
                                              cublasLtMatmulPreference_t preference, int requestedAlgoCount,
                                              cublasLtMatmulHeuristicResult_t heuristicResultsArray[],
                                              int* returnAlgoCount) {
    return library().call<cublasLtMatmulAlgoGetHeuristic>(__func__, lightHandle, operationDesc, Adesc, Bdesc,
                                                          Cdesc, Ddesc, preference, requestedAlgoCount,
                                                          heuristicResultsArray, returnAlgoCount);
}
cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t lightHandle, cublasLtMatmulDesc_t operationDesc,
                                       cublasLtMatrixLayout_t Adesc, cublasLtMatrixLayout_t Bdesc,
                                       cublasLtMatrixLayout_t Cdesc, cublasLtMatrixLayout_t Ddesc,
                                       const cublasLtMatmulAlgo_t* algo,
                                       cublasLtMatmulHeuristicResult_t* result) {
    return library().call<cublasLtMatmulAlgoCheck>(__func__, lightHandle, operationDesc, Adesc, Bdesc, Cdesc,
                                                   Ddesc, algo, result);
}
cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* algo,
                                                    cublasLtMatmulAlgoConfigAttributes_t attr, void* buf,
                                                    size_t sizeInBytes, size_t* sizeWritten) {
    return library().call<cublasLtMatmulAlgoConfigGetAttribute>(__func__, algo, attr, buf, sizeInBytes,
                                                                sizeWritten);
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t lightHandle, cublasLtMatmulDesc_t computeDesc,
                              const void* alpha, const void* A, cublasLtMatrixLayout_t Adesc, const void* B,
                              cublasLtMatrixLayout_t Bdesc, const void* beta, const void* C,
                              cublasLtMatrixLayout_t Cdesc, void* D, cublasLtMatrixLayout_t Ddesc,
                              const cublasLtMatmulAlgo_t* algo, void* workspace, size_t workspaceSizeInBytes,
                              cudaStream_t stream) {
    return library().call<cublasLtMatmul>(__func__, lightHandle, computeDesc, alpha, A, Adesc, B, Bdesc, beta,
                                          C, Cdesc, D, Ddesc, algo, workspace, workspaceSizeInBytes, stream);
}
}  // extern "C"
