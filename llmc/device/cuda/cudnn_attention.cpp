// Implements cudnn_attention.h with cuDNN's graphs (scaled dot product attention; see "Attention" in its
// documentation). A graph is built once for each set of sizes and strides, which may take seconds; each
// execution passes the operands' addresses. Q, K and V are read in place, by the strides of their rows; their
// gradients are written likewise. The library is loaded when first needed, so that a program also starts
// without it.
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
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "llmc/core/standard_streams.h"
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

// The elements from row to row of each tensor in which heads lie.
struct RowStrides {
    std::int64_t q, k, v;
    auto operator<=>(const RowStrides&) const = default;
};
RowStrides strides_of(const Heads& q, const Heads& k, const Heads& v) {
    return {q.rows.shape.last(), k.rows.shape.last(), v.rows.shape.last()};
}

// A plan is made for these sizes. The gradients' strides are those of q, k and v in a plan of the forward
// pass.
struct PlanSizes {
    AttentionShape heads;
    RowStrides inputs, gradients;
    auto operator<=>(const PlanSizes&) const = default;
};

// Says on one line what cuDNN refuses, and why.
std::string refusal(std::string_view pass, const AttentionShape& s, std::string message) {
    std::ranges::replace(message, '\n', ' ');
    return fmt::format(
        "--attention cudnn: cuDNN {} refuses the {} pass of attention for {} sequences of {} tokens with {} "
        "heads of {} channels, {} heads of keys, {}: {}; this program's own kernels compute it",
        fe::detail::get_backend_version_string(), pass, s.batch, s.sequence, s.heads, s.head_size,
        s.key_heads, s.window < s.sequence ? fmt::format("a window of {}", s.window) : "no window", message);
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

// The ids of operands in a graph.
enum Operand : std::int64_t { q = 1, k, v, dq, dk, dv, out, dout, lse };
using Addresses = std::unordered_map<std::int64_t, void*>;

// One pass for given sizes.
class Pass {
  public:
    explicit Pass(const PlanSizes& sizes) : sizes_(sizes.heads), in_(sizes.inputs), made_(sizes.gradients) {
        graph_.set_io_data_type(fe::DataType_t::BFLOAT16)
            .set_intermediate_data_type(fe::DataType_t::FLOAT)
            .set_compute_data_type(fe::DataType_t::FLOAT);
    }

    void describe_forward() {
        auto options = fe::graph::SDPA_attributes().set_name("attention_forward").set_generate_stats(true);
        set_mask(options);
        const auto [result, stats] =
            graph_.sdpa(input(q, queries(in_.q)), input(k, keys(in_.k)), input(v, keys(in_.v)), options);
        output(result, out, whole());
        output(stats, lse, log_sums());
    }

    void describe_backward() {
        auto options = fe::graph::SDPA_backward_attributes().set_name("attention_backward");
        set_mask(options);
        options.set_deterministic_algorithm(true);
        const auto [of_q, of_k, of_v] =
            graph_.sdpa_backward(input(q, queries(in_.q)), input(k, keys(in_.k)), input(v, keys(in_.v)),
                                 input(out, whole()), input(dout, whole()), input(lse, log_sums()), options);
        output(of_q, dq, queries(made_.q));
        output(of_k, dk, keys(made_.k));
        output(of_v, dv, keys(made_.v));
    }

    // Returns cuDNN's message if it refuses; empty: the pass can run.
    std::string build(cudnnHandle_t handle) {
        std::string message = message_of([&] { return graph_.build(handle, {fe::HeurMode_t::A}); });
        if (message.empty())
            message = message_of([&] { return graph_.get_workspace_size(workspace_bytes_); });
        return message;
    }

    std::size_t workspace_bytes() const { return static_cast<std::size_t>(workspace_bytes_); }

    void run(cudnnHandle_t handle, Addresses& addresses, void* workspace) const {
        const std::string message = message_of([&] { return graph_.execute(handle, addresses, workspace); });
        if (!message.empty())
            user_error("--attention cudnn: cuDNN failed: {}; use --attention flash", message);
    }

  private:
    // Memory as a tensor (B,heads,T,D), or (B,H,T,1).
    struct Layout {
        std::vector<std::int64_t> sizes, strides;
        fe::DataType_t type = fe::DataType_t::BFLOAT16;
    };
    Layout rows(std::int64_t heads, std::int64_t stride) const {
        const std::int64_t T = sizes_.sequence, D = sizes_.head_size;
        return {{sizes_.batch, heads, T, D}, {T * stride, D, stride, 1}};
    }
    Layout queries(std::int64_t stride) const { return rows(sizes_.heads, stride); }
    Layout keys(std::int64_t stride) const { return rows(sizes_.key_heads, stride); }
    Layout whole() const { return queries(sizes_.heads * sizes_.head_size); }
    Layout log_sums() const {
        const std::int64_t H = sizes_.heads, T = sizes_.sequence;
        return {{sizes_.batch, H, T, 1}, {H * T, T, 1, 1}, fe::DataType_t::FLOAT};
    }

    // Row t sees column j if j <= t and, with a window, t < j + window.
    template <class Options>
    void set_mask(Options& options) const {
        options.set_causal_mask(true).set_attn_scale(1.0f / std::sqrt(static_cast<float>(sizes_.head_size)));
        if (sizes_.window < sizes_.sequence)
            options.set_sliding_window_length(static_cast<int>(sizes_.window));
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

    // The frontend reports errors by its return value, and sometimes by an exception.
    template <class F>
    static std::string message_of(F&& f) {
        fe::error_t error;
        try {
            error = f();
        } catch (const UserError&) {
            throw;
        } catch (const std::exception& fault) {
            return fmt::format("{}", fault.what());
        }
        return error.is_bad() ? error.get_message() : "";
    }

    AttentionShape sizes_;
    RowStrides in_, made_;
    fe::graph::Graph graph_;
    std::int64_t workspace_bytes_ = 0;
};

// The address of the first head.
void* address(const Heads& heads) {
    return heads.rows.data + static_cast<std::size_t>(heads.first) * size_of(heads.rows.dtype);
}

class Attention final : public CudnnAttention {
  public:
    std::size_t workspace_bytes(const AttentionShape& sizes, bool queries_apart) override {
        const std::int64_t row = (sizes.heads + 2 * sizes.key_heads) * sizes.head_size,
                           row_of_queries = queries_apart ? row - sizes.key_heads * sizes.head_size : row;
        const RowStrides strides{row_of_queries, row_of_queries, row};
        for (const Pass* pass :
             {forward_pass({sizes, strides, strides}), backward_pass({sizes, strides, strides})})
            planned_bytes_ = std::max(planned_bytes_, pass ? pass->workspace_bytes() : 0);
        return planned_bytes_;
    }

    void set_workspace(void* workspace) override { workspace_ = workspace; }

    bool forward(cudaStream_t stream, const Tensor& to_out, const Tensor& to_lse, const Heads& of_q,
                 const Heads& of_k, const Heads& of_v, const AttentionShape& sizes) override {
        const RowStrides strides = strides_of(of_q, of_k, of_v);
        const Pass* const pass = forward_pass({sizes, strides, strides});
        return run(stream, pass,
                   {{out, to_out.data},
                    {lse, to_lse.data},
                    {q, address(of_q)},
                    {k, address(of_k)},
                    {v, address(of_v)}});
    }

    bool backward(cudaStream_t stream, const Heads& to_dq, const Heads& to_dk, const Heads& to_dv,
                  const Tensor& of_dout, const Heads& of_q, const Heads& of_k, const Heads& of_v,
                  const Tensor& of_out, const Tensor& of_lse, const AttentionShape& sizes) override {
        const Pass* const pass =
            backward_pass({sizes, strides_of(of_q, of_k, of_v), strides_of(to_dq, to_dk, to_dv)});
        return run(stream, pass,
                   {{dout, of_dout.data},
                    {out, of_out.data},
                    {lse, of_lse.data},
                    {q, address(of_q)},
                    {k, address(of_k)},
                    {v, address(of_v)},
                    {dq, address(to_dq)},
                    {dk, address(to_dk)},
                    {dv, address(to_dv)}});
    }

  private:
    // Null: cuDNN refuses.
    using Passes = std::map<PlanSizes, std::unique_ptr<Pass>>;

    const Pass* forward_pass(const PlanSizes& sizes) {
        return pass(forward_, "forward", sizes, [](Pass& made) { made.describe_forward(); });
    }
    const Pass* backward_pass(const PlanSizes& sizes) {
        return pass(backward_, "backward", sizes, [](Pass& made) { made.describe_backward(); });
    }
    template <class F>
    const Pass* pass(Passes& passes, std::string_view name, const PlanSizes& sizes, F&& describe) {
        const auto found = passes.find(sizes);
        if (found != passes.end()) return found->second.get();
        auto made = std::make_unique<Pass>(sizes);
        describe(*made);
        const std::string message = made->build(handle_.get());
        if (!message.empty()) {
            write_error(refusal(name, sizes.heads, message) + "\n");
            made.reset();
        }
        return (passes[sizes] = std::move(made)).get();
    }

    bool run(cudaStream_t stream, const Pass* pass, Addresses addresses) {
        if (!pass || pass->workspace_bytes() > planned_bytes_) return false;
        check(cudnnSetStream(handle_.get(), stream) == CUDNN_STATUS_SUCCESS, "cudnnSetStream");
        pass->run(handle_.get(), addresses, workspace_);
        return true;
    }

    Handle handle_;
    Passes forward_, backward_;
    std::size_t planned_bytes_ = 0;
    void* workspace_ = nullptr;
};

}  // namespace

std::unique_ptr<CudnnAttention> make_cudnn_attention() { return std::make_unique<Attention>(); }

}  // namespace llmc::cuda
