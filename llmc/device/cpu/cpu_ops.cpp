#include "llmc/device/cpu/cpu_ops.h"

#include <fmt/format.h>

#include <algorithm>

#include "llmc/device/cpu/products.h"

namespace llmc::cpu {

CpuOps::CpuOps(int threads, bool native_bf16)
    : threads_(threads), native_bf16_(native_bf16), products_(std::make_unique<Products>(threads)) {
    check(threads > 0, "operations run on one thread at least");
}

CpuOps::~CpuOps() = default;

std::size_t CpuOps::workspace_bytes(const WorkspaceRequest& request) const {
    check(request.heads > 0 && (request.head_size > 0 || request.channels % request.heads == 0),
          "heads divide channels");
    const std::int64_t floats = std::max({layernorm_floats(request), matmul_floats(request),
                                          attention_floats(request), head_norm_floats(request)});
    return static_cast<std::size_t>(floats) * sizeof(float);
}

// Its products read bf16, not bytes.
template <class O>
concept OfBytes = std::is_same_v<O, QuantiseToBytes> || std::is_same_v<O, Fp8MatmulForward> ||
    std::is_same_v<O, Fp8MatmulBackward>;

void CpuOps::run(const Op& op) {
    std::visit(
        [this]<class O>(const O& of) {
            if constexpr (OfBytes<O>)
                programming_error("products of this device read bf16");
            else
                compute(of, of.sizes());
        },
        op);
}

float* CpuOps::workspace(std::int64_t floats) const {
    const std::size_t bytes = static_cast<std::size_t>(floats) * sizeof(float);
    if (bytes > 0 && (!workspace_ || workspace_.bytes() < bytes)) {
        programming_error(fmt::format("this call needs {} bytes of workspace, there are {}", bytes,
                                      workspace_ ? workspace_.bytes() : 0));
    }
    return reinterpret_cast<float*>(workspace_.data);
}

}  // namespace llmc::cpu
