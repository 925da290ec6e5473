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
    : chip_(chip), streams_(streams), products_(streams, kind_of(gpu, chip), options.tf32, options.sync) {
    if (options.sync) waits_ = std::make_unique<WaitForEach>(streams);
    if (options.attention == AttentionKind::cudnn) cudnn_ = make_cudnn_attention();
}

CudaOps::~CudaOps() = default;

void CudaOps::wait_if_asked(std::string_view call) const {
    if (waits_) check_cuda(streams_.wait_until_empty(), call);
}

// Checks the kernels' requirements: rows consist of 16-byte pieces, and heads fit the tensor cores' tiles.
void CudaOps::require_sizes(const WorkspaceRequest& request) const {
    const std::int64_t C = request.channels, head_size = request.size_of_head();
    if (head_size % 8 != 0 || head_size > 128) {
        user_error(
            "attention on GPUs needs heads of a multiple of 8 elements up to 128, but these have {}; change "
            "--channels or --heads, or give --head-size if the model has that option",
            head_size);
    }
    // The backward passes of norms hold a row in a block's registers.
    const std::int64_t most_bytes = request.layernorm_channels > 0 ? 24 << 10 : 32 << 10;
    const std::int64_t most = most_bytes / static_cast<std::int64_t>(size_of(request.dtype));
    if (C > most) {
        user_error("--channels {} is out of range for the GPU's kernels in {}; give at most {}", C,
                   name_of(request.dtype), most);
    }
    // The embedding's backward pass counts the tokens of a class in shared memory; there are 2^7 classes
    // (encoder.cuh).
    const auto most_tokens = static_cast<std::int64_t>((chip_.shared_bytes_per_block - 2048) / sizeof(int))
                             << 7;
    if (request.vocabulary > most_tokens) {
        user_error("--vocab-size {} is out of range for this GPU; give at most {}", request.vocabulary,
                   most_tokens);
    }
    constexpr std::int64_t most_heads = 65535;
    if (request.batch > most_heads || request.heads > most_heads) {
        user_error("--micro-batch-size {} or --heads {} is out of range; give at most {}", request.batch,
                   request.heads, most_heads);
    }
}

// The workspace begins with the memory of the products. This part is separate, since one call may run a
// product and a kernel that also needs workspace.
std::size_t CudaOps::workspace_bytes(const WorkspaceRequest& request) const {
    constexpr std::size_t few = 4096;  // partial sums, AdamW's coefficients
    return LtProducts::workspace_bytes +
           std::max({embedding_workspace_bytes(request), matmul_workspace_bytes(request),
                     attention_workspace_bytes(request), norm_workspace_bytes(request), few});
}

void CudaOps::set_workspace(const Tensor& workspace) {
    workspace_ = workspace;
    if (!workspace) return products_.set_workspace(nullptr);
    check(workspace.bytes() >= LtProducts::workspace_bytes, "the workspace is large enough for the products");
    products_.set_workspace(workspace.data);
    if (cudnn_) cudnn_->set_workspace(workspace.data + LtProducts::workspace_bytes);
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
