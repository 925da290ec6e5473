// Brings the tokens of micro-batches to the device, each into the next of a ring of buffers. Where the device has
// queues, those of the next micro-batch are copied while it computes.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "llmc/core/tensor.h"
#include "llmc/device/device.h"
#include "llmc/device/queues.h"
#include "llmc/parallel/activations.h"

namespace llmc {

// Which micro-batch, of which of the training's steps.
struct BatchPlace {
    std::int64_t step;
    int micro_batch;
    bool operator==(const BatchPlace&) const = default;
};

class TokenFeed {
  public:
    // Fills inputs and targets, int32 (sequences, T) each.
    using Fill = std::function<void(std::span<std::int32_t> inputs, std::span<std::int32_t> targets)>;

    // The ring has a buffer more than there are micro-batches in flight, which end in the order in which they begin.
    // A device with queues takes the tokens of a step of `micro_batches`, and the first ones of the next, without
    // making the host wait.
    TokenFeed(Device& device, std::vector<TokenBuffers<Tensor>> ring, int micro_batches);

    // The tokens of the place, if they came ahead, or else what `fill` says, on the device before whatever the
    // compute queue, which is selected, is given next.
    TokenBuffers<Tensor> load(const std::optional<BatchPlace>& place, std::int64_t sequences,
                              const Fill& fill);
    // Begins to bring what the next load() will ask for, behind what the device is doing.
    void bring_ahead(const BatchPlace& place, std::int64_t sequences, const Fill& fill);

  private:
    // Tokens on their way: filled by the host, then copied.
    struct Staging {
        HostMemory memory;
        int copied = -1;  // mark
    };
    TokenBuffers<Tensor> upload(std::int64_t sequences, const Fill& fill);

    Device& device_;
    Queues* queues_;
    std::vector<TokenBuffers<Tensor>> ring_;
    std::size_t next_ = 0;  // of the ring
    std::vector<Staging> staging_;
    std::size_t next_staging_ = 0;

    struct Ahead {
        BatchPlace place;
        TokenBuffers<Tensor> tokens;
    };
    std::optional<Ahead> ahead_;
    int free_ = -1, arrived_ = -1;  // marks: the buffer may be written, and has been
};

}  // namespace llmc
