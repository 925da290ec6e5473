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

    void encoder_forward(const Tensor& out, const Tensor& tokens, const Tensor& wte, const Tensor& wpe,
                         std::optional<std::int64_t> first_row = {}) override;
    void encoder_backward(const Tensor& dwte, const Tensor& dwpe, const Tensor& dout, const Tensor& tokens,
                          std::optional<std::int64_t> first_row = {}) override;

    void layernorm_forward(const Tensor& out, const Tensor& mean, const Tensor& rstd, const Tensor& in,
                           const Tensor& gamma, const Tensor& beta) override;
    void layernorm_backward(const Tensor& din, const Tensor& dgamma, const Tensor& dbeta, const Tensor& dout,
                            const Tensor& in, const Tensor& gamma, const Tensor& mean,
                            const Tensor& rstd) override;
    void fused_residual_layernorm_forward(const Tensor& residual, const Tensor& out, const Tensor& mean,
                                          const Tensor& rstd, const Tensor& in1, const Tensor& in2,
                                          const Tensor& gamma, const Tensor& beta) override;

    void rmsnorm_forward(const Tensor& out, const Tensor& rstd, const Tensor& in, const Tensor& weight,
                         float eps) override;
    void rmsnorm_backward(const Tensor& din, const Tensor& dweight, const Tensor& dout, const Tensor& in,
                          const Tensor& weight, const Tensor& rstd) override;
    void fused_residual_rmsnorm_forward(const Tensor& residual, const Tensor& out, const Tensor& rstd,
                                        const Tensor& in1, const Tensor& in2, const Tensor& weight,
                                        float eps) override;

    void matmul_forward(const Tensor& out, const Tensor& in, const Tensor& weight, const Tensor& bias,
                        const Tensor& pre_gelu = {}) override;
    void matmul_backward(const Tensor& din, const Tensor& dweight, const Tensor& dbias, const Tensor& dout,
                         const Tensor& in, const Tensor& weight, const Tensor& pre_gelu = {}) override;

    void gelu_forward(const Tensor& out, const Tensor& in) override;
    void gelu_backward(const Tensor& din, const Tensor& dout, const Tensor& in) override;

    void swiglu_forward(const Tensor& out, const Tensor& in) override;
    void swiglu_backward(const Tensor& din, const Tensor& dout, const Tensor& in) override;
    void relu_squared_forward(const Tensor& out, const Tensor& in) override;
    void relu_squared_backward(const Tensor& din, const Tensor& dout, const Tensor& in) override;

    void attention_forward(const Tensor& out, const Tensor& lse, const Heads& q, const Heads& k,
                           const Heads& v, std::int64_t window = 0) override;
    void attention_backward(const Heads& dq, const Heads& dk, const Heads& dv, const Tensor& dout,
                            const Heads& q, const Heads& k, const Heads& v, const Tensor& out,
                            const Tensor& lse, std::int64_t window = 0) override;
    void attention_cached_forward(const Tensor& out, const Tensor& cache, const Heads& q, const Heads& k,
                                  const Heads& v, std::int64_t position, std::int64_t window = 0) override;

    void rope(const Heads& x, const Tensor& angles, std::int64_t position, bool inverse) override;

    void head_norm_forward(const Heads& out, const Tensor& rstd, const Heads& in, const Tensor& weight,
                           float eps, const std::optional<SharedRows>& shared = {}) override;
    void head_norm_sums(const Tensor& sums, const Heads& in) override;
    void head_norm_backward(const Heads& din, const Tensor& dweight, const Heads& dout, const Heads& in,
                            const Tensor& weight, const Tensor& rstd,
                            const std::optional<SharedRows>& shared = {}) override;
    void head_norm_backward_sums(const Tensor& sums, const Heads& dout, const Heads& in, const Tensor& weight,
                                 const Tensor& rstd) override;

    void fused_classifier(const Tensor& logits, const Tensor& losses, const Tensor& targets,
                          std::int64_t vocabulary, float scale, bool write_dlogits,
                          const ClassifierTerms& terms = {}) override;
    void classifier_statistics(const Tensor& statistics, const Tensor& logits, const Tensor& targets,
                               std::int64_t columns, std::int64_t first_column,
                               const ClassifierTerms& terms = {}) override;
    void classifier_from_statistics(const Tensor& logits, const Tensor& losses, const Tensor& all_statistics,
                                    const Tensor& targets, std::int64_t columns, std::int64_t first_column,
                                    float scale, bool write_dlogits,
                                    const ClassifierTerms& terms = {}) override;
    void soft_cap(const Tensor& out, const Tensor& in, float cap) override;

    void global_norm_squared(const Tensor& partials, const Tensor& x) override;
    void sum(const Tensor& out, const Tensor& x) override;
    void adamw(const Tensor& parameters, const Tensor& master, const Tensor& m, const Tensor& v,
               const Tensor& gradients, const Tensor& norm_squared, std::span<const AdamWSegment> segments,
               const AdamWStep& step, const std::optional<StochasticRounding>& rounding = {},
               const std::optional<StochasticRounding>& rounding_of_moments = {},
               const EightBitMoments& in_8_bits = {}) override;

    void cast(const Tensor& out, const Tensor& in) override;
    void copy(const Tensor& out, const Tensor& in) override;
    void fill(const Tensor& out, float value) override;
    void add(const Tensor& out, const Tensor& a, const Tensor& b) override;
    void accumulate(const Tensor& out, const Tensor& in, const StochasticRounding& rounding,
                    std::int64_t count) override;
    void all_finite(const Tensor& flag, const Tensor& x) override;
    void amax(const Tensor& out, const Tensor& x) override;
    void quantise(const Tensor& out, const Tensor& x, const Tensor& amax, Fp8 format) override;

  private:
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
