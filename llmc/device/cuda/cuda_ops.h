// The operations of ops.h on a GPU: hand-written kernels (the .cuh files of this folder), and cuBLASLt for
// matrix products. Each group of operations has its own .cu in this folder.
//
// The same call with the same shapes on the same kind of GPU gives the same bits. Kernels sum in a fixed
// order, and the algorithm of a product is chosen once (lt_products.h).
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "llmc/device/cuda/gpus.h"
#include "llmc/device/cuda/launch.h"
#include "llmc/device/cuda/lt_products.h"
#include "llmc/device/gpu_sizes.h"
#include "llmc/device/ops.h"

namespace llmc::cuda {

class CudnnAttention;

// True if the program has code for the selected GPU, or PTX that can be compiled for it now.
bool has_code_for_this_gpu();

class CudaOps final : public Ops, public GpuSizes {
  public:
    // `gpu` is the GPU's name.
    CudaOps(std::string_view gpu, const Chip& chip, CudaStreams& streams, const CudaOptions& options);
    ~CudaOps() override;

    LtProducts& products() { return products_; }
    const LtProducts& products() const { return products_; }

    // See Device::set_loading.
    void set_loading(bool on) { only_loads_ = on; }

    void set_workspace(const Tensor& workspace) override;
    void run(const Op& op) override;

  private:
    // Each operation, after its operands have been checked.
    void compute(const EncoderForward& op, const EncoderSizes& s);
    void compute(const EncoderBackward& op, const EncoderSizes& s);
    void compute(const LayerNormForward& op, const RowSizes& s);
    void compute(const LayerNormBackward& op, const RowSizes& s);
    void compute(const FusedResidualLayerNormForward& op, const RowSizes& s);
    void compute(const RmsNormForward& op, const RowSizes& s);
    void compute(const RmsNormBackward& op, const RowSizes& s);
    void compute(const FusedResidualRmsNormForward& op, const RowSizes& s);
    void compute(const MatmulForward& op, const MatmulSizes& s);
    void compute(const MatmulBackward& op, const MatmulSizes& s);
    void compute(const MatmulAdd& op, const MatmulSizes& s);
    void compute(const DequantiseNf4& op, std::int64_t n);
    void compute(const GeluForward& op, std::int64_t n);
    void compute(const GeluBackward& op, std::int64_t n);
    void compute(const SwigluForward& op, const RowSizes& s);
    void compute(const SwigluBackward& op, const RowSizes& s);
    void compute(const ReluSquaredForward& op, std::int64_t n);
    void compute(const ReluSquaredBackward& op, std::int64_t n);
    void compute(const AttentionForward& op, const AttentionShape& s);
    void compute(const AttentionBackward& op, const AttentionShape& s);
    void compute(const AttentionCachedForward& op, const CachedAttentionShape& s);
    void compute(const Rope& op, const RopeSizes& s);
    void compute(const HeadNormForward& op, const HeadNormSizes& s);
    void compute(const HeadNormSums& op, const HeadNormSizes& s);
    void compute(const HeadNormBackward& op, const HeadNormSizes& s);
    void compute(const HeadNormBackwardSums& op, const HeadNormSizes& s);
    void compute(const FusedClassifier& op, const RowSizes& s);
    void compute(const ClassifierStatistics& op, const RowSizes& s);
    void compute(const ClassifierFromStatistics& op, const ClassifierSizes& s);
    void compute(const llmc::SoftCap& op, std::int64_t n);
    void compute(const GlobalNormSquared& op, std::int64_t n);
    void compute(const llmc::Sum& op, std::int64_t n);
    void compute(const OptimizerUpdate& op, std::int64_t n);
    void compute(const Momentum& op, std::int64_t n);
    void compute(const CopyMatrix& op, std::int64_t n);
    void compute(const Combine& op, std::int64_t n);
    void compute(const Amax& op, std::int64_t n);
    void compute(const QuantiseToBytes& op, const RowSizes& s);
    void compute(const Fp8MatmulForward& op, const MatmulSizes& s);
    void compute(const Fp8MatmulBackward& op, const MatmulSizes& s);
    void compute(const Cast& op, std::int64_t n);
    void compute(const Copy& op, std::int64_t n);
    void compute(const Fill& op, std::int64_t n);
    void compute(const Add& op, std::int64_t n);
    void compute(const Accumulate& op, std::int64_t n);
    void compute(const AllFinite& op, std::int64_t n);

    // The chip, the stream and the observer for the next kernel.
    LaunchContext on() const { return {chip_, streams_.selected(), waits_.get(), only_loads_}; }
    // Waits for a library's kernel, as the observer waits for our own.
    void wait_if_asked(std::string_view call) const;
    // The workspace after the products' part; throws if it has fewer bytes than this.
    void* workspace(std::size_t bytes) const;

    std::size_t attention_workspace_bytes(const WorkspaceRequest& request) const override;

    Chip chip_;
    CudaStreams& streams_;
    std::unique_ptr<LaunchObserver> waits_;  // for each kernel; null without CudaOptions::sync
    LtProducts products_;
    std::unique_ptr<CudnnAttention> cudnn_;  // null: our own kernels
    Tensor workspace_;
    bool only_loads_ = false;
};

}  // namespace llmc::cuda
