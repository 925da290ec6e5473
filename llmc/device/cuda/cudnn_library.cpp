// Those functions of cudnn.h that the frontend calls: each calls the one of its name in the library.
#include "llmc/device/cuda/cudnn_library.h"

#include <cudnn.h>
#include <dlfcn.h>
#include <fmt/core.h>

#include <string>

#include "llmc/core/error.h"

namespace {

// Stays loaded to the end of the program.
class Library {
  public:
    Library() : handle_(dlopen(name().c_str(), RTLD_NOW | RTLD_LOCAL)) {
        if (handle_ != nullptr) return;
        llmc::user_error(
            "--attention cudnn: {}; put the folder of {} into LD_LIBRARY_PATH (cuDNN is in NVIDIA's packages "
            "and in PyPI's nvidia-cudnn-cu{}), or take --attention flash",
            dlerror(), name(), CUDART_VERSION / 1000);
    }

    static const Library& loaded() {
        static const Library library;
        return library;
    }

    void* find(const char* function) const {
        void* const found = dlsym(handle_, function);
        if (found == nullptr) {
            llmc::user_error(
                "--attention cudnn: {} here is too old, it has no {}; take a newer one, or --attention flash",
                name(), function);
        }
        return found;
    }

  private:
    static std::string name() { return fmt::format("libcudnn.so.{}", CUDNN_MAJOR); }

    void* handle_;
};

template <class Function, class... Arguments>
auto call(const char* name, Arguments... arguments) {
    return reinterpret_cast<Function*>(Library::loaded().find(name))(arguments...);
}

}  // namespace

// Parameters have the names of cudnn.h.
extern "C" {
cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
    return call<decltype(cudnnCreate)>("cudnnCreate", handle);
}
cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
    return call<decltype(cudnnDestroy)>("cudnnDestroy", handle);
}
size_t cudnnGetVersion() { return call<decltype(cudnnGetVersion)>("cudnnGetVersion"); }
const char* cudnnGetErrorString(cudnnStatus_t status) {
    return call<decltype(cudnnGetErrorString)>("cudnnGetErrorString", status);
}
void cudnnGetLastErrorString(char* message, size_t max_size) {
    return call<decltype(cudnnGetLastErrorString)>("cudnnGetLastErrorString", message, max_size);
}
cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t streamId) {
    return call<decltype(cudnnSetStream)>("cudnnSetStream", handle, streamId);
}
cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t* streamId) {
    return call<decltype(cudnnGetStream)>("cudnnGetStream", handle, streamId);
}
cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t descriptorType,
                                           cudnnBackendDescriptor_t* descriptor) {
    return call<decltype(cudnnBackendCreateDescriptor)>("cudnnBackendCreateDescriptor", descriptorType,
                                                        descriptor);
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
    return call<decltype(cudnnBackendDestroyDescriptor)>("cudnnBackendDestroyDescriptor", descriptor);
}
cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor,
                                       cudnnBackendAttributeName_t attributeName,
                                       cudnnBackendAttributeType_t attributeType, int64_t elementCount,
                                       const void* arrayOfElements) {
    return call<decltype(cudnnBackendSetAttribute)>("cudnnBackendSetAttribute", descriptor, attributeName,
                                                    attributeType, elementCount, arrayOfElements);
}
cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t descriptor,
                                       cudnnBackendAttributeName_t attributeName,
                                       cudnnBackendAttributeType_t attributeType,
                                       int64_t requestedElementCount, int64_t* elementCount,
                                       void* arrayOfElements) {
    return call<decltype(cudnnBackendGetAttribute)>("cudnnBackendGetAttribute", descriptor, attributeName,
                                                    attributeType, requestedElementCount, elementCount,
                                                    arrayOfElements);
}
cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor) {
    return call<decltype(cudnnBackendFinalize)>("cudnnBackendFinalize", descriptor);
}
cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t executionPlan,
                                  cudnnBackendDescriptor_t variantPack) {
    return call<decltype(cudnnBackendExecute)>("cudnnBackendExecute", handle, executionPlan, variantPack);
}
}  // extern "C"

namespace llmc::cuda {

void require_cudnn() { Library::loaded(); }

}  // namespace llmc::cuda
