#include "llmc/device/gpu_sizes.h"

#include <algorithm>

#include "llmc/core/dtype.h"
#include "llmc/core/error.h"
#include "llmc/device/cuda/workspace.h"

namespace llmc::cuda {

// Checks the kernels' requirements: rows consist of 16-byte pieces, and heads fit the tensor cores' tiles.
void GpuSizes::require_sizes(const WorkspaceRequest& request) const {
    const std::int64_t C = request.channels, head_size = request.size_of_head();
    if (head_size % 8 != 0 || head_size > 128) {
        refuse(
            {"heads of a multiple of 8 elements up to 128", head_size, 128, ""},
            "attention on GPUs needs heads of a multiple of 8 elements up to 128, but these have {}; change "
            "--channels or --heads, or give --head-size if the model has that option",
            head_size);
    }
    // The backward passes of norms hold a row in a block's registers.
    const std::int64_t most_bytes = request.layernorm_channels > 0 ? 24 << 10 : 32 << 10;
    const std::int64_t most = most_bytes / static_cast<std::int64_t>(size_of(request.dtype));
    if (C > most) {
        // Whole heads of multiples of 8 elements.
        const std::int64_t step = request.heads * 8, fitting = most / step * step;
        refuse({"the channels of a row in a block's registers", C, most,
                fitting > 0 ? fmt::format("--channels {}", fitting) : ""},
               "--channels {} is out of range for the GPU's kernels in {}; give at most {}", C,
               name_of(request.dtype), most);
    }
    // The embedding's backward pass counts the tokens of a class in shared memory; there are 2^7 classes
    // (encoder.cuh).
    const auto most_tokens = static_cast<std::int64_t>((chip_.shared_bytes_per_block - 2048) / sizeof(int))
                             << 7;
    if (request.vocabulary > most_tokens) {
        refuse({"the vocabulary of the embedding's backward pass", request.vocabulary, most_tokens,
                fmt::format("--vocab-size {}", most_tokens)},
               "--vocab-size {} is out of range for this GPU; give at most {}", request.vocabulary,
               most_tokens);
    }
    constexpr std::int64_t most_heads = 65535;
    if (request.batch > most_heads || request.heads > most_heads) {
        refuse({"blocks of attention", std::max(request.batch, request.heads), most_heads,
                request.batch > most_heads ? "--micro-batch-size 1" : ""},
               "--micro-batch-size {} or --heads {} is out of range; give at most {}", request.batch,
               request.heads, most_heads);
    }
    if (request.is_fp8) require_fp8(request);
}

// Checks what cuBLASLt requires of products in 8 bits.
void GpuSizes::require_fp8(const WorkspaceRequest& request) const {
    constexpr int least_architecture = 89;
    if (chip_.architecture < least_architecture) {
        refuse({"products in 8 bits", chip_.architecture, least_architecture, "--fp8 none"},
               "products in 8 bits need a GPU of sm_89 (Ada, Hopper) or later, but this one is sm_{}; give "
               "--precision bf16, or --fp8 none",
               chip_.architecture);
    }
    if (request.fp8_odd_channels != 0) {
        refuse({"channels of products in 8 bits", request.fp8_odd_channels,
                request.fp8_odd_channels / 16 * 16, "--fp8 none"},
               "products in 8 bits on GPUs need multiples of 16 channels on each rank, but {} has {}; change "
               "--channels, --heads or --tensor-parallel, or give --fp8 none",
               request.fp8_odd_product, request.fp8_odd_channels);
    }
    if (const std::int64_t tokens = request.batch * request.sequence; tokens % 16 != 0) {
        refuse({"tokens of a micro-batch in 8 bits", tokens, tokens / 16 * 16, "--fp8 none"},
               "products in 8 bits on GPUs need micro-batches of a multiple of 16 tokens, but these have {} "
               "x {}; "
               "change --micro-batch-size or --seq-len, or give --fp8 none",
               request.batch, request.sequence);
    }
}

std::size_t GpuSizes::workspace_bytes(const WorkspaceRequest& request) const {
    const auto channels = static_cast<int>(request.channels);
    const std::int64_t tokens = request.batch * request.sequence;
    const auto all_heads = static_cast<int>(request.heads * request.size_of_head());
    constexpr std::size_t few = 4096;  // partial sums, the numbers of an update
    // The workspace begins with the memory of the products. The rest is separate, since one call may run a
    // product and a kernel that also needs workspace.
    return product_workspace_bytes +
           std::max({encoder_backward_workspace_bytes(tokens, channels), bias_gradient_bytes(request),
                     attention_workspace_bytes(request), norm_backward_workspace_bytes(chip_, channels),
                     head_norm_backward_workspace_bytes(chip_, all_heads), few});
}

std::size_t GpuSizes::attention_workspace_bytes(const WorkspaceRequest& request) const {
    return attention_backward_workspace_bytes(request.batch * request.heads, request.sequence);
}

std::size_t GpuSizes::bias_gradient_bytes(const WorkspaceRequest& request) const {
    const std::int64_t rows = std::max(request.batch * request.sequence, request.head_rows);
    const auto columns = static_cast<int>(request.largest_matmul_channels);
    return request.dtype == DType::fp32
               ? bias_gradient_workspace_bytes_up_to<float>(chip_, rows, columns)
               : bias_gradient_workspace_bytes_up_to<std::uint16_t>(chip_, rows, columns);
}

}  // namespace llmc::cuda
