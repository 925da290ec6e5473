// Implements rivals_cudnn.h with the trainer's own use of cuDNN.
#include "dev/lab/rivals_cudnn.h"

#include <algorithm>
#include <memory>

#include "dev/lab/memory.h"
#include "llmc/device/cuda/cudnn_attention.h"

namespace lab {
namespace {

class Attention {
  public:
    Attention(std::unique_ptr<llmc::cuda::CudnnAttention> cudnn, const llmc::HeadSizes& sizes, bool backward)
        : cudnn_(std::move(cudnn)),
          sizes_(sizes),
          qkv_(3 * elements()),
          out_(elements()),
          lse_(sizes.batch * sizes.heads * sizes.sequence),
          workspace_(std::max<std::int64_t>(static_cast<std::int64_t>(cudnn_->workspace_bytes(sizes)), 1)) {
        cudnn_->set_workspace(workspace_.data());
        Draw draw(1);
        draw.normal(qkv_, 1);
        if (!backward) return;
        forward();  // for out and lse, which backward reads
        dqkv_ = std::make_unique<Array<bf16>>(qkv_.size());
        dout_ = std::make_unique<Array<bf16>>(out_.size());
        draw.normal(*dout_, 1);
    }

    void forward() { cudnn_->forward(nullptr, whole(out_), log_sums(), packed(qkv_), sizes_); }
    void backward() {
        cudnn_->backward(nullptr, packed(*dqkv_), whole(*dout_), packed(qkv_), whole(out_), log_sums(),
                         sizes_);
    }

  private:
    std::int64_t elements() const { return sizes_.batch * sizes_.sequence * sizes_.heads * sizes_.head_size; }
    llmc::Tensor packed(Array<bf16>& x) const {
        return {reinterpret_cast<std::byte*>(x.data()),
                llmc::DType::bf16,
                {sizes_.batch, sizes_.sequence, 3, sizes_.heads, sizes_.head_size}};
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
    llmc::HeadSizes sizes_;
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
    const llmc::HeadSizes sizes{shape[0], shape[1], shape[2], shape[3]};
    std::shared_ptr<Attention> attention;
    try {
        attention = std::make_shared<Attention>(llmc::cuda::make_cudnn_attention(), sizes, backward);
    } catch (const llmc::UserError& error) {  // no cuDNN here, or it does not support these sizes
        return {{.name = "cuDNN", .run = {}, .missing = error.what()}};
    }
    return {{"cuDNN", [attention, backward] { backward ? attention->backward() : attention->forward(); }}};
}

}  // namespace lab
