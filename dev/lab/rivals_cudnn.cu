// Implements rivals_cudnn.h with the trainer's own use of cuDNN.
#include "dev/lab/rivals_cudnn.h"

#include <algorithm>
#include <memory>

#include "dev/lab/memory.h"
#include "llmc/device/cuda/cudnn_attention.h"
#include "llmc/device/heads.h"

namespace lab {
namespace {

class Attention {
  public:
    Attention(std::unique_ptr<llmc::cuda::CudnnAttention> cudnn, const llmc::AttentionShape& sizes,
              bool backward)
        : cudnn_(std::move(cudnn)),
          sizes_(sizes),
          qkv_(rows() * (sizes.heads + 2 * sizes.key_heads) * sizes.head_size),
          out_(rows() * sizes.heads * sizes.head_size),
          lse_(rows() * sizes.heads),
          workspace_(
              std::max<std::int64_t>(static_cast<std::int64_t>(cudnn_->workspace_bytes(sizes, false)), 1)) {
        cudnn_->set_workspace(workspace_.data());
        Draw draw(1);
        draw.normal(qkv_, 1);
        forward();  // refused here and not when it is timed; also for out and lse, which backward reads
        if (!backward) return;
        dqkv_ = std::make_unique<Array<bf16>>(qkv_.size());
        dout_ = std::make_unique<Array<bf16>>(out_.size());
        draw.normal(*dout_, 1);
        this->backward();
    }

    void forward() {
        const auto [q, k, v] = packed(qkv_);
        demand(cudnn_->forward(nullptr, whole(out_), log_sums(), q, k, v, sizes_));
    }
    void backward() {
        const auto [q, k, v] = packed(qkv_);
        const auto [dq, dk, dv] = packed(*dqkv_);
        demand(
            cudnn_->backward(nullptr, dq, dk, dv, whole(*dout_), q, k, v, whole(out_), log_sums(), sizes_));
    }

  private:
    static void demand(bool done) {
        if (!done) llmc::user_error("cuDNN refuses these sizes");
    }
    std::int64_t rows() const { return sizes_.batch * sizes_.sequence; }
    llmc::PackedHeads packed(Array<bf16>& x) const {
        const llmc::Tensor rows{reinterpret_cast<std::byte*>(x.data()), llmc::DType::bf16, {x.size()}};
        return llmc::packed_heads(rows, sizes_.heads, sizes_.key_heads, sizes_.head_size);
    }
    llmc::Tensor whole(Array<bf16>& x) const {
        return {reinterpret_cast<std::byte*>(x.data()),
                llmc::DType::bf16,
                {sizes_.batch, sizes_.sequence, sizes_.heads, sizes_.head_size}};
    }
    llmc::Tensor log_sums() {
        return {reinterpret_cast<std::byte*>(lse_.data()),
                llmc::DType::fp32,
                {sizes_.batch, sizes_.heads, sizes_.sequence}};
    }

    std::unique_ptr<llmc::cuda::CudnnAttention> cudnn_;
    llmc::AttentionShape sizes_;
    Array<bf16> qkv_, out_;
    Array<float> lse_;
    Array<char> workspace_;
    std::unique_ptr<Array<bf16>> dqkv_, dout_;
};

}  // namespace

std::vector<Rival> cudnn_rivals(const std::string& operation, const std::vector<std::int64_t>& shape) {
    if (operation == "attention_cached_forward")
        return {{.name = "cuDNN", .run = {}, .missing = "the lab asks it for whole sequences alone"}};
    const bool backward = operation == "attention_backward";
    if (!backward && operation != "attention_forward") return {};
    const std::int64_t window = shape[5] == 0 ? shape[1] : std::min(shape[5], shape[1]);
    const llmc::AttentionShape sizes{shape[0], shape[1], shape[2], shape[3], shape[4], window};
    std::shared_ptr<Attention> attention;
    try {
        attention = std::make_shared<Attention>(llmc::cuda::make_cudnn_attention(), sizes, backward);
    } catch (const llmc::UserError& error) {  // no cuDNN here, or it does not support these sizes
        return {{.name = "cuDNN", .run = {}, .missing = error.what()}};
    }
    return {{"cuDNN", [attention, backward] { backward ? attention->backward() : attention->forward(); }}};
}

}  // namespace lab
