// Implements cudnn_attention.h with cuDNN's graphs (scaled dot product attention; see "Attention" in its
// documentation). A graph is built once for each set of sizes, which may take seconds; each execution passes
// the operands' addresses. Q, K and V are read in place from packed (B,T,3,NH,HS); their gradients are
// written to the same layout. The library is loaded when first needed, so that a program also starts without
// it.
#include "llmc/device/cuda/cudnn_attention.h"

#include <cudnn.h>
#include <cudnn_frontend.h>
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <exception>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "llmc/device/cuda/shared_library.h"

// ---- The library

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

// The functions of cudnn.h that the frontend calls, with its names of parameters. Each calls the library's
// function of the same name.
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

// ---- Attention

namespace llmc::cuda {

namespace {

namespace fe = cudnn_frontend;

// Throws cuDNN's message on one line.
[[noreturn]] void refuse(const HeadSizes& s, std::string message) {
    std::ranges::replace(message, '\n', ' ');
    user_error(
        "--attention cudnn: cuDNN {} refuses attention of {} sequences of {} tokens with {} heads of {} "
        "channels: {}; use --attention flash",
        fe::detail::get_backend_version_string(), s.batch, s.sequence, s.heads, s.head_size, message);
}

class Handle {
  public:
    Handle() {
        library();  // a UserError if this machine has no cuDNN
        const cudnnStatus_t status = cudnnCreate(&handle_);
        if (status == CUDNN_STATUS_SUCCESS) return;
        user_error("--attention cudnn: cuDNN failed to start: {}; use --attention flash",
                   cudnnGetErrorString(status));
    }
    ~Handle() { cudnnDestroy(handle_); }
    Handle(const Handle&) = delete;
    Handle& operator=(const Handle&) = delete;
    cudnnHandle_t get() const { return handle_; }

  private:
    cudnnHandle_t handle_ = nullptr;
};

using TensorAttributes = fe::graph::Tensor_attributes;
using GraphTensor = std::shared_ptr<TensorAttributes>;

// The ids of operands in a graph. Those of Q, K and V, and those of their gradients, are consecutive.
enum Operand : std::int64_t { q = 1, k, v, dq, dk, dv, out, dout, lse };
using Addresses = std::unordered_map<std::int64_t, void*>;

// One pass for given sizes.
class Pass {
  public:
    explicit Pass(const HeadSizes& sizes) : sizes_(sizes) {
        graph_.set_io_data_type(fe::DataType_t::BFLOAT16)
            .set_intermediate_data_type(fe::DataType_t::FLOAT)
            .set_compute_data_type(fe::DataType_t::FLOAT);
    }

    void describe_forward() {
        auto options = fe::graph::SDPA_attributes().set_name("attention_forward").set_generate_stats(true);
        options.set_causal_mask(true).set_attn_scale(scale());
        const auto [result, stats] =
            graph_.sdpa(input(q, packed()), input(k, packed()), input(v, packed()), options);
        output(result, out, whole());
        output(stats, lse, log_sums());
    }

    void describe_backward() {
        auto options = fe::graph::SDPA_backward_attributes().set_name("attention_backward");
        options.set_causal_mask(true).set_attn_scale(scale()).set_deterministic_algorithm(true);
        const auto gradients =
            graph_.sdpa_backward(input(q, packed()), input(k, packed()), input(v, packed()),
                                 input(out, whole()), input(dout, whole()), input(lse, log_sums()), options);
        for (std::size_t i = 0; i < gradients.size(); ++i)
            output(gradients[i], static_cast<Operand>(dq + static_cast<std::int64_t>(i)), packed());
    }

    void build(cudnnHandle_t handle) {
        run_or_refuse([&] { return graph_.build(handle, {fe::HeurMode_t::A}); });
        run_or_refuse([&] { return graph_.get_workspace_size(workspace_bytes_); });
    }

    std::size_t workspace_bytes() const { return static_cast<std::size_t>(workspace_bytes_); }

    void run(cudnnHandle_t handle, Addresses& addresses, void* workspace) const {
        run_or_refuse([&] { return graph_.execute(handle, addresses, workspace); });
    }

  private:
    // Memory as a tensor (B,NH,T,HS), or (B,NH,T,1).
    struct Layout {
        std::vector<std::int64_t> sizes, strides;
        fe::DataType_t type = fe::DataType_t::BFLOAT16;
    };
    Layout of_parts(std::int64_t parts) const {
        const auto [B, T, NH, HS] = sizes_;
        return {{B, NH, T, HS}, {T * parts * NH * HS, HS, parts * NH * HS, 1}};
    }
    Layout packed() const { return of_parts(3); }
    Layout whole() const { return of_parts(1); }
    Layout log_sums() const {
        const auto [B, T, NH, HS] = sizes_;
        return {{B, NH, T, 1}, {NH * T, T, 1, 1}, fe::DataType_t::FLOAT};
    }

