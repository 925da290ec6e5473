// A step is data: the list of what one rank does in one optimizer step, each action with the buffers it reads
// and writes and the stream it runs on. build_step.h makes the list, executor.h runs it; the checks, the byte
// count, the sizes of the activation buffers and `--print-step` read it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/device/queues.h"
#include "llmc/model/recompute.h"
#include "llmc/model/tensor_parallel.h"
#include "llmc/parallel/sharding.h"
#include "llmc/parallel/stage.h"

namespace llmc {

enum class ActionKind {
    load,                // the tokens of a micro-batch to the device
    gather_parameters,   // a unit's parameters: every rank of the group receives all shards
    release,             // a unit's whole parameters may be overwritten: where they lie, another's turn comes
    zero,                // what the backward pass adds a unit's gradients to = 0
    forward,             // a part of the model; the head's forward alone makes losses only
    forward_rows,        // a part of the model, of a few rows (model/derive_rows.h)
    recompute,           // of a part: what it did not keep of its forward
    backward,            // the same part's; the head's includes its forward, since its logits are not kept
    backward_input,      // a part's: the gradient of its input, and what the next needs
    backward_weight,     // its parameters' gradients, from that
    receive_activation,  // a chunk's input, from the stage before
    send_activation,     // its output, to the stage after
    receive_gradient,    // the gradient of its output, from the stage after
    send_gradient,       // that of its input, to the stage before
    logits,              // the head's forward for the last of these
    round,               // a unit's gradients = its gradient sums, rounded
    accumulate,          // a unit's gradients += its gradient sums, rounded
    reduce_scatter,      // a unit's gradients: each rank receives its shard of the sum over the group
    all_reduce,          // a unit's shard, summed over the groups
    accumulate_shard,    // a unit's shard of the sum += that of this micro-batch
    sum_replicated,    // a unit's gradients of what tensor-parallel ranks each have whole, summed over these
    sum_tied,          // a unit's shard, summed over the stages that have it
    gather_gradients,  // a unit's gradients: every rank receives the summed shards
    reduce_loss,       // the loss summed over ranks, and told to all stages
    square,            // the sums of squares of this rank's shards of all gradients
    gather_squares,    // those of the whole group, and of all stages
    norm,              // the squared norm of all gradients, from the sums
    update,            // AdamW on what a rank has of a unit's optimizer state
};
std::string_view name_of(ActionKind kind);

// What an action reads or writes. Parameters, gradients and optimizer state are a unit's; tokens, residuals
// and saved activations are a micro-batch's and lie in its slot, which a later micro-batch uses again.
enum class BufferRole {
    parameters,       // whole; index: place_of_parameters(unit)
    parameter_shard,  // index: unit; where it is no part of whole ones
    gradients,        // whole; index: place_of_gradients(unit)
    gradient_shard,   // index: unit; where it is no part of whole ones
    gradient_sums,    // index: place_of_gradient_sums(unit); of a micro-batch, in fp32, for gradients in bf16
    optimizer,        // index: unit; master weights and moments
    tokens,           // inputs and targets
    chunk_input,  // index: of a few buffers; the stream before the first part of a chunk that has an input
    residual,     // index: l, the stream behind the l-th of these parts, counted from 1
    saved,  // index: of these parts, from 0, -1 for the one before; what its backward needs beside the streams
    recomputed,  // index: the kind of part; what those that recompute share. unit: the part whose it is now
    output_gradients,  // index: of a few buffers; what the gradients of a part's parameters are made from later
    residual_gradient,  // index: of a few buffers; the gradient that flows back along the stream
    rows,    // index: its width; the stream of a few rows, all along the model; where the first of these lies
    logits,  // of one row
    loss,    // of the micro-batches so far, then of all ranks
    squares,  // the gradients' sums of squares, block by block
    norm,
};

struct BufferUse {
    BufferRole role;
    int index = 0;
    int unit = -1;  // whose numbers these are, for buffers of units and `recomputed`
    bool operator==(const BufferUse&) const = default;
};

struct Action {
    ActionKind kind;
    StreamKind stream = StreamKind::compute;
    int part = -1;         // of the model: forward, recompute, backward
    int unit = -1;         // of all that concerns one unit
    int micro_batch = -1;  // load, forward, backward, logits, and what goes between stages
    int chunk = 0;         // of these: which of the stage's chunks
    int slot = 0;          // where the activations of a chunk and micro-batch lie
    std::vector<BufferUse> reads{};
    std::vector<BufferUse> writes{};
    // The last earlier action of each other stream that must be done first, by their places in the list. A stream runs
    // its own actions in their order.
    std::vector<int> after{};
};

struct Step {
    StagePart part{};
    int stage = 0, stages = 1;
    Sharding sharding{};
    TensorSplit tensor{};
    Recompute recompute{};
    int micro_batches = 0;
    std::vector<Action> actions{};

