// The sizes that our kernels support on a chip, and the workspace that they need. Plain C++ without CUDA: a program
// that was built without it plans for GPUs, too.
#pragma once

#include "llmc/device/cuda/chip.h"
#include "llmc/device/sizes.h"

namespace llmc::cuda {

class GpuSizes : public DeviceSizes {
  public:
    explicit GpuSizes(const Chip& chip) : chip_(chip) {}

    void require_sizes(const WorkspaceRequest& request) const override;
    std::size_t workspace_bytes(const WorkspaceRequest& request) const override;
    DType fp8_dtype() const override { return DType::uint8; }
    std::int64_t default_micro_batch_tokens() const override { return 65536; }
    std::int64_t default_logits_bytes() const override { return std::int64_t{1} << 30; }

  protected:
    virtual std::size_t attention_workspace_bytes(const WorkspaceRequest& request) const;

  private:
    void require_fp8(const WorkspaceRequest& request) const;
    std::size_t bias_gradient_bytes(const WorkspaceRequest& request) const;

    Chip chip_;
};

}  // namespace llmc::cuda