    GraphTensor input(Operand operand, const Layout& layout) {
        return graph_.tensor(TensorAttributes()
                                 .set_uid(operand)
                                 .set_dim(layout.sizes)
                                 .set_stride(layout.strides)
                                 .set_data_type(layout.type));
    }
    static void output(const GraphTensor& tensor, Operand operand, const Layout& layout) {
        tensor->set_output(true)
            .set_uid(operand)
            .set_dim(layout.sizes)
            .set_stride(layout.strides)
            .set_data_type(layout.type);
    }
    float scale() const { return 1.0f / std::sqrt(static_cast<float>(sizes_.head_size)); }

    // The frontend reports errors by its return value, and sometimes by an exception.
    template <class F>
    void run_or_refuse(F&& f) const {
        fe::error_t error;
        try {
            error = f();
        } catch (const UserError&) {
            throw;
        } catch (const std::exception& fault) {
            refuse(sizes_, fault.what());
        }
        if (error.is_bad()) refuse(sizes_, error.get_message());
    }

    HeadSizes sizes_;
    fe::graph::Graph graph_;
    std::int64_t workspace_bytes_ = 0;
};

// Adds the addresses of the three parts of a packed tensor.
void add_parts(Addresses& addresses, Operand first, const Tensor& packed, const HeadSizes& s) {
    const auto part_bytes = static_cast<std::size_t>(s.heads * s.head_size) * size_of(packed.dtype);
    for (std::size_t i = 0; i < 3; ++i)
        addresses[first + static_cast<std::int64_t>(i)] = packed.data + i * part_bytes;
}

class Attention final : public CudnnAttention {
  public:
    std::size_t workspace_bytes(const HeadSizes& sizes) override {
        planned_bytes_ = std::max(
            {planned_bytes_, forward_pass(sizes).workspace_bytes(), backward_pass(sizes).workspace_bytes()});
        return planned_bytes_;
    }

    void set_workspace(void* workspace) override { workspace_ = workspace; }

    void forward(cudaStream_t stream, const Tensor& to_out, const Tensor& to_lse, const Tensor& qkv,
                 const HeadSizes& sizes) override {
        Addresses addresses{{out, to_out.data}, {lse, to_lse.data}};
        add_parts(addresses, q, qkv, sizes);
        run(stream, forward_pass(sizes), addresses);
    }

    void backward(cudaStream_t stream, const Tensor& to_dqkv, const Tensor& of_dout, const Tensor& qkv,
                  const Tensor& of_out, const Tensor& of_lse, const HeadSizes& sizes) override {
        Addresses addresses{{dout, of_dout.data}, {out, of_out.data}, {lse, of_lse.data}};
        add_parts(addresses, q, qkv, sizes);
        add_parts(addresses, dq, to_dqkv, sizes);
        run(stream, backward_pass(sizes), addresses);
    }

  private:
    using Passes = std::map<HeadSizes, std::unique_ptr<Pass>>;

    const Pass& forward_pass(const HeadSizes& sizes) {
        return pass(forward_, sizes, [](Pass& made) { made.describe_forward(); });
    }
    const Pass& backward_pass(const HeadSizes& sizes) {
        return pass(backward_, sizes, [](Pass& made) { made.describe_backward(); });
    }
    template <class F>
    const Pass& pass(Passes& passes, const HeadSizes& sizes, F&& describe) {
        const auto found = passes.find(sizes);
        if (found != passes.end()) return *found->second;
        auto made = std::make_unique<Pass>(sizes);
        describe(*made);
        made->build(handle_.get());
        return *(passes[sizes] = std::move(made));
    }

    void run(cudaStream_t stream, const Pass& pass, Addresses& addresses) {
        check(pass.workspace_bytes() <= planned_bytes_, "the workspace was planned for these sizes");
        check(cudnnSetStream(handle_.get(), stream) == CUDNN_STATUS_SUCCESS, "cudnnSetStream");
        pass.run(handle_.get(), addresses, workspace_);
    }

    Handle handle_;
    Passes forward_, backward_;
    std::size_t planned_bytes_ = 0;
    void* workspace_ = nullptr;
};

}  // namespace

std::unique_ptr<CudnnAttention> make_cudnn_attention() { return std::make_unique<Attention>(); }

}  // namespace llmc::cuda
