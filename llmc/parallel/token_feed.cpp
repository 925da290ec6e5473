#include "llmc/parallel/token_feed.h"

#include <utility>

namespace llmc {

TokenFeed::TokenFeed(Device& device, std::vector<TokenBuffers<Tensor>> ring, int micro_batches)
    : device_(device),
      queues_(device.queues()),
      ring_(std::move(ring)),
      staging_(queues_ ? static_cast<std::size_t>(micro_batches) + 1 : 1) {
    const std::size_t bytes = ring_[0].inputs.bytes() + ring_[0].targets.bytes();
    for (Staging& staging : staging_) {
        staging.memory = device.host_memory(bytes);
        if (queues_) staging.copied = queues_->new_mark();
    }
    if (!queues_) return;
    free_ = queues_->new_mark();
    arrived_ = queues_->new_mark();
}

// Into the ring's next buffer, on the selected queue.
TokenBuffers<Tensor> TokenFeed::upload(std::int64_t sequences, const Fill& fill) {
    const TokenBuffers<Tensor>& buffers = ring_[next_];
    next_ = (next_ + 1) % ring_.size();
    const TokenBuffers<Tensor> tokens{buffers.inputs.slice(0, sequences),
                                      buffers.targets.slice(0, sequences)};

    Staging& staging = staging_[next_staging_];
    next_staging_ = (next_staging_ + 1) % staging_.size();
    if (queues_) queues_->wait_on_host(staging.copied);
    auto* const inputs = reinterpret_cast<std::int32_t*>(staging.memory.get());
    const auto count = static_cast<std::size_t>(tokens.inputs.elements());
    fill({inputs, count}, {inputs + count, count});
    device_.upload(tokens.inputs, inputs);
    device_.upload(tokens.targets, inputs + count);
    if (queues_) queues_->set(staging.copied);
    return tokens;
}

TokenBuffers<Tensor> TokenFeed::load(const std::optional<BatchPlace>& place, std::int64_t sequences,
                                     const Fill& fill) {
    if (ahead_ && place == ahead_->place) {
        queues_->wait(arrived_);
        const TokenBuffers<Tensor> tokens = ahead_->tokens;
        ahead_.reset();
        return tokens;
    }
    if (ahead_) {
        // Something else came between: its copy must be through before its buffer comes round.
        queues_->wait(arrived_);
        ahead_.reset();
    }
    return upload(sequences, fill);
}

void TokenFeed::bring_ahead(const BatchPlace& place, std::int64_t sequences, const Fill& fill) {
    if (!queues_) return;
    // What read the ring's next buffer last stands before this in the compute queue.
    queues_->set(free_);
    queues_->select(StreamKind::copy);
    queues_->wait(free_);
    ahead_ = {place, upload(sequences, fill)};
    queues_->set(arrived_);
    queues_->select(StreamKind::compute);
}

}  // namespace llmc