    const Chunk& chunk_of(const Action& action) const {
        return part.chunks[static_cast<std::size_t>(action.chunk)];
    }
};

// Sets every action's `after`: two actions that use the same buffer, one of them writing it, run in the order of
// the list.
void order_streams(Step& step);

// Stops with a ProgrammingError naming the action that
// - reads an activation its own micro-batch did not write, or that another has overwritten since;
// - reads what another block, or the same one for another micro-batch, has computed where those that recompute share memory;
// - reads parameters that are not gathered or of another unit, or recomputes without any, or gathers over some that are in use;
// - reads or reduces gradients before they are zeroed and complete, or writes them after they were reduced;
// - writes gradients of a unit over another's, or over its own, that have not been reduced or added up;
// - adds to gradient sums of another unit, or loses some before they are in the gradients;
// - updates a unit before the norm, twice, or never;
// - may run before an action of another stream that it depends on is done.
void check_step(const Step& step);
// The lists of all stages together: stops with a ProgrammingError where one receives something else than another sends to
// it, or where they wait for each other for ever.
void check_stages(std::span<const Step> stages);

// How many buffers of each kind the list uses at once.
struct BuffersInFlight {
    int slots = 1;
    int chunk_inputs = 1;
    int residual_gradients = 1;
    int output_gradients = 0;
    int tokens = 1;  // micro-batches whose tokens are needed
    // Of the slots that a backward pass reads: the first part with an input of a chunk that uses it. Other chunks that use
    // it keep the same of their parts. The model's first part has no input.
    std::vector<int> first_parts{};

    int first_part(int slot) const {
        const auto index = static_cast<std::size_t>(slot);
        return index < first_parts.size() ? first_parts[index] : 1;
    }
};
BuffersInFlight buffers_in_flight(const Step& step);

// Bytes of a unit's whole flat buffers, padding included.
struct UnitBytes {
    std::uint64_t parameters = 0, gradients = 0;
    std::uint64_t replicated_gradients = 0;  // of what tensor-parallel ranks each have whole
    std::uint64_t gradient_size = 4;         // of one
};
// What a rank sends where the groups' shards are put together, and where gradients are summed into these: inside its group, and
// then between the groups.
inline std::uint64_t bytes_inside(std::uint64_t whole, const Sharding& sharding) {
    const auto shards = static_cast<std::uint64_t>(sharding.shards);
    return whole / shards * (shards - 1);
}
inline std::uint64_t bytes_across(std::uint64_t whole, const Sharding& sharding) {
    const auto replicas = static_cast<std::uint64_t>(sharding.replicas);
    return 2 * (whole / static_cast<std::uint64_t>(sharding.ranks())) * (replicas - 1);
}

// Bytes this rank sends for gradients and parameters in one run of a list.
struct BytesSent {
    std::uint64_t inside = 0;  // its group
    std::uint64_t across = 0;  // the groups
    std::uint64_t tied = 0;    // between stages that have the same unit: its gradients
    std::uint64_t stages = 0;  // to the stages before and after
    std::uint64_t tensor = 0;  // to the ranks that share each layer

    std::uint64_t total() const { return inside + across + tied + stages + tensor; }
};
BytesSent bytes_sent(const Step& step, std::span<const UnitBytes> units, const ModelLists& lists);

// Whether it takes other ranks to run a list.
bool communicates(const Step& step);

// Whether an action goes between pipeline stages.
bool is_between_stages(ActionKind kind);

// The list as text, a line an action, for --print-step.
std::string to_string(const Step& step);

}  // namespace llmc
