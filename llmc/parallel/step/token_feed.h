// Copies the tokens of micro-batches to the device, each into the next of a ring of buffers. If the device
// has streams, it copies the tokens of the next micro-batch while it computes.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "llmc/core/tensor.h"
#include "llmc/device/device.h"
#include "llmc/parallel/step/activations.h"

namespace llmc {

// A micro-batch of a training step.
struct BatchPlace {
    std::int64_t step;
    int micro_batch;
    bool operator==(const BatchPlace&) const = default;
};

class TokenFeed {
  public:
    // Fills inputs and targets, int32 (sequences, T) each.
    using Fill = std::function<void(std::span<std::int32_t> inputs, std::span<std::int32_t> targets)>;

    // `ring` has one buffer more than there are micro-batches in flight; these end in the order in which they
    // begin. On a device with streams, there is host memory for all `micro_batches` of a step and the first
    // of the next, so that the host need not wait.
    TokenFeed(Device& device, std::vector<TokenBuffers<Tensor>> ring, int micro_batches);

    // Returns the tokens of `place` if they were copied ahead, or else those from `fill`. They are on the
    // device before the next operations on the compute stream, which must be selected.
    TokenBuffers<Tensor> load(const std::optional<BatchPlace>& place, std::int64_t sequences,
                              const Fill& fill);
    // Queues the copy of the tokens for the next load(), after the work already queued on the device.
    void bring_ahead(const BatchPlace& place, std::int64_t sequences, const Fill& fill);

  private:
    // Host memory that is filled, then copied to the device.
    struct Staging {
        HostMemory memory;
        int copied = -1;  // event
    };
    TokenBuffers<Tensor> upload(std::int64_t sequences, const Fill& fill);

    Device& device_;
    Streams* streams_;
    std::vector<TokenBuffers<Tensor>> ring_;
    std::size_t next_ = 0;  // next buffer of the ring
    std::vector<Staging> staging_;
    std::size_t next_staging_ = 0;

    struct Ahead {
        BatchPlace place;
        TokenBuffers<Tensor> tokens;
    };
    std::optional<Ahead> ahead_;
    int free_ = -1, arrived_ = -1;  // events: the buffer may be written; it has been written
};

}  // namespace llmc
