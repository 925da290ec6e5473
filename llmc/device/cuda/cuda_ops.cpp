#include "llmc/device/cuda/cuda_ops.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "llmc/device/cuda/cudnn_attention.h"
#include "llmc/device/cuda/launch.h"

namespace llmc::cuda {

namespace {

// The kind of GPU for which algorithms are chosen: its name and its number of multiprocessors. GPUs of one
// name may differ in that number; GPUs of one chip may differ in name and memory.
std::string kind_of(std::string_view gpu, const Chip& chip) {
    return fmt::format("{} with {} multiprocessors", gpu, chip.multiprocessors);
}

// Waits for every kernel, and names the one that failed.
class WaitForEach final : public LaunchObserver {
  public:
    explicit WaitForEach(CudaStreams& streams) : streams_(streams) {}

    void launched(const LaunchRecord& record) override {
        // Ask first: once a kernel has failed, other CUDA calls fail too.
        const char* mangled = nullptr;
        if (cudaFuncGetName(&mangled, record.kernel) != cudaSuccess) mangled = nullptr;
        const cudaError_t error = streams_.wait_until_empty();
        if (error == cudaSuccess) return;
        const dim3 &g = record.grid, &b = record.block;
        user_error("kernel {} ({} x {} x {} blocks of {} x {} threads) failed: {}",
                   mangled ? kernel_name(mangled) : "(without a name)", g.x, g.y, g.z, b.x, b.y,
                   cudaGetErrorString(error));
    }

  private:
    CudaStreams& streams_;
};

}  // namespace

CudaOps::CudaOps(std::string_view gpu, const Chip& chip, CudaStreams& streams, const CudaOptions& options)
    : GpuSizes(chip),
      chip_(chip),
      streams_(streams),
      products_(streams, kind_of(gpu, chip), chip, options.tf32, options.sync) {
    if (options.sync) waits_ = std::make_unique<WaitForEach>(streams);
    if (options.attention == AttentionKind::cudnn) cudnn_ = make_cudnn_attention();
}

CudaOps::~CudaOps() = default;

void CudaOps::wait_if_asked(std::string_view call) const {
    if (waits_) check_cuda(streams_.wait_until_empty(), call);
}

// Enough for our own kernels too: they take over what cuDNN refuses.
std::size_t CudaOps::attention_workspace_bytes(const WorkspaceRequest& request) const {
    const std::size_t own = GpuSizes::attention_workspace_bytes(request);
    if (!cudnn_ || request.dtype != DType::bf16) return own;
    const std::int64_t T = request.sequence;
    const AttentionShape s{request.batch,           T,
                           request.heads,           request.size_of_head(),
                           request.heads_of_keys(), request.window == 0 ? T : std::min(request.window, T)};
    return std::max(own, cudnn_->workspace_bytes(s, request.queries_apart));
}

void CudaOps::set_workspace(const Tensor& workspace) {
    workspace_ = workspace;
    if (!workspace) return products_.set_workspace(nullptr);
    check(workspace.bytes() >= LtProducts::workspace_bytes, "the workspace is large enough for the products");
    products_.set_workspace(workspace.data);
    if (cudnn_) cudnn_->set_workspace(workspace.data + LtProducts::workspace_bytes);
}

void CudaOps::run(const Op& op) {
    std::visit(
        [this]<class O>(const O& of) {
            if constexpr (std::is_same_v<O, Quantise>)
                programming_error("products of this device read bytes");
            else
                compute(of, of.sizes());
        },
        op);
}

void* CudaOps::workspace(std::size_t bytes) const {
    const std::size_t available = workspace_ ? workspace_.bytes() - LtProducts::workspace_bytes : 0;
    if (bytes > available) {
        programming_error(
            fmt::format("this call needs {} bytes of workspace, there are {}", bytes, available));
    }
    return workspace_.data + LtProducts::workspace_bytes;
}

}  // namespace llmc::cuda
