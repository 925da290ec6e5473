// Copies tokens through a ring of host buffers and a ring of device buffers.
#include "llmc/parallel/step/token_feed.h"

#include <utility>

namespace llmc {

TokenFeed::TokenFeed(Device& device, std::vector<TokenBuffers<Tensor>> ring, int micro_batches)
    : device_(device),
      streams_(device.streams()),
      ring_(std::move(ring)),
      staging_(streams_ ? static_cast<std::size_t>(micro_batches) + 1 : 1) {
    const std::size_t bytes = ring_[0].inputs.bytes() + ring_[0].targets.bytes();
    for (Staging& staging : staging_) {
        staging.memory = device.host_memory(bytes);
        if (streams_) staging.copied = streams_->new_event();
    }
    if (!streams_) return;
    free_ = streams_->new_event();
    arrived_ = streams_->new_event();
}

// Copies tokens into the ring's next buffer, on the selected stream.
TokenBuffers<Tensor> TokenFeed::upload(std::int64_t sequences, const Fill& fill) {
    const TokenBuffers<Tensor>& buffers = ring_[next_];
    next_ = (next_ + 1) % ring_.size();
    const TokenBuffers<Tensor> tokens{buffers.inputs.slice(0, sequences),
                                      buffers.targets.slice(0, sequences)};

    Staging& staging = staging_[next_staging_];
    next_staging_ = (next_staging_ + 1) % staging_.size();
    if (streams_) streams_->wait_on_host(staging.copied);
    auto* const inputs = reinterpret_cast<std::int32_t*>(staging.memory.get());
    const auto count = static_cast<std::size_t>(tokens.inputs.elements());
    fill({inputs, count}, {inputs + count, count});
    device_.upload(tokens.inputs, inputs);
    device_.upload(tokens.targets, inputs + count);
    if (streams_) streams_->record(staging.copied);
    return tokens;
}

TokenBuffers<Tensor> TokenFeed::load(const std::optional<BatchPlace>& place, std::int64_t sequences,
                                     const Fill& fill) {
    if (ahead_ && place == ahead_->place) {
        streams_->wait(arrived_);
        const TokenBuffers<Tensor> tokens = ahead_->tokens;
        ahead_.reset();
        return tokens;
    }
    if (ahead_) {
        // The micro-batch that was copied ahead is not the one that is loaded now. That copy must end before
        // its buffer is used again.
        streams_->wait(arrived_);
        ahead_.reset();
    }
    return upload(sequences, fill);
}

void TokenFeed::bring_ahead(const BatchPlace& place, std::int64_t sequences, const Fill& fill) {
    if (!streams_) return;
    // The last reader of the ring's next buffer comes before this event on the compute stream.
    streams_->record(free_);
    streams_->select(StreamKind::copy);
    streams_->wait(free_);
    ahead_ = {place, upload(sequences, fill)};
    streams_->record(arrived_);
    streams_->select(StreamKind::compute);
}

}  // namespace llmc
