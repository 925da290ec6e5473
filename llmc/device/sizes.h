// What the plan of a run asks of a device, as pure functions of sizes. The devices implement it, and for a plan
// alone it needs no device (cuda/gpu_sizes.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "llmc/core/dtype.h"

namespace llmc {

// The sizes from which a device computes how much workspace its operations need.
struct WorkspaceRequest {
    std::int64_t batch, sequence, channels, heads;
    // The largest IC or OC of any product, including the padded vocabulary.
    std::int64_t largest_matmul_channels;
    std::int64_t head_rows;  // rows of logits computed at a time
    DType dtype;
    std::int64_t vocabulary = 0;          // padded
    std::int64_t head_size = 0;           // 0: channels / heads
    std::int64_t key_heads = 0;           // heads of keys and values of attention; 0: `heads`
    std::int64_t window = 0;              // the most keys that a row sees; 0: no limit
    std::int64_t layernorm_channels = 0;  // C of layernorms; 0: there are none
    bool queries_apart = false;           // queries and keys lie in a tensor apart from the values
    bool is_fp8 = false;                  // products of blocks are in 8 bits
    // The first of them of which a rank has channels that are not a multiple of 16; 0: none.
    std::int64_t fp8_odd_channels = 0;
    std::string fp8_odd_product{};

    std::int64_t size_of_head() const { return head_size > 0 ? head_size : channels / heads; }
    std::int64_t heads_of_keys() const { return key_heads > 0 ? key_heads : heads; }
};

class DeviceSizes {
  public:
    virtual ~DeviceSizes() = default;

    // Throws a UserError if the device has no operations for these sizes; the message names sizes that it
    // does support.
    virtual void require_sizes(const WorkspaceRequest& /*request*/) const {}
    // The bytes of the operations' scratch memory.
    virtual std::size_t workspace_bytes(const WorkspaceRequest& request) const = 0;

    // What products in 8 bits read: bytes, or the same numbers as bf16 (fp8.h).
    virtual DType fp8_dtype() const { return DType::bf16; }

    // The number of tokens in a micro-batch that keeps the device fully busy.
    virtual std::int64_t default_micro_batch_tokens() const = 0;
    // The bytes of logits to compute at a time. Fewer bytes mean more parts, and the products of each part
    // read and write the whole gradient of the embedding.
    virtual std::int64_t default_logits_bytes() const = 0;
};

}  // namespace llmc
