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
    // With pre_gelu, din is rounded to X before and after it is multiplied by GELU'(pre_gelu).
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
    void quantise_to_bytes(const Fp8Copies& to, const Tensor& x, const Tensor& amax, Fp8 format) override;
    void fp8_matmul_forward(const Tensor& out, const Fp8Copies& in, const Fp8Copies& weight,
                            const Tensor& bias, const Tensor& pre_gelu) override;
    // With pre_gelu, din is rounded as in matmul_backward.
    void fp8_matmul_backward(const Tensor& din, const Tensor& dweight, const Fp8Copies& dout,
                             const Fp8Copies& in, const Fp8Copies& weight, const Tensor& pre_gelu) override;

  private:
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
