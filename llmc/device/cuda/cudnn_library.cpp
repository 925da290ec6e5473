// The functions of cudnn.h that the frontend calls. Each calls the library's function of the same name.
#include "llmc/device/cuda/cudnn_library.h"

#include <cudnn.h>
#include <fmt/core.h>

#include "llmc/device/cuda/shared_library.h"

namespace {

const llmc::cuda::SharedLibrary& library() {
    static const llmc::cuda::SharedLibrary loaded(
        LLMC_LIBRARY_FILE("cudnn", CUDNN_MAJOR),
        {.needed_by = "--attention cudnn",
         .source = fmt::format("cuDNN is in NVIDIA's packages and in PyPI's nvidia-cudnn-cu{}",
                               CUDART_VERSION / 1000),
         .instead = "--attention flash"});
    return loaded;
}

}  // namespace

// Parameter names are those of cudnn.h.
extern "C" {
cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) { return library().call<cudnnCreate>(__func__, handle); }
cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) { return library().call<cudnnDestroy>(__func__, handle); }
size_t cudnnGetVersion() { return library().call<cudnnGetVersion>(__func__); }
const char* cudnnGetErrorString(cudnnStatus_t status) {
    return library().call<cudnnGetErrorString>(__func__, status);
}
void cudnnGetLastErrorString(char* message, size_t max_size) {
    return library().call<cudnnGetLastErrorString>(__func__, message, max_size);
}
cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t streamId) {
    return library().call<cudnnSetStream>(__func__, handle, streamId);
}
cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t* streamId) {
    return library().call<cudnnGetStream>(__func__, handle, streamId);
}
cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t descriptorType,
                                           cudnnBackendDescriptor_t* descriptor) {
    return library().call<cudnnBackendCreateDescriptor>(__func__, descriptorType, descriptor);
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
    return library().call<cudnnBackendDestroyDescriptor>(__func__, descriptor);
}
cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor,
                                       cudnnBackendAttributeName_t attributeName,
                                       cudnnBackendAttributeType_t attributeType, int64_t elementCount,
                                       const void* arrayOfElements) {
    return library().call<cudnnBackendSetAttribute>(__func__, descriptor, attributeName, attributeType,
                                                    elementCount, arrayOfElements);
}
cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t descriptor,
                                       cudnnBackendAttributeName_t attributeName,
                                       cudnnBackendAttributeType_t attributeType,
                                       int64_t requestedElementCount, int64_t* elementCount,
                                       void* arrayOfElements) {
    return library().call<cudnnBackendGetAttribute>(__func__, descriptor, attributeName, attributeType,
                                                    requestedElementCount, elementCount, arrayOfElements);
}
cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor) {
    return library().call<cudnnBackendFinalize>(__func__, descriptor);
}
cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t executionPlan,
                                  cudnnBackendDescriptor_t variantPack) {
    return library().call<cudnnBackendExecute>(__func__, handle, executionPlan, variantPack);
}
}  // extern "C"

namespace llmc::cuda {

void require_cudnn() { library(); }

}  // namespace llmc::cuda
