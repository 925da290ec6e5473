// The operations of ops.h on the CPU: loops over float or bfloat16 storage with fp32 arithmetic, OpenMP
// threads, and oneDNN for matrix products. Each group of operations has its own .cpp in this folder.
//
// Results do not depend on the number of threads, except those of matrix products: oneDNN chooses how to
// divide their sums (the same way each time).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "llmc/device/ops.h"

namespace llmc::cpu {

class Products;

class CpuOps : public Ops, public DeviceSizes {
  public:
    // If `native_bf16`, oneDNN multiplies bf16 matrices as they are; otherwise they are widened and
    // multiplied in fp32.
    CpuOps(int threads, bool native_bf16);
    ~CpuOps() override;

    std::size_t workspace_bytes(const WorkspaceRequest& request) const override;
    // Enough tokens for fast matrix products, and few enough that the activations of small models stay in
    // cache.
    std::int64_t default_micro_batch_tokens() const override { return 2048; }
    std::int64_t default_logits_bytes() const override { return 128 << 20; }
    void set_workspace(const Tensor& workspace) override { workspace_ = workspace; }
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
    void compute(const Quantise& op, std::int64_t n);
    void compute(const Cast& op, std::int64_t n);
    void compute(const Copy& op, std::int64_t n);
    void compute(const Fill& op, std::int64_t n);
    void compute(const Add& op, std::int64_t n);
    void compute(const Accumulate& op, std::int64_t n);
    void compute(const AllFinite& op, std::int64_t n);

    // The workspace, in floats, that each group of operations needs. The workspace is as large as the
    // largest; each call uses it from its start.
    std::int64_t layernorm_floats(const WorkspaceRequest& request) const;
    std::int64_t matmul_floats(const WorkspaceRequest& request) const;
    std::int64_t attention_floats(const WorkspaceRequest& request) const;
    std::int64_t head_norm_floats(const WorkspaceRequest& request) const;
    // The workspace; throws if it has fewer floats than this.
    float* workspace(std::int64_t floats) const;

    // dbias += sum over the rows of dout
    void bias_gradient(const Tensor& dbias, const Tensor& dout) const;

    int threads_;
    // Whether oneDNN multiplies matrices of this dtype as they are.
    bool is_native(DType dtype) const {
        return dtype == DType::fp32 || (dtype == DType::bf16 && native_bf16_);
    }

    bool native_bf16_;
    Tensor workspace_;
    std::unique_ptr<Products> products_;
};

}  // namespace llmc::cpu
